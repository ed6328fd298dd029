"""`exeat policy`: check, test and explain without a running gateway; show and reload with one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.admin.client import AdminError
from broker.vault.policies import ActivePolicy, PolicyRejected, load_policy
from exeat.commands.audit import print_decision
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, settings
from exeat.explain import NotExplained, explain_request
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, note, print_fields, print_json, say
from rules.schema import credentials_schema, json_schema

app = typer.Typer(help="Policy: check, test, explain, show, reload, schema.", no_args_is_help=True)

FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="Policy file or folder (default: settings').")]
CredentialsOption = Annotated[Path | None, typer.Option("--credentials", help="credentials.yaml (default: settings').")]


def _load(file: Path | None, credentials: Path | None, config: Path | None, output: Output) -> ActivePolicy:
    """The policy named, or the settings'. Prints each problem as file:line:column and exits 1 on any."""
    if file is None or (credentials is None and config is not None):
        current = settings(config)
        file, credentials = file or current.policy, credentials or current.credentials
    if credentials is None and (file.parent / "credentials.yaml").is_file():
        credentials = file.parent / "credentials.yaml"
    try:
        return load_policy(file.absolute(), credentials.absolute() if credentials else None, time.time())
    except PolicyRejected as error:
        if output is Output.json:
            print_json({"problems": list(error.problems), "detail": error.detail})
            raise SystemExit(EXIT_NO) from None
        for line in error.problems:
            note(line)
        fail(error.detail, remedy=error.remedy)


@app.command()
def check(
    file: FileOption = None,
    credentials: CredentialsOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Parse, check and test a policy; every problem with file, line and column."""
    active = _load(file, credentials, config, output)
    if output is Output.json:
        print_json({"digest": active.digest, "files": active.files, "warnings": active.warnings})
        return
    for line in active.warnings:
        note(f"warning: {line}")
    say(f"policy is valid: {len(active.policy.roles)} role(s), digest {active.digest[:16]}")


@app.command("test")
def test_(
    file: FileOption = None,
    credentials: CredentialsOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Run the policy's own tests (they also run at every load)."""
    active = _load(file, credentials, config, output)
    if output is Output.json:
        print_json({"digest": active.digest, "tests": active.tests, "failed": 0})
    else:
        say(f"{active.tests} test(s) passed" if active.tests else "the policy has no tests: add some under tests:")


@app.command("explain")
def explain_(
    method: Annotated[str, typer.Argument(help="GET, POST, ...")],
    url: Annotated[str, typer.Argument(help="The whole URL.")],
    role: Annotated[str | None, typer.Option("--role", "-r", help="Default: the only role.")] = None,
    body: Annotated[str | None, typer.Option("--body", help="A JSON body, where the operation is in it.")] = None,
    file: FileOption = None,
    credentials: CredentialsOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Say what would be decided for a request, by which rule and why. Nothing is sent."""
    active = _load(file, credentials, config, output)
    roles = sorted(active.policy.roles)
    if role is None and len(roles) != 1:
        fail("name a role", remedy=f"--role {' | '.join(roles)}", code=EXIT_USAGE)
    try:
        answer = explain_request(active.policy, role or roles[0], method.upper(), url, body, time.time())
    except NotExplained as error:
        fail(str(error), code=EXIT_USAGE)
    if output is Output.json:
        print_json(answer)
    else:
        print_decision(answer)
    raise SystemExit(0 if answer["decision"] == "permit" else EXIT_NO)


@app.command()
def schema(
    which: Annotated[str, typer.Argument(help="policy or credentials")] = "policy",
) -> None:
    """Print the JSON Schema for editors."""
    schemas: dict[str, Any] = {"policy": json_schema, "credentials": credentials_schema}
    if which not in schemas:
        fail(f"there is no schema named {which!r}", remedy="known: policy, credentials", code=EXIT_USAGE)
    print_json(schemas[which]())


@app.command()
def show(config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Show the policy in force in the running gateway."""
    try:
        answer = admin(config).policy()
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
        return
    names = ("digest", "files", "roles", "warnings", "rejected")
    print_fields({name: answer[name] for name in names if answer.get(name)})


@app.command()
def reload(config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Load the files anew: parse, check, test, swap; on any problem the last good policy stays."""
    try:
        answer = admin(config).reload_policy()
    except AdminError as error:
        for line in error.body.get("problems", []):
            note(str(line))
        explain(error)
    if output is Output.json:
        print_json(answer)
    else:
        say(f"policy {str(answer.get('digest', ''))[:16]} is in force")
