"""Tokens that the vault keeps for sandboxes: whose they are, what they serve, and when they end (decision 16)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.vault.opened import Opened, Refused
from broker.vault.sandboxes import Created
from broker.vault.tokens import LIFE_SECONDS, MAX_LIFE_SECONDS, MAX_TOKENS
from tests.support.vaults import CREDENTIALS, SECRET, FakeProcess, Rig, sealed, statement
from wire.control import Keep, Kept, Open, OpenRefused
from wire.control import Opened as OpenedMessage

SERVICE = """\
version: 1
service: images
title: Images
hosts:
  api: {host: orders.shop.example}
  files: {host: files.shop.example}
operations:
  token.mint:
    effect: mint
    why: A token.
    answer: {capture: [token]}
    requests: [{at: api, methods: [GET], paths: ["/token"]}]
  item.read:
    effect: read
    why: An item.
    takes: bearer
    requests: [{at: files, methods: [GET], paths: ["/items/{id}"]}]
tests:
  - {allow: "GET https://files.shop.example/items/1", operation: item.read, why: an item}
  - {deny: "POST https://files.shop.example/items/1", why: a write}
"""
POLICY = """\
version: 1
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - {service: images, operations: [token.mint, item.read], credential: shop-orders}
      - {name: docs, host: docs.shop.example, methods: [GET], paths: ["/**"]}
"""
BOUND = CREDENTIALS.replace("hosts: [orders.shop.example]", "hosts: [orders.shop.example, files.shop.example]", 1)
TOKEN = b"canary-token-0123456789abcdef"


class Scene:
    def __init__(self, rig: Rig, box: Created, worker: FakeProcess, executor: FakeProcess) -> None:
        self.rig = rig
        self.box = box
        self.worker = worker
        self.executor = executor

    async def opened(self, call: str, number: int) -> OpenedMessage | OpenRefused:
        """What the vault says to an executor that asks for `call`."""
        minted = call == "/token"
        key = self.box.environment["SHOP_API_KEY"]
        changes: dict[str, object] = {
            "target": call,
            "headers": (("Host", "orders.shop.example"), ("X-Api-Key", key))
            if minted
            else (("Host", "docs.shop.example"),),
            "host": "orders.shop.example" if minted else "docs.shop.example",
            "rule": "agent/images" if minted else "agent/docs",
            "operation": "images/token.mint" if minted else "agent/docs",
            "arguments": (),
            "credential": "shop-orders" if minted else "",
        }
        self.executor.say(Open(id=number, sealed=sealed(self.worker, statement(self.rig, self.box, **changes))))
        answer = await self.executor.seen(
            lambda message: isinstance(message, OpenedMessage | OpenRefused) and message.id == number
        )
        assert isinstance(answer, OpenedMessage | OpenRefused)
        return answer

    async def keep(self, *tokens: bytes, seconds: int = 0, call: str = "/token", number: int = 1) -> tuple[str, ...]:
        """What the vault answers to an executor whose call's answer brought these."""
        opened = await self.opened(call, number)
        assert isinstance(opened, OpenedMessage)
        self.executor.say(Keep(id=1000 + number, call=number, tokens=tokens, seconds=seconds))
        kept = await self.executor.seen(lambda message: isinstance(message, Kept) and message.id == 1000 + number)
        assert isinstance(kept, Kept)
        return kept.placeholders

    async def use(self, placeholder: str, **changes: object) -> Opened | Refused:
        """A hand-off that carries `placeholder` where a token goes."""
        made = statement(
            self.rig,
            self.box,
            **{
                "host": "files.shop.example",
                "target": "/items/1",
                "headers": (("Host", "files.shop.example"), ("Authorization", f"Bearer {placeholder}")),
                "rule": "agent/images",
                "operation": "images/item.read",
                "arguments": (),
                **changes,
            },
        )
        return await self.rig.vault.opener.open_handoff(sealed(self.worker, made), None)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/images.yaml").write_text(SERVICE)
    rig = await Rig(tmp_path, policy=POLICY, credentials=BOUND).start()
    made = Scene(
        rig, await rig.sandbox(), await rig.process("worker", "worker-1"), await rig.process("executor", "e-1")
    )
    yield made
    await rig.stop()


def refused(answer: Opened | Refused) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


