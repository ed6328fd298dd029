"""`upstream:` of exeat.yaml: the corporate proxy that everything leaves through (RULINGS 5.4).

upstream:
  proxy: http://proxy.corp.example:3128
  credential: {username: exeat, password_file: secrets/proxy}    # or {file: PATH}, one line `username:password`
  ca: corp-ca.pem                                                # where the proxy inspects TLS
  except: [git.corp.example, "*.svc.example"]                    # dialled directly, addresses vetted

`parse_upstream` reads the setting and opens no file; `boot_of` reads the files at each start of the processes that
dial, whose boot documents are the only place where the password goes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.vault.keys import KeyRefused, read_private
from net.contexts import client_context
from net.trust import TrustKey, TrustUnusable
from net.upstream import UpstreamProxy
from rules.names import Host, InvalidName, parse_authority

MAX_SECRET = 1024
MAX_CA = 256 * 1024
MAX_EXCEPT = 256
_KEYS = ("proxy", "credential", "ca", "except")

Fault = Callable[[tuple[str | int, ...], str], Exception]
"""Makes the error for what stands at a path of the document."""


class UpstreamRefused(Exception):
    """A file of `upstream:` cannot be used. str() names the file, never its content; `remedy` what to do."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The setting. Paths are absolute. Without `username`, `credential_file` holds both; without either, none."""

    host: str
    port: int
    username: str | None = None
    credential_file: Path | None = None
    ca_file: Path | None = None
    direct: tuple[str, ...] = ()


def parse_upstream(value: Any, fault: Fault, resolve: Callable[[str], Path]) -> Upstream:
    """Return the setting in `value`. Raises what `fault` makes, at the place of the first wrong part."""
    if not isinstance(value, Mapping):
        raise fault(("upstream",), "upstream is {proxy: URL, credential:, ca:, except:}")
    _only(value, _KEYS, ("upstream",), fault)
    if "proxy" not in value:
        raise fault(("upstream",), "upstream needs proxy: http://HOST:PORT")
    host, port = _proxy(value["proxy"], fault)
    username, credential = None, None
    if "credential" in value:
        username, credential = _credential(value["credential"], fault, resolve)
    ca = value.get("ca")
    if "ca" in value and (not isinstance(ca, str) or not ca):
        raise fault(("upstream", "ca"), "ca is the path of a PEM file")
    return Upstream(
        host=host.text,
        port=port,
        username=username,
        credential_file=credential,
        ca_file=resolve(ca) if isinstance(ca, str) else None,
        direct=_direct(value.get("except", []), host, fault),
    )


def boot_of(setting: Upstream | None, *, private: bool = True) -> dict[str, Any] | None:
    """What a process that dials is told of it (net.upstream.UpstreamProxy). Raises UpstreamRefused.

    `private`: the credential's file must be ours alone. False in containers, where several users read one mount.
    """
    if setting is None:
        return None
    authorization, ca_pem = b"", None
    if setting.credential_file is not None:
        pair = _line(setting.credential_file, private=private)
        if setting.username is not None:
            pair = f"{setting.username}:{pair}"
        elif not pair.partition(":")[0] or not pair.partition(":")[2]:
            raise UpstreamRefused(f"{setting.credential_file} does not hold username:password")
        authorization = b"Basic " + base64.b64encode(pair.encode())
    if setting.ca_file is not None:
        ca_pem = _authority(setting.ca_file)
    proxy = UpstreamProxy(
        host=setting.host, port=setting.port, authorization=authorization, ca_pem=ca_pem, direct=setting.direct
    )
    return {
        "host": proxy.host,
        "port": proxy.port,
        "authorization": proxy.authorization.hex(),
        "ca_pem": proxy.ca_pem,
        "direct": list(proxy.direct),
    }


# --- parts of the setting ---


def _only(value: Mapping[Any, Any], known: tuple[str, ...], at: tuple[str, ...], fault: Fault) -> None:
    for key in value:
        if key not in known:
            raise fault((*at, key), f"unknown key {str(key)[:40]!r} in {at[-1]}; known are {', '.join(known)}")


