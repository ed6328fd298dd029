"""The document: a policy as one plain JSON value, between the parser and the compiler.

parse.py encodes with these functions, compile.py decodes what they made; a test holds that the two are inverse.
The vault parses files once and hands the document on, so workers and executors never read YAML.
A document holds no secret and no reference to one. Its digest names the policy in every record.

    {"version": 1, "basis": {...}, "operations": {id: op}, "credentials": {name: ...}, "destinations": {host: ...},
     "roles": {name: {"message", "boundary", "dns", "rules": [{"id", "action", "operations": [op id], ...}]}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rules.policy import CredentialDef, DestinationDef, HostPattern, Operation, PathPattern, RedirectSpec, Rule

VERSION = 1

Json = dict[str, Any]


def digest(document: Mapping[str, Any]) -> str:
    """Return the hex SHA-256 over the canonical JSON (sorted keys, no spaces, UTF-8) of `document`."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def encode_host(pattern: HostPattern) -> str:
    """HostPattern.text, which rules.compile.compile_host reads."""
    return pattern.text


def encode_path(pattern: PathPattern) -> Json:
    return {"template": pattern.template, "encoded_slash": pattern.encoded_slash}


def encode_operation(op: Operation) -> Json:
    return {
        "effect": op.effect,
        "hosts": [encode_host(pattern) for pattern in op.hosts],
        "port": op.port,
        "scheme": op.scheme,
        "methods": list(op.methods),
        "paths": [encode_path(pattern) for pattern in op.paths],
        "query": None
        if op.query is None
        else {name: None if values is None else list(values) for name, values in op.query.items()},
        "query_required": list(op.query_required),
        "request_headers": {name: list(values) for name, values in op.request_headers.items()},
        "head": None
        if op.head is None
        else {"matcher": op.head.matcher, "params": _plain(op.head.params), "prefix": op.head.prefix},
        "body": None
        if op.body is None
        else {
            "matcher": op.body.matcher,
            "bound": op.body.bound,
            "params": _plain(op.body.params),
            "prefix": op.body.prefix,
        },
        "arguments": dict(op.arguments),
        "must_bind": list(op.must_bind),
        "unbound": list(op.unbound),
        "fold": list(op.fold),
        "auth_headers": list(op.auth_headers),
        "auth_query": list(op.auth_query),
        "extra_request_headers": list(op.extra_request_headers),
        "native": op.native,
        "placeholders_inert": op.placeholders_inert,
        "redirects": [encode_redirect(spec) for spec in op.redirects],
        "download": op.download,
        "websocket": op.websocket,
        "request_bytes": op.request_bytes,
        "answer": op.answer,
        "captures": list(op.captures),
        "takes": op.takes,
        "extra_response_headers": list(op.extra_response_headers),
        "shared_state": None if op.shared_state is None else list(op.shared_state),
    }


def encode_redirect(spec: RedirectSpec) -> Json:
    return {
        "to": [encode_host(pattern) for pattern in spec.to],
        "path": None if spec.path is None else encode_path(spec.path),
        "query_keys": list(spec.query_keys),
        "then": [encode_redirect(after) for after in spec.then],
    }


def encode_rule(rule: Rule) -> Json:
    return {
        "id": rule.id,
        "action": rule.action,
        "operations": [op.id for op in rule.operations],
        "hosts": [encode_host(pattern) for pattern in rule.hosts],
        "port": rule.port,
        "bind": {name: list(patterns) for name, patterns in rule.bind.items()},
        "credential": rule.credential,
        "tunnel": rule.tunnel,
        "tunnel_reason": rule.tunnel_reason,
        "max_bytes": rule.max_bytes,
        "max_seconds": rule.max_seconds,
        "protocol": rule.protocol,
        "client_auth": rule.client_auth,
        "result_keep": None if rule.result_keep is None else list(rule.result_keep),
        "requests": None if rule.requests is None else list(rule.requests),
        "response_bytes": rule.response_bytes,
        "request_bytes": rule.request_bytes,
        "approval": rule.approval,
        "shared": rule.shared,
        "headers": None if rule.headers is None else list(rule.headers),
        "message": rule.message,
        "quiet": rule.quiet,
    }


def encode_credential(credential: CredentialDef) -> Json:
    authorities = credential.authorities or tuple((host.text, 443) for host in credential.hosts)
    return {
        "kind": credential.kind,
        "slots": [
            {"where": slot.where, "name": slot.name, "template": slot.template, "part": slot.part}
            for slot in credential.slots
        ],
        "authorities": [[host, port] for host, port in authorities],
        "owner": credential.owner,
        "placeholders": [
            {"part": part, "env": spec.env, "shape": spec.shape} for part, spec in credential.placeholders
        ],
        "scrub": credential.scrub,
        "username": credential.username,
        "params": _plain(credential.params),
    }


def encode_destination(destination: DestinationDef) -> Json:
    return {
        "port": destination.port,
        "scheme": destination.scheme,
        "addresses": [str(network) for network in destination.addresses],
        "static": list(destination.static),
        "ca_pem": destination.ca_pem,
        "sni": destination.sni,
    }


def _plain(value: Any) -> Any:
    """Tuples and mappings of evaluator parameters as JSON lists and objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    return value
