"""SDKs as their vendors publish them, with nothing set but what a sandbox is given: they work, and hold placeholders.

Each speaks to the very hosts it has built in, at port 443, which lead to an origin on loopback here. The origin saw the
secret, the SDK's whole environment and output never did.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rules.catalogue import builtin_services
from tests.support.gateway import Box, Completed, TestGateway
from tests.support.leaks import leaks, windows
from tests.support.origins import Exchange, Origin, Received

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="an origin at port 443 needs root"),
]

SERVICES = ("openai", "anthropic", "stripe", "slack", "huggingface", "github")
SECRETS = {name: f"kq{number}Real5b1e{number}77c20f4d93ac{number}x" for number, name in enumerate(SERVICES)}
HOSTS = {name: tuple(host.text for host in builtin_services()[name].credential.hosts) for name in SERVICES}  # type: ignore[union-attr]
CREDENTIALS = "version: 1\ncredentials:\n" + "".join(
    f'  {name}: {{service: {name}, secret: "store:{name}", owner: tests}}\n' for name in SERVICES
)
POLICY = """
roles:
  agent:
    allow:
      - {service: openai, operations: [chat.create, models.read], with: {model: "gpt-*"}, credential: openai}
      - {service: anthropic, operations: [messages.create], with: {model: "claude-*"}, credential: anthropic}
      - {service: stripe, operations: [customer.read, payment.read], credential: stripe}
      - {service: slack, operations: [conversation.list], credential: slack}
      - {name: say, service: slack, operations: [message.write], with: {channel: C1}, credential: slack}
      - {service: huggingface, operations: [repository.read, file.download], credential: huggingface}
      - {service: github, operations: [rest.read, repository.info], with: {repository: acme/shop}, credential: github}
"""


def _events(*events: tuple[str, dict[str, object]]) -> list[bytes]:
    named = [f"event: {name}\n" if name else "" for name, _ in events]
    return [f"{line}data: {json.dumps(data)}\n\n".encode() for line, (_, data) in zip(named, events, strict=True)]


MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [],
    "stop_reason": None,
}
USAGE = {"input_tokens": 1, "output_tokens": 1}
STREAMS = {
    "/v1/chat/completions": [
        *_events(
            *(
                (
                    "",
                    {
                        "id": "c",
                        "object": "chat.completion.chunk",
                        "created": 1,
                        "model": "gpt-x",
                        "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
                    },
                )
                for word in ("one ", "two")
            )
        ),
        b"data: [DONE]\n\n",
    ],
    "/v1/messages": _events(
        ("message_start", {"type": "message_start", "message": {**MESSAGE, "usage": USAGE}}),
        (
            "content_block_start",
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        ),
        (
            "content_block_delta",
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one "}},
        ),
        (
            "content_block_delta",
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "two"}},
        ),
        ("content_block_stop", {"type": "content_block_stop", "index": 0}),
        ("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USAGE}),
        ("message_stop", {"type": "message_stop"}),
    ),
}
REPOSITORY = {
    "id": 1,
    "name": "shop",
    "full_name": "acme/shop",
    "private": True,
    "url": "https://api.github.com/repos/acme/shop",
}
ANSWERS: dict[str, object] = {
    "/v1/models/gpt-x": {"id": "gpt-x", "object": "model", "created": 1, "owned_by": "o"},
    "/v1/customers/cus_1": {"id": "cus_1", "object": "customer", "name": "Ada"},
    "/api/conversations.list": {"ok": True, "channels": [{"id": "C1", "name": "general"}]},
    "/api/chat.postMessage": {"ok": True, "channel": "C1", "ts": "1.2"},
    "/api/models/acme/tiny": {"id": "acme/tiny", "sha": "0" * 40, "siblings": [], "tags": [], "private": True},
    "/repos/acme/shop": REPOSITORY,
    "/api/v3/repos/acme/shop": REPOSITORY,
}


async def answer(exchange: Exchange) -> None:
    """Streams as events, everything else as JSON; an unknown path is the origin's own 404."""
    body = await exchange.read_body()
    path = exchange.request.target.partition("?")[0]
    if path in STREAMS and b'"stream":true' in body.replace(b" ", b""):
        await exchange.begin(200, (("Content-Type", "text/event-stream"),))
        for piece in STREAMS[path]:
            await exchange.chunk(piece)
        await exchange.end()
    elif path in ANSWERS:
        await exchange.answer(200, json.dumps(ANSWERS[path]).encode(), (("Content-Type", "application/json"),))
    elif path == "/acme/tiny/resolve/main/config.json":
        fields = (("ETag", '"abc"'), ("X-Repo-Commit", "0" * 40), ("Content-Type", "application/json"))
        await exchange.answer(200, b'{"hidden_size": 4}', fields)
    else:
        await exchange.answer(404, b'{"message": "none"}', (("Content-Type", "application/json"),))


@dataclass
class Scene:
    box: Box
    origin: Origin

    def python(self, code: str) -> Completed:
        """Run `code` as an agent would, in an environment of nothing else; what it may ever see is looked through."""
        self.origin.received.clear()
        done = self.box.command(sys.executable, "-W", "ignore", "-c", textwrap.dedent(code))
        shown = done.out + done.err + json.dumps(self.box.environment)
        assert leaks(shown.encode(), {name: windows(value) for name, value in SECRETS.items()}) == []
        return done

    def asked(self, path: str) -> Received:
        """The request that came for `path`."""
        return next(item for item in self.origin.received if item.target.partition("?")[0] == path)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    names = tuple(dict.fromkeys(host for hosts in HOSTS.values() for host in hosts))
    origin = Origin(*names, address="127.0.0.143", port=443, handler=answer)
    with (
        origin.run_in_thread(),
        TestGateway(
            tmp_path_factory.mktemp("sdks"), policy=POLICY, credentials=CREDENTIALS, secrets=SECRETS, origins=[origin]
        ) as gateway,
    ):
        yield Scene(gateway.sandbox(), origin)


