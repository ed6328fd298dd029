"""The exchanger: one refresh at a time, the next token written first, and nothing kept beyond its life."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import BrokerError
from broker.sources.base import SourceError
from broker.vault.exchanging import Exchanger
from broker.vault.secret import Secret
from broker.vault.store import SecretStore, StoreError
from net.client import Answer, NoAnswer, Question
from rules.exchanges import read_exchange
from rules.facts import Sandbox
from rules.names import CredentialRef, Host
from rules.policy import CredentialDef, DestinationDef, PlaceholderSpec
from tests.support.journal import MemoryJournal

NAME = "crm/refresh"
FIRST = b"refresh-0-canary-0123456789"
CLIENT_SECRET = b"canary-client-secret-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def wall(self) -> float:
        return self.now

    def boot(self) -> float:
        return self.now

    def behind(self) -> bool:
        return False


@dataclass
class World:
    """A store on disk, a token endpoint in memory, and an exchanger between them."""

    folder: Path
    key: bytes = b"k" * 32
    clock: Clock = field(default_factory=Clock)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    live: set[str] = field(default_factory=lambda: {FIRST.decode()})
    """Refresh tokens that the endpoint takes; each works once."""
    used: list[str] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    held: asyncio.Event | None = None
    """While set, the endpoint has decided and does not answer yet."""
    down: bool = False
    failing_writes: int = 0
    written: list[bytes] = field(default_factory=list)
    count: Any = field(default_factory=lambda: itertools.count(1))
    overlap: int = 0
    most_overlap: int = 0

    def __post_init__(self) -> None:
        self.folder.chmod(0o700)
        self.open()

    def open(self) -> None:
        """As a vault that starts: everything from disk, nothing from memory."""
        self.store = SecretStore(self.folder / "store.json", lambda _: self.key, lambda n: bytes(range(n)))
        if not self.store.names():
            self.store.add(NAME, FIRST, owner="o", now=0.0)
        self.exchanger = Exchanger(
            ask=self.ask,
            store=self.store,
            write_back=self.write_back,
            journal=self.journal,
            clock=self.clock,  # type: ignore[arg-type]
            random=lambda: 0.5,
            version_key=b"v" * 32,
        )

    async def ask(self, question: Question) -> Answer | NoAnswer:
        form = dict(parse_qsl(question.body.decode()))
        self.asked.append(form)
        if self.down:
            return NoAnswer(code="unreachable", detail="down")
        self.overlap += 1
        self.most_overlap = max(self.overlap, self.most_overlap)
        number = next(self.count)
        status, body = (
            200,
            {"access_token": f"access-{number}-canary-0123456789", "token_type": "Bearer", "expires_in": 3600},
        )
        if form["grant_type"] == "refresh_token":
            if form["refresh_token"] in self.live:
                self.live.discard(form["refresh_token"])
                self.used.append(form["refresh_token"])
                body["refresh_token"] = f"refresh-{number}-canary-0123456789"
                self.live.add(str(body["refresh_token"]))
            else:
                status, body = 400, {"error": "invalid_grant"}
        await asyncio.sleep(0)
        if self.held is not None:
            await self.held.wait()
        self.overlap -= 1
        return Answer(status=status, headers=(("content-type", "application/json"),), body=json.dumps(body).encode())

    async def write_back(self, name: str, value: bytes, credential: str) -> str:
        await asyncio.sleep(0)
        if self.failing_writes:
            self.failing_writes -= 1
            raise StoreError("store-unavailable", "No space left on device")
        self.written.append(value)
        return str(self.store.rotate(name, value, now=self.clock.now).version)

    def made(self, **written: Any) -> CredentialDef:
        form = read_exchange("oauth2", {"token_url": "https://token.test/t", "grant": "refresh_token", **written})
        return CredentialDef(
            name=CredentialRef("crm"),
            kind="oauth2",
            slot=form.slots[0],
            hosts=(Host("api.test"),),
            owner="o",
            placeholder=PlaceholderSpec(env="C", shape="sk_{24}"),
            params=form.params,
        )

    async def use(
        self,
        definition: CredentialDef | None = None,
        sandbox: str = "sb_a",
        secret: bytes = CLIENT_SECRET,
        places: Mapping[str, DestinationDef] | None = None,
    ) -> str:
        """One use; the access token that it gets."""
        made = definition or self.made()
        stored = {
            "client_id": Secret(b"crm", name="id", scrub=False),
            "client_secret": Secret(secret, name="secret", version=secret.decode()[-4:]),
        }
        references = {"client_id": "env:ID", "client_secret": "env:SECRET"}
        if made.params["grant"] == "refresh_token":
            stored["refresh_token"] = self.store.read(NAME)
            references["refresh_token"] = f"store:{NAME}"
        box = Sandbox(tenant="t", id=sandbox, epoch=1, role="r", owner=sandbox.replace("_", "-"), agent="a", task="t")
        parts = await self.exchanger.parts(made, references, stored, box, places or {})
        return parts["value"].reveal().decode()

    async def fails(self, **more: Any) -> str:
        with pytest.raises(BrokerError) as caught:
            await self.use(**more)
        assert "canary" not in f"{caught.value}{caught.value.detail}{caught.value.remedy}"
        return caught.value.code


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_two_uses_that_come_together_make_one_refresh(world: World) -> None:
    """And a refresh token never goes twice: the endpoint would take both for stolen."""
    tokens = await asyncio.gather(*(world.use(sandbox=f"sb_{n}") for n in range(20)))
    assert len(set(tokens)) == 1
    assert world.used == [FIRST.decode()]


async def test_two_narrowings_of_one_refresh_token_wait_for_each_other(world: World) -> None:
    """Each gets its own access token, one exchange after the other, each with the token that the last one left."""
    made = world.made(scopes=["r:${sandbox.owner}"])
    tokens = await asyncio.gather(*(world.use(made, sandbox=f"sb_{n}") for n in range(4)))
    assert len(set(tokens)) == 4
    assert world.most_overlap == 1
    assert len(set(world.used)) == len(world.used) == 4
    assert {form["scope"] for form in world.asked} == {f"r:sb-{n}" for n in range(4)}


async def test_the_next_refresh_token_is_on_disk_before_the_access_token_is_used(world: World) -> None:
    """What a new vault reads from the folder is the token that the endpoint will take."""
    seen: list[bool] = []
    write = world.write_back

    async def watched(name: str, value: bytes, credential: str) -> str:
        seen.append(any(done.done() for done in uses))
        return await write(name, value, credential)

    world.exchanger._write_back = watched
    uses = [asyncio.ensure_future(world.use())]
    await uses[0]
    assert seen == [False]
    world.open()
    assert world.store.read(NAME).reveal().decode() in world.live
    await world.use()


async def test_our_own_replacing_asks_nobody_again_and_an_operators_does(world: World) -> None:
    """The version of the stored token changes with each refresh; what was obtained stays good."""
    first = await world.use()
    assert await world.use() == first
    world.live.add("refresh-by-hand-canary")
    world.store.rotate(NAME, b"refresh-by-hand-canary", now=0.0)
    assert await world.use() != first
    assert world.used[-1] == "refresh-by-hand-canary"


async def test_a_refresh_that_nobody_waits_for_is_finished_and_written(world: World) -> None:
    """A client that hangs up must not cost the credential."""
    world.held = asyncio.Event()
    use = asyncio.ensure_future(world.use())
    while not world.used:
        await asyncio.sleep(0)
    use.cancel()
    await asyncio.gather(use, return_exceptions=True)
    closing = asyncio.ensure_future(world.exchanger.close())
    await asyncio.sleep(0)
    assert not closing.done()
    world.held.set()
    await closing
    assert world.store.read(NAME).reveal().decode() in world.live
    world.open()
    await world.use()


async def test_a_token_that_could_not_be_written_is_not_lost_and_nothing_is_used_before(world: World) -> None:
    """A full disk refuses the use; the next one writes first, and asks with what was kept."""
    world.failing_writes = 2
    assert await world.fails() == "exchange-unwritten"
    assert world.store.read(NAME).reveal() == FIRST
    world.clock.now += 60
    assert await world.fails() == "exchange-unwritten"
    assert len(world.used) == 1, "it asked again although it could not write"
    world.clock.now += 60
    await world.use()
    assert len(world.written) == 2
    assert world.store.read(NAME).reveal().decode() in world.live


async def test_an_operators_new_token_beats_one_that_could_not_be_written(world: World) -> None:
    """Whoever signed in again meant it."""
    world.failing_writes = 1
    assert await world.fails() == "exchange-unwritten"
    world.live.add("refresh-by-hand-canary")
    world.store.rotate(NAME, b"refresh-by-hand-canary", now=0.0)
    world.clock.now += 60
    await world.use()
    assert world.used[-1] == "refresh-by-hand-canary"


async def test_a_crash_between_answer_and_write_is_a_no_until_somebody_signs_in_again(world: World) -> None:
    """What is documented: the next token was lost with the process, and the old one is used up."""
    world.held = asyncio.Event()
    use = asyncio.ensure_future(world.use())
    while not world.used:
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # the process is gone: nothing of it goes on
    await asyncio.gather(use, return_exceptions=True)
    world.held = None
    world.open()
    assert await world.fails() == "exchange-refused"
    world.live.add("refresh-by-hand-canary")
    world.store.rotate(NAME, b"refresh-by-hand-canary", now=0.0)
    await world.use()


async def test_a_stored_part_that_changes_counts_at_once(world: World) -> None:
    """A token that was obtained with the old client secret is not used after it was replaced."""
    made = world.made(grant="client_credentials")
    first = await world.use(made)
    assert await world.use(made) == first
    assert await world.use(made, secret=b"canary-client-secret-9876543210") != first


async def test_an_endpoint_that_is_down_is_not_asked_for_each_request(world: World) -> None:
    """A failure holds for a few seconds, then the endpoint is asked again and all recovers."""
    world.down = True
    for _ in range(5):
        assert await world.fails() == "exchange-unreachable"
    assert len(world.asked) == 1
    world.down = False
    world.clock.now += 11
    await world.use()
    assert world.journal.names() == ["secret.unavailable", "secret.fetched"]


async def test_a_token_is_replaced_early_and_never_used_after_its_end(world: World) -> None:
    """From about four fifths of its life on, a use asks for the next one beside itself; after its end none is left."""
    first = await world.use()
    world.clock.now += 3000
    assert await world.use() == first
    async with asyncio.timeout(20):
        while await world.use() == first:
            await asyncio.sleep(0)
    assert len(world.used) == 2
    world.down = True
    world.clock.now += 3600
    assert await world.fails() == "exchange-unreachable"


async def test_a_refused_token_is_asked_for_anew_and_an_ended_sandbox_holds_nothing(world: World) -> None:
    """After an upstream's 401, and at the end of a sandbox that had its own."""
    made = world.made(grant="client_credentials")
    first = await world.use(made)
    assert not world.exchanger.could_reject("crm", ("t", "sb_a"))
    world.clock.now += 10
    assert world.exchanger.could_reject("crm", ("t", "sb_a"))
    assert world.exchanger.reject("crm", ("t", "sb_a"))
    assert await world.use(made) != first
    box = Sandbox(tenant="t", id="sb_a", epoch=1, role="r", owner="o", agent="a", task="t")
    assert world.exchanger.parts_in_use("crm", box)
    world.exchanger.ended(("t", "sb_a"))
    assert world.exchanger.parts_in_use("crm", box) == {}


