"""Go modules, crate index entries and Maven coordinates: names that paths alone cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import FactsRefused, RequestFacts
from rules.operations import HEAD_MATCHERS, check_head_params
from tests.support.properties import tried
from tests.support.rows import every_row

EXAMPLES = tried(300)
SUMS = {"sumdb": ["sum.golang.org"]}
DATABASE = {"database": True}


def asked(path: str) -> RequestFacts:
    return RequestFacts.build(
        method="GET", scheme="https", tunnel=None, target=f"https://a.test{path}", headers=(("host", "a.test"),)
    )


def told(matcher: str, path: str, params: dict[str, Any] | None = None) -> object:
    return HEAD_MATCHERS[matcher](params or {}, asked(path))


@every_row(
    ("path", "why"),
    [
        ("/", "nothing"),
        ("/@latest", "no module"),
        ("/@v/list", "no module"),
        ("/example.com/@v", "no file"),
        ("/example.com/@v/", "an empty file"),
        ("/example.com/m/@v/v1.0.0", "no kind"),
        ("/example.com/m/@v/v1.0.0.exe", "another kind"),
        ("/example.com/m/@v/main.zip", "an archive of a branch"),
        ("/example.com/m/@v/.info", "no version"),
        ("/example.com/m/@v/a/v1.0.0.info", "a slash in a version"),
        ("/example.com/m/@v/list/list", "two files"),
        ("/example/m/@v/list", "a first element without a dot"),
        ("/Example.com/m/@v/list", "plain upper case"),
        ("/example.com/!M/@v/list", "a marked upper case"),
        ("/example.com/!!m/@v/list", "two marks"),
        ("/example.com/!1/@v/list", "a marked digit"),
        ("/example.com/m!/@v/list", "a mark at the end"),
        ("/example.com/.m/@v/list", "an element that starts with a dot"),
        ("/example.com/m./@v/list", "an element that ends with a dot"),
        ("/example.com/%C3%A4/@v/list", "another letter than ASCII has"),
        ("/example.com/m%2Fn/@v/list", "an encoded slash"),
        ("/example.com/m/@v/v1.0.0%0A.info", "a line break"),
    ],
)
def test_what_the_go_protocol_does_not_ask_is_no_module(path: str, why: str) -> None:
    """Expect None, or a target that is refused before anything looks at it."""
    try:
        assert told("go_module", path) is None, why
    except FactsRefused:
        assert "%" in path


@every_row(
    ("path", "params", "why"),
    [
        ("/sumdb/sum.attacker.test/supported", SUMS, "another database"),
        ("/sumdb/sum.golang.org", SUMS, "nothing asked"),
        ("/sum.golang.org/supported", SUMS, "not under sumdb"),
        ("/lookup/example.com/m", DATABASE, "no version"),
        ("/lookup/example.com/m@main", DATABASE, "a branch"),
        ("/lookup/m@v1.0.0", DATABASE, "no module"),
        ("/lookup/@v1.0.0", DATABASE, "an empty module"),
        ("/tile/8/0", DATABASE, "no number"),
        ("/tile/8/0/12", DATABASE, "two digits"),
        ("/tile/8/0/001/17", DATABASE, "a part of a whole tile"),
        ("/tile/8/0/001.p/x", DATABASE, "a width that is no number"),
        ("/tile/8/index/001", DATABASE, "another level"),
        ("/tile/8/0/x001/x001/x001/x001/x001/x001/x001/x001/001", DATABASE, "too deep"),
        ("/latest/x", DATABASE, "something behind"),
        ("/example.com/m/@v/list", DATABASE, "a module"),
    ],
)
def test_what_a_checksum_database_does_not_serve_is_refused(path: str, params: dict[str, Any], why: str) -> None:
    """Expect None: the log has lookups, tiles and its head, and nothing else."""
    assert told("go_module", path, params) is None, why


def test_a_module_is_named_as_people_write_it() -> None:
    """Expect upper case back, and the version where one is named."""
    assert told("go_module", "/github.com/!burnt!sushi/toml/@v/v1.4.0.mod") == {
        "module": "github.com/BurntSushi/toml",
        "version": "v1.4.0",
    }
    assert told("go_module", "/example.com/m/@latest") == {"module": "example.com/m"}
    assert told("go_module", "/example.com/m/v2/@v/v2.0.0-!r!c1.info") == {
        "module": "example.com/m/v2",
        "version": "v2.0.0-RC1",
    }
    assert told("go_module", "/lookup/example.com/!m@v1.0.0", DATABASE) == {
        "module": "example.com/M",
        "version": "v1.0.0",
    }
    assert told("go_module", "/tile/8/0/x001/234.p/17", DATABASE) == {}


@EXAMPLES
@given(st.lists(st.text(alphabet="ab!A.-_~@v", min_size=1, max_size=6), min_size=1, max_size=5))
def test_two_modules_never_share_a_name(parts: list[str]) -> None:
    """Expect a module's name to lead back to the very path that named it."""
    path = "/" + "/".join(parts) + "/@v/list"
    try:
        found = HEAD_MATCHERS["go_module"]({}, asked(path))
    except FactsRefused:
        return
    if found is not None:
        module = found["module"]
        assert isinstance(module, str)
        again = "".join(f"!{char.lower()}" if char.isupper() else char for char in module)
        assert path == f"/{again}/@v/list"


