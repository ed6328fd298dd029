"""What takes two rules or two files to see: contradictions, unenforced credentials, conflicts. All are load errors.

1. A credential goes only where its own file binds it: every host and port of a rule that uses it, over TLS (T24). So
   do tokens that its calls bring, unless the built-in catalogue says where they go: a service file is policy's.
2. Every host that a credential is bound to is covered by a rule that uses it (I17, B100).
3. One place, one lane: a tunnel allows no other rule for its host and port, and protocols do not mix (RULINGS 3.2).
   Nor may a deny rule name operations there: nobody would see them.
4. Two rules that can permit the same request name the same credential and the same result (RULINGS 3.1).
5. The placeholders of one role use different variables.
6. A storage host of many owners is not permitted unless the rule says whose place is meant (rules/storage.py).
7. Only a warning: an allow rule whose every place a deny rule covers whole, because deny wins whatever stands nearer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rules.captured import takes_of
from rules.catalogue import builtin_services
from rules.credentials_file import WrittenCredential
from rules.denials import service_of
from rules.names import Destination, Host
from rules.policy import CredentialDef, HostPattern, Operation, Rule
from rules.policy_file import WrittenRole, WrittenRule
from rules.reader import Problems
from rules.storage import says_whose, shared_storage


def check_credentials(
    written: Mapping[str, WrittenCredential],
    credentials: Mapping[str, CredentialDef],
    roles: Iterable[WrittenRole],
    problems: Problems,
) -> dict[str, CredentialDef]:
    """Checks 1 and 2. Return the credentials with the catalogue's hosts narrowed to what rules cover."""
    covered: dict[str, set[tuple[str, int]]] = {name: set() for name in credentials}
    for role in roles:
        for entry in role.rules:
            with problems.collecting():
                _check_use(entry, credentials, covered)
    final: dict[str, CredentialDef] = {}
    for name, credential in credentials.items():
        source = written[name]
        bound = credential.authorities or ()
        if not covered[name]:
            source.node.warn(f"no rule uses credential {name}")
        elif source.from_catalogue:
            bound = tuple(place for place in bound if place in covered[name])
        else:
            for host, port in bound:
                if (host, port) not in covered[name]:
                    source.node.child("hosts").note(
                        f"credential {name} is bound to {host}:{port}, but no rule that uses it covers that host"
                    )
        final[name] = _narrowed(credential, bound)
    return final


def _narrowed(credential: CredentialDef, bound: tuple[tuple[str, int], ...]) -> CredentialDef:
    texts = {host for host, _ in bound}
    return replace(credential, hosts=tuple(host for host in credential.hosts if host.text in texts), authorities=bound)


def _check_use(
    entry: WrittenRule, credentials: Mapping[str, CredentialDef], covered: Mapping[str, set[tuple[str, int]]]
) -> None:
    rule = entry.rule
    if rule.credential is None:
        return
    node = entry.node.child("credential")
    credential = credentials.get(rule.credential)
    if credential is None:
        known = ", ".join(sorted(credentials)) or "none"
        node.fail(f"{rule.id}: credentials.yaml has no credential {rule.credential}; known: {known}")
    for op in rule.operations:
        if takes_of(rule, op) and service_of(op) in builtin_services():
            continue  # only a captured token goes there, and who says where is the catalogue, not an editor of policy
        for pattern in op.hosts:
            if pattern.kind == "template" and op.scheme == "https":
                # The credential's own exact hosts decide which of them it goes to; every other call is refused.
                meant = [place for place in credential.authorities or () if _is_at(pattern, op.port, place)]
                if not meant:
                    node.fail(
                        f"{rule.id}: {op.id} goes to {pattern.text}:{op.port}; list the hosts that credential "
                        f"{credential.name} may go to under hosts: in credentials.yaml"
                    )
                covered[rule.credential].update(meant)
                continue
            if pattern.kind != "exact":
                node.fail(f"{rule.id}: a credential is never used under a wildcard ({pattern.text})")
            if op.scheme == "http":
                node.fail(f"{rule.id}: a credential is never sent over plain HTTP ({pattern.suffix}:{op.port})")
            host = Host.of(pattern.suffix)
            if not credential.binds(Destination("https", host, op.port)):
                where = f"{pattern.suffix}:{op.port}"
                node.fail(f"{rule.id}: credential {credential.name} is not bound to {where}, where {op.id} goes")
            covered[rule.credential].add((pattern.suffix, op.port))


def _is_at(pattern: HostPattern, port: int, place: tuple[str, int]) -> bool:
    host, its_port = place
    return its_port == port and pattern.matches(Host.of(host))


