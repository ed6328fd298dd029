"""`exeat env`: what each format says, read back by what will read it; and which variables there are at all."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exeat.environment import (
    ADDING_CA_VARIABLES,
    FORMATS,
    PROXY_VARIABLES,
    REMOVED_VARIABLES,
    REPLACING_CA_VARIABLES,
    Format,
    client_environment,
    render,
)
from tests.support.properties import tried

URL = "http://session:xt_4f9c@127.0.0.1:3128"
VARIABLES = client_environment(proxy_url=URL, ca_file="/run/exeat/ca.pem", bundle_file="/run/exeat/bundle.pem")
HARD = {
    "PLAIN": "a",
    "EMPTY": "",
    "SPACE": " two  words ",
    "QUOTES": 'it\'s "so"',
    "DOLLAR": "$(id) `id` ${HOME} $HOME",
    "HASH": "a # b",
    "BACKSLASH": "a\\b\\n",
    "STAR": "* ? [a] ~ ! & ; | < >",
    "COLON": "key: [value, {x: y}]",
    "YES": "yes",
    "NUMBER": "0123",
}


def read_sh(text: str) -> dict[str, str]:
    """What /bin/sh has in its environment after it read `text`, and nothing that was there before."""
    script = text + "\nexec env -0"
    result = subprocess.run(["/bin/sh", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True)
    pairs = [entry.split("=", 1) for entry in result.stdout.decode().split("\0") if entry]
    return {name: value for name, value in pairs if name not in ("PATH", "PWD", "SHLVL", "_")}


def read_dotenv(text: str) -> dict[str, str]:
    """As dotenv libraries do: single quotes are literal; double ones know escapes and expand unescaped dollars."""
    found = {}
    for line in text.splitlines():
        if literal := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)='([^'\\]*)'", line):
            found[literal[1]] = literal[2]
            continue
        match = re.fullmatch(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\$]|\\.)*)"', line)
        assert match is not None, line
        found[match[1]] = re.sub(r"\\(.)", lambda escape: {"n": "\n", "t": "\t"}.get(escape[1], escape[1]), match[2])
    return found


def read_docker(text: str) -> dict[str, str]:
    """`docker run --env-file`: everything after the first = is the value, as it stands."""
    return dict(line.split("=", 1) for line in text.splitlines())


def read_k8s(text: str) -> dict[str, str]:
    """The `env:` list of a container: strings, in which $(NAME) refers to a variable and $$ is a dollar."""
    entries = yaml.safe_load(text)
    assert all(isinstance(entry[key], str) for entry in entries for key in ("name", "value"))
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", entry["value"]) for entry in entries)
    return {entry["name"]: entry["value"].replace("$$", "$") for entry in entries}


def read_fish(text: str) -> dict[str, str]:
    """Single quotes, in which fish knows only \\\\ and \\' (fish documentation, Quotes)."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"set -gx (\w+) '((?:[^'\\]|\\[\\'])*)'", line)
        assert match is not None, line
        found[match[1]] = re.sub(r"\\([\\'])", r"\1", match[2])
    return found


READERS = {
    "sh": read_sh,
    "fish": read_fish,
    "json": json.loads,
    "dotenv": read_dotenv,
    "docker": read_docker,
    "k8s": read_k8s,
}


def test_every_format_has_a_reader_here() -> None:
    """A format that is added without a reader in this file is not tested."""
    assert set(READERS) == set(FORMATS)


@pytest.mark.parametrize("format_", FORMATS)
def test_each_format_says_exactly_the_variables(format_: Format) -> None:
    """What was put in comes out, nothing more, nothing less."""
    assert READERS[format_](render(VARIABLES, format_)) == VARIABLES


@pytest.mark.parametrize("format_", FORMATS)
def test_hard_values_are_values_and_not_commands(format_: Format) -> None:
    """Quotes, dollars, hashes and YAML words stay text in every format."""
    assert READERS[format_](render(HARD, format_)) == HARD


@tried(200)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30))
def test_any_printable_value_survives(value: str) -> None:
    """All formats that need no other process, for any printable ASCII."""
    for format_ in FORMATS:
        if format_ != "sh":
            assert READERS[format_](render({"NAME": value}, format_)) == {"NAME": value}


