"""GraphQL through the gateway as gh asks it: a bound repository, a credential, and an origin that witnesses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gateway import TestGateway
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text

pytestmark = pytest.mark.xdist_group("graphql")

SECRET = "kq8-Forge-Real-0d7f1c52aa93c1b4"
POLICY = """
services:
  forge: {{like: github, base: "https://forge.test:{port}"}}
roles:
  agent:
    allow:
      - name: shop
        service: forge
        operations: [graphql.query]
        with: {{repository: [acme/shop, acme/docs]}}
        credential: forge
      - name: commit
        service: forge
        operations: [graphql.mutation]
        with: {{repository: acme/shop, branch: "agent/*"}}
        credential: forge
"""
CREDENTIALS = """
version: 1
credentials:
  forge: {{kind: basic, username: x-access-token, secret: "store:forge", hosts: ["forge.test:{port}"], owner: tests,
           placeholder: {{env: GH_TOKEN, shape: "ghp_{{36}}"}}}}
"""

ISSUES = "query($owner: String!, $name: String!) { repository(owner: $owner, name: $name) { issues(first: 3) { %s } } }"
LIST = ISSUES % "totalCount nodes { number title author { login } }"


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.box = gateway.sandbox()

    def ask(self, body: Any, *arguments: str) -> tuple[int, Any]:
        """POST `body` as gh does; (status, JSON of the answer)."""
        done = self.box.curl(
            *("-w", "\n%{http_code}", "-H", f"Authorization: token {self.box.placeholders['GH_TOKEN']}"),
            *("-H", "Content-Type: application/json; charset=utf-8", "-H", "GraphQL-Features: merge_queue"),
            *("--data-binary", body if isinstance(body, str) else json.dumps(body), *arguments),
            f"https://forge.test:{self.origin.port}/api/graphql",
        )
        shown, _, status = done.out.rpartition("\n")
        return int(status), json.loads(shown) if shown else None


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    answer = script(READ, text('{"data":{"repository":{}}}', 200, ("Content-Type", "application/json")))
    with (
        Origin("forge.test", address="127.0.0.73", handler=answer).run_in_thread() as origin,
        TestGateway(
            tmp_path_factory.mktemp("graphql"),
            policy=POLICY.format(port=origin.port),
            credentials=CREDENTIALS.format(port=origin.port),
            secrets={"forge": SECRET},
            origins=[origin],
        ) as gateway,
    ):
        yield Scene(gateway, origin)


@pytest.fixture(autouse=True)
def _from_here(scene: Scene) -> None:
    """Each test has a sandbox of its own, so that its records are told from those of others."""
    scene.origin.received.clear()
    scene.box = scene.gateway.sandbox()


@pytest.mark.parametrize(
    "body",
    [
        {"query": LIST, "variables": {"owner": "evil", "name": "shop"}},
        {"query": ISSUES % "nodes { repository { owner { repositories { nodes { name } } } } }",
         "variables": {"owner": "acme", "name": "shop"}},
        {"query": '{ a: repository(owner: "acme", name: "shop") { id } b: repository(owner: "x", name: "y") { id } }'},
        {"query": '{ repository(owner: "acme", name: "shop") { id } node(id: "R_1") @include(if: false) { id } }'},
        {"query": "{ viewer { repositories(first: 9) { nodes { name } } } }"},
        {"query": "mutation { viewer: deleteRef(input: {refId: 1}) { clientMutationId } }"},
        {"query": 'mutation { createCommitOnBranch(input: {branch: {repositoryNameWithOwner: "acme/shop", '
                  'branchName: "main"}}) { clientMutationId } }'},
        {"query": "query a { viewer { login } } mutation b { deleteRef(input: {refId: 1}) { clientMutationId } }",
         "operationName": "a"},
        [{"query": "{ viewer { login } }"}],
        {"extensions": {"persistedQuery": {"version": 1, "sha256Hash": "ab"}}},
        '{"query":"{viewer{login}}","query":"mutation{deleteRef(input:{refId:1}){clientMutationId}}"}',
    ],
    ids=["owner", "nested", "two", "node", "viewer", "alias", "branch", "other", "batch", "hash", "duplicate"],
)  # fmt: skip
def test_what_leaves_the_repository_is_refused_in_the_shape_of_graphql(scene: Scene, body: Any) -> None:
    """Expect 403 with `errors[].message`, and no byte at the origin."""
    status, answer = scene.ask(body)
    assert status == 403
    assert "Refused by Exeat policy" in answer["errors"][0]["message"]
    assert not scene.origin.received


def test_a_coded_or_foreign_body_is_refused(scene: Scene) -> None:
    """A coding, another media type and a query in the URL reach nobody."""
    query = {"query": "{ viewer { login } }"}
    assert scene.ask(query, "-H", "Content-Encoding: gzip")[0] == 403
    assert scene.ask(query, "-H", "Content-Type: application/graphql")[0] == 403
    assert not scene.origin.received


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (
            {"query": LIST, "variables": {"owner": "acme", "name": "shop"}},
            ["field=repository", "repository=acme/shop"],
        ),
        (
            {"query": '{ a: repository(owner: "acme", name: "shop") { id } '
                      'b: repository(owner: "ACME", name: "docs") { id } }'},
            ["field=repository", "repository=ACME/docs", "repository=acme/shop"],
        ),
        ({"query": "query UserCurrent { viewer { login } }"}, ["field=viewer"]),
        (
            {"query": "mutation($i: CreateCommitOnBranchInput!) { createCommitOnBranch(input: $i) { commit { oid } } }",
             "variables": {"i": {"branch": {"repositoryNameWithOwner": "acme/shop", "branchName": "agent/x"}}}},
            ["branch=agent/x", "field=createCommitOnBranch", "repository=acme/shop"],
        ),
    ],
    ids=["list", "two", "viewer", "commit"],
)  # fmt: skip
def test_what_stays_inside_goes_on_with_the_secret(scene: Scene, body: Any, arguments: list[str]) -> None:
    """Expect the origin to get the very document with the secret, and the log to hold every argument."""
    status, answer = scene.ask(body)
    assert (status, answer) == (200, {"data": {"repository": {}}})
    [sent] = scene.origin.received
    assert json.loads(sent.body) == body
    assert sent.header("authorization") == "Basic " + base64.b64encode(f"x-access-token:{SECRET}".encode()).decode()
    assert scene.box.placeholders["GH_TOKEN"] not in str(sent.headers)
    (outcome,) = scene.gateway.awaited(event="broker.outcome", sandbox=scene.box.id)
    assert sorted(outcome["arguments"]) == arguments
