"""The last word (broker/vault/open.py): what a broken worker gets, and what a sound one gets."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from audit.journal import AuditUnavailable
from broker.errors import BrokerError
from broker.vault import open as open_module
from broker.vault.opened import Opened, Refused
from broker.vault.slot import placeholder_fits
from rules.facts import BodyAttested
from tests.support.vaults import OTHER_SECRET, SECRET, Rig, sealed, statement
from wire.handoff import BodyPlan, Evidence, seal


@pytest.fixture
async def rig(tmp_path):
    made = await Rig(tmp_path).start()
    yield made
    await made.stop()


@pytest.fixture
async def worker(rig):
    return await rig.process("worker", "worker-1")


async def ask(rig, raw: bytes, attested=None):
    return await rig.vault.opener.open_handoff(raw, attested)


def reasons(rig) -> list[str]:
    """The `error` or else the `reason` of every refusal on record."""
    kinds = ("broker.refused", "placeholder.misused")
    events = [event for event, _ in rig.journal.events if event.name in kinds]
    return [str(event.fields.get("error", event.fields["reason"])) for event in events]


# --- a broken worker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "change", "reason", "recorded"),
    [
        ("a statement from an hour ago", {"issued_at": 1.0}, "internal-error", "statement-stale"),
        ("a statement from the future", {"issued_at": 2e9}, "internal-error", "statement-stale"),
        ("an invented token", {"evidence": Evidence(token="xt_guess")}, "bad-token", "bad-token"),
        ("no evidence at all", {"evidence": Evidence()}, "auth-required", "auth-required"),
        ("an invented channel key", {"evidence": Evidence(channel_key=b"k" * 32)}, "sandbox-ended", "sandbox-ended"),
        ("an earlier epoch", {"epoch": 0}, "sandbox-ended", "sandbox-ended"),
        ("an id that never was", {"sandbox": "sb_none"}, "bad-token", "bad-token"),
        ("another tenant", {"tenant": "other"}, "bad-token", "bad-token"),
        ("a path that no rule permits", {"target": "/v1/keys"}, "no-rule", "no-rule"),
        ("a host of its own", {"host": "evil.example", "headers": (("Host", "evil.example"),)}, "no-rule", "no-rule"),
        ("a Host header that differs", {"headers": (("Host", "evil.example"),)}, "authority-mismatch", None),
        ("another method", {"method": "DELETE"}, "no-rule", "no-rule"),
        ("clear text", {"scheme": "http", "port": 80}, "clear-text-refused", "clear-text-refused"),
        (
            "a bound host on another port",
            {"port": 8443, "headers": (("Host", "orders.shop.example:8443"),)},
            None,
            None,
        ),
        ("another rule than ours", {"rule": "agent/release"}, "policy-changing", "verdicts-differ"),
        ("another credential than ours", {"credential": "shop-stock"}, "policy-changing", "verdicts-differ"),
        ("other arguments than ours", {"arguments": (("id", "8"),)}, "policy-changing", "verdicts-differ"),
        ("an old policy, denied here", {"policy_digest": "0" * 64, "target": "/v1/keys"}, "policy-changing", None),
        (
            "a header of its own beside the slot",
            {"headers": (("Host", "orders.shop.example"), ("Authorization", "Bearer mine"))},
            "client-authority",
            "client-authority",
        ),
    ],
)
async def test_a_false_statement_opens_nothing(rig, worker, sentence, change, reason, recorded) -> None:
    """Whatever a worker that holds its key writes into a statement, what is false is refused and recorded."""
    created = await rig.sandbox()
    answer = await ask(rig, sealed(worker, statement(rig, created, **change)))
    assert isinstance(answer, Refused), sentence
    assert reason in (None, answer.reason), sentence
    assert len(reasons(rig)) == 1, sentence
    assert recorded in (None, reasons(rig)[0]), sentence
    assert "broker.intent" not in rig.journal.names(), sentence


async def test_a_forged_seal_opens_nothing(rig, worker) -> None:
    """Each flipped byte, another key and an unknown worker are refused before anything is parsed."""
    created = await rig.sandbox()
    made = statement(rig, created)
    raw = sealed(worker, made)
    forgeries = [
        raw[:index] + bytes([raw[index] ^ 1]) + raw[index + 1 :] for index in (0, 31, 40, len(raw) // 2, len(raw) - 1)
    ]
    forgeries += [seal(made, b"x" * 32), b"", raw[:20], seal(replace(made, worker="worker-9"), worker.key)]
    for forgery in forgeries:
        answer = await ask(rig, forgery)
        assert isinstance(answer, Refused)
        assert answer.reason == "internal-error"
        assert answer.request_id == ""
    assert set(reasons(rig)) <= {"statement-forged", "worker-unknown"}


async def test_a_replayed_nonce_opens_nothing(rig, worker) -> None:
    """The very same statement counts once."""
    raw = sealed(worker, statement(rig, await rig.sandbox()))
    assert isinstance(await ask(rig, raw), Opened)
    answer = await ask(rig, raw)
    assert isinstance(answer, Refused)
    assert reasons(rig) == ["statement-replayed"]


async def test_another_sandboxs_id_opens_nothing(rig, worker) -> None:
    """With one sandbox's token no statement speaks for another; the record names both (B143)."""
    mine, theirs = await rig.sandbox(), await rig.sandbox()
    made = statement(rig, mine, sandbox=theirs.record.sandbox.id)
    answer = await ask(rig, sealed(worker, made))
    assert isinstance(answer, Refused)
    assert answer.reason == "bad-token"
    (event,) = rig.journal.named("broker.refused")
    assert event.fields["other_sandbox"] == mine.record.sandbox.id


