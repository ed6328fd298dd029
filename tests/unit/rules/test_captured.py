"""Captured tokens, decided purely: which operation takes one, where, and what a file may not say (decision 16)."""

from __future__ import annotations

import pytest

from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Denied, Permit
from rules.facts import RequestFacts
from rules.parse import PolicyError, Sources, parse_sources
from rules.placeholders import make
from rules.policy import Policy
from rules.service_file import CatalogueError, parse_service
from tests.support.policies import NOW, sandbox

SERVICE = """\
version: 1
service: images
hosts:
  api: {host: realm.test}
  files: {host: files.test}
operations:
  token.mint:
    effect: mint
    why: A token.
    answer: {capture: [token, session.key]}
    requests: [{at: api, methods: [GET], paths: ["/token"]}]
  item.read:
    effect: read
    why: An item.
    takes: bearer
    requests: [{at: files, methods: [GET], paths: ["/items/{id}"]}]
  other.read:
    effect: read
    why: The same by another header.
    takes: x-session
    requests: [{at: files, methods: [GET], paths: ["/items/{id}", "/others/{id}"]}]
tests:
  - {allow: "GET https://files.test/items/1", operation: item.read, why: an item}
  - {deny: "POST https://files.test/items/1", why: a write}
"""
CREDENTIALS = """\
version: 1
credentials:
  key:
    {kind: header, header: X-Api-Key, secret: 'store:k', hosts: [HOSTS], owner: t,
     placeholder: {env: K, shape: 'k_{32}'}}
"""
CAPTURED = make("{64}", b"\x05" * 64)


BOUND = "realm.test, files.test"


def policy(operations: str, hosts: str = BOUND, service: str = SERVICE) -> Policy:
    rule = f"{{service: images, operations: [{operations}], credential: key}}"
    return compile_policy(
        parse_sources(
            Sources(
                policy={"policy.yaml": f"version: 1\nroles:\n  dev:\n    allow:\n      - {rule}\n"},
                services={"services/images.yaml": service},
                credentials=("credentials.yaml", CREDENTIALS.replace("HOSTS", hosts)),
            )
        ).document
    )


def decided(compiled: Policy, path: str, *headers: tuple[str, str], host: str = "files.test") -> Denied | Permit:
    facts = RequestFacts.build(
        method="GET", scheme="https", tunnel=None, target=f"https://{host}{path}", headers=(("host", host), *headers)
    )
    answer = decide_request(compiled, sandbox(), facts, NOW)
    assert isinstance(answer, Denied | Permit)
    return answer


MISTAKES = [
    ("answer: {capture: [token, session.key]}", "answer: {capture: []}", "at least one"),
    ("answer: {capture: [token, session.key]}", "answer: {capture: [token, token]}", "once"),
    ("answer: {capture: [token, session.key]}", "answer: {capture: ['a..b']}", "joined by dots"),
    ("answer: {capture: [token, session.key]}", "answer: {capture: ['items[].key']}", "joined by dots"),
    ("answer: {capture: [token, session.key]}", "answer: capture", "which fields"),
    ("answer: {capture: [token, session.key]}", "answer: {keep: [token]}", "unknown key"),
    ("effect: mint\n", "effect: read\n", "only what mints"),
    ("takes: bearer", "takes: authorization", "the name of the header"),
    ("takes: bearer", "takes: cookie", "the name of the header"),
    ("takes: bearer", "takes: X-Session", "the name of the header"),
    ("takes: bearer", "takes: transfer-encoding", "the name of the header"),
    ("takes: bearer", "takes: x-forwarded-host", "the name of the header"),
    ("effect: read\n    why: An item.", "effect: mint\n    why: An item.", "given the credential itself"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), MISTAKES, ids=[row[1][:40] for row in MISTAKES])
def test_a_file_that_does_not_say_it_plainly_is_refused(old: str, new: str, sentence: str) -> None:
    """Expect the mistake where it stands."""
    with pytest.raises(CatalogueError, match=sentence):
        parse_service(SERVICE.replace(old, new, 1), "images.yaml")


