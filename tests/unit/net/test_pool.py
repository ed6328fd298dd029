"""The pool: what must not be shared, kept or left alive, then what is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from ipaddress import ip_network

import pytest

from net.dial import Connected, DialError, DialTarget
from net.pool import Lease, Pool, PoolKey, PoolLimits
from net.stream import StreamBroken
from net.trust import TrustKey
from rules.names import Destination, Host
from tests.support.streams import MemoryStream
from wire.heads import NO_BODY

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
KEY = PoolKey(
    target=DialTarget(
        tenant="t",
        sandbox="a",
        destination=Destination("https", Host.parse("api.test"), 443),
        want_tls=True,
    )
)


class MemoryDialer:
    """Connects in memory. `far` are the origin's ends, in order; while `held`, dials wait."""

    def __init__(self) -> None:
        self.far: list[MemoryStream] = []
        self.go = asyncio.Event()
        self.go.set()
        self.started = asyncio.Event()
        self.dialled: list[DialTarget] = []

    def via(self, target: DialTarget) -> str:
        return ""

    async def dial(self, target: DialTarget) -> Connected:
        self.dialled.append(target)
        self.started.set()
        await self.go.wait()
        near, far = MemoryStream.pair()
        self.far.append(far)
        return Connected(stream=near, address=f"127.0.0.{len(self.far)}", tls_version="TLSv1.3")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def dialer() -> MemoryDialer:
    return MemoryDialer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pool(dialer: MemoryDialer, clock: Clock) -> AsyncIterator[Pool]:
    made = Pool(dialer, clock=clock, limits=PoolLimits(idle_per_key=2, idle_per_sandbox=3, idle_total=4, uses=3))
    yield made
    await made.close()


async def exchange(lease: Lease, dialer: MemoryDialer, answer: bytes = ANSWER) -> None:
    """One whole GET over the lease; the origin's end answers `answer`."""
    far = dialer.far[int(lease.address.rpartition(".")[2]) - 1]
    await lease.connection.send_request("GET", "/", ((b"Host", b"api.test"),), NO_BODY)
    await lease.connection.finish()
    await far.receive()
    far.write(answer)
    assert (await lease.connection.next_response()).status == 200
    body = lease.connection.body()
    while await body.read() is not None:
        pass


async def used(pool: Pool, dialer: MemoryDialer, key: PoolKey = KEY) -> Lease:
    lease = await pool.acquire(key)
    await exchange(lease, dialer)
    return lease


T = KEY.target
OTHER_KEYS = [
    (replace(KEY, target=replace(T, sandbox="b")), "another sandbox"),
    (replace(KEY, target=replace(T, tenant="u")), "another tenant"),
    (replace(KEY, target=replace(T, destination=replace(T.destination, port=8443))), "another port"),
    (replace(KEY, target=replace(T, destination=replace(T.destination, host=Host.parse("b.test")))), "another host"),
    (replace(KEY, target=replace(T, destination=replace(T.destination, scheme="http"), want_tls=False)), "clear text"),
    (replace(KEY, target=replace(T, addresses_allowed=(ip_network("10.0.0.0/8"),))), "other allowed addresses"),
    (replace(KEY, target=replace(T, static=("10.0.0.1",))), "other fixed addresses"),
    (replace(KEY, target=replace(T, trust=TrustKey(ca_pem="x"))), "another trust set"),
    (replace(KEY, credential="shop/3"), "another credential"),
]


@pytest.mark.parametrize(("other", "why"), OTHER_KEYS, ids=[row[1] for row in OTHER_KEYS])
async def test_a_connection_is_not_shared_across_keys(
    pool: Pool, dialer: MemoryDialer, other: PoolKey, why: str
) -> None:
    """Each part of the key alone separates connections, both ways (I19)."""
    assert pool.release(await used(pool, dialer))
    lease = await pool.acquire(other)
    assert not lease.reused, why
    assert len(dialer.far) == 2
    pool.discard(lease)


UNASKED = [
    (lambda far: far.write(ANSWER), "an answer that nobody asked for"),
    (lambda far: far.write(b"\r\n"), "a single stray byte"),
    (lambda far: far.abort(), "a reset"),
]


