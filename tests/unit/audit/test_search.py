"""Finding, following and explaining records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from audit.__main__ import main
from audit.search import Filter, Place, end_of_log, explain_record, follow, refusals_since, search
from tests.support.events import WHO, intent, outcome, refusal
from tests.support.logs import put, sample, writer


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A small log over several segments."""
    sample(tmp_path / "log", segment_bytes=900)
    return tmp_path / "log"


ROWS = [
    (Filter(sandbox="sb_nobody"), [], "Nothing matches an unknown sandbox."),
    (Filter(reason="denied-by-rule"), [], "Nothing matches another reason."),
    (Filter(since="2099-01-01"), [], "Nothing is later than the last."),
    (Filter(refused=True), ["req_2"], "Only refusals."),
    (Filter(reason="no-rule"), ["req_2"], "By reason."),
    (Filter(host="OTHER.example"), ["req_3"], "By host, whatever its case."),
    (Filter(request_id="req_1"), ["req_1", "req_1"], "By request id."),
    (Filter(sandbox=WHO["sandbox"], event="request.intent"), ["req_1", "req_3"], "All conditions hold."),
    (Filter(since="2026-01-01T00:00:06Z", event="request.outcome"), ["req_3"], "From a time on."),
]


OUTCOMES = [
    ({"error": "address-refused", "status": 403, "bytes_down": 0}, True, "permitted, and not carried out"),
    ({"error": "upstream-timeout", "status": 200, "bytes_down": 9}, False, "broken off under way"),
    ({"error": "client-gone", "bytes_down": 0}, False, "the client left"),
    ({"error": "", "status": 500, "bytes_down": 0}, False, "the upstream's own word"),
]


@pytest.mark.parametrize(("fields", "refused", "sentence"), OUTCOMES, ids=[row[2] for row in OUTCOMES])
def test_a_permitted_request_that_was_not_carried_out_counts_as_refused(
    tmp_path: Path, fields: dict[str, Any], refused: bool, sentence: str
) -> None:
    """The client saw a refusal then, so who looks for refusals must find it, and by its reason."""
    made = writer(tmp_path / "log")
    put(made, intent("req_1"), outcome("req_1", **fields))
    made.close()
    assert [record["event"] for record in search(tmp_path / "log", Filter(refused=True))] == [
        "request.outcome"
    ] * refused
    reason = fields["error"]
    assert not reason or len(list(search(tmp_path / "log", Filter(reason=reason)))) == 1


@pytest.mark.parametrize(("wanted", "ids", "sentence"), ROWS, ids=[row[2] for row in ROWS])
def test_filters(log: Path, wanted: Filter, ids: list[str], sentence: str) -> None:
    """Each filter finds exactly its records, in order."""
    assert [record["request_id"] for record in search(log, wanted)] == ids


def test_a_time_that_is_no_time_is_refused() -> None:
    """A typing error does not silently match everything."""
    with pytest.raises(ValueError, match="UTC date or time"):
        Filter(since="yesterday")


def test_following_shows_new_records_once_across_segments(tmp_path: Path) -> None:
    """The last ones first, then each new one, also in a segment that was opened meanwhile."""
    made = writer(tmp_path / "log", segment_bytes=900)
    put(made, intent("req_1"), outcome("req_1"))
    rounds = iter(range(4))

    def wait() -> bool:
        number = next(rounds, None)
        if number is None:
            return False
        put(made, intent(f"new_{number}"))
        return True

    found = [record["request_id"] for record in follow(tmp_path / "log", Filter(event="request.intent"), wait, last=1)]
    made.close()
    assert found == ["req_1", "new_0", "new_1", "new_2", "new_3"]


def test_an_explanation_says_what_became_of_a_request(log: Path) -> None:
    """Decision, reason, rule, status in words; a request without records gets a sentence."""
    assert explain_record([]) == "There is no record of this request."
    text = explain_record(search(log, Filter(request_id="req_2")))
    assert "a request was refused" in text
    assert "reason: no-rule" in text
    assert "evil.example:443" in text
    done = explain_record(search(log, Filter(request_id="req_3")))
    assert "status: 404, 1 bytes up, 2 bytes down" in done
    running = explain_record([{"event": "request.intent", "seq": 1, "at": "t"}])
    assert "no outcome yet" in running


def test_the_command_prints_json_lines_and_explanations(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """search prints records as they stand, show explains; wrong input is exit code 2."""
    assert main(["search", str(log), "--refused"]) == 0
    assert '"reason":"no-rule"' in capsys.readouterr().out
    assert main(["show", str(log), "req_1"]) == 0
    assert main(["show", str(log), "req_9"]) == 1
    assert main(["search", str(log), "--since", "soon"]) == 2
    assert main(["search", str(log / "absent")]) == 2


def test_escaped_text_stays_escaped_in_an_explanation(tmp_path: Path) -> None:
    """B156: what a terminal would obey was escaped before it was written."""
    made = writer(tmp_path / "log")
    put(made, refusal(request_id="req_1", host="a\x1b[2J\n"))
    made.close()
    assert explain_record(search(tmp_path / "log", Filter(request_id="req_1"))).replace("\n", "").isprintable()


def test_refusals_since_a_place_in_the_log(tmp_path: Path) -> None:
    """Only those of the sandbox, written after the place, also in segments that began later; none of an empty log."""
    assert end_of_log(tmp_path) == Place()
    folder = tmp_path / "log"
    made = writer(folder, segment_bytes=600)
    put(made, refusal(request_id="old"))
    place = end_of_log(folder)
    assert list(refusals_since(folder, place, WHO["sandbox"])) == []
    for number in range(3):
        put(made, intent(f"good_{number}"), refusal(request_id=f"new_{number}"))
        put(made, refusal(request_id="other", sandbox="sb_other"))
    made.close()
    found = [record["request_id"] for record in refusals_since(folder, place, WHO["sandbox"])]
    assert found == ["new_0", "new_1", "new_2"]
    assert len(list(refusals_since(folder, Place(), WHO["sandbox"]))) == 4
