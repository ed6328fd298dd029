"""`exeat audit` and `exeat why`: read and check the log. Everything here reads files; nothing asks the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from audit import verify as verifier
from audit.events import EVENTS
from audit.search import Filter, explain_record, follow, is_refusal, reason_of, search
from broker.admin.client import AdminError
from broker.vault.policies import PolicyRejected, load_policy
from exeat.commands import sandbox as sandboxes
from exeat.commands.asking import (
    BodyFileOption,
    BodyOption,
    HeaderOption,
    decide_offline,
    load_files,
    print_decision,
    read_body,
    split_headers,
)
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, settings
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, note, print_json, printable, say
from exeat.settings import Settings
from rules.reasons import REASONS

app = typer.Typer(help="The log: follow, search, show, verify.", no_args_is_help=True)

SandboxFilter = Annotated[str | None, typer.Option("--sandbox", help="Only of this sandbox.")]
RefusedFilter = Annotated[bool, typer.Option("--refused", help="Only what was refused or held.")]
ReasonFilter = Annotated[str | None, typer.Option("--reason", help="Only with this reason code.")]
HostFilter = Annotated[str | None, typer.Option("--host", help="Only to this host.")]
LogOption = Annotated[Path | None, typer.Option("--log", help="The log folder (default: the settings').")]


def _folder(log: Path | None, config: Path | None) -> Path:
    folder = log or settings(config).log
    if not folder.is_dir():
        fail(f"{folder}: there is no log here yet", remedy="the gateway writes it: exeat up", code=EXIT_USAGE)
    return folder


def _unknown(kind: str, given: str | None, known: Iterable[str]) -> str:
    """What to say of a code that this version never writes; empty where it does. An older log may hold others."""
    words = sorted(known)
    if given is None or given in words:
        return ""
    near = get_close_matches(given, words, 1)
    return f"there is no {kind} {given!r}" + (f"; did you mean {near[0]}?" if near else "")


def describe(record: Mapping[str, Any]) -> str:
    """One record as one line: time, event, who, what, why."""
    who = record.get("sandbox") or record.get("process") or ""
    target = ""
    if record.get("host"):
        scheme = f"{record['scheme']}://" if record.get("scheme") else ""
        port = record.get("port")
        shown = f":{port}" if port not in (None, 443) else ""
        target = f"{record.get('method', 'CONNECT')} {scheme}{record['host']}{shown}{record.get('path', '')}"
    detail = [str(record[key]) for key in ("rule", "reason", "error", "status", "credential") if record.get(key)]
    parts = [str(record.get("at", "")), str(record.get("event", "")), str(who), target, *detail]
    return printable("  ".join(part for part in parts if part))


def _show(record: Mapping[str, Any], output: Output) -> None:
    if output is Output.json:
        print_json(record)
    else:
        say(describe(record), _style(record))


def _style(record: Mapping[str, Any]) -> str | None:
    event = str(record.get("event", ""))
    if event == "approval.requested":
        return "yellow"
    return "red" if event.endswith(".echoed") or is_refusal(record) else None


@app.command()
def tail(
    sandbox: SandboxFilter = None,
    refused: RefusedFilter = False,
    reason: ReasonFilter = None,
    host: HostFilter = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many to begin with.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print them and end, instead of following.")] = False,
    log: LogOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Follow the log as it is written."""
    wanted = Filter(sandbox=sandbox, refused=refused, reason=reason, host=host)
    if said := _unknown("reason code", reason, REASONS):
        note(f"warning: {said}")

    def wait() -> bool:
        time.sleep(0.2)
        return not once

    try:
        for record in follow(_folder(log, config), wanted, wait, last=max(0, lines)):
            _show(record, output)
    except OSError as error:
        fail(f"the log cannot be read: {error.strerror}")


