"""exeat.yaml: what does not load says where and what to do; what loads is absolute and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exeat.places import Places, default_places
from exeat.settings import Settings, SettingsError, load_settings, parse_settings
from exeat.upstream import Upstream
from tests.support.rows import every_row

PLACES = Places(config=Path("/c"), state=Path("/s"), run=Path("/r"))
FILE = Path("/etc/exeat/exeat.yaml")


def parse(text: str) -> Settings:
    return parse_settings(text, FILE, PLACES)


@every_row(
    ("line", "said", "sentence"),
    [
        ("lisen: 127.0.0.1:1", "unknown setting 'lisen'", "a misspelt key is not silently the default"),
        ("listen: 127.0.0.1", "ADDRESS:PORT", "a port is needed"),
        ("listen: localhost:3128", "numeric address", "a name could resolve to anywhere"),
        ("listen: 127.0.0.1:443", "another port", "our listeners' ports cannot be dialled, so this closes the web"),
        ("listen: 127.0.0.1:80", "another port", "the same for 80"),
        ("listen: 127.0.0.1:70000", "ADDRESS:PORT", "no such port"),
        ("listen: 3128", "wrong form", "a bare number has no address"),
        ("listen: true", "wrong form", "a boolean is not an address"),
        ("state: [a]", "state has the wrong form", "a path is a string"),
        ("policy: {a: b}", "policy has the wrong form", "a path is a string"),
        ("workers: 0", "1 to 64", "no worker at all would serve nobody"),
        ("workers: 65", "1 to 64", "more than any machine needs"),
        ("workers: true", "1 to 64", "True is 1 to Python, not to people"),
        ("workers: two", "wrong form", "a word is not a number"),
        ("executors: -1", "1 to 64", "negative"),
        ("admins: [root]", "list of uids", "names are not resolved"),
        ("admins: [-1]", "list of uids", "no such uid"),
        ("admins: [true]", "list of uids", "True is 1 to Python"),
        ("admins: 0", "wrong form", "a list is needed"),
        ("self_addresses: [here]", "not an address", "a name is not an address"),
        ("internal_ranges: [10.0.0.1/8]", "not an address", "host bits set: which network was meant?"),
        ("key: keys/store.key", "wrong form", "the kind of key must be said"),
        ("key: {}", "one of {file: PATH}", "no key"),
        ("key: {file: a, passphrase_file: b}", "one of {file: PATH}", "two keys"),
        ("key: {env: KEY}", "one of {file: PATH}", "a key does not come from the environment"),
        ("key: {wrapped: a}", "one of {file: PATH}", "nobody to unwrap it"),
        ("key: {by: {kind: aws-kms}}", "one of {file: PATH}", "nothing to unwrap"),
        ("key: {wrapped: a, by: 7}", "by: is a mapping", "a number is no service"),
        ("key: {wrapped: a, by: {kind: vault}}", "vault-transit", "a source is no key service"),
        ("key: {wrapped: a, by: {kind: aws-kms, key: k, region: r}}", "missing key auth", "opened by nothing"),
        (
            "key: {wrapped: a, by: {kind: aws-kms, key: '../k', region: r, "
            "auth: {keys: {access_key_id: 'env:A', secret_access_key: 'env:B'}}}}",
            "a key of KMS is",
            "no name of a key",
        ),
        (
            "key: {wrapped: a, by: {kind: vault-transit, key: k, address: 'https://v.corp.example', "
            "auth: {token: 'store:t'}}}",
            "the store cannot open",
            "the store would open itself",
        ),
        (
            "key: {wrapped: a, by: {kind: vault-transit, key: k, address: 'http://v.corp.example', "
            "auth: {token: 'env:T'}}}",
            "clear text",
            "the key would come in clear text",
        ),
        ("key: {systemd: ../x}", "letters, digits", "a credential is a name, no path"),
        ("key: {systemd: 7}", "one of {file: PATH}", "a credential is a name, no number"),
        ("workers: 1\nworkers: 2", "workers", "a repeated key is an error, not the last one"),
        ("listen: [", "", "not YAML"),
        ("upstream: http://proxy.corp.example:3128", "upstream is {proxy: URL", "the parts are named"),
        ("upstream:", "upstream is {proxy: URL", "nothing is not a proxy"),
        ("upstream: {}", "needs proxy", "no proxy"),
        ("upstream: {ca: corp.pem}", "needs proxy", "a CA alone changes nothing"),
        ("upstream: {proxy: 3128}", "proxy is a URL", "a number"),
        ("upstream: {proxy: 'proxy.corp.example:3128'}", "proxy is a URL", "the scheme is said"),
        ("upstream: {proxy: 'socks5://proxy.corp.example:1080'}", "proxy is a URL", "another protocol"),
        ("upstream: {proxy: 'https://proxy.corp.example:443'}", "only http://", "TLS to the proxy is not spoken"),
        ("upstream: {proxy: 'http://u:p@proxy.corp.example:1'}", "no user or password", "a secret in a settings file"),
        ("upstream: {proxy: 'http://proxy.corp.example'}", "a port", "no port is guessed"),
        ("upstream: {proxy: 'http://proxy:3128'}", "single-label", "a search list would decide where it is"),
        ("upstream: {proxy: 'http://proxy.corp.example:3128/x'}", "HOST:PORT", "a path"),
        ("upstream: {proxy: 'http://0177.0.0.1:3128'}", "canonical", "an address in another spelling"),
        ("upstream: {proxy: 'http://p.corp.example:1', port: 3128}", "unknown key 'port'", "a misspelt part"),
        ("upstream: {proxy: 'http://p.corp.example:1', credentials: {}}", "unknown key 'credentials'", "the plural"),
        ("upstream: {proxy: 'http://p.corp.example:1', credential: u}", "{username: NAME", "no file"),
        (
            "upstream: {proxy: 'http://p.corp.example:1', credential: {username: u}}",
            "password_file: PATH",
            "half of it",
        ),
        ("upstream: {proxy: 'http://p.corp.example:1', credential: {password_file: f}}", "{username: NAME", "half"),
        (
            "upstream: {proxy: 'http://p.corp.example:1', credential: {username: u, password: canary}}",
            "a password does not stand in this file",
            "settings are readable for others",
        ),
        (
            "upstream: {proxy: 'http://p.corp.example:1', credential: {username: u, password_file: f, file: g}}",
            "or {file: PATH}",
            "two ways at once contradict each other",
        ),
        (
            "upstream: {proxy: 'http://p.corp.example:1', credential: {username: 'a:b', password_file: f}}",
            "no colon",
            "Basic could not tell where the name ends",
        ),
        (
            "upstream: {proxy: 'http://p.corp.example:1', credential: {username: u, password_file: [f]}}",
            "password_file has the wrong form",
            "a path is a string",
        ),
        ("upstream: {proxy: 'http://p.corp.example:1', ca: true}", "path of a PEM file", "a path is a string"),
        ("upstream: {proxy: 'http://p.corp.example:1', except: git.example}", "list", "a list is needed"),
        ("upstream: {proxy: 'http://p.corp.example:1', except: ['*']}", "an exception is", "then nothing goes there"),
        ("upstream: {proxy: 'http://p.corp.example:1', except: [localhost]}", "an exception is", "single label"),
        ("upstream: {proxy: 'http://p.corp.example:1', except: [10.0.0.0/8]}", "an exception is", "no networks"),
        ("upstream: {proxy: 'http://p.corp.example:1', except: ['*.10.0.0.1']}", "an exception is", "no labels there"),
        ("upstream: {proxy: 'http://p.corp.example:1', except: [5]}", "an exception is", "a number"),
        (
            "upstream: {proxy: 'http://p.corp.example:1', except: [Git.example.com, git.example.com.]}",
            "stands here twice",
            "the same name in two spellings",
        ),
        ("upstream: {proxy: 'http://127.0.0.1:3128'}", "the gateway itself", "it is what listen: opens by default"),
        (
            "listen: 0.0.0.0:3130\nupstream: {proxy: 'http://127.0.0.1:3130'}",
            "the gateway itself",
            "listening everywhere is listening there",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_its_place(line: str, said: str, sentence: str) -> None:
    """Each error is one line: file, line and column of the key, and what is wanted."""
    with pytest.raises(SettingsError) as caught:
        parse(f"version: 1\n{line}\n")
    text = str(caught.value)
    assert re.match(rf"{FILE}:[23]:\d+: ", text), (text, sentence)
    assert said in text, sentence


@pytest.mark.parametrize("text", ["", "\n", "version: 2\n", "listen: 127.0.0.1:1\n", "- a\n", "version: '1'\n", "x"])
def test_a_file_that_says_nothing_names_init(text: str) -> None:
    """Empty, another version, or not a mapping: the sentence names the file and `exeat init`."""
    with pytest.raises(SettingsError, match="exeat init") as caught:
        parse(text)
    assert str(FILE) in str(caught.value)


def test_a_missing_file_names_init(tmp_path: Path) -> None:
    """There are no settings yet: the command that writes them is named."""
    with pytest.raises(SettingsError, match="run 'exeat init'"):
        load_settings(tmp_path / "exeat.yaml", PLACES)


def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    """A folder in its place, or bytes that are not UTF-8: the system's reason, not a traceback."""
    with pytest.raises(SettingsError, match="Is a directory"):
        load_settings(tmp_path, PLACES)
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"version: 1\nstate: \xff\n")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_settings(broken, PLACES)