async def test_token_and_channel_that_disagree_open_nothing(rig, worker) -> None:
    """The token of one sandbox on the channel of another is refused."""
    one = await rig.sandbox(channel={"kind": "port"})
    two = await rig.sandbox(channel={"kind": "port"})
    mixed = Evidence(token=one.token, channel_key=two.channel_key)
    answer = await ask(rig, sealed(worker, statement(rig, one, evidence=mixed)))
    assert isinstance(answer, Refused)
    assert answer.reason == "bad-token"


async def test_a_token_without_its_own_channel_opens_nothing(rig, worker) -> None:
    """A sandbox with a channel of its own is not spoken for by its token on a shared one."""
    one = await rig.sandbox(channel={"kind": "namespace"})
    answer = await ask(rig, sealed(worker, statement(rig, one)))
    assert isinstance(answer, Refused)
    assert answer.reason == "bad-token"
    alone = statement(rig, one, evidence=Evidence(channel_key=one.channel_key))
    assert isinstance(await ask(rig, sealed(worker, alone)), Opened)


async def test_a_bound_address_narrows(rig, worker) -> None:
    """The token of an address-bound sandbox counts only from that address."""
    one = await rig.sandbox(channel={"kind": "address", "address": "192.0.2.7"})
    for peer, kind in (("192.0.2.8", Refused), ("", Refused), ("192.0.2.7", Opened)):
        answer = await ask(rig, sealed(worker, statement(rig, one, evidence=Evidence(token=one.token, peer=peer))))
        assert isinstance(answer, kind), peer


