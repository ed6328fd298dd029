"""JSON Schemas (2020-12) of policy.yaml and credentials.yaml, for editors.

The schema helps while typing; rules/parse.py judges. So the schema may accept what the parser refuses (it cannot
see two rules at once), and a test holds that it never refuses what the parser accepts.
"""

from __future__ import annotations

from typing import Any, get_args

from rules.catalogue import builtin_services
from rules.credential_kinds import KINDS, PART
from rules.credential_slots import OPEN_KEYS
from rules.placeholders import NAMED
from rules.policy import Dns, Effect, Sni
from rules.reasons import REASONS
from rules.secret_references import FROM

DIALECT = "https://json-schema.org/draft/2020-12/schema"
POLICY_ID = "https://exeat.dev/schema/policy.json"
CREDENTIALS_ID = "https://exeat.dev/schema/credentials.json"

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}
_HOST: Schema = {"type": "string", "minLength": 3, "description": "x, *.x (one label) or **.x (one or more labels)"}
_HOSTS: Schema = {"oneOf": [_HOST, {"type": "array", "items": _HOST, "minItems": 1, "uniqueItems": True}]}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_SIZE: Schema = {"type": "string", "pattern": "^[1-9][0-9]*(B|KiB|MiB|GiB)$"}
_DURATION: Schema = {"type": "string", "pattern": "^[1-9][0-9]*(s|m|h|d)$"}
_RATE: Schema = {"type": "string", "pattern": "^[1-9][0-9]*/(second|minute|hour|day)$"}
_METHODS: Schema = {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][A-Z-]*$"}, "minItems": 1}
_PATHS: Schema = {"type": "array", "items": {"type": "string", "pattern": "^/"}, "minItems": 1, "uniqueItems": True}
_EFFECT: Schema = {"enum": list(get_args(Effect))}
_VALUE: Schema = {"type": ["string", "integer"]}
_QUERY: Schema = {
    "oneOf": [
        {"const": "any"},
        {
            "type": "object",
            "additionalProperties": {"oneOf": [{"const": "any"}, {"type": "array", "items": _VALUE, "minItems": 1}]},
        },
    ]
}
_BIND: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]},
}
_WORDS: Schema = {"type": "array", "items": _TEXT, "minItems": 1, "uniqueItems": True}


def json_schema() -> Schema:
    """Return the schema of policy.yaml."""
    allow = {"oneOf": [_service_rule(), _hand_rule(), _tunnel_rule()]}
    deny = {"oneOf": [_deny_service(), _deny_host()]}
    role = _object(
        {
            "allow": {"type": "array", "items": allow},
            "deny": {"type": "array", "items": deny},
            "include": _WORDS,
            "message": _TEXT,
            "boundary": _object({"external": _TEXT, "reason": _TEXT}, "external reason"),
            "dns": {"enum": list(get_args(Dns))},
        }
    )
    like = _object({"like": {"enum": sorted(builtin_services())}, "base": {"type": "string"}}, "like base")
    pinned = {"document": _TEXT, "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}, "operations": _WORDS}
    described = _object({"openapi": _object(pinned, "document sha256"), "base": {"type": "string"}}, "openapi")
    service = {"oneOf": [like, described]}
    return {
        "$schema": DIALECT,
        "$id": POLICY_ID,
        "title": "Exeat policy",
        **_object(
            {
                "version": {"const": 1},
                "destinations": _destinations(),
                "services": {"type": "object", "propertyNames": _NAME, "additionalProperties": service},
                "roles": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[a-z0-9][a-z0-9_-]{0,62}$"},
                    "additionalProperties": role,
                },
                "everyone": _object({"deny": {"type": "array", "items": deny}}, "deny"),
                "tests": {"type": "array", "items": _test()},
            },
            "version",
        ),
    }


def credentials_schema() -> Schema:
    """Return the schema of credentials.yaml."""
    shape = {"anyOf": [{"pattern": r"\{[0-9]+(:caps)?\}"}, {"enum": sorted(NAMED)}], "type": "string"}
    one = _object({"env": _TEXT, "shape": shape}, "env shape")
    parts = {"pattern": PART.pattern.replace(r"\Z", "$")}
    placeholder: Schema = {
        "anyOf": [one, {"type": "object", "propertyNames": parts, "additionalProperties": one, "minProperties": 1}]
    }
    reference: Schema = {
        "anyOf": [
            {"type": "string", "pattern": "^[a-z][a-z0-9+._-]*:"},
            {"type": "object", "required": [FROM]},
        ]
    }
    several: Schema = {
        "type": "object",
        "propertyNames": parts,
        "not": {"required": [FROM]},
        "additionalProperties": reference,
        "minProperties": 1,
    }
    common: Schema = {
        "secret": {"anyOf": [reference, several]},
        "owner": _TEXT,
        "hosts": _WORDS,
        "placeholder": placeholder,
        "scrub": {"type": "boolean"},
        "username": _TEXT,
    }
    own: Schema = {key: {} for row in KINDS.values() for key in row.keys if key not in common}
    left_open: Schema = {key: {} for keys in OPEN_KEYS.values() for key in keys}
    served = _object({**common, **left_open, "service": {"enum": sorted(builtin_services())}}, "service secret owner")
    written = _object({**common, **own, "kind": {"enum": list(KINDS)}}, "kind secret owner hosts")
    return {
        "$schema": DIALECT,
        "$id": CREDENTIALS_ID,
        "title": "Exeat credentials",
        **_object(
            {
                "version": {"const": 1},
                "credentials": {
                    "type": "object",
                    "propertyNames": _NAME,
                    "additionalProperties": {"oneOf": [served, written]},
                },
                "sources": {"type": "object"},
                "destinations": _destinations(),
            },
            "version",
        ),
    }


