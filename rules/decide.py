"""The decision. The only module that makes a `Permit` or a `TunnelPermit` (an architecture test checks).

Order of a request decision; the first check that fails gives the answer, and every check that fails denies:

 1. the sandbox is alive, the name is not one of ours, the role exists
 2. method, method overrides, upgrade, IP literals: refused whatever policy says
 3. deny rules: any that matches wins; one that binds what stands in the body has it read before anything is permitted
 4. clear text: only where a rule's operation says `scheme: http` for that host and port
 5. placeholders in the head: only in a slot that this role's credentials declare for this destination
 6. allow rules: every operation of every rule is asked; any that must see the body asks for it
 7. merge: one credential, one protocol, one result; everything else the strictest of all (RULINGS 3.1)
 8. the client's own authority (RULINGS 4.2) and placeholders beside the permitted slot
 9. approvals hold; else the permit

Nothing here depends on the order of rules: candidates are collected, sorted by rule and operation id, merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from rules.answers import answer_spec
from rules.arguments import Value, pairs
from rules.authority import foreign_authority
from rules.batches import ALONE, is_batch
from rules.captured import captured_form, takes_of
from rules.decision import (
    Decision,
    Denied,
    Held,
    NeedsBody,
    Permit,
    Restrictions,
    ResultSpec,
    TunnelDecision,
    TunnelPermit,
)
from rules.denials import Unread, Unseen, covers, deny_matches, on_host, reaches, read_deny, service_of
from rules.facts import RequestFacts, Sandbox, TunnelFacts
from rules.grants import Grant
from rules.matching import NEARNESS, Matched, NoMatch, WantsBody, match_operation, misfit
from rules.names import OWN_NAME, CredentialRef, Destination, Host
from rules.placeholders import Found, find_in_head
from rules.policy import CredentialDef, Effect, HostRules, Operation, Policy, Role, Rule
from rules.sigv4 import HEADERS, is_signed, unsignable
from rules.slots import is_slot

BASE_REQUEST_HEADERS = frozenset(
    {
        "accept",
        "accept-charset",
        "accept-encoding",
        "accept-language",
        "cache-control",
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "expect",
        "host",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-range",
        "if-unmodified-since",
        "pragma",
        "range",
        "user-agent",
    }
)
"""What may pass on every credentialed call (RULINGS 4.3); the catalogue or `headers:` names more."""

WEBSOCKET_HEADERS = frozenset(
    {"sec-websocket-key", "sec-websocket-version", "sec-websocket-protocol", "sec-websocket-extensions", "origin"}
)
"""Pass besides where the permit is for a WebSocket (RFC 6455 section 4.1)."""

GRANTED_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "accept-language",
        "cache-control",
        "host",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-range",
        "if-unmodified-since",
        "pragma",
        "range",
        "user-agent",
    }
)
"""What passes to an address that a redirect opened (RULINGS 7.4): a fixed list, whatever rules and services say."""

READ_UPLOAD = 1 << 20
"""Bytes that a read may send where neither rule nor operation says otherwise (RULINGS 4.7)."""

_FETCHES = ("GET", "HEAD")
_ARGUMENT = NEARNESS.index("argument")
_PATH = NEARNESS.index("path")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}\Z")
_METHODS_NEVER = frozenset({"TRACE", "TRACK", "CONNECT", "DEBUG", "PRI"})
# Rails and friends, OData, Google: keys and headers that turn one method into another after it was judged.
_OVERRIDE_QUERY = frozenset(
    {"_method", "$httpmethod", "$method", "x-http-method", "x-http-method-override", "x-method-override"}
)
_OVERRIDE_HEADERS = frozenset({"x-http-method", "x-http-method-override", "x-method-override"})
_EFFECTS: tuple[Effect, ...] = ("read", "disclose", "write", "execute", "mint")


def decide_tunnel(policy: Policy, sandbox: Sandbox, facts: TunnelFacts, now: float) -> TunnelDecision:
    """Return whether a tunnel to this host and port may exist. `now` is seconds since the Unix epoch. Never raises."""
    refused = _before_policy(policy, sandbox, facts.host, now)
    if isinstance(refused, Denied):
        return refused
    role = refused
    places = role.places(facts.host)
    unseen: Rule | None = None
    for rule in _denying(places):
        if not rule.operations and covers(rule, facts.host, facts.port):
            return _denied_by(rule)
        if unseen is None and reaches(rule, facts.host, facts.port):
            unseen = rule
    tunnels = [rule for place in places for rule in place.tunnels if covers(rule, facts.host, facts.port)]
    tunnels.sort(key=lambda rule: rule.id)
    protocols: frozenset[str] = frozenset()
    clear_text = False
    for place in places:
        there, clear = _inspected(place, facts)
        protocols, clear_text = protocols | there, clear_text or clear
    if (tunnels and protocols) or len(protocols) > 1:
        return Denied(reason="ambiguous-rules", message=role.message)
    if tunnels and unseen is not None:
        return _denied_by(unseen)  # in a tunnel nobody sees which operation it is: what is denied there denies it all
    if tunnels:
        first = tunnels[0]
        return TunnelPermit(
            sandbox=sandbox,
            rule=first.id,
            destination_host=facts.host.text,
            port=facts.port,
            inspected=False,
            clear_text=False,
            server_name=_names_itself(policy, facts.host),
            max_bytes=_least(rule.max_bytes for rule in tunnels),
            max_seconds=_least(rule.max_seconds for rule in tunnels),
            reason=first.tunnel_reason,
        )
    if not protocols:
        return Denied(reason="no-rule", message=role.message, remedy=_other_port(role, facts))
    return TunnelPermit(
        sandbox=sandbox,
        rule=None,
        destination_host=facts.host.text,
        port=facts.port,
        inspected=True,
        clear_text=clear_text,
        protocol=next(iter(protocols)),
        server_name=_names_itself(policy, facts.host),
    )


def _denying(places: Sequence[HostRules]) -> Sequence[Rule]:
    """Deny rules, in order of their ids."""
    return sorted((rule for place in places for rule in place.denying), key=lambda rule: rule.id)


def _inspected(place: HostRules, facts: TunnelFacts) -> tuple[frozenset[str], bool]:
    """The protocols of the rules for this host and port, and whether one of them is in clear text."""
    if place.inspected is not None:
        return place.inspected.get(facts.port, (frozenset(), False))
    found = [
        (rule.protocol, op.scheme)
        for rule in place.allowing
        for op in rule.operations
        if op.port == facts.port and on_host(op, facts.host)
    ]
    return frozenset(protocol for protocol, _ in found), any(scheme == "http" for _, scheme in found)


def _other_port(role: Role, facts: TunnelFacts) -> str:
    """What helps where rules know the host, but none this port; from policy's own words only (I29)."""
    found = sorted(
        (rule.id, op.port, op.scheme)
        for rule in role.rules_for(facts.host)
        if rule.action == "allow"
        for op in rule.operations
        if on_host(op, facts.host) and op.port != facts.port
    )
    if not found:
        return ""
    rule, port, scheme = found[0]
    return f"Nearest is {rule}: {scheme} on port {port}; the port differs."


