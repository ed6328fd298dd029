"""`key: {wrapped: FILE, by: {...}}` of exeat.yaml: the key of a key service that wraps the store's own key.

    by: {kind: vault-transit, address: "https://vault.corp.example:8200", key: exeat, mount: transit,
         auth: {approle: {role_id: "env:VAULT_ROLE", secret_id: "file:/run/secrets/vault-secret-id"}},
         destinations: {vault.corp.example: {addresses: [10.20.0.0/16], ca: "file:corp-root.pem"}}}
    by: {kind: aws-kms, region: eu-central-1, key: alias/exeat, auth: {keys: {...}}}
    by: {kind: gcp-kms, key: projects/P/locations/L/keyRings/R/cryptoKeys/K, auth: {service_account: "file:..."}}
    by: {kind: azure-key-vault, address: "https://corp.vault.azure.net", key: exeat, auth: {client: {...}}}

The words are those of the sources of the same vendors (rules/secret_sources.py). The store is closed when they are
needed, and so is credentials.yaml: nothing here is opened by `store:`, and `destinations:` stands here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rules.destinations import CaFiles, read_destinations
from rules.policy import DestinationDef
from rules.reader import Node
from rules.secret_sources import (
    AWS_AUTH,
    AZURE_AUTH,
    AZURE_LOGIN,
    GCP_AUTH,
    GCP_LOGIN,
    MOUNT,
    NAMESPACE,
    VAULT_AUTH,
    SourceDef,
    SourceKind,
    read_auth,
    read_matching,
    read_places,
    read_setting,
)

KINDS: Final[Mapping[str, SourceKind]] = {
    "vault-transit": SourceKind(address="", auth=VAULT_AUTH),
    "aws-kms": SourceKind(address="https://kms.{region}.amazonaws.com", auth=AWS_AUTH, required=("region",)),
    "gcp-kms": SourceKind(address="https://cloudkms.googleapis.com", login=GCP_LOGIN, auth=GCP_AUTH),
    "azure-key-vault": SourceKind(address="", login=AZURE_LOGIN, auth=AZURE_AUTH),
}
_STEP: Final = r"[A-Za-z0-9_.:-]{1,128}"
_KEYS: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    "vault-transit": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z"), "a key of Transit is named by one word"),
    "aws-kms": (
        re.compile(r"(?:[A-Za-z0-9-]{1,64}|alias/[A-Za-z0-9/_-]{1,250}|arn:[A-Za-z0-9:/_-]{1,500})\Z"),
        "a key of KMS is its id, alias/NAME or its ARN",
    ),
    "gcp-kms": (
        re.compile(rf"projects/{_STEP}/locations/{_STEP}/keyRings/{_STEP}/cryptoKeys/{_STEP}\Z"),
        "write projects/P/locations/L/keyRings/R/cryptoKeys/K",
    ),
    "azure-key-vault": (re.compile(r"[A-Za-z0-9-]{1,127}\Z"), "a key of Key Vault is named by letters, digits, hyphen"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappingKey:
    """Where the key service is, how it is opened, and which of its keys wraps ours."""

    source: SourceDef
    """As for a source of secrets; its name is the kind."""
    key: str
    mount: str = ""
    """Of Vault's Transit engine."""
    destinations: Mapping[str, DestinationDef] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What refusals and records call it."""
        return f"{self.source.kind}:{self.key}"


def read_wrapping_key(node: Node, ca_files: CaFiles | None) -> WrappingKey:
    """The value of `by:`. Problems are noted; raises Rejected where nothing can be made of it."""
    if not isinstance(node.value, dict) or "kind" not in node.value:
        node.fail("by: is a mapping with kind:, key:, auth: and what belongs to the kind")
    kind = node.child("kind").word(KINDS)
    row = KINDS[kind]
    required, optional = ["kind", "key", "auth", *row.required], ["destinations"]
    (required if row.address == "" else optional).append("address")
    optional += ["login"] if row.login is not None else []
    optional += ["namespace", "mount"] if kind == "vault-transit" else []
    fields = node.fields(" ".join(required), " ".join(optional))
    destinations = read_destinations(fields["destinations"], ca_files) if "destinations" in fields else {}
    settings = {key: read_setting(fields[key], key) for key in row.required}
    secrets: dict[str, str] = {}
    if "namespace" in fields:
        settings["namespace"] = read_matching(fields["namespace"], NAMESPACE, "a namespace is words joined by /")
    read_auth(fields["auth"], row, settings, secrets)
    if any(reference.startswith("store:") for reference in secrets.values()):
        fields["auth"].fail("the store cannot open what opens the store; name env:, file: or systemd:")
    mount = "transit" if kind == "vault-transit" else ""
    if "mount" in fields:
        mount = read_matching(fields["mount"], MOUNT, "a mount is words joined by /")
    pattern, complaint = _KEYS[kind]
    return WrappingKey(
        source=SourceDef(
            name=kind,
            kind=kind,
            places=read_places(fields, row, settings, destinations),
            settings=settings,
            secrets=secrets,
        ),
        key=read_matching(fields["key"], pattern, complaint),
        mount=mount,
        destinations=destinations,
    )
