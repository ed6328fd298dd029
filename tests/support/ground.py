"""The ground on which attack cases are played: four origins that witness, one policy, one gateway over it.

ok.test       bound to the credential `ok`; its secret is CAN
pub.test      allowed without a credential; so are npm.test, a.wild.test, bücher.test; raw.test is a tunnel
plain.test    allowed in clear text
h2.test       as pub.test, by HTTP/2; h2ok.test as ok.test
old.test      as pub.test, for clients that send no server name
evil.test     reachable and served, but no rule names it; denied.test is denied by rule
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from audit.segments import segment_files
from audit.verify import verify
from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from rules.policy import Policy
from tests.support.gateway import Box, TestGateway, destinations
from tests.support.machines import can_capture, own_network
from tests.support.origins import Origin, Received

CAN = b"canary-9fQ2hLx7VbT4mKz1RwN8sDc3"
OTHER_CAN = b"canary-other-Pq5Yt0Jr6Gv2We8"
SHAPE = "sk_{32}"

CREDENTIALS = """\
version: 1
credentials:
  ok: {kind: bearer, secret: "store:ok", hosts: [ok.test, h2ok.test, mixedok.test], owner: team-ok,
       placeholder: {env: OK_KEY, shape: "sk_{32}"}}
  npm: {kind: bearer, secret: "store:npm", hosts: [npm.test], owner: team-npm,
        placeholder: {env: NPM_KEY, shape: "npm_{32}"}}
"""

ANSWERS = {
    "mixed.test": ["127.0.0.22", "10.0.0.5"],
    "mixedok.test": ["127.0.0.21", "10.0.0.5"],
    "shared.inside.test": ["100.64.0.1"],
    "wire-server.inside.test": ["168.63.129.16"],
    "multicast.inside.test": ["224.0.0.1"],
    "zero.inside.test": ["0.0.0.0"],
    "metadata.inside.test": ["169.254.169.254"],
    "benchmark.inside.test": ["198.18.0.1"],
    "nat64.inside.test": ["64:ff9b::7f00:15"],
    "mapped.inside.test": ["::ffff:127.0.0.21"],
    "sixtofour.inside.test": ["2002:7f00:15::1"],
    "loopback.inside.test": ["127.0.0.21"],
    "private.inside.test": ["10.0.0.5"],
}
"""What names resolve to, at the entry points whose resolver is the test's."""

POLICY = """\
  mixed.test: {addresses: [127.0.0.22/32], port: PUB}
  mixedok.test: {addresses: [127.0.0.21/32]}
services:
  corp-npm: {like: npm, base: "https://npm.test:PUB"}
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - {name: read, host: ok.test, methods: [GET], paths: ["/v1/read/**"], credential: ok}
      - name: ask
        host: ok.test
        methods: [POST]
        paths: [/v1/ask]
        body: {json: {op: [read], id: string}, max: 4KiB}
        effect: read
        credential: ok
      - name: kept
        host: ok.test
        methods: [GET]
        paths: [/v1/kept]
        credential: ok
        result: {keep: [id]}
      - {name: release, host: ok.test, methods: [POST], paths: [/v1/release], credential: ok,
         approval: {from: release-managers}}
      - {name: item, host: ok.test, methods: [GET], paths: ["/v1/items/{id}"], credential: ok}
      - {name: ok-live, host: ok.test, methods: [GET], paths: [/v1/live], credential: ok, websocket: true}
      - {name: pub, host: pub.test, methods: [GET], paths: ["/v1/**"]}
      - {name: find, host: pub.test, methods: [GET], paths: [/find], query: {q: any}}
      - {name: refs, host: pub.test, methods: [GET], paths: ["/{repo}/info/refs"], query: {service: [git-upload-pack]}}
      - {name: fetch, host: pub.test, methods: [POST], paths: ["/{repo}/git-upload-pack"], effect: read}
      - {name: form, host: pub.test, methods: [POST], paths: [/form], limits: {upload: 64KiB}}
      - name: pub-ask
        host: pub.test
        methods: [POST]
        paths: [/ask]
        body: {json: {op: [read], id: string}, max: 4KiB}
        effect: read
      - {name: live, host: pub.test, methods: [GET], paths: [/live], websocket: true}
      - {name: clear, host: plain.test, scheme: http, methods: [GET], paths: ["/v1/**"]}
      - {name: wild, host: "*.wild.test", port: PUB, methods: [GET], paths: ["/v1/**"]}
      - {name: old, host: old.test, methods: [GET], paths: ["/v1/**"]}
      - {name: books, host: "bücher.test", port: PUB, methods: [GET], paths: ["/v1/**"]}
      - {name: inside, host: "*.inside.test", methods: [GET], paths: ["/v1/**"]}
      - {name: mixed, host: mixed.test, methods: [GET], paths: ["/v1/**"]}
      - {name: mixed-ok, host: mixedok.test, methods: [GET], paths: ["/v1/**"], credential: ok}
      - {name: raw, host: raw.test, port: PUB, tunnel: true, reason: a client that pins its certificate}
      - {service: corp-npm, operations: [read]}
      - {name: h2, host: h2.test, methods: [GET], paths: ["/v1/**"], protocol: h2}
      - {name: h2-find, host: h2.test, methods: [GET], paths: [/find], query: {q: any}, protocol: h2}
      - name: h2-ask
        host: h2.test
        methods: [POST]
        paths: [/ask]
        body: {json: {op: [read], id: string}, max: 4KiB}
        effect: read
        protocol: h2
      - {name: h2-read, host: h2ok.test, methods: [GET], paths: ["/v1/read/**"], credential: ok, protocol: h2}
      - {name: h2-item, host: h2ok.test, methods: [GET], paths: ["/v1/items/{id}"], credential: ok, protocol: h2}
      - name: h2-asks
        host: h2ok.test
        methods: [POST]
        paths: [/v1/ask]
        body: {json: {op: [read], id: string}, max: 4KiB}
        effect: read
        credential: ok
        protocol: h2
    deny:
      - {name: never, host: denied.test}
"""