def check_places(role: WrittenRole, problems: Problems) -> None:
    """Check 3: tunnels against every other rule, and protocols against each other."""
    allowing = [entry for entry in role.rules if entry.rule.action == "allow"]
    denying = [entry for entry in role.rules if entry.rule.action == "deny" and entry.rule.operations]
    for entry, deny in itertools.product((entry for entry in allowing if entry.rule.tunnel), denying):
        tunnelled = _places(entry.rule)[0]
        if any(_meets((pattern, deny.rule.port), tunnelled) for op in deny.rule.operations for pattern in op.hosts):
            with problems.collecting():
                entry.node.fail(
                    f"{entry.rule.id}: in a tunnel to {entry.rule.hosts[0].suffix}:{entry.rule.port} nobody sees what "
                    f"{deny.rule.id} denies there; deny the whole host, or inspect it"
                )
    if not any(entry.rule.tunnel for entry in allowing) and len({entry.rule.protocol for entry in allowing}) < 2:
        return
    for one, other in _neighbours(allowing):
        tunnel, beside = (one, other) if one.rule.tunnel else (other, one)
        if tunnel.rule.tunnel:
            place = next((place for place in _places(beside.rule) if _meets(place, _places(tunnel.rule)[0])), None)
            if place is not None:
                with problems.collecting():
                    tunnel.node.fail(
                        f"{tunnel.rule.id}: a tunnel allows no other rule for {tunnel.rule.hosts[0].suffix}:"
                        f"{tunnel.rule.port}, but {beside.rule.id} covers it"
                    )
        elif one.rule.protocol != other.rule.protocol:
            pairs = itertools.product(_places(one.rule), _places(other.rule))
            if any(_meets(left, right) for left, right in pairs):
                with problems.collecting():
                    other.node.fail(f"{one.rule.id} and {other.rule.id} share a host and differ in protocol:")


def check_storage(role: WrittenRole, problems: Problems) -> None:
    """Check 6, of rules that name their hosts themselves; services bind the owner as an argument."""
    for entry in role.rules:
        rule = entry.rule
        if rule.action != "allow":
            continue
        own = [op for op in rule.operations if op.name == rule.id]
        open_hosts = [pattern for op in own if not says_whose(op) for pattern in op.hosts]
        open_hosts += [pattern for op in own for pattern in op.hosts if pattern.kind != "exact"]
        open_hosts += rule.hosts if rule.tunnel else ()
        shared = next((pattern for pattern in open_hosts if shared_storage(pattern)), None)
        if shared is not None:
            with problems.collecting():
                entry.node.fail(
                    f"{rule.id}: at {shared.text} anybody can keep things, and read what is sent there; name the "
                    "bucket as the first segment of each path, use a service that binds it, or let a download lead "
                    "there (redirects: in a service file)"
                )


def check_ambiguity(role: WrittenRole, problems: Problems) -> None:
    """Check 4, where it can be proven; what cannot is `ambiguous-rules` at run time."""
    allowing = [entry for entry in role.rules if entry.rule.action == "allow" and entry.rule.operations]
    if len({entry.rule.credential for entry in allowing} - {None}) < 2 and (
        len({entry.rule.result_keep for entry in allowing} - {None}) < 2
    ):
        return
    for one, other in _neighbours(allowing):
        left, right = one.rule, other.rule
        credentials = left.credential is not None and right.credential is not None
        results = left.result_keep is not None and right.result_keep is not None
        differ = (credentials and left.credential != right.credential) or (
            results and left.result_keep != right.result_keep
        )
        if not differ or _bound_apart(left, right):
            continue
        shared = next((a for a, b in itertools.product(left.operations, right.operations) if _same_request(a, b)), None)
        if shared is not None:
            what = "credential" if credentials and left.credential != right.credential else "result"
            with problems.collecting():
                other.node.fail(f"{left.id} and {right.id} both permit {shared.id} with a different {what}")


def check_placeholders(role: WrittenRole, credentials: Mapping[str, CredentialDef], problems: Problems) -> None:
    """Check 5."""
    seen: dict[str, str] = {}
    for entry in role.rules:
        name = entry.rule.credential
        credential = credentials.get(name) if name is not None else None
        if credential is None:
            continue
        for _, spec in credential.placeholders:
            if seen.setdefault(spec.env, credential.name) != credential.name:
                with problems.collecting():
                    entry.node.fail(
                        f"{entry.rule.id}: credentials {seen[spec.env]} and {credential.name} "
                        f"both put their placeholder in {spec.env}"
                    )


