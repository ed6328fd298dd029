"""Host names, ports, paths and queries: one spelling is taken, everything else is refused and not repaired."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.names import Host, InvalidName, parse_authority
from rules.paths import CanonicalPath, InvalidTarget, Query
from tests.support.properties import tried
from tests.support.rows import every_row

REFUSED = [
    ("", "empty"), ("ok", "single label"), (".", "no label"), ("ok..test", "empty label"), (".ok.test", "empty label"),
    ("ok.test..", "two trailing dots"), ("-a.test", "leading hyphen"), ("a-.test", "trailing hyphen"),
    ("a b.test", "space"), ("a\0.test", "NUL"), ("a%2e.test", "percent"), ("a/b.test", "slash"),
    ("a@b.test", "userinfo"),
    ("a:1.test", "colon"), ("a" * 64 + ".test", "label too long"), (".".join(["a" * 60] * 5), "name too long"),
    ("127.1", "short"), ("2130706433", "decimal"), ("0x7f000001", "hexadecimal"), ("0177.0.0.1", "octal"),
    ("1.2.3.4.5", "five parts"), ("256.0.0.1", "out of range"), ("01.2.3.4", "leading zero"), ("ok.0x", "numeric last"),
    ("::1", "IPv6 without brackets"), ("[::1", "open bracket"), ("[::1%25eth0]", "zone"),
    ("[ok.test]", "name in brackets"),
    ("[1.2.3.4]", "IPv4 in brackets"), ("\uff4f\uff4b.test", "full width"), ("ok\u3002test", "ideographic dot"),
    ("\u212a.test", "Kelvin sign"), ("xn--.test", "empty A-label"), ("xn--a.test", "not an A-label"),
    ("xn--abc-.test", "encodes ASCII"), ("a\u200d.test", "joiner"), ("a\u00ad.test", "soft hyphen"),
]  # fmt: skip


@every_row(("raw", "why"), REFUSED)
def test_a_name_in_any_other_spelling_is_refused(raw: str, why: str) -> None:
    """InvalidName with a fixed sentence that repeats nothing."""
    with pytest.raises(InvalidName) as caught:
        Host.parse(raw)
    assert len(raw) < 3 or raw not in str(caught.value), why


TAKEN = [
    ("ok.test", "ok.test"), ("OK.Test.", "ok.test"), ("bücher.test", "xn--bcher-kva.test"), ("10.0.0.1", "10.0.0.1"),
    ("BÜCHER.test", "xn--bcher-kva.test"), ("[::1]", "::1"), ("[0:0::1]", "::1"), ("_dmarc.ok.test", "_dmarc.ok.test"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "text"), TAKEN)
def test_case_and_trailing_dot_are_normalised(raw: str, text: str) -> None:
    """RULINGS 11.12; A-labels are the one form."""
    host = Host.parse(raw)
    assert host.text == text
    assert Host.parse(host.authority) == host


@tried(400)
@given(st.text(max_size=30))
def test_a_parsed_host_is_a_fixed_point(raw: str) -> None:
    """Whatever is taken parses to itself again, and holds only host characters."""
    try:
        host = Host.parse(raw)
    except InvalidName:
        return
    assert Host.parse(host.authority) == host
    assert host.text.isascii()
    assert host.text == host.text.lower()
    assert not set(host.text) & set(" /@%#?\\\0")


@pytest.mark.parametrize(
    "raw",
    ["ok.test:", "ok.test:0", "ok.test:01", "ok.test:+1", "ok.test:1 ", "ok.test:65536", "ok.test:\uff11", "[::1]x:1"],
)
def test_a_port_has_one_spelling(raw: str) -> None:
    """1 to 65535 in ASCII digits, no sign, no leading zero."""
    with pytest.raises(InvalidName):
        parse_authority(raw, 443)


@tried(400)
@given(st.text(alphabet="/.%25eEfFaAbB07zZ-_~;\\ ?#\0é", max_size=20))
def test_a_parsed_path_has_no_second_reading(raw: str) -> None:
    """No dot segments, no empty segments inside, no backslash, no control: in no decoding (D, T25)."""
    try:
        path = CanonicalPath.parse("/" + raw)
    except InvalidTarget:
        return
    assert path.raw == "/" + raw
    pieces = [piece for segment in path.segments for piece in segment.split("/")]
    assert "." not in pieces
    assert ".." not in pieces
    assert "" not in path.segments[:-1]
    assert not any(char in segment for segment in path.segments for char in "\\\0\r\n%;")


@pytest.mark.parametrize("raw", ["/%70", "/%2D", "/%5F", "/%2e%2e", "/%41"])
def test_what_needs_no_encoding_is_refused_encoded(raw: str) -> None:
    """Two spellings of one path are one too many."""
    with pytest.raises(InvalidTarget):
        CanonicalPath.parse(raw)


def test_a_tilde_may_be_encoded() -> None:
    """As apt sends it in the names of package files; both spellings read the same for everyone."""
    assert CanonicalPath.parse("/a_1%7edeb12.deb").segments == CanonicalPath.parse("/a_1~deb12.deb").segments


@pytest.mark.parametrize("raw", ["a=%zz", "a=%", "a=1;b=2", "a=\x00", "a= b", "a=#", "a=é", "a=%ff", "a" * 9000])
def test_a_query_that_reads_in_two_ways_is_refused(raw: str) -> None:
    """Broken percent sequences, separators of some servers, bytes that must be encoded."""
    with pytest.raises(InvalidTarget):
        Query.parse(raw)


def test_queries_keep_what_was_sent() -> None:
    """Absent and empty are told apart; pairs are decoded once; duplicates are visible."""
    assert Query.parse(None).raw is None
    assert Query.parse("").raw == ""
    query = Query.parse("a=1&%61=2&b&c=%2520+x")
    assert query.pairs == (("a", "1"), ("a", "2"), ("b", ""), ("c", "%20 x"))
    assert query.duplicates() == {"a"}
