"""Hand-made policies, sandboxes and requests for tests: the few defaults that every case shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from rules.compile import compile_host
from rules.facts import RequestFacts, Sandbox, TunnelFacts
from rules.matching import parse_path
from rules.names import CredentialRef, Host, RuleId
from rules.placeholders import make
from rules.policy import (
    CredentialDef,
    DestinationDef,
    Operation,
    PlaceholderSpec,
    Policy,
    Role,
    Rule,
    Slot,
)

NOW = 1000.0
SHAPE = "sk_{24}"
PLACEHOLDER = make(SHAPE, bytes(32))
OTHER_PLACEHOLDER = make(SHAPE, bytes(range(32)))


def sandbox(role: str = "dev", *, expires_at: float = NOW + 60, **attributes: str) -> Sandbox:
    """A live sandbox of `role`."""
    return Sandbox(
        tenant="t1",
        id="sb_aaaaaaaaaaaaaaaa",
        epoch=1,
        role=role,
        owner="ada",
        agent="agent",
        task="task",
        attributes=attributes,
        expires_at=expires_at,
    )


def request(
    line: str,
    *headers: tuple[str, str],
    body: bytes | None = None,
    has_body: bool | None = None,
    upgrade: str | None = None,
) -> RequestFacts:
    """Facts of `METHOD URL` as a client would send it. Raises FactsRefused."""
    method, _, url = line.partition(" ")
    scheme = "https" if url.startswith("https:") else "http"
    authority = urlsplit(url).netloc
    origin = url[len(scheme) + 3 + len(authority) :] or "/"
    port = f"{authority}:443" if ":" not in authority.rpartition("]")[2] else authority
    facts = RequestFacts.build(
        method=method,
        scheme="https" if scheme == "https" else "http",
        tunnel=TunnelFacts.build(port) if scheme == "https" else None,
        target=origin if scheme == "https" else url,
        headers=(("host", authority), *headers),
        has_body=bool(body) if has_body is None else has_body,
        upgrade=upgrade,
    )
    return facts if body is None else replace(facts, body=body)


def operation(
    op_id: str = "dev/read",
    *,
    host: str = "ok.test",
    methods: Iterable[str] = ("GET",),
    paths: Iterable[str] = ("/v1/read/**",),
    port: int | None = None,
    scheme: str = "https",
    **rest: Any,
) -> Operation:
    templates = tuple(parse_path(path) for path in paths)
    names = {name for template in templates for name in template.names}
    rest.setdefault("effect", "read" if set(methods) <= {"GET", "HEAD"} else "write")
    rest.setdefault("arguments", {name: "{" + name + "}" for name in names})
    return Operation(
        id=op_id,
        hosts=(compile_host(host),),
        port=port or (443 if scheme == "https" else 80),
        scheme="https" if scheme == "https" else "http",
        methods=tuple(methods),
        paths=templates,
        **rest,
    )


def allow(name: str, *operations: Operation, **rest: Any) -> Rule:
    return Rule(id=RuleId(f"dev/{name}"), action="allow", operations=operations, **rest)


def deny(name: str, *operations: Operation, host: str | None = None, **rest: Any) -> Rule:
    hosts = () if host is None else (compile_host(host),)
    return Rule(id=RuleId(f"dev/{name}"), action="deny", operations=operations, hosts=hosts, **rest)


def credential(name: str = "key", *, host: str = "ok.test", kind: str = "bearer", slot: Slot | None = None) -> Any:
    return CredentialDef(
        name=CredentialRef(name),
        kind=kind,  # type: ignore[arg-type]
        slot=slot or Slot(where="bearer", template="Bearer {value}"),
        hosts=(Host.parse(host),),
        owner="team",
        placeholder=PlaceholderSpec(env="KEY", shape=SHAPE),
    )


def policy(
    *rules: Rule,
    credentials: Iterable[CredentialDef] = (),
    destinations: Mapping[str, DestinationDef] | None = None,
    role: str = "dev",
) -> Policy:
    return Policy(
        digest="0" * 64,
        document={},
        roles={role: Role(name=role, rules=rules)},
        destinations=destinations or {},
        credentials={entry.name: entry for entry in credentials},
    )
