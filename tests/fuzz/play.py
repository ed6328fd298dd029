"""One target under atheris: `python tests/fuzz/play.py TARGET SECONDS WORKING_CORPUS FINDINGS`. Run by run.py.

Prints what libFuzzer prints; exits as it does (77 on a finding, whose input is in FINDINGS). Needs the dependency group
`fuzz`.
"""

from __future__ import annotations

import sys
import tempfile

import atheris

from tests.support import fuzzing

SLOW_SECONDS = 20
"""One input that takes longer is a finding (time must be linear in what came)."""


def main(name: str, seconds: str, corpus: str, findings: str) -> None:
    """Never returns: the fuzzer ends the process."""
    with atheris.instrument_imports(include=list(fuzzing.ROOMS)):
        target = fuzzing.load(name)
    with tempfile.NamedTemporaryFile("w", suffix=".dict", delete=False) as words:
        words.write("".join(f'"{"".join(f"\\x{byte:02x}" for byte in word)}"\n' for word in target.words))
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={target.max_bytes}",
        f"-timeout={SLOW_SECONDS}",
        "-rss_limit_mb=2048",
    ]
    options += [f"-artifact_prefix={findings}/", f"-dict={words.name}", "-print_final_stats=1", "-verbosity=1"]

    def one(data: bytes) -> None:
        target.check(data)

    atheris.Setup([sys.argv[0], corpus, *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
