"""The policy in force: read from the operator's files, checked, tested, and swapped as one value (RULINGS 9.5, I27).

Rules:
- A file that others may write is refused, as is a policy that is missing, empty or names no role.
- `tests:` run against the new policy before it counts; one that fails rejects the whole.
- A rejected policy changes nothing: the last good one stays, and the rejection is kept for the status.
- `file:` certificates of `destinations:` lie beside or below the policy or credentials file; nothing else is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.errors import BrokerError
from rules.compile import compile_policy
from rules.credentials_file import SecretBinding
from rules.parse import Parsed, PolicyError, Sources, parse_sources
from rules.policy import DestinationDef, Policy
from rules.policytests import run_tests
from rules.secret_sources import SourceDef

MAX_FILE = 4 << 20
MAX_FILES = 500
NOT_POLICY = frozenset({"credentials.yaml", "credentials.yml", "exeat.yaml", "exeat.yml"})
"""The operator's own files, never read as policy even where they lie in the policy directory."""


class PolicyRejected(BrokerError):
    """The files make no policy. `problems` are lines `file:line:column: message`; `files` what was read."""

    def __init__(self, code: str, detail: str, remedy: str = "", problems: tuple[str, ...] = ()) -> None:
        super().__init__(code, detail, remedy)
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePolicy:
    """A policy that passed everything, with what only the vault may know of it."""

    policy: Policy
    secrets: Mapping[str, SecretBinding]
    """credential -> references and scrub flag. Never in the snapshot."""
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    loaded_at: float
    tests: int = 0
    """How many tests of its own it was put to."""
    sources: Mapping[str, SourceDef] = field(default_factory=dict)
    """The operator's sources of secrets. Never in the snapshot."""
    places: Mapping[str, DestinationDef] = field(default_factory=dict)
    """The operator's own `destinations:`, which say how the vault itself reaches a host."""
    failed: tuple[str, ...] = ()
    """Those that it failed, as lines; only where `load_policy` was told to let them pass."""

    @property
    def digest(self) -> str:
        return self.policy.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why the newest files are not in force."""

    code: str
    detail: str
    remedy: str
    problems: tuple[str, ...]
    at: float

    def as_json(self) -> dict[str, Any]:
        return {
            "error": self.code,
            "detail": self.detail,
            "remedy": self.remedy,
            "problems": list(self.problems),
            "at": self.at,
        }


_INIT = "run `exeat init`, which writes a first one"
_TESTS = "change the rules or the tests: exeat policy explain shows what decides"


def load_policy(
    policy_path: Path, credentials_path: Path | None, now: float, *, let_tests_fail: bool = False
) -> ActivePolicy:
    """Read, parse, compile and test. Blocks. Raises PolicyRejected.

    `let_tests_fail` is for showing what a policy decides, never for putting one into force: whoever asks why a test
    fails needs an answer from the very policy that fails it.
    """
    texts, services = _read_policy(policy_path)
    credentials: tuple[str, str] | None = None
    if credentials_path is not None:
        credentials = (credentials_path.name, _read(credentials_path))
    if not any(_says_something(text) for text in texts.values()):
        raise PolicyRejected("policy-empty", f"{policy_path} says nothing", _INIT)
    bases = [policy_path if policy_path.is_dir() else policy_path.parent]
    if credentials_path is not None:
        bases.append(credentials_path.parent)
    try:
        parsed: Parsed = parse_sources(
            Sources(
                policy=texts,
                credentials=credentials,
                services=services,
                ca_files=_certificate_reader(tuple(bases)),
                descriptions=_file_reader(tuple(bases[:1])),
            )
        )
        policy = compile_policy(parsed.document)
    except PolicyError as error:
        lines = tuple(str(problem) for problem in error.problems)
        raise PolicyRejected("policy-invalid", f"{len(lines)} problem(s)", "see the lines named", lines) from None
    except ValueError as error:
        raise PolicyRejected("policy-invalid", f"the policy cannot be compiled ({type(error).__name__})") from None
    if not policy.roles:
        raise PolicyRejected("policy-empty", "the policy names no role", _INIT)
    failed = tuple(
        f"{result.test.place or f'tests: {result.test.expect} {result.test.request}'}: {result.got}"
        for result in run_tests(policy, parsed.tests)
        if not result.passed
    )
    if failed and not let_tests_fail:
        raise PolicyRejected("policy-tests-failed", f"{len(failed)} test(s) of the policy fail", _TESTS, failed)
    return ActivePolicy(
        policy=policy,
        secrets=dict(parsed.secrets),
        sources=dict(parsed.secret_sources),
        places=dict(parsed.places),
        files=tuple(sorted((*texts, *services, *((credentials[0],) if credentials else ())))),
        warnings=tuple(str(problem) for problem in parsed.warnings),
        loaded_at=now,
        tests=len(parsed.tests),
        failed=failed,
    )


def _read_policy(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    if not path.exists():
        raise PolicyRejected("policy-missing", f"{path} does not exist", _INIT)
    if not path.is_dir():
        return {path.name: _read(path)}, _read_all(path.parent / "services")
    texts = {name: text for name, text in _read_all(path).items() if name not in NOT_POLICY}
    if not texts:
        raise PolicyRejected("policy-missing", f"{path} holds no .yaml file", _INIT)
    return texts, _read_all(path / "services")


def _read_all(directory: Path) -> dict[str, str]:
    if not directory.is_dir():
        return {}
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.suffix in (".yaml", ".yml"))
    except OSError:
        raise PolicyRejected(
            "policy-unreadable", f"{directory} cannot be read", f"let the gateway's user (uid {os.geteuid()}) read it"
        ) from None
    if len(names) > MAX_FILES:
        raise PolicyRejected("policy-unreadable", f"{directory} holds more than {MAX_FILES} files")
    return {name: _read(directory / name) for name in names}


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        if not path.exists():
            raise PolicyRejected(
                "policy-missing", f"{path} does not exist", "run `exeat init`, which writes what is missing"
            ) from None
        raise PolicyRejected(
            "policy-unreadable", f"{path} cannot be read", f"let the gateway's user (uid {os.geteuid()}) read it"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PolicyRejected("policy-unreadable", f"{path} is not a file", "name a file or a folder of files")
        if found.st_mode & 0o002 or found.st_uid not in (0, os.geteuid()):
            raise PolicyRejected("policy-modes", f"others may write {path}", f"chmod o-w {path}")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            raw = stream.read(MAX_FILE + 1)
        if len(raw) > MAX_FILE:
            raise PolicyRejected(
                "policy-unreadable", f"{path} is larger than {MAX_FILE} bytes", "split it into several files"
            )
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise PolicyRejected("policy-unreadable", f"{path} is not UTF-8 text", "save it as UTF-8") from None
    finally:
        os.close(descriptor)


def _says_something(text: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _certificate_reader(bases: tuple[Path, ...]) -> Callable[[str], str]:
    whole = _file_reader(bases)

    def read(name: str) -> str:
        text = whole(name)
        if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY" in text:
            raise ValueError("the file holds no certificate, or more than certificates")
        return text

    return read


def _file_reader(bases: tuple[Path, ...]) -> Callable[[str], str]:
    def read(name: str) -> str:
        for base in bases:
            path = base / name.removeprefix("file:")
            if not path.resolve().is_relative_to(base.resolve()) or not path.exists():
                continue
            try:
                return _read(path)
            except PolicyRejected as error:
                raise ValueError(error.detail) from None
        raise ValueError("no such file beside or below the policy or the credentials file")

    return read
