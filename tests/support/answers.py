"""What the origins answer in attack cases."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import brotli
import zstandard

from tests.support.attackdata import Case, render
from tests.support.attempts import (
    Names,
    host_names,
    secret_names,
)
from tests.support.ground import CAN, OTHER_CAN, Ground
from tests.support.origins import Exchange, Handler, head
from tests.support.scripts import CLOSE, READ, Step, script, sse, websocket_echo
from tests.support.signals import Gate

DOWNLOAD = bytes(range(256)) * (10 << 12)
"""10 MiB."""


SERVED = b"served"


async def served(exchange: Exchange) -> None:
    """What origins do where a case says nothing: a short answer that shows nothing of the request."""
    await exchange.read_body()
    await exchange.answer(200, SERVED, (("Content-Type", "text/plain"),))


async def download(exchange: Exchange) -> None:
    """10 MiB, or the range of it that was asked for."""
    await exchange.read_body()
    asked = exchange.request.header("range")
    if asked is None:
        await exchange.answer(200, DOWNLOAD, (("Accept-Ranges", "bytes"),))
        return
    first, _, last = asked.removeprefix("bytes=").partition("-")
    piece = DOWNLOAD[int(first) : int(last) + 1]
    await exchange.answer(206, piece, (("Content-Range", f"bytes {first}-{last}/{len(DOWNLOAD)}"),))


async def reflect(exchange: Exchange) -> None:
    """Everything that was received, as body and as a header."""
    await exchange.read_body()
    seen = exchange.request.raw_head
    line = exchange.request.header("authorization") or "none"
    await exchange.answer(200, seen, (("X-Seen", line), ("Set-Cookie", f"k={line}"), ("Content-Type", "text/plain")))


async def interim_flood(exchange: Exchange) -> None:
    """A thousand interim answers before the final one."""
    await exchange.read_body()
    for _ in range(1000):
        await exchange.interim(103, (("Link", "</x>; rel=preload"),))
    await exchange.answer(200, b"late")


HANDLERS: Mapping[str, Handler] = {
    "sse": sse(["one", "two", "three"]),
    "download": download,
    "reflect": reflect,
    "interim-flood": interim_flood,
    "websocket": websocket_echo,
}


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data)


CODINGS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": _deflate,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
}


def answering(case: Case, names: Names) -> Handler:
    """The handler that a case asks for."""
    match case.origin:
        case None:
            return served
        case str(name):
            return HANDLERS[name]
        case given:
            top, body = render(given.get("head", ""), names), render(given.get("body", ""), names)
            coding = given.get("coding")
            if coding is not None:
                body = CODINGS[coding](body)
            if "head" not in given:
                coding = given.get("label", coding)
                fields = [("Content-Length", str(len(body))), ("Content-Type", given.get("type", "text/plain"))]
                top = head(200, (*fields, *((("Content-Encoding", coding),) if coding else ())))
            steps: list[bytes | Gate | Step] = [READ, top + body, *([CLOSE] if given.get("close", True) else [])]
            return script(*steps)


@contextmanager
def answered(ground: Ground, case: Case) -> Iterator[None]:
    """All origins answer as the case says."""
    secrets = secret_names("can", CAN) | secret_names("can.other", OTHER_CAN)
    handler = answering(case, host_names(ground) | secrets)
    for origin in ground.origins:
        origin.on("/*", handler)
    try:
        yield
    finally:
        for origin in ground.origins:
            origin.on("/*", served)
