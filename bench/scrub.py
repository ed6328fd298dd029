"""`make bench-scrub`: what scrubbing costs by number of secrets: throughput, and what it adds to one event of a stream.

    python bench/scrub.py [--no-write] [--secrets N ...]

One process, no socket. Every number is the least of several runs. As a measure of the machine each text is also told
in multiples of what `bytes.find` of one absent word costs over it. Secrets have 40 characters, 10,000 of them 13: more
does not fit into one set. Writes bench/SCRUB.md.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.decide import head, least  # noqa: E402
from broker.scrub import MAX_MATERIAL, Guarded, Patterns, Scrubber, slices  # noqa: E402

RESULTS = ROOT / "bench" / "SCRUB.md"
SECRETS = (1, 100, 10_000)
TEXT_BYTES = 8 << 20
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secrets", type=int, nargs="*", default=list(SECRETS))
    parser.add_argument("--no-write", action="store_true", help="print, leave SCRUB.md alone")
    options = parser.parse_args()
    rows = [row for count in options.secrets for row in measured(count)]
    rest = [line for line in head() if line.startswith("- ")]
    text = (
        "\n".join(["# What scrubbing costs", "", "Written by `make bench-scrub`; do not edit.", "", *rest, *rows])
        + "\n"
    )
    print(text)
    if not options.no_write:
        RESULTS.write_text(text, "utf-8")
    return 0


def secrets(count: int) -> list[Guarded]:
    """`count` secrets, always the same ones."""
    source = random.Random(7)
    length = min(40, MAX_MATERIAL // count)
    return [Guarded(value="".join(source.choices(LETTERS, k=length)).encode()) for _ in range(count)]


def texts() -> dict[str, bytes]:
    """What answers are made of, TEXT_BYTES each."""
    source = random.Random(8)
    words = ["".join(source.choices(LETTERS.lower(), k=source.randrange(2, 12))) for _ in range(2000)]
    record = {"id": 7, "name": "a name", "url": "https://api.example/items/7?page=2", "text": ' "quoted"\n'}
    lines = (json.dumps(record | {"body": " ".join(source.choices(words, k=40))}) for _ in range(40_000))
    noise = source.randbytes(TEXT_BYTES)
    return {
        "JSON": "\n".join(lines).encode()[:TEXT_BYTES],
        "base64": base64.b64encode(noise)[:TEXT_BYTES],
        "random bytes": noise,
    }


def measured(count: int) -> list[str]:
    """The section of one number of secrets."""
    guarded = secrets(count)
    build = least(lambda: Patterns(guarded))
    patterns = Patterns(guarded)
    rows = [
        "",
        f"## {count:,} secrets of {len(guarded[0].value)} characters",
        "",
        f"Compiling the set: {build * 1e3:.2f} ms.",
        "",
        "| text | MB/s | times a search for one word |",
        "| --- | ---: | ---: |",
    ]
    for name, text in texts().items():
        whole = least(lambda text=text: through(patterns, text), seconds=1.0)  # type: ignore[misc]
        word = least(lambda text=text: text.find(b"no such word here"))  # type: ignore[misc]
        rows.append(f"| {name} | {len(text) / whole / 1e6:.0f} | {whole / word:.0f} |")
    rows += ["", "| one event of a stream | bytes | added microseconds |", "| --- | ---: | ---: |"]
    for size in (60, 400, 4000):
        rows.append(f"| server-sent event | {size} | {event(patterns, size) * 1e6:.0f} |")
    return rows


def through(patterns: Patterns, text: bytes) -> None:
    """All of `text`, as an answer comes: in the pieces that the executor searches at a time."""
    scrubber = Scrubber(patterns)
    for piece in slices(text):
        scrubber.feed(piece)
    scrubber.finish()


def event(patterns: Patterns, size: int) -> float:
    """Seconds that one server-sent event of `size` bytes takes on its way through."""
    text = b'data: {"delta":"' + b"some words of an answer " * 200
    line = text[: size - 4] + b'"}\n\n'
    scrubber = Scrubber(patterns)
    return least(lambda: scrubber.feed(line))


if __name__ == "__main__":
    sys.exit(main())