@pytest.mark.parametrize(
    ("sentence", "headers"),
    [
        ("another sandbox's placeholder in the slot", lambda mine, other: (("X-Api-Key", other["SHOP_API_KEY"]),)),
        ("another credential's placeholder in the slot", lambda mine, other: (("X-Api-Key", mine["STOCK_TOKEN"]),)),
        ("the placeholder beside the slot", lambda mine, other: (("X-Data", mine["SHOP_API_KEY"]),)),
        (
            "one in the slot and one beside it",
            lambda mine, other: (("X-Api-Key", mine["SHOP_API_KEY"]), ("X-Data", mine["SHOP_API_KEY"])),
        ),
        (
            "the slot twice",
            lambda mine, other: (("X-Api-Key", mine["SHOP_API_KEY"]), ("X-Api-Key", mine["SHOP_API_KEY"])),
        ),
        ("text around it", lambda mine, other: (("X-Api-Key", "x" + mine["SHOP_API_KEY"]),)),
    ],
)
async def test_a_misused_placeholder_opens_nothing(rig, worker, sentence, headers) -> None:
    """Only this sandbox's placeholder of this credential, alone in its slot, is taken; the refusals look alike."""
    mine, other = await rig.sandbox(), await rig.sandbox()
    wanted = (("Host", "orders.shop.example"), *headers(mine.environment, other.environment))
    answer = await ask(rig, sealed(worker, statement(rig, mine, headers=wanted)))
    assert isinstance(answer, Refused), sentence
    assert answer.reason in ("placeholder-misuse", "client-authority"), sentence
    shown = str([event.fields for event, _ in rig.journal.events])
    assert not any(value in shown for value in (*mine.environment.values(), *other.environment.values()))


async def test_a_foreign_placeholder_is_an_alarm(rig, worker) -> None:
    """What passes the shape and fails the hash is recorded as misuse."""
    mine, other = await rig.sandbox(), await rig.sandbox()
    wanted = (("Host", "orders.shop.example"), ("X-Api-Key", other.environment["SHOP_API_KEY"]))
    answer = await ask(rig, sealed(worker, statement(rig, mine, headers=wanted)))
    assert isinstance(answer, Refused)
    assert answer.reason == "placeholder-misuse"
    assert rig.journal.names()[-1] == "placeholder.misused"


async def test_an_attestation_that_does_not_belong_opens_nothing(rig, worker) -> None:
    """What an executor says of a body counts only with the digest that the statement names."""
    created = await rig.sandbox()
    attested = BodyAttested(operations=frozenset({"agent/orders.read"}), sha256=b"a" * 32)
    plain = statement(rig, created)
    judged = statement(rig, created, body=BodyPlan.judged(b"{}"))
    begun = statement(rig, created, body=BodyPlan.begun(b"{}", None))
    for made in (plain, judged, begun):
        answer = await ask(rig, sealed(worker, made), attested)
        assert isinstance(answer, Refused)
    assert reasons(rig) == ["attestation-mismatch"] * 3


async def test_what_a_broken_worker_gets_in_all(rig, worker) -> None:
    """RULINGS 2.2: with its key and one sandbox's token, that sandbox's operations and nothing else ever open."""
    mine = await rig.sandbox()
    await rig.sandbox()
    answer = await ask(rig, sealed(worker, statement(rig, mine)))
    assert isinstance(answer, Opened)
    document = rig.vault.desk.snapshot.document
    for value in (SECRET, OTHER_SECRET, mine.token.encode(), b"store:", *map(str.encode, mine.environment.values())):
        assert value not in document


# --- what arms --------------------------------------------------------------------------------------------------------


def asked_of(rig, created) -> object:
    """The request of the role `launched`, with whatever evidence its channel needs."""
    alone = bool(created.channel_key)
    evidence = Evidence(channel_key=created.channel_key) if alone else Evidence(token=created.token)
    return statement(rig, created, evidence=evidence, rule="launched/orders.read", operation="launched/orders.read")