async def test_only_a_call_that_mints_brings_tokens(scene: Scene) -> None:
    """Not another call, not one that never was, not too short a token, nothing without a record."""
    assert await scene.keep(TOKEN, call="/x", number=2) == ()
    scene.executor.say(Keep(id=77, call=999, tokens=(TOKEN,)))
    assert await scene.executor.seen(lambda message: isinstance(message, Kept)) == Kept(id=1002, placeholders=())
    assert await scene.keep(b"short", number=3) == ()
    scene.rig.journal.failing = True
    answer = await scene.opened("/token", 4)  # without a record even the call itself is not opened
    assert isinstance(answer, OpenRefused)
    assert answer.reason == "audit-unavailable"


async def test_a_token_serves_its_sandbox_and_rule_alone(scene: Scene) -> None:
    """The material is the token, never the key; another sandbox and another placeholder are refused."""
    [placeholder] = await scene.keep(TOKEN)
    answer = await scene.use(placeholder)
    assert isinstance(answer, Opened)
    assert answer.material is not None
    assert [secret.reveal() for secret in answer.material.parts.values()] == [TOKEN]
    assert answer.material.definition.slot.where == "bearer"
    assert refused(await scene.use(scene.box.environment["SHOP_API_KEY"])) in ("placeholder-misuse", "client-authority")
    mine, scene.box = scene.box, await scene.rig.sandbox()
    assert refused(await scene.use(placeholder)) == "placeholder-misuse"
    scene.box = mine
    assert isinstance(await scene.use(placeholder), Opened)


async def test_an_echo_of_the_credential_is_guarded_where_a_token_goes(scene: Scene) -> None:
    """The host saw the key as well, so the answer to a call with a token must not show it either (RULINGS 7.1)."""
    [placeholder] = await scene.keep(TOKEN)
    answer = await scene.use(placeholder)
    assert isinstance(answer, Opened)
    assert [secret.reveal() for secret in answer.scrub] == [SECRET]


@pytest.mark.parametrize(("said", "lasts"), [(0, LIFE_SECONDS), (60, 60), (10**8, MAX_LIFE_SECONDS)])
async def test_a_token_ends_with_its_time(scene: Scene, said: int, lasts: int) -> None:
    """As its answer says, an hour where it does not, half a day at most; counted on the boot clock."""
    scene.box = await scene.rig.sandbox(ttl=24 * 3600)
    [placeholder] = await scene.keep(TOKEN, seconds=said)
    scene.rig.clock.advance(lasts - 1)
    assert isinstance(await scene.use(placeholder), Opened)
    scene.rig.clock.advance(1)
    assert refused(await scene.use(placeholder)) == "placeholder-misuse"


async def test_a_token_ends_with_its_rule_credential_and_sandbox(scene: Scene) -> None:
    """An edit elsewhere ends nothing."""
    [placeholder] = await scene.keep(TOKEN)
    scene.rig.policy_path.write_text(POLICY.replace("name: docs", "name: papers"))
    await scene.rig.vault.desk.reload("test")
    assert isinstance(await scene.use(placeholder), Opened)
    scene.rig.policy_path.write_text(
        POLICY.replace("credential: shop-orders}", "credential: shop-orders, limits: {requests: 9/minute}}")
    )
    await scene.rig.vault.desk.reload("test")
    assert refused(await scene.use(placeholder)) == "placeholder-misuse"
    [again] = await scene.keep(TOKEN, number=5)
    await scene.rig.vault.desk.rotate_secret("shop/orders", b"another-secret-0123456789", scrub=None, actor="test")
    assert refused(await scene.use(again)) == "placeholder-misuse"
    [last] = await scene.keep(TOKEN, number=6)
    await scene.rig.vault.desk.end(scene.box.record.sandbox.id, "test")
    assert refused(await scene.use(last)) in ("sandbox-ended", "bad-token")


async def test_one_sandbox_keeps_a_bounded_number(scene: Scene) -> None:
    """The oldest goes; the newest stays good."""
    [first] = await scene.keep(TOKEN)
    for number in range(MAX_TOKENS // 16):
        made = await scene.keep(*(b"canary-%04d-%04d-abcdef" % (number, at) for at in range(16)), number=10 + number)
    assert refused(await scene.use(first)) == "placeholder-misuse"
    assert isinstance(await scene.use(made[-1]), Opened)


async def test_one_token_under_two_names_is_one_placeholder(scene: Scene) -> None:
    """Clients compare `token` and `access_token`."""
    one, two, three = await scene.keep(TOKEN, TOKEN, TOKEN[::-1])
    assert one == two != three
