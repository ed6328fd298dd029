"""exeat-verify: everything that can be done to a log, and what it says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.chain import Head, Tree, line_hash, link
from audit.checkpoints import Signer
from audit.segments import segment_files
from audit.verify import Report, main, verify
from tests.support.events import WHO, intent
from tests.support.logs import NODE, put, sample, writer

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))), NODE)


def lines_of(directory: Path) -> list[bytes]:
    return b"".join(path.read_bytes() for path in segment_files(directory)).split(b"\n")[:-1]


def rewrite(directory: Path, lines: list[bytes]) -> None:
    segment_files(directory)[0].write_bytes(b"".join(line + b"\n" for line in lines))


def signed(lines: list[bytes]) -> str:
    tree = Tree()
    for line in lines:
        tree.add(line)
    return SIGNER.sign(tree.size, tree.root())


def anchor(lines: list[bytes]) -> dict[int, str]:
    return {len(lines): line_hash(lines[-1])}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A small orderly log in one segment."""
    sample(tmp_path / "log")
    return tmp_path / "log"


def bad(report: Report) -> int:
    assert report.bad is not None
    assert "OK" not in report.statement
    return report.bad.sequence


# -- records ---------------------------------------------------------------------------------------------------


def test_a_changed_byte_anywhere_names_its_record(log: Path) -> None:
    """B160: flip each byte of a record in turn, of every field and every mark: that very record is named."""
    lines = lines_of(log)
    for position in range(len(lines[3])):
        changed = bytearray(lines[3])
        changed[position] ^= 1
        rewrite(log, [*lines[:3], bytes(changed), *lines[4:]])
        report = verify([log])
        assert bad(report) == 4, (position, bytes(changed))
        assert report.bad is not None
        assert report.bad.line == 4
    rewrite(log, lines)
    assert verify([log]).bad is None


@pytest.mark.parametrize("field", [*WHO, "reason", "host", "port", "path", "method", "user_agent", "request_id", "at"])
def test_a_changed_field_names_its_record(log: Path, field: str) -> None:
    """Rewriting one field with another well-formed value is found."""
    lines = lines_of(log)
    record = json.loads(lines[3])
    record[field] = 80 if field == "port" else record[field] + "x"
    rewrite(log, [*lines[:3], json.dumps(record, sort_keys=True, separators=(",", ":")).encode(), *lines[4:]])
    assert bad(verify([log])) == 4


TAMPERED: list[tuple[Callable[[list[bytes]], list[bytes]], int, str]] = [
    (lambda lines: [*lines[:2], *lines[3:]], 3, "A dropped record is missing."),
    (lambda lines: lines[1:], 1, "A dropped first record is missing."),
    (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3, "Two swapped records are out of order."),
    (lambda lines: [*lines[:3], lines[2], *lines[3:]], 3, "A repeated record does not belong."),
    (lambda lines: [*lines[:3], b"", *lines[3:]], 4, "An empty line is no record."),
    (lambda lines: [*lines[:3], b"{}", *lines[3:]], 4, "An object without a sequence is no record."),
    (lambda lines: [*lines[:3], b"\xff\x00", *lines[3:]], 4, "Garbage is no record."),
    (lambda lines: [*lines[:3], lines[3] + b" ", *lines[4:]], 4, "A space after a record changes it."),
]


@pytest.mark.parametrize(("change", "sequence", "sentence"), TAMPERED, ids=[row[2] for row in TAMPERED])
def test_a_tampered_log_names_the_first_bad_record(
    log: Path, change: Callable[[list[bytes]], list[bytes]], sequence: int, sentence: str
) -> None:
    """I22: dropping, swapping, repeating and inserting are found without a key."""
    rewrite(log, change(lines_of(log)))
    assert bad(verify([log])) == sequence


def test_an_inserted_record_with_a_good_chain_is_found_at_the_next_one(log: Path) -> None:
    """A forged record can name the one before it, but the one after does not name it."""
    lines = lines_of(log)
    forged, _head = link(
        Head(sequence=3, hash=line_hash(lines[2])),
        node=NODE,
        process="worker-1",
        name="request.refused",
        fields={},
        now_ns=1,
    )
    rewrite(log, [*lines[:3], forged, *lines[3:]])
    assert bad(verify([log])) == 4


