"""`StoreKey`: where the store's key comes from, and how another takes its place without a moment in which none fits.

A key file is rotated in three steps, each durable before the next:

 1 FILE.next holds the new key          the store still opens with FILE
 2 the store is sealed with the new key it opens with FILE.next only
 3 FILE.next takes the place of FILE

After a crash the store opens with exactly one of the two files: `opened` tries FILE, then FILE.next, and does step 3
again. A key that lies elsewhere (a passphrase, a service manager's credential, a read-only mount) is changed there by
who keeps it, and handed over for step 2. A key that a key service wraps is a file in this sense: FILE holds it wrapped,
and what the service unwrapped (broker/vault/wrapping.py) is passed in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from broker.vault.boot import BootRefused
from broker.vault.keys import KEY_BYTES, KeyRefused, key_from_passphrase, key_from_text, read_key_file, read_private
from broker.vault.store import SecretStore, StoreError
from broker.vault.wrapping import Made, Unwrapped, Wrapping

Random = Callable[[int], bytes]


class KeyPlace(Protocol):
    """The fields of a boot document that say where the key is; exactly one of the last five is set."""

    @property
    def state_dir(self) -> str: ...
    @property
    def danger_key_beside_store(self) -> bool: ...
    @property
    def key_file(self) -> str | None: ...
    @property
    def key_text(self) -> str | None: ...
    @property
    def passphrase_file(self) -> str | None: ...
    @property
    def passphrase(self) -> str | None: ...
    @property
    def wrapped_file(self) -> str | None: ...


class StoreKey:
    """The one key that a boot document names."""

    def __init__(
        self,
        boot: KeyPlace,
        random: Random,
        wrapping: Wrapping | None = None,
        unwrapped: Unwrapped | None = None,
    ) -> None:
        """`wrapping` and `unwrapped`: where the boot names a wrapped file, what `unwrapped_of` made of it."""
        self._boot = boot
        self._state_dir = Path(boot.state_dir)
        named = boot.key_file if boot.wrapped_file is None else boot.wrapped_file
        self._file = None if named is None else Path(named)
        self._random = random
        self._wrapping = wrapping
        self._unwrapped = unwrapped

    @property
    def _next(self) -> Path | None:
        return None if self._file is None else self._file.with_name(self._file.name + ".next")

    def opened(self, path: Path) -> SecretStore:
        """The store at `path`, an empty one if there is none. Raises StoreError and KeyRefused."""
        try:
            store = SecretStore(path, self.read, self._random)
        except StoreError as error:
            later = self._next
            if error.code != "store-wrong-key" or later is None or not os.path.lexists(later):
                raise
            store = SecretStore(path, lambda salt: self._read_file(later), self._random)
            self._promote()
            return store
        if self._next is not None:  # made for a rotation that did not come to step 2: nothing was sealed with it
            with contextlib.suppress(OSError):
                self._next.unlink(missing_ok=True)
        return store

    async def made(self) -> Made | None:
        """A new key, wrapped by who wraps ours, for `rotate`; None where nobody does. Raises KeyRefused."""
        return None if self._wrapping is None else await self._wrapping.made()

    def rotate(self, store: SecretStore, given: bytes | None, made: Made | None = None) -> int:
        """Seal `store` with another key; returns how many records. Raises KeyRefused and StoreError.

        `given` None makes a key and puts it into the key file; where that holds it wrapped, `made` is what goes there.
        Else it is a key's text or a passphrase, whichever the boot names, and the place it is read from at the next
        start is the caller's to change.
        """
        if given is not None:
            return store.rekey(self._parse(given, store.salt))
        if self._file is None:
            raise KeyRefused(
                "key-elsewhere",
                "the store's key does not lie in a file of ours",
                "make one where it lies, and hand it over: exeat store rotate-key --stdin",
            )
        if self._boot.wrapped_file is not None and made is None:
            raise KeyRefused("key-provider", "the new key was not wrapped; nothing was changed")
        key = self._random(KEY_BYTES) if made is None else made.key
        self._write_next(key.hex().encode() + b"\n" if made is None else made.text)
        count = store.rekey(key)
        self._promote()
        return count

    def read(self, salt: bytes) -> bytes:
        """The 32 bytes as they are named now. Raises KeyRefused."""
        if self._file is not None:
            return self._read_file(self._file)
        if self._boot.passphrase_file is not None:
            raw = read_private(Path(self._boot.passphrase_file), "key-missing", "key-modes")
            return key_from_passphrase(raw.removesuffix(b"\n").removesuffix(b"\r"), salt)
        if self._boot.passphrase is not None:
            return key_from_passphrase(self._boot.passphrase.encode(), salt)
        if self._boot.key_text is not None:
            return self._parse(self._boot.key_text.encode(), salt)
        raise BootRefused("key-missing", "the store has no key", "run `exeat init`")

    def _read_file(self, path: Path) -> bytes:
        if self._boot.wrapped_file is not None:
            found = self._unwrapped
            key = None if found is None else found.key if path == self._file else found.later
            if isinstance(key, KeyRefused):
                raise key
            if key is None:
                raise KeyRefused("key-provider", f"nobody unwrapped {path}", "start again")
            return key
        return read_key_file(path, state_dir=self._state_dir, danger_beside_store=self._boot.danger_key_beside_store)

    def _parse(self, given: bytes, salt: bytes) -> bytes:
        if self._boot.passphrase_file is not None or self._boot.passphrase is not None:
            return key_from_passphrase(given, salt)
        key = key_from_text(given)
        if key is None:
            raise KeyRefused(
                "key-invalid", "that is no key (32 bytes as 64 hex digits or base64)", "openssl rand -hex 32"
            )
        return key

    def _write_next(self, text: bytes) -> None:
        path = self._next
        assert path is not None
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            _sync_folder(path.parent)
        except OSError as error:
            raise KeyRefused(
                "key-readonly",
                f"{path.parent} cannot be written ({os.strerror(error.errno or 0)}); nothing was changed",
                "hand over a key that you put there yourself: exeat store rotate-key --stdin",
            ) from None

    def _promote(self) -> None:
        """Step 3. A failure is for the next start to mend: the store opens with FILE.next."""
        assert self._file is not None
        assert self._next is not None
        with contextlib.suppress(OSError):
            self._next.replace(self._file)
            _sync_folder(self._file.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
