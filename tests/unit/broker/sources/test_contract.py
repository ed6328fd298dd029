"""What every source over the network promises, asked through the product's own client: one suite, every protocol."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.errors import BrokerError
from broker.sources.base import SourceError
from rules.secret_references import KINDS
from tests.support.origins import Origin
from tests.support.secretservers import HOST, PROTOCOLS, Asking

VALUE, OTHER = "value-canary-0123456789", "other-canary-0123456789"
LOCAL = {"onepassword", "sops", "age", "keyring", "exec"}
"""Kinds that start a program: test_programs.py."""


@pytest.fixture(params=list(PROTOCOLS))
async def asking(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Asking]:
    async with Origin(HOST) as origin:
        made = await Asking(tmp_path, origin, PROTOCOLS[request.param](origin)).start()  # type: ignore[call-arg]
        made.server.put("shop", token=VALUE, other=OTHER)
        yield made
        assert not origin.faults


def test_every_kind_is_in_a_suite() -> None:
    """A new kind of source cannot be forgotten here."""
    assert set(KINDS) == LOCAL | {"vault-dynamic"} | {name.removesuffix("-kv1") for name in PROTOCOLS}


def clean(error: BaseException, asking: Asking) -> None:
    """Nothing of values, keys, tokens or of what the peer wrote, in the error or anything that hangs on it."""
    shown = "".join(traceback.format_exception(error)) + repr(vars(error))
    seen: BaseException | None = error
    while seen is not None:
        shown += repr(seen) + repr(getattr(seen, "doc", "")) + repr(vars(seen))
        seen = seen.__context__
    assert "canary" not in shown
    assert "HTTP/1.1" not in shown


async def refused(asking: Asking, path: str = "shop", name: str = "token") -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        await asking.value(path, name)
    clean(caught.value, asking)
    return caught.value


async def test_what_is_not_there(asking: Asking) -> None:
    """Named by what the operator wrote, with a remedy; and there without a restart once it is (T17)."""
    error = await refused(asking, "none")
    assert error.code == "source-missing"
    assert not error.transient
    assert error.remedy
    assert "s:" in error.detail
    asking.server.put("none", token=OTHER)
    assert await asking.value("none") == OTHER.encode()


async def test_a_field_that_is_not_there(asking: Asking) -> None:
    """Says so, and not which fields there are."""
    error = await refused(asking, "shop", "missing")
    assert error.code == "source-missing"
    assert "other" not in error.detail + error.remedy


async def test_a_refusal_is_an_answer(asking: Asking) -> None:
    """Not transient: no copy outlives it. What it says is not repeated, what helps is said."""
    await asking.value("shop")
    asking.server.how = "refuse"
    error = await refused(asking)
    assert error.code == "source-refused"
    assert not error.transient
    assert error.remedy
    asking.server.how = ""
    assert await asking.value("shop") == VALUE.encode()


@pytest.mark.parametrize("how", ["fault", "redirect", "cut"])
async def test_what_is_no_answer_is_transient(asking: Asking, how: str) -> None:
    """A fault of the server, a pointer elsewhere, a broken connection: nobody said no. No redirect is followed."""
    await asking.value("shop")
    asking.server.how = how
    count = len(asking.server.asked)
    error = await refused(asking)
    assert (error.code, error.transient) == ("source-unreachable", True)
    assert error.remedy
    assert len(asking.server.asked) - count <= 2  # aiohttp sends a GET once more where no byte of an answer came
    assert all("elsewhere" not in line for line in asking.server.asked)


@pytest.mark.parametrize("how", ["nonsense", "empty"])
async def test_a_yes_without_a_value_is_none(asking: Asking, how: str) -> None:
    """An answer that does not have the documented shape gives nothing, not even the parts of it that look right."""
    await asking.value("shop")
    asking.server.how = how
    error = await refused(asking)
    assert error.code in ("source-unreadable", "source-missing")


async def test_a_server_that_is_gone(asking: Asking, tmp_path: Path) -> None:
    """Nothing listens: transient, and named with its address."""
    async with Origin(HOST) as gone:
        pass
    there = Asking(tmp_path, gone, asking.spoken, text=asking.written)
    await there.start()
    error = await refused(there)
    assert error.transient
    assert HOST in error.detail


async def test_a_certificate_that_does_not_verify_is_a_refusal(asking: Asking, tmp_path: Path) -> None:
    """What a source is opened with goes to nobody else: not one byte of HTTP is sent."""
    async with Origin(HOST) as other:
        wrong = Asking(tmp_path, other, asking.spoken, text=asking.written, ca_pem=asking.server.origin.ca_pem)
        await wrong.start()
        error = await refused(wrong)
        assert not error.transient
        assert other.received == []


async def test_an_address_that_nobody_allowed_is_not_dialled(asking: Asking) -> None:
    """Loopback, like every private range, is reached only where the operator's destinations: say so."""
    asking.places.clear()
    await asking.sources.configure({}, {})
    fresh = asking.written.replace(f"https://{HOST}", f"https://{HOST}:{asking.server.origin.port}")
    asking.written = fresh
    await asking.start()
    count = len(asking.server.origin.connections)
    error = await refused(asking)
    assert not error.transient
    assert len(asking.server.origin.connections) == count


async def test_values_come_with_their_version(asking: Asking) -> None:
    """The source's own version where it has any; another value is another document."""
    first = await asking.document(asking.spoken.reference("shop", "token"))
    assert await asking.value("shop", "token") == VALUE.encode()
    assert await asking.value("shop", "other") == OTHER.encode()
    asking.server.put("shop", token=OTHER)
    second = await asking.document(asking.spoken.reference("shop", "token"))
    assert await asking.value("shop") == OTHER.encode()
    if first.version:
        assert first.version != second.version
    else:
        assert asking.spoken.text().count("kv: {old: 1}") == 1  # only KV version 1 has none


async def test_nothing_secret_stands_in_an_address(asking: Asking) -> None:
    """Servers and proxies log targets: what a source is opened with goes in heads and bodies alone."""
    await asking.value("shop")
    for line in asking.server.asked:
        assert "canary" not in line


async def test_many_questions_at_once_open_the_source_once(asking: Asking) -> None:
    """A login or a token is asked for once and shared; it is asked for again only when it is refused."""
    await asyncio.gather(*(asking.value("shop") for _ in range(8)))
    logins = [line for line in asking.server.asked if "login" in line or "token" in line.partition("?")[0]]
    assert len(logins) <= 1


async def test_a_name_cannot_leave_its_place(asking: Asking) -> None:
    """Whatever a word of the sandbox or the operator's text holds, it is one step of a path, or refused."""
    for path in ("a b", "ä", "x%2f..%2fy", "$(id)"):
        with pytest.raises(SourceError):
            await asking.value(path)
    for line in asking.server.asked:
        assert ".." not in line.split("/")
        assert " " not in line.partition(" ")[2]
