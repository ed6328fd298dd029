"""Policy files: refused with file, line and column, or a policy; never another exception, never half of one.

The input is the policy's text; what follows a line of `%%%` is the operator's credentials file.
"""

from __future__ import annotations

from rules.compile import compile_policy
from rules.document import digest
from rules.parse import PolicyError, Sources, parse_sources
from rules.policytests import run_tests

WORDS = (
    b"version: 1\n", b"roles:\n", b"allow:\n", b"deny:\n", b"host: ", b"methods: [GET]", b"paths: [/**]",
    b"tunnel: true", b"service: ", b"credential: ", b"everyone:", b"destinations:", b"tests:", b"&a ", b"*a",
    b"<<: ", b"!!python/object", b"\n%%%\n", b"? ", b"- ", b"{", b"}", b"[", b"]", b"'", b'"', b"|", b">",
    b"websocket: true", b"body: ", b"${sandbox.", b"expect: deny", b"source: {env: A}", b"kind: bearer",
    b"boundary: ", b"ask: ", b"requests: 5/min",
)  # fmt: skip

PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


def check(data: bytes) -> bool:
    """See above."""
    text, mark, operator = data.decode("utf-8", "replace").partition("\n%%%\n")
    files = {"policy.yaml": text} | ({"credentials.yaml": operator} if mark else {})
    sources = Sources(
        policy={"policy.yaml": text},
        credentials=("credentials.yaml", operator) if mark else None,
        ca_files=lambda path: PEM,
    )
    try:
        parsed = parse_sources(sources)
    except PolicyError as refused:
        assert refused.problems
        for problem in refused.problems:
            assert problem.file in files, "parser and compiler disagree"
            assert 1 <= problem.line <= len(files[problem.file].splitlines()) + 1
            assert problem.column >= 1
            assert problem.message
        return False
    policy = compile_policy(parsed.document)
    assert policy.digest == digest(parsed.document)
    assert all(rule.operations or rule.hosts for role in policy.roles.values() for rule in role.rules)
    run_tests(policy, parsed.tests)
    return True