def test_a_rule_that_mints_needs_the_fields() -> None:
    """Expect a mint operation without an answer schema not to load behind a credential."""
    bare = SERVICE.replace("    answer: {capture: [token, session.key]}\n", "")
    with pytest.raises(PolicyError, match="does not say in which fields"):
        policy("token.mint", service=bare)


def test_a_service_of_policys_own_sends_no_token_where_the_operator_named_nothing() -> None:
    """Expect an editor's service file not to lead what a credential brings to a host of his own (RULINGS 3.6)."""
    with pytest.raises(PolicyError, match=r"not bound to files\.test:443"):
        policy("token.mint, item.read", "realm.test")


def test_the_credential_goes_where_no_token_is_brought_only_if_it_is_bound_there() -> None:
    """Expect a rule without a mint operation to be as if `takes` were not written."""
    with pytest.raises(PolicyError, match=r"not bound to files\.test:443"):
        policy("item.read", "realm.test")
    plain = decided(policy("item.read", "files.test"), "/items/7")
    assert isinstance(plain, Permit)
    assert (plain.credential, plain.takes) == ("key", "")


DENIED = [
    ("the client's own token", ("authorization", "Bearer mine"), "client-authority"),
    ("the credential's placeholder", ("x-api-key", make("k_{32}", b"\x06" * 64)), "placeholder-misuse"),
    ("a token in another header", ("x-other", CAPTURED), "placeholder-misuse"),
    ("a token as a password", ("authorization", "Basic " + "eDp5"), "client-authority"),
    ("more than the token", ("authorization", f"Bearer x{CAPTURED}"), "client-authority"),
]


@pytest.mark.parametrize(("case", "header", "reason"), DENIED, ids=[row[0] for row in DENIED])
def test_only_a_token_in_its_slot_is_authority(case: str, header: tuple[str, str], reason: str) -> None:
    """Expect everything else to be refused before it leaves."""
    answer = decided(policy("token.mint, item.read"), "/items/7", header)
    assert isinstance(answer, Denied)
    assert answer.reason == reason


def test_a_token_is_not_authority_where_it_was_made() -> None:
    """Expect the realm to take the credential alone."""
    answer = decided(
        policy("token.mint, item.read"), "/token", ("authorization", f"Bearer {CAPTURED}"), host="realm.test"
    )
    assert isinstance(answer, Denied)


def test_two_operations_that_take_it_differently_are_ambiguous() -> None:
    """Expect no choice between two slots."""
    answer = decided(policy("token.mint, item.read, other.read"), "/items/7", ("authorization", f"Bearer {CAPTURED}"))
    assert isinstance(answer, Denied)
    assert answer.reason == "ambiguous-rules"


def test_with_a_token_it_is_the_rules_credential_and_without_one_there_is_none() -> None:
    """Expect the permit to say that a captured token is meant, and a bare request to carry nothing."""
    compiled = policy("token.mint, item.read, other.read")
    bare = decided(policy("token.mint, item.read"), "/items/7")
    assert isinstance(bare, Permit)
    assert (bare.credential, bare.takes) == (None, "")
    held = decided(policy("token.mint, item.read"), "/items/7", ("authorization", f"Bearer {CAPTURED}"))
    assert isinstance(held, Permit)
    assert (held.credential, held.takes, held.restrictions.challenge) == ("key", "bearer", True)
    other = decided(compiled, "/others/7", ("x-session", CAPTURED))
    assert isinstance(other, Permit)
    assert (other.credential, other.takes) == ("key", "x-session")


def test_a_mint_operations_answer_is_captured_from() -> None:
    """Expect the fields in the permit, and a hand-off."""
    answer = decided(policy("token.mint, item.read"), "/token", host="realm.test")
    assert isinstance(answer, Permit)
    assert answer.restrictions.answer is not None
    assert answer.restrictions.answer.fields == ("token", "session.key")
    assert answer.needs_state
