"""The tables of docs/limits.md: every bound, and what remains of each channel in bits, computed from the code.

docs/generate.py puts them between their marks in the page, so that the page says what the code does. A channel's bits
are an upper bound: every name, path and byte that the budget allows, each of as many symbols as may stand there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from audit import budget as log
from audit.events import MAX_STRING
from audit.journal import DEADLINE_S
from broker import executor, executor_process, scrub
from broker import websocket as credentialed
from broker.exchanges import base as exchanges
from broker.shaping import RESULT_SECONDS
from broker.vault import exchanging, leaves, service
from broker.vault import tokens as token_box
from net import client, resolve
from net.contexts import MAX_SERVER_CONTEXTS
from net.pool import PoolLimits
from net.stream import DEFAULT_LIMITS, HIGH_WATER, READ_SIZE
from net.turns import CALLS_ROOM, DEBT_SECONDS, HOG, LEAST, ROOM
from net.websocket import WebSocketLimits
from proxy import gate, mitm_process
from proxy.lanes import mitm, tools
from proxy.limits import DIVIDED, READ_UPLOADS, LimitTable
from proxy.mcp import MAX_RESULT
from rules import grants, paths, stubs
from rules.captured import MAX_ANSWER
from rules.decision import ResultSpec
from rules.explicit import MAX_INPUT
from rules.operation_parts import DEFAULT_BODY
from rules.redirects import MAX_URL
from wire.clienthello import MAX_HELLO
from wire.control import MAX_ADDRESSES, MAX_TOKENS, SILENCE_SECONDS
from wire.handoff import LIFE_SECONDS

HOUR = 3600
RECORD_BYTES = 250
"""What the auditor's own keys add to a record: the least that one can take."""
NAME_CHARACTERS = 253
NAME_SYMBOLS = 38
"""Letters, digits, `-`, `_` (rules/names.py); dots stand where labels end."""
MISSED_CHARACTERS = 214
"""The longest name of an npm package, the longest of the registries' names."""
PATH_SYMBOLS = 81
QUERY_SYMBOLS = 90
"""What rules/paths.py lets stand in a path and in a query."""
RECORDS = 2
"""Of each permitted request: its intent and its outcome."""

TABLE = LimitTable()
HTTP = DEFAULT_LIMITS
POOL = PoolLimits()
SOCKET = WebSocketLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One way to say something through what is permitted. `bits` an hour of one sandbox; None: not bounded by us."""

    name: str
    budget: str
    bits: float | None
    note: str = ""


def requests_an_hour() -> int:
    """The most permitted requests whose records fit into the sandbox's part of the log; then no more are permitted."""
    return log.QUOTA_BYTES // (RECORDS * RECORD_BYTES)


