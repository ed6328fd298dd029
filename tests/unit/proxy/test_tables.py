"""The small counted and indexed things: identity, limits, live set, directory, recent refusals."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace

import pytest

from proxy.directory import SnapshotDirectory, SnapshotInvalid, read_snapshot
from proxy.identity import Identified, identify, same_identity
from proxy.limits import DIVIDED, REGISTRIES, Budgets, Connections, LimitTable, RefusalLeaves, RefusalPace, Spaced
from proxy.liveset import Live
from proxy.ports import Directory, DirectoryUnavailable, LiveKey
from proxy.recent import PER_SANDBOX, RecentRefusals, RefusalNote
from rules.catalogue import builtin_services
from rules.decide import decide_request
from rules.decision import Permit
from rules.facts import RequestFacts, TunnelFacts
from rules.names import Host
from tests.support.fakes import (
    OTHER_TOKEN,
    SHARED,
    TOKEN,
    ManualClock,
    MemoryDirectory,
    registered,
    sandbox,
    snapshot,
)
from tests.support.rooms import basic, op, policy, rule
from tests.support.rows import every_row

RULES = policy(rule("dev/read", op("dev/read", "**.wild.test", ["/**"], query=None)))
BOX = sandbox("sb_one")
NOW = 1_800_000_000.0


def pair(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# --- identity ----------------------------------------------------------------------------------------------------


@every_row(
    ("sentence", "presented", "expected"),
    [
        ("nothing came", (), "auth-required"),
        ("two of them", (basic(), basic()), "bad-token"),
        ("another scheme", (f"Digest {TOKEN}",), "bad-token"),
        ("no base64", ("Basic !!!",), "bad-token"),
        ("an empty pair", (pair("", ""),), "bad-token"),
        ("an unknown token", (basic("nobody"),), "bad-token"),
        ("not ASCII", (pair("session", "t\u00f6ken"),), "bad-token"),
        ("far too long", (pair("session", "x" * 4000),), "bad-token"),
        ("tokens of two sandboxes", (pair(TOKEN, OTHER_TOKEN),), "bad-token"),
        ("one that was valid once", (basic("ended"),), "sandbox-ended"),
        ("as password", (basic(),), "sb_one"),
        ("as user", (pair(TOKEN, ""),), "sb_one"),
        ("as Bearer", (f"Bearer {TOKEN}",), "sb_one"),
        ("scheme in another case", (f"bearer {TOKEN}",), "sb_one"),
    ],
)
def test_who_speaks_on_a_shared_listener(sentence: str, presented: tuple[str, ...], expected: str) -> None:
    """A token is required, and only a known one counts."""
    known = snapshot(RULES, [registered(BOX, TOKEN), registered(sandbox("sb_two"), OTHER_TOKEN)])
    known = replace(known, ended_tokens=frozenset({hashlib.sha256(b"ended").digest()}))
    found = identify(SHARED, presented, known, NOW)
    told = found.sandbox.id if isinstance(found, Identified) else found.reason
    assert told == expected, sentence


def test_a_bound_address_narrows_a_token() -> None:
    """The right token from another address is bad-token."""
    known = snapshot(RULES, [registered(BOX, TOKEN, address="192.0.2.7")])
    assert isinstance(identify(SHARED, (basic(),), known, NOW), Identified)
    moved = identify(replace(SHARED, peer="192.0.2.8"), (basic(),), known, NOW)
    assert not isinstance(moved, Identified)
    assert moved.reason == "bad-token"


def test_a_sandbox_over_its_time_has_ended() -> None:
    """The clock ends it without the vault's help."""
    known = snapshot(RULES, [registered(sandbox("sb_one", expires_at=NOW), TOKEN)])
    found = identify(SHARED, (basic(),), known, NOW)
    assert not isinstance(found, Identified)
    assert found.reason == "sandbox-ended"


def test_a_later_head_must_show_the_same_evidence() -> None:
    """On a shared listener the token comes with every request."""
    who = Identified(sandbox=BOX, channel=SHARED, token=TOKEN)
    assert same_identity(who, (basic(),))
    assert not same_identity(who, ())
    assert not same_identity(who, (basic(OTHER_TOKEN),))
    assert "token" not in repr(who).replace("token=", "")


# --- limits ------------------------------------------------------------------------------------------------------


