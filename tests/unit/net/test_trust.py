"""Trust sets: what names them, what they show, where the system store is."""

from __future__ import annotations

from pathlib import Path

import pytest

from net.trust import SYSTEM_TRUST, TrustKey, TrustUnusable, system_bundle


def test_a_machine_without_roots_is_an_error_that_names_the_package(tmp_path: Path, monkeypatch) -> None:
    """No bundle is a fault with a clear sentence, never an empty store."""

    class Nothing:
        openssl_cafile = str(tmp_path / "none")

    monkeypatch.setattr("net.trust.ssl.get_default_verify_paths", lambda: Nothing)
    with pytest.raises(TrustUnusable, match="ca-certificates"):
        system_bundle((str(tmp_path / "missing"),))


def test_the_environment_cannot_point_at_another_store(tmp_path: Path, monkeypatch) -> None:
    """SSL_CERT_FILE does not widen upstream trust."""
    own = tmp_path / "own.pem"
    own.write_text("")
    first = tmp_path / "roots.pem"
    first.write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    assert system_bundle((str(first),)) == first


def test_trust_sets_are_named_and_do_not_show_their_text() -> None:
    """The system store has a name, others a digest; repr holds no PEM."""
    key = TrustKey(ca_pem="-----BEGIN")
    assert SYSTEM_TRUST.name == "system"
    assert len(key.name) == 64
    assert "BEGIN" not in repr(key)
    assert TrustKey(ca_pem="a") != TrustKey(ca_pem="b") != SYSTEM_TRUST