def test_defaults_are_complete() -> None:
    """`version: 1` alone is a whole installation."""
    settings = parse("version: 1\n")
    assert settings.listen == ("127.0.0.1", 3128)
    assert settings.state == Path("/s")
    assert settings.log == Path("/s/log")
    assert settings.run == Path("/r")
    assert settings.policy == Path("/etc/exeat/policy.yaml")
    assert settings.credentials == Path("/etc/exeat/credentials.yaml")
    assert settings.key_file == Path("/etc/exeat/keys/store.key")
    assert settings.passphrase_file is None
    assert (settings.workers, settings.executors) == (1, 1)


def test_what_is_written_is_taken() -> None:
    """Every key has its effect; relative paths are relative to the file; addresses are normalised."""
    settings = parse(
        'version: 1\nlisten: "[::1]:3130"\nstate: st\nlog: /var/log/exeat\nrun: ../run\npolicy: p.d\n'
        "credentials: c.yaml\nkey: {passphrase_file: pass}\nworkers: 2\nexecutors: 3\nadmins: [1000]\n"
        'self_addresses: ["2001:DB8::1"]\ninternal_ranges: [192.0.2.0/24]\n'
    )
    assert settings.listen == ("::1", 3130)
    assert settings.state == Path("/etc/exeat/st")
    assert settings.log == Path("/var/log/exeat")
    assert settings.policy == Path("/etc/exeat/p.d")
    assert settings.key_file is None
    assert settings.passphrase_file == Path("/etc/exeat/pass")
    assert (settings.workers, settings.executors, settings.admins) == (2, 3, (1000,))
    assert settings.self_addresses == ("2001:db8::1",)
    assert settings.internal_ranges == ("192.0.2.0/24",)
    assert parse("version: 1\nlisten: none\n").listen is None


