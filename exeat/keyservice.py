"""What a process of the vault's is told to ask a key service outside `exeat up`: restoring, and wrapping a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exeat.settings import Settings
from exeat.systemd_credentials import systemd_credentials
from exeat.upstream import boot_of


def key_service_fields(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a boot document beside the key's own; none where no service wraps it. Raises UpstreamRefused."""
    if settings.wrapped_file is None:
        return {}
    return {
        "environment": dict(environment),
        "systemd": systemd_credentials(environment, None),
        "internal_ranges": list(settings.internal_ranges),
        "self_addresses": list(settings.self_addresses),
        "upstream": boot_of(settings.upstream),
    }
