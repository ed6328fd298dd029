"""Facts: one attempt, normalised. What decide_tunnel and decide_request look at, and nothing else.

Built only through the `build` constructors, which refuse an attempt whose names disagree (I02, I03). Every
entry point (explicit, captured, tunnel, http1 lane, mitm adapter, broker) makes the same facts from the same
attempt, so that all give the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rules.names import DEFAULT_PORTS, Destination, Host, InvalidName, LocalName, Scheme, parse_authority
from rules.paths import CanonicalPath, InvalidTarget, Query


class FactsRefused(ValueError):
    """The attempt cannot be stated as facts. `reason` is a code of rules.reasons; `detail` a fixed sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelFacts:
    """A CONNECT (or a captured connection): the host and port asked for."""

    host: Host
    port: int

    @classmethod
    def build(cls, target: str) -> TunnelFacts:
        """From a CONNECT target `host:port`. Raises FactsRefused(`bad-target`, `local-address`)."""
        try:
            host, port = parse_authority(target, None)
        except LocalName as error:
            raise FactsRefused("local-address", str(error)) from None
        except InvalidName as error:
            raise FactsRefused("bad-target", str(error)) from None
        return cls(host=host, port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyAttested:
    """What an executor found in a body that it judged (it sends those very bytes): operation ids that matched.

    Used by the vault, which parses nothing that came from outside.
    """

    operations: frozenset[str]
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """One request: the canonical tuple, the headers as received, and the body where an operation asked for it.

    `headers` keeps order and duplicates; names are lower case. `body` is None until a NeedsBody was answered.
    `partial`: `body` is only the beginning of one that goes on, which a NeedsBody with `prefix` asks for.
    """

    method: str
    destination: Destination
    path: CanonicalPath
    query: Query
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | BodyAttested | None = None
    has_body: bool = False
    upgrade: str | None = None
    partial: bool = False
    asked: Query | None = None
    """The query as it came, where `query` is a smaller one (rules/narrowing.py). Nothing is decided by it."""

    @classmethod
    def build(
        cls,
        *,
        method: str,
        scheme: Scheme,
        tunnel: TunnelFacts | None,
        sni: str | None = None,
        target: str,
        headers: tuple[tuple[str, str], ...],
        has_body: bool = False,
        upgrade: str | None = None,
    ) -> RequestFacts:
        """From a parsed head. `target` is origin-form inside a tunnel or absolute-form on the proxy itself.

        `headers` are (lower-case name, value) in order. Raises FactsRefused: `authority-mismatch`
        where CONNECT, SNI, Host and absolute-form do not agree, `local-address`, `bad-target` otherwise.
        """
        hosts = [value for name, value in headers if name == "host"]
        if len(hosts) != 1:
            raise FactsRefused("bad-host-header", "exactly one Host header is required")
        default = DEFAULT_PORTS[scheme]
        try:
            host, port = parse_authority(hosts[0], default)
            if target.startswith("/"):
                if tunnel is None:
                    raise FactsRefused("bad-target", "a proxy request names its whole URL")
                origin = target
            else:
                prefix = f"{scheme}://"
                if not target.lower().startswith(prefix):
                    raise FactsRefused("bad-target", "the target is neither a path nor a URL of this scheme")
                authority, slash, rest = target[len(prefix) :].partition("/")
                if "?" in authority or "#" in authority:
                    raise FactsRefused("bad-target", "the URL needs a path before its query")
                origin = slash + rest if slash else "/"
                if parse_authority(authority, default) != (host, port):
                    raise FactsRefused("authority-mismatch", "the URL and the Host header name different hosts")
            if tunnel is not None and (tunnel.host, tunnel.port) != (host, port):
                raise FactsRefused("authority-mismatch", "the tunnel and the Host header name different hosts")
            if sni is not None and Host.parse(sni) != host:
                raise FactsRefused("authority-mismatch", "the TLS server name and the Host header differ")
            raw_path, question, raw_query = origin.partition("?")
            path = CanonicalPath.parse(raw_path)
            query = Query.parse(raw_query if question else None)
        except LocalName as error:
            raise FactsRefused("local-address", str(error)) from None
        except InvalidName as error:
            raise FactsRefused("bad-target", str(error)) from None
        except InvalidTarget as error:
            raise FactsRefused("bad-path", str(error)) from None
        return cls(
            method=method,
            destination=Destination(scheme, host, port),
            path=path,
            query=query,
            headers=headers,
            has_body=has_body,
            upgrade=upgrade,
        )

    def header(self, name: str) -> tuple[str, ...]:
        """All values of the header `name` (lower case), in order."""
        return tuple(value for key, value in self.headers if key == name)

    @property
    def target(self) -> str:
        """Path and query exactly as sent."""
        return self.path.raw if self.query.raw is None else f"{self.path.raw}?{self.query.raw}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """What policy may know of a sandbox. Attributes are validated single segments (see rules.parse.ATTRIBUTE)."""

    tenant: str
    id: str
    epoch: int
    role: str
    owner: str
    agent: str
    task: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    expires_at: float = 0.0
    """Seconds since the Unix epoch; 0 is "already over"."""
