"""Capture on a host: machines behind interfaces of their own, with the gateway as their only way out.

Network namespaces with a veth each stand in for microVMs: what is in one is root there, and reads no proxy variable.
All of it, the host's side too, lives in a namespace that the test run makes for itself, so that no rule and no
interface touches the machine.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from exeat.boundary import find_capture_tools
from tests.support.gateway import Completed, TestGateway
from tests.support.machines import Machine, capture, create, exeat, ip, kernel, machine, own_network
from tests.support.origins import Origin
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group("capture-host"),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="interfaces and rules of a host are root's"),
    pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed"),
]

POLICY = """
roles:
  agent:
    boundary: {external: a namespace, reason: the tests play a microVM}
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
      - {name: plain, host: plain.test, scheme: http, port: PORT, methods: [GET], paths: ["/x"]}
"""
CREDENTIALS = """
version: 1
credentials:
  api:
    {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
SECRET = "canary-capture-host-4d5e6f708192a3b4c5"
ELSEWHERE = "192.0.2.1", "2001:db8::1"
HOST = "198.19.200.1"
"""An address of the host that is on none of the captured interfaces."""


@dataclass(frozen=True)
class Scene:
    gateway: TestGateway
    api: Origin
    plain: Origin
    one: Machine
    two: Machine
    sandboxes: dict[str, dict[str, Any]]
    """By the machine's name, as `sandbox create` printed them."""

    def counters(self) -> dict[str, int]:
        """What the kernel counted so far; the rules are as they should be."""
        said = kernel("check", "-o", "json").json()
        assert said["ok"], said
        return dict(said["counters"])

    def curl(self, machine: Machine, *arguments: str) -> Completed:
        bundle = str(self.gateway.client_files / "bundle.pem")
        return machine.run("curl", "-sS", "--max-time", "60", "--cacert", bundle, *arguments)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("capture-host")
    with ExitStack() as stack:
        stack.enter_context(own_network())
        ip("addr", "add", f"{HOST}/32", "dev", "lo")
        # As on a host that routes for others: what is not dropped by a rule would be forwarded.
        for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path(f"/proc/sys/net/{path}").write_text("1")
        api = stack.enter_context(Origin("api.test", address="127.0.0.61").run_in_thread())
        plain = stack.enter_context(Origin("plain.test", address="127.0.0.62", tls=False).run_in_thread())
        gateway = TestGateway(
            folder,
            policy=POLICY.replace("PORT", str(plain.port)),
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[api, plain],
        )
        stack.enter_context(gateway)
        stack.callback(Path("/run/exeat-capture.lock").unlink, missing_ok=True)
        machines = [stack.enter_context(machine(number)) for number in (1, 2)]
        sandboxes = {made.name: capture(gateway, made) for made in machines}
        yield Scene(gateway, api, plain, machines[0], machines[1], sandboxes)


# --- what must not get out, or anywhere --------------------------------------------------------------------------


def test_a_bare_address_leads_nowhere_on_both_protocols(scene: Scene) -> None:
    """No looked-up name, no connection, whatever the port: reset for the client, a record of who tried."""
    served, recorded = len(scene.api.connections), len(bare_addresses(scene))
    for address in (*ELSEWHERE, "127.0.0.61", "198.18.0.77"):
        host = f"[{address}]" if ":" in address else address
        for url in (f"http://{host}/", f"https://{host}:{scene.api.port}/v1/x", f"http://{host}:8080/"):
            done = scene.curl(scene.one, "-k", url)
            assert done.code in (7, 28, 35, 52, 56), (url, done)
    assert len(scene.api.connections) == served
    found = bare_addresses(scene, recorded + 6)[recorded:]
    assert {record["sandbox"] for record in found} == {scene.sandboxes[scene.one.name]["id"]}


def bare_addresses(scene: Scene, count: int = 0) -> list[dict[str, Any]]:
    """Records of connections to an address that no name stands for, once there are `count`."""
    return scene.gateway.awaited(count, event="connection.refused", reason="address-literal-refused")


UNHEARD = """
import socket
def ask(family, kind, server, port, data=b"x" * 64):
    s = socket.socket(family, kind); s.settimeout(0.3)
    try:
        s.connect((server, port)) if kind == socket.SOCK_STREAM else s.sendto(data, (server, port))
        if kind == socket.SOCK_STREAM:
            s.sendall(data)
        if s.recv(64):
            print("ANSWERED", server, port)
    except OSError:
        pass
    finally:
        s.close()
v4, v6, udp, tcp = socket.AF_INET, socket.AF_INET6, socket.SOCK_DGRAM, socket.SOCK_STREAM
"""


def test_other_protocols_end_at_the_interface_and_are_counted(scene: Scene) -> None:
    """QUIC, other datagrams, DNS over TLS, ping, and a protocol nobody knows, on IPv4 and IPv6 (issue 3)."""
    before = scene.counters()
    program = (
        UNHEARD
        + f"""
for family, server in ((v4, {ELSEWHERE[0]!r}), (v6, {ELSEWHERE[1]!r})):
    for port in (443, 853, 4433, 123, 3129):
        ask(family, udp, server, port)
    ask(family, tcp, server, 853)
    raw = socket.socket(family, socket.SOCK_RAW, 253)  # RFC 3692: for experiments
    raw.sendto(b"x" * 32, (server, 0))
    echo = bytes.fromhex("0800f7ff00000000") if family == v4 else bytes.fromhex("8000000000000000")
    icmp = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_ICMP if family == v4 else socket.IPPROTO_ICMPV6)
    icmp.settimeout(0.3)
    icmp.sendto(echo, (server, 0))
"""
    )
    assert scene.one.python(program) == ""
    after = scene.counters()
    for name, least in (("quic", 2), ("datagrams", 8), ("dot", 2), ("pings", 2), ("other", 2)):
        assert after[name] - before[name] >= least, (name, before, after)
    for name in ("forwarded", "host"):
        assert after[name] == before[name], "prerouting lets nothing through to later hooks"


def test_the_hosts_own_addresses_and_ports_are_out_of_reach(scene: Scene) -> None:
    """A service on every address of the host hears nothing, by the interface's address or by another one."""
    made = scene.one
    addresses = {socket.AF_INET: (made.host4, scene.two.host4, HOST), socket.AF_INET6: (made.host6, scene.two.host6)}
    with ExitStack() as stack:
        heard: list[socket.socket] = []
        attempts = []
        for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                service = stack.enter_context(socket.socket(family, kind))
                if family == socket.AF_INET6:
                    service.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                service.bind((any_address, 0))
                if kind == socket.SOCK_STREAM:
                    service.listen()
                service.setblocking(False)
                heard.append(service)
                port = service.getsockname()[1]
                names = ("v4" if family == socket.AF_INET else "v6"), ("tcp" if kind == socket.SOCK_STREAM else "udp")
                attempts += [f"ask({names[0]}, {names[1]}, {one!r}, {port})" for one in addresses[family]]
        attempts += [
            f"ask(v4, tcp, {one!r}, {scene.gateway.port})" for one in ("127.0.0.1", made.host4, HOST)
        ]  # the gateway's shared listener
        assert made.python(UNHEARD + "\n".join(attempts)) == ""
        for service in heard:
            with pytest.raises(BlockingIOError):
                service.accept() if service.type == socket.SOCK_STREAM else service.recv(64)


def test_another_sandbox_is_out_of_reach(scene: Scene) -> None:
    """Neither its own address nor the gateway's ports towards it; what listens there hears nothing."""
    one, two = scene.one, scene.two
    service = """
import select, socket, sys
heard = []
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(family, kind)
        if family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        s.bind((address, 7777))
        kind == socket.SOCK_STREAM and s.listen()
        heard.append(s)
print("ready", flush=True)
ready = select.select([*heard, sys.stdin], [], [])[0]
print(len([s for s in ready if s is not sys.stdin]), flush=True)
"""
    argv = ["ip", "netns", "exec", two.name, "/usr/bin/python3", "-c", service]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdin is not None
        assert listening.stdout is not None
        assert listening.stdout.readline() == "ready\n"
        program = UNHEARD + "\n".join(
            f"ask({family}, {kind}, {address!r}, 7777)"
            for family, address in (("v4", two.own4), ("v6", two.own6))
            for kind in ("tcp", "udp")
        )
        assert one.python(program) == ""
        listening.stdin.close()
        assert listening.stdout.readline() == "0\n"
    recorded = len(bare_addresses(scene))
    done = one.run("curl", "-sS", "--max-time", "30", "-x", f"http://{two.host4}:3128", "http://plain.test/x")
    assert done.code != 0
    found = bare_addresses(scene, recorded + 1)[recorded:]
    assert [record["sandbox"] for record in found] == [scene.sandboxes[one.name]["id"]], "as what it is, at its own"


def test_a_borrowed_address_is_dropped_as_spoofed(scene: Scene) -> None:
    """Another sandbox's address, our own end's, and any other one: no answer, and nobody else's name in the log."""
    one, two = scene.one, scene.two
    before = scene.counters()["spoofed"]
    records = len(scene.gateway.settled(sandbox=str(scene.sandboxes[two.name]["id"])))
    for borrowed in (two.own4, one.host4, "192.0.2.9"):
        ip("-n", one.name, "addr", "add", f"{borrowed}/32", "dev", "lo")
        try:
            for url in ("http://plain.test/x", f"http://{one.host4}:3128/"):
                done = one.run(
                    "curl",
                    "-sS",
                    "--max-time",
                    "1",
                    "--interface",
                    borrowed,
                    "--resolve",
                    "plain.test:80:198.18.0.1",
                    url,
                )
                assert done.code != 0
        finally:
            ip("-n", one.name, "addr", "del", f"{borrowed}/32", "dev", "lo")
    assert scene.counters()["spoofed"] - before >= 3
    assert len(scene.gateway.records(sandbox=str(scene.sandboxes[two.name]["id"]))) == records


def test_a_denied_name_is_told_why(scene: Scene) -> None:
    """Clear text and TLS alike, to a program that reads no variable."""
    for url in ("http://evil.test/", "https://evil.test/"):
        done = scene.curl(scene.one, url)
        assert json.loads(done.out)["reason"] == "no-rule", (url, done)


def test_an_address_that_another_sandbox_looked_up_stands_for_nothing(scene: Scene) -> None:
    """What the stub told one sandbox is a bare address for its neighbour (RULINGS 5.7)."""
    told = scene.one.run("getent", "ahostsv4", "plain.test").out.split()[0]
    assert told.startswith("198.18.")
    own = scene.two.run("getent", "ahostsv4", "other.test").out.split()[0]
    assert own != told
    done = scene.curl(
        scene.two, "--resolve", f"plain.test:{scene.plain.port}:{told}", f"http://plain.test:{scene.plain.port}/x"
    )
    assert done.code != 0


# --- what works without any variable -----------------------------------------------------------------------------


def test_lookups_at_any_server_are_answered_by_the_stub(scene: Scene) -> None:
    """UDP and TCP, IPv4 and IPv6 servers, and the gateway's own address."""
    before = scene.counters()["lookups"]
    servers = ("192.0.2.53", "198.51.100.53", scene.one.host4, "2001:db8::53", scene.one.host6)
    program = f"""
import socket
q = b"\\x12\\x34\\x01\\x00\\x00\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x03api\\x04test\\x00\\x00\\x01\\x00\\x01"
for server in {servers!r}:
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(30)
    s.sendto(q, (server, 53)); print(s.recvfrom(512)[0][-4:-2].hex())
    s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(30)
    s.connect((server, 53)); s.sendall(len(q).to_bytes(2, "big") + q); print(s.recv(512)[-4:-2].hex())
"""
    assert scene.one.python(program).split() == ["c612"] * 2 * len(servers)
    assert scene.counters()["lookups"] - before >= 2 * len(servers)


def test_clear_text_and_tls_work_by_name_alone(scene: Scene) -> None:
    """Through each machine's own interface; the secret goes up, the placeholder stays below."""
    for made in (scene.one, scene.two):
        created = scene.sandboxes[made.name]
        assert scene.curl(made, "-f", f"http://plain.test:{scene.plain.port}/x").code == 0
        key = created["env"]["API_KEY"]
        done = scene.curl(made, "-f", "-H", f"Authorization: Bearer {key}", f"https://api.test:{scene.api.port}/v1/x")
        assert done.code == 0, (done, scene.gateway.errors())
        assert scene.api.received[-1].values("authorization") == [f"Bearer {SECRET}"]
        assert SECRET not in done.out
        intents = scene.gateway.awaited(event="broker.intent", sandbox=str(created["id"]))
        assert [record["host"] for record in intents] == ["api.test"]


def test_a_neighbours_placeholder_is_refused(scene: Scene) -> None:
    """The interface says who asks; a placeholder that another sandbox was given is misuse."""
    key = scene.sandboxes[scene.two.name]["env"]["API_KEY"]
    done = scene.curl(scene.one, "-H", f"Authorization: Bearer {key}", f"https://api.test:{scene.api.port}/v1/x")
    assert json.loads(done.out)["reason"] == "placeholder-misuse"


def test_a_client_with_a_proxy_variable_needs_no_token(scene: Scene) -> None:
    """The gateway's own address on the interface is a proxy for that sandbox."""
    proxy = f"http://{scene.one.host4}:3128"
    done = scene.curl(scene.one, "-f", "-x", proxy, f"http://plain.test:{scene.plain.port}/x")
    assert done.code == 0, done
    done = scene.curl(scene.one, "-f", "-x", f"http://[{scene.one.host6}]:3128", "http://exeat.internal/allowed")
    assert "api.test" in done.out, done


# --- the rules and the commands ----------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it, as /proc tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def test_the_rules_hold_while_every_process_of_ours_is_stopped(scene: Scene) -> None:
    """SIGSTOP for all: nothing passes and the kernel goes on counting; SIGCONT, and work goes on."""
    assert scene.gateway.process is not None
    before = scene.counters()
    processes = descendants(scene.gateway.process.pid)
    assert len(processes) >= 5
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        program = (
            UNHEARD
            + f"""
for family, server in ((v4, {ELSEWHERE[0]!r}), (v6, {ELSEWHERE[1]!r})):
    ask(family, udp, server, 443)
    ask(family, udp, server, 53)
    ask(family, tcp, server, 80)
"""
        )
        assert scene.one.python(program) == ""
        done = scene.curl(scene.one, "--max-time", "1", f"http://{HOST}:{scene.gateway.port}/")
        assert done.code != 0
        after = scene.counters()
        for name, more in (("quic", 2), ("lookups", 2), ("captured", 3)):
            assert after[name] - before[name] >= more, (name, before, after)
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
    url = f"http://plain.test:{scene.plain.port}/x"
    until(lambda: scene.curl(scene.one, "-f", url).code == 0, what="work after the stop")


def test_a_killed_worker_lets_nothing_out_and_its_successor_serves(scene: Scene) -> None:
    """SIGKILL: the sockets are the supervisor's too, and the next set of processes gets them."""
    assert scene.gateway.process is not None
    workers = [
        process
        for process in descendants(scene.gateway.process.pid)
        if b"proxy.worker" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    assert workers
    for process in workers:
        os.kill(process, signal.SIGKILL)
    served = len(scene.api.connections)
    assert scene.curl(scene.one, "--max-time", "1", "-k", f"https://127.0.0.61:{scene.api.port}/v1/x").code != 0
    until(lambda: scene.curl(scene.one, "-f", f"http://plain.test:{scene.plain.port}/x").code == 0, what="work again")
    assert len(scene.api.connections) == served


def test_changed_rules_are_found_and_put_back(scene: Scene) -> None:
    """`check` names the line and exits 1, no sandbox is created on such an interface, `apply` repairs it."""
    gateway, option = scene.gateway, scene.one.option
    subprocess.run(["nft", "flush", "chain", "inet", "exeat_capture", "passing"], check=True)
    try:
        done = kernel("check")
        assert done.code == 1
        assert 'iifname @sandboxes counter name "forwarded" drop' in done.out
        done = create(gateway, scene.one.link)
        assert (done.code, "not captured as it should be" in done.err) == (1, True), done
    finally:
        done = kernel("apply", "--interface", option)
    assert done.out.startswith("in force"), done
    assert kernel("apply", "--interface", option).out.startswith("unchanged")
    assert kernel("check").code == 0
    other = option.replace("198.19.1.5/30", "198.19.1.9/30").replace(scene.one.link, "exq9")
    assert kernel("check", "--interface", other).code == 1


def forwarded() -> tuple[int, int]:
    """Packets that the host has passed on, IPv4 and IPv6."""
    rows = [line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()]
    names, values = (row for row in rows if row[0] == "Ip:")
    six = dict(line.split() for line in Path("/proc/thread-self/net/snmp6").read_text().splitlines())
    return int(values[names.index("ForwDatagrams")]), int(six["Ip6OutForwDatagrams"])


def test_flushed_rules_are_found_and_nothing_is_forwarded_meanwhile(scene: Scene) -> None:
    """Some firewall services start with `flush ruleset`. The routing policy still keeps everything here."""
    one, two = scene.one, scene.two
    attempts = [f"ask(v4, {kind}, {two.own4!r}, 7777)\nask(v6, {kind}, {two.own6!r}, 7777)" for kind in ("tcp", "udp")]
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    try:
        before = forwarded()
        assert one.python(UNHEARD + "\n".join(attempts)) == ""
        assert forwarded() == before
        done = kernel("check", "--interface", one.option)
        assert (done.code, "there is none" in done.out) == (1, True), done
        done = create(scene.gateway, one.link)
        assert (done.code, "is not captured" in done.err) == (1, True), done
        for family in ("-4", "-6"):
            ip(family, "rule", "del", "pref", "1", "iif", one.link)
        one.python(UNHEARD + "\n".join(attempts))
        assert all(now > then for now, then in zip(forwarded(), before, strict=True)), "this test can see a hole"
    finally:
        kernel("apply", "--interface", one.option, "--interface", two.option)
    assert kernel("check", "--interface", one.option, "--interface", two.option).code == 0


def test_a_missing_guard_is_found_and_put_back(scene: Scene) -> None:
    """A rule of the routing policy that is gone, or that catches less, is a difference."""
    link = scene.one.link
    ip("-6", "rule", "del", "pref", "1", "iif", link)
    ip("-6", "rule", "add", "pref", "1", "iif", link, "to", "2001:db8::/32", "prohibit")
    try:
        done = kernel("check")
        assert (done.code, f"{link}: no rule of the IPv6 routing policy" in done.out) == (1, True), done
        assert (create(scene.gateway, link).code, done.code) == (1, 1)
    finally:
        ip("-6", "rule", "del", "pref", "1", "iif", link, "to", "2001:db8::/32")
        assert kernel("apply", "--interface", scene.one.option).out.startswith("in force")
    assert kernel("check").code == 0


def test_the_host_tells_no_other_address_of_its_own_by_arp(scene: Scene) -> None:
    """On the sandbox's link only the gateway's address there is answered for."""
    one = scene.one
    ip("-n", one.name, "route", "add", f"{HOST}/32", "dev", "eth0")
    try:
        one.python(UNHEARD + f"ask(v4, udp, {HOST!r}, 7777)\nask(v4, udp, {one.host4!r}, 7777)")
        known = one.run("ip", "-j", "neigh", "show", "dev", "eth0").json()
    finally:
        ip("-n", one.name, "route", "del", f"{HOST}/32", "dev", "eth0")
    answered = {entry["dst"] for entry in known if entry.get("lladdr")}
    assert one.host4 in answered
    assert HOST not in answered


def test_an_interface_keeps_its_rules_while_it_exists(scene: Scene) -> None:
    """Neither `--forget` nor `--only` sets a living interface free."""
    for words in (("--forget", scene.one.link), ("--only", "--interface", scene.two.option)):
        done = kernel("apply", *words)
        assert (done.code, "still exists" in done.err) == (1, True), done
    assert kernel("check").code == 0


def test_an_interface_that_is_not_what_the_plan_says_leads_to_no_sandbox(scene: Scene) -> None:
    """Not captured, a port of a bridge, with another address, or one that a sandbox has already."""
    gateway = scene.gateway
    ip("link", "add", "exq8", "type", "veth", "peer", "name", "exq8p")
    try:
        done = create(gateway, "exq8")
        assert "exq8 is not captured" in done.err, done
        assert kernel("apply", "--interface", "exq8=198.19.1.33/30").code == 0
        for prepare, why in (
            ((), "it is down"),
            (("link", "set", "exq8", "up"), "it has no address"),
            (("addr", "add", "198.19.1.34/30", "dev", "exq8"), "it has 198.19.1.34/30"),
        ):
            if prepare:
                ip(*prepare)
            done = kernel("check")
            assert (done.code, f"exq8: {why}" in done.out) == (1, True), (why, done)
        done = create(gateway, "exq8")
        assert (done.code, "it has 198.19.1.34/30" in done.err) == (1, True), done
        ip("link", "add", "exq8b", "type", "bridge")
        ip("link", "set", "exq8", "master", "exq8b")
        assert "it is a port of exq8b" in kernel("check").out
    finally:
        ip("link", "del", "exq8")
        subprocess.run(["ip", "link", "del", "exq8b"], check=False, capture_output=True)
        kernel("apply", "--forget", "exq8")
    done = create(gateway, scene.one.link)
    assert (done.code, "cannot listen" in done.err) == (1, True), done
    assert kernel("check").code == 0


def test_the_printed_commands_make_a_tap_that_a_sandbox_can_have(scene: Scene) -> None:
    """Each as it stands, in their order; the tap waits for its microVM, and its sandbox is there already."""
    printed = kernel("tap", "exqt", "--number", "4000").out.partition("# in the microVM")[0]
    lines = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    created = Completed(code=1, out="", err="")
    try:
        for words in lines:
            if words[0] == "ip":
                ip(*words[1:])
            elif words[1] == "sandbox":
                created = create(scene.gateway, words[-1])
                assert created.code == 0, created
            else:
                done = exeat(*words[1:])
                assert done.code == 0, done
    finally:
        subprocess.run(["ip", "link", "del", "exqt"], check=False, capture_output=True)
        kernel("apply", "--forget", "exqt")
    exeat("sandbox", "end", "--config", str(scene.gateway.settings_file), str(created.json()["id"]))


def test_a_new_interface_under_an_old_name_does_not_reach_the_old_sandbox(scene: Scene) -> None:
    """A microVM that is started on a remade tap is nobody until a sandbox is created for it (RULINGS 2.5)."""
    with machine(3) as made:
        old = str(capture(scene.gateway, made)["id"])
        url = f"http://plain.test:{scene.plain.port}/x"
        assert scene.curl(made, "-f", url).code == 0
        ip("link", "del", made.link)
        made.connect_link()
        served = len(scene.gateway.settled(3, sandbox=old))
        assert scene.curl(made, "--max-time", "3", url).code != 0
        assert scene.curl(made, "--max-time", "3", "-x", f"http://{made.host4}:3128", url).code != 0
        assert len(scene.gateway.records(sandbox=old)) == served
        created = create(scene.gateway, made.link).json()
        assert scene.curl(made, "-f", url).code == 0
        exeat("sandbox", "end", "--config", str(scene.gateway.settings_file), str(created["id"]))
        assert scene.curl(made, "--max-time", "3", url).code != 0, "an ended sandbox's interface leads nowhere"
        exeat("sandbox", "end", "--config", str(scene.gateway.settings_file), old)
    until(lambda: kernel("apply", "--forget", made.link).code == 0, what="the end of the interface with its namespace")