def decide_request(policy: Policy, sandbox: Sandbox, facts: RequestFacts, now: float) -> Decision:
    """Return the verdict on one request. `now` is seconds since the Unix epoch. Never raises."""
    destination = facts.destination
    # 1, 2
    refused = _before_policy(policy, sandbox, destination.host, now)
    if isinstance(refused, Denied):
        return refused
    role = refused
    always = _refused_always(facts)
    if always is not None:
        return always
    places = role.places(destination.host)
    # 3
    unseen: list[Unseen] = []
    unread: list[tuple[Rule, Unread]] = []
    for rule in _denying(places):
        match read_deny(rule, facts, sandbox):
            case True:
                return _denied_by(rule)
            case Unseen() as one:
                unseen.append(one)
            case Unread() as other:
                unread.append((rule, other))
            case False:
                pass
    # 4
    if destination.scheme == "http" and _clear_text_unwanted(_allowing(places), destination):
        return Denied(reason="clear-text-refused", message=role.message)
    # 5
    found = find_in_head(facts)
    if found and not _in_some_slot(policy, _allowing(places), destination, found):
        return Denied(reason="placeholder-misuse", message=role.message)
    # 6
    asked = [rule for place in places for rule in place.near(facts.path.segments)]
    candidates, needs, near = _ask(asked, facts, sandbox)
    if needs is not None or (candidates and unseen):
        return _needed(([] if needs is None else [needs]) + [NeedsBody(bound=x.bound, prefix=x.prefix) for x in unseen])
    if not candidates:
        return _nothing_matched(role, _nearest(places, facts, sandbox, near), facts)
    for rule, other in unread:
        candidates = [one for one in candidates if one.op.body is not None and {service_of(one.op)} == other.services]
        if not candidates:
            return _denied_by(rule)
    if facts.upgrade is not None:
        candidates = [candidate for candidate in candidates if candidate.op.websocket]
        if not candidates:
            return Denied(reason="websocket-refused", message=role.message)
    # 7
    merged = _merge(policy, candidates, facts, found)
    if isinstance(merged, Denied):
        return merged
    restrictions, credential = merged
    answer = answer_spec([one.op for one in candidates], _allowing(places), facts, credentialed=credential is not None)
    restrictions = replace(restrictions, answer=answer)
    # 8
    refusal = foreign_authority([candidate.op for candidate in candidates], facts, credential, restrictions, found)
    if refusal is not None:
        return Denied(reason=refusal, message=role.message)
    if credential is not None and is_signed(credential) and (why := unsignable(credential, facts, now)) is not None:
        return Denied(reason="request-not-signable", remedy=why, message=role.message)
    too_large = _declared_too_large(facts, restrictions)
    if too_large:
        return Denied(reason="body-too-large", message=role.message)
    # 9
    lead = min(candidates, key=lambda candidate: (candidate.rule.credential is None, *candidate.key))
    arguments = pairs(lead.arguments)
    takes = "" if credential is None else takes_of(lead.rule, lead.op)
    holding = [candidate.rule for candidate in candidates if candidate.rule.approval is not None]
    if holding:
        groups = sorted({rule.approval for rule in holding if rule.approval is not None})
        return Held(rule=holding[0].id, operation=lead.op.name, approval=", ".join(groups), arguments=arguments)
    return Permit(
        sandbox=sandbox,
        rule=lead.rule.id,
        rules=tuple(sorted({candidate.rule.id for candidate in candidates})),
        operation=lead.op.name,
        effect=_effect(candidates, facts),
        destination=destination,
        credential=None if credential is None else credential.name,
        restrictions=restrictions,
        arguments=arguments,
        takes=takes,
        needs_state=bool(restrictions.requests)
        or restrictions.result is not None
        or restrictions.answer is not None
        or (restrictions.redirects_declared and facts.method in _FETCHES),
    )


