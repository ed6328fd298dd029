"""Frames, fields, statements and control messages: hostile bytes first."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import BodyAttested, FactsRefused
from tests.support.properties import tried
from tests.support.rows import every_row
from wire.control import (
    Ack,
    Checked,
    Cut,
    CutDone,
    Done,
    Drain,
    Echo,
    Frozen,
    Heartbeat,
    Hello,
    Leaf,
    LeafRefused,
    LeafRequest,
    Message,
    Open,
    Opened,
    OpenRefused,
    Snapshot,
    Welcome,
    WorkerGone,
    WorkerKey,
    decode_from_vault,
    decode_to_vault,
    encode,
)
from wire.fields import FieldReader, FieldWriter
from wire.frames import Frame, FrameReader, WireError, encode_frame
from wire.handoff import (
    BODY_END_FRAME,
    Answer,
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    BodyPlan,
    Continue,
    Evidence,
    FrameType,
    Refusal,
    Statement,
    Upgraded,
    check_fresh,
    claimed_worker,
    decode_answer,
    encode_answer,
    facts_of,
    frame_type,
    open_sealed,
    seal,
)

KEY = bytes(range(32))
STATEMENT = Statement(
    worker="worker-1",
    nonce=b"n" * 16,
    issued_at=1000.25,
    request_id="req_aaaaaaaaaaaaaaaaaaaa",
    tenant="default",
    sandbox="sb_aaaaaaaaaaaaaaaa",
    epoch=3,
    evidence=Evidence(token="tok", channel_key=b"\x00\xffkey", peer="10.0.0.1"),
    policy_digest="d" * 64,
    method="POST",
    scheme="https",
    host="shop.test",
    port=443,
    target="/v1/orders?x=1",
    headers=(("Host", "shop.test"), ("X-Odd", "caf\xe9"), ("Accept", "a"), ("accept", "b")),
    body=BodyPlan.judged(b"{}"),
    rule="dev/orders",
    operation="dev/orders",
    arguments=(("id", "7"),),
    credential="shop",
)
SEALED = seal(STATEMENT, KEY)


def test_one_changed_byte_anywhere_breaks_the_seal() -> None:
    """Every byte of a sealed statement counts."""
    for at in range(len(SEALED)):
        broken = bytearray(SEALED)
        broken[at] ^= 1
        with pytest.raises(WireError):
            open_sealed(bytes(broken), KEY)


def test_a_statement_cut_anywhere_is_refused() -> None:
    """No prefix of a statement is one, and nothing may follow it."""
    for size in range(len(SEALED)):
        with pytest.raises(WireError):
            open_sealed(SEALED[:size], KEY)
    with pytest.raises(WireError):
        open_sealed(SEALED + b"\x00", KEY)


@pytest.mark.parametrize("key", [b"", b"k" * 31, b"k" * 33, bytes(32)])
def test_another_key_opens_nothing(key: bytes) -> None:
    """Keys of another length are no keys, another key is another worker's."""
    with pytest.raises(WireError):
        open_sealed(SEALED, key)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"issued_at": 990.0}, "issued ten seconds ago"),
        ({"issued_at": 1006.0}, "issued in the future"),
        ({"audience": "someone-else"}, "meant for another audience"),
    ],
)
def test_a_statement_has_its_time_and_audience(changes: dict[str, object], sentence: str) -> None:
    """Stale, early and misdirected statements are refused."""
    with pytest.raises(WireError):
        check_fresh(replace(STATEMENT, **changes), 1000.5)  # type: ignore[arg-type]
    check_fresh(STATEMENT, 1000.5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "SHOP.test"}, WireError),
        ({"host": "shop.test."}, WireError),
        ({"port": 0}, WireError),
        ({"target": "https://shop.test/"}, WireError),
        ({"host": "evil.test"}, FactsRefused),
        ({"target": "/a/../b"}, FactsRefused),
        ({"headers": (("Accept", "a"),)}, FactsRefused),
        ({"headers": (("Host", "shop.test"), ("host", "shop.test"))}, FactsRefused),
    ],
)
def test_facts_are_built_anew(changes: dict[str, object], reason: type[Exception]) -> None:
    """What is not canonical in a statement becomes no facts, whoever sealed it."""
    with pytest.raises(reason):
        facts_of(replace(STATEMENT, **changes))  # type: ignore[arg-type]


def test_a_statement_comes_back_as_it_was() -> None:
    """Order, case, duplicates and odd bytes of headers are kept."""
    assert open_sealed(SEALED, KEY) == STATEMENT
    assert claimed_worker(SEALED) == "worker-1"
    facts = facts_of(STATEMENT, b"{}")
    assert facts.header("accept") == ("a", "b")
    assert facts.target == "/v1/orders?x=1"
    assert facts.body == b"{}"
    assert facts.has_body


