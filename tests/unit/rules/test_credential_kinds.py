"""What is written of each kind: what does not load and why, what loads, and where its placeholders may stand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rules.compile import compile_policy
from rules.credential_kinds import KINDS
from rules.decide import decide_request
from rules.decision import Denied, Permit
from rules.document import encode_credential
from rules.facts import RequestFacts, TunnelFacts
from rules.parse import PolicyError, Sources, parse_sources
from rules.placeholders import InvalidShape, check_shape, find, make, pattern, public_prefix
from rules.policy import CredentialDef
from rules.slots import fits, in_body, in_head, masked, path_value
from tests.support.fakes import sandbox

HEAD = "hosts: [a.example], owner: o"
ONE = 'secret: "store:x", placeholder: {env: K, shape: "sk_{24}"}'
SEED = bytes(range(32))


def load(entry: str, *, rule: str = "methods: [GET, POST], paths: ['/**'], query: any") -> Any:
    """The policy of one role whose one rule uses the credential `c`, written as `entry`."""
    policy = f"version: 1\nroles: {{dev: {{allow: [{{name: r, host: a.example, {rule}, credential: c}}]}}}}\n"
    credentials = f"version: 1\ncredentials:\n  c: {{{entry}, {HEAD}}}\n"
    return parse_sources(
        Sources(policy={"policy.yaml": policy}, credentials=("credentials.yaml", credentials), services={})
    )


def loaded(entry: str, **rest: str) -> Any:
    return compile_policy(load(entry, **rest).document)


def credential(entry: str, **rest: str) -> CredentialDef:
    found = loaded(entry, **rest).credentials["c"]
    assert isinstance(found, CredentialDef)
    return found


# --- what does not load ---


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (f"kind: no-such-kind, {ONE}", "is not known here"),
        (f"kind: bearer, header: X, {ONE}", "does not go with kind: bearer"),
        (f"kind: header, {ONE}", "needs header:"),
        (f"kind: header, header: Cookie, {ONE}", "cookie cannot hold a credential"),
        (f"kind: header, header: X-Forwarded-For, {ONE}", "cannot hold a credential"),
        (f"kind: header, header: X-A, template: 'a{{value}}b{{value}}', {ONE}", "{value} once"),
        (f"kind: header, header: Authorization, also: [bearer], {ONE}", "where its own header is another"),
        (f"kind: header, header: X-A, also: [cookie], {ONE}", "bearer or basic"),
        (f"kind: headers, headers: {{}}, {ONE}", "a mapping of header names"),
        (f"kind: headers, headers: {{X-A: 'no part'}}, {ONE}", "one {part}"),
        (f"kind: headers, headers: {{X-A: '{{a}}', x-a: '{{b}}'}}, {ONE}", "named twice"),
        (
            'kind: headers, headers: {X-A: "{a}"}, secret: {b: "store:x"}, placeholder: {env: K, shape: "sk_{24}"}',
            "no part b",
        ),
        (
            'kind: headers, headers: {X-A: "{a}", X-B: "{b}"}, secret: {a: "store:x"}, '
            'placeholder: {env: K, shape: "sk_{24}"}',
            "needs the part b",
        ),
        (f"kind: cookie, cookie: 'a=b', {ONE}", "is a token"),
        (f"kind: path, path: bot, {ONE}", "a path is segments"),
        (f"kind: path, path: '/a/b', {ONE}", "a path is segments"),
        (f"kind: path, path: '/{{value}}/{{value}}', {ONE}", "a path is segments"),
        (f"kind: path, path: '/**/{{value}}', {ONE}", "a path is segments"),
        (f"kind: body, field: token, {ONE}", "a field is form:NAME"),
        (
            "kind: body, field: {'form:a': '{a}', 'json:b': '{b}'}, secret: {a: 'store:x', b: 'store:y'}, "
            "placeholder: {env: K, shape: 'sk_{24}'}",
            "not both",
        ),
        (f"kind: subprotocol, subprotocol: 'a b', {ONE}", "token"),
        (f"kind: subprotocol, subprotocol: 'key.', encoding: hex, {ONE}", "one of plain, base64url"),
        (f"kind: sigv4, regions: [a], aws_services: [s3], {ONE}", "no part value"),
        (
            "kind: sigv4, regions: [], aws_services: [s3], secret: 'store:x'",
            "list of texts",
        ),
        (
            "kind: sigv4, regions: ['*'], aws_services: [s3], secret: {access_key_id: 'env:A', "
            "secret_access_key: 'env:B'}, placeholder: {env: K, shape: 'sk_{24}'}",
            "exact names",
        ),
        (
            "kind: sigv4, regions: [a], aws_services: [s3], secret: {access_key_id: 'env:A', "
            "secret_access_key: 'env:B'}, placeholder: {secret_access_key: {env: K, shape: 'sk_{24}'}}",
            "access_key_id needs a placeholder",
        ),
        ("kind: hmac, header: X-S, sign: '{secret}', secret: 'store:x'", "what is signed"),
        ("kind: hmac, header: X-S, sign: '{body', secret: 'store:x'", "what is signed"),
        ("kind: hmac, header: X-S, sign: '{body}', template: 'x', secret: 'store:x'", "{signature} once"),
        ("kind: hmac, header: X-S, sign: '{body}', algorithm: md5, secret: 'store:x'", "one of sha1"),
        ("kind: hmac, header: X-S, sign: '{body}', timestamp_header: X-S, secret: 'store:x'", "different headers"),
        ("kind: totp, header: X-OTP, digits: 4, secret: 'store:x'", "from 6 to 8"),
        ("kind: mtls, secret: 'store:x'", "no part value"),
        ("kind: mtls, secret: {certificate: 'store:x'}", "needs the part key"),
        ("kind: bearer, secret: 'store:x', placeholder: {other: {env: K, shape: 'sk_{24}'}}", "no part of this"),
        ("kind: bearer, secret: 'store:x'", "missing key placeholder"),
        ("service: aws-sqs, secret: {access_key_id: 'env:A', secret_access_key: 'env:B'}", "needs regions:"),
        ("service: aws-sqs, aws_services: [s3], regions: [a], secret: 'env:A'", "already says the slot"),
        ("service: github, regions: [a], secret: 'env:A'", "already says the slot"),
    ],
)
def test_what_does_not_load(entry: str, sentence: str) -> None:
    """Each mistake is refused where it stands, with a sentence about it."""
    with pytest.raises(PolicyError) as caught:
        load(entry)
    assert any(sentence in problem.message for problem in caught.value.problems), str(caught.value)
    assert all(problem.line for problem in caught.value.problems)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_document_with_a_parameter_that_the_kind_has_not_is_refused(kind: str) -> None:
    """The closed schema also holds for a snapshot: what no reader here made is no policy."""
    document = load(f"kind: bearer, {ONE}").document
    document["credentials"]["c"] |= {"kind": kind, "params": {"no_such": 1}}
    with pytest.raises(ValueError, match="no parameter no_such"):
        compile_policy(document)


# --- what loads ---


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        (f"kind: bearer, {ONE}", ["bearer"]),
        (f"kind: header, header: X-A, also: [bearer, basic], {ONE}", ["header", "bearer", "basic"]),
        (f"kind: query, query: key, {ONE}", ["query"]),
        (f"kind: cookie, cookie: sid, {ONE}", ["cookie"]),
        (f"kind: path, path: ['/bot{{value}}/**', '/*/{{value}}'], {ONE}", ["path", "path"]),
        (f"kind: body, field: 'form:key', {ONE}", ["body"]),
        (f"kind: subprotocol, subprotocol: 'key.', {ONE}", ["subprotocol"]),
        (
            "kind: sigv4, regions: [a], aws_services: [s3], secret: {access_key_id: 'env:A', secret_access_key: "
            "'env:B'}, placeholder: {access_key_id: {env: K, shape: 'AKIA{16:caps}'}, "
            "secret_access_key: {env: L, shape: '{40}'}}",
            ["sigv4", "header", "query"],
        ),
        ("kind: hmac, header: X-S, sign: '{body}', secret: 'store:x'", ["signature"]),
        ("kind: totp, header: X-OTP, secret: 'store:x'", ["signature"]),
        ("kind: mtls, secret: {certificate: 'store:a', key: 'store:b'}", ["none"]),
    ],
)
def test_a_kind_is_the_same_after_its_way_through_a_document(entry: str, where: list[str]) -> None:
    """What workers and executors compile is what the vault read: slots, parts, parameters and placeholders."""
    parsed = load(entry)
    made = compile_policy(parsed.document).credentials["c"]
    assert [slot.where for slot in made.slots] == where
    assert encode_credential(made) == parsed.document["credentials"]["c"]
    json.dumps(parsed.document)


# --- shapes ---


@pytest.mark.parametrize("shape", ["A{15:caps}", "A{16:small}", "XEAT{16:caps}", "a b{24}", "{24:caps}Xeat", "pem"])
def test_a_shape_that_cannot_be_found_again_is_refused(shape: str) -> None:
    """Too short for its core, an unknown alphabet, or the mark itself."""
    with pytest.raises(InvalidShape):
        check_shape(shape)


def test_the_name_of_a_key_looks_like_one_and_is_found() -> None:
    """C101: twenty characters, capitals and 2 to 7, as AWS's own; found in any surroundings."""
    made = make("AKIA{16:caps}", SEED)
    assert len(made) == 20
    assert made.isupper()
    assert pattern("AKIA{16:caps}").fullmatch(made)
    [core] = find(f"Credential={made}/20261201/eu-central-1/s3/aws4_request")
    assert made == "AKIA" + core
    broken = made[:-1] + ("A" if made[-1] != "A" else "B")
    assert find(broken) == ()
    assert find("XEAT" * 8) == ()
    assert make("AKIA{16:caps}", bytes(32)) != made


