"""Answers of credentialed calls, ruling by ruling, through the whole executor (RULINGS 7.1 and 7.2; B104 to B113)."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from tests.support.benches import Bench, answer, body_of, head_of, whole
from tests.support.calls import CANARY
from wire.handoff import AnswerAbort, AnswerHead, Refusal

TAIL = CANARY[8:]
"""Without its public prefix."""
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
FORMS: dict[str, bytes] = {
    "raw": CANARY,
    "base64": base64.b64encode(b"x" + CANARY),
    "URL base64": base64.urlsafe_b64encode(b"xx" + CANARY).rstrip(b"="),
    "percent": "".join(f"%{byte:02x}" for byte in CANARY).encode(),
    "hex": CANARY.hex().upper().encode(),
    "JSON": "".join(f"\\u{byte:04x}" for byte in CANARY).encode(),
    "Basic": base64.b64encode(b"agent:" + CANARY),
}


def leaks(answers: list[object]) -> bool:
    """Whether any promised form of the secret's unpredictable part is in what the worker was told."""
    shown = b"".join(
        part
        for one in answers
        for part in (
            [one.reason.encode(), *(f"{name}: {value}".encode() for name, value in one.headers)]
            if isinstance(one, AnswerHead)
            else [getattr(one, "data", b"")]
        )
    )
    forms = {TAIL, TAIL.hex().encode(), TAIL.hex().upper().encode()}
    forms |= {base64.b64encode(b"x" * lead + CANARY)[12:-8] for lead in range(3)}
    forms |= {base64.urlsafe_b64encode(b"x" * lead + CANARY)[12:-8] for lead in range(3)}
    forms |= {"".join(f"%{byte:02x}" for byte in TAIL).encode(), "".join(f"\\u{byte:04x}" for byte in TAIL).encode()}
    return any(form in shown for form in forms)


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found", b"500 Oops", b"401 No"])
@pytest.mark.parametrize("coding", ["", *CODINGS])
async def test_no_form_comes_back_whatever_the_status_and_coding(bench: Bench, status: bytes, coding: str) -> None:
    """An error page is an answer like any other: every promised form is masked in it, inside every coding."""
    page = b"\n".join(b"%s: %s" % (name.encode(), form) for name, form in FORMS.items())
    raw = CODINGS[coding](page) if coding else page
    more = (b"Content-Encoding: " + coding.encode(),) if coding else ()
    bench.origin.script = answer(whole(raw, b"Content-Type: text/plain", *more, status=status))
    answers = await bench.ask(bench.request())
    assert head_of(answers).status == int(status[:3])
    assert len(body_of(answers)) == len(page)
    assert not leaks(answers)  # type: ignore[arg-type]
    await bench.settled()
    assert [echo.credential for echo in bench.vault.echoes] == ["shop"]


@pytest.mark.parametrize(
    ("case", "raw"),
    [
        ("two codings", whole(gzip.compress(gzip.compress(CANARY)), b"Content-Encoding: gzip, gzip")),
        ("an unknown one", whole(CANARY, b"Content-Encoding: compress")),
        ("a mislabelled one", whole(CANARY * 9, b"Content-Encoding: gzip")),
        ("a text that is compressed unsaid", whole(gzip.compress(CANARY * 9), b"Content-Type: application/json")),
        ("a coding cut in the middle", whole(gzip.compress(CANARY * 99)[:-9], b"Content-Encoding: gzip")),
        ("a bomb", whole(zlib.compress(bytes(4 << 20)), b"Content-Encoding: deflate")),
    ],
)
async def test_what_cannot_be_read_is_withheld(bench: Bench, case: str, raw: bytes) -> None:
    """A fixed 502, or an aborted message where the head was gone already; never a short whole one."""
    bench.origin.script = answer(raw)
    answers = await bench.ask(bench.request())
    last = answers[-1]
    assert isinstance(last, Refusal | AnswerAbort), case
    assert last.reason == "answer-withheld"
    assert not leaks(answers)  # type: ignore[arg-type]


async def test_interim_answers_and_trailers_stay_out(bench: Bench) -> None:
    """B110: 103 with a Link, and trailers, are dropped with whatever they hold."""
    bench.origin.script = answer(
        b"HTTP/1.1 103 Early Hints\r\nLink: <https://x.test/" + CANARY + b">; rel=preload\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Key\r\n\r\n"
        b"2\r\nok\r\n0\r\nX-Key: " + CANARY + b"\r\n\r\n"
    )
    answers = await bench.ask(bench.request())
    assert head_of(answers).status == 200
    assert body_of(answers) == b"ok"
    assert not leaks(answers)  # type: ignore[arg-type]
    assert "x-key" not in {name.lower() for name, _ in head_of(answers).headers}


async def test_a_trailer_that_only_a_head_may_have_cuts_the_answer(bench: Bench) -> None:
    """A cookie behind the body: the message ends as cut, and its trailer is nowhere."""
    bench.origin.script = answer(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nSet-Cookie: a=" + CANARY + b"\r\n\r\n"
    )
    answers = await bench.ask(bench.request())
    assert isinstance(answers[-1], AnswerAbort)
    assert not leaks(answers)  # type: ignore[arg-type]


REMOVED = (
    "Set-Cookie: sid=abcdef0123456789",
    "WWW-Authenticate: Bearer realm=x",
    "Authentication-Info: nextnonce=1",
    "Proxy-Authenticate: Basic",
    "Alt-Svc: h3=:443",
    "Refresh: 0; url=https://x.test/?token=1",
    "Link: <https://x.test/?token=1>",
    "X-Accel-Redirect: /internal",
    "X-Api-Key: abcdef0123456789",
    "Clear-Site-Data: *",
)


async def test_the_head_of_an_answer_is_a_list(bench: Bench) -> None:
    """7.2: what carries authority or gives orders is removed, and so is every name that nobody listed."""
    bench.origin.script = answer(whole(b"{}", b"Content-Type: application/json", *map(str.encode, REMOVED)))
    answers = await bench.ask(bench.request())
    assert {name.lower() for name, _ in head_of(answers).headers} == {"content-type"}


async def test_ranges_are_dropped_where_no_download_is_declared(bench: Bench) -> None:
    """7.1: a secret cannot be fetched in pieces shorter than what is searched for."""
    headers = (("Host", "shop.test"), ("Range", "bytes=0-3"), ("If-Range", '"x"'))
    await bench.ask(bench.request(headers=headers))
    seen = bytes(bench.origin.seen).lower()
    assert b"range:" not in seen
    await bench.settled()
    [outcome] = bench.journal.named("broker.outcome")
    assert set(outcome.fields["dropped_headers"]) >= {"range", "if-range"}  # type: ignore[arg-type]


async def test_the_other_secrets_of_that_place_are_masked_too(bench: Bench) -> None:
    """7.1: what the vault names beside the material is searched for as well, wherever it stands."""
    other = b"canary-other-0a1b2c3d4e5f60718293"
    asked = bench.vault.open

    async def opened(sealed: bytes, attested: object, *more: object) -> object:
        made = await asked(sealed, attested, *more)  # type: ignore[arg-type]
        return type(made)(**{**{name: getattr(made, name) for name in made.__slots__}, "scrub": (other,)})

    bench.vault.open = opened  # type: ignore[method-assign,assignment]
    bench.origin.script = answer(whole(json.dumps({"a": other.decode(), "b": CANARY.decode()}).encode()))
    answers = await bench.ask(bench.request())
    assert other not in body_of(answers)
    assert not leaks(answers)  # type: ignore[arg-type]
