"""exeat.yaml: what does not load says where and what to do; what loads is absolute and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exeat.places import Places, default_places
from exeat.settings import Settings, SettingsError, load_settings, parse_settings

PLACES = Places(config=Path("/c"), state=Path("/s"), run=Path("/r"))
FILE = Path("/etc/exeat/exeat.yaml")


def parse(text: str) -> Settings:
    return parse_settings(text, FILE, PLACES)


@pytest.mark.parametrize(
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
        ("key: {}", "either {file: PATH}", "no key"),
        ("key: {file: a, passphrase_file: b}", "either {file: PATH}", "two keys"),
        ("key: {env: KEY}", "either {file: PATH}", "a key does not come from the environment"),
        ("workers: 1\nworkers: 2", "workers", "a repeated key is an error, not the last one"),
        ("listen: [", "", "not YAML"),
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