def decide_with_grant(policy: Policy, sandbox: Sandbox, facts: RequestFacts, grant: Grant, now: float) -> Decision:
    """`decide_request` for an address that a redirect opened. Never raises.

    The grant comes first, so that a signed address gets no credential where a rule with one matches. A request that is
    not what it allows is what the rules say; where they say no, the reason is the grant's, unless a rule denies.
    """
    granted = decide_granted(policy, sandbox, facts, grant, now)
    if not isinstance(granted, Denied):
        return granted
    ruled = decide_request(policy, sandbox, facts, now)
    if isinstance(ruled, Denied) and ruled.reason != "denied-by-rule":
        return granted
    return ruled


def decide_granted(policy: Policy, sandbox: Sandbox, facts: RequestFacts, grant: Grant, now: float) -> Denied | Permit:
    """The verdict on a use of `grant`, which is for the address of `facts` and for this sandbox. Never raises."""
    refused = _before_policy(policy, sandbox, facts.destination.host, now)
    if isinstance(refused, Denied):
        return refused
    role = refused
    always = _refused_always(facts)
    if always is not None:
        return always
    for rule in _denying(role.places(facts.destination.host)):
        if deny_matches(rule, facts, sandbox):
            return _denied_by(rule)
    made_by = next((rule for rule in role.rules if rule.id == grant.rule and rule.action == "allow"), None)
    if made_by is None or not grant.expires_at > now or facts.destination.host.text != grant.host:
        return Denied(reason="redirect-ended", message=role.message)
    if facts.method not in _FETCHES or facts.has_body or facts.body or facts.upgrade is not None:
        return Denied(reason="redirect-misused", message=role.message)
    # The placeholder that the client keeps from the host which led here stands in its own slot, and goes no further.
    kept = None if grant.credential is None else policy.credentials.get(grant.credential)
    if kept is not None and grant.takes:
        kept = captured_form(kept, facts.destination, grant.takes)
    found = find_in_head(facts)
    if any(place.where in ("path", "query") for place in found):
        return Denied(reason="placeholder-misuse", message=role.message)
    restrictions = Restrictions(
        request_headers=GRANTED_HEADERS,
        response_bytes=grant.response_bytes,
        download=True,
        protocol=grant.protocol,
    )
    refusal = foreign_authority((), facts, kept, restrictions, found, signed=True)
    if refusal is not None:
        return Denied(reason=refusal, message=role.message)
    return Permit(
        sandbox=sandbox,
        rule=grant.rule,
        rules=(grant.rule,),
        operation=grant.operation,
        effect="read",
        destination=facts.destination,
        credential=None,
        restrictions=restrictions,
        needs_state=True,
        grant=grant,
    )