@pytest.mark.parametrize(("act", "why"), UNASKED, ids=[row[1] for row in UNASKED])
@pytest.mark.parametrize("when", ["before release", "while idle"])
async def test_a_connection_on_which_something_arrived_is_never_used_again(
    pool: Pool, dialer: MemoryDialer, act, why: str, when: str
) -> None:
    """Bytes before a request answer nobody's question: the connection is dropped and a new one dialled."""
    lease = await used(pool, dialer)
    if when == "before release":
        act(dialer.far[0])
        assert not pool.release(lease), why
    else:
        assert pool.release(lease)
        act(dialer.far[0])
    fresh = await pool.acquire(KEY)
    assert not fresh.reused
    assert len(dialer.far) == 2
    pool.discard(fresh)


@pytest.mark.parametrize(("act", "why"), UNASKED, ids=[row[1] for row in UNASKED])
@pytest.mark.parametrize("when", ["before release", "while idle"])
async def test_what_arrives_while_nobody_reads_is_not_taken_for_the_next_answer(
    pool: Pool, dialer: MemoryDialer, act, why: str, when: str
) -> None:
    """Where reading was paused (a large answer, a turn to be waited for), the connection is asked all the same."""
    lease = await used(pool, dialer)
    lease.connection.stream.pause_reading()
    if when == "before release":
        act(dialer.far[0])
    pool.release(lease)
    lease.connection.stream.pause_reading()
    if when == "while idle":
        act(dialer.far[0])
    fresh = await pool.acquire(KEY)
    assert not fresh.reused, why
    assert len(dialer.far) == 2
    pool.discard(fresh)


async def test_a_connection_that_the_origin_ended_is_not_used_again(pool: Pool, dialer: MemoryDialer) -> None:
    """The origin's end of its side while idle means a new dial."""
    assert pool.release(await used(pool, dialer))
    await dialer.far[0].send_eof()
    assert not (await pool.acquire(KEY)).reused


async def test_an_unfinished_exchange_is_not_kept(pool: Pool, dialer: MemoryDialer) -> None:
    """A connection with half an answer, or none, is dropped at release."""
    lease = await pool.acquire(KEY)
    await lease.connection.send_request("GET", "/", ((b"Host", b"api.test"),), NO_BODY)
    assert not pool.release(lease)
    assert (pool.idle, pool.in_use) == (0, 0)


async def test_an_answer_that_says_close_is_not_kept(pool: Pool, dialer: MemoryDialer) -> None:
    """`Connection: close` ends the connection."""
    lease = await pool.acquire(KEY)
    await exchange(lease, dialer, ANSWER.replace(b"Content", b"Connection: close\r\nContent"))
    assert not pool.release(lease)


async def test_giving_back_twice_or_after_a_cut_keeps_nothing(pool: Pool, dialer: MemoryDialer) -> None:
    """One connection never serves two exchanges at once."""
    lease = await used(pool, dialer)
    assert pool.release(lease)
    assert not pool.release(lease)
    again = await pool.acquire(KEY)
    assert again is lease
    await exchange(again, dialer)
    assert pool.cut(lambda key, address: True) == 1
    assert not pool.release(again)
    assert (pool.idle, pool.in_use) == (0, 0)


async def test_a_cut_reaches_idle_used_and_dialled_connections_of_the_sandbox_alone(
    pool: Pool, dialer: MemoryDialer
) -> None:
    """When `cut` returns, no connection of that sandbox lives; another sandbox's go on (I27)."""
    other = replace(KEY, target=replace(T, sandbox="b"))
    idle, busy, foreign = await pool.acquire(KEY), await pool.acquire(KEY), await pool.acquire(other)
    await exchange(idle, dialer)
    assert pool.release(idle)
    dialer.go.clear()
    dialer.started.clear()
    dialling = asyncio.ensure_future(pool.acquire(KEY, fresh=True))
    await dialer.started.wait()
    assert pool.cut(lambda key, address: key.target.sandbox == "a") == 3
    with pytest.raises(DialError) as raised:
        await dialling
    assert raised.value.reason == "policy-changing"
    assert idle.connection.stream.aborted
    assert busy.connection.stream.aborted
    assert not foreign.connection.stream.aborted
    assert (pool.idle, pool.in_use) == (0, 1)
    dialer.go.set()


async def test_a_cut_of_idle_ones_leaves_those_in_use(pool: Pool, dialer: MemoryDialer) -> None:
    """For a caller that judged the exchanges in progress itself."""
    idle, busy = await pool.acquire(KEY), await pool.acquire(KEY)
    await exchange(idle, dialer)
    assert pool.release(idle)
    assert pool.cut(lambda key, address: True, idle_only=True) == 1
    assert idle.connection.stream.aborted
    assert not busy.connection.stream.aborted
    assert (pool.idle, pool.in_use) == (0, 1)


