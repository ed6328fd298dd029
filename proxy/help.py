"""The help host `http://exeat.internal/`: constants, and the asking sandbox's own data. Never a token.

    /                 where to start           /allowed          what may I do (this sandbox's role)
    /ca.pem           our root alone           /why              my newest refusals
    /bundle.pem       system roots and ours    /why/<request id> one of my refusals, explained
    /env.sh           variables for clients    /reasons/<code>   what a reason means
    /doctor.sh        what holds in here

    /operations       what may I do, as operations with the schemas of their inputs; /operations/<name> shows one

    POST /doctor               what the doctor found, as a claim (wire/doctor.py)
    POST /operations/<name>    run one, by the lane (proxy/explicit.py)
    POST /access               ask for what was refused: on record for a person, nothing is granted
    POST /mcp                  the same as tools (proxy/mcp.py)

Rules (RULINGS 8.2): only on an identified channel, exactly this name, ports 80 and 443; never resolved or dialled;
GET and HEAD without effects; POST where a page says so, with application/json, no foreign Origin and a bound; another
sandbox's ids are as unknown as ones that never were (404).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy import explicit
from proxy.answers import page
from proxy.doctor import DOCTOR
from proxy.gate import declared_length
from proxy.identity import Identified, current
from proxy.ports import Clock, Directory, DirectoryUnavailable, Snapshot
from proxy.recent import RecentRefusals, RefusalNote
from rules.explicit import MAX_INPUT, Offer, Stated, Unstated, offers, state
from rules.facts import RequestFacts, Sandbox
from rules.names import DEFAULT_PORTS, OWN_NAME, Owner
from rules.operations.media import media_type
from rules.operations.strict_json import InvalidJson, load
from rules.policy import Operation, Rule
from rules.reasons import REASONS, reason
from wire.control import Claim
from wire.doctor import CLAIM_SECONDS, MAX_CLAIM_BYTES, ClaimInvalid, parse_claim
from wire.refusals import Rendered

MAX_CLAIMANTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpTexts:
    """What the worker was given at boot. `environment` values hold `{ca}`, `{bundle}` and `{proxy}` as places."""

    ca_pem: str
    bundle_pem: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpRefused:
    """Not a page: a reason code for the gate to record. `remedy` is a sentence of ours instead of the reason's own."""

    reason: str
    remedy: str = ""


def is_help(facts: RequestFacts) -> bool:
    """True for exactly the help host on its two ports."""
    destination = facts.destination
    return destination.host.text == OWN_NAME and destination.port == DEFAULT_PORTS[destination.scheme]