def permitted(host: str, path: str = "/x") -> tuple[Permit, RequestFacts]:
    facts = RequestFacts.build(
        method="GET",
        scheme="https",
        tunnel=TunnelFacts(host=Host(host), port=443),
        target=path,
        headers=(("host", host),),
    )
    answer = decide_request(RULES, BOX, facts, NOW)
    assert isinstance(answer, Permit), answer
    return answer, facts


def test_names_under_a_wildcard_are_counted_and_freeze_the_operation() -> None:
    """The budget's last name passes, the next freezes; an hour later it starts anew."""
    clock = ManualClock()
    budgets = Budgets(LimitTable(names_under_wildcard=2), clock)
    told = [budgets.charge(RULES, *permitted(f"{name}.wild.test")) for name in ("a", "b", "a", "c", "a")]
    assert told == [None, None, None, "limit-reached", "limit-reached"]
    clock.advance(3600)
    assert budgets.charge(RULES, *permitted("c.wild.test")) is None


def test_distinct_paths_are_counted_per_host() -> None:
    """A path that was seen costs nothing."""
    budgets = Budgets(LimitTable(paths_per_host=2), ManualClock())
    told = [budgets.charge(RULES, *permitted("a.wild.test", path)) for path in ("/1", "/2", "/1", "/3")]
    assert told == [None, None, None, "limit-reached"]


def test_names_that_a_registry_does_not_have_are_counted() -> None:
    """Two misses freeze the operation for the hour; a 404 of anything but a registry says nothing."""
    permit, facts = permitted("a.wild.test")
    clock = ManualClock()
    budgets = Budgets(LimitTable(missing_per_registry=2), clock)
    budgets.missed(permit, "problem")
    budgets.missed(permit, "pypi")
    assert budgets.charge(RULES, permit, facts) is None
    budgets.missed(permit, "pypi")
    assert budgets.charge(RULES, permit, facts) == "limit-reached"
    clock.advance(3600)
    assert budgets.charge(RULES, permit, facts) is None


@every_row(
    "service",
    (
        "alpine conda crates debian dockerhub ghcr go huggingface maven npm nuget oci pypi pytorch quay rubygems "
        "terraform ubuntu ubuntu-ppa gradle google-maven packagist hex pub"
    ).split(),
)
def test_every_registry_of_the_catalogue_is_one_here(service: str) -> None:
    """A made-up name is a word said to whoever runs it, whatever the language."""
    reads = builtin_services()[service].select("read")
    assert reads
    assert {operation.native for operation in reads} <= REGISTRIES


def test_an_upload_reservation_is_bounded_and_given_back() -> None:
    """Bodies of unknown length take a quarter at most; what they did not use returns."""
    permit, _ = permitted("a.wild.test")
    budgets = Budgets(LimitTable(read_upload_bytes=400), ManualClock())
    assert [budgets.reserve_upload(permit) for _ in range(5)] == [100, 100, 100, 100, 0]
    budgets.refund_upload(permit, 60)
    assert budgets.reserve_upload(permit) == 60


def test_refusal_leaves_have_two_budgets() -> None:
    """Per minute and in all."""
    clock = ManualClock()
    leaves = RefusalLeaves(LimitTable(refusal_leaves_per_minute=2, refusal_leaves_total=3), clock)
    assert [leaves.take(BOX) for _ in range(3)] == [True, True, False]
    clock.advance(61)
    assert [leaves.take(BOX) for _ in range(2)] == [True, False]


def test_refusals_beyond_the_pace_are_told_apart() -> None:
    """One second's pace does not touch another sandbox or the next second."""
    clock = ManualClock()
    pace = RefusalPace(LimitTable(refusals_per_second=2), clock)
    assert [pace.within(("t", "a")) for _ in range(3)] == [True, True, False]
    assert pace.within(("t", "b"))
    clock.advance(1)
    assert pace.within(("t", "a"))