def test_the_place_of_a_fault_inside_upstream_is_its_own() -> None:
    """The line and column are those of the part, not of `upstream:`; no value that may be a secret is repeated."""
    text = (
        "version: 1\nupstream:\n  proxy: http://proxy.corp.example:3128\n"
        "  credential:\n    username: exeat\n    password: canary-secret\n"
    )
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{FILE}:6:5: ")
    assert "canary" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        parse("version: 1\nupstream: {proxy: 'http://exeat:canary-secret@proxy.corp.example:3128'}\n")
    assert "canary" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        parse("version: 1\nupstream:\n  proxy: http://proxy.corp.example:3128\n  except: [a.example,\n    b c]\n")
    assert str(caught.value).startswith(f"{FILE}:5:5: ")


def test_a_whole_upstream_is_taken() -> None:
    """Paths are absolute, names canonical; the credential's file is private and the CA's need not be."""
    whole = parse(
        "version: 1\nupstream:\n  proxy: http://Proxy.corp.example:3128/\n"
        "  credential: {username: exeat, password_file: secrets/proxy}\n  ca: /pki/corp.pem\n"
        "  except: [Git.corp.example, '*.svc.example.', 10.1.2.3, '2001:db8::1']\n"
    )
    assert whole.upstream == Upstream(
        host="proxy.corp.example",
        port=3128,
        username="exeat",
        credential_file=Path("/etc/exeat/secrets/proxy"),
        ca_file=Path("/pki/corp.pem"),
        direct=("git.corp.example", "*.svc.example", "10.1.2.3", "2001:db8::1"),
    )
    assert Path("/etc/exeat/secrets/proxy") in whole.private
    one_file = parse("version: 1\nupstream: {proxy: 'http://[fd00::1]:3128', credential: {file: pair}}\n").upstream
    assert one_file == Upstream(host="fd00::1", port=3128, credential_file=Path("/etc/exeat/pair"))
    assert parse("version: 1\n").upstream is None
    assert parse("version: 1\nupstream: {proxy: 'http://127.0.0.1:3129'}\n").upstream is not None


def test_all_that_is_private_is_named() -> None:
    """State, log, sockets, settings, policy, credentials and keys: what no sandbox and no worker may see."""
    settings = parse("version: 1\nlog: /l\npolicy: /p/policy.yaml\ncredentials: /k/c.yaml\nkey: {file: /key/store}\n")
    assert {str(path) for path in settings.private} == {
        "/s", "/l", "/r", "/etc/exeat", "/p/policy.yaml", "/k/c.yaml", "/key"
    }  # fmt: skip
    assert Path("/pass") in parse("version: 1\nkey: {passphrase_file: /pass}\n").private


# --- where files lie by default -------------------------------------------------------------------------------


def test_relative_xdg_variables_are_ignored() -> None:
    """The specification calls them invalid; following them would read files from the working directory."""
    places = default_places(
        {"HOME": "/home/a", "XDG_CONFIG_HOME": "evil", "XDG_STATE_HOME": ".", "XDG_RUNTIME_DIR": ""}, 7
    )
    assert places.config == Path("/home/a/.config/exeat")
    assert places.state == Path("/home/a/.local/state/exeat")
    assert places.run == Path("/home/a/.local/state/exeat/run")


def test_a_user_has_xdg_folders_and_root_the_systems() -> None:
    """Absolute XDG variables are followed for a user; for root they are not."""
    xdg = {"HOME": "/h", "XDG_CONFIG_HOME": "/x/c", "XDG_STATE_HOME": "/x/s", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert default_places(xdg, 7) == Places(
        config=Path("/x/c/exeat"), state=Path("/x/s/exeat"), run=Path("/run/user/7/exeat")
    )
    assert default_places(xdg, 0) == Places(
        config=Path("/etc/exeat"), state=Path("/var/lib/exeat"), run=Path("/run/exeat-gateway")
    )