class HelpHost:
    """Answers requests to the help host."""

    def __init__(
        self,
        *,
        texts: HelpTexts,
        directory: Directory,
        recent: RecentRefusals,
        clock: Clock,
        claim: Callable[[Claim], None] = lambda _: None,
    ) -> None:
        """`claim` tells the vault what a sandbox says of itself."""
        self._claim = claim
        self._claims: OrderedDict[Owner, float] = OrderedDict()
        """Boot-clock time of each sandbox's last claim."""
        self._wishes: OrderedDict[Owner, float] = OrderedDict()
        """The same of its last request for access."""
        self._texts = texts
        # Once for all: a hundred clients that do not read what they asked for hold it a hundred times otherwise.
        self._ca, self._bundle = texts.ca_pem.encode(), texts.bundle_pem.encode()
        self._directory = directory
        self._recent = recent
        self._clock = clock

    def answer(self, who: Identified, facts: RequestFacts) -> Rendered | HelpRefused:
        """The page for one request of an identified sandbox."""
        if facts.method not in ("GET", "HEAD") or facts.path.segments in (("doctor",), ("mcp",), ("access",)):
            return HelpRefused(reason="method-refused")
        found = self._asker(who)
        if isinstance(found, HelpRefused):
            return found
        page = self._page(facts.path.segments, *found, _wants_json(facts))
        return page if page is not None else HelpRefused(reason="not-found")

    def offered(self, who: Identified) -> tuple[Offer, ...] | HelpRefused:
        """The operations that may be stated by an identified sandbox."""
        found = self._asker(who)
        return found if isinstance(found, HelpRefused) else offers(found[1].policy, found[0])

    def stated(self, who: Identified, name: str, raw: bytes) -> Stated | HelpRefused:
        """The request that an input of the operation `name` states; nothing is judged by that."""
        found = self._asker(who)
        if isinstance(found, HelpRefused):
            return found
        made = state(found[1].policy, found[0], name, raw)
        if isinstance(made, Unstated):
            return HelpRefused(reason="not-found" if made.unknown else "input-refused", remedy=made.problem)
        return made

    def why(self, who: Identified, request_id: str) -> Any:
        """This sandbox's refusal `request_id` as a JSON value (empty: its newest ones), None where it has none."""
        box = who.sandbox
        if not request_id:
            return [_note(note) for note in self._recent.newest(box.tenant, box.id)]
        note = self._recent.find(box.tenant, box.id, request_id)
        return None if note is None else _note(note)

    def _asker(self, who: Identified) -> tuple[Sandbox, Snapshot] | HelpRefused:
        try:
            snapshot = self._directory.snapshot()
        except DirectoryUnavailable:
            return HelpRefused(reason="policy-unavailable")
        registered = current(who, snapshot, self._clock.wall())
        return HelpRefused(reason="sandbox-ended") if registered is None else (registered.sandbox, snapshot)

    def takes(self, facts: RequestFacts) -> int | HelpRefused:
        """How many bytes of body a POST may have here; not called for other methods."""
        match facts.path.segments:
            case ("doctor",):
                bound, wrong = MAX_CLAIM_BYTES, "claim-refused"
            case ("operations", _) | ("mcp",) | ("access",):
                bound, wrong = MAX_INPUT, "input-refused"
            case _:
                return HelpRefused(reason="method-refused")
        if declared_length(facts) > bound:
            return HelpRefused(reason="body-too-large")
        kinds, origins = facts.header("content-type"), facts.header("origin")
        if [media_type(kind) for kind in kinds] != ["application/json"]:
            # A form or a text is what a page elsewhere could send.
            return HelpRefused(reason=wrong, remedy="Send it with the header Content-Type: application/json.")
        if any(origin not in (f"http://{OWN_NAME}", f"https://{OWN_NAME}") for origin in origins):
            return HelpRefused(reason=wrong)
        return bound

    def wished(self, who: Identified, raw: bytes) -> RefusalNote | HelpRefused:
        """The refusal of an identified sandbox that the JSON input `raw` asks to be lifted: `{"request_id": ...}`."""
        try:
            value = load(raw, depth=2, nodes=8)
        except InvalidJson:
            value = None
        if not isinstance(value, dict) or value.keys() != {"request_id"} or not isinstance(value["request_id"], str):
            return HelpRefused(reason="input-refused", remedy='Send {"request_id": "req_..."}, as the refusal said it.')
        found = self._asker(who)
        if isinstance(found, HelpRefused):
            return found
        box = found[0]
        note = self._recent.find(box.tenant, box.id, value["request_id"])
        if note is None:
            return HelpRefused(reason="not-found", remedy="No refusal of this sandbox has that id: see /why.")
        return note if self._in_turn(self._wishes, box) else HelpRefused(reason="limit-reached")

    def _in_turn(self, last: OrderedDict[Owner, float], box: Sandbox) -> bool:
        """Whether CLAIM_SECONDS went by since the sandbox last did this; if so, it does it now."""
        owner, now = (box.tenant, box.id), self._clock.boot()
        before = last.get(owner)
        if before is not None and now - before < CLAIM_SECONDS:
            return False
        last[owner] = now
        last.move_to_end(owner)
        while len(last) > MAX_CLAIMANTS:
            last.popitem(last=False)
        return True

    def posted(self, who: Identified, body: bytes) -> Rendered | HelpRefused:
        """Take a claim of an identified sandbox: told to the vault as codes of ours, nothing else."""
        found = self._asker(who)
        if isinstance(found, HelpRefused):
            return found
        try:
            said = parse_claim(body)
        except ClaimInvalid:
            return HelpRefused(reason="claim-refused")
        box = found[0]
        if not self._in_turn(self._claims, box):
            return HelpRefused(reason="limit-reached")
        self._claim(
            Claim(
                tenant=box.tenant,
                sandbox=box.id,
                epoch=box.epoch,
                token=who.evidence.token,
                channel_key=who.evidence.channel_key,
                peer=who.evidence.peer,
                holds=said.holds,
                fails=said.fails,
                unknown=said.unknown,
            )
        )
        return _json({"boundary": "claimed", "arms": False})

    def _page(self, segments: tuple[str, ...], sandbox: Sandbox, snapshot: Snapshot, as_json: bool) -> Rendered | None:
        constant: dict[tuple[str, ...], Callable[[], Rendered]] = {
            ("",): lambda: _text(_START),
            ("ca.pem",): lambda: page(self._ca, "application/x-pem-file"),
            ("bundle.pem",): lambda: page(self._bundle, "application/x-pem-file"),
            ("env.sh",): lambda: page(env_script(self._texts.environment).encode(), "text/x-shellscript"),
            ("doctor.sh",): lambda: page(DOCTOR.encode(), "text/x-shellscript"),
            ("reasons",): lambda: _json({code: row.title for code, row in REASONS.items()}),
        }
        if segments in constant:
            return constant[segments]()
        match segments:
            case ("allowed",):
                listed = allowed(sandbox, snapshot)
                return _json(listed) if as_json else _text(_allowed_text(listed))
            case ("operations",):
                return _json(explicit.listing(sandbox, snapshot))
            case ("operations", name):
                offer = explicit.one(sandbox, snapshot, name)
                return None if offer is None else _json(offer)
            case ("why",):
                return _json([_note(note) for note in self._recent.newest(sandbox.tenant, sandbox.id)])
            case ("why", request_id):
                note = self._recent.find(sandbox.tenant, sandbox.id, request_id)
                return None if note is None else _json(_note(note))
            case ("reasons", code) if code in REASONS:
                row = reason(code)
                return _json(
                    {
                        "type": row.type,
                        "reason": row.code,
                        "status": row.status,
                        "title": row.title,
                        "remedy": row.remedy,
                        "retryable": row.retryable,
                        "about": row.doc,
                    }
                )
            case _:
                return None


