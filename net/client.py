"""The one HTTP client of secret sources and exchanges: a question to a place that the operator named, a bounded answer.

    client = HttpClient(lookups, contexts, table)
    answered = await client.ask(Question(endpoint=..., method="POST", target="/token", headers=(...), body=b"..."))
    match answered: case Answer(status=200, body=body): ...   case NoAnswer(code=code): ...

aiohttp does the HTTP (RULINGS 11.5); this module takes everything from it that could send a secret elsewhere, or bring
in more than was asked for:

- no redirect is followed, no cookie kept, nothing read from the environment: no proxy variable, no netrc;
- every address is vetted against the address table before, and compared once more where the socket is made. Private
  ones are reached only where the operator's `destinations:` names them, and never our own listeners;
- TLS is verified for the name, against the system store or the destination's own `ca`. Clear text goes only to an
  endpoint whose scheme the operator wrote as `http`;
- the answer is at most 256 KiB, identity-coded, and whole within the deadline;
- one connection for one question: nothing of one credential's exchange is left for another's.

What goes wrong is a value with a fixed code and a fixed sentence. Neither holds a byte of question or answer, and
nothing is logged here. Where the operator set an upstream proxy (net/upstream.py), it is used as net/dial.py does.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, Literal

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from net.addresses import Address, AddressRefused, AddressTable
from net.contexts import ClientContexts
from net.interfaces import InterfacesUnreadable, local_addresses
from net.resolve import Lookups, ResolveFailed
from net.trust import SYSTEM_TRUST, TrustKey, TrustUnusable
from net.upstream import UpstreamProxy, why_not_by_name
from rules.names import OWN_NAME, Destination, Host

MAX_ANSWER_BYTES = 256 * 1024
SECONDS = 10.0
"""From the call to the last byte of the answer: name, connection, TLS, question and answer together."""
MAX_IN_FLIGHT = 32
MAX_HEADERS = 64
MAX_LINE_BYTES = 8 * 1024

NoAnswerCode = Literal[
    "question-malformed",
    "address-refused",
    "name-unresolved",
    "unreachable",
    "proxy-refused",
    "certificate-refused",
    "timed-out",
    "answer-malformed",
    "answer-encoded",
    "answer-too-large",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A place that the operator named. `addresses`, `static` and `trust` are of its entry under `destinations:`."""

    destination: Destination
    addresses: tuple[IPv4Network | IPv6Network, ...] = ()
    static: tuple[str, ...] = ()
    """Numeric addresses to use instead of a lookup; each lies in `addresses`."""
    trust: TrustKey = SYSTEM_TRUST


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. Everything that may hold a secret stays out of repr."""

    endpoint: Endpoint
    method: Literal["GET", "POST", "PUT"]
    target: str = field(repr=False)
    """Path and query as they go out: origin-form, already percent-encoded."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Beside Host, Content-Length, Accept-Encoding and User-Agent, which are ours."""
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, whatever its status: a redirect is an answer too. Header names in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    body: bytes = field(repr=False)

    def header(self, name: str) -> str | None:
        """The value of a header that stands there exactly once; None for none or several. `name` in lower case."""
        values = [value for key, value in self.headers if key == name]
        return values[0] if len(values) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """There is none. `detail` is a sentence for the operator: host names and addresses, nothing of the question."""

    code: NoAnswerCode
    detail: str


class _Failed(Exception):
    """Inside this module only."""

    def __init__(self, code: NoAnswerCode, detail: str) -> None:
        super().__init__(code)
        self.no_answer = NoAnswer(code=code, detail=detail)


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}\Z")  # RFC 9110 5.6.2
_VALUE = re.compile(r"[\x20-\x7e]{0,65536}\Z")
_TARGET = re.compile(r"/[!$%&'()*+,./0-9:;=?@A-Z_a-z~\-\[\]]{0,16383}\Z")  # RFC 9112 3.2.1, without what needs escaping
_OURS = frozenset({"host", "content-length", "accept-encoding", "user-agent", "transfer-encoding", "connection", "te"})