def channels() -> tuple[Channel, ...]:
    """Every channel that stays, with its default budget."""
    a_name = NAME_CHARACTERS * math.log2(NAME_SYMBOLS)
    a_path = paths.MAX_PATH * math.log2(PATH_SYMBOLS)
    requests = requests_an_hour()
    fetch = READ_UPLOADS["git.fetch"]
    return (
        Channel(
            name="new names under a wildcard",
            budget=f"{TABLE.names_under_wildcard} names for each wildcard",
            bits=TABLE.names_under_wildcard * a_name,
        ),
        Channel(
            name="new paths of one host",
            budget=f"{TABLE.paths_per_host:,} paths of up to {size(paths.MAX_PATH)}",
            bits=TABLE.paths_per_host * a_path,
            note=f"{words(TABLE.paths_per_host * 20 * math.log2(PATH_SYMBOLS))} with paths of 20 free characters",
        ),
        Channel(
            name="query of one host",
            budget=size(TABLE.query_bytes_per_host),
            bits=TABLE.query_bytes_per_host * math.log2(QUERY_SYMBOLS),
        ),
        Channel(
            name="which known path is asked for, request by request",
            budget=f"{size(log.QUOTA_BYTES)} of log: {requests:,} requests",
            bits=requests * math.log2(TABLE.paths_per_host),
        ),
        Channel(
            name="package names that a registry does not have",
            budget=f"{TABLE.missing_per_registry} answers 404",
            bits=TABLE.missing_per_registry * MISSED_CHARACTERS * math.log2(NAME_SYMBOLS),
        ),
        Channel(
            name="request bodies of one read operation",
            budget=size(TABLE.read_upload_bytes),
            bits=TABLE.read_upload_bytes * 8,
            note=f"Git fetch: {size(fetch)}, {words(fetch * 8)}",
        ),
        Channel(
            name="request bodies of other operations",
            budget="`limits: {upload}` of the rule; none by default",
            bits=None,
            note="they are allowed to be written",
        ),
        Channel(
            name="plain request headers",
            budget=f"{size(TABLE.forwarded_header_bytes)} a request",
            bits=requests * TABLE.forwarded_header_bytes * 8,
            note="to the allowed host alone; a rule with a credential lets only known headers through",
        ),
        Channel(
            name="one tunnel (`tunnel: true`)",
            budget=f"{size(TABLE.tunnel_bytes)}, {seconds(TABLE.tunnel_seconds)}, unless the rule says less",
            bits=TABLE.tunnel_bytes * 8,
            note=f"as many as {TABLE.sandbox_connections} connections carry, unseen",
        ),
        Channel(
            name="a WebSocket's messages",
            budget=f"{seconds(HTTP.exchange_timeout or 0)}, `limits: {{upload}}` of the rule; none by default",
            bits=None,
            note="with a credential: searched for placeholders",
        ),
        Channel(
            name="refusals",
            budget=f"{TABLE.refusals_per_second} a second, frozen after {TABLE.flood_seconds} s beyond that",
            bits=0,
            note="nothing of a refused request leaves",
        ),
    )


