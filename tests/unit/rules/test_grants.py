"""Uses of what a redirect opened: what they may be, decided purely (decision 14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rules.compile import compile_policy
from rules.decide import GRANTED_HEADERS, decide_granted, decide_granted_tunnel, decide_with_grant
from rules.decision import Denied, Permit, TunnelPermit
from rules.facts import RequestFacts, TunnelFacts
from rules.grants import MAX_GRANTS, REMEMBERED_SECONDS, Grant, GrantBook, address_digest
from rules.names import CredentialRef, Host, RuleId
from rules.parse import Sources, parse_sources
from rules.placeholders import make
from tests.support.policies import NOW, sandbox

POLICY = compile_policy(
    parse_sources(
        Sources(
            policy={
                "policy.yaml": """
version: 1
roles:
  dev:
    allow:
      - {name: files, host: files.test, methods: [GET], paths: ["/**"], credential: files}
      - {name: ruled, host: cdn.test, methods: [GET, POST], paths: ["/ruled"], query: any}
    deny:
      - {name: never, host: cdn.test, paths: ["/secret/**"]}
      - {name: gone, host: gone.test}
"""
            },
            credentials=(
                "credentials.yaml",
                "version: 1\ncredentials:\n  files: {kind: bearer, secret: 'store:f', hosts: [files.test], owner: t, "
                "placeholder: {env: K, shape: 'fk_{32}'}}\n",
            ),
        )
    ).document
)
KEY = b"k" * 32
BOX = sandbox()
OWNER = (BOX.tenant, BOX.id)
PLACEHOLDER = make("fk_{32}", b"\x05" * 64)


def grant(target: str = "/a?X-Amz-Signature=1", host: str = "cdn.test", **changes: object) -> Grant:
    made = Grant(
        id="gr_" + target,
        host=host,
        digest=address_digest(KEY, OWNER, host, target),
        rule=RuleId("dev/files"),
        operation="files/file.read",
        expires_at=NOW + 60,
        credential=CredentialRef("files"),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def facts(
    target: str = "/a?X-Amz-Signature=1", *headers: tuple[str, str], method: str = "GET", host: str = "cdn.test",
    scheme: str = "https", has_body: bool = False, upgrade: str | None = None,
) -> RequestFacts:  # fmt: skip
    there = Host.parse(host)
    return RequestFacts.build(
        method=method,
        scheme=scheme,  # type: ignore[arg-type]
        tunnel=TunnelFacts(host=there, port=443 if scheme == "https" else 80),
        target=target,
        headers=(("host", host), *headers),
        has_body=has_body,
        upgrade=upgrade,
    )


DENIED = [
    ("POST", {"method": "POST"}, {}, "redirect-misused"),
    ("a body", {"has_body": True}, {}, "redirect-misused"),
    ("a WebSocket", {"upgrade": "websocket"}, {}, "redirect-misused"),
    ("after its time", {}, {"expires_at": NOW}, "redirect-ended"),
    ("a rule that is gone", {}, {"rule": RuleId("dev/other")}, "redirect-ended"),
    ("a rule that denies", {}, {"rule": RuleId("dev/never")}, "redirect-ended"),
    ("a deny rule", {"target": "/secret/a"}, {}, "denied-by-rule"),
    ("a host that is denied", {"host": "gone.test"}, {"host": "gone.test"}, "denied-by-rule"),
    ("another host than its own", {"host": "other.test"}, {}, "redirect-ended"),
]


@pytest.mark.parametrize(("case", "asked", "given", "reason"), DENIED, ids=[row[0] for row in DENIED])
def test_a_use_is_one_plain_fetch_in_time(
    case: str, asked: dict[str, object], given: dict[str, object], reason: str
) -> None:
    """Everything else is denied, each for its own reason."""
    answer = decide_granted(POLICY, BOX, facts(**asked), grant(**given), NOW)  # type: ignore[arg-type]
    assert isinstance(answer, Denied)
    assert answer.reason == reason


AUTHORITY = [
    (("authorization", "Bearer ghp_mine"), "client-authority"),
    (("cookie", "a=b"), "client-authority"),
    (("x-api-key", "mine"), "client-authority"),
    (("x-other", PLACEHOLDER), "placeholder-misuse"),
    (("authorization", f"Bearer mine{PLACEHOLDER}"), "client-authority"),
]


@pytest.mark.parametrize(("header", "reason"), AUTHORITY)
def test_authority_of_the_clients_own_is_denied(header: tuple[str, str], reason: str) -> None:
    """Its keys and cookies, and a placeholder beside the slot it has at the first host."""
    answer = decide_granted(POLICY, BOX, facts("/a?X-Amz-Signature=1", header), grant(), NOW)
    assert isinstance(answer, Denied)
    assert answer.reason == reason


def test_a_placeholder_of_a_call_without_a_credential_is_denied() -> None:
    """Where nothing was attached at the first host, none has a place at the next."""
    header = ("authorization", f"Bearer {PLACEHOLDER}")
    answer = decide_granted(POLICY, BOX, facts("/a?X-Amz-Signature=1", header), grant(credential=None), NOW)
    assert isinstance(answer, Denied)
    assert answer.reason == "placeholder-misuse"


def test_an_ended_sandbox_and_another_role_use_nothing() -> None:
    """What is decided before policy is decided before grants."""
    ended = decide_granted(POLICY, replace(BOX, expires_at=NOW), facts(), grant(), NOW)
    gone = decide_granted(POLICY, replace(BOX, role="none"), facts(), grant(), NOW)
    assert isinstance(ended, Denied)
    assert isinstance(gone, Denied)
    assert (ended.reason, gone.reason) == ("sandbox-ended", "unknown-role")


def test_what_a_grant_is_not_for_is_what_the_rules_say() -> None:
    """A POST that a rule permits passes by that rule; one that none permits is told what the grant is for."""
    post = facts("/ruled", method="POST")
    ruled = decide_with_grant(POLICY, BOX, post, grant("/ruled"), NOW)
    assert isinstance(ruled, Permit)
    assert ruled.rule == "dev/ruled"
    assert ruled.grant is None
    other = decide_with_grant(POLICY, BOX, facts(method="POST"), grant(), NOW)
    assert isinstance(other, Denied)
    assert other.reason == "redirect-misused"


def test_a_tunnel_exists_to_the_host_of_a_live_grant_alone() -> None:
    """Not to its other ports, not when the grant is over, not where a rule denies the host."""
    there = TunnelFacts(host=Host("cdn.test"), port=443)
    for asked, given in (
        (TunnelFacts(host=Host("cdn.test"), port=8443), grant()),
        (TunnelFacts(host=Host("other.test"), port=443), grant()),
        (there, grant(expires_at=NOW)),
        (TunnelFacts(host=Host("gone.test"), port=443), grant(host="gone.test")),
    ):
        assert isinstance(decide_granted_tunnel(POLICY, BOX, asked, given, NOW), Denied)
    answer = decide_granted_tunnel(POLICY, BOX, there, grant(), NOW)
    assert isinstance(answer, TunnelPermit)
    assert answer.inspected
    assert not answer.clear_text


def test_a_book_knows_only_the_very_address() -> None:
    """Another sandbox, scheme, port, host, path, query or spelling is not found."""
    book = GrantBook(KEY)
    book.put(OWNER, [grant()], NOW)
    assert book.find(("default", "sb_two"), facts()) is None
    for beside in (
        facts("/a"),
        facts("/a?"),
        facts("/A?X-Amz-Signature=1"),
        facts("/a?X-Amz-Signature=%31"),
        facts("/a?X-Amz-Signature=1&"),
        facts(host="cdn2.test"),
        facts(scheme="http"),
    ):
        assert book.find(OWNER, beside) is None
    assert book.find(OWNER, facts()) == grant()
    assert GrantBook(b"x" * 32).find(OWNER, facts()) is None


def test_a_book_is_bounded_and_forgets_the_oldest() -> None:
    """One sandbox cannot fill it, and what is over for long is gone."""
    book = GrantBook(KEY)
    gone = book.put(OWNER, [grant(f"/{number}") for number in range(MAX_GRANTS + 3)], NOW)
    assert [one.id for one in gone] == ["gr_/0", "gr_/1", "gr_/2"]
    assert len(book.of(OWNER)) == MAX_GRANTS
    late = NOW + 60 + REMEMBERED_SECONDS
    book.put(OWNER, [grant("/new", expires_at=late + 60)], late)
    assert [one.id for one in book.of(OWNER)] == ["gr_/new"]
    assert len(book.drop(OWNER)) == 1
    assert book.find(OWNER, facts("/new")) is None


def test_a_use_is_a_read_without_a_credential_and_with_fixed_headers() -> None:
    """The permit names the rule and operation that made the grant; the broker has to count it."""
    header = ("authorization", f"Bearer {PLACEHOLDER}")
    answer = decide_granted(POLICY, BOX, facts("/a?X-Amz-Signature=1", header), grant(response_bytes=7), NOW)
    assert isinstance(answer, Permit)
    assert (answer.rule, answer.operation, answer.effect) == ("dev/files", "files/file.read", "read")
    assert answer.credential is None
    assert answer.needs_state
    assert answer.restrictions.request_headers == GRANTED_HEADERS
    assert not GRANTED_HEADERS & {"authorization", "cookie"}
    assert answer.restrictions.response_bytes == 7
    assert answer.restrictions.redirects == ()
