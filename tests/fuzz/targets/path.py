"""Paths and queries: refused, or sent as judged and read alike by whoever decodes them (D, T25)."""

from __future__ import annotations

import posixpath
from urllib.parse import parse_qsl, unquote, urlsplit

from rules.paths import CanonicalPath, InvalidTarget, Query

WORDS = (
    b"/..", b"/.", b"//", b"%2e", b"%2E", b"%2f", b"%2F", b"%5c", b"%00", b"%25", b";", b"\\", b"?", b"&", b"=",
    b"+", b"%c0%ae", b"%C3%A9", b"/a/b", b"%ff", b"%7e",
)  # fmt: skip


def check(data: bytes) -> bool:
    """See above."""
    text = data.decode("latin-1")
    path_text, question, query_text = text.partition("?")
    _query(query_text if question else None)
    try:
        path = CanonicalPath.parse(path_text)
    except InvalidTarget:
        return False
    assert path.raw == path_text
    assert CanonicalPath.parse(path.raw) == path
    assert urlsplit(f"http://a.test{path.raw}").path == path.raw
    once = unquote(path.raw, errors="strict")
    assert "%" not in once, "decoding twice gives another path"
    assert "\\" not in once
    assert not any(ord(char) < 0x20 or ord(char) == 0x7F for char in once)
    if not path.encoded_slash:
        assert once.split("/")[1:] == list(path.segments)
    # A server that tidies the path, before or after decoding, finds nothing to tidy.
    for reading in (path.raw, once):
        if not (path.encoded_slash and reading is once):
            assert posixpath.normpath(reading) == (reading.rstrip("/") or "/")
    assert not any(part in (".", "..") for part in once.split("/"))
    return True


def _query(text: str | None) -> None:
    try:
        query = Query.parse(text)
    except InvalidTarget:
        return
    assert query.raw == text
    if text is None:
        assert query.pairs == ()
        return
    assert not any(ord(char) <= 0x20 or ord(char) > 0x7E or char == "#" for char in text)
    read = parse_qsl(text, keep_blank_values=True, separator="&")
    # urllib leaves empty fields out; we keep them, and judge them.
    assert [pair for pair in query.pairs if pair != ("", "")] == [pair for pair in read if pair != ("", "")]
