"""The admin API over its real socket, called by the real client."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from broker.admin.client import AdminClient, AdminError
from broker.admin.peers import Peer, refuse
from broker.admin.server import serve_admin
from broker.vault.boot import BootRefused
from tests.support.vaults import SECRET, Rig
from wire.control import Checked, Cut, Frozen, Snapshot


@pytest.fixture
async def rig(tmp_path):
    made = await Rig(tmp_path).start()
    runner = await serve_admin(made.vault)
    yield made
    await runner.cleanup()
    await made.stop()


async def call(rig, name: str, *args, **kwargs):
    client = AdminClient(rig.boot.admin_path, timeout=60)
    return await asyncio.to_thread(lambda: getattr(client, name)(*args, **kwargs))


async def refused(rig, name: str, *args, **kwargs) -> AdminError:
    with pytest.raises(AdminError) as caught:
        await call(rig, name, *args, **kwargs)
    return caught.value


# --- who may call -----------------------------------------------------------------------------------------------------


async def test_a_boundary_is_proven_for_a_live_namespace_only(rig) -> None:
    """Unknown sandboxes, other channels and other words are refused with a code; what is shown says armed or not."""
    shared = await call(rig, "create_sandbox", "launched")
    assert (shared["boundary"], shared["armed"]) == (None, False)
    assert (await refused(rig, "prove_boundary", "sb_none")).code == "no-such-sandbox"
    assert (await refused(rig, "prove_boundary", shared["id"])).code == "bad-boundary"
    path = f"/v1/sandboxes/{shared['id']}/boundary"
    assert (await refused(rig, "call", "POST", path, {"proven": True})).code == "bad-field"
    assert (await refused(rig, "call", "POST", path, {})).code == "missing-field"
    assert (await refused(rig, "call", "POST", "/v1/sandboxes", {"role": "launched", "boundary": {}})).code == (
        "unknown-field"
    )
    url = "https://orders.shop.example/v1/orders/7"
    assert (await call(rig, "decide", "GET", url, sandbox=shared["id"]))["reason"] == "boundary-unproven"
    own = await call(rig, "create_sandbox", "launched", channel={"kind": "namespace"})
    assert await call(rig, "prove_boundary", own["id"]) == {"id": own["id"], "boundary": "namespaces"}
    shown = await call(rig, "sandbox", own["id"])
    assert (shown["boundary"], shown["armed"]) == ("namespaces", True)
    assert (await call(rig, "decide", "GET", url, sandbox=own["id"]))["decision"] == "permit"
    stated = await call(rig, "create_sandbox", "agent")
    assert (stated["boundary"], stated["armed"]) == ("external", True)


async def test_drops_are_recorded_for_a_sandbox_that_is_or_was(rig) -> None:
    """An object of counts, for a known id; the record carries who answers for the sandbox (RULINGS 9.9)."""
    assert (await refused(rig, "count_drops", "sb_none", {"quic": 1})).code == "no-such-sandbox"
    box = await call(rig, "create_sandbox", "agent", owner="ada")
    for counts in ({"QUIC": 1}, {"quic": -1}, {"quic": "1"}, {"quic": True}, {f"k{'x' * n}": 1 for n in range(17)}):
        assert (await refused(rig, "count_drops", box["id"], counts)).code == "bad-field", counts
    assert await call(rig, "count_drops", box["id"], {"quic": 2, "pings": 1}) == {"id": box["id"], "count": 3}
    await call(rig, "end_sandbox", box["id"])
    await call(rig, "count_drops", box["id"], {}, interface="tap0", error="unreadable")
    first, last = (dict(event.fields) for event in rig.journal.named("drops.counted"))
    assert (first["sandbox"], first["owner"], first["count"], first["drops"]) == (
        box["id"], "ada", 3, ("pings=1", "quic=2")
    )  # fmt: skip
    assert (last["count"], last["error"], last["interface"]) == (0, "unreadable", "tap0")


def same(pid, kind):
    return (4, 1)


def foreign(kind_that_differs):
    return lambda pid, kind: (4, 2) if kind == kind_that_differs and pid != "self" else (4, 1)


def unreadable(pid, kind):
    if pid != "self":
        raise PermissionError
    return (4, 1)


def gone(pid, kind):
    if pid != "self":
        raise FileNotFoundError
    return (4, 1)


@pytest.mark.parametrize(
    ("sentence", "peer", "read", "allowed"),
    [
        ("a uid that is not on the list", Peer(pid=9, uid=7), same, False),
        ("root where root is not on the list", Peer(pid=9, uid=0), same, False),
        ("a peer in another user namespace", Peer(pid=9, uid=1000), foreign("user"), False),
        ("a peer in another PID namespace", Peer(pid=9, uid=1000), foreign("pid"), False),
        ("a peer in another network namespace", Peer(pid=9, uid=1000), foreign("net"), False),
        ("a peer whose PID is not ours to see", Peer(pid=0, uid=1000), same, False),
        ("a peer of our uid that made itself unreadable", Peer(pid=9, uid=1000), unreadable, False),
        ("a peer that is gone", Peer(pid=9, uid=1000), gone, False),
        ("another uid on the list that the kernel hides", Peer(pid=9, uid=1001), unreadable, True),
        ("our own uid in our own namespaces", Peer(pid=9, uid=1000), same, True),
    ],
)
def test_peers(sentence, peer, read, allowed) -> None:
    """Uid on the list and all three namespaces our own, or no (RULINGS 1.5)."""
    why = refuse(peer, frozenset({1000, 1001}), own_uid=1000, read=read)
    assert (why is None) is allowed, sentence


async def test_a_peer_that_is_not_listed_is_refused(rig) -> None:
    """Over the socket: 403 with a sentence and what would help, and nothing done."""
    object.__setattr__(rig.vault.boot, "admin_uids", (65533,))
    error = await refused(rig, "create_sandbox", "agent")
    assert (error.code, error.status) == ("not-permitted", 403)
    assert error.remedy
    assert rig.vault.table.live() == ()


async def raw(rig, request: bytes) -> bytes:
    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(rig.boot.admin_path)
            sock.sendall(request)
            received = b""
            while piece := sock.recv(65536):
                received += piece
            return received

    return await asyncio.to_thread(talk)


async def test_a_foreign_host_header_is_refused(rig) -> None:
    """A page that made a browser call us says its own name (B155)."""
    answer = await raw(rig, b"GET /v1/status HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403")


async def test_a_form_post_is_refused(rig) -> None:
    """What is not application/json is not read."""
    body = b'{"role": "agent"}'
    answer = await raw(
        rig,
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
    )
    assert answer.startswith(b"HTTP/1.1 400")
    assert rig.vault.table.live() == ()


async def test_the_socket_is_ours_alone(rig) -> None:
    """The socket file has mode 0600."""
    from pathlib import Path

    assert Path(rig.boot.admin_path).stat().st_mode & 0o777 == 0o600


async def test_a_loose_folder_for_the_socket_refuses(rig) -> None:
    """A folder that others may write would let them put their own socket there."""
    rig.directory.chmod(0o777)
    with pytest.raises(BootRefused, match="admin-modes"):
        await serve_admin(rig.vault)


async def test_nobody_there_is_said_so(tmp_path) -> None:
    """The client names the command that starts the gateway."""
    with pytest.raises(AdminError) as caught:
        AdminClient(tmp_path / "none.sock").status()
    assert caught.value.code == "not-running"
    assert "exeat up" in caught.value.remedy


# --- sandboxes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "arguments", "code"),
    [
        ("a role that policy does not know", {"role": "root"}, "unknown-role"),
        ("no time to live", {"role": "agent", "ttl": 0}, "bad-ttl"),
        ("a time beyond the bound", {"role": "agent", "ttl": "999d"}, "bad-ttl"),
        ("a time that is no time", {"role": "agent", "ttl": "soon"}, "bad-ttl"),
        ("an attribute with a path in it", {"role": "agent", "attributes": {"a": "../x"}}, "bad-attribute"),
        ("an attribute with a star", {"role": "agent", "attributes": {"a": "*"}}, "bad-attribute"),
        ("a line end in the owner", {"role": "agent", "owner": "a\nb"}, "bad-value"),
        ("an unknown channel", {"role": "agent", "channel": {"kind": "magic"}}, "bad-channel"),
        ("an address channel without address", {"role": "agent", "channel": {"kind": "address"}}, "bad-channel"),
        ("a field with a wrong type", {"role": 7}, "bad-field"),
        ("a tenant that is two words", {"role": "agent", "tenant": "a b"}, "bad-tenant"),
    ],
)
async def test_a_sandbox_that_cannot_be(rig, sentence, arguments, code) -> None:
    """Wrong wishes are refused by code and leave nothing behind."""
    error = await refused(rig, "create_sandbox", **arguments)
    assert (error.code, error.status) == (code, 400), sentence
    assert error.detail
    assert rig.vault.table.live() == ()
    assert "sandbox.created" not in rig.journal.names()


async def test_without_a_log_no_sandbox(rig) -> None:
    """Creation that cannot be recorded durably did not happen, not after a restart either."""
    rig.journal.failing = True
    error = await refused(rig, "create_sandbox", "agent")
    assert (error.code, error.status) == ("audit-unavailable", 503)
    assert rig.vault.table.live() == ()
    assert rig.vault.state.sandboxes() == ()


async def test_unknown_fields_and_calls_are_refused(rig) -> None:
    """A field or a call that is not in the table is an error."""
    assert (
        await refused(rig, "call", "POST", "/v1/sandboxes", {"role": "agent", "admin": True})
    ).code == "unknown-field"
    assert (await refused(rig, "call", "POST", "/v1/nothing", {})).code == "no-such-call"
    assert (await refused(rig, "sandbox", "sb_none")).code == "no-such-sandbox"
    assert (await refused(rig, "end_sandbox", "sb_none")).code == "no-such-sandbox"


async def test_a_sandbox_is_known_everywhere_when_create_returns(rig) -> None:
    """The answer comes after every worker acknowledged, holds the token once, and is on record durably."""
    worker = await rig.process("worker", "worker-1")
    made = await call(rig, "create_sandbox", "agent", ttl="10m", owner="o", attributes={"repository": "shop/web"})
    known = [made["id"] in message.document.decode() for message in worker.named(Snapshot)]
    assert known[-1]
    assert made["unacknowledged"] == []
    assert made["token"] in made["proxy_url"]
    assert set(made["env"]) == {"SHOP_API_KEY", "STOCK_TOKEN"}
    assert made["env"]["SHOP_API_KEY"].startswith("sk_live_Xeat")
    assert ("sandbox.created", True) in [(event.name, durable) for event, durable in rig.journal.events]
    (listed,) = await call(rig, "sandboxes")
    for once in (made["token"], *made["env"].values()):
        assert once not in json.dumps(listed)
        assert once not in str([event.fields for event, _ in rig.journal.events])


async def test_a_channel_of_its_own_gets_a_key(rig) -> None:
    """A port, unix or namespace channel has a key for its listener, and its proxy URL needs no token."""
    made = await call(rig, "create_sandbox", "agent", channel={"kind": "unix"})
    assert len(bytes.fromhex(made["channel_key"])) == 32
    assert "@" not in made["proxy_url"]
    shared = await call(rig, "create_sandbox", "agent")
    assert shared["channel_key"] is None


async def test_a_role_without_credentials_gets_no_placeholder(rig) -> None:
    """Only what the role's rules name is handed out."""
    assert (await call(rig, "create_sandbox", "idle"))["env"] == {}


