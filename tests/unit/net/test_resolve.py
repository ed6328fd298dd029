"""Lookups: what is refused, what is bounded, what is remembered and for whom."""

from __future__ import annotations

import asyncio
import socket

import pytest

from net.resolve import CACHE_SECONDS, LOOKUPS_PER_SANDBOX, Lookups, ResolveFailed, SystemResolver
from rules.names import Host
from tests.support.resolver import StaticResolver

API = Host.parse("api.test")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("raw", ["127.0.0.1", "[::1]", "exeat.internal"])
async def test_literals_and_our_own_name_never_reach_the_system_resolver(raw: str, monkeypatch) -> None:
    """Neither an address nor the help host is looked up."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: pytest.fail("was asked"))
    with pytest.raises(ResolveFailed):
        await SystemResolver().resolve(Host.parse(raw), 443)


@pytest.mark.parametrize(
    "fault", [socket.gaierror(-2, "canary-text"), OSError("canary-text"), UnicodeError("canary-text")]
)
async def test_any_fault_of_the_system_resolver_is_no_answer(fault: Exception, monkeypatch) -> None:
    """Faults become ResolveFailed with a fixed text."""

    def fail(*args: object, **more: object) -> None:
        raise fault

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ResolveFailed) as raised:
        await SystemResolver().resolve(API, 443)
    assert "canary" not in str(raised.value)


async def test_the_system_resolver_asks_absolute_names(monkeypatch) -> None:
    """The name is asked with its final dot, so that no search list applies (B030); duplicates are dropped."""
    asked = []

    def answer(name: str, port: int, **more: object) -> list[object]:
        asked.append(name)
        return [(2, 1, 6, "", ("93.184.216.34", port)), (2, 1, 6, "", ("93.184.216.34", port))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert await SystemResolver().resolve(API, 443) == ("93.184.216.34",)
    assert asked == ["api.test."]


async def test_the_system_resolver_refuses_beyond_its_threads() -> None:
    """With every thread busy the next lookup fails at once instead of queueing."""
    resolver = SystemResolver(max_threads=0)
    with pytest.raises(ResolveFailed, match="still running"):
        await resolver.resolve(API, 443)


async def test_more_answers_than_the_bound_are_refused_not_cut() -> None:
    """Seventeen answers are a failure: cutting would hide what was not vetted."""
    lookups = Lookups(StaticResolver({"api.test": [f"93.184.216.{n}" for n in range(17)]}), clock=Clock())
    with pytest.raises(ResolveFailed, match="more than 16"):
        await lookups.addresses("t", "a", API, 443)


async def test_a_resolver_that_hangs_is_given_up_and_still_counts() -> None:
    """Each late lookup fails at its deadline; once eight hang, the same sandbox gets no ninth, another one does."""
    resolver = StaticResolver({"api.test": ["93.184.216.34"]})
    resolver.hold()
    lookups = Lookups(resolver, clock=Clock(), seconds=0.01)
    late = [lookups.addresses("t", "a", API, 443) for _ in range(LOOKUPS_PER_SANDBOX)]
    for outcome in await asyncio.gather(*late, return_exceptions=True):
        assert isinstance(outcome, ResolveFailed)
    with pytest.raises(ResolveFailed, match="in flight"):
        await lookups.addresses("t", "a", API, 443)
    assert len(resolver.queries) == LOOKUPS_PER_SANDBOX
    with pytest.raises(ResolveFailed, match="within"):
        await lookups.addresses("t", "b", API, 443)
    resolver.let_go()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await lookups.addresses("t", "a", API, 443) == ("93.184.216.34",)


async def test_a_lookup_that_raises_something_unexpected_is_not_swallowed() -> None:
    """A fault of the resolver itself reaches the caller's guard."""
    lookups = Lookups(StaticResolver({"api.test": RuntimeError("broken")}), clock=Clock())
    with pytest.raises(RuntimeError):
        await lookups.addresses("t", "a", API, 443)


async def test_answers_are_kept_only_after_vetting_for_one_sandbox_and_a_bounded_time() -> None:
    """An answer is asked again unless `keep` was called; another sandbox asks for itself; time ends it; so does end."""
    clock, resolver = Clock(), StaticResolver({"api.test": ["93.184.216.34"]})
    lookups = Lookups(resolver, clock=clock, keep_seconds=3600)
    for _ in range(2):
        found = await lookups.addresses("t", "a", API, 443)
    assert len(resolver.queries) == 2
    lookups.keep("t", "a", API, found)
    await lookups.addresses("t", "a", API, 443)
    assert len(resolver.queries) == 2
    await lookups.addresses("t", "b", API, 443)
    assert len(resolver.queries) == 3
    clock.now += CACHE_SECONDS
    await lookups.addresses("t", "a", API, 443)
    assert len(resolver.queries) == 4
    lookups.keep("t", "a", API, found)
    lookups.forget("t", "a")
    await lookups.addresses("t", "a", API, 443)
    assert len(resolver.queries) == 5
