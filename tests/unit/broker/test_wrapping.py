"""The store's key, wrapped by each key service: what refuses the start, and wrap, start, rotation and crash."""

from __future__ import annotations

import base64
import json
import os
import stat
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.errors import BrokerError
from broker.vault.boot import Boot
from broker.vault.keys import KeyRefused
from broker.vault.store import SecretStore, StoreError
from broker.vault.store_key import StoreKey
from broker.vault.wrap import Boot as WrapBoot
from broker.vault.wrap import wrap
from tests.support.authority import Authority
from tests.support.keyservers import GCP_KEY, KINDS, KeyServer
from tests.support.origins import Origin
from tests.support.secretservers import HOST

KEY = bytes(range(32))
CANARY = b"canary-0123456789"


class Place:
    """An installation whose key lies in a file, and where it will lie wrapped."""

    def __init__(self, folder: Path, server: KeyServer) -> None:
        self.server = server
        self.state, keys = folder / "state", folder / "keys"
        for made in (self.state, keys):
            made.mkdir(0o700)
        self.clear, self.file = keys / "store.key", keys / "store.key.wrapped"
        self.clear.write_text(KEY.hex())
        self.clear.chmod(0o600)
        store = SecretStore(self.state / "store.json", lambda salt: KEY, os.urandom)
        store.add("shop/orders", CANARY, owner="team", now=1.0)

    async def wrap(self, **changes: object) -> None:
        named = WrapBoot(state_dir=str(self.state), from_file=str(self.clear), wrapped_file=str(self.file), wrapping="")
        await wrap(named, self.server.wrapping(**changes))  # type: ignore[arg-type]

    async def key(self, **changes: object) -> StoreKey:
        """As a start makes it. Raises KeyRefused."""
        wrapping = self.server.wrapping(**changes)  # type: ignore[arg-type]
        boot = Boot(
            state_dir=str(self.state), policy_path="/p", digest_key=b"d" * 32, wrapped_file=str(self.file), wrapping=""
        )
        return StoreKey(boot, os.urandom, wrapping, await wrapping.opened(self.file))

    async def opened(self) -> SecretStore:
        return (await self.key()).opened(self.state / "store.json")


@pytest.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    async with Origin(HOST) as origin:
        yield Place(tmp_path, KeyServer(request.param, origin))


def clean(error: BaseException) -> None:
    """No key, no token, nothing that the peer wrote."""
    shown = "".join(traceback.format_exception(error)) + repr(vars(error))
    seen: BaseException | None = error
    while seen is not None:
        shown += repr(seen) + repr(getattr(seen, "doc", "")) + repr(vars(seen))
        seen = seen.__context__
    for form in (KEY.hex(), base64.b64encode(KEY).decode(), base64.urlsafe_b64encode(KEY).decode().rstrip("=")):
        assert form not in shown
    assert "canary" not in shown


async def refused(place: Place, **changes: object) -> KeyRefused:
    with pytest.raises(KeyRefused) as caught:
        await place.key(**changes)
    clean(caught.value)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("how", ["refuse", "html"])
async def test_a_service_that_does_not_unwrap_refuses_the_start(place: Place, how: str) -> None:
    """A no, and an answer that is none, name the service and what to do, and repeat nothing of it."""
    await place.wrap()
    place.server.safe.how = how
    error = await refused(place)
    assert error.code == "key-provider"
    assert place.server.kind in error.detail


@pytest.mark.slow
async def test_a_service_that_is_slow_or_gone_refuses_the_start(place: Place) -> None:
    """The start does not wait for ever, and says that nobody answered."""
    await place.wrap()
    place.server.safe.how = "slow"
    error = await refused(place, seconds=2.0)
    assert (error.code, "timed-out" in error.detail) == ("key-provider", True)
    gone = {HOST: {"addresses": ["127.0.0.1/32"], "port": 1, "ca": "file:ca.pem"}}
    error = await refused(place, destinations=gone)
    assert (error.code, "unreachable" in error.detail) == ("key-provider", True)


async def test_a_service_at_a_private_address_or_with_another_authority_is_not_asked(place: Place) -> None:
    """Without the operator's word no inside address is dialled, and a certificate of another authority is none."""
    await place.wrap()
    here = {"port": place.server.origin.port, "ca": "file:ca.pem"}
    assert "address-refused" in (await refused(place, destinations={HOST: here})).detail
    assert "certificate-refused" in (await refused(place, ca_pem=Authority().pem)).detail


async def test_what_is_no_key_is_not_taken_for_one(place: Place) -> None:
    """A plaintext of another length, or one that is no text of a key, opens nothing."""
    await place.wrap()
    place.server.safe.answer = "AAAA"
    assert (await refused(place)).code == "key-invalid"
    place.server.safe.answer = "no base64!"
    assert (await refused(place)).code == "key-provider"