@every_row(
    ("path", "why"),
    [
        ("/serde", "no directory"),
        ("/1/ab", "two letters under one"),
        ("/2/a", "one letter under two"),
        ("/3/b/abc", "another first letter"),
        ("/3/abc", "three letters without their first"),
        ("/se/rd/tokio", "another name"),
        ("/se/rd/serde/x", "something behind"),
        ("/x/se/rd/serde", "something before"),
        ("/SE/RD/SERDE", "upper case"),
        ("/se/rd/serd%C3%A9", "another letter than ASCII has"),
        ("/se/rd/se.rde", "a dot"),
        ("/__/ab/__ab", "a name that starts with a mark"),
        ("/co/nf/config.json", "a dot in a name"),
    ],
)
def test_what_does_not_lie_where_its_name_says_is_no_entry(path: str, why: str) -> None:
    """Expect None: the directories follow from the name."""
    assert told("crates_index", path) is None, why


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd", "serde", "serde-json", "serde_json", "x1"])
def test_a_crate_is_one_however_it_is_spelt(name: str) -> None:
    """Expect the entry's crate with hyphens, since the index keeps both spellings for one crate."""
    folder = {1: "1", 2: "2", 3: f"3/{name[0]}"}.get(len(name), f"{name[:2]}/{name[2:4]}")
    assert told("crates_index", f"/{folder}/{name}") == {"crate": name.replace("_", "-")}


@every_row(
    ("path", "why"),
    [
        ("/org/a/1.0/", "a listing"),
        ("/org/a/1.0/b-1.0.jar", "another artefact's file"),
        ("/org/a/1.0/a-1.1.jar", "another version's file"),
        ("/org/a/1.0/a-1.0", "no extension"),
        ("/org/a/1.0/a-1.0jar", "no dot"),
        ("/a/1.0/a-1.0.jar", "no group"),
        ("/maven-metadata.xml", "no artefact"),
        ("/a/maven-metadata.xml", "no group"),
        ("/org/a/maven-metadata.xml.exe", "another file"),
        ("/org/a/1.0-SNAPSHOT/a-1.0-2024.jar", "half a timestamp"),
        ("/org/a/1.0/a-1.0-20240101.010101-1.jar.sh/x", "something behind"),
        ("/org/.a/1.0/.a-1.0.jar", "a name that starts with a dot"),
        ("/org/a%2Fb/1.0/b-1.0.jar", "an encoded slash"),
        ("/org/a/1.0/a-1.0.jar%0A", "a line break"),
    ],
)
def test_what_is_no_file_of_an_artefact_is_refused(path: str, why: str) -> None:
    """Expect None, or a target that is refused before anything looks at it."""
    try:
        assert told("maven", path) is None, why
    except FactsRefused:
        assert "%" in path


@pytest.mark.parametrize(
    ("path", "package", "version"),
    [
        ("/org/a/1.0/a-1.0.jar", "org:a", "1.0"),
        ("/org/x/y/a/1.0/a-1.0.pom.sha256.asc", "org.x.y:a", "1.0"),
        ("/org/a-b/1.0-rc.1/a-b-1.0-rc.1-sources.jar", "org:a-b", "1.0-rc.1"),
        ("/org/a/1.0/a-1.0-linux-x86_64.tar.gz", "org:a", "1.0"),
        ("/org/a/1.0-SNAPSHOT/a-1.0-20240101.010101-12.jar", "org:a", "1.0-SNAPSHOT"),
        ("/org/a/1.0-SNAPSHOT/a-1.0-20240101.010101-12-tests.jar.md5", "org:a", "1.0-SNAPSHOT"),
        ("/org/a/1.0-SNAPSHOT/maven-metadata.xml", "org:a", "1.0-SNAPSHOT"),
        ("/org/a/maven-metadata.xml.sha1", "org:a", None),
    ],
)
def test_an_artefact_is_named_by_its_coordinates(path: str, package: str, version: str | None) -> None:
    """Expect group, artefact and version as a build file writes them."""
    wanted = {"package": package} if version is None else {"package": package, "version": version}
    assert told("maven", path) == wanted
    assert told("maven", f"/maven2{path}", {"prefix": ["maven2"]}) == wanted
    assert told("maven", path, {"prefix": ["maven2"]}) is None


@pytest.mark.parametrize(
    ("matcher", "params"),
    [
        ("go_module", {"sumdb": "sum.golang.org"}),
        ("go_module", {"sumdb": []}),
        ("go_module", {"sumdb": ["x"], "database": True}),
        ("go_module", {"database": False}),
        ("go_module", {"other": 1}),
        ("crates_index", {"prefix": ["x"]}),
        ("maven", {"prefix": [1]}),
        ("maven", {"other": 1}),
    ],
)
def test_parameters_that_mean_nothing_are_refused(matcher: str, params: dict[str, Any]) -> None:
    """Expect a mistake in a service file to be told when it is loaded."""
    with pytest.raises(ValueError, match=r"."):
        check_head_params(matcher, params)
