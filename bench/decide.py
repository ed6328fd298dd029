"""`make bench-decide`: what one decision costs by number of rules, and one body by matcher and size.

    python bench/decide.py [--no-write] [--rules N ...]

Rules only, in one process: no socket, no file. Every number is the least of several runs. Bodies are told as a
multiple of what a JSON parse of the very same bytes costs in the same run (of bytes that are no JSON: as one string).
Writes bench/DECIDE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rules.catalogue import builtin_services  # noqa: E402
from rules.compile import compile_policy  # noqa: E402
from rules.decide import decide_request, decide_tunnel  # noqa: E402
from rules.decision import Denied, Permit, TunnelPermit  # noqa: E402
from rules.document import encode_operation, encode_rule  # noqa: E402
from rules.facts import RequestFacts, Sandbox, TunnelFacts  # noqa: E402
from rules.matching import Matched, NoMatch, match_operation, parse_path  # noqa: E402
from rules.names import RuleId  # noqa: E402
from rules.parse import Sources, parse_sources  # noqa: E402
from rules.policy import HostPattern, Operation, Policy, Rule  # noqa: E402

RESULTS = ROOT / "bench" / "DECIDE.md"
RULES = (10, 1_000, 100_000)
RULES_A_HOST = 10
SIZES = (1 << 10, 16 << 10, 256 << 10)
PARSED_RULES = 2_000
"""Rules of the file whose reading is timed; what 100,000 cost is told by proportion."""
BOX = Sandbox(tenant="t", id="sb_bench", epoch=1, role="dev", owner="o", agent="a", task="t", expires_at=float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", type=int, nargs="*", default=list(RULES))
    parser.add_argument("--no-write", action="store_true", help="print, leave DECIDE.md alone")
    options = parser.parse_args()
    text = "\n".join([*head(), *by_rules(options.rules), *by_body()]) + "\n"
    print(text)
    if not options.no_write:
        RESULTS.write_text(text, "utf-8")
    return 0


def head() -> list[str]:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return [
        "# What a decision costs",
        "",
        "Written by `make bench-decide`; do not edit. `bench/README.md` says what is measured.",
        "",
        f"- Date: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}; commit {commit.stdout.strip() or 'unknown'}",
        f"- Python {platform.python_version()}, {os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f} "
        "at the start (above 0: others worked here too)",
        "",
    ]


# --- by rules ---------------------------------------------------------------------------------------------------


def by_rules(counts: Iterable[int]) -> list[str]:
    """The table over numbers of rules: hosts with ten rules each, and every rule on one host."""
    lines = [
        "## By number of rules",
        "",
        "Microseconds a decision. *Hosts*: ten rules for each of many hosts; *one*: all rules for one host.",
        "",
        "| rules | permit, hosts | deny, hosts | CONNECT, hosts | permit, one | deny, one | CONNECT, one | load, s |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    first: list[float] | None = None
    last: list[float] = []
    for count in counts:
        spread, seconds = policy_of(count, RULES_A_HOST)
        host = f"h{count // RULES_A_HOST // 2}.bench.example"
        path = RULES_A_HOST // 2
        row = [least(permitted(spread, host, path)), least(denied(spread, host)), least(connected(spread, host))]
        single, _ = policy_of(count, count)
        one = "h0.bench.example"
        row += [least(permitted(single, one, count // 2)), least(denied(single, one)), least(connected(single, one))]
        first, last = first or row, row
        cells = " | ".join(f"{cost * 1e6:.1f}" for cost in row)
        lines.append(f"| {count:,} | {cells} | {seconds:.2f} |")
    assert first is not None
    ratios = " | ".join(f"x{late / early:.2f}" for late, early in zip(last, first, strict=True))
    lines += [f"| last to first | {ratios} | |", ""]
    parsed = parse_seconds(PARSED_RULES)
    lines += [
        f"Reading and checking policy files, which the vault alone does: {parsed / PARSED_RULES * 1e3:.2f} ms a rule "
        f"(measured with {PARSED_RULES:,}), so about {parsed / PARSED_RULES * 100_000:.0f} s for 100,000 rules. "
        "Loading the document, which every process does, is the last column.",
        "",
    ]
    return lines


def policy_of(count: int, a_host: int) -> tuple[Policy, float]:
    """A policy with `count` hand-written rules, `a_host` for each host; and the seconds that compiling took."""
    operations: dict[str, Any] = {}
    rules: list[Any] = []
    for number in range(count):
        op = Operation(
            id=f"dev/r{number:06}",
            effect="read",
            hosts=(HostPattern(kind="exact", suffix=f"h{number // a_host}.bench.example"),),
            port=443,
            scheme="https",
            methods=("GET",),
            paths=(parse_path(f"/v1/p{number % a_host}/{{id}}"),),
        )
        operations[op.id] = encode_operation(op)
        rules.append(encode_rule(Rule(id=RuleId(op.id), action="allow", operations=(op,))))
    document = {
        "version": 1,
        "basis": {},
        "operations": operations,
        "credentials": {},
        "destinations": {},
        "roles": {"dev": {"message": "", "boundary": None, "dns": "synthetic", "rules": rules}},
    }
    started = time.perf_counter()
    policy = compile_policy(document)
    return policy, time.perf_counter() - started


def parse_seconds(count: int) -> float:
    rules = "".join(
        f"      - {{name: r{n}, host: h{n // RULES_A_HOST}.bench.test, methods: [GET], "
        f'paths: ["/v1/p{n % 10}/{{id}}"]}}\n'
        for n in range(count)
    )
    text = "version: 1\nroles:\n  dev:\n    allow:\n" + rules
    started = time.perf_counter()
    parse_sources(Sources(policy={"policy.yaml": text}, credentials=None, services={}))
    return time.perf_counter() - started


def permitted(policy: Policy, host: str, path: int) -> Callable[[], None]:
    asked = facts(f"GET https://{host}/v1/p{path}/7")

    def once() -> None:
        assert isinstance(decide_request(policy, BOX, asked, 0.0), Permit)

    return once


def denied(policy: Policy, host: str) -> Callable[[], None]:
    asked = facts(f"GET https://{host}/v1/other")

    def once() -> None:
        assert isinstance(decide_request(policy, BOX, asked, 0.0), Denied)

    return once


def connected(policy: Policy, host: str) -> Callable[[], None]:
    asked = TunnelFacts.build(f"{host}:443")

    def once() -> None:
        assert isinstance(decide_tunnel(policy, BOX, asked, 0.0), TunnelPermit)

    return once


# --- by body ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One matcher: an operation of the catalogue that has it, a request for it, and a body that it recognises."""

    operation: str
    request: str
    make: Callable[[str], bytes]
    """From a filling text of any length."""
    headers: Mapping[str, str] | None = None
    unit: str = "x"
    """What the filling repeats."""


