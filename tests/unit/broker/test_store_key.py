"""The store's key is replaced without a moment in which neither the old nor the new one opens the store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from broker.errors import BrokerError
from broker.vault.boot import Boot
from broker.vault.keys import KeyRefused
from broker.vault.store import SecretStore, StoreError
from broker.vault.store_key import StoreKey

CANARY = b"canary-0123456789"
PASSPHRASE = b"correct horse battery"


class Place:
    """A state folder with a store of one secret, and a key file beside it."""

    def __init__(self, folder: Path, **boot: object) -> None:
        self.state = folder / "state"
        self.state.mkdir(0o700)
        self.keys = folder / "keys"
        self.keys.mkdir(0o700)
        self.file = self.keys / "store.key"
        self.file.write_text("11" * 32)
        self.file.chmod(0o600)
        named = boot or {"key_file": str(self.file)}
        self.boot = Boot(state_dir=str(self.state), policy_path="/p", digest_key=b"d" * 32, **named)  # type: ignore[arg-type]
        self.opened().add("shop/orders", CANARY, owner="team", now=1.0)

    def key(self) -> StoreKey:
        return StoreKey(self.boot, os.urandom)

    def opened(self) -> SecretStore:
        """As a start opens it."""
        return self.key().opened(self.state / "store.json")

    @property
    def next(self) -> Path:
        return self.keys / "store.key.next"


class Crash(Exception):
    """The machine ends here."""


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """Without a place for the next key the store keeps the old one, and the refusal says what to do."""
    place = Place(tmp_path)
    place.next.mkdir()
    before = (place.state / "store.json").read_bytes()
    store = SecretStore(place.state / "store.json", lambda salt: bytes.fromhex("11" * 32), os.urandom)
    with pytest.raises(KeyRefused, match="key-readonly") as caught:
        place.key().rotate(store, None)
    assert "--stdin" in caught.value.remedy
    assert (place.state / "store.json").read_bytes() == before


@pytest.mark.parametrize("given", [b"", b"short", b"zz" * 32, b"11" * 31])
def test_what_is_no_key_changes_nothing(tmp_path: Path, given: bytes) -> None:
    """A key that is handed over has the form of one, or nothing happens."""
    place = Place(tmp_path)
    with pytest.raises(KeyRefused, match="key-invalid"):
        place.key().rotate(place.opened(), given)
    assert place.opened().read("shop/orders").reveal() == CANARY


def test_a_short_passphrase_changes_nothing(tmp_path: Path) -> None:
    """Where the boot names a passphrase, the new one is held to the same length."""
    place = Place(tmp_path, passphrase=PASSPHRASE.decode())
    with pytest.raises(KeyRefused, match="key-invalid"):
        place.key().rotate(place.opened(), b"short")
    assert place.opened().read("shop/orders").reveal() == CANARY


def test_a_key_that_lies_elsewhere_is_not_made_by_us(tmp_path: Path) -> None:
    """A passphrase cannot be replaced by one that nobody knows."""
    place = Place(tmp_path, passphrase=PASSPHRASE.decode())
    with pytest.raises(KeyRefused, match="key-elsewhere"):
        place.key().rotate(place.opened(), None)


def test_neither_a_third_key_nor_a_leftover_opens_the_store(tmp_path: Path) -> None:
    """Beside a wrong key, a next one that is wrong too is no way in, and neither file is touched."""
    place = Place(tmp_path)
    place.file.write_text("22" * 32)
    place.next.write_text("33" * 32)
    place.next.chmod(0o600)
    with pytest.raises(StoreError, match="store-wrong-key"):
        place.opened()
    assert (place.file.read_text(), place.next.read_text()) == ("22" * 32, "33" * 32)


def test_a_next_key_that_others_can_read_refuses(tmp_path: Path) -> None:
    """The next key is held to the modes of the key itself."""
    place = Place(tmp_path)
    place.file.write_text("22" * 32)
    place.next.write_text("11" * 32)
    place.next.chmod(0o644)
    with pytest.raises(KeyRefused, match="key-modes"):
        place.opened()


def test_the_key_file_is_replaced_and_the_old_key_opens_nothing(tmp_path: Path) -> None:
    """After a rotation the file holds another key, readable by us alone, and every ciphertext is a new one."""
    place = Place(tmp_path)
    store = place.opened()
    before = (place.state / "store.json").read_bytes()
    assert place.key().rotate(store, None) == 1
    assert place.file.read_text().strip() != "11" * 32
    assert stat.S_IMODE(place.file.stat().st_mode) == 0o600
    assert not place.next.exists()
    assert store.read("shop/orders").reveal() == place.opened().read("shop/orders").reveal() == CANARY
    for part in ("wrapped", "body"):
        (old,) = [line for line in before.split(b"\n") if f'"{part}"'.encode() in line]
        assert old not in (place.state / "store.json").read_bytes()
    with pytest.raises(StoreError, match="store-wrong-key"):
        SecretStore(place.state / "store.json", lambda salt: bytes.fromhex("11" * 32), os.urandom)


@pytest.mark.parametrize("where", ["before the store is sealed", "after the store is sealed"])
def test_a_crash_in_the_middle_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Wherever a rotation breaks off, the next start opens the store, with one key file and no leftover."""
    place = Place(tmp_path)
    store, key = place.opened(), place.key()

    def crash(*_: object) -> None:
        raise Crash

    target = (store, "rekey") if where.startswith("before") else (key, "_promote")
    monkeypatch.setattr(*target, crash)
    with pytest.raises(Crash):
        key.rotate(store, None)
    assert place.next.exists()
    monkeypatch.undo()
    assert place.opened().read("shop/orders").reveal() == CANARY
    assert not place.next.exists()
    assert (place.file.read_text().strip() == "11" * 32) is where.startswith("before")


@pytest.mark.parametrize(
    ("named", "given"),
    [({"passphrase": PASSPHRASE.decode()}, b"another horse battery"), ({"key_text": "11" * 32}, b"22" * 32)],
)
def test_a_key_that_is_handed_over_takes_effect(tmp_path: Path, named: dict[str, str], given: bytes) -> None:
    """A passphrase or a key kept elsewhere: the store opens with what was handed over, and with nothing else."""
    place = Place(tmp_path, **named)
    place.key().rotate(place.opened(), given)
    with pytest.raises(BrokerError, match="store-wrong-key"):
        place.opened()
    (name,) = named
    place.boot = Boot(state_dir=str(place.state), policy_path="/p", digest_key=b"d" * 32, **{name: given.decode()})  # type: ignore[arg-type]
    assert place.opened().read("shop/orders").reveal() == CANARY