def decide_granted_tunnel(
    policy: Policy, sandbox: Sandbox, facts: TunnelFacts, grant: Grant, now: float
) -> TunnelDecision:
    """Whether a tunnel may exist to the host of a live grant, where the rules open none. Never raises."""
    refused = _before_policy(policy, sandbox, facts.host, now)
    if isinstance(refused, Denied):
        return refused
    for rule in _denying(refused.places(facts.host)):
        if not rule.operations and covers(rule, facts.host, facts.port):
            return _denied_by(rule)
    if facts.host.text != grant.host or facts.port != 443 or not grant.expires_at > now:
        return Denied(reason="no-rule", message=refused.message)
    return TunnelPermit(
        sandbox=sandbox,
        rule=None,
        destination_host=facts.host.text,
        port=facts.port,
        inspected=True,
        clear_text=False,
        protocol=grant.protocol,
        server_name=_names_itself(policy, facts.host),
    )


# --- 1, 2: before policy ---


def _before_policy(policy: Policy, sandbox: Sandbox, host: Host, now: float) -> Denied | Role:
    if not sandbox.expires_at > now:
        return Denied(reason="sandbox-ended")
    if host.text == OWN_NAME or host.text.endswith("." + OWN_NAME):
        return Denied(reason="own-name-refused")
    role = policy.roles.get(sandbox.role)
    if role is None:
        return Denied(reason="unknown-role")
    if host.is_literal and host.text not in policy.destinations:
        return Denied(reason="address-literal-refused", message=role.message)
    return role


def _names_itself(policy: Policy, host: Host) -> bool:
    """Whether a TLS handshake for `host` must carry a server name."""
    if host.is_literal:
        return False  # RFC 6066 section 3: an address is no server name, and clients send none
    destination = policy.destinations.get(host.text)
    return destination is None or destination.sni == "required"


def _refused_always(facts: RequestFacts) -> Denied | None:
    if not _METHOD.match(facts.method) or facts.method in _METHODS_NEVER:
        return Denied(reason="method-refused")
    if any(name in _OVERRIDE_HEADERS for name, _ in facts.headers):
        return Denied(reason="method-refused")
    if any(name.strip().lower() in _OVERRIDE_QUERY for name, _ in facts.query.pairs):
        return Denied(reason="query-method-override")
    if facts.upgrade is not None and facts.upgrade.strip().lower() != "websocket":
        return Denied(reason="upgrade-refused")
    return None


def _denied_by(rule: Rule) -> Denied:
    return Denied(reason="denied-by-rule", rule=rule.id, message=rule.message, quiet=rule.quiet)


# --- 4, 5: clear text and placeholders of the head ---


def _allowing(places: Sequence[HostRules]) -> Iterable[Rule]:
    """Every allow rule that inspects, in no order."""
    return chain.from_iterable(place.allowing for place in places)


def _clear_text_unwanted(allowing: Iterable[Rule], destination: Destination) -> bool:
    """True if the host is known over TLS only: saying so helps more than `no-rule`."""
    reached = [op for rule in allowing for op in rule.operations if on_host(op, destination.host)]
    return bool(reached) and not any(op.scheme == "http" and op.port == destination.port for op in reached)


def _in_some_slot(policy: Policy, allowing: Iterable[Rule], destination: Destination, found: Sequence[Found]) -> bool:
    allowing = tuple(allowing)
    names = {rule.credential for rule in allowing if rule.credential is not None}
    usable = [policy.credentials[name] for name in names if name in policy.credentials]
    slots = [credential for credential in usable if credential.binds(destination)]
    for rule in allowing:
        known = None if rule.credential is None else policy.credentials.get(rule.credential)
        if known is not None:
            taking = {takes_of(rule, op) for op in rule.operations if on_host(op, destination.host)} - {""}
            slots += [captured_form(known, destination, takes) for takes in taking]
    return all(any(is_slot(credential, place) for credential in slots) for place in found)


