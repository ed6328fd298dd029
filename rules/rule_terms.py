"""The terms of an allow rule, whatever its form: bindings, credential, limits, result, approval, protocol, headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rules import grammar
from rules.matching import InvalidTemplate, check_binding
from rules.names import CredentialRef
from rules.policy import Rule
from rules.reader import Node, shown
from rules.result_paths import InvalidKeep, check_keep


def bound(rule: Rule, fields: Mapping[str, Node], arguments: set[str], *, allow: bool) -> Rule:
    """`with:` binds arguments; those that some operation of the rule lacks never let that operation match."""
    if "with" not in fields:
        return rule
    bind: dict[str, tuple[str, ...]] = {}
    entries = fields["with"].entries()
    if not entries:
        fields["with"].fail("an empty with: binds nothing; leave it out")
    for key, node in entries:
        if key not in arguments:
            node.note(
                f"no operation of this rule has an argument {shown(key)}; known: {_listed(arguments)}", on_key=True
            )
            continue
        items = [node] if not isinstance(node.value, list) else node.items(empty="an empty list permits no value")
        patterns: list[str] = []
        for item in items:
            text = item.text()
            if not allow and "${" in text:
                item.fail("a deny rule does not depend on the sandbox: an attribute that is missing would lift it")
            grammar.sandbox_references(item, text)
            try:
                check_binding(text)
            except InvalidTemplate as error:
                item.fail(str(error))
            patterns.append(text)
        bind[key] = tuple(patterns)
    return replace(rule, bind=bind)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def shared(rule: Rule, fields: Mapping[str, Node]) -> Rule:
    if "credential" in fields:
        rule = replace(rule, credential=CredentialRef(fields["credential"].text()))
    if "message" in fields:
        rule = replace(rule, message=fields["message"].text())
    if "protocol" in fields:
        fields["protocol"].word(("h2",))
        rule = replace(rule, protocol="h2")
    if "client_auth" in fields:
        fields["client_auth"].word(("pass",))
        if rule.credential is not None:
            fields["client_auth"].fail("client_auth: pass is impossible on a rule with a credential", on_key=True)
        fields["client_auth"].warn("client_auth: pass opens a channel to whatever accounts the sandbox has keys for")
        rule = replace(rule, client_auth=True)
    if "headers" in fields:
        items = fields["headers"].items(empty="an empty list of headers adds nothing; leave it out")
        rule = replace(rule, headers=tuple(grammar.header(item) for item in items))
    if "limits" in fields:
        rule = _limits(rule, fields["limits"])
    if "result" in fields:
        rule = replace(rule, result_keep=_keep(fields["result"]))
    if "approval" in fields:
        rule = replace(rule, approval=_approval(fields["approval"]))
    return rule


def _limits(rule: Rule, node: Node) -> Rule:
    fields = node.fields("", "requests response upload")
    if not fields:
        node.fail("an empty limits: limits nothing; leave it out")
    return replace(
        rule,
        requests=grammar.rate(fields["requests"]) if "requests" in fields else None,
        response_bytes=grammar.size(fields["response"]) if "response" in fields else None,
        request_bytes=grammar.size(fields["upload"]) if "upload" in fields else None,
    )


def _keep(node: Node) -> tuple[str, ...]:
    keep = node.fields("keep")["keep"]
    paths = keep.texts(empty="an empty list keeps nothing; name the fields")
    for index, path in enumerate(paths):
        try:
            check_keep(path)
        except InvalidKeep as error:
            keep.child(index).fail(f"{shown(path)}: {error}")
    return tuple(paths)


def _approval(node: Node) -> str:
    fields = node.fields("from", "of wait answer_by valid uses shows")
    if "of" in fields:
        fields["of"].natural(1, 20)
    if "uses" in fields:
        fields["uses"].natural(1, 1000)
    for key in ("wait", "answer_by", "valid"):
        if key in fields:
            grammar.duration(fields[key])
    if "shows" in fields:
        fields["shows"].texts(empty="an empty shows: shows nothing; leave it out")
    return grammar.name(fields["from"])