def of_json(shape: Callable[[str], Any]) -> Callable[[str], bytes]:
    return lambda filling: json.dumps(shape(filling)).encode()


def chat(filling: str) -> dict[str, Any]:
    """Messages of at most 1,000 characters."""
    texts = [filling[at : at + 1000] for at in range(0, len(filling), 1000)] or [""]
    return {"model": "m-1", "messages": [{"role": "user", "content": text} for text in texts]}


def pieces(filling: str, size: int = 100) -> list[str]:
    return [filling[at : at + size] for at in range(0, len(filling), size)] or ["x"]


_AMZ = {"content-type": "application/x-amz-json-1.0", "x-amz-target": "DynamoDB_20120810.PutItem"}
_FORM = {"content-type": "application/x-www-form-urlencoded"}
_LFS = {"content-type": "application/vnd.git-lfs+json"}
_PUSH = {"content-type": "application/x-git-receive-pack-request"}
_ANTHROPIC = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
_GEMINI = "POST https://generativelanguage.googleapis.com/v1beta/models"
_LINE = ("0" * 40 + " " + "a" * 40 + " refs/heads/agent/x\0 report-status").encode()
_PART = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
_FILE = '--b\r\nContent-Disposition: form-data; name="content"; filename="a-1.0.tar.gz"\r\n\r\n'


def cargo(filling: str) -> bytes:
    said = json.dumps({"name": "a", "vers": "1.0.0", "description": filling}).encode()
    return len(said).to_bytes(4, "little") + said + (3).to_bytes(4, "little") + b"abc"