class Ground:
    """A context manager. Origins run at once; the gateway starts when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broken: dict[str, str] = {}
        """Entry points that did not start, and why."""
        self._stack = contextlib.ExitStack()
        self.ok = Origin("ok.test", "h2ok.test", address="127.0.0.21")
        # A name for which no rule is written stands on each origin too: a wrong pass would be seen.
        self.pub = Origin(
            "pub.test",
            "npm.test",
            "raw.test",
            "a.wild.test",
            "xn--bcher-kva.test",
            "h2.test",
            "old.test",
            address="127.0.0.22",
            authority=self.ok.authority,
        )
        self.pub.entries["old.test"] = "sni: optional"
        self.plain = Origin("plain.test", address="127.0.0.23", tls=False)
        self.evil = Origin(
            "evil.test", "denied.test", "notok.test", "ok.test.evil.test", "a.b.wild.test", "wild.test",
            address="127.0.0.24", authority=self.ok.authority,
        )  # fmt: skip
        self.origins = (self.ok, self.pub, self.plain, self.evil)

    def __enter__(self) -> Ground:
        if can_capture():
            # What is started from here on has a network of its own, and so can have captured interfaces.
            self._stack.enter_context(own_network())
        for origin in self.origins:
            self._stack.enter_context(origin.run_in_thread())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def enter[T](self, manager: contextlib.AbstractContextManager[T]) -> T:
        """Enter `manager` until the ground is left."""
        return self._stack.enter_context(manager)

    @property
    def rules(self) -> str:
        """The policy after `version:` and the origins under `destinations:`; it begins with further destinations."""
        return POLICY.replace("PUB", str(self.pub.port))

    @property
    def whole_policy(self) -> str:
        """The policy file, as the gateway writes it."""
        return "version: 1\n" + destinations(*self.origins) + textwrap.dedent(self.rules)

    @property
    def ca_files(self) -> dict[str, str]:
        """What stands in the `file:` of each destination."""
        return {f"{origin.names[0]}.pem": origin.ca_pem for origin in self.origins if origin.tls}

    @cached_property
    def policy(self) -> Policy:
        """The same policy, compiled as a process does."""
        sources = Sources(
            policy={"policy.yaml": self.whole_policy},
            credentials=("credentials.yaml", CREDENTIALS),
            services={},
            ca_files=lambda name: self.ca_files[name.rpartition("/")[2]],
        )
        return compile_policy(parse_sources(sources).document)

    @cached_property
    def gateway(self) -> TestGateway:
        """Real processes over the same files."""
        folder = Path(tempfile.mkdtemp(prefix="gateway-", dir=self.folder))
        made = TestGateway(
            folder,
            policy=self.rules,
            credentials=CREDENTIALS,
            secrets={"ok": CAN.decode(), "npm": OTHER_CAN.decode()},
            origins=self.origins,
        )
        return self._stack.enter_context(made)

    @cached_property
    def second(self) -> Box:
        """The sandbox of the control requests."""
        return self.gateway.sandbox()

    @cached_property
    def foreign_refusal(self) -> str:
        """The request id of a refusal of the second sandbox."""
        said = self.second.curl("-x", self.second.proxy_url, "http://evil.test/foreign")
        return str(said.json()["request_id"])

    @cached_property
    def tail(self) -> Tail:
        """The gateway's log."""
        return Tail(self.gateway.log)

    def verify(self) -> None:
        """The log, where one was written, verifies. AssertionError naming the first bad record otherwise."""
        if "gateway" in self.__dict__:
            report = verify([self.gateway.log])
            assert report.bad is None, report.bad

    def witness(self) -> Witness:
        """What the origins have seen up to now."""
        return Witness(self)


class Tail:
    """A log that grows, each line read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All records up to now, in order."""
        for path in segment_files(self._folder):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self.records += [json.loads(line) for line in whole.splitlines()]
        return self.records


class Witness:
    """The origins from one moment on."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._before = [(len(o.connections), o.bytes_in, len(o.received)) for o in ground.origins]

    def touched(self) -> list[str]:
        """The origins that saw a connection or a byte since."""
        return [
            origin.names[0]
            for origin, (connections, size, _) in zip(self._ground.origins, self._before, strict=True)
            if (len(origin.connections), origin.bytes_in) != (connections, size)
        ]

    def received(self) -> Iterator[tuple[str, Received]]:
        """(origin, request) for every request since."""
        for origin, (_, _, requests) in zip(self._ground.origins, self._before, strict=True):
            for request in origin.received[requests:]:
                yield origin.names[0], request
