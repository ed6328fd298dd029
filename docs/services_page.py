"""The page of services, from the catalogue. docs/generate.py writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rules.catalogue import CredentialSlot, Endpoint, ServiceDef, builtin_services, read_builtin
from rules.policy import Operation
from rules.yaml12 import load


def services_page(note: str) -> str:
    """Every service of the catalogue: where it is, its credential, its operations with effect, arguments and why."""
    texts = read_builtin()
    services = builtin_services()
    parts = ["# Services\n\n", note]
    parts.append(
        f"The catalogue has {len(services)} services, one file each in `rules/services/`. A rule names a service and\n"
        "operations by name or by effect: `{service: github, operations: [read], with: {repository: acme/*}}`. What a\n"
        "service does not describe is denied. An operation with effect mint has to be named itself: its answer is\n"
        "authority. `later` marks what is known by name and denied until it can be recognised. A bold\n"
        "argument must be bound by every rule that allows the operation, since the place belongs to everybody. A rule\n"
        "with a credential binds what an operation with shared state names, or says `shared: true`. What redirects\n"
        "and shared state mean is told in [operations](operations.md).\n\n"
        "| Service | | Operations | Credential |\n|---|---|---|---|\n"
    )
    for name, service in services.items():
        slot = service.credential
        variable = "" if slot is None else ", ".join(f"`{spec.env}`" for _, spec in slot.placeholders)
        count = len(service.operation_names)
        parts.append(f"| [`{name}`](#{_anchor(service)}) | {service.title} | {count} | {variable} |\n")
    for name, service in services.items():
        parts += _service(service, load(texts[f"{name}.yaml"], name)[0]["operations"])
    return "".join(parts)


def _slots(slot: CredentialSlot) -> str:
    """Where a credential's placeholders stand."""
    match slot.kind:
        case "sigv4":
            return f"AWS signature (SigV4) for {', '.join(f'`{name}`' for name in slot.written['aws_services'])}"
        case "path":
            return f"path {', '.join(f'`{one.template}`' for one in slot.slots)}"
        case _:
            return f"{slot.kind} {', '.join(f'`{one.name}`' for one in slot.slots)}"


def _service(service: ServiceDef, written: dict[str, Any]) -> Iterator[str]:
    places = [f"`{_place(endpoint)}`" for endpoint in service.endpoints.values()]
    yield f"\n## {service.title} (`{service.name}`)\n\n{', '.join(dict.fromkeys(places))}\n"
    if service.credential is not None:
        slot = service.credential
        where = {"bearer": "`Authorization: Bearer`", "basic": "`Authorization: Basic`"}.get(slot.kind, _slots(slot))
        held = ", ".join(f"`{spec.env}` (`{spec.shape}`)" for _, spec in slot.placeholders)
        yield f"\nCredential: {where}, in the sandbox as {held}.\n"
    yield "\n| Operation | Effect | Arguments | |\n|---|---|---|---|\n"
    for name in service.operation_names:
        selected = service.select(name)
        bound = {argument for op in selected for argument in op.must_bind}
        shown = [f"**`{item}`**" if item in bound else f"`{item}`" for item in sorted(service.arguments(name))]
        later = "later: " if written[name].get("later") else ""
        effect = selected[0].effect if selected else written[name]["effect"]
        yield f"| `{name}` | {effect} | {', '.join(shown)} | {later}{written[name]['why']}{_declared(selected)} |\n"


def _declared(operations: Sequence[Operation]) -> str:
    """Where the answer may lead, and that others' state is reached."""
    said = ""
    for spec in operations[0].redirects if operations else ():
        below = "" if spec.path is None else f" (`{spec.path.template}`)"
        said += f" Redirects to {', '.join(f'`{pattern.text}`' for pattern in spec.to)}{below}."
    apart = operations[0].shared_state if operations else None
    if apart is not None:
        bind = f"bind {' or '.join(f'`{name}`' for name in apart)}, or " if apart else ""
        said += f" Shared state: {bind}say `shared: true`."
    return said


def _place(endpoint: Endpoint) -> str:
    default = 443 if endpoint.scheme == "https" else 80
    front = "" if endpoint.scheme == "https" else "http://"
    return f"{front}{endpoint.pattern.text}" + ("" if endpoint.port == default else f":{endpoint.port}")


def _anchor(service: ServiceDef) -> str:
    # As code hosts make one of a heading: lower case, marks dropped, spaces to hyphens.
    text = f"{service.title} ({service.name})".lower()
    return "".join(char for char in text if char.isalnum() or char in " -_").replace(" ", "-")