async def test_a_cut_may_choose_by_address(pool: Pool, dialer: MemoryDialer) -> None:
    """An address that became forbidden is cut by its number."""
    first, second = await pool.acquire(KEY), await pool.acquire(KEY)
    assert pool.cut(lambda key, address: address == first.address) == 1
    assert first.connection.stream.aborted
    assert not second.connection.stream.aborted


async def test_a_cut_just_as_the_dial_succeeds_leaves_no_connection(pool: Pool, dialer: MemoryDialer) -> None:
    """A connection that was made but not yet handed over is aborted too."""
    dialer.go.clear()
    dialling = asyncio.ensure_future(pool.acquire(KEY))
    await dialer.started.wait()
    dialer.go.set()
    while not dialer.far:
        await asyncio.sleep(0)
    pool.cut(lambda key, address: True)
    with pytest.raises(DialError):
        await dialling
    with pytest.raises(StreamBroken, match="reset"):
        await dialer.far[0].receive()
    assert pool.in_use == 0


async def test_a_caller_that_gives_up_cancels_its_dial(pool: Pool, dialer: MemoryDialer) -> None:
    """Cancelling acquire leaves no dial and no connection behind."""
    dialer.go.clear()
    dialling = asyncio.ensure_future(pool.acquire(KEY))
    await dialer.started.wait()
    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    assert pool.cut(lambda key, address: True) == 0
    assert dialer.far == []


async def test_a_failed_dial_is_the_callers_to_see(pool: Pool, dialer: MemoryDialer, monkeypatch) -> None:
    """DialError passes through, and nothing is counted as open."""

    async def fail(target: DialTarget) -> Connected:
        raise DialError("address-refused", "private", "10.0.0.1")

    monkeypatch.setattr(dialer, "dial", fail)
    with pytest.raises(DialError, match="address-refused"):
        await pool.acquire(KEY)
    assert pool.in_use == 0


async def test_a_closed_pool_hands_out_nothing(pool: Pool, dialer: MemoryDialer) -> None:
    """After close nothing is dialled, and what was out is dropped when it comes back."""
    lease = await used(pool, dialer)
    await pool.close()
    assert lease.connection.stream.aborted
    assert not pool.release(lease)
    with pytest.raises(DialError, match="policy-changing"):
        await pool.acquire(KEY)
    assert len(dialer.dialled) == 1


async def test_idle_connections_are_bounded_in_number_and_time(pool: Pool, dialer: MemoryDialer, clock: Clock) -> None:
    """Two per key, three per sandbox, four in all, oldest first out; and none beyond its time."""
    keys = [
        replace(KEY, credential=credential, target=replace(T, sandbox=sandbox))
        for credential, sandbox in (("1", "a"), ("1", "a"), ("1", "a"), ("2", "a"), ("3", "a"), ("1", "b"), ("2", "b"))
    ]
    leases = [await pool.acquire(key) for key in keys]
    kept = []
    for lease in leases:
        await exchange(lease, dialer)
        assert pool.release(lease)
        kept.append(pool.idle)
    assert kept == [1, 2, 2, 3, 3, 4, 4]
    assert [lease.connection.stream.aborted for lease in leases] == [True, True, True, False, False, False, False]
    clock.now += 30
    assert not (await pool.acquire(keys[-1])).reused
    assert pool.idle == 0


async def test_a_connection_is_reused_most_recent_first_and_a_bounded_number_of_times(
    pool: Pool, dialer: MemoryDialer
) -> None:
    """The same key gets the same connection, up to three uses here; `fresh` always dials."""
    for number in range(3):
        lease = await used(pool, dialer)
        assert lease.reused == (number > 0)
        assert pool.release(lease) == (number < 2)
    assert len(dialer.far) == 1
    first = await used(pool, dialer)
    pool.release(first)
    fresh = await pool.acquire(KEY, fresh=True)
    assert fresh is not first
    assert not fresh.reused
    await exchange(fresh, dialer)
    pool.release(fresh)
    assert await pool.acquire(KEY) is fresh


async def test_a_caller_cancelled_just_as_its_dial_succeeds_leaves_no_connection(
    pool: Pool, dialer: MemoryDialer
) -> None:
    """The connection that nobody will take is aborted."""
    dialer.go.clear()
    dialling = asyncio.ensure_future(pool.acquire(KEY))
    await dialer.started.wait()
    dialer.go.set()
    while not dialer.far:
        await asyncio.sleep(0)
    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    with pytest.raises(StreamBroken, match="reset"):
        await dialer.far[0].receive()
