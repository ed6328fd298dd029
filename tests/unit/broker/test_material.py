"""The cache of what sources gave (broker/vault/material.py), with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import BrokerError
from broker.sources.base import SourceError, unreachable
from broker.vault import material
from broker.vault.material import Fresh, Key, MaterialCache, Times

KEY = Key(credential="github", references=("corp:kv/team/github",))
OWNER = ("default", "sb_a")
LEASED = Key(credential="database", references=("db:creds/ro",), owner=OWNER)
TIMES = Times(ttl=100.0, failure_ttl=5.0, stale=0.0)


@dataclass
class World:
    """A cache, its clock, what was asked and what was dropped."""

    now: float = 1000.0
    chance: float = 0.0
    asked: list[asyncio.Future[Fresh[str]]] = field(default_factory=list)
    offered: list[str | None] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache: MaterialCache[str] = MaterialCache(
            now=lambda: self.now, random=lambda: self.chance, on_drop=lambda _, value: self.dropped.append(value)
        )

    def obtain(self) -> Callable[[str | None], Awaitable[Fresh[str]]]:
        async def ask(before: str | None) -> Fresh[str]:
            answer: asyncio.Future[Fresh[str]] = asyncio.get_running_loop().create_future()
            self.asked.append(answer)
            self.offered.append(before)
            return await answer

        return ask

    async def use(self, key: Key = KEY, times: Times = TIMES) -> str:
        return (await self.cache.get(key, times, self.obtain())).value

    async def begun(self, count: int) -> None:
        """Until `count` questions were asked."""
        async with asyncio.timeout(60):
            while len(self.asked) < count:
                await asyncio.sleep(0)

    async def answered(self, value: str, key: Key = KEY, times: Times = TIMES, **more: float | None) -> str:
        """One use, answered with `value`."""
        use = asyncio.ensure_future(self.use(key, times))
        await self.begun(len(self.asked) + 1)
        self.asked[-1].set_result(Fresh(value=value, lasts=more.get("lasts")))
        return await use

    async def failed(self, error: BaseException, key: Key = KEY, times: Times = TIMES) -> SourceError:
        use = asyncio.ensure_future(self.use(key, times))
        await self.begun(len(self.asked) + 1)
        self.asked[-1].set_exception(error)
        with pytest.raises(SourceError) as caught:
            await use
        return caught.value


@pytest.fixture
def world() -> World:
    return World()


async def drained() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_failing_source_is_not_asked_for_each_request(world: World) -> None:
    """A no holds for failure_ttl, then it is asked again and serves without a restart (T17)."""
    said = await world.failed(SourceError("source-missing", "corp:kv/team/github", "put it there"))
    assert (said.code, said.detail, said.remedy) == ("source-missing", "corp:kv/team/github", "put it there")
    for _ in range(50):
        with pytest.raises(SourceError, match="source-missing"):
            await world.use()
    assert len(world.asked) == 1
    world.now += 5.0
    assert await world.answered("back") == "back"


async def test_a_copy_past_its_time_is_not_used(world: World) -> None:
    """With no `stale:`, a source that does not answer any more refuses once the copy's time is over."""
    await world.answered("old")
    world.now += 100.0
    error = await world.failed(unreachable("corp does not answer"))
    assert error.transient
    with pytest.raises(SourceError, match="source-unreachable"):
        await world.use()


async def test_a_no_ends_a_copy_that_may_be_stale(world: World) -> None:
    """What was removed or forbidden at its source is not served from before, however long `stale:` is."""
    times = replace(TIMES, stale=1000.0)
    await world.answered("old", times=times)
    world.now += 100.0
    await world.failed(SourceError("source-refused", "no"), times=times)
    assert world.dropped == ["old"]
    with pytest.raises(SourceError, match="source-refused"):
        await world.use(times=times)


async def test_a_stale_copy_serves_within_its_bound_only(world: World) -> None:
    """Where nobody answers, `stale:` seconds more and not one further; nobody waits for the silent source again."""
    times = replace(TIMES, stale=50.0)
    await world.answered("old", times=times)
    world.now += 100.0
    use = asyncio.ensure_future(world.cache.get(KEY, times, world.obtain()))
    await world.begun(2)
    world.asked[-1].set_exception(unreachable("silent"))
    copy = await use
    assert (copy.value, copy.stale) == ("old", True)
    world.now += 10.0
    again = await world.cache.get(KEY, times, world.obtain())
    assert again.stale
    await world.begun(3)
    world.asked[-1].set_exception(unreachable("silent"))
    await drained()
    world.now += 41.0
    await world.failed(unreachable("silent"), times=times)


async def test_a_copy_is_never_used_beyond_its_givers_word(world: World) -> None:
    """`stale:` does not lengthen a lease; a lease that is over on arrival is none."""
    times = replace(TIMES, stale=1000.0)
    await world.answered("lease", times=times, lasts=30.0)
    world.now += 30.0
    await world.failed(unreachable("silent"), times=times)
    world.now += 5.0
    use = asyncio.ensure_future(world.use(times=times))
    await world.begun(3)
    world.asked[-1].set_result(Fresh(value="over", lasts=0.0))
    with pytest.raises(SourceError, match="source-unreadable"):
        await use


