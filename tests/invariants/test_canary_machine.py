"""However uses, rotations, reloads, echoes, redirects and compressions follow each other, no secret is ever seen (I01).

A real gateway and a real origin, driven step by step. The origin gives back what it was sent, in every promised form,
in every part of an answer, cut anywhere and packed in any coding. After each step what the client got is looked
through, as it came and unpacked; after each run every file of the gateway is.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import secrets as random_secrets
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import brotli
import pytest
import zstandard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.gateway import Box, TestGateway
from tests.support.leaks import files_below, leaks, windows
from tests.support.origins import Exchange, Origin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CREDENTIALS = """
version: 1
credentials:
  bearer: {kind: bearer, secret: "store:one", hosts: [bearer.test], owner: tests,
           placeholder: {env: BEARER_KEY, shape: "sk_{24}"}}
  header: {kind: header, header: X-Api-Key, secret: "store:two", hosts: [header.test], owner: tests,
           placeholder: {env: HEADER_KEY, shape: "hk_{24}"}}
  query: {kind: query, query: key, secret: "store:one", hosts: [query.test], owner: tests,
          placeholder: {env: QUERY_KEY, shape: "qk_{24}"}}
  basic: {kind: basic, username: me, secret: "store:two", hosts: [basic.test], owner: tests,
          placeholder: {env: BASIC_KEY, shape: "bk_{24}"}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: bearer, host: bearer.test, methods: [GET], paths: ["/**"], credential: bearer}
      - {name: header, host: header.test, methods: [GET], paths: ["/**"], credential: header}
      - {name: query, host: query.test, methods: [GET], paths: ["/**"], query: any, credential: query}
      - {name: basic, host: basic.test, methods: [GET], paths: ["/**"], credential: basic}