def allowed(sandbox: Sandbox, snapshot: Snapshot) -> dict[str, Any]:
    """What the sandbox's role permits and denies, from policy alone, as a JSON value."""
    role = snapshot.policy.roles.get(sandbox.role)
    rules = role.rules if role is not None else ()
    return {
        "sandbox": sandbox.id,
        "role": sandbox.role,
        "expires_at": int(sandbox.expires_at),
        "policy": snapshot.policy.digest,
        "deny": [_deny(rule) for rule in rules if rule.action == "deny"],
        "allow": [_allow(rule, snapshot) for rule in rules if rule.action == "allow"],
    }


def env_script(environment: Mapping[str, str]) -> str:
    """A POSIX script that fetches both certificate files and exports what clients read.

    It knows no token: `{proxy}` becomes the proxy URL that the shell already has, and a value that spells an address
    of its own into a proxy variable is left out.
    """
    lines = [_SCRIPT]
    for name, value in sorted(environment.items()):
        if not name.replace("_", "").isalnum() or ("proxy" in name.lower() and "://" in value):
            continue
        quoted = "".join(f"\\{char}" if char in '\\"$`' else char for char in value)
        quoted = quoted.replace("{ca}", "$exeat_dir/ca.pem").replace("{bundle}", "$exeat_dir/bundle.pem")
        quoted = quoted.replace("{proxy}", "$exeat_proxy")
        lines.append(f'export {name}="{quoted}"')
    return "\n".join(lines) + "\n"


_START = """Exeat lets this sandbox out, for what its policy permits.

  http://exeat.internal/allowed           what may I do (add `Accept: application/json` for JSON)
  http://exeat.internal/operations        the same as operations with inputs: POST an input to /operations/<name>
  http://exeat.internal/mcp               the same as tools, for clients that speak MCP
  http://exeat.internal/why               my newest refusals; /why/<request id> explains one
  http://exeat.internal/access            POST {"request_id": "req_..."}: ask a person for what was refused
  http://exeat.internal/reasons/<code>    what a reason code means
  http://exeat.internal/env.sh            variables that make clients trust the gateway
  http://exeat.internal/doctor.sh         what holds in this sandbox, client by client: curl -fsS ... | sh
  http://exeat.internal/ca.pem            the gateway's root certificate
  http://exeat.internal/bundle.pem        the system's roots and the gateway's

Credentials in the environment are placeholders: send them to the host they are for, as if they were real. The broker
puts the real one in. A refusal names its reason, what would help, and whether a retry makes sense.
"""

_SCRIPT = """# Use: eval "$(curl -fsS http://exeat.internal/env.sh)"
exeat_dir="${EXEAT_DIR:-${TMPDIR:-/tmp}/exeat-$(id -u)}"
exeat_proxy="${https_proxy:-${HTTPS_PROXY:-http://127.0.0.1:3128}}"
umask 077
mkdir -p "$exeat_dir"
for exeat_file in ca.pem bundle.pem; do
  if command -v curl >/dev/null 2>&1; then
    curl -fsS -o "$exeat_dir/$exeat_file" "http://exeat.internal/$exeat_file"
  else
    wget -q -O "$exeat_dir/$exeat_file" "http://exeat.internal/$exeat_file"
  fi
done
unset exeat_file"""


