"""The auditor as a process: what it refuses, what it survives, what it says after a kill."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest

from audit.boot import Boot, BootRefused
from audit.checkpoints import VerifierKey
from audit.events import Event
from audit.frames import FrameReader, Item, Verdict, pack_appends, unpack_answers
from audit.journal import AuditUnavailable
from audit.link import AuditorLink
from audit.records import Renderer
from audit.verify import verify
from tests.support.auditors import DIGEST_KEY, RunningAuditor
from tests.support.events import WHO, intent, outcome, refusal

pytestmark = pytest.mark.slow  # starts real processes: part of make test


def events(auditor: RunningAuditor) -> list[str]:
    return [record["event"] for record in auditor.records()]


async def gone(auditor: RunningAuditor) -> tuple[int, str]:
    return await asyncio.get_running_loop().run_in_executor(None, auditor.wait)


# -- it does not start -----------------------------------------------------------------------------------------

BOOTS = [
    (b"", "Nothing was sent."),
    (b"[]", "The boot message is an object."),
    (b'{"node":"n","log_directory":"/x","digest_key":"00"}', "A short digest key is refused."),
    (json.dumps({"node": "n", "log_directory": "/x", "digest_key": "0" * 64, "extra": 1}).encode(), "Unknown key."),
    (
        json.dumps(
            {
                "node": "n",
                "log_directory": "/x",
                "digest_key": "0" * 64,
                "channels": [{"fd": 3, "process": "w", "kind": "auditor"}],
            }
        ).encode(),
        "Nobody else is an auditor.",
    ),
    (
        json.dumps(
            {
                "node": "n",
                "log_directory": "/x",
                "digest_key": "0" * 64,
                "channels": [{"fd": 3, "process": "w\n", "kind": "worker"}],
            }
        ).encode(),
        "A name that could not stand in a record is refused.",
    ),
]


@pytest.mark.parametrize(("raw", "sentence"), BOOTS, ids=[row[1] for row in BOOTS])
def test_a_boot_message_that_is_not_exactly_right_is_refused(raw: bytes, sentence: str) -> None:
    """Unknown keys, wrong types and unknown kinds are errors."""
    with pytest.raises(BootRefused):
        Boot.parse(raw)


async def test_a_second_auditor_on_the_same_directory_does_not_start(tmp_path: Path) -> None:
    """The directory has one writer; the second says so and ends with 2, the first goes on."""
    async with RunningAuditor(tmp_path / "log") as first:
        await first.links[0].append(intent())
        async with RunningAuditor(tmp_path / "log") as second:
            code, said = await gone(second)
        assert code == 2
        assert "another auditor" in said
        await first.links[0].append(outcome())


@pytest.mark.parametrize(
    ("directory_mode", "file_mode"), [(0o755, 0o600), (0o700, 0o644)], ids=["directory 0755", "file 0644"]
)
async def test_loose_modes_stop_the_start(tmp_path: Path, directory_mode: int, file_mode: int) -> None:
    """B168: a log that others may read is not written to."""
    log = tmp_path / "log"
    log.mkdir()
    (log / "exeat-000001.jsonl").touch()
    (log / "exeat-000001.jsonl").chmod(file_mode)
    log.chmod(directory_mode)
    async with RunningAuditor(log) as auditor:
        code, said = await gone(auditor)
    assert code == 2
    assert "mode" in said


async def test_a_damaged_log_stops_the_start(tmp_path: Path) -> None:
    """A chain that is broken in its middle is not continued; the message names the verifier."""
    async with RunningAuditor(tmp_path / "log") as auditor:
        await auditor.links[0].append(intent())
        await auditor.stop()
    segment = tmp_path / "log" / "exeat-000001.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b"registry.example", b"registry.example2"))
    async with RunningAuditor(tmp_path / "log") as again:
        code, said = await gone(again)
    assert code == 2
    assert "exeat-verify" in said


# -- it refuses records ----------------------------------------------------------------------------------------

FORGED = [
    (Event("broker.intent", {**WHO, "policy": "p", "request_id": "r"}), "A worker cannot speak for the broker."),
    (Event("admin.action", {"action": "secret.add"}), "A worker cannot invent administration."),
    (Event("log.sealed", {"segment": "x"}), "Nobody but the auditor speaks of the log."),
    (Event("policy.loaded", {"policy": "p"}), "A worker cannot invent a policy."),
]


@pytest.mark.parametrize(("event", "sentence"), FORGED, ids=[row[1] for row in FORGED])
async def test_a_worker_cannot_write_the_records_of_others(tmp_path: Path, event: Event, sentence: str) -> None:
    """RULINGS 2.2: what kind of process is behind a channel decides what may come through it."""
    async with RunningAuditor(tmp_path / "log") as auditor:
        with pytest.raises(AuditUnavailable, match="refuses this event"):
            await auditor.links[0].append(event)
        await auditor.links[0].append(intent())
        assert event.name not in events(auditor)[2:]


async def test_the_auditor_names_the_channel_itself(tmp_path: Path) -> None:
    """A client's own idea of its name does not reach the log."""
    channels = (("worker-1", "worker"), ("vault", "vault"))
    async with RunningAuditor(tmp_path / "log", channels=channels) as auditor:
        await auditor.links[1].append(Event("policy.loaded", {"policy": "p"}))
        await auditor.links[0].append(intent())
        assert [record["process"] for record in auditor.records()] == ["auditor", "auditor", "vault", "worker-1"]