async def test_one_question_at_a_time(world: World) -> None:
    """A hundred that come together ask once and all get the answer; one that leaves takes it from nobody."""
    uses = [asyncio.ensure_future(world.use()) for _ in range(100)]
    await world.begun(1)
    uses[0].cancel()
    await drained()
    world.asked[0].set_result(Fresh(value="v"))
    assert await asyncio.gather(*uses[1:]) == ["v"] * 99
    assert len(world.asked) == 1
    assert uses[0].cancelled()


async def test_the_next_copy_is_asked_for_before_the_time_is_over(world: World) -> None:
    """From 70 to 85 % of its life on, by chance; a use gets the old one at once, and a failure changes nothing."""
    for chance, part in ((0.0, 70.0), (1.0, 85.0)):
        world = World(chance=chance)
        await world.answered("first")
        world.now += part - 1
        assert await world.use() == "first"
        await drained()
        assert len(world.asked) == 1
        world.now += 1
        assert await world.use() == "first"
        await world.begun(2)
        assert await world.use() == "first"
        world.asked[1].set_exception(unreachable("silent"))
        await drained()
        assert await world.use() == "first"
        await drained()
        assert len(world.asked) == 2
        world.now += 5
        assert await world.use() == "first"
        await world.begun(3)
        world.asked[2].set_result(Fresh(value="second"))
        await drained()
        assert await world.use() == "second"
        assert world.dropped == ["first"]


async def test_what_was_asked_before_an_invalidation_serves_nobody_after_it(world: World) -> None:
    """Not even those who waited: they get what is asked for afterwards."""
    early = asyncio.ensure_future(world.use())
    await world.begun(1)
    assert world.cache.invalidate("github") == 1
    late = asyncio.ensure_future(world.use())
    await world.begun(2)
    world.asked[0].set_result(Fresh(value="old"))
    await drained()
    assert not early.done()
    world.asked[1].set_result(Fresh(value="new"))
    assert await asyncio.gather(early, late) == ["new", "new"]
    assert world.dropped == ["old"]


async def test_an_invalidation_is_of_one_credential(world: World) -> None:
    """The copies of others stay."""
    other = replace(KEY, credential="gitlab")
    await world.answered("a")
    await world.answered("b", other)
    assert world.cache.invalidate("github") == 1
    assert world.cache.peek(KEY) is None
    assert await world.use(other) == "b"
    assert world.cache.invalidate() == 1
    assert world.dropped == ["a", "b"]


async def test_a_refusal_upstream_drops_only_what_could_be_old(world: World) -> None:
    """A sandbox that provokes refusals cannot make the gateway ask its source more often than every few seconds."""
    await world.answered("fresh")
    world.now += material.SETTLED_SECONDS - 0.1
    assert not world.cache.could_reject("github", OWNER)
    assert world.cache.reject("github", OWNER) == 0
    world.now += 0.2
    assert not world.cache.could_reject("gitlab", OWNER)
    assert world.cache.could_reject("github", OWNER)
    assert world.cache.reject("github", OWNER) == 1
    await world.answered("fresher")


async def test_an_ended_sandbox_leaves_nothing(world: World) -> None:
    """Its lease is dropped, also one that arrives late, and nothing is obtained for it any more."""
    await world.answered("lease", LEASED)
    await world.answered("shared")
    late = asyncio.ensure_future(world.use(replace(LEASED, references=("db:creds/rw",))))
    await world.begun(3)
    assert world.cache.forget(OWNER) == 2
    world.asked[2].set_result(Fresh(value="late"))
    with pytest.raises(SourceError, match="source-refused"):
        await late
    with pytest.raises(SourceError, match="source-refused"):
        await world.use(LEASED)
    assert world.dropped == ["lease", "late"]
    assert await world.use() == "shared"


async def test_a_renewed_lease_is_not_given_back(world: World) -> None:
    """The one before is offered for renewal; with more time it stays the same one."""
    await world.answered("lease", LEASED, lasts=60.0)
    world.now += 60.0
    use = asyncio.ensure_future(world.use(LEASED))
    await world.begun(2)
    assert world.offered == [None, "lease"]
    world.asked[1].set_result(Fresh(value="lease", lasts=60.0, renews=True))
    assert await use == "lease"
    assert world.dropped == []


@pytest.mark.parametrize(
    ("sentence", "error", "code", "transient"),
    [
        ("a time-out of the source", TimeoutError(), "source-unreachable", True),
        ("a fault of an exchange", BrokerError("exchange-refused", "no", "ask"), "exchange-refused", False),
        ("a fault of ours", ValueError("canary-0123456789"), "source-unreadable", False),
    ],
)
async def test_every_failure_is_a_fixed_code(
    world: World,
    capfd: pytest.CaptureFixture[str],
    sentence: str,
    error: Exception,
    code: str,
    transient: bool,
) -> None:
    """Nothing of what a library said is repeated, in the error or in our own complaint."""
    said = await world.failed(error)
    assert (said.code, said.transient) == (code, transient), sentence
    assert "canary" not in str(said)
    assert "canary" not in capfd.readouterr().err


