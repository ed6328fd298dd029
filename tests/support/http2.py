"""HTTP/2 clients through a CONNECT tunnel: a blocking one on the h2 library, and node's as a script.

    with H2Client(box, "h2.test:8443") as client:
        number = client.ask("GET", "/x", authority="h2.test:8443")
        client.settle()
        client.streams[number].status

`strict=False` sends heads that a decent client never would.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from tests.support.gateway import Box

NODE_CLIENT = """
const net = require('net'), tls = require('tls'), http2 = require('http2')
const [target, count, path, ...extra] = process.argv.slice(1)
const proxy = new URL(process.env.HTTPS_PROXY)
const auth = Buffer.from(`${proxy.username}:${proxy.password}`).toString('base64')
const raw = net.connect(+proxy.port, proxy.hostname, () =>
  raw.write(`CONNECT ${target} HTTP/1.1\\r\\nHost: ${target}\\r\\nProxy-Authorization: Basic ${auth}\\r\\n\\r\\n`))
raw.once('data', head => {
  if (!head.toString().startsWith('HTTP/1.1 200')) throw new Error(head.toString())
  const secure = tls.connect({socket: raw, servername: target.split(':')[0], ALPNProtocols: ['h2']})
  secure.once('error', error => { console.log(JSON.stringify({error: error.code})); process.exit(0) })
  secure.once('secureConnect', () => {
    const session = http2.connect('https://' + target, {createConnection: () => secure})
    const headers = {...Object.fromEntries(extra.map(line => line.split('=')))}
    const one = number => new Promise((resolve, reject) => {
      const stream = session.request({...headers, ':path': path + number})
      let status, body = ''
      stream.on('response', got => { status = got[':status'] })
      stream.setEncoding('utf8').on('data', piece => { body += piece })
      stream.on('end', () => resolve({status, body})).on('error', reject)
    })
    Promise.all(Array.from({length: +count}, (_, number) => one(number))).then(answers => {
      console.log(JSON.stringify({alpn: secure.alpnProtocol, answers})); process.exit(0)
    }, error => { console.log(JSON.stringify({error: String(error)})); process.exit(0) })
  })
})
"""


def node(box: Box, target: str, count: int, path: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """`count` concurrent requests by node's http2 module on one connection that offers h2 alone.

    Each asks for `path` followed by its number.
    """
    extra = [f"{name}={value}" for name, value in (headers or {}).items()]
    done = box.command("node", "-e", NODE_CLIENT, target, str(count), path, *extra)
    assert done.code == 0, done
    return dict(json.loads(done.out))


@dataclass
class Stream:
    """What came back on one stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    size: int = 0
    ended: bool = False
    reset: int | None = None

    @property
    def over(self) -> bool:
        return self.ended or self.reset is not None

    @property
    def reason(self) -> str:
        """The reason code of a refusal."""
        return str(json.loads(bytes(self.body))["reason"])


class H2Client:
    """One connection. Acknowledges DATA as it is read, except for streams in `stalled`."""

    def __init__(self, box: Box, target: str, *, alpn: Iterable[str] = ("h2",), strict: bool = True) -> None:
        self._box = box
        self._target = target
        self._alpn = list(alpn)
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding="latin-1",
                validate_outbound_headers=strict,
                normalize_outbound_headers=strict,
            )
        )
        self.streams: dict[int, Stream] = {}
        self.stalled: set[int] = set()
        self.terminated: int | None = None
        """The error code of a GOAWAY."""
        self.closed = False

    def __enter__(self) -> H2Client:
        raw = self._box.connect()
        token = base64.b64encode(f"session:{self._box.token}".encode()).decode()
        head = f"CONNECT {self._target} HTTP/1.1\r\nHost: {self._target}\r\nProxy-Authorization: Basic {token}\r\n\r\n"
        raw.sendall(head.encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = raw.recv(4096)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200"), answer
        context = ssl.create_default_context(cafile=str(self._box.gateway.client_files / "ca.pem"))
        context.set_alpn_protocols(self._alpn)
        try:
            self._socket = context.wrap_socket(raw, server_hostname=self._target.partition(":")[0])
        except BaseException:
            raw.close()
            raise
        self.alpn = self._socket.selected_alpn_protocol()
        self._h2.initiate_connection()
        self._flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        self._socket.close()

    def ask(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]] = (),
        *,
        authority: str | None = None,
        scheme: str = "https",
        body: bytes | None = None,
        end: bool = True,
        stall: bool = False,
    ) -> int:
        """Send one request (its body within the window); return its stream."""
        number = self._h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", scheme), (":path", path)]
        pseudo.append((":authority", self._target if authority is None else authority))
        self.streams[number] = Stream()
        if stall:
            self.stalled.add(number)
        self._h2.send_headers(number, [*pseudo, *headers], end_stream=body is None and end)
        if body is not None:
            self.send(number, body, end=end)
        self._flush()
        return number

    def send(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Send DATA, reading while the window is closed."""
        view = memoryview(data)
        while view and not self.closed and self.streams[number].reset is None:
            room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size, len(view))
            if not room:
                self._read()
                continue
            self._h2.send_data(number, bytes(view[:room]))
            view = view[room:]
            self._flush()
        if end and not self.closed and self.streams[number].reset is None:
            self._h2.end_stream(number)
            self._flush()

    def reset(self, number: int) -> None:
        self._h2.reset_stream(number)
        self._flush()

    def settle(self, *numbers: int, until: Callable[[], bool] | None = None) -> None:
        """Read until these streams (or all) are over, `until()` holds, or the connection ended."""
        watched = numbers or tuple(self.streams)
        while not self.closed and not all(self.streams[number].over for number in watched):
            if until is not None and until():
                return
            self._read()

    def until_closed(self) -> None:
        """Read until the other side ends the connection."""
        while not self.closed:
            self._read()

    def widen(self, count: int) -> None:
        """Give the connection's window `count` bytes more."""
        self._h2.increment_flow_control_window(count)
        self._flush()

    def settings(self) -> int:
        """How many streams the other side lets us open at once."""
        return int(self._h2.remote_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS])

    def raw(self, data: bytes) -> None:
        """Bytes of our own inside TLS."""
        self._socket.sendall(data)

    def _read(self) -> None:
        try:
            data = self._socket.recv(65536)
        except (ConnectionError, ssl.SSLError):
            data = b""
        if not data:
            self.closed = True
            return
        for event in self._h2.receive_data(data):
            self._note(event)
        self._flush()

    def _note(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                stream = self.streams[event.stream_id]
                stream.headers = dict(event.headers)
                stream.status = int(stream.headers.pop(":status"))
            case h2.events.DataReceived():
                stream = self.streams[event.stream_id]
                stream.size += len(event.data)
                if len(stream.body) < 1 << 20:
                    stream.body += event.data
                if event.stream_id not in self.stalled:
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.streams[event.stream_id].ended = True
            case h2.events.StreamReset():
                self.streams[event.stream_id].reset = int(event.error_code)
            case h2.events.ConnectionTerminated():
                self.terminated = int(event.error_code)
            case _:
                pass

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                self._socket.sendall(data)


def refused_handshake(box: Box, target: str, alpn: Iterable[str]) -> str:
    """Try TLS and return OpenSSL's word for how it was refused."""
    try:
        with H2Client(box, target, alpn=alpn):
            return ""
    except ssl.SSLError as error:
        return str(error)  # its `reason` is None for this alert on some versions