def upload(filling: str) -> bytes:
    parts = {":action": "file_upload", "name": "a", "version": "1.0", "description": filling}
    return ("".join(_PART.format(*part) for part in parts.items()) + _FILE).encode() + b"PK"


def call(method: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


SAMPLES: Mapping[str, Sample] = {
    "aws_action": Sample(
        operation="aws-dynamodb/item.write",
        request="POST https://dynamodb.eu-west-1.amazonaws.com/",
        headers=_AMZ,
        make=of_json(lambda f: {"TableName": "t", "Item": {f"a{n}": {"S": t} for n, t in enumerate(pieces(f))}}),
    ),
    "call": Sample(
        operation="slack/message.write",
        request="POST https://slack.com/api/chat.postMessage",
        make=of_json(lambda f: {"channel": "C1", "text": f}),
    ),
    "cargo_publish": Sample(operation="crates/publish", request="PUT https://crates.io/api/v1/crates/new", make=cargo),
    "form": Sample(
        operation="stripe/customer.write",
        request="POST https://api.stripe.com/v1/customers",
        headers=_FORM,
        make=lambda f: ("name=A&description=" + f).encode(),
    ),
    "git_push": Sample(
        operation="github/git.push",
        request="POST https://github.com/acme/shop.git/git-receive-pack",
        headers=_PUSH,
        make=lambda f: b"%04x" % (len(_LINE) + 4) + _LINE + b"0000PACK" + f.encode(),
    ),
    "graphql": Sample(
        operation="linear/graphql.mutation",
        request="POST https://api.linear.app/graphql",
        make=of_json(
            lambda f: {
                "query": "mutation($i: CommentCreateInput!) { commentCreate(input: $i) { success } }",
                "variables": {"i": {"issueId": "u-1", "body": f}},
            }
        ),
    ),
    "graphql, a document": Sample(
        operation="github/graphql.query",
        request="POST https://api.github.com/graphql",
        make=of_json(lambda f: {"query": "{ viewer { " + f + " login } }"}),
        unit="id login name ",
    ),
    "json_pick": Sample(
        operation="jira/issue.create",
        request="POST https://acme.atlassian.net/rest/api/3/issue",
        make=of_json(lambda f: {"fields": {"project": {"key": "SHOP"}, "labels": pieces(f)}}),
    ),
    "json_without": Sample(
        operation="elasticsearch/document.search",
        request="POST https://elasticsearch.example/logs-1/_search",
        make=of_json(lambda f: {"query": {"terms": {"a": pieces(f)}}}),
    ),
    "jsonrpc": Sample(
        operation="ethereum/chain.read",
        request="POST https://ethereum.example/",
        make=of_json(lambda f: call("eth_call", [{"to": "0xabc", "data": "0x" + f}, "latest"])),
        unit="0",
    ),
    "lfs_batch": Sample(
        operation="github/lfs.download",
        request="POST https://github.com/acme/shop.git/info/lfs/objects/batch",
        headers=_LFS,
        make=of_json(lambda f: {"operation": "download", "objects": [{"oid": "c" * 64, "size": 7} for _ in pieces(f)]}),
    ),
    "llm_anthropic": Sample(
        operation="anthropic/messages.create",
        request="POST https://api.anthropic.com/v1/messages",
        headers=_ANTHROPIC,
        make=of_json(lambda f: {**chat(f), "max_tokens": 9}),
    ),
    "llm_cohere_chat": Sample(
        operation="cohere/chat.create", request="POST https://api.cohere.com/v2/chat", make=of_json(chat)
    ),
    "llm_gemini_generate": Sample(
        operation="gemini/content.generate",
        request=f"{_GEMINI}/gemini-2.5-flash:generateContent",
        make=of_json(lambda f: {"contents": [{"parts": [{"text": text}]} for text in pieces(f, 1000)]}),
    ),
    "llm_openai_chat": Sample(
        operation="openai/chat.create",
        request="POST https://api.openai.com/v1/chat/completions",
        make=of_json(chat),
    ),
    "llm_openai_embeddings": Sample(
        operation="openai/embeddings.create",
        request="POST https://api.openai.com/v1/embeddings",
        make=of_json(lambda f: {"model": "e-1", "input": pieces(f, 1000)}),
    ),
    "llm_openai_responses": Sample(
        operation="openai/responses.create",
        request="POST https://api.openai.com/v1/responses",
        make=of_json(lambda f: {"model": "gpt-5", "store": False, "input": f}),
    ),
    "mcp": Sample(
        operation="mcp/tools.call",
        request="POST https://mcp.example/",
        make=of_json(lambda f: call("tools/call", {"name": "get", "arguments": {"a": pieces(f)}})),
    ),
    "pypi_upload": Sample(
        operation="pypi/publish",
        request="POST https://upload.pypi.org/legacy/",
        headers={"content-type": "multipart/form-data; boundary=b"},
        make=upload,
    ),
}


def by_body() -> list[str]:
    lines = [
        "## By body",
        "",
        "Microseconds for one body, and in brackets as a multiple of a JSON parse of the same bytes. `-`: above the "
        "operation's bound. `no in`: more than its matcher takes. Of a prefix only the first bytes are read.",
        "",
        "| matcher | operation | bound | 1 KiB | 16 KiB | 256 KiB | at the bound |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, sample in SAMPLES.items():
        service = builtin_services()[sample.operation.partition("/")[0]]
        ops = [op for op in service.select(sample.operation.partition("/")[2]) if op.body is not None]
        body = fitted(sample, 1 << 10)
        op = next(op for op in ops if isinstance(judged(op, sample, body), Matched))
        assert op.body is not None
        sizes = [*SIZES, op.body.bound]
        cells = [cell(op, sample, size) if size <= op.body.bound else "-" for size in sizes]
        bound = f"{op.body.bound // 1024:,} KiB" + (" (prefix)" if op.body.prefix else "")
        lines.append(f"| {name} | `{sample.operation}` | {bound} | {' | '.join(cells)} |")
    return [*lines, ""]


def cell(op: Operation, sample: Sample, size: int) -> str:
    body = fitted(sample, size)
    text = body.decode("latin-1") if not body.startswith((b"{", b"[")) else ""
    same = json.dumps(text).encode() if text else body
    asked = replace(facts(sample.request, sample.headers), body=body, has_body=True)
    cost = least(lambda: match_operation(op, asked))
    if isinstance(match_operation(op, asked), NoMatch):
        return f"no in {cost * 1e6:,.0f}"
    parse = least(lambda: json.loads(same))
    return f"{cost * 1e6:,.0f} (x{cost / parse:.1f})"


def fitted(sample: Sample, size: int) -> bytes:
    """The longest body of at most `size` bytes, give or take a few."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        filling = (sample.unit * (middle // len(sample.unit) + 1))[:middle]
        low, high = (middle, high) if len(sample.make(filling)) <= size else (low, middle - 1)
    low -= low % len(sample.unit)
    return sample.make(sample.unit * (low // len(sample.unit)))


def judged(op: Operation, sample: Sample, body: bytes) -> object:
    """What the operation's matcher says of the body."""
    return match_operation(op, replace(facts(sample.request, sample.headers), body=body, has_body=True))


# --- both -------------------------------------------------------------------------------------------------------


def facts(request: str, headers: Mapping[str, str] | None = None) -> RequestFacts:
    method, _, url = request.partition(" ")
    authority = url.partition("://")[2].partition("/")[0]
    named = dict(headers or ({"content-type": "application/json"} if method != "GET" else {}))
    return RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=None,
        target=url,
        headers=(("host", authority), *named.items()),
    )


def least(once: Callable[[], object], seconds: float = 0.25) -> float:
    """The least seconds of one call, over runs of about a twentieth of `seconds`."""
    started = time.perf_counter()
    once()
    count = max(1, int(seconds / 20 / max(time.perf_counter() - started, 1e-7)))
    best = float("inf")
    ends = time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < ends:
        started = time.perf_counter()
        for _ in range(count):
            once()
        best = min(best, (time.perf_counter() - started) / count)
    return best


if __name__ == "__main__":
    sys.exit(main())