async def test_a_worker_that_does_not_acknowledge_is_given_up(rig) -> None:
    """Within the bound or not at all: its stream is closed, it is named, and the sound one goes on."""
    deaf = await rig.process("worker", "worker-2", answers=False)
    await rig.process("worker", "worker-1")
    made = await call(rig, "create_sandbox", "agent")
    assert made["unacknowledged"] == ["worker-2"]
    await asyncio.wait_for(deaf.closed.wait(), 60)
    assert (await call(rig, "status"))["lost"] == ["worker-2"]
    assert rig.journal.named("process.lost")


async def test_an_end_returns_after_everything_is_closed(rig) -> None:
    """New snapshot, then the cut, both acknowledged; says what went and what stays; durable record."""
    worker = await rig.process("worker", "worker-1")
    executor = await rig.process("executor", "executor-1")
    made = await call(rig, "create_sandbox", "agent")
    ended = await call(rig, "end_sandbox", made["id"])
    for process in (worker, executor):
        (cut,) = process.named(Cut)
        assert (cut.kind, cut.subject) == ("sandbox", made["id"])
        before = process.messages[: process.messages.index(cut)]
        last = [message for message in before if isinstance(message, Snapshot)][-1]
        assert made["id"] not in last.document.decode()
    assert ended["unacknowledged"] == []
    assert any("placeholder" in line for line in ended["deleted"])
    assert any("log" in line for line in ended["remains"])
    assert ("sandbox.ended", True) in [(event.name, durable) for event, durable in rig.journal.events]
    assert (await call(rig, "sandboxes")) == []
    (past,) = await call(rig, "sandboxes", ended=True)
    assert past["ended_at"]


