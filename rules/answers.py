"""What a sandbox may learn from an answer: which of policy.ANSWERS is done to it, and by which patterns.

`mcp_tools`: a server's list of tools shows those that the rules grant, and no other. A tool that is listed and then
refused sends an agent in circles, and its description is text of the server's that an agent reads. The list is cut for
convenience and hygiene; what protects is that each call is judged by itself.
`lfs_batch`: signed URLs and tokens that a forge adds stay with the broker. That does protect. Addresses that the
operation declares (`redirects:`) are granted, one by one, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rules.captured import MAX_ANSWER
from rules.decision import AnswerSpec
from rules.facts import RequestFacts, Sandbox
from rules.matching import NoMatch, match_operation, pattern_fits
from rules.policy import Operation, Rule

_CALL = "tools/call"
_CAPTURE = "capture"
"""Concerns only what was made from a credential of ours."""
_LFS = "lfs_batch"
"""Takes away only what was made from a credential of ours: what everybody is told is no authority of anybody's."""


def answer_spec(
    matched: Sequence[Operation], allowing: Iterable[Rule], facts: RequestFacts, *, credentialed: bool = True
) -> AnswerSpec | None:
    """Return what is to be done to the answer of a request that is `matched`, or None where it passes as it is.

    `allowing` are the allow rules of the sandbox's role for this host. A tool counts as granted if a call of it at the
    same place could fit a rule, whatever else the rule binds. An answer that two operations would treat differently
    is treated by the first, in order of its name.
    """
    leads = all(op.redirects for op in matched)
    names = sorted({op.answer for op in matched if op.answer and _concerns(op.answer, credentialed, leads)})
    if not names:
        return None
    if names[0] == _CAPTURE:
        if len(names) > 1 or len({op.captures for op in matched}) > 1:
            return AnswerSpec(name=_CAPTURE, patterns=(), bound=0)  # read in two ways: nothing of it comes back
        return AnswerSpec(name=_CAPTURE, patterns=(), bound=MAX_ANSWER, fields=matched[0].captures)
    if names[0] == _LFS:
        return AnswerSpec(name=_LFS, patterns=(), strip=credentialed)
    patterns: set[str] = set()
    for rule in allowing:
        if not any(_calls_here(op, facts) for op in rule.operations):
            continue
        if "tool" not in rule.bind:
            return AnswerSpec(name=names[0], patterns=None)
        patterns |= set(rule.bind["tool"])
    return AnswerSpec(name=names[0], patterns=tuple(sorted(patterns)))


def _concerns(answer: str, credentialed: bool, leads: bool) -> bool:
    return credentialed or answer not in (_LFS, _CAPTURE) or (answer == _LFS and leads)


def granted(spec: AnswerSpec, name: str, sandbox: Sandbox) -> bool:
    """True if a tool of this name may be shown to `sandbox`."""
    return spec.patterns is None or any(pattern_fits(pattern, name, sandbox) for pattern in spec.patterns)


def _calls_here(op: Operation, facts: RequestFacts) -> bool:
    """True if a tool call to the place of `facts` could be `op`."""
    if op.body is None or op.body.matcher != "mcp" or _CALL not in op.body.params.get("methods", ()):
        return False
    call = replace(facts, method="POST", headers=(), body=None, has_body=True, upgrade=None)
    return not isinstance(match_operation(replace(op, request_headers={}), call), NoMatch)