def test_every_field_of_a_statement_is_sealed() -> None:
    """A field that somebody adds without encoding it would not be covered by the seal."""
    changed: dict[str, object] = {
        "evidence": Evidence(token="other"),
        "scheme": "http",
        "headers": (("Host", "x.test"),),
        "body": BodyPlan(),
        "arguments": (),
        "nonce": b"m" * 16,
    }
    for item in fields(Statement):
        value = getattr(STATEMENT, item.name)
        other = changed.get(item.name)
        if other is None:
            other = value + 1 if isinstance(value, int | float) else value + "x"
        if item.name == "version":
            continue
        assert seal(replace(STATEMENT, **{item.name: other}), KEY) != SEALED, item.name


def test_evidence_and_keys_are_not_shown() -> None:
    """No repr shows a token, key or secret."""
    shown = [
        repr(STATEMENT.evidence),
        repr(Welcome(name="w", key=b"secret-key")),
        repr(WorkerKey(worker="w", key=b"secret-key")),
        repr(
            Opened(
                id=1,
                rule="r",
                operation="o",
                policy_digest="d",
                parts=(("value", b"secret-key"),),
                scrub=(b"secret-key",),
            )
        ),
        repr(Open(id=1, sealed=b"secret-key")),
    ]
    assert not any("secret-key" in text or "tok" in text for text in shown)


@every_row(
    "plan",
    [
        {"kind": "none", "length": 1},
        {"kind": "chunked", "length": 1},
        {"kind": "length", "length": -1},
        {"kind": "length", "length": 1, "sha256": b"x" * 32},
        {"kind": "sha256", "length": 1},
        {"kind": "other"},
        {"kind": "chunked", "sha256": b"x" * 32},
        {"kind": "chunked", "prefix": 4},
        {"kind": "chunked", "prefix": -1, "sha256": b"x" * 32},
        {"kind": "chunked", "prefix": (1 << 20) + 1, "sha256": b"x" * 32},
        {"kind": "length", "length": 4, "prefix": 4, "sha256": b"x" * 32},
        {"kind": "sha256", "length": 4, "prefix": 2, "sha256": b"x" * 32},
        {"kind": "none", "prefix": 2, "sha256": b"x" * 32},
    ],
)
def test_a_body_plan_that_contradicts_itself_cannot_exist(plan: dict[str, object]) -> None:
    """Invalid plans are refused at construction."""
    with pytest.raises(WireError):
        BodyPlan(**plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [None, 9])
def test_a_beginning_that_was_judged_is_part_of_the_statement(length: int | None) -> None:
    """What was judged, how much of it and its digest come back as they were sealed, and the facts say partial."""
    statement = replace(STATEMENT, body=BodyPlan.begun(b"judged", length))
    opened = open_sealed(seal(statement, KEY), KEY)
    assert opened == statement
    assert (opened.body.kind, opened.body.length, opened.body.prefix) == (
        ("chunked", 0, 6) if length is None else ("length", 9, 6)
    )
    assert facts_of(opened, b"judged").partial
    assert not facts_of(replace(STATEMENT, body=BodyPlan.judged(b"judged")), b"judged").partial


# --- frames ---


def test_a_length_over_the_bound_is_refused_before_it_is_buffered() -> None:
    """The fourth byte decides."""
    reader = FrameReader(10)
    with pytest.raises(WireError):
        list(reader.feed(b"\x00\x00\x00\x0b"))
    with pytest.raises(WireError):
        encode_frame(1, b"x" * 11, 10)


@tried()
@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=6), st.integers(1, 7))
def test_any_split_gives_the_same_frames(items: list[tuple[int, bytes]], step: int) -> None:
    """Cutting the stream elsewhere changes nothing."""
    raw = b"".join(encode_frame(kind, payload) for kind, payload in items)
    reader = FrameReader()
    found = [frame for start in range(0, len(raw), step) for frame in reader.feed(raw[start : start + step])]
    assert [(frame.type, frame.payload) for frame in found] == items
    assert not reader.pending


def test_unknown_frames_and_messages_are_refused() -> None:
    """The tables are closed, and each side's has only its own rows."""
    with pytest.raises(WireError):
        frame_type(Frame(99, b""))
    for decode in (decode_answer, decode_from_vault, decode_to_vault):
        with pytest.raises(WireError):
            decode(Frame(99, b""))
    (end,) = FrameReader().feed(BODY_END_FRAME)
    assert frame_type(end) is FrameType.BODY_END
    with pytest.raises(WireError):
        decode_answer(end)


# --- fields ---


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b"\x02", lambda reader: reader.flag()),
        (b"\x00\x00\x00\x05abc", lambda reader: reader.data()),
        (b"\x00\x00\x00\x01\xff", lambda reader: reader.text()),
        (b"\xff\xff\xff\xff", lambda reader: reader.texts()),
        (b"\x7f\xf8\x00\x00\x00\x00\x00\x00", lambda reader: reader.real()),
        (b"\x7f\xf0\x00\x00\x00\x00\x00\x00", lambda reader: reader.real()),
        (b"\x00", lambda reader: reader.finish()),
    ],
    ids=["flag 2", "short data", "not UTF-8", "endless list", "not a number", "infinite", "left over"],
)
def test_fields_out_of_their_layout_are_refused(raw: bytes, read: object) -> None:
    """The first thing out of place raises."""
    with pytest.raises(WireError):
        read(FieldReader(raw))  # type: ignore[operator]


