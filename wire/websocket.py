"""WebSocket without sockets (RFC 6455): the handshake check and a checker that walks frames without changing them.

Map: `check_request`, `check_accept` (handshake); `FrameChecker` (one direction of frames); `MessageReader` (whole
messages out of checked frames, for who must read them); `close_frame`.

`FrameChecker` unmasks and decompresses nothing: frames pass byte for byte, counted and bounded; what is not a legal
frame from that side ends the connection (B078).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field

from wire.heads import HeadRefused, RequestHead, ResponseHead, connection_tokens

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTROL_BIT = 0x8

MESSAGE_FRAMES = 16_384
"""Most frames of one message that is put together."""


class FrameRefused(ValueError):
    """Bytes that are no legal WebSocket frame from this side, or over a bound. str() is a fixed sentence."""


class FrameTooLarge(FrameRefused):
    """A legal frame or message over its bound."""


def check_request(head: RequestHead) -> str:
    """The key of a valid WebSocket request (its Upgrade was checked before). Raises HeadRefused(upgrade-refused)."""
    keys = head.get("sec-websocket-key")
    if head.method != "GET" or head.get("sec-websocket-version") != ("13",) or len(keys) != 1:
        raise HeadRefused("upgrade-refused", "not a WebSocket handshake of version 13")
    try:
        nonce = base64.b64decode(keys[0], validate=True)
    except (binascii.Error, ValueError):
        nonce = b""
    if len(nonce) != 16:
        raise HeadRefused("upgrade-refused", "not a WebSocket key")
    return keys[0]


def accept_value(key: str) -> str:
    """The Sec-WebSocket-Accept that answers `key` (RFC 6455 4.2.2)."""
    digest = hashlib.sha1(key.encode("ascii") + _GUID, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def check_accept(
    head: ResponseHead, *, key: str, protocols: tuple[str, ...] = (), extensions: tuple[str, ...] = ()
) -> bool:
    """Check a 101 against the handshake that asked for it; True when permessage-deflate was agreed.

    `protocols` and `extensions` are the request's Sec-WebSocket-Protocol and -Extensions values. Raises
    HeadRefused(upstream-protocol): wrong or missing accept value, another protocol, something that was not offered.
    """
    upgrade = head.get("upgrade")
    if (
        head.status != 101
        or head.version != "1.1"
        or len(upgrade) != 1
        or upgrade[0].lower() != "websocket"
        or "upgrade" not in connection_tokens(head.lower)
        or head.get("sec-websocket-accept") != (accept_value(key),)
        or head.get("content-length")
        or head.get("transfer-encoding")
    ):
        raise HeadRefused("upstream-protocol", "not a valid WebSocket acceptance")
    chosen = head.get("sec-websocket-protocol")
    if chosen and (len(chosen) != 1 or chosen[0] not in _items(protocols)):
        raise HeadRefused("upstream-protocol", "a WebSocket subprotocol that was not offered")
    offered = {item.split(";")[0].strip() for item in _items(extensions)}
    agreed = [item.split(";")[0].strip() for item in _items(head.get("sec-websocket-extensions"))]
    if any(item not in offered for item in agreed) or (agreed and agreed != ["permessage-deflate"]):
        raise HeadRefused("upstream-protocol", "a WebSocket extension that was not offered")
    return bool(agreed)


def _items(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(item.strip() for value in values for item in value.split(",") if item.strip())


class FrameChecker:
    """Walks one direction of a WebSocket. feed() takes any split of the bytes and raises FrameRefused at the first
    frame that is not legal; counts are in `frames`, `messages`; `closed` once a close frame ended the direction."""

    __slots__ = ("_compressed", "_fragmented", "_frame_bound", "_left", "_masked", "_message", "_message_bound",
                 "closed", "frames", "messages",
                 "passed")  # fmt: skip

    def __init__(self, *, masked: bool, compressed: bool, frame_bound: int, message_bound: int) -> None:
        self._masked = masked
        self._compressed = compressed
        self._frame_bound = frame_bound
        self._message_bound = message_bound
        self._left = 0
        self._message = 0
        self._fragmented = False
        self.frames = 0
        self.messages = 0
        self.passed = 0
        """Bytes, frame heads included."""
        self.closed = False

    @property
    def between_frames(self) -> bool:
        """No frame is half way through."""
        return not self._left

    def feed(self, data: bytes) -> int:
        """Check `data`; return how many of its bytes belong to whole or begun frames that may pass (all of them,
        except the start of a frame head that is not complete yet: the caller keeps and feeds those again)."""
        at = 0
        size = len(data)
        while at < size:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
                continue
            taken = self._frame(data, at)
            if not taken:
                break
            at += taken
        self.passed += at
        return at

    def _frame(self, data: bytes, at: int) -> int:
        """Check the frame head at `at`; its length, or 0 when it is not complete."""
        if self.closed:
            raise FrameRefused("bytes after a close frame")
        room = len(data) - at
        first = data[at]
        opcode = first & 0x0F
        final = bool(first & 0x80)
        control = bool(opcode & _CONTROL_BIT)
        if opcode not in (0, 1, 2, 8, 9, 10):
            raise FrameRefused("an opcode that does not exist")
        if first & 0x30 or (first & 0x40 and (not self._compressed or control or opcode == 0)):
            raise FrameRefused("a reserved bit that was not agreed")
        if control and not final:
            raise FrameRefused("a control frame in fragments")
        if not control and (opcode == 0) != self._fragmented:
            raise FrameRefused("fragments out of order")
        if room < 2:
            return 0
        second = data[at + 1]
        if bool(second & 0x80) != self._masked:
            raise FrameRefused("the masking of this frame belongs to the other side")
        length = second & 0x7F
        head = 2
        if control and (length > 125 or (opcode == 8 and length == 1)):
            raise FrameRefused("a control frame of a length that cannot be")
        if length == 126:
            head = 4
            if room < head:
                return 0
            length = int.from_bytes(data[at + 2 : at + 4])
            if length < 126:
                raise FrameRefused("a length that is not in its shortest form")
        elif length == 127:
            head = 10
            if room < head:
                return 0
            length = int.from_bytes(data[at + 2 : at + 10])
            if length < 1 << 16 or length >= 1 << 63:
                raise FrameRefused("a length that is not in its shortest form")
        if self._masked:
            head += 4
            if room < head:
                return 0
        if length > self._frame_bound:
            raise FrameTooLarge("a frame over its bound")
        if not control:
            self._message += length
            if self._message > self._message_bound:
                raise FrameTooLarge("a message over its bound")
            self._fragmented = not final
            if final:
                self.messages += 1
                self._message = 0
        if opcode == 8:
            self.closed = True
        self.frames += 1
        self._left = length
        return head


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One whole frame. `head` holds the mask, if any; `payload` is unmasked."""

    head: bytes
    payload: bytes = field(repr=False)
    mask: bytes = b""

    @property
    def opcode(self) -> int:
        return self.head[0] & 0x0F

    @property
    def control(self) -> bool:
        """Ping, pong or close: it may stand between the frames of a message."""
        return bool(self.head[0] & _CONTROL_BIT)

    @property
    def closes(self) -> bool:
        """A Close: nothing follows it."""
        return self.opcode == 8

    @property
    def final(self) -> bool:
        return bool(self.head[0] & 0x80)

    def encode(self, payload: bytes | None = None, *, mask: bytes | None = None) -> bytes:
        """The frame's bytes; with another payload of the same length, or under another mask, where one is given."""
        data = self.payload if payload is None else payload
        if len(data) != len(self.payload) or (mask is not None and len(mask) != len(self.mask)):
            raise ValueError("a payload or a mask of another length")
        if not self.mask:
            return self.head + data
        key = self.mask if mask is None else mask
        return self.head[:-4] + key + apply_mask(data, key)