def test_what_is_done_too_often_is_done_late() -> None:
    """Beyond a second's worth it is spaced, five seconds late at most; a neighbour does not wait, nor a later time."""
    clock = ManualClock()
    spaced = Spaced(LimitTable(refusals_per_second=2), clock)
    assert [spaced.count(("t", "a")) for _ in range(4)] == [0.0, 0.0, 0.5, 1.0]
    assert [spaced.behind(("t", "a")) for _ in range(2)] == [1.0, 1.0]
    assert [spaced.count(("t", "a")) for _ in range(20)][-1] == 5.0
    assert (spaced.behind(("t", "b")), spaced.count(("t", "b"))) == (0.0, 0.0)
    clock.advance(6)
    assert [spaced.count(("t", "a")) for _ in range(3)] == [0.0, 0.0, 0.5]
    full = Spaced(LimitTable(refusals_per_second=2, sandboxes=1), clock)
    assert [full.count(("t", "a")), full.count(("t", "b"))] == [0.0, 5.0]
    clock.advance(1)
    assert full.count(("t", "b")) == 0.0


class Told:
    """What was said to be frozen."""

    def __init__(self) -> None:
        self.frozen: list[tuple[tuple[str, str], str, str, int]] = []

    def __call__(self, owner: tuple[str, str], operation: str, budget: str, seconds: int) -> None:
        self.frozen.append((owner, operation, budget, seconds))


@pytest.mark.parametrize(
    ("budget", "table", "hosts"),
    [
        ("names under a wildcard", LimitTable(names_under_wildcard=1), ["a.wild.test", "b.wild.test"]),
        ("hosts", LimitTable(hosts_per_sandbox=1), ["a.wild.test", "b.wild.test"]),
        ("paths", LimitTable(paths_per_host=0), ["a.wild.test"]),
        ("query bytes", LimitTable(query_bytes_per_host=-1), ["a.wild.test"]),
    ],
)
def test_what_is_frozen_is_told_once_with_its_budget(budget: str, table: LimitTable, hosts: list[str]) -> None:
    """Which operation, for which budget, and how many seconds are left; not again with every further refusal."""
    clock, told = ManualClock(), Told()
    budgets = Budgets(table, clock, on_frozen=told)
    answers = [budgets.charge(RULES, *permitted(host)) for host in (*hosts, *hosts)]
    assert answers[-1] == "limit-reached"
    assert told.frozen == [((BOX.tenant, BOX.id), "dev/read", budget, 3600)]


def test_a_thawed_sandbox_has_its_budgets_anew() -> None:
    """Forgetting what was used frees the operation at once; it can freeze, and be told, again."""
    told = Told()
    budgets = Budgets(LimitTable(names_under_wildcard=1), ManualClock(), on_frozen=told)
    names = ("a.wild.test", "b.wild.test")
    assert [budgets.charge(RULES, *permitted(name)) for name in names] == [None, "limit-reached"]
    budgets.forget(BOX.tenant, BOX.id)
    assert [budgets.charge(RULES, *permitted(name)) for name in reversed(names)] == [None, "limit-reached"]
    assert len(told.frozen) == 2


def flood(pace: RefusalPace, clock: ManualClock, seconds: int, key: tuple[str, str] = ("t", "a")) -> None:
    for _ in range(seconds):
        for _ in range(5):
            pace.within(key)
        clock.advance(1)


def test_a_flood_that_goes_on_freezes_the_sandbox() -> None:
    """Too many refusals in ten seconds in a row, and everything is refused for a minute; a neighbour is not frozen."""
    clock, told = ManualClock(), Told()
    pace = RefusalPace(LimitTable(refusals_per_second=2), clock, on_frozen=told)
    flood(pace, clock, 10)
    assert not pace.frozen(("t", "a"))
    flood(pace, clock, 1)
    assert pace.frozen(("t", "a"))
    assert not pace.frozen(("t", "b"))
    assert told.frozen == [(("t", "a"), "", "refusals", 60)]
    clock.advance(60)
    assert not pace.frozen(("t", "a"))


def test_a_flood_with_a_pause_freezes_nothing() -> None:
    """Seconds with too many refusals count only in a row; so a client that tries again now and then is not frozen."""
    clock, told = ManualClock(), Told()
    pace = RefusalPace(LimitTable(refusals_per_second=2), clock, on_frozen=told)
    for _ in range(6):
        flood(pace, clock, 8)
        clock.advance(1)
    assert told.frozen == []


def test_a_thawed_sandbox_is_not_frozen_for_its_flood() -> None:
    """Thawing ends it at once."""
    clock = ManualClock()
    pace = RefusalPace(LimitTable(refusals_per_second=2), clock)
    flood(pace, clock, 12)
    assert pace.frozen(("t", "a"))
    pace.forget("t", "a")
    assert not pace.frozen(("t", "a"))