async def test_a_damaged_or_foreign_file_refuses_the_start(place: Place) -> None:
    """Cut off, open to others, missing, with another ciphertext, of another key: each is told, none is guessed at."""
    await place.wrap()
    text = place.file.read_text()
    place.file.write_text(text[: len(text) // 2])
    assert (await refused(place)).code == "key-invalid"
    document = json.loads(text)
    place.file.write_text(json.dumps({**document, "ciphertext": document["ciphertext"][:-3]}))
    assert (await refused(place)).code == "key-provider"
    place.file.write_text(json.dumps({**document, "key": "other"}))
    assert "another key" in (await refused(place)).detail
    place.file.write_text(text)
    place.file.chmod(0o644)
    assert (await refused(place)).code == "key-modes"
    place.file.unlink()
    assert (await refused(place)).code == "key-missing"


async def test_a_key_that_the_service_does_not_have_is_named(place: Place) -> None:
    """A wrong name wraps nothing, and no file is left."""
    other = (
        GCP_KEY + "x" if place.server.kind == "gcp-kms" else "alias/other" if "aws" in place.server.kind else "other"
    )
    with pytest.raises(KeyRefused) as caught:
        await place.wrap(key=other)
    clean(caught.value)
    assert other in caught.value.detail
    assert not place.file.exists()


async def test_another_installations_key_opens_nothing(place: Place) -> None:
    """What the same service wrapped for another store is unwrapped, and is the wrong key."""
    place.file.write_bytes((await place.server.wrapping().made()).text)
    place.file.chmod(0o600)
    with pytest.raises(StoreError, match="store-wrong-key"):
        await place.opened()


async def test_nothing_is_wrapped_for_use_that_does_not_come_back(place: Place) -> None:
    """A service that gives another key back leaves store and file as they were, at wrapping and at rotation."""
    other = base64.b64encode(b"k" * 32).decode()
    place.server.safe.answer = other.rstrip("=") if "azure" in place.server.kind else other
    with pytest.raises(KeyRefused, match="key-provider"):
        await place.wrap()
    assert not place.file.exists()
    place.server.safe.answer = ""
    await place.wrap()
    before = place.file.read_bytes(), (place.state / "store.json").read_bytes()
    key = await place.key()
    place.server.safe.answer = other.rstrip("=") if "azure" in place.server.kind else other
    with pytest.raises(KeyRefused, match="key-provider"):
        await key.made()
    assert before == (place.file.read_bytes(), (place.state / "store.json").read_bytes())
    with pytest.raises(KeyRefused, match="key-provider"):
        key.rotate(key.opened(place.state / "store.json"), None)


async def test_a_wrong_key_or_a_file_that_is_there_is_not_wrapped(place: Place) -> None:
    """The key must open the store, and nothing is overwritten."""
    place.clear.write_text("22" * 32)
    with pytest.raises(BrokerError, match="store-wrong-key"):
        await place.wrap()
    place.clear.write_text(KEY.hex())
    place.file.write_text("x")
    with pytest.raises(KeyRefused, match="is there already"):
        await place.wrap()
    assert place.file.read_text() == "x"


async def test_wrapped_unwrapped_and_rotated(place: Place) -> None:
    """The store opens through the service; after a rotation only through the new file; the key lies nowhere."""
    await place.wrap()
    first = place.file.read_text()
    assert stat.S_IMODE(place.file.stat().st_mode) == 0o600
    assert KEY.hex() not in first
    key = await place.key()
    store = key.opened(place.state / "store.json")
    assert store.read("shop/orders").reveal() == CANARY
    assert key.rotate(store, None, await key.made()) == 1
    assert (await place.opened()).read("shop/orders").reveal() == CANARY
    place.file.write_text(first)
    with pytest.raises(StoreError, match="store-wrong-key"):
        await place.opened()


@pytest.mark.parametrize("step", ["rekey", "_promote"])
async def test_a_crash_between_the_steps_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before and after the store is sealed, the next start opens it with one of the two files and leaves one."""
    await place.wrap()
    key = await place.key()
    store, made = key.opened(place.state / "store.json"), await key.made()

    def crash(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(store if step == "rekey" else key, step, crash)
    with pytest.raises(RuntimeError):
        key.rotate(store, None, made)
    monkeypatch.undo()
    later = place.file.with_name(place.file.name + ".next")
    assert later.exists()
    assert (await place.opened()).read("shop/orders").reveal() == CANARY
    assert not later.exists()
    assert (await place.opened()).read("shop/orders").reveal() == CANARY