async def exchange(sock: socket.socket, data: bytes, answers: int) -> list[Verdict]:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    await loop.sock_sendall(sock, data)
    reader, found = FrameReader(), []
    while len(found) < answers:
        received = await loop.sock_recv(sock, 65_536)
        assert received
        for _kind, payload in reader.feed(received):
            found += [answer.verdict for answer in unpack_answers(payload)]
    return found


RAW: list[tuple[Any, str]] = [
    (["request.refused", {"host": 'x\n{"seq":9}'}], "A value that was not escaped."),
    (["request.refused", {"user_agent": "curl"}], "A sensitive value in clear."),
    (["request.refused", {"seq": 7}], "A key that is the auditor's own."),
    (["request.refused", {"token": "x"}], "A secret field."),
    (["request.refused"], "Not an event."),
    ({"event": "request.refused"}, "Not a list."),
    (["request.refused", {"port": 1.5}], "A float."),
    (["request.refused", {"port": 2**60}], "An integer that JSON readers round."),
]


@pytest.mark.parametrize(("body", "sentence"), RAW, ids=[row[1] for row in RAW])
async def test_raw_bytes_of_a_broken_client_are_refused(tmp_path: Path, body: Any, sentence: str) -> None:
    """The auditor checks everything again: a broken client gets REFUSED and the channel goes on."""
    async with RunningAuditor(tmp_path / "log") as auditor:
        good = orjson.dumps((intent().name, Renderer(DIGEST_KEY).fields(intent())))
        data = pack_appends([Item(1, False, orjson.dumps(body)), Item(2, False, good)])
        found = await exchange(auditor.sockets[0], data, 2)
        assert sorted(found) == [Verdict.REFUSED, Verdict.WRITTEN]
        assert events(auditor).count("request.refused") == 0


# -- clients that die ------------------------------------------------------------------------------------------