@pytest.mark.parametrize("kind", ["shared", "port", "unix", "namespace"])
async def test_without_a_proof_no_credential_is_used(rig, worker, monkeypatch, kind) -> None:
    """RULINGS 6.2: on whatever channel, a sandbox that nobody saw confined gets nothing, and no source is asked."""
    asked: list[object] = []
    monkeypatch.setattr(rig.vault.supply._sources, "_fetch", lambda *args, **kwargs: asked.append(args))
    created = await rig.sandbox(role="launched", channel={"kind": kind})
    answer = await ask(rig, sealed(worker, asked_of(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "boundary-unproven"
    assert reasons(rig) == ["boundary-unproven"]
    assert asked == []
    assert "broker.intent" not in rig.journal.names()


@pytest.mark.parametrize("kind", ["shared", "port", "unix", "address"])
async def test_only_the_launchers_namespaces_can_be_proven(rig, worker, kind) -> None:
    """A channel that others could reach from outside a namespace is not armed by anybody's word."""
    channel = {"kind": kind} | ({"address": "192.0.2.7"} if kind == "address" else {})
    created = await rig.sandbox(role="launched", channel=channel)
    with pytest.raises(BrokerError) as refused:
        await rig.vault.desk.prove_boundary(created.record.sandbox.id, "namespaces", "test")
    assert refused.value.code == "bad-boundary"
    assert "boundary.proven" not in rig.journal.names()
    assert rig.vault.table.get(created.record.sandbox.id).boundary == ""


@pytest.mark.parametrize("word", ["", "external", "doctor", "Namespaces"])
async def test_no_other_word_arms(rig, worker, word) -> None:
    """What a doctor says from inside, or any other word, proves nothing."""
    created = await rig.sandbox(role="launched", channel={"kind": "namespace"})
    with pytest.raises(BrokerError):
        await rig.vault.desk.prove_boundary(created.record.sandbox.id, word, "test")
    answer = await ask(rig, sealed(worker, asked_of(rig, created)))
    assert isinstance(answer, Refused)


async def test_a_proof_that_is_not_on_record_arms_nothing(rig, worker) -> None:
    """When the log does not take boundary.proven, neither memory nor state holds it."""
    created = await rig.sandbox(role="launched", channel={"kind": "namespace"})
    rig.journal.failing = True
    with pytest.raises(AuditUnavailable):
        await rig.vault.desk.prove_boundary(created.record.sandbox.id, "namespaces", "test")
    rig.journal.failing = False
    answer = await ask(rig, sealed(worker, asked_of(rig, created)))
    assert isinstance(answer, Refused)
    assert [record.boundary for record in await rig.vault.desk.history()] == [""]


async def test_a_role_that_loses_its_boundary_arms_nobody(rig, worker) -> None:
    """`boundary: external` counts while it stands in the policy in force."""
    created = await rig.sandbox()
    text = rig.policy_path.read_text()
    rig.policy_path.write_text("\n".join(line for line in text.splitlines() if "boundary:" not in line))
    await rig.vault.desk.reload("test")
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "boundary-unproven"


async def test_a_role_that_gets_a_boundary_arms_only_who_comes_then(rig, worker) -> None:
    """Every arming is on record at a creation, so an older sandbox is not armed by a reload."""
    before = await rig.sandbox(role="launched")
    text = rig.policy_path.read_text()
    stated = "  launched:\n    boundary: {external: tests, reason: later}\n"
    rig.policy_path.write_text(text.replace("  launched:\n", stated))
    await rig.vault.desk.reload("test")
    after = await rig.sandbox(role="launched")
    assert isinstance(await ask(rig, sealed(worker, asked_of(rig, before))), Refused)
    assert isinstance(await ask(rig, sealed(worker, asked_of(rig, after))), Opened)
    created = [event.fields.get("boundary") for event in rig.journal.named("sandbox.created")]
    assert created == [None, "external: tests"]


async def test_what_the_launcher_saw_arms(rig, worker) -> None:
    """With boundary.proven durably on record, the same request opens; after a restart too."""
    created = await rig.sandbox(role="launched", channel={"kind": "namespace"})
    box = created.record.sandbox
    await rig.vault.desk.prove_boundary(box.id, "namespaces", "test")
    assert isinstance(await ask(rig, sealed(worker, asked_of(rig, created))), Opened)
    (event, durable) = next(item for item in rig.journal.events if item[0].name == "boundary.proven")
    assert durable
    assert (event.fields["sandbox"], event.fields["boundary"]) == (box.id, "namespaces")
    assert [record.boundary for record in await rig.vault.desk.history()] == ["namespaces"]


# --- what ends, and what is unavailable -------------------------------------------------------------------------------


async def test_an_ended_sandbox_opens_nothing(rig, worker) -> None:
    """After the end its token is answered as ended."""
    created = await rig.sandbox()
    await rig.vault.desk.end(created.record.sandbox.id, "test")
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "sandbox-ended"


async def test_time_ends_a_sandbox_without_any_sweep(rig, worker) -> None:
    """At its last second it is over, whether or not it was swept."""
    created = await rig.sandbox(ttl=10)
    rig.clock.advance(10)
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "sandbox-ended"


async def test_a_clock_set_back_opens_nothing(rig, worker) -> None:
    """Behind the floor no credential is opened (RULINGS 9.6)."""
    created = await rig.sandbox()
    rig.clock.set_back = True
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert reasons(rig) == ["clock-behind"]


async def test_a_gone_worker_counts_no_more(rig, worker) -> None:
    """When a worker's stream ends, what it sealed is void."""
    raw = sealed(worker, statement(rig, await rig.sandbox()))
    worker.close()
    async with asyncio.timeout(60):
        while rig.vault.fleet.members("worker"):
            await asyncio.sleep(0)
        while rig.vault._keys:
            await asyncio.sleep(0)
    answer = await ask(rig, raw)
    assert isinstance(answer, Refused)
    assert reasons(rig) == ["worker-unknown"]


async def test_a_missing_secret_is_unavailable_and_comes_back(rig, worker) -> None:
    """T17: without the value the call is refused with its code; with it again it opens."""
    created = await rig.sandbox()
    await rig.vault.desk.remove_secret("shop/orders", "test")
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "credential-unavailable"
    assert reasons(rig) == ["source-missing"]
    await rig.vault.desk.add_secret("shop/orders", SECRET, owner="team-orders", scrub=True, actor="test")
    assert isinstance(await ask(rig, sealed(worker, statement(rig, created))), Opened)


async def test_without_a_durable_intent_nothing_opens(rig, worker) -> None:
    """I21: a log that cannot be written keeps the secret in."""
    created = await rig.sandbox()
    rig.journal.failing = True
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "audit-unavailable"


@pytest.mark.parametrize("part", ["decide_request", "facts_of", "check_fresh", "placeholder_fits"])
async def test_any_exception_is_a_refusal(rig, worker, monkeypatch, capsys, part) -> None:
    """Kill switch: whatever raises inside the procedure, the answer is internal-error and shows nothing."""
    created = await rig.sandbox()

    def fail(*args, **kwargs):
        canary = SECRET.decode()
        raise RuntimeError(f"with {canary}")

    monkeypatch.setattr(open_module, part, fail)
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "internal-error"
    assert "broker.intent" not in rig.journal.names()
    shown = capsys.readouterr()
    assert "canary" not in shown.err + shown.out + str([event.fields for event, _ in rig.journal.events])


async def test_a_source_that_raises_is_a_refusal(rig, worker, monkeypatch, capsys) -> None:
    """Also an exception in a source's thread, with the value in a local, ends as a code."""

    def fail(*args, **kwargs):
        canary = SECRET
        raise OSError(str(canary))

    monkeypatch.setattr(rig.vault.supply._sources, "_fetch", fail)
    answer = await ask(rig, sealed(worker, statement(rig, await rig.sandbox())))
    assert isinstance(answer, Refused)
    assert answer.reason == "internal-error"
    assert "canary" not in capsys.readouterr().err


async def test_what_is_revoked_while_the_log_is_written_stays_shut(rig, worker, monkeypatch) -> None:
    """Step 12: a sandbox that ends between decision and release gets nothing (I27)."""
    created = await rig.sandbox()
    append = rig.journal.append

    async def slow(event, *, durable=False):
        if event.name == "broker.intent":
            rig.vault.table.drop("default", created.record.sandbox.id)
        return await append(event, durable=durable)

    monkeypatch.setattr(rig.journal, "append", slow)
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Refused)
    assert answer.reason == "sandbox-ended"


# --- budgets, holds, echoes -------------------------------------------------------------------------------------------


async def test_limits_are_charged_per_sandbox_and_rule(rig, worker) -> None:
    """The fourth request of a minute is refused with the seconds to wait; another sandbox is untouched."""
    mine, other = await rig.sandbox(), await rig.sandbox()
    for _ in range(3):
        assert isinstance(await ask(rig, sealed(worker, statement(rig, mine))), Opened)
    answer = await ask(rig, sealed(worker, statement(rig, mine)))
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.rule) == ("limit-reached", "agent/orders.read")
    assert 0 < answer.retry_after <= 61
    assert isinstance(await ask(rig, sealed(worker, statement(rig, other))), Opened)
    rig.clock.advance(60)
    assert isinstance(await ask(rig, sealed(worker, statement(rig, mine))), Opened)


async def test_a_held_request_gets_a_ticket_and_is_not_sent(rig, worker) -> None:
    """`approval:` refuses with a ticket, recorded durably once; an honest retry gets the same one."""
    created = await rig.sandbox()
    change = {"method": "POST", "target": "/release", "rule": "agent/release", "operation": "agent/release"}
    first = await ask(rig, sealed(worker, statement(rig, created, arguments=(), **change)))
    again = await ask(rig, sealed(worker, statement(rig, created, arguments=(), **change)))
    assert isinstance(first, Refused)
    assert isinstance(again, Refused)
    assert first.reason == "approval-required"
    assert first.ticket.startswith("tk_")
    assert again.ticket == first.ticket
    requested = [durable for event, durable in rig.journal.events if event.name == "approval.requested"]
    assert requested == [True]
    assert "broker.intent" not in rig.journal.names()


# --- yes --------------------------------------------------------------------------------------------------------------


async def test_a_sound_statement_opens_exactly_its_credential(rig, worker) -> None:
    """The material is that of the permit; what else is bound there comes as scrub; the durable intent came first."""
    created = await rig.sandbox()
    answer = await ask(rig, sealed(worker, statement(rig, created)))
    assert isinstance(answer, Opened)
    assert answer.material is not None
    assert answer.material.parts["value"].reveal() == SECRET
    assert (answer.material.version, answer.material.owner) == ("1", "team-orders")
    assert [secret.reveal() for secret in answer.scrub] == [OTHER_SECRET]
    event, durable = rig.journal.events[-1]
    assert (event.name, durable) == ("broker.intent", True)
    wanted = {
        "tenant": "default",
        "sandbox": created.record.sandbox.id,
        "owner": "o",
        "agent": "a",
        "role": "agent",
        "rule": "agent/orders.read",
        "policy": rig.vault.desk.active().digest,
        "credential": "shop-orders",
        "credential_version": "1",
        "credential_owner": "team-orders",
        "host": "orders.shop.example",
        "path": "/v1/orders/7",
    }
    assert {name: event.fields.get(name) for name in wanted} == wanted


async def test_no_placeholder_is_needed(rig, worker) -> None:
    """A client that sends nothing in the slot is served too: the operation is what is permitted."""
    created = await rig.sandbox()
    made = statement(rig, created, headers=(("Host", "orders.shop.example"),))
    assert isinstance(await ask(rig, sealed(worker, made)), Opened)


async def test_another_digest_with_the_same_verdict_opens(rig, worker) -> None:
    """Digests differ: the broker's verdict counts, and it is yes (RULINGS 2.4)."""
    created = await rig.sandbox()
    answer = await ask(rig, sealed(worker, statement(rig, created, policy_digest="0" * 64, rule="agent/old")))
    assert isinstance(answer, Opened)
    assert answer.policy_digest == rig.vault.desk.active().digest


def test_placeholder_fits_needs_a_definition() -> None:
    """Without a credential no placeholder may stand anywhere in a head."""
    from rules.facts import RequestFacts, TunnelFacts
    from rules.placeholders import make

    value = make("sk_{24}", os.urandom(32))
    facts = RequestFacts.build(
        method="GET",
        scheme="https",
        tunnel=TunnelFacts.build("a.example:443"),
        target="/",
        headers=(("host", "a.example"), ("x-api-key", value)),
    )
    assert not placeholder_fits(facts, None, {})