def test_a_jwt_parses() -> None:
    """Three segments, a header and claims that decode, far from expired, and the core where a signature stands."""
    import base64

    made = make("jwt", SEED)
    head, claims, signature = made.split(".")
    assert json.loads(base64.urlsafe_b64decode(head + "==")) == {"alg": "none", "typ": "JWT"}
    assert json.loads(base64.urlsafe_b64decode(claims + "=="))["exp"] > 4_000_000_000
    assert len(signature) == 43
    assert len(find(made)) == 1
    assert made.startswith(public_prefix("jwt"))


# --- slots ---


def ask(target: str = "/x", *headers: tuple[str, str], method: str = "GET", **rest: Any) -> RequestFacts:
    from dataclasses import replace

    made = RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=TunnelFacts.build("a.example:443"),
        target=target,
        headers=(("host", "a.example"), *headers),
    )
    return replace(made, **rest)


def decided(entry: str, facts: RequestFacts, **rest: str) -> str:
    """`permit`, or the reason of the refusal."""
    answer = decide_request(loaded(entry, **rest), sandbox("dev"), facts, 1_440_938_160.0)
    assert isinstance(answer, Denied | Permit)
    return answer.reason if isinstance(answer, Denied) else "permit"


SK = make("sk_{24}", SEED)
TWO = (
    "kind: headers, headers: {X-A: '{a}', X-B: 'k {b}'}, secret: {a: 'store:x', b: 'store:y'}, "
    "placeholder: {a: {env: A, shape: 'a_{24}'}, b: {env: B, shape: 'b_{24}'}}"
)
SIGNED = "kind: hmac, header: X-S, sign: '{path}', secret: 'store:x'"
A, B = make("a_{24}", SEED), make("b_{24}", bytes(32))