async def frozen_of(rig, sandbox: str, count: int) -> list[dict]:
    """What `show` says once it names `count` frozen operations."""
    async with asyncio.timeout(60):
        while len(shown := (await call(rig, "sandbox", sandbox))["frozen"]) != count:
            await asyncio.sleep(0)
    return shown


async def test_nothing_is_thawed_of_a_sandbox_that_is_not(rig) -> None:
    """An unknown id is refused, and nothing is recorded or sent."""
    worker = await rig.process("worker", "worker-1")
    with pytest.raises(AdminError) as caught:
        await call(rig, "thaw_sandbox", "sb_nobody")
    assert caught.value.code == "no-such-sandbox"
    assert worker.named(Cut) == []
    assert "sandbox.thawed" not in [event.fields["action"] for event in rig.journal.named("admin.action")]


async def test_only_workers_freeze(rig) -> None:
    """An executor that says so is cut off; a word about a sandbox that is not live is not kept."""
    worker = await rig.process("worker", "worker-1")
    executor = await rig.process("executor", "executor-1")
    executor.say(Frozen(tenant="default", sandbox="sb_x", operation="", budget="refusals", seconds=60))
    await executor.closed.wait()
    worker.say(Frozen(tenant="default", sandbox="sb_nobody", operation="", budget="refusals", seconds=60))
    worker.say(Checked(passed=True))
    async with asyncio.timeout(60):
        while rig.vault.fleet.members("worker")[0].checked is None:
            await asyncio.sleep(0)
    assert (await call(rig, "status"))["frozen"] == 0