@app.command("search")
def search_(
    sandbox: SandboxFilter = None,
    refused: RefusedFilter = False,
    reason: ReasonFilter = None,
    host: HostFilter = None,
    since: Annotated[str | None, typer.Option("--since", help="UTC: 2026-01-31 or 2026-01-31T08:00:00Z.")] = None,
    event: Annotated[str | None, typer.Option("--event", help="Only this kind of record.")] = None,
    credential: Annotated[str | None, typer.Option("--credential", help="Only with this credential.")] = None,
    log: LogOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Search the whole log."""
    try:
        wanted = Filter(
            sandbox=sandbox, refused=refused, reason=reason, host=host, since=since, event=event, credential=credential
        )
        found = list(search(_folder(log, config), wanted))
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    except OSError as error:
        fail(f"the log cannot be read: {error.strerror}")
    if output is Output.json:
        print_json(found)
    else:
        for record in found:
            say(describe(record), _style(record))
    if not found:
        for said in (_unknown("reason code", reason, REASONS), _unknown("event", event, EVENTS)):
            if said:
                note(said)
        raise SystemExit(EXIT_NO)


@app.command()
def show(
    request_id: Annotated[str, typer.Argument(help="A request id, as refusals and records name it.")],
    log: LogOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Show all records of one request."""
    found = _records_of(request_id, _folder(log, config))
    if output is Output.json:
        print_json(found)
    else:
        say(explain_record(found))
    if not found:
        raise SystemExit(EXIT_NO)


@app.command()
def verify(
    key: Annotated[Path | None, typer.Option("--key", help="Public key of the checkpoints.")] = None,
    anchor: Annotated[list[str] | None, typer.Option("--anchor", help="SEQUENCE:SHA256 kept elsewhere.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also canonical form, codes and fields.")] = False,
    log: LogOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Check the log and say what the check covers; the same as exeat-verify, which needs nothing else of ours."""
    arguments = [str(_folder(log, config)), "--output", output.value]
    arguments += ["--key", str(key)] if key else []
    arguments += ["--deep"] if deep else []
    for entry in anchor or []:
        arguments += ["--anchor", entry]
    raise SystemExit(verifier.main(arguments))


def why(
    subject: Annotated[str, typer.Argument(help="A request id, a URL, or a reason code.")],
    method: Annotated[str, typer.Option("--method", "-X", help="For a URL.")] = "GET",
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="For a URL: as this sandbox.")] = None,
    role: Annotated[str | None, typer.Option("--role", "-r", help="For a URL: as this role.")] = None,
    header: HeaderOption = None,
    body: BodyOption = None,
    body_file: BodyFileOption = None,
    log: LogOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Explain what happened to a request, or what would happen to one.

    For a request that was refused it also says what the policy files of now make of it; a body is not in the log and
    can be given with --body. For a URL the running gateway is asked; with a body the policy files are.
    """
    if subject in REASONS:
        row = REASONS[subject]
        say(f"{row.code} ({row.status}): {row.title}")
        say(row.doc)
        say(f"What helps: {row.remedy}")
        return
    if "://" not in subject:
        if not subject.startswith("req_"):
            close = get_close_matches(subject, REASONS, n=1)
            fail(
                f"{subject!r} is neither a request id (req_...), nor a URL, nor a reason code",
                remedy=f"did you mean {close[0]}?" if close else "docs/refusals.md lists the reason codes",
                code=EXIT_USAGE,
            )
        found = _records_of(subject, _folder(log, config))
        if output is Output.json:
            print_json(found)
        else:
            say(explain_record(found))
            for line in _led(found, _folder(log, config)):
                say(line)
            for code in sorted({reason_of(record) for record in found} & set(REASONS)):
                say(f"What helps: {REASONS[code].remedy}")
            for entry in sorted(filter(None, map(_destination, found))):
                say(f"  {entry}")
            if log is None:
                _again(found, header, read_body(body, body_file), settings(config))
        raise SystemExit(0 if found else EXIT_NO)
    if body is not None or body_file is not None:
        if sandbox is not None:
            fail("a body is judged by the policy files, which know no sandbox", remedy="--role", code=EXIT_USAGE)
        active = load_files(None, None, config, output)
        answer = decide_offline(active, method, subject, role, read_body(body, body_file), header)
        if output is Output.json:
            print_json(answer)
        else:
            print_decision(answer)
        raise SystemExit(0 if answer["decision"] == "permit" else EXIT_NO)
    client = admin(config)
    try:
        if sandbox is None and role is None:
            role = sandboxes.only_role(client, None)
        headers = dict(split_headers(header))
        answer = client.decide(method.upper(), subject, sandbox=sandbox, role=role, headers=headers)
    except AdminError as error:
        if error.code == "not-running":
            error.remedy = f"{error.remedy}; without one: exeat policy explain {method.upper()} URL"
        explain(error)
    if output is Output.json:
        print_json(answer)
    else:
        print_decision(answer)
    raise SystemExit(0 if answer.get("decision") == "permit" else EXIT_NO)


def _again(found: list[Mapping[str, Any]], header: list[str] | None, body: bytes | None, current: Settings) -> None:
    """What the policy files of now make of a refused request, as far as its records tell it."""
    record = next(
        (record for record in found if is_refusal(record) and record.get("path") and record.get("role")), None
    )
    if record is None or "{" in str(record["path"]):
        return
    try:
        active = load_policy(current.policy.absolute(), current.credentials, time.time())
    except PolicyRejected:
        return  # `exeat policy check` says why; what happened was told
    if record["role"] not in active.policy.roles:
        return
    url = f"{record['scheme']}://{record['host']}:{record['port']}{record['path']}"
    if record.get("query_keys"):
        url += "?" + "&".join(quote(str(name), safe="") + "=" for name in record["query_keys"])
    say("")
    say("The policy files of now (the log holds neither query values, headers nor bodies: --header, --body):")
    print_decision(decide_offline(active, str(record["method"]), url, str(record["role"]), body, header))


def _led(found: list[Mapping[str, Any]], folder: Path) -> list[str]:
    """For a refused request: which answer led its sandbox to that host, and that nothing declares it."""
    refused = next((record for record in found if is_refusal(record) and record.get("host")), None)
    if refused is None or not refused.get("sandbox"):
        return []
    before = [
        record
        for record in search(folder, Filter(sandbox=str(refused["sandbox"])))
        if record.get("redirect_host") == refused["host"] and record["seq"] < refused["seq"]
    ]
    if not before:
        return []
    last = before[-1]
    what = f"{last.get('request_id')} ({last.get('operation', 'no operation')}, {last.get('host')})"
    if last.get("redirect", "undeclared") == "undeclared" and last["event"] != "redirect.granted":
        return [f"The answer to {what} led there. Its operation does not declare that place, so nothing was opened."]
    return [f"The answer to {what} led there: exactly that address is open, for 8 uses within 5 minutes."]


_OFFERED = ("private", "documentation", "benchmarking")
"""Ranges that inside hosts live in. Others may be opened too, but nobody is led to a metadata service."""


def _destination(record: Mapping[str, Any]) -> str:
    """The policy entry that would permit the address in `record`; empty where none is offered."""
    host, address, why = (str(record.get(name, "")) for name in ("host", "address", "detail"))
    if record.get("error") != "address-refused" or not host or why not in _OFFERED:
        return ""
    try:
        return f"destinations: {{{printable(host)}: {{addresses: [{ip_network(address)}]}}}}"
    except ValueError:
        return ""


def _records_of(request_id: str, folder: Path) -> list[Mapping[str, Any]]:
    try:
        return list(search(folder, Filter(request_id=request_id)))
    except OSError as error:
        fail(f"the log cannot be read: {error.strerror}")