def test_sources_without_a_sandbox_are_not_frozen() -> None:
    """Before identity there is nobody to freeze: others may come from the same address."""
    clock, told = ManualClock(), Told()
    pace = RefusalPace(LimitTable(refusals_per_second=2), clock, on_frozen=told)
    flood(pace, clock, 20, ("", "192.0.2.1"))
    assert not pace.frozen(("", "192.0.2.1"))
    assert told.frozen == []


@every_row("workers", [1, 2, 3, 7, 1000])
@every_row("name", DIVIDED)
def test_several_workers_share_each_budget(name: str, workers: int) -> None:
    """What all workers allow together is no more than one would, as long as each allows anything at all."""
    whole = getattr(LimitTable(), name)
    part = getattr(LimitTable().part(workers), name)
    assert part * workers <= max(whole, workers)
    assert part >= 1


def test_an_operation_that_states_its_own_upload_shares_it_too() -> None:
    """The bigger budget of a Git fetch is divided like the others."""
    permit = replace(permitted("a.wild.test")[0], operation="github/git.fetch", effect="read")
    alone, shared = (Budgets(LimitTable().part(n), ManualClock(), workers=n) for n in (1, 4))
    assert shared.upload(permit, 4 * 1024 * 1024)
    assert not shared.upload(permit, 1)
    assert alone.upload(permit, 16 * 1024 * 1024)


def test_connections_are_counted_before_and_after_identity() -> None:
    """A source may not fill the listener; identity moves the connection to its sandbox's count."""
    connections = Connections(LimitTable(source_unidentified=1, sandbox_connections=1))
    first = connections.arrive("l", "p")
    assert first is not None
    assert connections.arrive("l", "p") is None
    assert connections.identified(first, BOX)
    second = connections.arrive("l", "p")
    assert second is not None
    assert not connections.identified(second, BOX)
    connections.leave(first)
    assert connections.identified(second, BOX)
    connections.leave(second)
    assert connections.arrive("l", "p") is not None


# --- live set ----------------------------------------------------------------------------------------------------


def key(name: str = "sb_one", epoch: int = 1, digest: str = "d1") -> LiveKey:
    return LiveKey(
        tenant="default", sandbox=name, epoch=epoch, host="h", port=443, rule="r", digest=digest, kind="exchange"
    )


def test_a_new_snapshot_cuts_what_it_no_longer_allows() -> None:
    """Ended sandboxes, other epochs, refused entries and entries whose judgement raises."""
    live, cut = Live(), []

    def no(_: object) -> bool:
        return False

    def fault(_: object) -> bool:
        raise RuntimeError

    live.add(key("sb_gone"), lambda reason: cut.append(("gone", reason)))
    live.add(key(epoch=2), lambda reason: cut.append(("epoch", reason)))
    live.add(key(digest="d0"), lambda reason: cut.append(("refused", reason)), no)
    live.add(key(digest="d0"), lambda reason: cut.append(("fault", reason)), fault)
    live.add(key(digest="d0"), lambda reason: cut.append(("kept", reason)), lambda _: True)
    assert live.rejudge(snapshot(RULES, [registered(BOX, TOKEN)])) == 4
    assert {name for name, _ in cut} == {"gone", "epoch", "refused", "fault"}
    assert live.count() == 1


def test_a_cut_that_raises_keeps_nobody_else_open() -> None:
    """Every matching entry is cut and counted."""
    live, cut = Live(), []

    def broken(reason: str) -> None:
        raise RuntimeError

    live.add(key(), broken)
    handle = live.add(key(), cut.append)
    assert live.cut(lambda entry: entry.sandbox == "sb_one", "why") == 2
    assert cut == ["why"]
    handle.close()
    assert live.count() == 0


# --- directory ---------------------------------------------------------------------------------------------------


def directories() -> list[tuple[Directory, ManualClock]]:
    """The fake and the real one, holding the same snapshot."""
    clock = ManualClock()
    real = SnapshotDirectory(clock)
    real.install(snapshot(RULES, [registered(BOX, TOKEN)]))
    return [(MemoryDirectory(snapshot(RULES, [registered(BOX, TOKEN)])), clock), (real, clock)]