@tried(15)
@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30), max_size=20))
def test_any_printable_value_survives_a_shell(values: list[str]) -> None:
    """The same for sh, many at a time."""
    variables = {f"V{index}": value for index, value in enumerate(values)}
    assert read_sh(render(variables, "sh")) == variables


def test_a_line_break_never_makes_another_variable() -> None:
    """The docker format has no quoting, so a value with a line break is refused there instead of becoming two lines."""
    with pytest.raises(ValueError, match="NAME"):
        render({"NAME": "a\nEVIL=1"}, "docker")
    for format_ in ("sh", "json", "dotenv", "k8s"):
        assert READERS[format_](render({"NAME": "a\nEVIL=1"}, format_)) == {"NAME": "a\nEVIL=1"}


def test_variables_that_undo_the_rest_are_known() -> None:
    """What must go is never set, and what is set is never also removed."""
    assert not set(VARIABLES) & set(REMOVED_VARIABLES)


def test_each_group_points_to_its_own_file() -> None:
    """Variables that replace the client's roots get the bundle; those that add to them get our root alone."""
    assert {VARIABLES[name] for name in REPLACING_CA_VARIABLES} == {"/run/exeat/bundle.pem"}
    assert {VARIABLES[name] for name in ADDING_CA_VARIABLES} == {"/run/exeat/ca.pem"}
    assert {VARIABLES[name] for name in PROXY_VARIABLES} == {URL}


def test_tools_that_read_one_name_only_find_it() -> None:
    """C031: both cases for those that read one, and the names that Node, pip, npm, yarn, cargo and git have themselves.

    Java has no variable that could hold it all (docs/clients.md).
    """
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        assert VARIABLES[name] == VARIABLES[name.upper()] == URL
    assert VARIABLES["no_proxy"] == VARIABLES["NO_PROXY"]
    for name in ("PIP_PROXY", "npm_config_proxy", "npm_config_https_proxy", "YARN_HTTPS_PROXY", "CARGO_HTTP_PROXY"):
        assert VARIABLES[name] == URL
    assert VARIABLES["NODE_USE_ENV_PROXY"] == "1"
    assert VARIABLES["GIT_HTTP_PROXY_AUTHMETHOD"] == "basic"


def test_only_loopback_goes_round_the_proxy() -> None:
    """NO_PROXY holds loopback and nothing else: no wildcard, no internal range, not the help host (RULINGS 8.2)."""
    for name in ("NO_PROXY", "no_proxy"):
        assert VARIABLES[name].split(",") == ["localhost", "127.0.0.1", "::1"]


def test_git_is_configured_without_a_file() -> None:
    """As many GIT_CONFIG_KEY_n and VALUE_n as GIT_CONFIG_COUNT says; ssh addresses of github.com become https."""
    count = int(VARIABLES["GIT_CONFIG_COUNT"])
    pairs = [(VARIABLES[f"GIT_CONFIG_KEY_{n}"], VARIABLES[f"GIT_CONFIG_VALUE_{n}"]) for n in range(count)]
    assert f"GIT_CONFIG_KEY_{count}" not in VARIABLES
    assert ("http.proxy", URL) in pairs
    assert ("http.sslCAInfo", "/run/exeat/bundle.pem") in pairs
    assert ("url.https://github.com/.insteadOf", "git@github.com:") in pairs


def test_clients_that_take_the_address_in_pieces_get_the_same_one() -> None:
    """Cloud SDKs and Java want host, port and password apart, brackets removed from IPv6."""
    variables = client_environment(
        proxy_url="http://session:tok@[::1]:3130", ca_file="/c", bundle_file="/b", java_trust_store="/t.p12"
    )
    assert variables["CLOUDSDK_PROXY_ADDRESS"] == "::1"
    assert variables["CLOUDSDK_PROXY_PORT"] == "3130"
    assert variables["CLOUDSDK_PROXY_PASSWORD"] == "tok"
    assert "-Dhttps.proxyPort=3130" in variables["JAVA_TOOL_OPTIONS"]
    assert "/t.p12" in variables["JAVA_TOOL_OPTIONS"]
    assert "JAVA_TOOL_OPTIONS" not in VARIABLES
