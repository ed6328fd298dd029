"""The worker's self-check (I28): what an unsound room does to it, and that a sound one passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from broker.vault.ca import CertificateAuthority
from net.contexts import ContextUnavailable, ServerContexts, client_context
from net.trust import TrustKey
from proxy import selfcheck
from proxy.brokerlink import BrokerUnavailable, HandoffBroken
from proxy.help import HelpTexts
from proxy.selfcheck import Bench, Failed, OwnTls, Unfinished, check_broker, self_check
from proxy.worker import Ports, Room
from rules.decision import Denied
from rules.names import Host
from rules.policy import Role
from tests.support.fakes import CountingRandom, ManualClock, snapshot
from tests.support.policies import request
from tests.support.rooms import op, policy, rule
from wire.handoff import AnswerAbort, Continue, Refusal

CLOCK = ManualClock()
TEXTS = HelpTexts(ca_pem="", bundle_pem="", environment={})


def room(bench: Bench, directory: Any, journal: Any = None) -> Room:
    ports = Ports(
        clock=CLOCK,
        random=CountingRandom(),
        journal=journal or bench,
        broker=bench,
        dialer=bench,
        leaves=bench,
        refusal_leaves=bench,
    )
    return Room(ports, directory, TEXTS)


def broken(change: Callable[[Room], None]) -> Any:
    """A maker of rooms that `change` made unsound."""

    def make(bench: Bench, directory: Any) -> Any:
        made = room(bench, directory)
        change(made)
        return made.front

    return make


def denies_nothing(made: Room) -> None:
    decide = made.gate._decide

    def blind(policy: Any, box: Any, facts: Any, now: float) -> Any:
        answer = decide(policy, box, facts, now)
        return decide(CONTROL, selfcheck._ME, PERMITTED, now) if isinstance(answer, Denied) else answer

    made.gate._decide = blind


def denies_nothing_in_force(made: Room) -> None:
    decide = made.gate._decide

    def blind(policy: Any, box: Any, facts: Any, now: float) -> Any:
        if box.role == selfcheck._ME.role:
            return decide(policy, box, facts, now)
        return decide(CONTROL, selfcheck._ME, PERMITTED, now)

    made.gate._decide = blind


def forgets_the_log(made: Room) -> None:
    async def nothing(event: Any) -> None:
        return None

    made.gate._write = nothing  # type: ignore[method-assign]


def ignores_who_asks(made: Room) -> None:
    made.front.serve = _passes(made)  # type: ignore[method-assign]


def _passes(made: Room) -> Any:
    bench = made.gate._journal

    async def serve(stream: Any, channel: Any) -> None:
        assert isinstance(bench, Bench)
        bench.left += 1
        stream.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await stream.drain()
        stream.abort()

    return serve


def refuses_all(made: Room) -> None:
    made.gate._decide = lambda *_: Denied(reason="no-rule", remedy="")


PERMITTED = request(f"GET http://{selfcheck.HOST}/permitted")
PERMITTED_INSIDE = request(f"GET https://{selfcheck.HOST}/permitted")
CONTROL = selfcheck._policy({selfcheck._ME.role: Role(name=selfcheck._ME.role, rules=(selfcheck._RULE,))})


@pytest.mark.parametrize(
    ("sentence", "change", "named"),
    [
        ("a gate that denies nothing", denies_nothing, ("a denied host", "a denied path", "a denied method")),
        ("a gate that forgets the log", forgets_the_log, ("an unwritable log",)),
        (
            "a front door that lets everything through",
            ignores_who_asks,
            ("a denied tunnel", "a request of nobody", "an exception in the gate", "no policy"),
        ),
        ("a gate that denies everything: the probes prove nothing", refuses_all, ("the permitted request",)),
    ],
)
async def test_an_unsound_room_fails(sentence: str, change: Callable[[Room], None], named: tuple[str, ...]) -> None:
    """Each way to be unsound is found, and the probes that found it are named."""
    with pytest.raises(Failed) as failed:
        await self_check(broken(change), CLOCK, None)
    for name in named:
        assert name in str(failed.value), sentence


def knows_every_address(made: Room) -> None:
    made.front.names.host_of = lambda sandbox, address: Host(selfcheck.HOST)  # type: ignore[method-assign]


async def test_captured_connections_of_an_unsound_room_fail() -> None:
    """A stub that knows every address makes a bare one pass, and a denied one under a permitted name."""
    with pytest.raises(Failed, match="a captured bare address"):
        await self_check(broken(knows_every_address), CLOCK, None)


async def test_a_room_whose_log_swallows_what_it_is_told_fails() -> None:
    """A journal that lies takes every event and keeps none: the control leaves without its intent, and is named."""

    class Liar:
        async def append(self, event: Any, *, durable: bool = False) -> int:
            return 1

    with pytest.raises(Failed, match=r"the permitted request \(not in the log first\)"):
        await self_check(lambda bench, directory: room(bench, directory, Liar()).front, CLOCK, None)


@pytest.fixture(scope="module")
def own_tls() -> OwnTls:
    """The gateway's own authority, leaf key and root, as a worker has them."""
    authority = CertificateAuthority.create(now=CLOCK.wall(), installation="test", node="node")
    key = ec.generate_private_key(ec.SECP256R1())
    spki = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)

    async def mint(host: Host, owner: tuple[str, str] | None) -> str:
        assert owner == ("exeat", "self-check")
        return authority.mint(host, spki, CLOCK.wall())

    trust = client_context(TrustKey(ca_pem=authority.root_pem))
    trust.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME: the tests' clock is not OpenSSL's
    return OwnTls(leaves=ServerContexts(key, mint, now=CLOCK.wall), trust=trust)


