"""AWS query and JSON protocols: one URL for a whole service, and an action by name.

Sources: Smithy specifications of awsQuery, ec2Query and awsJson 1.0/1.1 (protocol sections), and the services' API
references for what each action does. The action stands in `Action=` of a form or of the query, or in the header
`X-Amz-Target: Prefix.Action`. Both places, or one twice: refused, whichever the service would take.

`actions` lists exact names. No prefixes: `GetSecretValue`, `GetSessionToken` and `DescribeTrusts` are not alike, and a
list that says `Get*` permits what the service invents tomorrow. What is not listed is no operation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations import forms, jsonrpc
from rules.operations.strict_json import InvalidJson, load

_ACTION = re.compile(r"[A-Z][A-Za-z0-9]{1,127}")
_VERSION = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TARGET = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,127}")
_JSON = ("application/x-amz-json-1.0", "application/x-amz-json-1.1")


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {"action": ..., and what `arguments` binds}, or None. See `check` for `params`."""
    targets = facts.header("x-amz-target")
    return _by_target(params, body, facts, targets) if targets else _by_form(params, body, facts)


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `actions`: exact names. `target`: the prefixes of `X-Amz-Target` that the service takes, and `version`: those of
    `Version=`; a protocol whose key is missing is not spoken. `arguments`: argument -> field of the form, or path
    into the JSON object. `stated_by`: argument -> the actions that read that field; the others leave it unread, and a
    request that names it there for show states nothing. `instead`: argument -> fields that would be read in its place.
    """
    if not params.keys() <= {"actions", "target", "version", "arguments", "stated_by", "instead"}:
        raise ValueError("unknown parameter of an AWS action")
    actions = params.get("actions")
    if not isinstance(actions, list | tuple) or not actions:
        raise ValueError("an AWS operation lists its actions")
    if not all(isinstance(action, str) and _ACTION.fullmatch(action) for action in actions):
        raise ValueError("an action is its exact name")
    for key, shape in (("target", _TARGET), ("version", _VERSION)):
        listed = params.get(key, ())
        if not isinstance(listed, list | tuple) or not all(
            isinstance(one, str) and shape.fullmatch(one) for one in listed
        ):
            raise ValueError("target and version are lists of text")
    if not params.get("target") and not params.get("version"):
        raise ValueError("an AWS operation speaks the query protocol (version) or JSON (target)")
    named = params.get("arguments", {})
    jsonrpc.check_paths(named, {"action"})
    stated, instead = params.get("stated_by", {}), params.get("instead", {})
    if not isinstance(stated, Mapping) or stated.keys() != named.keys():
        raise ValueError("stated_by lists for each argument the actions that read it")
    if not all(isinstance(one, list | tuple) and one and set(one) <= set(actions) for one in stated.values()):
        raise ValueError("stated_by lists actions of this operation")
    if not isinstance(instead, Mapping) or not instead.keys() <= named.keys():
        raise ValueError("instead lists fields for an argument")
    if not all(
        isinstance(one, list | tuple) and all(isinstance(field, str) for field in one) for one in instead.values()
    ):
        raise ValueError("instead lists fields for an argument")


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    return frozenset({"action", *params.get("arguments", {})})


def _by_target(
    params: Mapping[str, Any], body: bytes, facts: RequestFacts, targets: tuple[str, ...]
) -> dict[str, Value] | None:
    """awsJson: the header names the action, the body is a JSON object of its input."""
    prefix, dot, action = targets[0].rpartition(".")
    if len(targets) != 1 or not dot or prefix not in params.get("target", ()) or action not in params["actions"]:
        return None
    types = facts.header("content-type")
    if (
        len(types) != 1
        or types[0].strip().lower() not in _JSON
        or facts.header("content-encoding")
        or facts.query.pairs
    ):
        return None
    try:
        value = load(body, depth=40, nodes=100_000)
    except InvalidJson:
        return None
    if not isinstance(value, dict) or "Action" in value:
        return None
    return {"action": action, **jsonrpc.bound(_read_by(params, action, value), value)}


def _by_form(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> dict[str, Value] | None:
    """awsQuery and ec2Query: a form by POST, or the query of a GET."""
    if facts.method == "POST":
        fields = forms.read(body, facts)
        if fields is None or facts.query.pairs:
            return None
    else:
        if body or facts.query.duplicates():
            return None
        fields = dict(facts.query.pairs)
    # Names are exact at AWS; another spelling beside them is for someone else to read.
    lowered = [name.lower() for name in fields]
    if len(set(lowered)) != len(lowered):
        return None
    if fields.get("Action") not in params["actions"] or fields.get("Version") not in params.get("version", ()):
        return None
    if any(name.startswith("x-amz-") or name in ("awsaccesskeyid", "signature", "securitytoken") for name in lowered):
        return None
    found: dict[str, Value] = {"action": fields["Action"]}
    for argument, name in _read_by(params, fields["Action"], fields).items():
        if name in fields:
            if not forms.plain(fields[name]):
                return None
            found[argument] = fields[name]
    return found


def _read_by(params: Mapping[str, Any], action: str, given: Mapping[str, Any]) -> Mapping[str, str]:
    """The arguments that `action` reads from their fields. Services ignore a field that an action does not know."""
    names = {key.lower() for key in given}
    return {
        argument: field
        for argument, field in params.get("arguments", {}).items()
        if action in params["stated_by"][argument]
        and not any(other.lower() in names for other in params.get("instead", {}).get(argument, ()))
    }