async def test_clear_text_is_refused_unless_the_operators_file_says_it(world: World) -> None:
    """Checked when it was loaded, and once more where the question is made."""
    made = world.made(grant="client_credentials", token_url="http://token.test/t")
    assert await world.fails(definition=made) == "exchange-material"
    assert world.asked == []
    place = DestinationDef(host=Host("token.test"), scheme="http")
    world.clock.now += 60
    await world.use(made, places={"token.test": place})


async def test_nothing_is_handed_out_that_is_not_on_record(world: World) -> None:
    """The log cannot be written: no token. The next refresh token is stored all the same."""
    world.journal.failing = True
    assert await world.fails() == "exchange-refused"
    assert world.store.read(NAME).reveal().decode() in world.live


async def test_records_hold_digests_and_no_token(world: World) -> None:
    """Who, by which kind, for how long, and a keyed fingerprint."""
    await world.use()
    (event,) = world.journal.named("secret.fetched")
    assert event.fields["source"] == "oauth2"
    assert event.fields["ttl_s"] == 3540
    assert "canary" not in repr(world.journal.events)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.integers(0, 3)),
            st.tuples(st.just("wait"), st.sampled_from([1, 12, 3000, 4000])),
            st.tuples(st.just("full"), st.integers(0, 2)),
            st.tuples(st.just("down"), st.booleans()),
            st.tuples(st.just("many"), st.integers(2, 5)),
            st.tuples(st.just("refuse"), st.integers(0, 3)),
        ),
        max_size=14,
    )
)
async def test_whatever_happens_short_of_a_crash_the_line_of_refresh_tokens_holds(
    steps: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Full disks, silences, refusals and crowds in any order: no refresh token goes twice, and the last one works."""
    world = World(tmp_path_factory.mktemp("line"))
    made = world.made(scopes=["r:${sandbox.owner}"])
    for step, value in steps:
        match step:
            case "use":
                await asyncio.gather(world.use(made, sandbox=f"sb_{value}"), return_exceptions=True)
            case "many":
                uses = (world.use(made, sandbox=f"sb_{n}") for n in range(value))
                results = await asyncio.gather(*uses, return_exceptions=True)
                assert all(isinstance(result, str | SourceError) for result in results)
            case "wait":
                world.clock.now += value
            case "full":
                world.failing_writes = value
            case "down":
                world.down = value
            case _:
                world.exchanger.reject("crm", ("t", f"sb_{value}"))
    await world.exchanger.close()
    assert len(set(world.used)) == len(world.used)
    assert world.most_overlap <= 1
    waiting = {entry.value.reveal().decode() for entry in world.exchanger._unwritten.values()}
    assert {world.store.read(NAME).reveal().decode()} & world.live or waiting & world.live