def blind_to_placeholders(made: Room, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("proxy.gate.own_placeholder", lambda *_: True)


def blind_to_names(made: Room, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("proxy.front.wrong_hello", lambda *_, **__: None)
    judged = made.gate._decide
    made.gate._decide = lambda policy, box, facts, now: judged(policy, box, PERMITTED_INSIDE, now)


@pytest.mark.parametrize(
    ("sentence", "change", "named"),
    [
        ("a gate that takes any placeholder", blind_to_placeholders, ("a foreign placeholder",)),
        ("a gate that judges another request than it got", blind_to_names, ("a denied path inside TLS",)),
    ],
)
async def test_an_unsound_room_inside_tls_fails(
    sentence: str, change: Any, named: tuple[str, ...], own_tls: OwnTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the CONNECT and the handshake, in the plain lane and in that of a credential."""
    with pytest.raises(Failed) as failed:
        await self_check(broken(lambda made: change(made, monkeypatch)), CLOCK, None, own_tls)
    for name in named:
        assert name in str(failed.value), sentence


async def test_without_a_certificate_the_rest_is_tried_and_nothing_is_proven() -> None:
    """A vault that mints nothing now: no hole, no proof; a hole elsewhere is still found."""

    class Busy:
        async def get(self, *_: Any, **__: Any) -> Any:
            raise ContextUnavailable("told")

    none: Any = OwnTls(leaves=Busy(), trust=None)  # type: ignore[arg-type]  # not used
    with pytest.raises(Unfinished, match="certificate"):
        await self_check(broken(lambda _: None), CLOCK, None, none)
    with pytest.raises(Failed, match="a denied path"):
        await self_check(broken(denies_nothing), CLOCK, None, none)


async def test_a_sound_room_passes_inside_tls(own_tls: OwnTls) -> None:
    """Nine more probes, two of them controls."""
    alone = await self_check(broken(lambda _: None), CLOCK, None)
    assert await self_check(broken(lambda _: None), CLOCK, None, own_tls) == alone + 9


# --- the broker ------------------------------------------------------------------------------------------------------


class Link:
    """Answers each of the two hand-offs with what it is told; an exception is raised where the answer is awaited."""

    def __init__(self, honest: Any, forged: Any) -> None:
        self.honest, self.forged = honest, forged
        self.requests: list[Any] = []

    async def open(self, request: Any, judged_body: bytes | None = None) -> Any:
        self.requests.append(request)
        return Told(self.honest)

    async def open_forged(self, request: Any) -> Any:
        return Told(self.forged)


class Told:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def receive(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        return None


NO = Refusal(reason="bad-token")


@pytest.mark.parametrize(
    ("honest", "forged", "named"),
    [
        (Continue(), NO, "a hand-off of nobody"),
        (AnswerAbort(reason="internal-error"), NO, "a hand-off of nobody"),
        (NO, Continue(), "a hand-off with a forged seal"),
        (NO, AnswerAbort(reason="internal-error"), "a hand-off with a forged seal"),
    ],
)
async def test_a_broker_that_takes_what_it_must_refuse_fails(honest: Any, forged: Any, named: str) -> None:
    """Anything but a refusal is a hole, also an answer that only breaks off."""
    with pytest.raises(Failed, match=named):
        await check_broker(Link(honest, forged), "digest")


@pytest.mark.parametrize("answer", [BrokerUnavailable(), HandoffBroken(), Refusal(reason="broker-unavailable")])
async def test_a_broker_that_is_away_proves_nothing(answer: Any) -> None:
    """Neither a hole nor a proof."""
    with pytest.raises(Unfinished):
        await check_broker(Link(answer, NO), "digest")


async def test_a_broker_that_refuses_both_passes() -> None:
    """What is handed over names the self-check's own sandbox and host, and no evidence of anybody."""
    link = Link(NO, Refusal(reason="internal-error"))
    assert await check_broker(link, "digest") == 2
    (request,) = link.requests
    assert (request.sandbox, request.host, request.evidence.token) == ("self-check", selfcheck.HOST, "")


async def test_a_role_in_force_that_lets_everything_through_fails() -> None:
    """The policy of the moment is tried with every role, though the fixed one is judged well."""
    mine = policy(rule("dev/read", op("dev/read", "api.test")))
    with pytest.raises(Failed, match="a denied host in role dev"):
        await self_check(broken(denies_nothing_in_force), CLOCK, snapshot(mine, []))


async def test_a_room_that_hangs_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer in time is neither a pass nor a hole."""
    monkeypatch.setattr(selfcheck, "PROBE_SECONDS", 0.05)

    async def hang(stream: Any, channel: Any) -> None:
        await asyncio.Event().wait()

    def hangs(made: Room) -> None:
        made.front.serve = hang  # type: ignore[method-assign]

    with pytest.raises(Unfinished, match="a denied host"):
        await self_check(broken(hangs), CLOCK, None)


async def test_a_control_that_came_too_late_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was held up refuses what is permitted by its own deadlines; what passes is a hole all the same."""
    with pytest.raises(Failed, match="the permitted request"):
        await self_check(broken(refuses_all), CLOCK, None)
    monkeypatch.setattr(selfcheck, "LATE_SECONDS", 0.0)
    with pytest.raises(Unfinished, match="the permitted request"):
        await self_check(broken(refuses_all), CLOCK, None)
    with pytest.raises(Failed, match="a denied path"):
        await self_check(broken(denies_nothing), CLOCK, None)


async def test_a_sound_room_passes_with_the_policy_in_force() -> None:
    """Nothing left but the control; roles whose rules mean even a host that cannot exist are left out."""
    rules = policy(rule("dev/read", op("dev/read", "api.test")))
    alone = await self_check(broken(lambda _: None), CLOCK, None)
    assert await self_check(broken(lambda _: None), CLOCK, snapshot(rules, [])) == alone + 1
    every = policy(rule("dev/read", op("dev/read", "**.self-check.invalid")))
    assert await self_check(broken(lambda _: None), CLOCK, snapshot(every, [])) == alone
