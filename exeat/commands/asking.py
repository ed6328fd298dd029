"""Would-be requests on the command line: their options, the policy files that judge them, and the answer in words."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.vault.policies import ActivePolicy, PolicyRejected, load_policy
from exeat.commands.context import settings
from exeat.explain import NotExplained, explain_request
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, note, print_json, printable, say
from rules.reasons import REASONS

MAX_BODY = 32 << 20
"""Bytes of a body that is judged; no operation judges more."""

HeaderOption = Annotated[
    list[str] | None, typer.Option("--header", "-H", help="'Name: value', as often as needed; no Content-Type is JSON.")
]
BodyOption = Annotated[str | None, typer.Option("--body", help="A body, where the operation is in it.")]
BodyFileOption = Annotated[
    Path | None, typer.Option("--body-file", help="The same from a file; - reads standard input.")
]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="Policy file or folder (default: settings').")]
CredentialsOption = Annotated[Path | None, typer.Option("--credentials", help="credentials.yaml (default: settings').")]


def load_files(
    file: Path | None, credentials: Path | None, config: Path | None, output: Output, *, let_tests_fail: bool = False
) -> ActivePolicy:
    """The policy named, or the settings'. Prints each problem as file:line:column and exits 1 on any.

    With `let_tests_fail` tests of the policy that fail are said on standard error, and it is loaded all the same.
    """
    if file is None or (credentials is None and config is not None):
        current = settings(config)
        file, credentials = file or current.policy, credentials or current.credentials
    if credentials is None:
        beside = [file / "credentials.yaml"] if file.is_dir() else []
        beside.append(file.absolute().parent / "credentials.yaml")
        credentials = next((path for path in beside if path.is_file()), None)
    try:
        active = load_policy(
            file.absolute(),
            credentials.absolute() if credentials else None,
            time.time(),
            let_tests_fail=let_tests_fail,
        )
    except PolicyRejected as error:
        if output is Output.json:
            print_json({"problems": list(error.problems), "detail": error.detail})
            raise SystemExit(EXIT_NO) from None
        for line in error.problems:
            note(line)
        fail(error.detail, remedy=error.remedy)
    if active.failed:
        note(f"warning: {len(active.failed)} test(s) of this policy fail, so it would not be put into force")
    return active


def decide_offline(
    active: ActivePolicy,
    method: str,
    url: str,
    role: str | None,
    body: bytes | None,
    header: list[str] | None,
    attributes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the loaded files make of a request. Exits with a clear sentence where the question cannot be put."""
    roles = sorted(active.policy.roles)
    if role is None and len(roles) != 1:
        fail("name a role", remedy=f"--role {' | '.join(roles)}", code=EXIT_USAGE)
    headers = split_headers(header)
    try:
        return explain_request(
            active.policy, role or roles[0], method.upper(), url, body, time.time(), headers, attributes
        )
    except NotExplained as error:
        fail(str(error), code=EXIT_USAGE)


def read_body(body: str | None, file: Path | None) -> bytes | None:
    """The body that was given, None where there is none. Exits where both were, or a file cannot be read."""
    if body is not None and file is not None:
        fail("give --body or --body-file, not both", code=EXIT_USAGE)
    if file is None:
        return None if body is None else body.encode("utf-8", "surrogateescape")
    try:
        if str(file) == "-":
            data = sys.stdin.buffer.read(MAX_BODY + 1)
        else:
            with file.open("rb") as opened:
                data = opened.read(MAX_BODY + 1)
    except OSError as error:
        fail(f"{file}: {error.strerror}", code=EXIT_USAGE)
    if len(data) > MAX_BODY:
        fail(f"{file}: a body that is judged has at most 32 MiB", code=EXIT_USAGE)
    return data


def split_headers(header: list[str] | None) -> list[tuple[str, str]]:
    """(name, value) of each `Name: value`. Exits where one is none."""
    pairs: list[tuple[str, str]] = []
    for text in header or ():
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            fail(f"--header {text!r} is not 'Name: value'", code=EXIT_USAGE)
        pairs.append((name.strip().lower(), value.strip()))
    return pairs


def print_decision(answer: Mapping[str, Any]) -> None:
    """A would-be decision, line by line."""
    known = REASONS.get(str(answer.get("reason")))
    shown = {"remedy": known.remedy} if known else {}
    shown |= {name: value for name, value in answer.items() if value}
    if "canonical" in shown:
        say(f"{'request':11} {printable(_canonical(answer['canonical']))}")
        for name in ("asked", "granted"):
            if name in answer["canonical"]:
                say(f"{name:11} {printable(' '.join(answer['canonical'][name]))}")
    for name in ("decision", "rule", "operation", "effect", "credential", "reason", "detail", "message", "remedy"):
        if name in shown:
            say(f"{name:11} {printable(str(shown[name]))}")
    if "approval" in shown:
        say(f"{'approval':11} {printable(str(shown['approval']))}")
    if "arguments" in shown:
        say(f"{'arguments':11} {printable(_arguments(answer['arguments']))}")
    for found in answer.get("recognised", ()):
        said = _arguments(found.get("arguments", {})) or found.get("if", "")
        say(printable(f"{'recognised':11} {found['operation']} ({found['effect']}) {said}".rstrip()))
        for target in found.get("redirects", ()):
            say(printable(f"{'':11} its answer may lead to {target}"))
        if "shared_state" in found:
            apart = ", ".join(found["shared_state"]) or "nothing"
            say(printable(f"{'':11} reaches what others left under the account; told apart by {apart}"))
    for miss in answer.get("misses", ()):
        say(printable(f"{'near':11} {miss['rule']}, {miss['operation']}: {miss['because']}"))


def _canonical(request: Mapping[str, Any]) -> str:
    query = f" ?{'&'.join(request['query'])}" if request["query"] else ""
    body = f" with a body of {request['body_bytes']} bytes" if "body_bytes" in request else ""
    where = f"{request['scheme']}://{request['host']}:{request['port']}{request['path']}"
    return f"{request['method']} {where}{query}{body}"


def _arguments(stated: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else ", ".join(value) for name, value in stated.items()}
    return "; ".join(f"{name}={text}" for name, text in texts.items())
