"""`exeat policy`: check, test and explain without a running gateway; show and reload with one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.admin.client import AdminError
from exeat.commands.asking import (
    BodyFileOption,
    BodyOption,
    CredentialsOption,
    FileOption,
    HeaderOption,
    decide_offline,
    load_files,
    print_decision,
    read_body,
)
from exeat.commands.context import ConfigOption, OutputOption, admin, explain
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, note, print_fields, print_json, say
from rules.openapi import as_service_file, read_openapi
from rules.schema import credentials_schema, json_schema
from rules.service_file import parse_service
from rules.yaml12 import YamlError

app = typer.Typer(help="Policy: check, test, explain, show, reload, schema, import.", no_args_is_help=True)


@app.command()
def check(
    file: FileOption = None,
    credentials: CredentialsOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Parse, check and test a policy; every problem with file, line and column."""
    active = load_files(file, credentials, config, output)
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
    active = load_files(file, credentials, config, output)
    if output is Output.json:
        print_json({"digest": active.digest, "tests": active.tests, "failed": 0})
    else:
        say(f"{active.tests} test(s) passed" if active.tests else "the policy has no tests: add some under tests:")


@app.command("explain")
def explain_(
    method: Annotated[str, typer.Argument(help="GET, POST, ...")],
    url: Annotated[str, typer.Argument(help="The whole URL.")],
    role: Annotated[str | None, typer.Option("--role", "-r", help="Default: the only role.")] = None,
    header: HeaderOption = None,
    body: BodyOption = None,
    body_file: BodyFileOption = None,
    attribute: Annotated[
        list[str] | None, typer.Option("--attribute", help="name=value: what ${sandbox.name} stands for.")
    ] = None,
    file: FileOption = None,
    credentials: CredentialsOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Say what would be decided for a request, by which rule and why, and what nearly permits it. Nothing is sent."""
    attributes = {}
    for text in attribute or ():
        name, equals, value = text.partition("=")
        if not equals:
            fail(f"--attribute {text!r} is not name=value", code=EXIT_USAGE)
        attributes[name] = value
    active = load_files(file, credentials, config, output, let_tests_fail=True)
    answer = decide_offline(active, method, url, role, read_body(body, body_file), header, attributes)
    if output is Output.json:
        print_json(answer)
    else:
        print_decision(answer)
    raise SystemExit(0 if answer["decision"] == "permit" else EXIT_NO)


importing = typer.Typer(help="Policy from other descriptions.", no_args_is_help=True)
app.add_typer(importing, name="import")


@importing.command()
def openapi(
    document: Annotated[Path, typer.Argument(help="An OpenAPI 3.0 or 3.1 description, JSON or YAML.")],
    name: Annotated[str, typer.Option("--name", "-n", help="The service's name.")],
    base: Annotated[str | None, typer.Option("--base", help="Where it is, instead of the document's server.")] = None,
    operation: Annotated[
        list[str] | None, typer.Option("--operation", help="An operation id or tag:NAME, as often as needed.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Print the entry for services: in a policy instead.")] = False,
) -> None:
    """Print a service file made of an OpenAPI description, to put into services/ beside the policy and go on from.

    GET is taken as read and everything else as write; what cannot be said exactly is left out and told.
    """
    try:
        text = document.read_text("utf-8")
        found = read_openapi(text, document.name, name=name, base=base, operations=operation or None)
        parse_service(as_service_file(found), document.name)
    except OSError as error:
        fail(f"{document}: {error.strerror}", code=EXIT_USAGE)
    except UnicodeDecodeError:
        fail(f"{document} is not UTF-8 text", remedy="save it as UTF-8", code=EXIT_USAGE)
    except YamlError as error:
        for problem in error.problems:
            note(str(problem))
        fail("no service can be made of this description")
    if not pin:
        typer.echo(as_service_file(found), nl=False)
        return
    more = f", base: {json.dumps(base)}" if base else ""
    chosen = f", operations: {json.dumps(operation)}" if operation else ""
    digest = sha256(text.encode("utf-8")).hexdigest()
    say(f'{name}: {{openapi: {{document: "file:{document.name}", sha256: "{digest}"{chosen}}}{more}}}')
    for line in found.left_out:
        note(f"left out: {line}")


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