# --- 6: allow rules ---


def _needed(needs: Sequence[NeedsBody]) -> NeedsBody:
    """One that must see the end of the body makes it needed whole."""
    return NeedsBody(bound=max(one.bound for one in needs), prefix=all(one.prefix for one in needs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    rule: Rule
    op: Operation
    arguments: dict[str, Value]

    @property
    def key(self) -> tuple[str, str]:
        return (self.rule.id, self.op.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Near:
    depth: int
    rule: Rule
    op: Operation
    argument: str | None = None
    """The bound argument that does not fit, where that is what differs."""


def _ask(
    allowing: Sequence[Rule], facts: RequestFacts, sandbox: Sandbox
) -> tuple[list[_Candidate], NeedsBody | None, _Near | None]:
    if facts.body is None and not facts.has_body:
        facts = replace(facts, body=b"")  # nothing to read: judge the empty body at once
    candidates: list[_Candidate] = []
    needs: NeedsBody | None = None
    near: _Near | None = None
    wrong: str | None = None
    for rule in allowing:
        for op in rule.operations:
            match match_operation(op, facts):
                case Matched(arguments=arguments):
                    wrong = misfit(rule, sandbox, arguments, unbound=op.unbound)
                    if wrong is None:
                        candidates.append(_Candidate(rule=rule, op=op, arguments=arguments))
                        continue
                    depth = _ARGUMENT
                case WantsBody(bound=bound, prefix=prefix):
                    # One that must see the end of the body makes it needed whole.
                    needs = NeedsBody(
                        bound=max(bound, needs.bound if needs else 0), prefix=prefix and (needs is None or needs.prefix)
                    )
                    continue
                case NoMatch(near=name):
                    wrong = None
                    depth = NEARNESS.index(name) if name in NEARNESS else 0
            if near is None or (-depth, rule.id, op.id) < (-near.depth, near.rule.id, near.op.id):
                near = _Near(depth=depth, rule=rule, op=op, argument=wrong if depth == _ARGUMENT else None)
    candidates.sort(key=lambda candidate: candidate.key)
    return candidates, needs, near


def _nearest(places: Sequence[HostRules], facts: RequestFacts, sandbox: Sandbox, near: _Near | None) -> _Near | None:
    """`near`, or what comes nearer of the rules that were not asked: their paths begin otherwise.

    In order of their ids; the first that fails at its path alone is the nearest that there can be among them.
    """
    if near is not None and near.depth > _PATH:
        return near
    for place in places:
        for rule in place.allowing:
            _, _, one = _ask([rule], facts, sandbox)
            if one is not None and (
                near is None or (-one.depth, one.rule.id, one.op.id) < (-near.depth, near.rule.id, near.op.id)
            ):
                near = one
            if one is not None and one.depth == _PATH:
                break
    return near


def _nothing_matched(role: Role, near: _Near | None, facts: RequestFacts) -> Denied:
    """Name the nearest permitted operation, from policy's own words only (I29)."""
    if near is None or near.depth < NEARNESS.index("port"):
        return Denied(reason="no-rule", message=role.message)
    name = NEARNESS[near.depth]
    # What a protocol's matcher recognises is told by name: its paths say nothing.
    stated = " ".join((*near.op.methods, ", ".join(pattern.template for pattern in near.op.paths[:3])))
    shown = stated if near.op.head is None else near.op.name
    if name in ("port", "scheme"):
        shown = f"{near.op.scheme} on port {near.op.port}"
    differs = "it cannot be judged yet" if name == "later" else f"the {name} differs"
    if near.argument is not None:
        differs = f"{near.argument} must be {' or '.join(near.rule.bind[near.argument][:6])}"
    remedy = f"Nearest is {near.rule.id}: {shown}; {differs}."
    if is_batch(facts):
        remedy = f"{ALONE} {remedy}"
    reason = "body-not-judged" if name == "body" else "no-rule"
    return Denied(reason=reason, message=role.message, remedy=remedy[:400])


# --- 7: merge ---


def _merge(
    policy: Policy, candidates: Sequence[_Candidate], facts: RequestFacts, found: Sequence[Found]
) -> tuple[Restrictions, CredentialDef | None] | Denied:
    rules = list({candidate.rule.id: candidate.rule for candidate in candidates}.values())
    names: set[CredentialRef] = {rule.credential for rule in rules if rule.credential is not None}
    results = {rule.result_keep for rule in rules if rule.result_keep is not None}
    protocols = {rule.protocol for rule in rules}
    if len(names) > 1 or len(results) > 1 or len(protocols) > 1:
        return Denied(reason="ambiguous-rules")
    credential: CredentialDef | None = None
    if names:
        credential = policy.credentials.get(names.pop())
        if credential is None:
            return Denied(reason="credential-unavailable")
        taking = {takes_of(candidate.rule, candidate.op) for candidate in candidates if candidate.rule.credential}
        if len(taking) > 1:
            return Denied(reason="ambiguous-rules")
        if takes := taking.pop():
            # Without a captured token there is no authority: a client asks so where it can get one.
            credential = captured_form(credential, facts.destination, takes) if found else None
        if credential is not None and not credential.binds(facts.destination):
            return Denied(reason="clear-text-refused" if facts.destination.scheme == "http" else "no-rule")
    headers: frozenset[str] | None = None
    for candidate in candidates:
        named = _header_allowlist(candidate, with_credential=credential is not None, upgrade=facts.upgrade is not None)
        if named is not None:
            if credential is not None and is_signed(credential):
                named |= HEADERS
            headers = named if headers is None else headers & named
    ops = [candidate.op for candidate in candidates]
    return (
        Restrictions(
            request_headers=headers,
            response_headers=frozenset.intersection(*(frozenset(op.extra_response_headers) for op in ops)),
            request_bytes=_least(_upload_bound(candidate) for candidate in candidates),
            response_bytes=_least(rule.response_bytes for rule in rules),
            requests=tuple(sorted((rule.id, *rule.requests) for rule in rules if rule.requests is not None)),
            result=ResultSpec(keep=results.pop()) if results else None,
            client_auth=credential is None and all(rule.client_auth for rule in rules),
            placeholders_inert=all(op.placeholders_inert for op in ops),
            websocket=facts.upgrade is not None,
            redirects=tuple(op.redirects for op in ops) if all(op.redirects for op in ops) else (),
            download=all(op.download for op in ops),
            protocol=protocols.pop(),
            challenge=credential is not None and all(takes_of(one.rule, one.op) for one in candidates),
        ),
        credential,
    )


def _header_allowlist(candidate: _Candidate, *, with_credential: bool, upgrade: bool) -> frozenset[str] | None:
    rule, op = candidate.rule, candidate.op
    if rule.headers is None and not (with_credential and rule.credential is not None):
        return None
    named = {name.lower() for name in (*op.extra_request_headers, *op.request_headers, *(rule.headers or ()))}
    return BASE_REQUEST_HEADERS | named | (WEBSOCKET_HEADERS if upgrade else frozenset())


def _upload_bound(candidate: _Candidate) -> int | None:
    """What the rule says, else the operation, else the default of a read; None: only the gateway's own bounds."""
    if candidate.rule.request_bytes is not None:
        return candidate.rule.request_bytes
    if candidate.op.request_bytes is not None:
        return candidate.op.request_bytes
    return READ_UPLOAD if candidate.op.effect == "read" else None


def _least[Number: (int, float)](values: Iterable[Number | None]) -> Number | None:
    return min((value for value in values if value is not None), default=None)


def _effect(candidates: Sequence[_Candidate], facts: RequestFacts) -> Effect:
    effects = [candidate.op.effect for candidate in candidates]
    if facts.upgrade is not None:
        effects.append("write")  # what goes through a WebSocket is not judged (RULINGS 7.5)
    return max(effects, key=_EFFECTS.index)


def _declared_too_large(facts: RequestFacts, restrictions: Restrictions) -> bool:
    if restrictions.request_bytes is None:
        return False
    sizes = [int(value) for value in facts.header("content-length") if value.isascii() and value.isdigit()]
    if isinstance(facts.body, bytes):
        sizes.append(len(facts.body))  # of a partial one what is known; the rest is bounded as it streams
    return any(size > restrictions.request_bytes for size in sizes)