@pytest.mark.parametrize(
    ("entry", "facts", "verdict"),
    [
        (TWO, ask("/x", ("x-a", B)), "client-authority"),
        (TWO, ask("/x", ("x-a", A + B)), "client-authority"),
        (TWO, ask("/x", ("x-c", A)), "placeholder-misuse"),
        (TWO, ask("/x", ("x-a", A), ("x-b", f"k {B}")), "permit"),
        (TWO, ask("/x", ("x-a", "mine")), "client-authority"),
        (f"kind: cookie, cookie: sid, {ONE}", ask("/x", ("cookie", f"sid={SK}; a=b")), "client-authority"),
        (f"kind: cookie, cookie: sid, {ONE}", ask("/x", ("cookie", f"other={SK}")), "client-authority"),
        (f"kind: cookie, cookie: sid, {ONE}", ask("/x", ("cookie", f"sid={SK}")), "permit"),
        (f"kind: path, path: '/bot{{value}}/**', {ONE}", ask(f"/bot{SK}/a"), "permit"),
        (f"kind: path, path: '/bot{{value}}/**', {ONE}", ask(f"/cat{SK}/a"), "placeholder-misuse"),
        (f"kind: path, path: '/bot{{value}}/**', {ONE}", ask(f"/bot{SK}/{SK}"), "placeholder-misuse"),
        (f"kind: path, path: '/bot{{value}}/**', {ONE}", ask(f"/bot{SK}/a?x={SK}"), "placeholder-misuse"),
        (f"kind: bearer, {ONE}", ask(f"/bot{SK}/a"), "placeholder-misuse"),
        (f"kind: path, path: '/bot{{value}}/**', {ONE}", ask("/bot1:mine/a"), "client-authority"),
        (SIGNED.replace("X-S", "Authorization"), ask("/x", ("authorization", "x")), "permit"),
        (SIGNED, ask("/x", ("authorization", "x")), "client-authority"),
        (SIGNED, ask("/x", ("x-s", SK)), "client-authority"),
        ("kind: mtls, secret: {certificate: 'store:a', key: 'store:b'}", ask("/x", ("x-s", SK)), "placeholder-misuse"),
        ("kind: mtls, secret: {certificate: 'store:a', key: 'store:b'}", ask("/x"), "permit"),
    ],
)  # fmt: skip
def test_a_placeholder_stands_in_the_slot_of_its_part_or_nowhere(entry: str, facts: RequestFacts, verdict: str) -> None:
    """RULINGS 4.2, 4.4 for each slot: form and place; whose it is, the gate and the vault ask."""
    if verdict == "client-authority" and find(str(facts.headers)):
        assert decided(entry, facts) in ("client-authority", "placeholder-misuse")
        return
    assert decided(entry, facts) == verdict