# --- overlaps ---


def _neighbours(entries: Sequence[WrittenRule]) -> Iterator[tuple[WrittenRule, WrittenRule]]:
    """Each pair that may speak about the same host, the earlier one first: all others need not be compared."""
    at: dict[str, list[int]] = {}
    wild: list[int] = []
    for number, entry in enumerate(entries):
        patterns = [pattern for pattern, _ in _places(entry.rule)]
        exact = {pattern.suffix for pattern in patterns if pattern.kind == "exact"}
        near = set(wild) if len(exact) == len(set(patterns)) else set(range(number))
        for host in exact:
            near.update(at.get(host, ()))
            at.setdefault(host, []).append(number)
        if len(exact) != len(set(patterns)):
            wild.append(number)
        for before in sorted(near):
            yield entries[before], entry


def _places(rule: Rule) -> Sequence[tuple[HostPattern, int | None]]:
    if rule.operations:
        return [(pattern, op.port) for op in rule.operations for pattern in op.hosts]
    return [(pattern, rule.port) for pattern in rule.hosts]


def _meets(left: tuple[HostPattern, int | None], right: tuple[HostPattern, int | None]) -> bool:
    (one, port), (other, other_port) = left, right
    return (port is None or other_port is None or port == other_port) and _hosts_meet(one, other)


def _hosts_meet(one: HostPattern, other: HostPattern) -> bool:
    """True if some host may match both; wildcards are compared generously (a false alarm is a load error)."""
    if one.kind == "exact" and other.kind == "exact":
        return one.suffix == other.suffix
    if one.kind == "exact" or other.kind == "exact":
        exact, wild = (one, other) if one.kind == "exact" else (other, one)
        return wild.matches(Host.of(exact.suffix))
    if "template" in (one.kind, other.kind):
        left, right = (pattern.suffix.split(".")[-2:] for pattern in (one, other))
        return left[-min(len(left), len(right)) :] == right[-min(len(left), len(right)) :]
    if one.kind == "one" and other.kind == "one":
        return one.suffix == other.suffix
    return (
        one.suffix == other.suffix or one.suffix.endswith("." + other.suffix) or other.suffix.endswith("." + one.suffix)
    )


def _bound_apart(left: Rule, right: Rule) -> bool:
    """True if some argument is bound by both to different patterns: then the rules may well never meet."""
    return any(name in right.bind and set(left.bind[name]) != set(right.bind[name]) for name in left.bind)


def _same_request(one: Operation, other: Operation) -> bool:
    if one.id == other.id:
        return True
    methods = set(one.methods) & set(other.methods)
    templates = {pattern.template for pattern in one.paths} & {pattern.template for pattern in other.paths}
    hosts = any(_hosts_meet(left, right) for left, right in itertools.product(one.hosts, other.hosts))
    same_place = one.port == other.port and one.scheme == other.scheme and hosts
    same_body = (one.body is None) == (other.body is None) and (one.body is None or one.body == other.body)
    return bool(same_place and methods and templates and same_body)


def warn_of_dead_rules(role: WrittenRole) -> None:
    """Check 6. A rule is named once, with the deny rule that takes its first place."""
    whole = [entry.rule for entry in role.rules if entry.rule.action == "deny" and not entry.rule.operations]
    for entry in role.rules:
        rule = entry.rule
        if rule.action != "allow":
            continue
        places = [(pattern, op.port) for op in rule.operations for pattern in op.hosts]
        places += [(pattern, rule.port or 443) for pattern in rule.hosts]
        taken = [_taker(pattern, port, whole) for pattern, port in places]
        if taken and taken[0] is not None and None not in taken:
            entry.node.warn(f"{rule.id} can never apply: {taken[0].id} denies every place of it, and deny wins")


def _taker(pattern: HostPattern, port: int, denying: Sequence[Rule]) -> Rule | None:
    """The deny rule that covers every host of `pattern` at `port`, if one does."""
    for rule in denying:
        if rule.port in (None, port) and any(_includes(wide, pattern) for wide in rule.hosts):
            return rule
    return None


def _includes(wide: HostPattern, narrow: HostPattern) -> bool:
    """Whether every host that `narrow` matches is matched by `wide`."""
    if narrow.kind == "exact":
        return wide.matches(Host.of(narrow.suffix))
    if wide == narrow:
        return True
    return wide.kind == "many" and (narrow.suffix == wide.suffix or narrow.suffix.endswith("." + wide.suffix))