CALLS = {
    "openai": (
        """
        import openai
        client = openai.OpenAI()
        print(client.models.retrieve("gpt-x").id)
        stream = client.chat.completions.create(
            model="gpt-x", messages=[{"role": "user", "content": "hi"}], stream=True)
        print("".join(piece.choices[0].delta.content or "" for piece in stream))
        """,
        "gpt-x\none two",
        ("/v1/chat/completions", "authorization", f"Bearer {SECRETS['openai']}"),
    ),
    "anthropic": (
        """
        import anthropic
        with anthropic.Anthropic().messages.stream(
            model="claude-x", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            print("".join(stream.text_stream))
        """,
        "one two",
        ("/v1/messages", "authorization", f"Bearer {SECRETS['anthropic']}"),
    ),
    "stripe": (
        """
        import os, stripe
        stripe.ca_bundle_path = os.environ["SSL_CERT_FILE"]  # it brings its own list of authorities (docs/clients.md)
        client = stripe.StripeClient(os.environ["STRIPE_SECRET_KEY"])
        print(client.v1.customers.retrieve("cus_1").name)
        """,
        "Ada",
        ("/v1/customers/cus_1", "authorization", f"Bearer {SECRETS['stripe']}"),
    ),
    "slack": (
        """
        import os, slack_sdk
        client = slack_sdk.WebClient(token=os.environ["SLACK_BOT_TOKEN"])
        print(client.conversations_list()["channels"][0]["id"])
        print(client.chat_postMessage(channel="C1", text="hello")["ts"])
        """,
        "C1\n1.2",
        ("/api/chat.postMessage", "authorization", f"Bearer {SECRETS['slack']}"),
    ),
    "huggingface": (
        """
        import huggingface_hub
        print(huggingface_hub.HfApi().model_info("acme/tiny").id)
        print(open(huggingface_hub.hf_hub_download("acme/tiny", "config.json")).read())
        """,
        'acme/tiny\n{"hidden_size": 4}',
        ("/api/models/acme/tiny", "authorization", f"Bearer {SECRETS['huggingface']}"),
    ),
    "PyGithub": (
        """
        import os, github
        print(github.Github(auth=github.Auth.Token(os.environ["GH_TOKEN"])).get_repo("acme/shop").full_name)
        """,
        "acme/shop",
        (
            "/repos/acme/shop",
            "authorization",
            "Basic " + base64.b64encode(f"x-access-token:{SECRETS['github']}".encode()).decode(),
        ),
    ),
}
REFUSED = {
    "openai": """
        import openai
        openai.OpenAI(max_retries=0).chat.completions.create(model="o9", messages=[{"role": "user", "content": "hi"}])
        """,
    "anthropic": """
        import anthropic
        anthropic.Anthropic(max_retries=0).beta.files.list()
        """,
    "stripe": """
        import os, stripe
        stripe.ca_bundle_path = os.environ["SSL_CERT_FILE"]
        stripe.StripeClient(os.environ["STRIPE_SECRET_KEY"]).v1.customers.delete("cus_1")
        """,
    "slack": """
        import os, slack_sdk
        slack_sdk.WebClient(token=os.environ["SLACK_BOT_TOKEN"]).chat_postMessage(channel="C2", text="x")
        """,
    "huggingface": """
        import huggingface_hub
        huggingface_hub.HfApi().create_repo("acme/new")
        """,
    "PyGithub": """
        import os, github
        github.Github(auth=github.Auth.Token(os.environ["GH_TOKEN"]), retry=None).get_repo("acme/other")
        """,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_granted_is_refused_in_words_that_the_sdk_shows(scene: Scene, name: str) -> None:
    """An operation outside the rule: the SDK raises, the person reads whose refusal it is, the origin saw nothing."""
    done = scene.python(REFUSED[name])
    assert done.code != 0
    assert "Exeat" in done.err, done.err
    assert scene.origin.received == []


@pytest.mark.parametrize("name", CALLS)
def test_an_sdk_works_with_a_placeholder(scene: Scene, name: str) -> None:
    """Its calls succeed, streams among them; what the origin was sent is the secret, where the vendor wants it."""
    code, expected, (path, header, value) = CALLS[name]
    done = scene.python(code)
    assert done.code == 0, done.err
    assert done.out.strip() == expected
    assert scene.asked(path).header(header) == value


@pytest.mark.skipif(shutil.which("gh") is None, reason="gh is not installed")
def test_gh_works_with_a_placeholder(scene: Scene) -> None:
    """GitHub's own command, with the variable that it reads anyway."""
    scene.origin.received.clear()
    done = scene.box.command("gh", "api", "repos/acme/shop", "--jq", ".full_name")
    assert (done.code, done.out.strip()) == (0, "acme/shop"), done.err
    assert (
        SECRETS["github"]
        in base64.b64decode(
            str(scene.asked("/repos/acme/shop").header("authorization")).removeprefix("Basic ")
        ).decode()
    )