async def test_what_is_frozen_is_shown_and_thawed_on_record(rig) -> None:
    """`show` and `status` tell it, `thaw` reaches every worker and is written first; time ends it too."""
    worker = await rig.process("worker", "worker-1")
    made = await call(rig, "create_sandbox", "agent")
    worker.say(Frozen(tenant="default", sandbox=made["id"], operation="shop/read", budget="paths", seconds=1800))
    worker.say(Frozen(tenant="default", sandbox=made["id"], operation="", budget="refusals", seconds=60))
    shown = await frozen_of(rig, made["id"], 2)
    assert {(item["operation"], item["budget"]) for item in shown} == {("shop/read", "paths"), ("all", "refusals")}
    assert (await call(rig, "status"))["frozen"] == 1
    rig.clock.advance(61)
    assert [item["operation"] for item in await frozen_of(rig, made["id"], 1)] == ["shop/read"]
    assert (await call(rig, "thaw_sandbox", made["id"]))["thawed"] == 1
    (cut,) = worker.named(Cut)
    assert (cut.kind, cut.tenant, cut.subject) == ("thaw", "default", made["id"])
    assert (await call(rig, "sandbox", made["id"]))["frozen"] == []
    [record] = [event for event in rig.journal.named("admin.action") if event.fields["action"] == "sandbox.thawed"]
    assert record.fields["sandbox"] == made["id"]
    assert ("admin.action", True) in [(event.name, durable) for event, durable in rig.journal.events]


async def test_time_ends_sandboxes_by_itself(rig) -> None:
    """The sweep ends what is over, with the same cut and record as a command."""
    worker = await rig.process("worker", "worker-1")
    made = await call(rig, "create_sandbox", "agent", ttl=5)
    rig.clock.advance(5)
    assert await rig.vault.desk.end_expired() == (made["id"],)
    assert worker.named(Cut)
    assert rig.journal.named("sandbox.ended")[0].fields["reason"] == "expired"


# --- policy -----------------------------------------------------------------------------------------------------------


async def test_an_invalid_policy_keeps_the_last_good_one(rig) -> None:
    """The reload is refused with file:line:column; the digest in force stays; status shows both."""
    before = (await call(rig, "policy"))["digest"]
    rig.policy_path.write_text("version: 1\nroles:\n  agent:\n    allow:\n      - {hots: a.example}\n")
    error = await refused(rig, "reload_policy")
    assert (error.code, error.status) == ("policy-invalid", 422)
    assert any(problem.startswith("policy.yaml:5:") for problem in error.body["problems"])
    status = await call(rig, "status")
    assert status["policy"]["digest"] == before
    assert status["policy"]["rejected"]["error"] == "policy-invalid"
    assert rig.journal.names()[-1] == "policy.rejected"