def test_values_over_their_bound_are_not_written() -> None:
    """The writer has the same bounds as the reader."""
    for write in (
        lambda writer: writer.number(256, 1),
        lambda writer: writer.number(-1),
        lambda writer: writer.data(b"xx", 1),
        lambda writer: writer.text("\ud800"),
        lambda writer: writer.texts(["a", "b"], 1),
    ):
        with pytest.raises(WireError):
            write(FieldWriter())


# --- every message, there and back ---

ANSWERS: list[Answer] = [
    Refusal(reason="no-rule", rule="dev/x", remedy="ask", message="told", ticket="t", retry_after=30),
    AnswerAbort(reason="upstream-protocol"),
    Continue(),
    AnswerHead(status=200, reason="OK", headers=(("Content-Type", "text/plain"),), length=None),
    AnswerHead(status=404, reason="", headers=(), length=0),
    AnswerData(b"\x00data"),
    AnswerEnd(),
    Upgraded(headers=(("Upgrade", "websocket"),)),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_answers_come_back_as_they_were(answer: Answer) -> None:
    """One frame each; a byte more or less is refused."""
    (frame,) = FrameReader().feed(encode_answer(answer))
    assert decode_answer(frame) == answer
    if not isinstance(answer, AnswerData):
        with pytest.raises(WireError):
            decode_answer(Frame(frame.type, frame.payload + b"\x00"))
        if frame.payload:
            with pytest.raises(WireError):
                decode_answer(Frame(frame.type, frame.payload[:-1]))


FROM_VAULT: list[Message] = [
    Welcome(name="worker-1", key=KEY),
    WorkerKey(worker="worker-1", key=KEY),
    WorkerGone(worker="worker-1"),
    Snapshot(generation=7, document=b"{}"),
    Heartbeat(generation=7, now_floor=1000.5),
    Cut(id=1, kind="sandbox", tenant="default", subject="sb_one"),
    Cut(id=2, kind="all"),
    Drain(seconds=2.5),
    Leaf(id=3, chain_pem=b"PEM"),
    LeafRefused(id=3, reason="limit-reached"),
    Opened(
        id=4,
        rule="dev/x",
        operation="dev/x",
        policy_digest="d",
        credential="shop",
        version="2",
        owner="team",
        parts=(("value", b"value"), ("other", b"another")),
        scrub=(b"one", b"two"),
    ),
    OpenRefused(id=4, reason="approval-required", rule="r", remedy="m", message="n", ticket="t", retry_after=30),
]
TO_VAULT: list[Message] = [
    Hello(kind="worker", name="worker-1", spki=b"spki"),
    Hello(kind="executor", name="executor-1"),
    Ack(generation=7),
    LeafRequest(id=3, host="x.test", tenant="default", sandbox="sb_one", refusal=True),
    CutDone(id=1, closed=4),
    Open(id=4, sealed=SEALED),
    Open(id=5, sealed=SEALED, attested=BodyAttested(operations=frozenset({"a", "b?x=1"}), sha256=b"s" * 32)),
    Done(id=4, sent=True, status=200, bytes_up=1, bytes_down=2),
    Echo(id=4, credential="shop", hits=2),
    Checked(passed=True),
    Checked(passed=False),
    Frozen(tenant="default", sandbox="sb_one", operation="shop/read", budget="paths", seconds=1800),
    Frozen(tenant="default", sandbox="sb_one", operation="", budget="refusals", seconds=60),
]


@every_row("message", FROM_VAULT + TO_VAULT, ids=lambda message: type(message).__name__)
def test_control_messages_come_back_as_they_were(message: Message) -> None:
    """One frame each, readable by its own side only; a byte more or less is refused."""
    (frame,) = FrameReader(64 << 20).feed(encode(message))
    ours, theirs = (
        (decode_from_vault, decode_to_vault) if message in FROM_VAULT else (decode_to_vault, decode_from_vault)
    )
    assert ours(frame) == message
    for payload in (frame.payload + b"\x00", frame.payload[:-1]):
        with pytest.raises(WireError):
            ours(Frame(frame.type, payload))
    with pytest.raises(WireError):
        theirs(frame)


@tried(300)
@given(st.integers(0, 80), st.binary(max_size=80))
def test_noise_is_a_wire_error_or_a_message(kind: int, payload: bytes) -> None:
    """No bytes make a reader raise anything else."""
    for decode in (decode_answer, decode_from_vault, decode_to_vault):
        with contextlib.suppress(WireError):
            decode(Frame(kind, payload))