class MessageReader:
    """Puts the frames of one direction together: feed() returns units that are complete, in the order they ended.

    A unit is one control frame, or all frames of one message. The bytes must have passed a FrameChecker, whose bounds
    also bound the payload that waits here: `held` bytes of one message. Raises FrameTooLarge past MESSAGE_FRAMES: each
    costs memory, also an empty one.
    """

    __slots__ = ("_buffer", "_message", "_waiting")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._message: list[Frame] = []
        self._waiting = 0

    @property
    def held(self) -> int:
        """Bytes that wait for the rest of their frame or message."""
        return len(self._buffer) + self._waiting

    def feed(self, data: bytes) -> list[tuple[Frame, ...]]:
        """Take bytes in any split."""
        self._buffer += data
        units: list[tuple[Frame, ...]] = []
        at = 0
        while (frame := _whole_frame(self._buffer, at)) is not None:
            at += len(frame.head) + len(frame.payload)
            if frame.control:
                units.append((frame,))
                continue
            self._message.append(frame)
            self._waiting += len(frame.payload)
            if len(self._message) > MESSAGE_FRAMES:
                raise FrameTooLarge("a message in too many frames")
            if frame.final:
                units.append(tuple(self._message))
                self._message, self._waiting = [], 0
        del self._buffer[:at]
        return units


def _whole_frame(buffer: bytearray, at: int) -> Frame | None:
    """The frame at `at`, or None while it is not all here."""
    room = len(buffer) - at
    if room < 2:
        return None
    second = buffer[at + 1]
    size, head = second & 0x7F, 2
    if size >= 126:
        head = 4 if size == 126 else 10
        if room < head:
            return None
        size = int.from_bytes(buffer[at + 2 : at + head])
    masked = bool(second & 0x80)
    head += 4 if masked else 0
    if room < head + size:
        return None
    mask = bytes(buffer[at + head - 4 : at + head]) if masked else b""
    payload = bytes(buffer[at + head : at + head + size])
    return Frame(
        head=bytes(buffer[at : at + head]), payload=apply_mask(payload, mask) if masked else payload, mask=mask
    )


def apply_mask(data: bytes, mask: bytes) -> bytes:
    """`data` masked or unmasked by the four bytes `mask` (RFC 6455 5.3): as one number, which is fast in any length."""
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data) ^ int.from_bytes(key)).to_bytes(size)


def close_frame(code: int, text: str) -> bytes:
    """A server's Close: `code` (RFC 6455 7.4) and at most 123 bytes of `text`."""
    payload = code.to_bytes(2) + text.encode("ascii", "replace")[:123]
    return bytes((0x88, len(payload))) + payload
