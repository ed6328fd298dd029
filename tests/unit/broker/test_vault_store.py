"""The embedded store: unreadable without the key, and every damage fails closed (I25, B166, B168)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from broker.vault.keys import KeyRefused, key_from_passphrase, read_key_file
from broker.vault.store import SecretStore, StoreError, check_rollback

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
CANARY = b"canary-0123456789"


def opened(directory: Path, key: bytes = KEY) -> SecretStore:
    directory.chmod(0o700)
    return SecretStore(directory / "store.json", lambda salt: key, os.urandom)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    store = opened(tmp_path)
    store.add("shop/orders", CANARY, owner="team", now=1.0)
    store.add("shop/other", CANARY[::-1], owner="team", now=1.0)
    return tmp_path


def edit(directory: Path, change) -> None:
    path = directory / "store.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def swap(document) -> None:
    records = document["records"]
    records["shop/orders"], records["shop/other"] = records["shop/other"], records["shop/orders"]


@pytest.mark.parametrize(
    ("sentence", "change", "code", "names"),
    [
        ("two records swapped", swap, "record-corrupt", "shop/orders"),
        (
            "a record's owner changed",
            lambda d: d["records"]["shop/other"].update(owner="me"),
            "record-corrupt",
            "shop/other",
        ),
        (
            "a record's version changed",
            lambda d: d["records"]["shop/other"].update(version=7),
            "record-corrupt",
            "shop/other",
        ),
        (
            "scrubbing switched off from outside",
            lambda d: d["records"]["shop/orders"].update(scrub=False),
            "record-corrupt",
            "shop/orders",
        ),
        (
            "a body's byte flipped",
            lambda d: d["records"]["shop/orders"].update(body="AAAA" + d["records"]["shop/orders"]["body"][4:]),
            "record-corrupt",
            "shop/orders",
        ),
        (
            "a record without a body",
            lambda d: d["records"]["shop/other"].pop("body"),
            "record-corrupt",
            "shop/other",
        ),
        ("a record dropped", lambda d: d["records"].pop("shop/other"), "store-corrupt", ""),
        ("the generation set back", lambda d: d.update(generation=1), "store-corrupt", ""),
        ("another format", lambda d: d.update(format=2), "store-newer", ""),
        ("no records at all", lambda d: d.pop("records"), "store-corrupt", ""),
    ],
)
def test_damage_refuses_and_names_the_record(filled: Path, sentence: str, change, code: str, names: str) -> None:
    """Any change from outside keeps the store shut; where a record is to blame its name is told."""
    edit(filled, change)
    with pytest.raises(StoreError) as caught:
        opened(filled)
    assert caught.value.code == code, sentence
    assert names in caught.value.detail, sentence
    assert "canary" not in str(caught.value)


def test_the_wrong_key_refuses(filled: Path) -> None:
    """Another key opens nothing and says so."""
    with pytest.raises(StoreError, match="store-wrong-key"):
        opened(filled, OTHER)


def test_the_wrong_key_refuses_an_empty_store_too(tmp_path: Path) -> None:
    """The seal proves the key where there is no record."""
    opened(tmp_path)
    with pytest.raises(StoreError, match="store-wrong-key"):
        opened(tmp_path, OTHER)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_loose_store_file_refuses(filled: Path, mode: int) -> None:
    """Group or others may neither read nor write the file."""
    (filled / "store.json").chmod(mode)
    with pytest.raises(KeyRefused, match="store-modes"):
        opened(filled)


def test_a_loose_directory_refuses(filled: Path) -> None:
    """The folder is 0700 or the store stays shut."""
    filled.chmod(0o750)
    with pytest.raises(KeyRefused, match="dir-modes"):
        SecretStore(filled / "store.json", lambda salt: KEY, os.urandom)


def test_an_older_store_is_a_rollback(filled: Path) -> None:
    """A copy from before the last recorded change is refused, also with an equal generation of other content."""
    old = (filled / "store.json").read_bytes()
    store = opened(filled)
    store.rotate("shop/orders", b"canary-9876543210", now=2.0)
    recorded = (store.generation, store.digest)
    (filled / "store.json").write_bytes(old)
    with pytest.raises(StoreError, match="store-rolled-back"):
        check_rollback(opened(filled), recorded)
    forked = opened(filled)
    forked.rotate("shop/orders", b"canary-something-else", now=2.0)
    with pytest.raises(StoreError, match="store-rolled-back"):
        check_rollback(forked, recorded)


def test_a_crash_between_file_and_record_is_no_rollback(filled: Path) -> None:
    """A store that is newer than the record of it is what a crash leaves, and opens."""
    store = opened(filled)
    recorded = (store.generation, store.digest)
    store.add("shop/third", CANARY, owner="team", now=3.0)
    check_rollback(opened(filled), recorded)


def test_the_file_holds_no_plaintext(filled: Path) -> None:
    """Neither raw nor as base64 is the value in the file."""
    raw = (filled / "store.json").read_bytes()
    assert CANARY not in raw
    assert b"Y2FuYXJ5" not in raw


def test_values_come_back_with_version_and_owner(filled: Path) -> None:
    """A fresh process reads what was stored; a rotation is the next version."""
    store = opened(filled)
    store.rotate("shop/orders", b"canary-9876543210", now=2.0)
    secret = opened(filled).read("shop/orders")
    assert (secret.reveal(), secret.version, secret.owner) == (b"canary-9876543210", "2", "team")


@pytest.mark.parametrize("name", ["", "UPPER", "../x", "a//b", "a b", "/a", "a/", "x" * 201])
def test_names_are_plain(filled: Path, name: str) -> None:
    """A name that is not lower-case words joined by slashes is refused."""
    with pytest.raises(StoreError, match="secret-name"):
        opened(filled).add(name, CANARY, owner="team", now=1.0)


def test_rekeying_keeps_values_and_shuts_the_old_key_out(filled: Path) -> None:
    """After rotate-key only the new key opens the store."""
    opened(filled).rekey(OTHER)
    assert opened(filled, OTHER).read("shop/orders").reveal() == CANARY
    with pytest.raises(StoreError):
        opened(filled, KEY)


def test_a_half_written_file_does_not_count(filled: Path) -> None:
    """What a crash leaves beside the store is overwritten by the next change."""
    (filled / "store.json.new").write_bytes(b"torn")
    opened(filled).add("shop/third", CANARY, owner="team", now=1.0)
    assert opened(filled).read("shop/third").reveal() == CANARY


@pytest.mark.parametrize(
    ("sentence", "content", "mode", "code"),
    [
        ("readable by the group", KEY.hex().encode(), 0o640, "key-modes"),
        ("too short", b"abcd", 0o600, "key-invalid"),
        ("not hex or base64", b"z" * 64, 0o600, "key-invalid"),
        ("empty", b"", 0o600, "key-invalid"),
    ],
)
def test_a_key_file_that_is_not_one_refuses(
    tmp_path: Path, sentence: str, content: bytes, mode: int, code: str
) -> None:
    """Loose modes and anything but 32 bytes refuse."""
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(KeyRefused) as caught:
        read_key_file(path, state_dir=tmp_path / "state")
    assert caught.value.code == code, sentence


def test_a_missing_key_and_one_beside_the_store_refuse(tmp_path: Path) -> None:
    """There is no keyless mode, and no key in the folder that backups take (unless that danger is named)."""
    state = tmp_path / "state"
    state.mkdir(0o700)
    with pytest.raises(KeyRefused, match="key-missing"):
        read_key_file(tmp_path / "none", state_dir=state)
    path = state / "key"
    path.write_text(KEY.hex())
    path.chmod(0o600)
    with pytest.raises(KeyRefused, match="key-beside-store"):
        read_key_file(path, state_dir=state)
    assert read_key_file(path, state_dir=state, danger_beside_store=True) == KEY


def test_a_key_file_may_not_be_a_link(tmp_path: Path) -> None:
    """A symbolic link is not followed."""
    path = tmp_path / "key"
    path.write_text(KEY.hex())
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(KeyRefused, match="key-missing"):
        read_key_file(tmp_path / "link", state_dir=tmp_path / "state")


def test_a_passphrase_gives_a_key_by_salt() -> None:
    """Short ones are refused; the same words with another salt give another key."""
    with pytest.raises(KeyRefused, match="key-invalid"):
        key_from_passphrase(b"short", b"s" * 16)
    first = key_from_passphrase(b"correct horse battery", b"s" * 16)
    assert len(first) == 32
    assert first == key_from_passphrase(b"correct horse battery", b"s" * 16)
    assert first != key_from_passphrase(b"correct horse battery", b"t" * 16)
