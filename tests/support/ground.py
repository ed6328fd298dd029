"""The ground on which attack cases are played: four origins that witness, one policy, one gateway over it.

ok.test       bound to the credential `ok`; its secret is CAN
pub.test      allowed without a credential; so are npm.test, a.wild.test, bücher.test; raw.test is a tunnel
plain.test    allowed in clear text
evil.test     reachable and served, but no rule names it; denied.test is denied by rule
"""

from __future__ import annotations

import contextlib
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from rules.policy import Policy
from tests.support.gateway import Box, TestGateway, destinations
from tests.support.origins import Origin, Received

CAN = b"canary-9fQ2hLx7VbT4mKz1RwN8sDc3"
OTHER_CAN = b"canary-other-Pq5Yt0Jr6Gv2We8"
SHAPE = "sk_{32}"

CREDENTIALS = """\
version: 1
credentials:
  ok: {kind: bearer, secret: "store:ok", hosts: [ok.test], owner: team-ok, placeholder: {env: OK_KEY, shape: "sk_{32}"}}
  npm: {kind: bearer, secret: "store:npm", hosts: [npm.test], owner: team-npm,
        placeholder: {env: NPM_KEY, shape: "npm_{32}"}}
"""

POLICY = """\
services:
  corp-npm: {like: npm, base: "https://npm.test:PUB"}
roles:
  agent:
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
      - {name: books, host: "bücher.test", port: PUB, methods: [GET], paths: ["/v1/**"]}
      - {name: raw, host: raw.test, port: PUB, tunnel: true, reason: a client that pins its certificate}
      - {service: corp-npm, operations: [read]}
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
        self.ok = Origin("ok.test", address="127.0.0.21")
        # A name for which no rule is written stands on each origin too: a wrong pass would be seen.
        self.pub = Origin(
            "pub.test",
            "npm.test",
            "raw.test",
            "a.wild.test",
            "xn--bcher-kva.test",
            address="127.0.0.22",
            authority=self.ok.authority,
        )
        self.plain = Origin("plain.test", address="127.0.0.23", tls=False)
        self.evil = Origin(
            "evil.test", "denied.test", "notok.test", "ok.test.evil.test", "a.b.wild.test", "wild.test",
            address="127.0.0.24", authority=self.ok.authority,
        )  # fmt: skip
        self.origins = (self.ok, self.pub, self.plain, self.evil)

    def __enter__(self) -> Ground:
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
        """The policy without `version:` and `destinations:`."""
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

    def witness(self) -> Witness:
        """What the origins have seen up to now."""
        return Witness(self)


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