class HttpClient:
    """Made once per process. `table` is asked at each question, so that new listeners count at once."""

    def __init__(
        self,
        lookups: Lookups,
        contexts: ClientContexts,
        table: Callable[[], AddressTable],
        *,
        interfaces: Callable[[], frozenset[Address]] = local_addresses,
        upstream: UpstreamProxy | None = None,
        seconds: float = SECONDS,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._lookups = lookups
        self._contexts = contexts
        self._table = table
        self._interfaces = interfaces
        self._upstream = upstream
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._turns = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def ask(self, question: Question) -> Answer | NoAnswer:
        """Ask once. Nothing is tried again here; aiohttp sends a GET anew where its connection ended without an answer.

        Raises nothing but CancelledError.
        """
        try:
            _check(question)
            async with asyncio.timeout(self._seconds), self._turns:
                return await self._ask(question)
        except _Failed as failed:
            return failed.no_answer
        except TimeoutError:
            return NoAnswer(code="timed-out", detail=f"no whole answer within {self._seconds:g} s")

    async def _ask(self, question: Question) -> Answer:
        endpoint = question.endpoint
        where = endpoint.destination
        proxy = self._upstream if self._upstream is not None and self._upstream.carries(where.host) else None
        trust = endpoint.trust
        if proxy is None:
            port = where.port
            addresses = await self._vetted(endpoint)
        else:
            _check_by_name(endpoint)
            port = proxy.port
            addresses = await self._proxy_vetted(proxy)
            trust = trust if proxy.ca_pem is None else replace(trust, added_pem=proxy.ca_pem)
        try:
            context = await self._contexts.get(trust) if where.scheme == "https" else None
        except TrustUnusable as error:
            raise _Failed("certificate-refused", str(error)) from None
        connector = aiohttp.TCPConnector(
            resolver=_Vetted(addresses),
            use_dns_cache=False,
            force_close=True,
            ssl=context if context is not None else True,
            socket_factory=_sockets_to(addresses, port),
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            raise_for_status=False,
            timeout=aiohttp.ClientTimeout(total=None),  # the deadline is ours, around everything
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            skip_auto_headers=("Content-Type", "Accept"),
        )
        async with session:
            try:
                return await self._exchange(session, question, proxy)
            except _Failed:
                raise
            except aiohttp.ClientConnectorCertificateError as error:
                why = error.certificate_error
                said = why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else ""
                raise _Failed("certificate-refused", said or "the certificate does not verify") from None
            except aiohttp.ClientHttpProxyError as error:
                raise _Failed("proxy-refused", f"the upstream proxy answered {error.status}") from None
            except (aiohttp.ClientSSLError, ssl.SSLError):
                raise _Failed("unreachable", "the TLS handshake failed") from None
            except aiohttp.ClientConnectorError as error:
                raise _Failed("unreachable", f"{addresses[0]}: errno {error.os_error.errno}") from None
            except aiohttp.ServerDisconnectedError:
                raise _Failed("unreachable", "the connection ended before an answer") from None
            except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError, aiohttp.InvalidURL, ValueError):
                raise _Failed("answer-malformed", "the answer is not whole HTTP/1.1") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _Failed("unreachable", f"the connection broke ({type(error).__name__})") from None

    async def _exchange(
        self, session: aiohttp.ClientSession, question: Question, proxy: UpstreamProxy | None
    ) -> Answer:
        where = question.endpoint.destination
        proxied: dict[str, Any] = {}
        if proxy is not None:
            proxied["proxy"] = URL.build(scheme="http", host=proxy.host, port=proxy.port)
            if proxy.authorization:
                proxied["proxy_headers"] = {"Proxy-Authorization": proxy.authorization.decode("latin-1")}
        async with session.request(
            question.method,
            URL(f"{where.scheme}://{where.host.authority}:{where.port}{question.target}", encoded=True),
            headers=[*question.headers, ("Accept-Encoding", "identity"), ("User-Agent", "exeat")],
            data=question.body or None,
            allow_redirects=False,
            **proxied,
        ) as response:
            coding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if coding != "identity":
                raise _Failed("answer-encoded", "the answer is compressed, which was not asked for")
            length = response.content_length
            if length is not None and length > self._max_bytes:
                raise _Failed("answer-too-large", f"the answer is longer than {self._max_bytes} bytes")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > self._max_bytes:
                    response.close()
                    raise _Failed("answer-too-large", f"the answer is longer than {self._max_bytes} bytes")
            headers = tuple(
                (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.raw_headers
            )
            return Answer(status=response.status, headers=headers, body=bytes(body))

    async def _vetted(self, endpoint: Endpoint) -> tuple[str, ...]:
        host, port = endpoint.destination.host, endpoint.destination.port
        if host.text == OWN_NAME or host.text.endswith("." + OWN_NAME):
            raise _Failed("address-refused", "an own name is never dialled")
        looked_up = False
        if host.is_literal:
            addresses: tuple[str, ...] = (host.text,)
        elif endpoint.static:
            addresses = endpoint.static
        else:
            addresses = await self._look_up(host, port)
            looked_up = True
        verdict = self._current_table().vet(addresses, port, endpoint.addresses)
        if isinstance(verdict, AddressRefused):
            raise _Failed("address-refused", f"{verdict.address}: {verdict.why}")
        if looked_up:
            self._lookups.keep("", host.text, host, addresses)
        return verdict.addresses

    async def _proxy_vetted(self, proxy: UpstreamProxy) -> tuple[str, ...]:
        host = proxy.place
        addresses = (host.text,) if host.is_literal else await self._look_up(host, proxy.port)
        verdict = self._current_table().vet_operators(addresses, proxy.port)
        if isinstance(verdict, AddressRefused):
            raise _Failed("address-refused", f"the upstream proxy: {verdict.address}: {verdict.why}")
        return verdict.addresses

    async def _look_up(self, host: Host, port: int) -> tuple[str, ...]:
        """The bound on lookups is per name: one that hangs must not hold up the others."""
        try:
            return await self._lookups.addresses("", host.text, host, port)
        except ResolveFailed as error:
            raise _Failed("name-unresolved", f"{host.text}: {error}") from None

    def _current_table(self) -> AddressTable:
        table = self._table()
        try:
            return replace(table, own=table.own | self._interfaces())
        except InterfacesUnreadable as error:
            raise _Failed("address-refused", str(error)) from None


def _check(question: Question) -> None:
    """Refuse what could become more than one request, before anything is looked up."""
    fit = _TARGET.match(question.target) is not None and all(
        _TOKEN.match(name) and _VALUE.match(value) and name.lower() not in _OURS for name, value in question.headers
    )
    if not fit:
        raise _Failed("question-malformed", "the target or a header of the question cannot be sent")


def _check_by_name(endpoint: Endpoint) -> None:
    """What must not go through an upstream proxy: it resolves the name, and nobody would keep to addresses."""
    if (why := why_not_by_name(endpoint.destination.host)) is not None:
        raise _Failed("proxy-refused", why)
    if endpoint.static or endpoint.addresses or endpoint.destination.scheme != "https":
        raise _Failed(
            "proxy-refused",
            "addresses:, resolve: and scheme: http cannot be kept behind the upstream proxy; "
            "list the host in upstream.except",
        )


class _Vetted(AbstractResolver):
    """Answers every name with the addresses that were vetted for this one question."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        return None


def _sockets_to(addresses: tuple[str, ...], port: int) -> Callable[[Any], socket.socket]:
    """Sockets to these addresses and this port alone, whatever aiohttp made of the name."""
    allowed = {ip_address(address) for address in addresses}

    def make(info: Any) -> socket.socket:
        family, kind, _, _, peer = info
        if ip_address(peer[0]) not in allowed or peer[1] != port:
            raise OSError("not an address that was vetted")
        return socket.socket(family, kind | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)

    return make