"""
EXTRA = '      - {name: extra, host: plain.test, methods: [GET], paths: ["/**"]}\n'
USES = {
    "bearer.test": ("one", lambda item: item.header("authorization")),
    "header.test": ("two", lambda item: item.header("x-api-key")),
    "query.test": ("one", lambda item: item.target),
    "basic.test": ("two", lambda item: item.header("authorization")),
}
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "raw": lambda value: value,
    "base64": base64.b64encode,
    "base64url": base64.urlsafe_b64encode,
    "shifted": lambda value: base64.b64encode(b"u:" + value + b"!"),
    "hex": lambda value: value.hex().encode(),
    "percent": lambda value: "".join(f"%{byte:02x}" for byte in value).encode(),
    "quoted": lambda value: urllib.parse.quote_from_bytes(value).encode(),
    "json": lambda value: json.dumps({"echo": value.decode()}).encode(),
    "unicode": lambda value: "".join(f"\\u{byte:04X}" for byte in value).encode(),
}
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda body: body,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "compress": bz2.compress,  # a coding that we do not know: withheld, whatever is in it
}
PLACES = ("body", "error page", "header", "trailer", "location")


@dataclass
class Plan:
    """What the origin does with the next request."""

    form: str = "raw"
    coding: str = ""
    place: str = "body"
    cut: int = 7
    padding: int = 0


@dataclass
class World:
    """The gateway and the origin of this module, and every secret that ever was."""

    gateway: TestGateway
    origin: Origin
    plan: Plan = field(default_factory=Plan)
    current: dict[str, str] = field(default_factory=dict)
    every: dict[str, frozenset[bytes]] = field(default_factory=dict)
    forms: dict[str, frozenset[bytes]] = field(default_factory=dict)
    asked: int = 0

    def fresh(self, name: str) -> str:
        """Another secret for `name`: letters, digits, and what codings change."""
        value = random_secrets.token_urlsafe(24).replace("_", "/") + "+/=" + random_secrets.token_hex(4)
        self.current[name] = value
        number = len(self.every)
        self.every[f"{name}-{number}"] = windows(value)
        self.forms[f"{name}-{number}"] = frozenset(
            text[at : at + 24] for text in _written(value.encode()) for at in range(len(text) - 24)
        )
        return value

    def look_through(self, what: str, data: bytes) -> None:
        """AssertionError where `data` shows any secret that ever was, in any promised form."""
        assert leaks(data, self.every) == [], what
        assert leaks(data, self.forms) == [], what


def _written(value: bytes) -> Iterator[bytes]:
    yield value.hex().encode()
    yield value.hex().upper().encode()
    yield "".join(f"%{byte:02x}" for byte in value).encode()
    yield "".join(f"\\u{byte:04X}" for byte in value).encode()


async def _give_back(world: World, exchange: Exchange) -> None:
    """Answer as planned, with the secret that came."""
    plan, host = world.plan, (exchange.request.header("host") or "").partition(":")[0]
    await exchange.read_body()
    name = USES[host][0]
    value = world.current[name].encode()
    written = b"x" * plan.padding + FORMS[plan.form](value) + b"y" * plan.padding
    line = "".join(letter for letter in written.decode("latin-1") if letter.isprintable())
    match plan.place:
        case "header":
            await exchange.answer(
                200, b"fine", (("X-Echo", line), ("ETag", f'"{line}"'), ("Content-Type", "text/plain"))
            )
        case "location":
            target = urllib.parse.quote(line, safe="%/:?&=")
            await exchange.answer(302, b"", (("Location", f"https://{host}:{world.origin.port}/next?{target}"),))
        case place:
            body = CODINGS[plan.coding](written)
            fields = (
                ("Content-Type", "application/json"),
                *((("Content-Encoding", plan.coding),) if plan.coding else ()),
            )
            await exchange.begin(500 if place == "error page" else 200, fields)
            for at in range(0, len(body), plan.cut):
                await exchange.chunk(body[at : at + plan.cut])
            await exchange.end((("X-Echo", line),) if place == "trailer" else ())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("machine")
    with Origin(*USES, "plain.test", address="127.0.0.49").run_in_thread() as origin:
        gateway = TestGateway(folder, policy=POLICY, credentials=CREDENTIALS, origins=[origin])
        world = World(gateway, origin)

        async def handler(exchange: Exchange) -> None:
            await _give_back(world, exchange)

        origin.on("/echo", handler)
        with gateway:
            for name in ("one", "two"):
                gateway.admin.add_secret(name, world.fresh(name).encode(), owner="tests")
            yield world


class Machine(RuleBasedStateMachine):
    """The steps. What they must not bring about is checked in each."""

    world: ClassVar[World]
    box: Box | None = None
    extra = False

    @initialize()
    def first_sandbox(self) -> None:
        self.box = self.world.gateway.sandbox()

    @rule()
    def another_sandbox(self) -> None:
        """The last one ends; three echoes disarm a credential for one sandbox, so that new ones are needed."""
        if self.box is not None:
            self.world.gateway.admin.end_sandbox(self.box.id)
        self.box = self.world.gateway.sandbox()

    @precondition(lambda self: self.box is not None)
    @rule(
        host=st.sampled_from(sorted(USES)),
        form=st.sampled_from(sorted(FORMS)),
        coding=st.sampled_from(sorted(CODINGS)),
        place=st.sampled_from(PLACES),
        cut=st.integers(1, 60),
        padding=st.sampled_from([0, 1, 2, 3, 500]),
    )
    def ask(self, **planned: Any) -> None:
        """A use whose answer holds the secret."""
        assert self.box is not None
        host = planned.pop("host")
        world, before = self.world, len(self.world.origin.received)
        world.plan = Plan(**planned)
        answer = self.box.curl("-i", "--raw", f"https://{host}:{world.origin.port}/echo")
        for item in world.origin.received[before:]:
            name, value = USES[host]
            sent = urllib.parse.unquote(str(value(item)))
            expected = world.current[name]
            if host == "basic.test":
                expected = base64.b64encode(f"me:{expected}".encode()).decode()
            assert expected in sent, f"{host} was not sent the secret of now"
            world.asked += 1
        world.look_through(f"{host} {planned}", answer.raw + answer.err.encode())
        head, _, body = answer.raw.partition(b"\r\n\r\n")
        for unpack in (gzip.decompress, zlib.decompress, brotli.decompress, zstandard.ZstdDecompressor().decompress):
            try:
                world.look_through(f"{host} {planned}, unpacked", unpack(_joined(body)))
            except (OSError, EOFError, zlib.error, brotli.error, zstandard.ZstdError):
                continue
        world.look_through(f"{host} {planned}, unescaped", urllib.parse.unquote_to_bytes(_joined(body)))
        world.look_through(f"{host} {planned}, the head unescaped", urllib.parse.unquote_to_bytes(head))

    @rule(name=st.sampled_from(["one", "two"]))
    def rotate(self, name: str) -> None:
        """Later uses have the new value, and the old one stays unseen as well."""
        self.world.gateway.admin.rotate_secret(name, self.world.fresh(name).encode())

    @rule()
    def reload(self) -> None:
        """A policy with or without a rule that concerns nobody here."""
        self.extra = not self.extra
        self.world.gateway.write_policy(POLICY + (EXTRA if self.extra else ""))
        self.world.gateway.reload()

    @rule()
    def rotate_the_key(self) -> None:
        """The store is written anew."""
        self.world.gateway.admin.rotate_key(None)

    @precondition(lambda self: self.box is not None)
    @rule()
    def ask_what_is_allowed(self) -> None:
        """Pages of the help host and the administrator's lists."""
        assert self.box is not None
        for path in ("/env", "/policy", "/operations", "/recent"):
            self.world.look_through(path, self.box.curl("-i", f"http://exeat.internal{path}").raw)
        self.world.look_through("secrets", json.dumps(self.world.gateway.admin.secrets()).encode())

    def teardown(self) -> None:
        """No file of the gateway holds a secret: state, log, sockets' folder, configuration, standard error."""
        for path, content in files_below(Path(self.world.gateway.folder)):
            self.world.look_through(path, content)
        assert "Traceback" not in self.world.gateway.errors()


def _joined(body: bytes) -> bytes:
    """A chunked body without its chunk lines, as far as it is one; else as it is."""
    found, rest = b"", body
    while rest:
        line, separator, after = rest.partition(b"\r\n")
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            return found or body
        if not separator or size == 0:
            break
        found, rest = found + after[:size], after[size + 2 :]
    return found or body


def test_no_order_of_events_shows_a_secret(world: World) -> None:
    """The machine, for as many runs as the profile says; at the end some of its uses must have been real."""
    Machine.world = world
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max(4, settings().max_examples // 20),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert world.asked > 10


def test_the_machine_would_see_a_leak(world: World) -> None:
    """The control: what is looked for is found where it is, in each form that the origin writes."""
    for name, write in FORMS.items():
        text = write(world.current["one"].encode())
        found = (
            leaks(text, world.every)
            + leaks(text, world.forms)
            + leaks(urllib.parse.unquote_to_bytes(text), world.every)
        )
        assert found, name