async def test_a_client_that_dies_in_mid_frame_costs_only_its_own_frame(tmp_path: Path) -> None:
    """The others go on, and the log says who was lost."""
    channels = (("worker-1", "worker"), ("worker-2", "worker"))
    async with RunningAuditor(tmp_path / "log", channels=channels) as auditor:
        body = orjson.dumps((intent().name, Renderer(DIGEST_KEY).fields(intent())))
        auditor.sockets[0].sendall(pack_appends([Item(1, False, body)])[:-7])
        auditor.sockets[0].close()
        await auditor.links[1].append(intent("req_2"), durable=True)
        while "process.lost" not in events(auditor):
            await auditor.links[1].append(outcome("req_2"))
        lost = next(record for record in auditor.records() if record["event"] == "process.lost")
        assert (lost["instance"], lost["detail"]) == ("worker-1", "its log channel ended in mid-frame")
        assert "req_1" not in {record.get("request_id") for record in auditor.records()}


async def test_garbage_closes_its_channel_and_no_other(tmp_path: Path) -> None:
    """A channel that breaks the protocol is cut."""
    channels = (("worker-1", "worker"), ("worker-2", "worker"))
    async with RunningAuditor(tmp_path / "log", channels=channels) as auditor:
        auditor.sockets[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        loop = asyncio.get_running_loop()
        auditor.sockets[0].setblocking(False)
        assert await loop.sock_recv(auditor.sockets[0], 10) == b""
        await auditor.links[1].append(intent())


async def test_a_process_that_said_goodbye_is_not_lost(tmp_path: Path) -> None:
    """process.stopped and then the end of the channel is an orderly end."""
    async with RunningAuditor(tmp_path / "log") as auditor:
        await auditor.links[0].append(Event("process.stopped", {"program": "worker"}))
        await auditor.stop()
        assert events(auditor) == ["log.opened", "process.started", "process.stopped", "process.stopped", "log.sealed"]


# -- the end and the next start --------------------------------------------------------------------------------


async def test_sigterm_drains_and_seals(tmp_path: Path) -> None:
    """What was sent before the signal is written; then process.stopped and log.sealed; exit code 0."""
    async with RunningAuditor(tmp_path / "log") as auditor:
        numbers = await asyncio.gather(*(auditor.links[0].append(intent(f"req_{n}")) for n in range(50)))
        code, said = await auditor.stop()
        assert (code, said) == (0, "")
        assert events(auditor)[-2:] == ["process.stopped", "log.sealed"]
        assert len(numbers) == 50 == events(auditor).count("request.intent")


async def test_the_next_start_goes_on_with_the_chain(tmp_path: Path) -> None:
    """Sequence and hash continue over an orderly restart."""
    for round_number in range(3):
        async with RunningAuditor(tmp_path / "log") as auditor:
            await auditor.links[0].append(intent(f"req_{round_number}"))
            assert (await auditor.stop())[0] == 0
    report = verify([tmp_path / "log"], deep=True)
    assert report.bad is None
    assert (report.coverage.segments, report.coverage.recoveries, report.coverage.starts) == (3, 0, 3)


@pytest.mark.parametrize("keep", [0, 1, 100, 10_000], ids=["nothing", "one byte", "part of a line", "all"])
async def test_a_kill_in_mid_write_is_recovered_and_reported(tmp_path: Path, keep: int) -> None:
    """SIGKILL at the write step: the torn line stays, log.recovered names its bytes, the chain goes on."""
    log = tmp_path / "log"
    fault = {"step": "write", "nth": 3, "do": "kill", "keep": keep}
    async with RunningAuditor(log, faults=[fault], deadline_s=5.0) as auditor:
        first = await auditor.links[0].append(intent("req_1"), durable=True)
        await auditor.links[0].append(intent("req_2"))
        with pytest.raises(AuditUnavailable):
            await auditor.links[0].append(intent("req_3"), durable=True)
        assert (await gone(auditor))[0] == -signal.SIGKILL
    before = (log / "exeat-000001.jsonl").read_bytes()
    torn = before[before.rfind(b"\n") + 1 :]
    async with RunningAuditor(log) as again:
        number = await again.links[0].append(intent("req_4"))
        await again.stop()
        recovered = next(record for record in again.records() if record["event"] == "log.recovered")
    assert number > first
    assert (log / "exeat-000001.jsonl").read_bytes() == before
    assert recovered["torn_bytes"] == len(torn)
    assert recovered["bytes"] == len(before) - len(torn)
    assert recovered.get("torn_sha256") == (hashlib.sha256(torn).hexdigest() if torn else None)
    report = verify([log], deep=True)
    assert report.bad is None
    assert (report.coverage.recoveries, report.coverage.torn_bytes) == (1, len(torn))
    found = {record["request_id"] for record in again.records() if record["event"] == "request.intent"}
    assert {"req_1", "req_2", "req_4"} <= found


@pytest.mark.parametrize("step", ["open", "open-fsync", "open-directory"])
async def test_a_kill_while_a_segment_opens_leaves_a_log_that_opens(tmp_path: Path, step: str) -> None:
    """A segment appears whole or not at all."""
    log = tmp_path / "log"
    async with RunningAuditor(log) as auditor:
        await auditor.links[0].append(intent("req_1"))
        await auditor.stop()
    async with RunningAuditor(log, faults=[{"step": step, "nth": 0, "do": "kill"}]) as killed:
        assert (await gone(killed))[0] == -signal.SIGKILL
    async with RunningAuditor(log) as again:
        await again.links[0].append(intent("req_2"))
        await again.stop()
    assert verify([log], deep=True).bad is None


async def test_the_end_of_the_supervisor_ends_the_auditor(tmp_path: Path) -> None:
    """When its control socket ends the auditor seals the log and stops; channels can be handed over until then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        async with RunningAuditor(tmp_path / "log", channels=(), control_fd=theirs.fileno()) as auditor:
            theirs.close()
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            socket.send_fds(ours, [json.dumps({"process": "worker-7", "kind": "worker"}).encode()], [its.fileno()])
            its.close()
            link = AuditorLink(mine, "worker-7", DIGEST_KEY)
            await link.append(intent())
            await link.close()
            ours.close()
            assert (await gone(auditor))[0] == 0
            assert auditor.records()[2]["process"] == "worker-7"
            assert events(auditor)[-1] == "log.sealed"


async def test_the_listening_socket_takes_only_known_uids(tmp_path: Path) -> None:
    """Containers connect by path; a uid that is not on the list is closed on at once."""
    path = str(tmp_path / "audit.sock")
    peers = [{"uid": os.getuid(), "process": "worker", "kind": "worker"}]
    async with RunningAuditor(tmp_path / "log", listen={"path": path, "peers": peers}) as auditor:
        await auditor.links[0].append(intent("req_1"))
        link = AuditorLink.open_path(path, "me", DIGEST_KEY)
        await link.append(intent("req_2"))
        await link.close()
        found = {record.get("request_id"): record["process"] for record in auditor.records()}
        assert found["req_2"] == "worker-1"
    peers = [{"uid": os.getuid() + 1, "process": "worker", "kind": "worker"}]
    async with RunningAuditor(tmp_path / "log", listen={"path": path, "peers": peers}) as auditor:
        await auditor.links[0].append(intent("req_3"))
        link = AuditorLink.open_path(path, "me", DIGEST_KEY, deadline_s=5.0)
        with pytest.raises(AuditUnavailable):
            await link.append(intent("req_4"))
        await link.close()


async def test_a_link_by_path_survives_a_restart_of_the_auditor(tmp_path: Path) -> None:
    """While the auditor is away appends are refused; afterwards the same link writes again."""
    path = str(tmp_path / "audit.sock")
    listen = {"path": path, "peers": [{"uid": os.getuid(), "process": "worker", "kind": "worker"}]}
    async with RunningAuditor(tmp_path / "log", listen=listen) as auditor:
        await auditor.links[0].append(intent("req_1"))
        link = AuditorLink.open_path(path, "me", DIGEST_KEY)
        await link.append(intent("req_2"))
        auditor.process.kill()
        await gone(auditor)
        for _attempt in range(2):
            with pytest.raises(AuditUnavailable):
                await link.append(intent("req_3"))
    async with RunningAuditor(tmp_path / "log", listen=listen) as auditor:
        await auditor.links[0].append(intent("req_4"))
        await link.append(intent("req_5"))
        await link.close()


# -- writing fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"step": "write", "nth": 2, "do": "EIO", "keep": 50},
        {"step": "write", "nth": 2, "do": "ENOSPC", "keep": 0},
        {"step": "fsync", "nth": 1, "do": "EIO"},
    ],
    ids=["EIO in mid-line", "ENOSPC before a byte", "EIO on fsync"],
)
async def test_a_failing_write_moves_the_waiting_records_to_a_new_segment(tmp_path: Path, fault: dict) -> None:
    """RULINGS 9.1: the old file is suspect and never written again; nothing that was acknowledged is lost."""
    log = tmp_path / "log"
    async with RunningAuditor(log, faults=[fault]) as auditor:
        for number in range(4):
            await auditor.links[0].append(intent(f"req_{number}"), durable=True)
        code, said = await auditor.stop()
    assert code == 0
    assert "writing the log failed" in said
    report = verify([log], deep=True)
    assert report.bad is None
    assert (report.coverage.segments, report.coverage.suspect_segments) == (2, 1)
    second = [json.loads(line) for line in (log / "exeat-000002.jsonl").read_bytes().splitlines()]
    assert {"suspect", "error", "bytes"} <= next(r for r in second if r["event"] == "log.sealed").keys()
    found = [record["request_id"] for record in auditor.records() if record["event"] == "request.intent"]
    assert set(found) == {"req_0", "req_1", "req_2", "req_3"}


async def test_a_full_disk_refuses_until_a_write_succeeds(tmp_path: Path) -> None:
    """B158: while no segment can be opened appends are refused; afterwards the log goes on without a gap."""
    log = tmp_path / "log"
    faults = [
        {"step": "write", "nth": 1, "do": "ENOSPC", "keep": 10},
        {"step": "open", "nth": 1, "do": "ENOSPC", "times": 8},
    ]
    async with RunningAuditor(log, faults=faults, deadline_s=0.2) as auditor:
        refused = 0
        for number in range(100):
            try:
                await auditor.links[0].append(intent(f"req_{number}"), durable=number % 2 == 0)
            except AuditUnavailable:
                refused += 1
            else:
                break
        assert 1 <= refused < 100
        await auditor.links[0].append(outcome(f"req_{number}"))
        await auditor.stop()
    assert verify([log], deep=True).bad is None


async def test_a_deleted_segment_is_noticed(tmp_path: Path) -> None:
    """A file that was unlinked takes no more records: a new segment is opened, and verify names what is missing."""
    log = tmp_path / "log"
    async with RunningAuditor(log) as auditor:
        await auditor.links[0].append(intent("req_1"), durable=True)
        (log / "exeat-000001.jsonl").unlink()
        await auditor.links[0].append(intent("req_2"), durable=True)
        await auditor.stop()
        assert "req_2" in {record.get("request_id") for record in auditor.records()}
    report = verify([log])
    assert report.bad is not None
    assert report.bad.sequence == 1


async def test_a_hanging_auditor_is_a_refusal_within_the_deadline(tmp_path: Path) -> None:
    """A process that is stopped, not dead, answers nothing: append raises after its deadline."""
    async with RunningAuditor(tmp_path / "log", deadline_s=1.0) as auditor:
        await auditor.links[0].append(intent())
        auditor.process.send_signal(signal.SIGSTOP)
        for durable in (False, True):
            with pytest.raises(AuditUnavailable, match="in time"):
                await auditor.links[0].append(outcome(), durable=durable)
        auditor.process.send_signal(signal.SIGCONT)


# -- rotation, budgets, checkpoints ----------------------------------------------------------------------------


async def test_segments_rotate_and_stay_one_chain(tmp_path: Path) -> None:
    """A full segment is sealed and the next one goes on."""
    async with RunningAuditor(tmp_path / "log", limits={"segment_bytes": 4_096}) as auditor:
        for number in range(60):
            await auditor.links[0].append(intent(f"req_{number}"), durable=number % 7 == 0)
        await auditor.stop()
    report = verify([tmp_path / "log"], deep=True)
    assert report.bad is None
    assert report.coverage.segments > 5
    assert report.coverage.open_intents == 60


async def test_refusals_beyond_the_budget_are_counted_not_written(tmp_path: Path) -> None:
    """RULINGS 9.2: singles up to the budget, then one summary with counts and keyed targets; allowed ones always."""
    async with RunningAuditor(tmp_path / "log", limits={"refusals_a_second": 5}) as auditor:
        link = auditor.links[0]
        numbers = await asyncio.gather(*(link.append(refusal(host=f"h{n}.example")) for n in range(300)))
        await link.append(intent())
        await auditor.stop()
        counted = numbers.count(0)
        assert counted > 0
        summaries = [record for record in auditor.records() if record["event"] == "refusals.summarised"]
        assert sum(record["count"] for record in summaries) == counted
        assert events(auditor).count("request.refused") == 300 - counted
        assert all(target.startswith("hmac:") for record in summaries for target in record["targets"])
        assert summaries[0]["sandbox"] == WHO["sandbox"]
        assert events(auditor).count("request.intent") == 1


async def test_a_sandbox_without_room_is_refused_and_its_outcomes_still_written(tmp_path: Path) -> None:
    """Its quota stops what begins, never what must end; other sandboxes are not touched."""
    async with RunningAuditor(tmp_path / "log", limits={"quota_bytes": 2_000}) as auditor:
        link = auditor.links[0]
        for number in range(3):
            await link.append(intent(f"req_{number}"))
        with pytest.raises(AuditUnavailable, match="could not be written"):
            await link.append(intent("req_x"))
        await link.append(outcome("req_0"))
        await link.append(intent("req_other", sandbox="sb_other"))
        await auditor.stop()
        assert events(auditor).count("log.quota-reached") == 1


async def test_checkpoints_cover_the_sealed_log_and_survive_restarts(tmp_path: Path) -> None:
    """The last checkpoint covers the last record, after a kill and without the saved tree too."""
    log, key = tmp_path / "log", str(tmp_path / "signing.pem")
    for step in range(3):
        async with RunningAuditor(log, signing_key=key) as auditor:
            await auditor.links[0].append(intent(f"req_{step}"), durable=True)
            await auditor.stop()
        if step == 1:
            (log / "tree").unlink()
            with (log / "checkpoints").open("a") as file:
                file.write("\nexeat.internal/log/node-1\n12")  # killed while it wrote a checkpoint
    assert os.stat(key).st_mode & 0o777 == 0o600
    report = verify(
        [log],
        key=VerifierKey.parse((log / "checkpoint.pub").read_text()),
        checkpoints=(log / "checkpoints").read_text(),
    )
    assert report.bad is None
    assert report.coverage.signed_up_to == report.coverage.last
    assert report.coverage.checkpoints >= 3


async def test_a_log_shorter_than_its_checkpoint_is_not_continued(tmp_path: Path) -> None:
    """Rolled back records are noticed at the next start."""
    log, key = tmp_path / "log", str(tmp_path / "signing.pem")
    async with RunningAuditor(log, signing_key=key) as auditor:
        await auditor.links[0].append(intent())
        await auditor.stop()
    segment = log / "exeat-000001.jsonl"
    segment.write_bytes(b"".join(segment.read_bytes().splitlines(keepends=True)[:-2]))
    async with RunningAuditor(log, signing_key=key) as again:
        code, said = await gone(again)
    assert code == 2
    assert "were signed" in said