def test_a_truncated_log_is_found_with_an_anchor_or_a_checkpoint_only(log: Path) -> None:
    """The verifier promises no more than it can: without either, it says what cannot be excluded."""
    lines = lines_of(log)
    rewrite(log, lines[:5])
    plain = verify([log])
    assert plain.bad is None
    assert plain.statement.endswith("complete up to record 5; what followed record 5 cannot be excluded")
    assert bad(verify([log], anchors=anchor(lines))) == len(lines)
    report = verify([log], key=SIGNER.key, checkpoints=signed(lines))
    assert bad(report) == 6
    assert report.bad is not None
    assert f"signed over {len(lines)} records" in report.bad.problem


def test_a_rewritten_log_is_found_with_an_anchor_or_a_checkpoint_only(log: Path) -> None:
    """Whoever can write the files can make a new chain; what was kept elsewhere shows it."""
    lines = lines_of(log)
    head, forged = Head(), []
    for line in lines:
        record = json.loads(line)
        fields = {
            k: v for k, v in record.items() if k not in {"at", "code", "event", "node", "prev", "process", "seq", "v"}
        }
        if record["event"] == "request.refused":
            fields["host"] = "innocent.example"
        made, head = link(head, node=NODE, process=record["process"], name=record["event"], fields=fields, now_ns=1)
        forged.append(made)
    rewrite(log, forged)
    assert verify([log], deep=True).bad is None
    assert bad(verify([log], anchors=anchor(lines))) == len(lines)
    assert bad(verify([log], key=SIGNER.key, checkpoints=signed(lines))) == len(lines)
    assert bad(verify([log], key=SIGNER.key, checkpoints=f"{signed(lines[:3])}\n{signed(lines)}")) == 3


def test_a_changed_last_record_is_found_with_an_anchor_or_a_checkpoint_only(log: Path) -> None:
    """Nothing follows the last record that would name it."""
    lines = lines_of(log)
    rewrite(log, [*lines[:-1], lines[-1].replace(b'"records":', b'"bytes":1,"records":')])
    assert verify([log]).bad is None
    assert bad(verify([log], anchors=anchor(lines))) == len(lines)
    assert bad(verify([log], key=SIGNER.key, checkpoints=signed(lines))) == len(lines)
    assert bad(verify([log], deep=True)) == len(lines)


def test_an_unfinished_last_line_that_nobody_reported_is_bad(log: Path) -> None:
    """With no auditor running, a line without an end was cut or added."""
    segment = segment_files(log)[0]
    data = segment.read_bytes()
    segment.write_bytes(data[:-5])
    assert bad(verify([log])) == len(lines_of(log)) + 1
    segment.write_bytes(data + b'{"seq":')
    assert bad(verify([log])) == len(data.split(b"\n"))


def test_a_torn_line_is_exactly_the_one_that_was_reported(tmp_path: Path) -> None:
    """After a recovery the unfinished bytes are covered by the chain: changed, grown or removed ones are found."""
    made = writer(tmp_path)
    put(made, intent())
    made.close()
    segment = segment_files(tmp_path)[0]
    whole = segment.read_bytes()
    segment.write_bytes(whole + b'{"at":"2')
    writer(tmp_path).close()
    assert verify([tmp_path], deep=True).bad is None
    for changed in (b'{"at":"3', b'{"at":"', b"", b'{"at":"2"}\n'):
        segment.write_bytes(whole + changed)
        assert bad(verify([tmp_path])) == 3
    segment.write_bytes(whole[:-20])
    assert bad(verify([tmp_path])) == 2


# -- segments --------------------------------------------------------------------------------------------------


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    """A file taken out of the middle or from the beginning is found without a key."""
    sample(tmp_path, segment_bytes=900)
    files = segment_files(tmp_path)
    assert len(files) >= 3
    assert verify([tmp_path], deep=True).bad is None
    middle = files[1].read_bytes()
    files[1].unlink()
    report = verify([tmp_path])
    assert report.bad is not None
    assert "segment 2 is missing" in report.bad.problem
    files[1].write_bytes(middle)
    files[0].unlink()
    assert bad(verify([tmp_path])) == 1


def test_single_files_are_checked_and_the_beginning_is_not_claimed(tmp_path: Path) -> None:
    """A later segment alone is checked from its first record on, and the report says so."""
    sample(tmp_path, segment_bytes=900)
    files = segment_files(tmp_path)
    report = verify(files[1:])
    assert report.bad is None
    assert report.coverage.first > 1
    assert "what came before was not checked" in report.notes[0]


def test_a_record_of_another_node_does_not_belong(log: Path) -> None:
    """A chain is one node's."""
    lines = lines_of(log)
    line, _head = link(
        Head(sequence=len(lines), hash=line_hash(lines[-1])),
        node="node-2",
        process="worker-1",
        name="request.refused",
        fields={},
        now_ns=1,
    )
    rewrite(log, [*lines, line])
    assert bad(verify([log])) == len(lines) + 1


