"""What the stub resolver may say of a name (RULINGS 5.7). Pure: policy, sandbox, name and time in, yes or no out.

By default every name exists, so that a denied one still reaches the front door and gets its refusal in words. A role
with `dns: strict` has only names that one of its rules could permit something for.
"""

from __future__ import annotations

from rules.denials import covers
from rules.facts import Sandbox
from rules.names import OWN_NAME, Host
from rules.policy import Policy


def name_exists(policy: Policy, sandbox: Sandbox, host: Host, now: float) -> bool:
    """Return whether `host` has an address in `sandbox`; `now` is seconds since the Unix epoch. Never raises."""
    role = policy.roles.get(sandbox.role)
    if role is None or not sandbox.expires_at > now:
        return False
    if role.dns == "synthetic" or host.text == OWN_NAME:
        return True
    rules = role.rules_for(host)
    denied = [rule for rule in rules if rule.action == "deny" and not rule.operations]
    ports: set[int] = set()
    for rule in rules:
        if rule.action == "allow":
            ports |= {op.port for op in rule.operations if any(pattern.matches(host) for pattern in op.hosts)}
            if rule.tunnel and rule.port is not None and any(pattern.matches(host) for pattern in rule.hosts):
                ports.add(rule.port)
    return any(not any(covers(rule, host, port) for rule in denied) for port in ports)
