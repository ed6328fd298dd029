"""The executor and a body that was judged by its beginning: read, judged and attested before anything is dialled."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from proxy.brokerlink import HandoffRequest
from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from tests.support.benches import Bench, Origin, body_of, drain, running, whole
from tests.support.pushes import BAD, BOUND, GOOD, TYPE, pack, push
from tests.support.streams import MemoryStream
from wire.handoff import Answer, AnswerAbort, BodyPlan, Continue, Refusal

CREDENTIALS = """
version: 1
credentials:
  forge: {kind: basic, username: agent, secret: "store:forge", hosts: [forge.test], owner: team,
          placeholder: {env: FORGE_KEY, shape: "git_{36}"}}
"""
POLICY = """
version: 1
services:
  forge: {like: git, base: "https://forge.test"}
roles:
  dev:
    allow:
      - name: push
        service: forge
        operations: [git.push]
        with: {repository: o/r, ref: "refs/heads/agent/*"}
        credential: forge
      - {name: upload, host: forge.test, methods: [POST], paths: [/upload], credential: forge}
"""
LONG = push(GOOD, pack=pack(400_000))
REFS = (("change", "create"), ("ref", "refs/heads/agent/x"), ("repository", "o/r"))


@pytest.fixture
async def forge() -> AsyncIterator[Bench]:
    """An executor under a policy with pushes."""
    parsed = parse_sources(
        Sources(policy={"policy.yaml": POLICY}, credentials=("credentials.yaml", CREDENTIALS), services={})
    )
    async with running(compile_policy(parsed.document)) as made:
        yield made


def asking(bench: Bench, plan: BodyPlan, **changes: object) -> HandoffRequest:
    made = bench.request(
        "/o/r.git/git-receive-pack",
        method="POST",
        host="forge.test",
        headers=(("Host", "forge.test"), ("Content-Type", TYPE)),
        body=plan,
        rule="dev/push",
        operation="forge/git.push",
        arguments=REFS,
        credential="forge",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def reason(answers: list[Answer]) -> str:
    (answer,) = answers
    assert isinstance(answer, Refusal), answers
    return answer.reason


# --- refused: nothing dialled, no secret asked for ---


async def test_a_beginning_that_is_not_the_one_stated_is_refused(forge: Bench) -> None:
    """Expect the digest of the statement to hold for the bytes that came."""
    exchange = await forge.link.open(asking(forge, BodyPlan.begun(LONG[:BOUND], len(LONG))), b"x" * BOUND)
    assert reason(await drain(exchange)) == "body-not-judged"
    assert not forge.origin.dialled
    assert not forge.vault.opened


@pytest.mark.parametrize(
    "judged", [LONG[:1000], LONG[: BOUND - 1], LONG[: BOUND + 1]], ids=["less", "one-less", "more"]
)
async def test_a_beginning_of_another_size_than_ours_is_refused(forge: Bench, judged: bytes) -> None:
    """Expect a worker to be able neither to shorten what is judged nor to stretch it."""
    exchange = await forge.link.open(asking(forge, BodyPlan.begun(judged, None)), judged)
    assert reason(await drain(exchange)) == "body-not-judged"
    assert not forge.vault.opened


async def test_a_body_that_ends_within_its_beginning_is_refused(forge: Bench) -> None:
    """Expect a worker that says more and sends less to get nothing."""
    exchange = await forge.link.open(asking(forge, BodyPlan.begun(LONG[:BOUND], None)), LONG[: BOUND - 10])
    await exchange.finish_body()
    assert reason(await drain(exchange)) == "body-not-judged"
    assert not forge.origin.dialled


async def test_what_the_worker_let_pass_is_judged_again(forge: Bench) -> None:
    """Expect a ref that our policy does not name to be refused, whatever the statement says of it."""
    body = push(GOOD, BAD, pack=pack(400_000))
    exchange = await forge.link.open(asking(forge, BodyPlan.begun(body[:BOUND], len(body))), body[:BOUND])
    assert reason(await drain(exchange)) == "no-rule"
    assert not forge.origin.dialled
    assert not forge.vault.opened


async def test_a_push_that_nobody_judged_is_refused(forge: Bench) -> None:
    """Expect a streamed plan without a judged beginning to be none for an operation that needs one."""
    exchange = await forge.link.open(asking(forge, BodyPlan(kind="length", length=len(LONG))))
    assert reason(await drain(exchange)) == "body-not-judged"
    assert not forge.vault.opened


# --- permitted ---


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_the_judged_bytes_go_up_first_and_once(forge: Bench, framing: str) -> None:
    """Expect verdict, attestation and Continue before a dial, and the origin to get one whole body."""
    seen = bytearray()
    end = b"0\r\n\r\n" if framing == "chunked" else LONG[-64:]

    async def script(origin: Origin, stream: MemoryStream) -> None:
        while not bytes(seen).endswith(end):
            data = await stream.receive()
            assert data
            seen.extend(data)
        stream.write(whole(b"ok"))
        await stream.receive()

    forge.origin.script = script
    plan = BodyPlan.begun(LONG[:BOUND], len(LONG) if framing == "length" else None)
    exchange = await forge.link.open(asking(forge, plan), LONG[:BOUND])
    assert isinstance(await exchange.receive(), Continue)
    ((_, attested),) = forge.vault.opened
    assert attested is not None
    assert attested.sha256 == hashlib.sha256(LONG[:BOUND]).digest()
    (entry,) = [one for one in attested.operations if "?" in one]
    assert entry.endswith("?change=create&ref=refs%2Fheads%2Fagent%2Fx")
    for start in range(BOUND, len(LONG), 50_000):
        await exchange.send_body(LONG[start : start + 50_000])
    await exchange.finish_body()
    answers = await drain(exchange)
    assert body_of(answers) == b"ok", answers
    head, _, body = bytes(seen).partition(b"\r\n\r\n")
    if framing == "chunked":
        body = _unchunked(body)
    else:
        assert b"Content-Length: %d" % len(LONG) in head
    assert body == LONG
    assert b"Authorization: Basic" in head
    await forge.settled()
    outcome = forge.journal.named("broker.outcome")[0].fields
    assert outcome["bytes_up"] == len(LONG)
    assert outcome["arguments"] == ("change=create", "ref=refs/heads/agent/x", "repository=o/r")


async def test_a_worker_that_cancels_cuts_the_origin(forge: Bench) -> None:
    """Expect a call whose client left in the middle of the pack to end as cut."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\x00never\x00")

    forge.origin.script = script
    exchange = await forge.link.open(asking(forge, BodyPlan.begun(LONG[:BOUND], None)), LONG[:BOUND])
    assert isinstance(await exchange.receive(), Continue)
    await exchange.send_body(LONG[BOUND : BOUND + 1000])
    exchange.cancel()
    await forge.origin.gone.wait()
    await forge.settled()
    assert forge.journal.named("broker.outcome")[0].fields["error"] == "client-gone"


async def test_an_operation_that_we_do_not_judge_streams_from_its_first_byte(forge: Bench) -> None:
    """Expect a beginning that only the worker's policy asked for to be part of the body, once."""
    seen = bytearray()

    async def script(origin: Origin, stream: MemoryStream) -> None:
        while b"0\r\n\r\n" not in seen:
            seen.extend(await stream.receive())
        stream.write(whole(b"ok"))
        await stream.receive()

    forge.origin.script = script
    request = asking(
        forge,
        BodyPlan.begun(b"u" * 100, None),
        target="/upload",
        rule="dev/upload",
        operation="dev/upload",
        arguments=(),
    )
    exchange = await forge.link.open(request, b"u" * 100)
    answer = await exchange.receive()
    assert isinstance(answer, Continue), answer
    await exchange.send_body(b"v" * 50)
    await exchange.finish_body()
    assert not any(isinstance(one, AnswerAbort) for one in await drain(exchange))
    assert _unchunked(bytes(seen).partition(b"\r\n\r\n")[2]) == b"u" * 100 + b"v" * 50


def _unchunked(raw: bytes) -> bytes:
    body = b""
    while True:
        size, _, raw = raw.partition(b"\r\n")
        if int(size, 16) == 0:
            return body
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
