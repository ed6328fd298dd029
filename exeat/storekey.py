"""What the vault is told of its store: the key (by the name of a file, or from a service manager by its text), and the
generation that the log remembers.

systemd hands credentials over in a folder that only the service's own user can read (systemd.exec(5),
`LoadCredentialEncrypted=`): the vault, which has another uid when root starts us, could not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from audit.search import last_store
from exeat.settings import Settings

FOLDER = "CREDENTIALS_DIRECTORY"
MAX_KEY_BYTES = 256


class StoreKeyMissing(Exception):
    """The service manager did not hand the key over. str() is the cause, `remedy` what to do."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.remedy = remedy


def store_key(settings: Settings, environment: Mapping[str, str]) -> dict[str, str | None]:
    """The fields of the vault's boot document that name its key. Raises StoreKeyMissing."""
    name = settings.key_credential
    if name is None:
        files = {"key_file": settings.key_file, "passphrase_file": settings.passphrase_file}
        fields = {field: str(path) if path else None for field, path in files.items()}
        if settings.wrapped_file is not None:
            fields |= {"wrapped_file": str(settings.wrapped_file), "wrapping": settings.wrapping}
        return fields
    remedy = f"start it as a service with LoadCredentialEncrypted={name}:FILE, or name a key: {{file: PATH}}"
    folder = environment.get(FOLDER)
    if not folder:
        raise StoreKeyMissing(f"no service manager handed over the credential {name} that key: names", remedy)
    try:
        with (Path(folder) / name).open("rb") as stream:
            return {"key_text": stream.read(MAX_KEY_BYTES).decode("ascii")}
    except (OSError, UnicodeDecodeError):
        raise StoreKeyMissing(f"{Path(folder) / name} cannot be read as a key", remedy) from None


def logged_store(log: Path) -> dict[str, int | str]:
    """The fields that say which generation of the store the log saw last; a vault with an older one does not start.

    Where the log is not ours to read, or is not there yet, the state's own memory must do.
    """
    try:
        generation, digest = last_store(log)
    except OSError:
        return {}
    return {"logged_generation": generation, "logged_digest": digest}
