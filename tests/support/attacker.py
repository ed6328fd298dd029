"""The attacker's client: writes exact bytes on a connected socket, reads what comes, and says what it saw.

The same client is used at every entry point that takes bytes, so that what differs is the product. It is lenient
where a gullible client would be: what it cannot read as an answer is kept in `delivered` all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)

KEPT = 1 << 20
"""Bytes that are kept of the delivered stream and of a body; beyond it there are length and digest."""


@dataclass(kw_only=True)
class Plan:
    """What to do on one connection."""

    first: tuple[bytes, ...] = ()
    """Written to the proxy before anything is read."""
    tunnel: bool = False
    """`first` is a CONNECT: go on only after a 200."""
    tls: bool = False
    """A handshake comes next."""
    sni: str | None = None
    """None: no server name is sent."""
    alpn: tuple[str, ...] = ("http/1.1",)
    trusted: str = ""
    """PEM of the CAs that are trusted; names are not checked, they may be the attack."""
    send: tuple[bytes, ...] = ()
    """Written then, each piece by itself."""
    answers: int = 1
    heads: bool = False
    """The answers are to HEAD requests."""
    then: bytes = b""
    """Written after a 101."""
    then_reads: int = 0
    """Bytes to read back after `then`."""
    seconds: float = 20.0
    """Longest wait for one read."""


@dataclass
class Answer:
    """One final answer."""

    status: int
    phrase: str
    headers: dict[str, str]
    interim: tuple[int, ...] = ()
    complete: bool = True
    body: bytearray = field(default_factory=bytearray)
    size: int = 0
    digest: str = ""


@dataclass
class Seen:
    """What the client saw. `end` is open, closed, reset, timeout or `alert ...`, as it was after the last read."""

    end: str = "open"
    delivered: bytearray = field(default_factory=bytearray)
    """Every byte that came, as plain text where there was TLS."""
    answers: list[Answer] = field(default_factory=list)
    echoed: bytes = b""


def play(sock: socket.socket, plan: Plan) -> Seen:
    """Carry out `plan` on `sock`, which is closed afterwards. Raises nothing that the network does."""
    return _Client(sock, plan).run()


class _Client:
    def __init__(self, sock: socket.socket, plan: Plan) -> None:
        self._plan = plan
        self._sock = sock
        self._buffer = b""
        self._refused = False
        self._seen = Seen()

    def run(self) -> Seen:
        self._sock.settimeout(self._plan.seconds)
        with contextlib.suppress(OSError):  # a socket pair has no such option
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._seen.end = self._play()
        except ssl.SSLError as error:
            self._seen.end = f"alert {error.reason}"
        except TimeoutError:
            self._seen.end = "timeout"
        except OSError:
            self._seen.end = "reset"
        finally:
            self._sock.close()
        return self._seen

    def _play(self) -> str:
        plan, seen = self._plan, self._seen
        self._write(plan.first)
        if plan.tunnel:
            answer = self._answer(connect=True)
            if answer is None:
                return "closed"
            if answer.status != 200:
                seen.answers.append(answer)
                return "open"
        if plan.tls:
            context = ssl.create_default_context(cadata=plan.trusted)
            context.check_hostname = False
            context.set_alpn_protocols(list(plan.alpn))
            self._sock = context.wrap_socket(self._sock, server_hostname=plan.sni)
        self._write(plan.send)
        for _ in range(plan.answers):
            answer = self._answer()
            if answer is None:
                return "reset" if self._refused else "closed"
            seen.answers.append(answer)
            if answer.status == 101:
                self._write([plan.then])
                while len(self._buffer) < plan.then_reads and self._more():
                    pass
                seen.echoed = self._buffer
                return "open"
            if not answer.complete:
                return "closed"
        return "open"

    def _write(self, pieces: Iterable[bytes]) -> None:
        """What the other side no longer takes is dropped: what it had to say can still be read."""
        try:
            for piece in pieces:
                self._sock.sendall(piece)
        except OSError:
            self._refused = True

    def _more(self) -> bool:
        data = self._sock.recv(65536)
        self._seen.delivered += data[: max(0, KEPT - len(self._seen.delivered))]
        self._buffer += data
        return bool(data)

    def _answer(self, *, connect: bool = False) -> Answer | None:
        """The next final answer, or None where the stream ended before its head."""
        interim: list[int] = []
        while True:
            while b"\r\n\r\n" not in self._buffer:
                try:
                    if not self._more():
                        return None
                except ConnectionError:
                    return None
            raw, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
            first, *lines = raw.decode("latin-1").split("\r\n")
            _, _, rest = first.partition(" ")
            code, _, phrase = rest.partition(" ")
            status = int(code) if code.isdigit() else 0
            if status == 101 or not 100 <= status < 200:
                break
            interim.append(status)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = Answer(status, phrase, headers, tuple(interim))
        if not (self._plan.heads or status in (101, 204, 304) or (connect and status == 200)):
            digest = hashlib.sha256()
            try:
                answer.complete = self._body(answer, digest)
            except (OSError, ValueError):
                answer.complete = False
            answer.digest = digest.hexdigest()
        return answer

    def _body(self, answer: Answer, digest: hashlib._Hash) -> bool:
        if answer.headers.get("transfer-encoding") == "chunked":
            while size := int(self._line(), 16):
                if not self._take(answer, digest, size):
                    return False
                self._line()
            while self._line():
                pass
            return True
        if "content-length" in answer.headers:
            return self._take(answer, digest, int(answer.headers["content-length"]))
        return self._take(answer, digest, None)

    def _take(self, answer: Answer, digest: hashlib._Hash, left: int | None) -> bool:
        """Move that many bytes (None: all) of the stream into the answer; False where it ended before."""
        while left is None or left > 0:
            if not self._buffer and not self._more():
                return left is None
            data = self._buffer if left is None else self._buffer[:left]
            self._buffer = self._buffer[len(data) :]
            answer.size += len(data)
            digest.update(data)
            answer.body += data[: max(0, KEPT - len(answer.body))]
            left = None if left is None else left - len(data)
        return True

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            if not self._more():
                raise ValueError("the stream ended inside the framing")
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line


def play_http2(sock: socket.socket, plan: Plan, fields: list[tuple[bytes, bytes]], body: bytes | None) -> Seen:
    """As `play`, with one HTTP/2 request in place of `plan.send`. Nothing that is sent is checked here."""
    return _Http2Client(sock, plan, fields, body).run()


class _Http2Client(_Client):
    def __init__(self, sock: socket.socket, plan: Plan, fields: list[tuple[bytes, bytes]], body: bytes | None) -> None:
        super().__init__(sock, plan)
        self._fields = fields
        self._request_body = body
        self._http2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding="latin-1",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._answered: Answer | None = None
        self._over = False
        self._digest = hashlib.sha256()

    def _answer(self, *, connect: bool = False) -> Answer | None:
        if connect:
            return super()._answer(connect=True)
        http2 = self._http2
        http2.initiate_connection()
        http2.send_headers(1, self._fields, end_stream=self._request_body is None)
        if self._request_body is not None:
            http2.send_data(1, self._request_body, end_stream=True)
        self._write([http2.data_to_send()])
        while not self._over and self._more():
            for event in http2.receive_data(self._buffer):
                self._take_event(event)
            self._buffer = b""
            self._write([http2.data_to_send()])
        answer = self._answered
        if answer is not None:
            answer.digest = self._digest.hexdigest()
        return answer

    def _take_event(self, event: Event) -> None:
        answer = self._answered
        match event:
            case ResponseReceived():
                headers = {str(name): str(value) for name, value in event.headers or ()}
                self._answered = Answer(int(headers.pop(":status", "0")), "", headers, complete=False)
                self._deliver(repr(headers).encode())
            case DataReceived() if answer is not None:
                data = event.data or b""
                answer.size += len(data)
                answer.body += data[: max(0, KEPT - len(answer.body))]
                self._digest.update(data)
                self._deliver(data)
                self._http2.acknowledge_received_data(event.flow_controlled_length or 0, 1)
            case StreamEnded() if answer is not None:
                answer.complete = self._over = True
            case StreamReset() | ConnectionTerminated():
                self._over = True

    def _deliver(self, data: bytes) -> None:
        """Header blocks are compressed on the wire: what the client reads of them counts as delivered."""
        self._seen.delivered += data[: max(0, KEPT - len(self._seen.delivered))]
