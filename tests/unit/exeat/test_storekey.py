"""The store's key from a service manager: handed over by text, or the start says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from exeat.places import Places
from exeat.settings import Settings, parse_settings
from exeat.storekey import StoreKeyMissing, store_key

KEY = "11" * 32


def settings(text: str) -> Settings:
    places = Places(config=Path("/etc/exeat"), state=Path("/var/lib/exeat"), run=Path("/run/exeat"))
    return parse_settings(f"version: 1\n{text}\n", Path("/etc/exeat/exeat.yaml"), places)


@pytest.mark.parametrize("environment", [{}, {"CREDENTIALS_DIRECTORY": ""}, {"CREDENTIALS_DIRECTORY": "/nowhere"}])
def test_a_credential_that_nobody_handed_over_names_the_remedy(environment: dict[str, str]) -> None:
    """Started by hand, or with another credential: what to write into the unit is said."""
    with pytest.raises(StoreKeyMissing) as caught:
        store_key(settings("key: {systemd: exeat.key}"), environment)
    assert "exeat.key" in str(caught.value)
    assert "LoadCredentialEncrypted=exeat.key:" in caught.value.remedy


def test_a_credential_goes_to_the_vault_as_text(tmp_path: Path) -> None:
    """The vault could not read the service user's folder: it is told the text, and no file."""
    (tmp_path / "exeat.key").write_text(KEY)
    found = store_key(settings("key: {systemd: exeat.key}"), {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert found == {"key_text": KEY}


def test_files_are_named_and_not_read() -> None:
    """A key file is the vault's to read, under its own uid."""
    assert store_key(settings("key: {file: store.key}"), {}) == {
        "key_file": "/etc/exeat/store.key",
        "passphrase_file": None,
    }