@pytest.mark.parametrize(
    ("sentence", "text", "code"),
    [
        ("an empty file", "", "policy-empty"),
        ("comments only", "# later\n\n", "policy-empty"),
        ("YAML that is none", "a: [", "policy-invalid"),
        (
            "a test that fails",
            "version: 1\nroles: {agent: {allow: [{host: a.example, name: a, methods: [GET], paths: [/a]}]}}\n"
            'tests: [{role: agent, deny: "GET https://a.example/a"}]\n',
            "policy-tests-failed",
        ),
    ],
)
async def test_what_is_no_policy_changes_nothing(rig, sentence, text, code) -> None:
    """Empty, broken and untrue policies are refused by code."""
    before = rig.vault.desk.active()
    rig.policy_path.write_text(text)
    assert (await refused(rig, "reload_policy")).code == code, sentence
    assert rig.vault.desk.active() is before


async def test_a_policy_that_others_may_write_is_refused(rig) -> None:
    """Whoever can write the file would write the rules."""
    rig.policy_path.chmod(0o666)
    assert (await refused(rig, "reload_policy")).code == "policy-modes"


async def test_a_missing_policy_on_reload_keeps_the_last_one(rig) -> None:
    """A file that went away is an error with its remedy, not an empty policy."""
    rig.policy_path.unlink()
    error = await refused(rig, "reload_policy")
    assert error.code == "policy-missing"
    assert "exeat init" in error.remedy
    assert (await call(rig, "policy"))["digest"]


async def test_a_new_policy_reaches_the_broker_first(rig) -> None:
    """Executors acknowledge before workers are sent it; then what the old one permitted is cut."""
    executor = await rig.process("executor", "executor-1", answers=False)
    worker = await rig.process("worker", "worker-1")
    rig.policy_path.write_text(rig.policy_path.read_text().replace("/v1/stock/{id}", "/v2/stock/{id}"))
    before = len(worker.named(Snapshot))
    reload = asyncio.create_task(call(rig, "reload_policy"))
    fresh = await executor.seen(lambda m: isinstance(m, Snapshot) and "/v2/stock" in m.document.decode())
    assert len(worker.named(Snapshot)) == before
    from wire.control import Ack, CutDone

    executor.say(Ack(generation=fresh.generation))
    cut = await executor.seen(lambda m: isinstance(m, Cut))
    executor.say(CutDone(id=cut.id))
    answer = await reload
    assert answer["changed"]
    assert answer["unacknowledged"] == []
    assert worker.named(Cut)[0].kind == "policy"
    assert worker.named(Cut)[0].subject == answer["digest"]


async def test_an_unchanged_policy_cuts_nothing(rig) -> None:
    """Reloading the same files changes no digest and closes nothing."""
    worker = await rig.process("worker", "worker-1")
    assert (await call(rig, "reload_policy"))["changed"] is False
    assert worker.named(Cut) == []


async def test_decide_tells_what_would_happen(rig) -> None:
    """A question about a request nobody sent, for a role or a sandbox."""
    url = "https://orders.shop.example/v1/orders/7"
    assert (await call(rig, "decide", "DELETE", url, role="agent"))["reason"] == "no-rule"
    answer = await call(rig, "decide", "GET", url, role="agent")
    assert (answer["decision"], answer["rule"], answer["credential"]) == ("permit", "agent/orders.read", "shop-orders")
    held = await call(rig, "decide", "POST", "https://orders.shop.example/release", role="agent")
    assert held["decision"] == "hold"
    assert (await refused(rig, "decide", "GET", url)).code == "missing-field"


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "name", "value", "code"),
    [
        ("eleven bytes", "a", b"elevenbytes", "secret-short"),
        ("a line end inside", "a", b"a\r\nX: y-0123456789", "secret-control"),
        ("nothing", "a", b"", "secret-empty"),
        ("a name with spaces", "a b", b"x" * 20, "secret-name"),
        ("a name of ours", "exeat/authority", b"x" * 20, "secret-name"),
        ("a name that is taken", "shop/orders", b"x" * 20, "secret-exists"),
    ],
)
async def test_secrets_that_are_refused(rig, sentence, name, value, code) -> None:
    """By code, without a word of the value, and the store unchanged."""
    before = rig.vault.store.generation
    error = await refused(rig, "add_secret", name, value, owner="me")
    assert error.code == code, sentence
    assert error.detail != name, "a sentence, not only the name"
    if value:
        assert value.decode() not in str(error.body)
    assert rig.vault.store.generation == before


