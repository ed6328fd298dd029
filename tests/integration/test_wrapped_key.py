"""A gateway whose store's key a key service unwraps: moved there, rotated, refused while the service says no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.gateway import TestGateway
from tests.support.keyservers import Safe, Transit
from tests.support.origins import Origin
from tests.support.secretservers import HOST

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wrapped-key")]

TOKEN = "root-canary-0123456789"
POLICY = """
roles:
  agent:
    allow:
      - {name: all, host: shop.test, methods: [GET], paths: ["/**"]}
"""


def test_the_key_moves_to_a_key_service_and_is_rotated_there(tmp_path: Path) -> None:
    """Without the service nothing starts, and why is said; with it everything does; the token is in no message."""
    with Origin(HOST, address="127.0.0.61").run_in_thread() as place:
        vault = Transit(place)
        vault.safe = Safe()
        gateway = TestGateway(
            tmp_path / "g", policy=POLICY, secrets={"shop/key": "stored-canary-0123"}, environment={"T": TOKEN}
        )
        with gateway:
            pass
        keys = gateway.config / "keys"
        (gateway.config / "vault.pem").write_text(place.ca_pem)
        entry = {"addresses": ["127.0.0.61/32"], "resolve": ["127.0.0.61"], "port": place.port, "ca": "file:vault.pem"}
        by = {
            "kind": "vault-transit",
            "address": f"https://{HOST}",
            "key": "exeat",
            "auth": {"token": "env:T"},
            "destinations": {HOST: entry},
        }
        named = json.dumps({"wrapped": "keys/store.key.wrapped", "by": by})
        text = gateway.settings_file.read_text()
        gateway.settings_file.write_text(text.replace("key: {file: keys/store.key}", f"key: {named}"))

        vault.safe.how = "refuse"
        no = gateway.exeat("store", "wrap-key", "--from", str(keys / "store.key"), env={"T": TOKEN})
        assert (no.code, "vault-transit:exeat" in no.err) == (1, True)
        assert not (keys / "store.key.wrapped").exists()
        vault.safe.how = ""
        yes = gateway.exeat("store", "wrap-key", "--from", str(keys / "store.key"), env={"T": TOKEN})
        assert yes.code == 0, yes.err
        assert TOKEN not in no.err + no.out + yes.err + yes.out
        (keys / "store.key").unlink()
        first = (keys / "store.key.wrapped").read_text()

        vault.safe.how = "refuse"
        with pytest.raises(AssertionError) as caught:
            gateway.start()
        said = str(caught.value)
        gateway.stop()
        assert "vault-transit:exeat" in said
        assert "permit update on transit/decrypt/exeat" in said
        assert TOKEN not in said

        vault.safe.how = ""
        gateway.start()
        assert gateway.exeat("store", "rotate-key").code == 0
        gateway.stop()
        assert (keys / "store.key.wrapped").read_text() != first
        gateway.start()
        assert [entry["name"] for entry in gateway.admin.secrets()] == ["shop/key"]
        told = gateway.records(event="admin.action", action="store.key-unwrapped")
        assert [record["subject"] for record in told] == ["vault-transit:exeat"] * 2
        gateway.stop()