BODY = "kind: body, field: 'json:a.b', " + ONE
RULE = "methods: [POST], paths: ['/**'], body: {json: {a: {b: string}, 'c?': string}}"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ({"a": {"b": SK}}, "permit"),
        ({"a": {"b": "x"}, "c": SK}, "placeholder-misuse"),
        ({"a": {"b": SK}, "c": SK}, "placeholder-misuse"),
        ({"a": {"b": f"x{SK}"}}, "placeholder-misuse"),
        ({"a": {"b": "x"}}, "permit"),
    ],
)
def test_a_placeholder_stands_in_its_field_of_a_body_or_nowhere(body: dict[str, Any], verdict: str) -> None:
    """Only the declared field, whole, and once in the whole body."""
    facts = ask(
        "/x", ("content-type", "application/json"), method="POST", body=json.dumps(body).encode(), has_body=True
    )
    assert decided(BODY, facts, rule=RULE) == verdict


def test_whose_a_placeholder_is_is_told_by_hash_for_each_part() -> None:
    """One part's stand-in is no other's, and another sandbox's is nobody's."""
    from hashlib import sha256

    made = credential(TWO)
    facts = ask("/x", ("x-a", A), ("x-b", B))
    from rules.placeholders import find_in_head

    spots = in_head(made, facts, find_in_head(facts))
    assert spots is not None
    own = {"c": sha256(A.encode()).digest(), "c#b": sha256(B.encode()).digest()}
    assert fits(made, spots, own)
    assert not fits(made, spots, {"c": own["c"]})
    assert not fits(made, spots, {"c": own["c#b"], "c#b": own["c"]})
    assert in_body(made, facts) is None


def test_a_record_names_the_credential_where_its_placeholder_stood() -> None:
    """RULINGS 4.4: neither placeholder nor secret is written."""
    made = credential(f"kind: path, path: '/bot{{value}}/**', {ONE}")
    assert masked(made, f"/bot{SK}/getMe") == "/bot{credential:c}/getMe"
    assert masked(made, "/botsk_0123456789abcdefghijklmn/x") == "/botsk_0123456789abcdefghijklmn/x"


@pytest.mark.parametrize(
    ("template", "path", "value"),
    [
        ("/bot{value}/**", "/botX/a/b", "X"),
        ("/bot{value}/**", "/botX", None),
        ("/bot{value}/**", "/catX/a", None),
        ("/*/{value}", "/a/X", "X"),
        ("/*/{value}", "/a/X/b", None),
        ("/v1/{value}.json", "/v1/X.json", "X"),
        ("/v1/{value}.json", "/v2/X.json", None),
    ],
)
def test_a_path_has_one_place_for_a_secret(template: str, path: str, value: str | None) -> None:
    """Literal segments, any one, and the rest."""
    assert path_value(template, path) == value
