"""The probe in a sandbox's network namespace: every kind of hole is found, the good one is proven (I28, RULINGS 6.2).

Holes are made by root in namespaces of their own; nothing but documentation addresses is aimed at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from exeat import boundary, proving, session
from exeat.boundary import Surroundings
from exeat.launch import BoundaryUnavailable, Capture
from exeat.places import default_places
from exeat.proving import Namespaces, prove
from exeat.settings import load_settings
from tests.support.gateway import EXEAT, PATH, TestGateway
from tests.support.netns import NSENTER, Made, made, with_key
from tests.support.waiting import until
from wire.probe import MARK

pytestmark = [
    pytest.mark.xdist_group("proving"),
    pytest.mark.skipif(os.geteuid() != 0, reason="holes in namespaces are made by root"),
]

POLICY = """
roles:
  agent:
    allow:
      - {name: plain, host: plain.test, methods: [GET], paths: ["/**"]}
"""


# --- holes -----------------------------------------------------------------------------------------------


def flush_rules(place: Made) -> None:
    place.inside("nft", "flush", "ruleset")


def drop_the_redirect(place: Made) -> None:
    place.inside("nft", "flush", "chain", "inet", "exeat", "to_gateway")


def accept_everything(place: Made) -> None:
    place.inside("nft", "insert", "rule", "inet", "exeat", "leaving", "accept")


def add_an_interface(place: Made) -> None:
    place.inside("ip", "link", "add", "extra0", "type", "veth", "peer", "name", "extra1")


def add_a_way_out(place: Made) -> None:
    """A pair with one end in this process's namespace, before the redirect of the routes."""
    place.inside("ip", "link", "add", "leak0", "type", "veth", "peer", "name", "leak1", "netns", str(os.getpid()))
    place.inside("ip", "addr", "add", "192.0.2.2/24", "dev", "leak0")
    place.inside("ip", "link", "set", "leak0", "up")


HOLES: list[tuple[str, Callable[[Made], None], set[str]]] = [
    ("no rules at all: datagrams are taken", flush_rules, {"rules", "quic", "icmp"}),
    ("no redirect, though what remains is dropped", drop_the_redirect, {"rules"}),
    ("a rule that lets everything out", accept_everything, {"rules", "quic", "icmp-ipv6"}),
    ("an interface that we did not make", add_an_interface, {"interfaces"}),
    ("a pair that leads out", add_a_way_out, {"interfaces"}),
]


@pytest.mark.parametrize(("sentence", "hole", "ways"), HOLES, ids=[row[1].__name__ for row in HOLES])
def test_a_hole_is_found_and_named(sentence: str, hole: Callable[[Made], None], ways: set[str]) -> None:
    """Whatever the hole, the probe says by which ways something could leave."""
    with made() as place:
        hole(place)
        found = prove(place.namespaces, seconds=1.0)
        assert ways <= set(found.passed), sentence
        assert not found.proven


def test_somebody_else_who_accepts_is_a_way_out() -> None:
    """A connection to nowhere that is accepted, but not by the holder of the channel key, got out to somebody."""
    with made(answers=b"o" * 32) as place:
        found = prove(place.namespaces, seconds=1.0)
    assert {"direct", "direct-ipv6", "metadata", "neighbour", "host-address", "dns-tcp"} <= set(found.passed)


def test_this_machines_own_namespace_is_no_sandbox() -> None:
    """Run where nothing confines, every canary is reached, and the namespace is known for what it is."""
    with contextlib.ExitStack() as undo:
        net = os.open("/proc/self/ns/net", os.O_RDONLY)
        user = os.open("/proc/self/ns/user", os.O_RDONLY)
        undo.callback(os.close, net)
        undo.callback(os.close, user)
        found = prove(Namespaces(net=net, user=user, tools=None, channel_key=b"k" * 32), seconds=1.0)
    assert {"namespace", "interfaces", "host-loopback", "host-loopback-ipv6", "host-socket"} <= set(found.passed)


def test_without_capture_an_interface_is_a_way_out() -> None:
    """Where there should be loopback alone, another interface and its route are both named."""
    with made(captured=False) as place:
        place.inside("ip", "link", "add", "extra0", "type", "veth", "peer", "name", "extra1")
        place.inside("ip", "addr", "add", "192.0.2.2/24", "dev", "extra0")
        place.inside("ip", "link", "set", "extra0", "up")
        found = prove(place.namespaces, seconds=1.0)
    assert {"interfaces", "direct", "dns-udp", "quic", "icmp"} <= set(found.passed)


def test_a_worker_that_does_not_answer_proves_nothing() -> None:
    """A stopped worker is no hole and no proof: what was not seen is named."""
    with made() as place:
        for listener in place.confined.listeners:
            listener.shutdown(socket.SHUT_RD) if listener.type == socket.SOCK_STREAM else listener.close()
        found = prove(place.namespaces, seconds=1.0)
    assert found.passed == ()
    assert "direct" in found.unclear


def test_a_probe_that_gives_no_result_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with an error: neither a hole nor a proof."""
    monkeypatch.setattr(proving, "boot_document", lambda _: os.memfd_create("empty"))
    with made() as place:
        assert prove(place.namespaces).unclear == ("probe",)


def test_a_program_inside_cannot_play_the_worker() -> None:
    """Without the channel key nobody's answer counts."""
    with made() as place:
        assert "direct" in prove(with_key(place.namespaces, b"x" * 32), seconds=1.0).passed