def bounds() -> tuple[tuple[str, str], ...]:
    """(what, bound) of everything that has one."""
    t, h = TABLE, HTTP
    return (
        (
            "request or answer head",
            f"{size(h.head_bytes)}, {h.header_count} headers; first head due in {seconds(t.first_head_seconds)}, "
            f"later ones in {seconds(h.head_timeout)}",
        ),
        (
            "path, segment, query",
            f"{paths.MAX_PATH:,}, {paths.MAX_SEGMENT} and {paths.MAX_QUERY:,} characters",
        ),
        ("headers that go on, on a plain rule", size(t.forwarded_header_bytes)),
        (
            "ClientHello; handshake",
            f"{size(MAX_HELLO)}, due in {seconds(t.hello_seconds)}; {seconds(t.handshake_seconds)}",
        ),
        (
            "chunk-size line; trailers",
            f"{h.chunk_line} bytes, no extensions; {size(h.trailer_bytes)}, {h.trailer_count} fields",
        ),
        ("interim answers", f"{h.interim_answers}"),
        (
            "idle kept-alive connection; body; whole exchange",
            f"{seconds(h.keepalive_timeout)}; {seconds(h.body_timeout)} between bytes; "
            f"{seconds(h.exchange_timeout or 0)}",
        ),
        ("stalled writer", seconds(h.write_timeout)),
        ("buffered bytes per direction", f"{size(HIGH_WATER)} and one read of {size(READ_SIZE)}"),
        (
            "connections per sandbox; before identity, per listener and per source",
            f"{t.sandbox_connections}; {t.listener_unidentified} and {t.source_unidentified}",
        ),
        (
            "idle connections to origins, per sandbox and process",
            f"{POOL.idle_per_sandbox} for {seconds(POOL.idle_seconds)}",
        ),
        (
            "turns of the event loop, in a worker and in an executor",
            f"while another sandbox is at work: one step a pass; who does {HOG:.0%} of all work gets the part of the "
            f"time that the others leave of {ROOM:.0%} (an executor: {CALLS_ROOM:.0%}), and {LEAST:.0%} at least, "
            f"{milliseconds(DEBT_SECONDS)} ahead of it at most; "
            "unidentified connections yield to everybody",
        ),
        (
            "counted in one worker",
            f"{t.sandboxes:,} sandboxes, {t.hosts_per_sandbox:,} hosts of each; one more is refused",
        ),
        ("a tunnel without a byte", seconds(t.tunnel_idle_seconds)),
        (
            "certificates minted, per sandbox",
            f"{leaves.LEAVES_PER_MINUTE} a minute, {leaves.LEAVES_PER_HOUR} an hour",
        ),
        (
            "refusal certificates, per sandbox",
            f"{leaves.REFUSAL_LEAVES_PER_MINUTE} a minute, {leaves.REFUSAL_LEAVES} in all",
        ),
        (
            "body that an operation judges",
            f"{size(DEFAULT_BODY)} unless the operation says otherwise, {size(executor.JUDGED_BYTES)} at the executor; "
            f"{seconds(gate.DECIDE_SECONDS)}; over {size(gate.THREAD_BODY_BYTES)} in a thread, one a sandbox",
        ),
        (
            "bodies that are judged whole, results of tools and pages of the help host, until their request ends",
            f"{size(t.sandbox_held_bodies)} per sandbox, {size(t.held_bodies)} per worker; beyond it 429",
        ),
        (
            "inputs of operations and calls of tools (help host)",
            f"{size(MAX_INPUT)}; {tools.CALLS} calls at a time per sandbox and worker, each of "
            f"{seconds(tools.CALL_SECONDS)} and {size(MAX_RESULT)} of answer",
        ),
        (
            "tokens that answers brought",
            f"{token_box.MAX_TOKENS} of a sandbox, then the oldest ends; {MAX_TOKENS} of one answer of "
            f"{size(MAX_ANSWER)}; as long as the answer says, {seconds(token_box.LIFE_SECONDS)} where it does not, "
            f"{seconds(token_box.MAX_LIFE_SECONDS)} at most",
        ),
        (
            "short-lived credentials (token endpoints)",
            f"an answer of {size(client.MAX_ANSWER_BYTES)} within {seconds(service.ASK_SECONDS)}; a token of "
            f"{size(exchanges.MAX_TOKEN_BYTES)}, kept {exchanges.MAX_LIFE / 3600:.0f} hours at most; asked again "
            f"{seconds(exchanging.TIMES.failure_ttl)} after a failure; {size(stubs.MAX_BODY)} of a request to a stub",
        ),
        (
            "addresses opened by redirects",
            f"{grants.USES} uses within {grants.LIFE_SECONDS / 60:.0f} minutes; {size(MAX_URL)} each; "
            f"{grants.MAX_GRANTS:,} of a sandbox, then the oldest ends; {MAX_ADDRESSES} of one answer",
        ),
        (
            "answer with `result:`",
            f"{size(ResultSpec(keep=()).bound)}, {seconds(RESULT_SECONDS)}; pruned in a thread, one a sandbox",
        ),
        (
            "scrubbing between two turns",
            f"{size(scrub.SLICE_BYTES)} with at most {scrub.SLICE_ESCAPES:,} escapes; material of "
            f"{size(scrub.MAX_MATERIAL)} in one call",
        ),
        (
            "HTTP/2 (`protocol: h2`)",
            f"{mitm.SANDBOX_CONNECTIONS} connections and {mitm.SANDBOX_STREAMS} requests at a time per sandbox, "
            f"{mitm.MAX_CONNECTIONS} connections per worker, {mitm_process.MAX_SESSIONS} in the adapter",
        ),
        (
            "WebSocket",
            f"frame {size(SOCKET.frame_bytes)} and message {size(SOCKET.message_bytes)}; "
            f"{seconds(SOCKET.idle_timeout)} of silence on both sides, {seconds(SOCKET.closing_timeout)} after a "
            f"Close; {seconds(SOCKET.total_timeout or 0)}",
        ),
        (
            "WebSocket with a credential",
            f"message {size(credentialed.MESSAGE_BYTES)}; unfinished messages {size(credentialed.HELD_BYTES_OF_ONE)} "
            f"per sandbox and {size(credentialed.HELD_BYTES)} per executor; message {credentialed.ECHOED_MESSAGES} "
            "with a secret in it ends it",
        ),
        (
            "resolver",
            f"{resolve.MAX_ANSWERS} answers, {seconds(resolve.LOOKUP_SECONDS)}, {resolve.LOOKUPS_PER_SANDBOX} lookups "
            "at a time per sandbox",
        ),
        ("TLS contexts per worker", f"{MAX_SERVER_CONTEXTS:,}"),
        (
            "log",
            f"{size(log.QUOTA_BYTES)} per sandbox and hour, then no more is permitted; a reserve of "
            f"{size(log.RESERVE_BYTES)}; strings over {MAX_STRING:,} characters are cut with length and digest",
        ),
        (
            "refusals",
            f"the first {log.REFUSALS_A_SECOND} a second singly, then one summary a second, also of those before "
            f"identity; {t.flood_seconds} seconds in a row beyond that freeze the sandbox for "
            f"{seconds(t.frozen_seconds)}; refused requests beyond {t.refusals_per_second} a second are answered up to "
            f"{seconds(t.latest_seconds)} late, and so are tunnels after as many that no request came through",
        ),
        (
            "calls through the broker at a time",
            f"{executor_process.MAX_RUNNING} per executor, {executor.RUNNING_OF_ONE} of them per sandbox, "
            f"{executor.OPENING_OF_ONE} of these at the vault",
        ),
        ("hand-off statement", f"taken once, within {seconds(LIFE_SECONDS)}"),
        ("what a worker waits for the log", f"{seconds(DEADLINE_S)}, then 503"),
        ("a worker without the vault's heartbeat", f"{seconds(SILENCE_SECONDS)}, then everything is cut"),
        ("several workers", f"each has its part of: {', '.join(name.replace('_', ' ') for name in DIVIDED)}"),
    )


