"""A loopback origin that is an independent witness: plain asyncio and a few lines of HTTP/1.1, nothing of our engine.

    async with Origin("api.test") as origin:            # HTTPS on 127.0.0.1, echoing
        origin.on("/slow", script(READ, gate, text("done")))
        ...
        assert origin.received[0].raw_head == b"GET / HTTP/1.1\\r\\n..."

    with Origin("api.test", address="127.0.0.2").run_in_thread() as origin:   # beside real processes

What it saw: `connections` (every accepted one, with all bytes), `handshakes`, `handshake_failures`, `received` (every
request, from its head on). "Nothing upstream" is `origin.untouched`. Answers are made by the handlers below or in
tests/support/scripts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.authority import Authority, Certificate
from tests.support.signals import Notice

Handler = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Connection:
    """One accepted connection: all its (decrypted) bytes, up to the origin's `keep`, and what TLS agreed on."""

    number: int
    raw: bytearray = field(default_factory=bytearray)
    bytes_in: int = 0
    sni: str | None = None
    alpn: str | None = None
    tls_version: str | None = None
    closed: bool = False


@dataclass
class Received:
    """One request. `raw_head` is exact, blank line included; `raw_body` as framed, `body` without framing."""

    connection: Connection
    raw_head: bytes
    method: str = ""
    target: str = ""
    version: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    raw_body: bytearray = field(default_factory=bytearray)
    body: bytearray = field(default_factory=bytearray)
    body_bytes: int = 0
    trailers: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = False
    digest: Any = field(default_factory=hashlib.sha256, repr=False)

    @property
    def raw(self) -> bytes:
        return self.raw_head + bytes(self.raw_body)

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def body_sha256(self) -> str:
        return str(self.digest.hexdigest())

    def values(self, name: str) -> list[str]:
        """All values of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def header(self, name: str) -> str | None:
        values = self.values(name)
        return values[0] if values else None


class Origin:
    """One listening origin. `names` go into its certificate (the address too); names should end in `.test`."""

    def __init__(
        self,
        *names: str,
        address: str = "127.0.0.1",
        port: int = 0,
        tls: bool = True,
        certificate: Certificate = "good",
        authority: Authority | None = None,
        handler: Handler | None = None,
        alpn: tuple[str, ...] = ("http/1.1",),
        keep: int = 4 << 20,
    ) -> None:
        """`certificate` other than "good" is wrong in that way. `keep` bounds what is kept of bodies (digests are of
        the whole). `authority` may be shared by several origins."""
        self.names = names or ("origin.test",)
        self.address = address
        self.port = port
        self.tls = tls
        self.authority = authority or Authority()
        self.connections: list[Connection] = []
        self.received: list[Received] = []
        self.handshakes = 0
        self.handshake_failures: list[str] = []
        self.faults: list[BaseException] = []
        """What handlers raised; a test that expects none asserts that it is empty."""
        self.entries: dict[str, str] = {}
        """name -> what its entry under `destinations:` says besides, for tests.support.gateway: `sni: optional`."""
        self.keep = keep
        self.notice = Notice()
        self._default = handler or echo
        self._routes: dict[str, Handler] = {}
        self._context = self.authority.server_context((*self.names, address), certificate, alpn) if tls else None
        self._sni: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: socket.socket | None = None
        if self._context is not None:
            self._context.sni_callback = self._note_sni

    # --- what tests ask ---

    @property
    def ca_pem(self) -> str:
        return self.authority.pem

    @property
    def untouched(self) -> bool:
        """No connection was ever accepted."""
        return not self.connections

    @property
    def bytes_in(self) -> int:
        return sum(connection.bytes_in for connection in self.connections)

    @property
    def base(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.names[0]}:{self.port}"

    def url(self, path: str = "/") -> str:
        return self.base + path

    def destination(self, ca_file: str | None = None) -> dict[str, Any]:
        """This origin as an entry of a policy's `destinations:` (the value of each of its names)."""
        entry: dict[str, Any] = {
            "addresses": [f"{self.address}/{128 if ':' in self.address else 32}"],
            "resolve": [self.address],
            "port": self.port,
        }
        if self.tls and ca_file is not None:
            entry["ca"] = f"file:{ca_file}"
        return entry if self.tls else {**entry, "scheme": "http"}

    def on(self, path: str, handler: Handler) -> None:
        """Answer requests for `path` (query aside) by `handler`; `/x/*` matches everything below /x/."""
        self._routes[path] = handler

    async def until(self, predicate: Callable[[], bool], timeout: float = 20.0) -> None:
        """Wait until something seen here makes `predicate()` true. Any loop."""
        await self.notice.until(predicate, timeout)

    def wait_until(self, predicate: Callable[[], bool], timeout: float = 20.0) -> None:
        """The same for a test without a loop."""
        self.notice.wait_until(predicate, timeout)

    # --- running ---

    async def __aenter__(self) -> Origin:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.address, self.port))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._accepting = asyncio.ensure_future(self._accept(listener))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        assert self._listener is not None
        self._listener.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.contextmanager
    def run_in_thread(self) -> Iterator[Origin]:
        """Run in a loop of its own thread, for tests that start real processes or block."""
        started = threading.Event()
        ended = Notice()
        state: dict[str, Any] = {"stop": False, "fault": None}

        async def main() -> None:
            async with self:
                started.set()
                await ended.until(lambda: state["stop"], timeout=3600)

        def run() -> None:
            try:
                asyncio.run(main())
            except BaseException as fault:
                state["fault"] = fault
            finally:
                started.set()

        thread = threading.Thread(target=run, name=f"origin {self.names[0]}", daemon=True)
        thread.start()
        started.wait(60)
        try:
            if state["fault"] is not None:
                raise state["fault"]
            yield self
        finally:
            state["stop"] = True
            ended.tell()
            thread.join(60)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(listener)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(len(self.connections))
            self.connections.append(connection)
            self.notice.tell()
            task = asyncio.ensure_future(self._serve(accepted, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        try:
            transport, protocol = await loop.connect_accepted_socket(
                lambda: _Recorder(reader, connection, self), accepted, ssl=self._context
            )
        except (OSError, ssl.SSLError) as error:
            self.handshake_failures.append(getattr(error, "reason", None) or type(error).__name__)
            connection.closed = True
            self.notice.tell()
            accepted.close()
            return
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self.handshakes += 1
            connection.sni = self._sni.pop(id(tls), None)
            connection.alpn = tls.selected_alpn_protocol()
            connection.tls_version = tls.version()
            self.notice.tell()
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._writers.add(writer)
        try:
            while await self._exchange(reader, writer, connection):
                pass
            writer.close()
            await writer.wait_closed()
        except (OSError, ssl.SSLError, asyncio.IncompleteReadError):
            pass  # the peer left: what it had sent is on record
        except asyncio.CancelledError:
            raise
        except BaseException as fault:
            self.faults.append(fault)
        finally:
            transport.abort()
            self._writers.discard(writer)
            connection.closed = True
            self.notice.tell()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection
    ) -> bool:
        """One request and its answer. True: the connection goes on."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.received.append(Received(connection, error.partial))
                self.notice.tell()
            return False
        request = Received(connection, head)
        self.received.append(request)
        try:
            lines = head.decode("latin-1").split("\r\n")
            request.method, request.target, request.version = lines[0].split(" ")
            for line in lines[1:-2]:
                name, value = line.split(":", 1)
                request.headers.append((name, value.strip(" \t")))
        except ValueError:
            self.notice.tell()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            return False
        exchange = Exchange(self, request, reader, writer)
        self.notice.tell()
        await self._handler(request.path)(exchange)
        await writer.drain()
        return exchange.keep_alive and request.complete

    def _handler(self, path: str) -> Handler:
        if path in self._routes:
            return self._routes[path]
        for pattern, handler in self._routes.items():
            if pattern.endswith("*") and path.startswith(pattern[:-1]):
                return handler
        return self._default

    def _note_sni(self, tls: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        if name is not None:
            self._sni[id(tls)] = name


class _Recorder(asyncio.StreamReaderProtocol):
    """Keeps every byte as it arrives, read by a handler or not."""

    def __init__(self, reader: asyncio.StreamReader, connection: Connection, origin: Origin) -> None:
        super().__init__(reader)
        self._connection = connection
        self._origin = origin

    def data_received(self, data: bytes) -> None:
        self._connection.bytes_in += len(data)
        room = self._origin.keep - len(self._connection.raw)
        if room > 0:
            self._connection.raw += data[:room]
        super().data_received(data)
        self._origin.notice.tell()


class Exchange:
    """What a handler has: the request, its body, and the answer to make."""

    def __init__(
        self, origin: Origin, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.origin = origin
        self.request = request
        self.reader = reader
        self.writer = writer
        self.keep_alive = "close" not in (request.header("connection") or "").lower() and request.version != "HTTP/1.0"
        self._continued = (request.header("expect") or "").lower() != "100-continue"
        self._chunked = (request.header("transfer-encoding") or "").lower() == "chunked"
        self._left = int(request.header("content-length") or 0)
        self._pieces = self._body()
        if not self._chunked and self._left == 0:
            request.complete = True

    # --- the request's body ---

    async def read_piece(self) -> bytes:
        """The next bytes of the body, b"" at its end. Sends 100 Continue first where it is awaited."""
        if not self._continued:
            self._continued = True
            await self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        piece = await anext(self._pieces, b"")
        if piece:
            self.request.body_bytes += len(piece)
            self.request.digest.update(piece)
            room = self.origin.keep - len(self.request.body)
            if room > 0:
                self.request.body += piece[:room]
        else:
            self.request.complete = True
        self.origin.notice.tell()
        return piece

    async def read_body(self) -> bytes:
        """The whole body (what is kept of it)."""
        while not self.request.complete:
            await self.read_piece()
        return bytes(self.request.body)

    async def _body(self) -> AsyncIterator[bytes]:
        while not self._chunked and self._left > 0:
            piece = await self.reader.read(min(self._left, 65536))
            if not piece:
                raise asyncio.IncompleteReadError(b"", self._left)
            self._left -= len(piece)
            self._raw(piece)
            yield piece
        while self._chunked:
            line = await self.reader.readuntil(b"\r\n")
            self._raw(line)
            size = int(line.split(b";")[0], 16)
            if size == 0:
                while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
                    self._raw(line)
                    name, value = line.decode("latin-1").split(":", 1)
                    self.request.trailers.append((name, value.strip()))
                self._raw(line)
                return
            data = await self.reader.readexactly(size + 2)
            self._raw(data)
            yield data[:-2]

    def _raw(self, data: bytes) -> None:
        room = self.origin.keep - len(self.request.raw_body)
        if room > 0:
            self.request.raw_body += data[:room]

    # --- the answer ---

    async def send(self, raw: bytes) -> None:
        """Exactly these bytes."""
        self.writer.write(raw)
        await self.writer.drain()

    async def answer(
        self, status: int = 200, body: bytes = b"", headers: tuple[tuple[str, str], ...] = (), reason: str = "Answer"
    ) -> None:
        """A whole answer with a length; no body is sent to HEAD."""
        fields = [*headers, ("Content-Length", str(len(body)))]
        if not self.keep_alive:
            fields.append(("Connection", "close"))
        await self.send(head(status, tuple(fields), reason) + (b"" if self.request.method == "HEAD" else body))

    async def begin(self, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """The head of a chunked answer."""
        await self.send(head(status, (*headers, ("Transfer-Encoding", "chunked"))))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in trailers)
        await self.send(b"0\r\n" + lines.encode("latin-1") + b"\r\n")

    async def interim(self, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        await self.send(head(status, headers, "Interim"))

    def abort(self) -> None:
        """Reset the connection."""
        self.keep_alive = False
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is then a reset
        self.writer.transport.abort()


def head(status: int, headers: tuple[tuple[str, str], ...] = (), reason: str = "Answer") -> bytes:
    """The bytes of an answer's head."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} {reason}\r\n{lines}\r\n".encode("latin-1")


async def echo(exchange: Exchange) -> None:
    """The default handler: reads the body, answers JSON of what was received."""
    await exchange.read_body()
    request = exchange.request
    seen = {
        "method": request.method,
        "target": request.target,
        "headers": request.headers,
        "body_bytes": request.body_bytes,
        "body_sha256": request.body_sha256,
        "connection": request.connection.number,
    }
    await exchange.answer(200, json.dumps(seen).encode(), (("Content-Type", "application/json"),))