@pytest.mark.parametrize("captured", [True, False])
def test_a_whole_namespace_is_proven(captured: bool) -> None:
    """As we make it, with transparent capture and without, nothing leads out."""
    with made(captured=captured) as place:
        found = prove(place.namespaces)
    assert (found.passed, found.unclear) == ((), ())


def test_a_held_program_starts_only_when_it_is_released() -> None:
    """Until then it has not run; and one that is given up ends without having run."""
    with made() as place:
        command = Path(f"/proc/{place.confined.process.pid}/task/{place.confined.process.pid}/children")
        first = command.read_text().split()[0]
        assert b"confine" in Path(f"/proc/{first}/cmdline").read_bytes()
        assert Path(f"/proc/{first}/task/{first}/children").read_text() == ""
        place.confined.close()
        assert place.confined.process.wait(60) == 125


# --- under `exeat run` -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestGateway]:
    folder = tmp_path_factory.mktemp("proving")
    with TestGateway(folder, policy=POLICY, settings="self_check_seconds: 5\n", confined=True) as running:
        yield running


def test_a_sandbox_with_a_hole_is_never_started(gateway: TestGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start: the command does not run, the sandbox is not armed, the log names the way."""
    plan = boundary.capture_plan

    def leaky(tools: boundary.CaptureTools) -> Capture:
        more = (((tools.ip, "link", "add", "extra0", "type", "veth", "peer", "name", "extra1"), ""),)
        return replace(plan(tools), commands=(*plan(tools).commands, *more))

    monkeypatch.setattr(boundary, "capture_plan", leaky)
    proof, before = gateway.home / "it-ran", len(gateway.records(event="boundary.broken"))
    with pytest.raises(BoundaryUnavailable, match="interfaces"):
        asyncio.run(start(gateway, "touch", str(proof)))
    assert not proof.exists()
    record = gateway.awaited(before + 1, event="boundary.broken")[before]
    assert (record["ways"], record["code"]) == (["interfaces"], "XS005E")
    assert gateway.records(event="boundary.proven", sandbox=record["sandbox"]) == []
    assert gateway.admin.sandbox(record["sandbox"])["armed"] is False


async def start(gateway: TestGateway, *argv: str) -> None:
    settings = load_settings(gateway.settings_file, default_places({"HOME": str(gateway.home)}, os.geteuid()))
    around = Surroundings(environment={"PATH": PATH}, home=str(gateway.home), cwd="/", hidden=())
    async with (
        session.gateway(settings, report=lambda _: None) as link,
        session.sandbox(link, argv=argv, surroundings=around, role="agent", capture=True) as running,
    ):
        await running.wait()


def test_a_sandbox_cannot_pass_its_connections_off_as_a_probes(gateway: TestGateway) -> None:
    """The mark that makes the worker answer without judging or recording takes a capability that no sandbox has."""
    program = f"import socket; socket.socket().setsockopt(socket.SOL_SOCKET, 36, {MARK})"
    done = gateway.run("/usr/bin/python3", "-c", program)
    assert done.code == 1, done
    assert "PermissionError" in done.err


def test_a_hole_that_comes_later_ends_the_sandbox(gateway: TestGateway) -> None:
    """While it runs: the next probe finds the hole, disarms, ends the command with 125, and says by what way."""
    before = {record["sandbox"] for record in gateway.records(event="sandbox.created")}
    with running(gateway, "sleep", "120") as process:
        box, inside = started(gateway, process, before)
        until(lambda: gateway.admin.sandbox(box)["armed"])  # on record first
        subprocess.run([*inside, "ip", "link", "add", "extra0", "type", "veth", "peer", "name", "extra1"], check=True)
        assert process.wait(60) == 125
        said = process.communicate()[1].decode()
    assert "a probe got out of sandbox" in said
    assert "interfaces" in said
    (record,) = gateway.awaited(event="boundary.broken", sandbox=box)
    assert record["ways"] == ["interfaces"]
    assert record["seq"] < gateway.awaited(event="sandbox.ended", sandbox=box)[0]["seq"]


def test_a_sandbox_is_proven_again_and_again_without_a_trace(gateway: TestGateway) -> None:
    """Each probe is one record of ours; it leaves no refusal, no connection and no count of the sandbox's own."""
    before = {record["sandbox"] for record in gateway.records(event="sandbox.created")}
    with running(gateway, "sleep", "120") as process:
        box, _ = started(gateway, process, before)
        gateway.awaited(3, event="boundary.proven", sandbox=box)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    gateway.awaited(event="sandbox.ended", sandbox=box)
    names = {record["event"] for record in gateway.records(sandbox=box)}
    assert names == {"sandbox.created", "boundary.proven", "sandbox.ended"}


@contextlib.contextmanager
def running(gateway: TestGateway, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [EXEAT, "run", "--config", str(gateway.settings_file), "--", *argv],
        env={"PATH": PATH, "HOME": str(gateway.home), "LANG": "C.UTF-8"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def started(gateway: TestGateway, process: subprocess.Popen[bytes], before: set[str]) -> tuple[str, list[str]]:
    """The id of the sandbox that is not among `before`, once it is proven, and words to run a command in its network.

    `before` are those that were made already: one of an earlier test may be proven only now.
    """
    proven = gateway.awaited(where=lambda record: record["sandbox"] not in before, event="boundary.proven")
    (box,) = {record["sandbox"] for record in proven}
    tasks = Path(f"/proc/{process.pid}/task").iterdir()  # a child belongs to the thread that started it
    child = next(first for task in tasks for first in (task / "children").read_text().split())
    return box, [NSENTER, f"--net=/proc/{child}/ns/net"]