# --- words ---------------------------------------------------------------------------------------------------------


def size(count: int) -> str:
    """`64 KiB`, `1 MiB`; bytes where it is no whole number of them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} bytes"


def seconds(count: float) -> str:
    """`75 s`, `1 h`."""
    return f"{count / HOUR:g} h" if count and count % HOUR == 0 else f"{count:g} s"


def milliseconds(count: float) -> str:
    return f"{count * 1000:g} ms"


def words(bits: float | None) -> str:
    """`66 kbit`, two digits, rounded up: it is a bound."""
    if bits is None:
        return "not bounded by us"
    for unit, name in ((1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit")):
        if bits >= unit:
            digits = 10 ** max(0, 1 - math.floor(math.log10(bits / unit)))
            return f"{math.ceil(bits / unit * digits) / digits:g} {name}"
    return f"{math.ceil(bits)} bit"


def remaining_table() -> str:
    """Channel, budget, bits."""
    rows = ["| Channel | Budget of one sandbox and hour | At most | |", "|---|---|---:|---|"]
    rows += [f"| {c.name} | {c.budget} | {words(c.bits)} | {c.note} |" for c in channels()]
    return "\n".join(rows) + "\n"


def bounds_table() -> str:
    return "\n".join(["| What | Bound |", "|---|---|", *(f"| {what} | {bound} |" for what, bound in bounds())]) + "\n"


TABLES: dict[str, Callable[[], str]] = {"remaining": remaining_table, "bounds": bounds_table}
"""Name of the mark in the page -> its table."""


def filled(page: str) -> str:
    """`page` with each table between `<!-- NAME -->` and `<!-- end of NAME -->` as the code has it."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"docs/limits.md has no marks for {name}")
        page = before + start + table() + end + after
    return page
