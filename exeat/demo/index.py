"""Which Python index the demo installs from: the one this machine uses, or a small local one when none answers."""

from __future__ import annotations

import hashlib
import io
import socket
import ssl
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from urllib.parse import urlsplit

from net.addresses import classify
from rules.catalogue import builtin_services

LOCAL_HOST = "index.shop.example"
REAL_PACKAGE, LOCAL_PACKAGE = "six", "exeat-demo-greeting"
_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index for the demo: `simple_url` for pip, the policy lines it needs, and the package to install."""

    simple_url: str
    package: str
    service: str
    services_block: str = ""
    destinations: tuple[str, ...] = ()
    why_local: str = ""


def find_index(configured: str | None, shop_port: int) -> Index:
    """Return the index at `configured` (pip's --index-url; None: the public one), if it answers within seconds.

    Blocks. Where its addresses are not public ones (a mirror, a test network), the policy says so as a user would.
    """
    places = builtin_services()["pypi"].endpoints.values()
    public = next(place.pattern.text for place in places if place.mirror == "")
    base = (configured or f"https://{public}/simple").rstrip("/").removesuffix("/simple")
    try:
        with urllib.request.urlopen(f"{base}/simple/{REAL_PACKAGE}/", timeout=_SECONDS) as answer:  # noqa: S310
            if answer.status != 200:
                raise OSError(f"it answered {answer.status}")
        hosts = {urlsplit(base).hostname or ""}
        if urlsplit(base).hostname == public:
            # Where packages are read; the places that take uploads are none that the demo goes to.
            hosts |= {place.pattern.text for place in places if place.mirror == ""}
            block, service = "", "pypi"
        else:
            block, service = f"services:\n  index: {{like: pypi, base: {base}}}\n", "index"
        lines = tuple(line for host in sorted(hosts) if (line := _destination(host)))
    except (OSError, urllib.error.URLError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return _local(shop_port, f"{base} cannot be reached ({reason})")
    return Index(
        simple_url=f"{base}/simple/", package=REAL_PACKAGE, service=service, services_block=block, destinations=lines
    )


def _destination(host: str) -> str:
    """A `destinations:` line where `host` lies at addresses that are not public; "" otherwise."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)}
    special = sorted(address for address in found if classify(address) is not None)
    if not special:
        return ""
    networks = ", ".join(f'"{address}/{128 if ":" in address else 32}"' for address in sorted(found))
    return f"  {host}: {{addresses: [{networks}]}}\n"


def _local(shop_port: int, why: str) -> Index:
    base = f"https://{LOCAL_HOST}:{shop_port}"
    return Index(
        simple_url=f"{base}/simple/",
        package=LOCAL_PACKAGE,
        service="index",
        services_block=f'services:\n  index: {{like: pypi, base: "{base}"}}\n',
        why_local=why,
    )


def local_wheel() -> tuple[str, bytes]:
    """File name and bytes of the local index's only wheel."""
    module, info = "exeat_demo_greeting", "exeat_demo_greeting-1.0.dist-info"
    files = {
        f"{module}.py": b'TEXT = "installed from the local index"\n',
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: exeat-demo-greeting\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: exeat\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(name, content)
    return f"{module}-1.0-py3-none-any.whl", buffer.getvalue()


def local_page() -> bytes:
    """The simple-API page (PEP 503) of the local package."""
    name, content = local_wheel()
    digest = hashlib.sha256(content).hexdigest()
    return f'<!DOCTYPE html><a href="/packages/demo/1.0/{name}#sha256={digest}">{name}</a>'.encode()