def _proxy(value: Any, fault: Fault) -> tuple[Host, int]:
    at = ("upstream", "proxy")
    if not isinstance(value, str):
        raise fault(at, "proxy is a URL, http://HOST:PORT")
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise fault(at, "proxy is a URL, http://HOST:PORT")
    if scheme == "https":
        raise fault(at, "only http:// proxies are spoken to; what goes through them is TLS of its own")
    if "@" in rest:
        raise fault(at, "no user or password stands in the URL; say credential: {username:, password_file:}")
    try:
        return parse_authority(rest.removesuffix("/"), None)
    except InvalidName as error:
        raise fault(at, f"proxy is http://HOST:PORT, a full name or a numeric address, and a port: {error}") from None


def _credential(value: Any, fault: Fault, resolve: Callable[[str], Path]) -> tuple[str | None, Path]:
    at = ("upstream", "credential")
    forms = "credential is {username: NAME, password_file: PATH}, or {file: PATH} with one line username:password"
    if not isinstance(value, Mapping):
        raise fault(at, forms)
    if "password" in value:
        raise fault((*at, "password"), "a password does not stand in this file; say password_file: PATH")
    _only(value, ("username", "password_file", "file"), at, fault)
    if set(value) not in ({"file"}, {"username", "password_file"}):
        raise fault(at, forms)
    for key, text in value.items():
        if not isinstance(text, str) or not text:
            raise fault((*at, key), f"{key} has the wrong form")
    username = value.get("username")
    if username is not None and (":" in username or not username.isprintable()):
        raise fault((*at, "username"), "a user name holds no colon and no control character")
    return username, resolve(value["file"] if "file" in value else value["password_file"])


def _direct(value: Any, proxy: Host, fault: Fault) -> tuple[str, ...]:
    at = ("upstream", "except")
    if not isinstance(value, list) or len(value) > MAX_EXCEPT:
        raise fault(at, f"except is a list of at most {MAX_EXCEPT} hosts")
    found: list[str] = []
    for index, entry in enumerate(value):
        text = entry if isinstance(entry, str) else ""
        wild = text.startswith("*.")
        try:
            host = Host.of(text[2:] if wild else text)
        except InvalidName:
            host = None
        if host is None or (wild and host.is_literal):
            raise fault((*at, index), "an exception is a host name, *.NAME for all below it, or one address")
        canonical = f"*.{host.text}" if wild else host.text
        if canonical in found:
            raise fault((*at, index), f"{canonical} stands here twice")
        found.append(canonical)
    return tuple(found)


# --- files ---


def _line(path: Path, *, private: bool) -> str:
    """The one line of a credential's file."""
    if private:
        try:
            raw = read_private(path, "credential-missing", "credential-modes", limit=MAX_SECRET)
        except KeyRefused as error:
            remedy = error.remedy if error.code == "credential-modes" else "upstream.credential in exeat.yaml names it"
            raise UpstreamRefused(error.detail, remedy) from None
    else:
        raw = _bounded(path, MAX_SECRET)
    try:
        text = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise UpstreamRefused(f"{path} must hold one line of text", "write the credential of the upstream proxy there")
    return text


def _authority(path: Path) -> str:
    """The certificates in `path`, tried the way the dialer will use them."""
    try:
        text = _bounded(path, MAX_CA).decode("ascii")
        if "PRIVATE KEY" in text:
            raise UpstreamRefused(
                f"{path} holds a private key", "upstream.ca is a certificate, in PEM, and nothing else"
            )
        client_context(TrustKey(ca_pem=text))
    except (ValueError, TrustUnusable):
        raise UpstreamRefused(f"{path} holds no certificate in PEM", "upstream.ca in exeat.yaml names it") from None
    return text


def _bounded(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as stream:
            raw = stream.read(limit + 1)
    except OSError as error:
        raise UpstreamRefused(f"{path}: {error.strerror}", "upstream: in exeat.yaml names it") from None
    if len(raw) > limit:
        raise UpstreamRefused(f"{path} is larger than {limit} bytes", "upstream: in exeat.yaml names it")
    return raw