def _deny(rule: Rule) -> dict[str, Any]:
    hosts = sorted({pattern.text for pattern in (*rule.hosts, *(p for op in rule.operations for p in op.hosts))})
    shown: dict[str, Any] = {"rule": rule.id, "hosts": hosts}
    if rule.operations:
        shown["operations"] = [operation.id for operation in rule.operations]
    if rule.message:
        shown["message"] = rule.message
    return shown


def _allow(rule: Rule, snapshot: Snapshot) -> dict[str, Any]:
    shown: dict[str, Any] = {"rule": rule.id}
    if rule.tunnel:
        shown |= {"tunnel": True, "hosts": [pattern.text for pattern in rule.hosts], "port": rule.port or 443}
    else:
        shown["operations"] = [_operation(operation) for operation in rule.operations]
    if rule.bind:
        shown["with"] = {name: list(values) for name, values in rule.bind.items()}
    definition = snapshot.policy.credentials.get(rule.credential) if rule.credential is not None else None
    if definition is not None:
        # The variable's name; its value is already in the sandbox and never served.
        variables = [spec.env for _, spec in definition.placeholders]
        shown["credential"] = {"placeholder_in": ", ".join(variables) or "nothing", "slot": definition.slot.where}
    if rule.approval:
        shown["approval"] = rule.approval
    if rule.requests:
        shown["requests"] = {"count": rule.requests[0], "seconds": rule.requests[1]}
    if rule.message:
        shown["message"] = rule.message
    if rule.shared:
        shown["shared"] = True
    return shown


def _operation(operation: Operation) -> dict[str, Any]:
    port = "" if operation.port == DEFAULT_PORTS[operation.scheme] else f":{operation.port}"
    head = operation.head
    # What a protocol's matcher recognises lies below its base; its paths alone would promise too much.
    paths = [path.template for path in operation.paths] if head is None else [head.prefix + "/"]
    shown: dict[str, Any] = {
        "operation": operation.id,
        "effect": operation.effect,
        "methods": list(operation.methods),
        "urls": [f"{operation.scheme}://{host.text}{port}{path}" for host in operation.hosts for path in paths],
    }
    if head is not None:
        said = (name if value is True else str(value) for name, value in sorted(head.params.items()))
        shown["only"] = " ".join((head.matcher, *said))
    if operation.redirects:
        shown["redirects"] = [spec.text for spec in operation.redirects]
    return shown


def _allowed_text(listed: Mapping[str, Any]) -> str:
    lines = [f"role {listed['role']}", ""]
    for rule in listed["deny"]:
        lines.append(f"deny   {rule['rule']}: {', '.join(rule['hosts'])}")
    for rule in listed["allow"]:
        if "operations" not in rule:
            lines.append(f"allow  {rule['rule']}: tunnel to {', '.join(rule['hosts'])} port {rule['port']}")
            continue
        extra = [f"placeholder in {rule['credential']['placeholder_in']}"] if "credential" in rule else []
        extra += [f"needs approval from {rule['approval']}"] if "approval" in rule else []
        lines.append(f"allow  {rule['rule']}" + (f" ({'; '.join(extra)})" if extra else ""))
        for operation in rule["operations"]:
            methods = "|".join(operation["methods"])
            only = f" only as {operation['only']}" if "only" in operation else ""
            lines += [f"         {operation['effect']:8} {methods} {url}{only}" for url in operation["urls"]]
    return "\n".join(lines) + "\n"


def _note(note: RefusalNote) -> dict[str, Any]:
    row = reason(note.reason)
    shown: dict[str, Any] = {
        "request_id": note.request_id,
        "at": int(note.at),
        "reason": note.reason,
        "title": row.title,
        "remedy": note.remedy or row.remedy,
        "about": row.doc,
        "retryable": row.retryable,
    }
    if note.host:
        scheme = f"{note.scheme}://" if note.scheme else ""
        shown["request"] = f"{note.method} {scheme}{note.host}:{note.port}{note.path}"
    for name in ("rule", "message", "ticket"):
        if getattr(note, name):
            shown[name] = getattr(note, name)
    return shown


def _wants_json(facts: RequestFacts) -> bool:
    return any("application/json" in value for value in facts.header("accept"))


def _json(value: Any) -> Rendered:
    return page(json.dumps(value, indent=2).encode() + b"\n", "application/json")


def _text(text: str) -> Rendered:
    return page(text.encode(), "text/plain; charset=utf-8")