@pytest.mark.parametrize(("directory", "clock"), directories())
def test_every_directory_tells_its_snapshot(directory: Directory, clock: ManualClock) -> None:
    """The contract of fake and real."""
    assert directory.snapshot().policy is RULES
    assert list(directory.snapshot().sandboxes) == ["sb_one"]


@pytest.mark.parametrize("directory", [MemoryDirectory(), SnapshotDirectory(ManualClock())])
def test_no_directory_answers_without_a_snapshot(directory: Directory) -> None:
    """The contract of fake and real."""
    with pytest.raises(DirectoryUnavailable):
        directory.snapshot()


def test_silence_and_loss_of_the_vault_deny() -> None:
    """Two seconds without a heartbeat, or the channel's end."""
    clock = ManualClock()
    directory = SnapshotDirectory(clock)
    directory.install(snapshot(RULES, []))
    clock.advance(2.1)
    with pytest.raises(DirectoryUnavailable):
        directory.snapshot()
    directory.beat()
    assert directory.snapshot().generation == 1
    directory.lose()
    directory.beat()
    with pytest.raises(DirectoryUnavailable):
        directory.snapshot()


def test_an_older_generation_is_ignored_and_ended_tokens_are_remembered() -> None:
    """Generations only grow; a token that vanished is one that was valid once."""
    directory = SnapshotDirectory(ManualClock())
    directory.install(snapshot(RULES, [registered(BOX, TOKEN)], 2))
    directory.install(snapshot(RULES, [], 1))
    assert directory.generation == 2
    in_force = directory.install(snapshot(RULES, [], 3))
    assert len(in_force.ended_tokens) == 1


def document(**change: object) -> bytes:
    box = {
        "tenant": "default",
        "id": "sb_one",
        "epoch": 1,
        "role": "dev",
        "owner": "o",
        "agent": "a",
        "task": "t",
        "attributes": {},
        "expires_at": 5.0,
        "token_sha256": "00" * 32,
        "channel": {"kind": "namespace", "key_sha256": "11" * 32},
        "placeholders": {"shop": "22" * 32},
    }
    box.update(change)
    whole = {
        "generation": 7,
        "digest": RULES.digest,
        "document": {},
        "sandboxes": [box],
        "ended_tokens": ["33" * 32],
        "self": {"listener_ports": [3128], "addresses": ["198.51.100.1"], "internal_ranges": ["10.0.0.0/8"]},
    }
    return json.dumps(whole).encode()


def test_the_vaults_document_is_read_whole() -> None:
    """Every field of one sandbox, and what the dialer must not reach."""
    read = read_snapshot(7, document(), RULES)
    entry = read.sandboxes[next(iter(read.sandboxes))]
    assert entry.own_listener
    assert entry.channel_key_sha256 == b"\x11" * 32
    assert entry.placeholders == {"shop": b"\x22" * 32}
    assert read.addresses.listener_ports == frozenset({3128})
    assert read.ended_tokens == frozenset({b"\x33" * 32})


@pytest.mark.parametrize(
    ("sentence", "raw"),
    [
        ("not JSON", b"{"),
        ("another generation", document().replace(b'"generation": 7', b'"generation": 8')),
        ("an unknown channel", document(channel={"kind": "magic"})),
        ("a short digest", document(token_sha256="00")),
        ("an epoch that is no number", document(epoch="1")),
        ("an attribute that is no text", document(attributes={"a": 1})),
        ("a policy digest that does not fit its document", document().replace(b'"d1"', b'"d2"')),
    ],
)
def test_a_document_that_is_not_wholly_ours_is_refused(sentence: str, raw: bytes) -> None:
    """Nothing of it is put in force."""
    with pytest.raises(SnapshotInvalid):
        read_snapshot(7, raw, RULES)


# --- recent refusals ---------------------------------------------------------------------------------------------


def test_recent_refusals_are_ones_own_and_bounded() -> None:
    """Another sandbox's id is unknown; the oldest goes first."""
    recent = RecentRefusals()
    for number in range(PER_SANDBOX + 1):
        recent.note("t", "a", RefusalNote(request_id=str(number), at=0.0, reason="no-rule"))
    assert recent.find("t", "a", "0") is None
    assert recent.find("t", "a", "1") is not None
    assert recent.find("t", "b", "1") is None
    assert recent.newest("t", "a", 1)[0].request_id == str(PER_SANDBOX)
    recent.forget("t", "a")
    assert recent.newest("t", "a") == ()