async def test_no_exception_is_kept(world: World) -> None:
    """A kept exception would keep its frames, and they the values in them."""

    class Canary:
        pass

    async def ask(before: str | None) -> Fresh[str]:
        local = Canary()
        raise SourceError("source-refused", type(local).__name__)

    with pytest.raises(SourceError):
        await world.cache.get(KEY, TIMES, ask)
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, Canary)] == []


async def test_the_number_of_copies_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago goes first, also where failures are all there is."""
    monkeypatch.setattr(material, "MAX_KEPT", 3)
    for number in range(5):
        await world.answered(f"v{number}", replace(KEY, narrowing=str(number)))
    assert world.dropped == ["v0", "v1"]
    for number in range(10, 15):
        await world.failed(SourceError("source-missing"), replace(KEY, narrowing=str(number)))
    assert len(world.cache) == 3


async def test_closing_ends_every_question_and_drops_everything(world: World) -> None:
    """Who waits is refused, and nothing is asked for afterwards."""
    await world.answered("held")
    waiting = asyncio.ensure_future(world.use(LEASED))
    await world.begun(2)
    await world.cache.close()
    with pytest.raises(SourceError):
        await waiting
    with pytest.raises(SourceError):
        await world.use()
    assert world.dropped == ["held"]
    assert len(world.asked) == 2


# --- random interleavings --------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 30.0, 69.0, 100.0])),
        st.tuples(st.just("answer"), st.sampled_from(["yes", "lease", "no", "silence"])),
        st.tuples(st.just("invalidate"), st.integers(0, 1)),
        st.tuples(st.just("forget"), st.just(0)),
    ),
    max_size=60,
)
KEYS = (KEY, replace(KEY, narrowing="other"), LEASED)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, stale=st.sampled_from([0.0, 20.0]))
def test_any_interleaving_keeps_the_rules(steps: list[tuple[str, object]], stale: float) -> None:
    """No value past its time, its giver's word or an invalidation; one question a key; each leaves once."""
    asyncio.run(interleaved(steps, replace(TIMES, stale=stale)))


async def interleaved(steps: list[tuple[str, object]], times: Times) -> None:
    clock = [1000.0]
    made: dict[str, float] = {}
    """value -> when it arrived"""
    void: dict[str, float] = {}
    asked_at: dict[str, int] = {}
    """value -> how many invalidations of its credential had been when it was asked for"""
    rounds = {"github": 0, "database": 0}
    open_questions: list[tuple[Key, int, asyncio.Future[str]]] = []
    last_no: dict[Key, float] = {}
    dropped: list[str] = []
    ended = False
    uses: list[asyncio.Task[None]] = []
    cache: MaterialCache[str] = MaterialCache(
        now=lambda: clock[0], random=lambda: 0.5, on_drop=lambda _, value: dropped.append(value)
    )

    def obtain(key: Key) -> Callable[[str | None], Awaitable[Fresh[str]]]:
        async def ask(before: str | None) -> Fresh[str]:
            generation = rounds[key.credential]
            assert (key, generation) not in [(other, when) for other, when, _ in open_questions], "two questions"
            assert clock[0] >= last_no.get(key, 0.0) + times.failure_ttl, "asked again at once"
            assert not (ended and key.owner == OWNER), "asked for an ended sandbox"
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            entry = (key, generation, answer)
            open_questions.append(entry)
            try:
                word = await answer
            finally:
                open_questions.remove(entry)
            if word in ("no", "silence"):
                if generation == rounds[key.credential]:
                    last_no[key] = clock[0]
                raise unreachable("x") if word == "silence" else SourceError("source-refused")
            value = f"v{len(made)}"
            made[value], asked_at[value] = clock[0], generation
            void[value] = clock[0] + 40.0 if word == "lease" else float("inf")
            return Fresh(value=value, lasts=40.0 if word == "lease" else None)

        return ask

    async def use(key: Key) -> None:
        generation = rounds[key.credential]
        try:
            copy = await cache.get(key, times, obtain(key))
        except SourceError:
            return
        age = clock[0] - made[copy.value]
        assert age <= times.ttl + times.stale
        assert age < times.ttl or copy.stale
        assert clock[0] <= void[copy.value]
        assert asked_at[copy.value] >= generation

    for what, detail in steps:
        match what:
            case "use":
                uses.append(asyncio.ensure_future(use(KEYS[int(str(detail))])))
            case "wait":
                clock[0] += float(str(detail))
            case "answer" if open_questions:
                open_questions[0][2].set_result(str(detail))
            case "invalidate":
                credential = ("github", "database")[int(str(detail))]
                rounds[credential] += 1
                for key in KEYS:
                    if key.credential == credential:
                        last_no.pop(key, None)
                cache.invalidate(credential)
            case "forget":
                ended = True
                rounds["database"] += 1
                cache.forget(OWNER)
        await drained()
    while open_questions:
        open_questions[0][2].set_result("yes")
        await drained()
    await cache.close()
    await asyncio.gather(*uses)
    assert sorted(dropped) == sorted(made)
