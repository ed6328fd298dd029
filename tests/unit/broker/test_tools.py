"""A server's list of tools: what is not granted does not come back, in one message or as events, however cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.result import ResultRefused
from broker.scrub import Patterns
from broker.shaping import Shaping
from broker.tools import Events, only_granted
from net.exchange import AnswerRefused
from rules.decision import AnswerSpec, Restrictions, ResultSpec
from tests.support.properties import tried
from wire.heads import ResponseHead

EXAMPLES = tried()
SPEC = AnswerSpec(name="mcp_tools", patterns=("get_*",), bound=4096)
LIST = {
    "jsonrpc": "2.0",
    "id": 1,
    "result": {"tools": [{"name": "get_issue", "n": 1.50}, {"name": "drop"}], "nextCursor": "x"},
}
CUT = {**LIST, "result": {"tools": [{"name": "get_issue", "n": 1.50}], "nextCursor": "x"}}


def fits(name: str) -> bool:
    return name.startswith("get_")


def shaping(content_type: str, *, status: int = 200, restrictions: Restrictions | None = None) -> Shaping:
    made = Shaping(
        patterns=Patterns([]),
        restrictions=restrictions or Restrictions(answer=SPEC),
        method="POST",
        granted=fits,
    )
    made.on_response(ResponseHead(status, "OK", "1.1", ((b"Content-Type", content_type.encode()),)))
    return made


async def everything(made: Shaping, *data: bytes) -> bytes:
    out: list[bytes] = []
    for piece in data:
        out += [part async for part in made.feed(piece)]
    return b"".join(out + [part async for part in made.finish()])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"x",
        b'{"result":{"tools":[]}',
        b'{"result":{"tools":{}}}',
        b'{"result":{"tools":["drop"]}}',
        b'{"result":{"tools":[]},"result":{"tools":[{"name":"drop"}]}}',
        b'{"result":{"tools":[],"tools":[{"name":"drop"}]}}',
        b'[{"result":{"tools":[{"name":"drop"}]}}]',
        b'\xef\xbb\xbf{"result":{"tools":[{"name":"drop"}]}}',
        b'{"result":{"tools":[' + b'{"name":"a"},' * 500 + b'{"name":"a"}]}}',
    ],
)
def test_an_answer_that_a_client_could_read_otherwise_is_withheld(raw: bytes) -> None:
    """Not one strict JSON object, a repeated key, another shape, over the bound: ResultRefused."""
    with pytest.raises(ResultRefused):
        only_granted(raw, 4096, fits)


def test_a_tool_without_a_plain_name_is_left_out() -> None:
    """A name that only looks like a granted one, or is none, is not shown."""
    names = ["get_issue", "get_issue\x00", "get_\u200bissue", "", None, ["get_x"], "e\u0301"]
    raw = json.dumps({"result": {"tools": [{"name": name} for name in names] + [{}]}}).encode()
    assert json.loads(only_granted(raw, 4096, fits)) == {"result": {"tools": [{"name": "get_issue"}]}}


def test_what_is_no_list_of_tools_passes() -> None:
    """Errors, other results and requests of the server keep their meaning, numbers digit by digit."""
    for message in (b'{"id":1,"error":{"code":-32601}}', b'{"id":1,"result":{"n":1.50}}', b'{"method":"ping","id":0}'):
        assert only_granted(message, 4096, fits) == message


async def test_a_list_in_one_message_is_cut() -> None:
    """A JSON answer comes back without what is not granted, and its head waits for that."""
    made = shaping("application/json; charset=utf-8")
    assert made.holds_head
    assert not made.keeps_length
    assert json.loads(await everything(made, json.dumps(LIST).encode())) == CUT
    assert await everything(shaping("application/json", status=202)) == b""


@pytest.mark.parametrize("content_type", ["text/html", "", "application/json-seq", "text/event-stream2"])
async def test_a_list_under_another_type_is_withheld(content_type: str) -> None:
    """What is neither JSON nor a stream of events is not passed as it is."""
    with pytest.raises(AnswerRefused) as caught:
        await everything(shaping(content_type), b"event: x\ndata: " + json.dumps(LIST).encode() + b"\n\n")
    assert caught.value.reason == "answer-withheld"


async def test_an_error_status_passes() -> None:
    """What the server says of a failed request is no list."""
    assert await everything(shaping("text/plain", status=404), b"gone") == b"gone"


async def test_a_stream_of_events_is_cut_event_by_event() -> None:
    """Ids, names, comments and other messages pass, the list is cut, an event without end is dropped."""
    stream = (
        b"\xef\xbb\xbf: hello\n\nid: 1\ndata:\n\n"
        b'event: message\nid: 2\ndata: {"method":"notifications/progress","params":{}}\n\n'
        b"event: message\ndata: " + json.dumps(LIST).encode() + b'\nid: 3\n\ndata: {"result":{"tools":[]}'
    )
    out = await everything(shaping("text/event-stream"), stream)
    events = out.split(b"\n\n")
    assert events[0] == b": hello"
    assert events[1] == b"id: 1"
    assert events[2].startswith(b"event: message\nid: 2\ndata: {")
    assert json.loads(events[3].partition(b"data: ")[2]) == CUT
    assert events[4:] == [b""]


async def test_data_in_several_lines_is_one_message() -> None:
    """Lines of one event are judged together, as a client joins them."""
    text = json.dumps(LIST, indent=1).encode()
    stream = b"".join(b"data:" + line + b"\r\n" for line in text.split(b"\n")) + b"\r\n"
    out = await everything(shaping("text/event-stream"), stream)
    assert json.loads(b"".join(line.removeprefix(b"data: ") for line in out.split(b"\n"))) == CUT


@pytest.mark.parametrize("data", [b"data: x\n\n", b"data: []\n\n", b"data: " + b"1" * 5000 + b"\n\n", b"x" * 5000])
async def test_an_event_that_is_no_message_is_withheld(data: bytes) -> None:
    """Not JSON, not an object, or over the bound: the answer ends there."""
    with pytest.raises(AnswerRefused):
        await everything(shaping("text/event-stream"), data)


async def test_kept_fields_and_a_cut_list_go_together() -> None:
    """`result:` applies to what the cut left."""
    both = Restrictions(answer=SPEC, result=ResultSpec(keep=("result.tools[].name",)))
    out = await everything(shaping("application/json", restrictions=both), json.dumps(LIST).encode())
    assert json.loads(out) == {"result": {"tools": [{"name": "get_issue"}]}}


ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@EXAMPLES
@given(st.lists(st.binary(max_size=5).filter(lambda raw: not set(raw) & {10, 13}), max_size=5), ends, st.data())
def test_cuts_between_reads_change_nothing(lines: list[bytes], end: bytes, data: st.DataObject) -> None:
    """However a stream arrives, and with whatever line ends, the events are the same."""
    stream = b"id: 1" + end + b"".join(b"data: " + line + end for line in lines) + end + b"event: x" + end + end
    whole = list(Events(4096).feed(stream))
    cut = Events(4096)
    pieces = []
    rest = stream
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert [event for piece in pieces for event in cut.feed(piece)] == whole
    assert [event.data for event in whole] == [b"\n".join(lines), b""]