def test_deep_names_a_record_that_the_tables_do_not_allow(log: Path) -> None:
    """--deep checks fields, codes and canonical form of every record, not only the chain."""
    lines = lines_of(log)
    head = Head(sequence=len(lines), hash=line_hash(lines[-1]))
    for fields in ({"token": "x"}, {"host": "a\nb"}, {"user_agent": "clear"}, {"colour": "red"}):
        line, _head = link(head, node=NODE, process="w", name="request.refused", fields=fields, now_ns=1)
        rewrite(log, [*lines, line])
        assert verify([log]).bad is None
        assert bad(verify([log], deep=True)) == len(lines) + 1
    spaced = line.replace(b'":', b'": ')
    rewrite(log, [*lines, spaced])
    assert bad(verify([log], deep=True)) == len(lines) + 1


# -- what it says ----------------------------------------------------------------------------------------------


def test_an_anchor_at_the_end_shows_that_nothing_is_missing(log: Path) -> None:
    """With the head kept elsewhere the statement is complete; with an older one the rest is only chained."""
    lines = lines_of(log)
    assert "nothing up to the anchor is missing or changed" in verify([log], anchors=anchor(lines)).statement
    older = verify([log], anchors=anchor(lines[:4])).statement
    assert f"what followed record {len(lines)} cannot be excluded" in older


@pytest.mark.parametrize("signed_up_to", [1, 3, 7])
def test_checkpoints_that_hold_are_counted(log: Path, signed_up_to: int) -> None:
    """The statement says up to which record a signature reaches."""
    lines = lines_of(log)
    report = verify([log], key=SIGNER.key, checkpoints=signed(lines[:signed_up_to]))
    assert report.bad is None
    assert f"signed up to record {signed_up_to}" in report.statement
    assert "cannot be excluded" in report.statement


def test_coverage_says_what_was_seen(log: Path) -> None:
    """Records, nodes, span, starts and stops, and what is only known in part."""
    seen = verify([log]).coverage
    assert (seen.records, seen.nodes, seen.stops, seen.open_intents) == (len(lines_of(log)), [NODE], 1, 0)
    assert seen.since < seen.until
    assert seen.head == f"{seen.last}:{line_hash(lines_of(log)[-1])}"


# -- the command -----------------------------------------------------------------------------------------------


def test_exit_codes(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 what was checked holds, 1 it does not, 2 it could not be checked."""
    (tmp_path / "empty").mkdir()
    key = tmp_path / "key"
    key.write_text("nonsense")
    assert main([str(tmp_path / "absent")]) == 2
    assert main([str(tmp_path / "empty")]) == 2
    assert main([str(log), "--key", str(key)]) == 2
    assert main([str(log), "--anchor", "0:" + "0" * 64]) == 2
    capsys.readouterr()
    assert main([str(log)]) == 0
    text = capsys.readouterr().out
    assert "cannot be excluded" in text.splitlines()[0]
    assert "OK" not in text
    assert main([str(log), "--anchor", f"{len(lines_of(log))}:{'0' * 64}"]) == 1
    assert f"record {len(lines_of(log))}: is not the record that the anchor names" in capsys.readouterr().out


def test_json_output_carries_the_same_answer(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script reads verified, bad and coverage."""
    lines = lines_of(log)
    rewrite(log, [*lines[:2], *lines[3:]])
    assert main([str(log), "--output", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verified"] is False
    assert answer["bad"] == {
        "file": "exeat-000001.jsonl",
        "line": 3,
        "sequence": 3,
        "problem": "is missing: record 4 is here",
    }
    assert answer["coverage"]["records"] == 2


def test_the_verifier_runs_isolated_and_loads_no_other_room(log: Path) -> None:
    """`python -I -m audit verify` needs nothing else of ours, whatever lies in the working directory."""
    (log.parent / "audit.py").write_text("raise SystemExit(99)")
    code = (
        "import sys; from audit.__main__ import main; code = main(['verify', sys.argv[1]]); "
        "assert not {'rules', 'wire', 'net', 'state', 'broker', 'proxy', 'exeat'} & set(sys.modules); sys.exit(code)"
    )
    for command in (["-c", code, str(log)], ["-m", "audit", "verify", str(log)]):
        done = subprocess.run([sys.executable, "-I", *command], cwd=log.parent, capture_output=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, b"")
