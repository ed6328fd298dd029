"""Secrets, every promised form of them, and an independent reader that says whether one shows (RULINGS 7)."""

from __future__ import annotations

import base64
import json
import random
import re
from urllib.parse import quote

from broker.scrub import RUN, Guarded, Patterns

SECRET = b'sk_live_9fQ2"x/Zr\\7Lm+4KpV0aB8cD'
PLAIN = b"tok-4mVZx81LrQwS0pEyUb7N"
PATTERNS = Patterns([Guarded(value=SECRET, public_prefix=b"sk_live_"), Guarded(value=PLAIN)])
UNPREDICTABLE = SECRET[len(b"sk_live_") :]


def percent(data: bytes, choose: random.Random) -> bytes:
    """Percent-encode some bytes, digits in mixed case."""
    out = b""
    for byte in data:
        if choose.random() < 0.6 or byte in b"%":
            digits = "".join(choose.choice([c.lower(), c.upper()]) for c in f"{byte:02x}")
            out += b"%" + digits.encode()
        else:
            out += bytes((byte,))
    return out


def json_escaped(data: bytes, choose: random.Random) -> bytes:
    """Escape what JSON demands and some of the rest, as \\u with digits in mixed case or short."""
    out = b""
    for byte in data:
        char = chr(byte)
        if char in '"\\/' and choose.random() < 0.5:
            out += b"\\" + char.encode()
        elif char in '"\\' or choose.random() < 0.5:
            digits = "".join(choose.choice([c.lower(), c.upper()]) for c in f"{byte:04x}")
            out += b"\\u" + digits.encode()
        else:
            out += bytes((byte,))
    return out


def mixed_hex(data: bytes, choose: random.Random) -> bytes:
    """Hex in mixed case."""
    return "".join(choose.choice([c.lower(), c.upper()]) for c in data.hex()).encode()


def forms(secret: bytes) -> list[tuple[str, bytes]]:
    """Every promised form of `secret`, named."""
    choose = random.Random(7)
    found: list[tuple[str, bytes]] = [("raw", secret), ("hex", secret.hex().encode())]
    found.append(("HEX", secret.hex().upper().encode()))
    found.append(("hex mixed", mixed_hex(secret, choose)))
    for lead in range(3):
        for name, encode in (("base64", base64.b64encode), ("base64url", base64.urlsafe_b64encode)):
            encoded = encode(b"u:"[:lead] + secret + b"\xff!")
            found.append((f"{name} alignment {lead}", encoded))
            found.append((f"{name} unpadded {lead}", encoded.rstrip(b"=")))
    found.append(("basic", b"Basic " + base64.b64encode(b"x-access-token:" + secret)))
    found.append(("percent", quote(secret, safe="").encode()))
    found.append(("percent all", "".join(f"%{byte:02X}" for byte in secret).encode()))
    found.append(("percent lower", "".join(f"%{byte:02x}" for byte in secret).encode()))
    found.append(("json", json.dumps(secret.decode()).encode()))
    found.append(("json slashes", json.dumps(secret.decode()).replace("/", "\\/").encode()))
    found.append(("json all", "".join(f"\\u{byte:04x}" for byte in secret).encode()))
    found.append(("json all upper", "".join(f"\\u{byte:04X}" for byte in secret).encode()))
    for turn in range(4):
        found.append((f"percent mixed {turn}", percent(secret, choose)))
        found.append((f"json mixed {turn}", json_escaped(secret, choose)))
    found.append(("percent in json", json.dumps(quote(secret, safe="")).replace("%", "\\u0025").encode()))
    found.append(("base64 in percent", quote(base64.b64encode(secret), safe="").encode()))
    found.append(("base64 in json", base64.b64encode(secret).replace(b"/", b"\\/").replace(b"+", b"\\u002b")))
    return found


def shows(data: bytes) -> bool:
    """True if any 12-byte run of an unpredictable part can be read back from `data` in a promised form.

    Written independently of the scrubber: everything is decoded by the standard library.
    """

    def unescape(match: re.Match[bytes]) -> bytes:
        text: str = json.loads(b'"' + match[0] + b'"')
        return text.encode("utf-8", "replace")

    def unquote(text: bytes) -> bytes:
        return re.sub(rb"%([0-9A-Fa-f]{2})", lambda match: bytes((int(match[1], 16),)), text)

    plain = re.sub(rb'(?:\\(?:u[0-9A-Fa-f]{4}|["\\/bfnrt]))+', unescape, data)
    readings = [data, unquote(data), plain, unquote(plain)]
    for text in list(readings):
        for run in re.findall(rb"[0-9A-Fa-f]{2,}", text):
            for start in (0, 1):
                part = run[start:]
                readings.append(bytes.fromhex(part[: len(part) // 2 * 2].decode()))
        for run in re.findall(rb"[A-Za-z0-9+/_-]{4,}", text):
            for start in range(4):
                part = run[start:].replace(b"-", b"+").replace(b"_", b"/")
                readings.append(base64.b64decode(part[: len(part) // 4 * 4]))
    for secret in (UNPREDICTABLE, PLAIN):
        runs = [secret[at : at + RUN] for at in range(len(secret) - RUN + 1)]
        if any(run in text for text in readings for run in runs):
            return True
    return False


FORMS = [(name, form) for secret in (SECRET, PLAIN) for name, form in forms(secret)]