def _object(properties: Schema, required: str = "") -> Schema:
    shape: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        shape["required"] = required.split()
    return shape


def _shared() -> Schema:
    """What every allow rule but a tunnel may say."""
    limits = _object({"requests": _RATE, "response": _SIZE, "upload": _SIZE})
    approval = _object(
        {
            "from": _NAME,
            "of": {"type": "integer", "minimum": 1},
            "wait": _DURATION,
            "answer_by": _DURATION,
            "valid": _DURATION,
            "uses": {"type": "integer", "minimum": 1},
            "shows": _WORDS,
        },
        "from",
    )
    return {
        "name": _NAME,
        "credential": _TEXT,
        "with": _BIND,
        "result": _object({"keep": _WORDS}, "keep"),
        "limits": {**limits, "minProperties": 1},
        "approval": approval,
        "protocol": {"const": "h2"},
        "client_auth": {"const": "pass"},
        "headers": {"type": "array", "items": _TEXT, "minItems": 1},
        "message": _TEXT,
    }


def _service_rule() -> Schema:
    service = {"oneOf": [_NAME, {"type": "array", "items": _NAME, "minItems": 1, "uniqueItems": True}]}
    properties: Schema = {"service": service, "operations": _WORDS, "shared": {"const": True}, **_shared()}
    return _object(properties, "service operations")


def _hand_rule() -> Schema:
    properties: Schema = {
        "host": _HOSTS,
        "port": _PORT,
        "scheme": {"enum": ["https", "http"]},
        "methods": _METHODS,
        "paths": _PATHS,
        "query": _QUERY,
        "body": _object({"json": {"type": "object", "minProperties": 1}, "max": _SIZE}, "json"),
        "effect": _EFFECT,
        "websocket": {"type": "boolean"},
        **_shared(),
    }
    return _object(properties, "name host methods paths")


def _tunnel_rule() -> Schema:
    properties: Schema = {
        "host": _HOST,
        "tunnel": {"const": True},
        "reason": _TEXT,
        "name": _NAME,
        "port": _PORT,
        "limits": _object({"bytes": _SIZE, "time": _DURATION}),
        "message": _TEXT,
    }
    return _object(properties, "host tunnel reason")


def _deny_service() -> Schema:
    service = {"oneOf": [_NAME, {"type": "array", "items": _NAME, "minItems": 1, "uniqueItems": True}]}
    properties: Schema = {
        "service": service,
        "operations": _WORDS,
        "with": _BIND,
        "name": _NAME,
        "message": _TEXT,
        "quiet": {"type": "boolean"},
    }
    return _object(properties, "service")


def _deny_host() -> Schema:
    properties: Schema = {
        "host": _HOSTS,
        "port": _PORT,
        "methods": _METHODS,
        "paths": _PATHS,
        "query": _QUERY,
        "name": _NAME,
        "message": _TEXT,
        "quiet": {"type": "boolean"},
    }
    return _object(properties, "host")


def _destinations() -> Schema:
    addresses = {"type": "array", "items": _TEXT, "minItems": 1}
    entry = _object(
        {
            "addresses": addresses,
            "resolve": addresses,
            "ca": {"type": "string", "pattern": "^file:"},
            "port": _PORT,
            "scheme": {"enum": ["https", "http"]},
            "sni": {"enum": list(get_args(Sni))},
        }
    )
    return {"type": "object", "additionalProperties": {**entry, "minProperties": 1}}


def _test() -> Schema:
    request = {"type": "string", "pattern": "^[A-Za-z]+ [^ ]+$"}
    texts = {"type": "object", "additionalProperties": _TEXT}
    return {
        **_object(
            {
                "role": _TEXT,
                "allow": request,
                "deny": request,
                "hold": request,
                "rule": _TEXT,
                "reason": {"enum": sorted(REASONS)},
                "body": {},
                "headers": texts,
                "sandbox": texts,
                "why": _TEXT,
            },
            "role",
        ),
        "oneOf": [{"required": [verdict]} for verdict in ("allow", "deny", "hold")],
    }