async def test_the_authority_is_not_a_secret_of_the_api(rig) -> None:
    """Our own key is not listed, not rotated, not removed."""
    assert all(not item["name"].startswith("exeat/") for item in await call(rig, "secrets"))
    assert (await refused(rig, "remove_secret", "exeat/authority")).code == "secret-name"
    assert (await refused(rig, "rotate_secret", "exeat/authority", b"x" * 20)).code == "secret-name"


async def test_secrets_are_listed_without_values(rig) -> None:
    """Names, owners and versions; a change is the next generation, with its digest in state and log."""
    await call(rig, "add_secret", "shop/pin", b"pin1", owner="me", scrub=False)
    await call(rig, "rotate_secret", "shop/pin", b"pin2")
    listed = {item["name"]: item for item in await call(rig, "secrets")}
    assert (listed["shop/pin"]["version"], listed["shop/pin"]["scrub"]) == (2, False)
    assert SECRET.decode() not in json.dumps(listed)
    store = rig.vault.store
    assert rig.vault.state.store_generation() == (store.generation, store.digest)
    rotated = rig.journal.named("secret.rotated")[0].fields
    assert (rotated["generation"], rotated["store_digest"]) == (store.generation, store.digest)


async def test_a_rotation_cuts_what_used_the_old_value(rig) -> None:
    """Every process closes what runs on the credentials that read this secret, and on no others."""
    executor = await rig.process("executor", "executor-1")
    await call(rig, "rotate_secret", "shop/orders", b"canary-new-0123456789")
    assert [(cut.kind, cut.subject) for cut in executor.named(Cut)] == [("credential", "shop-orders")]


async def test_another_reference_cuts_its_credential(rig) -> None:
    """A policy whose digest is the same but whose secret reference changed closes what used the old one."""
    executor = await rig.process("executor", "executor-1")
    rig.credentials_path.write_text(rig.credentials_path.read_text().replace("store:shop/stock", "store:shop/new"))
    assert (await call(rig, "reload_policy"))["changed"]
    assert ("credential", "shop-stock") in [(cut.kind, cut.subject) for cut in executor.named(Cut)]
    assert ("credential", "shop-orders") not in [(cut.kind, cut.subject) for cut in executor.named(Cut)]


async def test_a_clock_is_reset_on_record_only(rig) -> None:
    """Without a reason nothing; with one, the floor is the machine's time and the log says who and why."""
    assert (await refused(rig, "reset_clock", " ")).code == "bad-field"
    rig.vault.state.raise_clock_floor(rig.clock.now + 10_000)
    await call(rig, "reset_clock", "the battery was replaced")
    assert rig.vault.state.clock_floor() == rig.clock.machine()
    event = next(event for event in rig.journal.named("admin.action") if event.fields["action"] == "clock.reset")
    assert event.fields["why"] == "the battery was replaced"


async def test_the_root_certificate_is_public_and_its_key_is_not(rig) -> None:
    """The CA call gives the certificate and its fingerprint only."""
    answer = await call(rig, "ca")
    assert answer["root_pem"].startswith("-----BEGIN CERTIFICATE-----")
    assert "PRIVATE" not in json.dumps(answer)


async def test_an_unexpected_error_shows_nothing(rig, monkeypatch, capsys) -> None:
    """A fault in a handler becomes a fixed code; its text and locals stay inside (RULINGS 1.6)."""

    def fail(*args, **kwargs):
        canary = SECRET.decode()
        raise RuntimeError(canary)

    monkeypatch.setattr(rig.vault.store, "names", fail)
    error = await refused(rig, "secrets")
    assert (error.code, error.status) == ("internal-error", 500)
    assert "canary" not in str(error.body)
    assert "canary" not in capsys.readouterr().err


async def test_status_shows_the_last_self_check_of_each_worker(rig) -> None:
    """Nothing before the first; then its result and time. An executor that sends one is cut off."""
    worker = await rig.process("worker", "worker-1")
    executor = await rig.process("executor", "executor-1")
    shown = {process["name"]: process for process in (await call(rig, "status"))["processes"]}
    assert "self_check" not in shown["worker-1"]
    executor.say(Checked(passed=True))
    await executor.closed.wait()
    for passed in (True, False):
        worker.say(Checked(passed=passed))
        async with asyncio.timeout(60):
            while rig.vault.fleet.members("worker")[0].checked != (passed, rig.clock.wall()):
                await asyncio.sleep(0)
        (process,) = (await call(rig, "status"))["processes"]
        assert process["self_check"] == {"passed": passed, "at": rig.clock.wall()}
