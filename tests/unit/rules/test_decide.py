"""The decision: what is denied, held and permitted, and that the order of rules never matters."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.decide import READ_UPLOAD, decide_request, decide_tunnel
from rules.decision import Decision, Denied, Held, NeedsBody, Permit, TunnelPermit
from rules.facts import BodyAttested, RequestFacts, TunnelFacts
from rules.names import CredentialRef, Host
from rules.policy import BodySpec, DestinationDef, Operation, Policy, Rule, Slot
from tests.support.policies import (
    NOW,
    OTHER_PLACEHOLDER,
    PLACEHOLDER,
    allow,
    credential,
    deny,
    operation,
    policy,
    request,
    sandbox,
)
from tests.support.properties import tried
from tests.support.rows import every_row

READ = operation()
ORDER = operation(
    "dev/order",
    methods=["POST"],
    paths=["/v1/orders"],
    body=BodySpec(matcher="json_fields", bound=64, params={"item": "string", "count": "integer"}),
)
KEY = credential()
PLAIN = policy(allow("read", READ))
KEYED = policy(allow("read", READ, credential=CredentialRef("key")), credentials=[KEY])


def decide(rules: Policy, line: str, *headers: tuple[str, str], **rest: Any) -> Decision:
    return decide_request(rules, sandbox(), request(line, *headers, **rest), NOW)


def reason(decision: object) -> str:
    assert isinstance(decision, Denied), decision
    return decision.reason


def permit(decision: object) -> Permit:
    assert isinstance(decision, Permit), decision
    return decision


# --- before policy ---


def test_an_ended_sandbox_is_denied_everything() -> None:
    """From the moment its time is over, a sandbox may do nothing, whatever policy says."""
    over = sandbox(expires_at=NOW)
    assert reason(decide_request(PLAIN, over, request("GET https://ok.test/v1/read/x"), NOW)) == "sandbox-ended"
    assert reason(decide_tunnel(PLAIN, over, TunnelFacts.build("ok.test:443"), NOW)) == "sandbox-ended"


def test_an_unknown_role_is_denied() -> None:
    """A role that the policy in force does not hold permits nothing."""
    answer = decide_request(PLAIN, sandbox("gone"), request("GET https://ok.test/v1/read/x"), NOW)
    assert reason(answer) == "unknown-role"


def test_a_policy_without_rules_denies() -> None:
    """An empty role means deny all, not allow all (B013)."""
    assert reason(decide(policy(), "GET https://ok.test/v1/read/x")) == "no-rule"
    assert reason(decide_tunnel(policy(), sandbox(), TunnelFacts.build("ok.test:443"), NOW)) == "no-rule"


@pytest.mark.parametrize("host", ["exeat.internal", "a.exeat.internal"])
def test_our_own_names_cannot_be_allowed(host: str) -> None:
    """A rule for one of our own names changes nothing (RULINGS 3.9)."""
    rules = policy(allow("own", operation(host=host)))
    assert reason(decide(rules, f"GET https://{host}/v1/read/x")) == "own-name-refused"
    assert reason(decide_tunnel(rules, sandbox(), TunnelFacts.build(f"{host}:443"), NOW)) == "own-name-refused"


REFUSED_ALWAYS = [
    ("TRACE https://ok.test/v1/read/x", (), {}, "method-refused", "TRACE echoes what was sent (B113)"),
    ("CONNECT https://ok.test/v1/read/x", (), {}, "method-refused", "CONNECT inside a tunnel is another tunnel"),
    ("get https://ok.test/v1/read/x", (), {}, "method-refused", "methods are case-sensitive and upper case"),
    ("PRI https://ok.test/v1/read/x", (), {}, "method-refused", "PRI opens HTTP/2"),
    ("GET https://ok.test/v1/read/x", (("x-http-method-override", "DELETE"),), {}, "method-refused", "B056 header"),
    ("GET https://ok.test/v1/read/x", (("x-http-method", "PUT"),), {}, "method-refused", "B056 header"),
    ("GET https://ok.test/v1/read/x?_method=DELETE", (), {}, "query-method-override", "B056 query"),
    ("GET https://ok.test/v1/read/x?%5Fmethod=PUT", (), {}, "query-method-override", "matched on decoded names"),
    ("GET https://ok.test/v1/read/x?$httpMethod=DELETE", (), {}, "query-method-override", "Google's spelling"),
    ("GET https://ok.test/v1/read/x", (), {"upgrade": "h2c"}, "upgrade-refused", "only WebSocket can be permitted"),
    ("GET https://ok.test/v1/read/x", (), {"upgrade": "notwebsocket"}, "upgrade-refused", "B078 exact word"),
    ("GET https://ok.test/v1/read/x", (), {"upgrade": "websocket"}, "websocket-refused", "B078 no WebSocket rule"),
]


@every_row(("line", "headers", "rest", "expected", "why"), REFUSED_ALWAYS)
def test_some_requests_are_refused_whatever_policy_says(
    line: str, headers: tuple[tuple[str, str], ...], rest: dict[str, Any], expected: str, why: str
) -> None:
    """Methods, overrides and upgrades are refused even under a rule with `query: any` for the path."""
    wide = policy(allow("read", replace(READ, query=None, methods=("GET", "TRACE", "CONNECT", "get", "PRI"))))
    assert reason(decide(wide, line, *headers, **rest)) == expected, why


def test_an_address_literal_needs_a_destination() -> None:
    """A literal is refused even where a rule names it, unless the operator declared the destination (B017)."""
    rules = policy(allow("raw", operation(host="10.0.0.5")))
    assert reason(decide(rules, "GET https://10.0.0.5/v1/read/x")) == "address-literal-refused"
    declared = replace(rules, destinations={"10.0.0.5": DestinationDef(host=Host.parse("10.0.0.5"))})
    assert permit(decide(declared, "GET https://10.0.0.5/v1/read/x")).rule == "dev/raw"


# --- hosts, ports, paths ---

MISSES = [
    ("GET https://notok.test/v1/read/x", "B003 suffix over-match"),
    ("GET https://ok.test.evil.test/v1/read/x", "B003 prefix over-match"),
    ("GET https://xwild.test/v1/read/x", "B003 the dot belongs to the pattern"),
    ("GET https://wild.test/v1/read/x", "the apex is not under the wildcard"),
    ("GET https://a.b.wild.test/v1/read/x", "one star is one label"),
    ("GET https://evil.test/v1/read/x", "B193 an unmatched host is denied"),
    ("GET https://ok.test:8443/v1/read/x", "B045 rules are host and port"),
    ("GET https://ok.test:22/v1/read/x", "B045 rules are host and port"),
    ("GET http://evil.test/?t=1", "T02 plain HTTP obeys the same rules"),
    ("GET https://ok.test/V1/READ/x", "B054 paths are case-sensitive"),
    ("GET https://ok.test/v1/read", "`**` stands for at least one segment"),
    ("GET https://ok.test/v1/readx/a", "T25 anchored on segments"),
    ("GET https://ok.test/v1/read/x?y=1", "query keys are listed"),
    ("GET https://ok.test/v1/read/a%2Fb", "B052 an encoded slash only where the operation says so"),
    ("POST https://ok.test/v1/read/x", "the method is part of the operation"),
    ("PUT https://ok.test/gists", "B117 a write on an allowed host"),
    ("POST https://ok.test/oauth/token", "B134 minting on an allowed host"),
]


@every_row(("line", "why"), MISSES)
def test_what_no_rule_permits_is_denied(line: str, why: str) -> None:
    """Everything beside the listed host, port, method, path and query is no-rule."""
    rules = policy(allow("read", READ), allow("wild", operation("dev/wild", host="*.wild.test")))
    assert reason(decide(rules, line)) == "no-rule", why


SAME_HOST = ["ok.test", "OK.TeSt", "ok.test."]


@pytest.mark.parametrize("host", SAME_HOST)
def test_case_and_one_trailing_dot_do_not_change_the_verdict(host: str) -> None:
    """B005, B009: the canonical name is judged, both for permission and for denial."""
    assert permit(decide(PLAIN, f"GET https://{host}/v1/read/x")).destination.host.text == "ok.test"
    barred = policy(allow("read", READ), deny("bar", host="ok.test"))
    assert reason(decide(barred, f"GET https://{host}/v1/read/x")) == "denied-by-rule"


def test_the_nearest_operation_is_named_from_policy_only() -> None:
    """A near miss says what would be permitted, and repeats nothing of the request (I29)."""
    answer = decide(PLAIN, "DELETE https://ok.test/v1/read/secret-thing")
    assert isinstance(answer, Denied)
    assert "dev/read: GET /v1/read/**" in answer.remedy
    assert "secret-thing" not in answer.remedy
    assert "DELETE" not in answer.remedy


def test_get_includes_head() -> None:
    """RULINGS 3.3."""
    assert permit(decide(PLAIN, "HEAD https://ok.test/v1/read/x")).effect == "read"


# --- clear text ---


def test_clear_text_is_refused_where_only_tls_is_permitted() -> None:
    """T02, B096: http needs a rule that says so for that very host and port."""
    assert reason(decide(PLAIN, "GET http://ok.test/v1/read/x")) == "clear-text-refused"
    plain = policy(allow("read", READ), allow("clear", operation("dev/clear", scheme="http")))
    assert permit(decide(plain, "GET http://ok.test/v1/read/x")).rules == ("dev/clear",)
    assert reason(decide(plain, "GET http://ok.test:8080/v1/read/x")) == "clear-text-refused"


def test_a_credential_never_travels_in_clear() -> None:
    """T03: even a hand-made policy that says so gets no permit for http with a credential."""
    clear = operation("dev/clear", scheme="http")
    rules = policy(allow("clear", clear, credential=CredentialRef("key")), credentials=[KEY])
    assert reason(decide(rules, "GET http://ok.test/v1/read/x")) == "clear-text-refused"


# --- deny rules ---

EVERYTHING = operation("dev/all", methods=["GET", "POST"], paths=["/", "/**"], query=None)
ADMIN = operation("dev/admin", methods=["*"], paths=["/admin", "/admin/**"])
PUSH = operation(
    "dev/push", methods=["GET"], paths=["/r.git/info/refs"], query={"service": ("push",)}, query_required=("service",)
)
BARRED = [
    ("GET https://ok.test/admin", "the path itself"),
    ("POST https://ok.test/admin/users", "below it, any method"),
    ("GET https://ok.test/admin?x=1", "further query keys do not lift a denial"),
    ("GET https://ok.test/admin/", "a trailing slash does not lift a denial"),
    ("GET https://ok.test/admin%2Fusers", "an encoded slash counts as a slash"),
    ("GET https://ok.test/r.git/info/refs?service=push", "B130 the discovery of a push"),
    ("GET https://ok.test/r.git/info/refs?service=fetch&service=push", "B058 a duplicate does not hide it"),
]


@pytest.mark.parametrize(("line", "why"), BARRED)
def test_deny_wins_and_is_read_widely(line: str, why: str) -> None:
    """A deny rule wins over an allow rule for everything, in any spelling that a server could read as denied."""
    wide = replace(EVERYTHING, paths=tuple(replace(path, encoded_slash=True) for path in EVERYTHING.paths))
    rules = policy(allow("all", wide), deny("admin", ADMIN), deny("push", PUSH))
    assert reason(decide(rules, line)) == "denied-by-rule", why


def test_a_denial_covers_a_get_with_a_body() -> None:
    """A body on a GET does not lift a denial, though no allow would take it."""
    rules = policy(allow("all", EVERYTHING), deny("admin", ADMIN))
    assert reason(decide(rules, "GET https://ok.test/admin", has_body=True)) == "denied-by-rule"


def test_a_denial_of_one_thing_leaves_its_neighbours() -> None:
    """Wide reading ends at the words of the rule: fetch and /administrator are not denied."""
    rules = policy(allow("all", EVERYTHING), deny("admin", ADMIN), deny("push", PUSH))
    assert permit(decide(rules, "GET https://ok.test/administrator"))
    assert permit(decide(rules, "GET https://ok.test/r.git/info/refs?service=fetch"))


def test_a_denied_host_is_denied_on_every_port_and_for_tunnels() -> None:
    """A deny rule without port covers every port; tunnels end at CONNECT."""
    rules = policy(
        allow("all", operation(host="a.wild.test", port=8443)),
        deny("wild", host="**.wild.test", message="Not from here.", quiet=True),
    )
    answer = decide_tunnel(rules, sandbox(), TunnelFacts.build("a.wild.test:8443"), NOW)
    assert answer == Denied(reason="denied-by-rule", rule="dev/wild", message="Not from here.", quiet=True)  # type: ignore[arg-type]
    assert reason(decide(rules, "GET https://a.wild.test:8443/v1/read/x")) == "denied-by-rule"


def test_a_bound_denial_covers_what_does_not_state_the_argument() -> None:
    """`with:` on a deny: a request that does not state the argument counts as bound."""
    op = operation("dev/repo", paths=["/repos/{repo}", "/legacy"], query=None)
    rules = policy(allow("all", EVERYTHING), deny("one", op, bind={"repo": ("secret",)}))
    assert reason(decide(rules, "GET https://ok.test/repos/secret")) == "denied-by-rule"
    assert reason(decide(rules, "GET https://ok.test/legacy")) == "denied-by-rule"
    assert permit(decide(rules, "GET https://ok.test/repos/open"))


# --- bodies ---

JSON = ("content-type", "application/json")


def test_the_body_is_asked_for_with_the_largest_bound() -> None:
    """Every operation that must see the body counts; the largest bound is asked for."""
    bigger = replace(ORDER, id="dev/bigger", body=replace(ORDER.body, bound=512))  # type: ignore[type-var]
    rules = policy(allow("order", ORDER), allow("bigger", bigger))
    assert decide(rules, "POST https://ok.test/v1/orders", JSON, has_body=True) == NeedsBody(bound=512)


NOT_JUDGED = [
    (b'{"item":"a","count":1,"count":2}', "B063 duplicate keys"),
    (b'\xef\xbb\xbf{"item":"a","count":1}', "B063 byte order mark"),
    ('{"item":"a","count":1}'.encode("utf-16"), "B063 UTF-16"),
    (b'{"item":"a","count":NaN}', "B063 NaN"),
    (b'{"item":"a","count":1,"more":1}', "unknown fields are denied"),
    (b'{"item":"a"}', "a missing field"),
    (b"[1]", "another shape"),
    (b"", "no body at all"),
    (b'{"item":"' + b"a" * 64 + b'","count":1}', "B191 one byte above the bound is denied"),
]


@pytest.mark.parametrize(("body", "why"), NOT_JUDGED)
def test_a_body_that_is_not_exactly_permitted_is_denied(body: bytes, why: str) -> None:
    """What cannot be read, is over the bound or says something else is body-not-judged."""
    rules = policy(allow("order", ORDER))
    assert reason(decide(rules, "POST https://ok.test/v1/orders", JSON, body=body)) == "body-not-judged", why


def test_a_body_of_another_media_type_is_denied() -> None:
    """B063: JSON sent as a form or as multipart is not the operation."""
    rules = policy(allow("order", ORDER))
    for media in ("multipart/form-data", "text/plain", "application/x-www-form-urlencoded"):
        answer = decide(
            rules, "POST https://ok.test/v1/orders", ("content-type", media), body=b'{"item":"a","count":1}'
        )
        assert reason(answer) == "body-not-judged"


def test_a_permitted_body_states_arguments() -> None:
    """The judged body's fields are the permit's arguments."""
    answer = permit(
        decide(policy(allow("order", ORDER)), "POST https://ok.test/v1/orders", JSON, body=b'{"item":"a","count":1}')
    )
    assert answer.arguments == (("count", "1"), ("item", "a"))
    assert answer.effect == "write"


def test_an_attested_body_counts_only_for_the_operations_it_names() -> None:
    """The vault parses nothing from outside: it takes the executor's word, and no other."""
    facts = request("POST https://ok.test/v1/orders", JSON, has_body=True)
    rules = policy(allow("order", ORDER))
    for names, expected in (
        (frozenset[str](), Denied),
        (frozenset({"dev/other"}), Denied),
        (frozenset({"dev/order"}), Permit),
    ):
        attested = replace(facts, body=BodyAttested(operations=names, sha256=bytes(32)))
        assert isinstance(decide_request(rules, sandbox(), attested, NOW), expected)


# --- merging ---


def test_limits_are_all_charged_and_sizes_take_the_minimum() -> None:
    """RULINGS 3.1: every matching rule's limits apply at once."""
    rules = policy(
        allow("a", READ, requests=(60, 60), response_bytes=1000, request_bytes=10, headers=("x-a", "x-both")),
        allow("b", replace(READ, id="dev/b"), requests=(5, 1), response_bytes=2000, headers=("x-b", "x-both")),
    )
    answer = permit(decide(rules, "GET https://ok.test/v1/read/x"))
    assert answer.rules == ("dev/a", "dev/b")
    assert answer.needs_state
    limits = answer.restrictions
    assert limits.requests == (("dev/a", 60, 60), ("dev/b", 5, 1))
    assert (limits.request_bytes, limits.response_bytes) == (10, 1000)
    assert limits.request_headers is not None
    assert "x-both" in limits.request_headers
    assert not {"x-a", "x-b"} & limits.request_headers


def test_two_credentials_results_or_protocols_are_ambiguous() -> None:
    """RULINGS 3.1: Exeat does not choose between contradicting rules."""
    keys = [KEY, credential("other")]
    second = replace(READ, id="dev/second")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"credential": CredentialRef("key")}, {"credential": CredentialRef("other")}),
        ({"result_keep": ("id",)}, {"result_keep": ("id", "sku")}),
        ({"protocol": "h2"}, {}),
    ]
    for left, right in cases:
        rules = policy(allow("a", READ, **left), allow("b", second, **right), credentials=keys)
        assert reason(decide(rules, "GET https://ok.test/v1/read/x")) == "ambiguous-rules"


def test_the_rule_with_a_credential_leads() -> None:
    """A public rule beside it does not take the credential away, and the effect is the strongest of both."""
    rules = policy(
        allow("a", replace(READ, id="dev/a", effect="write")),
        allow("z", replace(READ, id="dev/z"), credential=CredentialRef("key")),
        credentials=[KEY],
    )
    answer = permit(decide(rules, "GET https://ok.test/v1/read/x"))
    assert (answer.rule, answer.operation, answer.credential, answer.effect) == ("dev/z", "dev/z", "key", "write")


def test_an_approval_holds_whatever_else_allows() -> None:
    """One matching rule that needs approval is enough to hold; all groups are named."""
    rules = policy(
        allow("a", READ),
        allow("b", replace(READ, id="dev/b"), approval="ops"),
        allow("c", replace(READ, id="dev/c"), approval="legal"),
    )
    answer = decide(rules, "GET https://ok.test/v1/read/x")
    assert isinstance(answer, Held)
    assert (answer.rule, answer.approval) == ("dev/b", "legal, ops")


def test_bindings_narrow_a_rule() -> None:
    """`with:` compares the argument with the sandbox's attribute; a missing attribute permits nothing."""
    op = operation("dev/repo", paths=["/repos/{repo}"])
    rules = policy(allow("repo", op, bind={"repo": ("${sandbox.repository}",)}))
    facts = request("GET https://ok.test/repos/shop")
    assert reason(decide_request(rules, sandbox(), facts, NOW)) == "no-rule"
    assert reason(decide_request(rules, sandbox(repository="other"), facts, NOW)) == "no-rule"
    assert permit(decide_request(rules, sandbox(repository="shop"), facts, NOW)).arguments == (("repo", "shop"),)


def test_a_read_may_send_one_mebibyte_unless_something_says_otherwise() -> None:
    """RULINGS 4.7, and a declared length beyond the bound is refused at header time."""
    assert permit(decide(PLAIN, "GET https://ok.test/v1/read/x")).restrictions.request_bytes == READ_UPLOAD
    small = policy(allow("write", replace(READ, methods=("PUT",)), request_bytes=10))
    line = "PUT https://ok.test/v1/read/x"
    assert reason(decide(small, line, ("content-length", "11"), has_body=True)) == "body-too-large"
    assert permit(decide(small, line, ("content-length", "10"), has_body=True))


def test_result_needs_the_broker() -> None:
    """Pruning an answer is the executor's, so the permit asks for a hand-off."""
    answer = permit(decide(policy(allow("read", READ, result_keep=("id",))), "GET https://ok.test/v1/read/x"))
    assert answer.needs_state
    assert answer.restrictions.result is not None
    assert answer.restrictions.result.keep == ("id",)


# --- authority and placeholders ---

FOREIGN = [
    (("authorization", "Bearer mine"), "its own bearer token"),
    (("authorization", "Basic bWU6bWU="), "its own password"),
    (("cookie", "session=1"), "its own session"),
    (("x-api-key", "mine"), "another provider's slot"),
    (("private-token", "mine"), "another provider's slot"),
    (("authorization", f"Bearer {PLACEHOLDER} mine"), "more than the placeholder"),
    (("authorization", f"Bearer x{PLACEHOLDER}"), "another shape around the core"),
]


@pytest.mark.parametrize(("header", "why"), FOREIGN)
def test_the_clients_own_authority_is_refused(header: tuple[str, str], why: str) -> None:
    """RULINGS 4.2: its own key on a permitted host is a way out, with and without a credential on the rule."""
    assert reason(decide(KEYED, "GET https://ok.test/v1/read/x", header)) == "client-authority", why
    if "sk_" not in header[1]:
        assert reason(decide(PLAIN, "GET https://ok.test/v1/read/x", header)) == "client-authority", why


@pytest.mark.parametrize("key", ["access_token", "api_key", "X-Amz-Signature", "x-amz-security-token", "sig"])
def test_authority_in_the_query_is_refused(key: str) -> None:
    """Auth keys and signed-URL parameters are refused in any case, even under `query: any`."""
    rules = policy(allow("read", replace(READ, query=None)))
    assert reason(decide(rules, f"GET https://ok.test/v1/read/x?{key}=mine")) == "client-authority"


def test_a_query_value_that_policy_lists_is_not_the_clients() -> None:
    """Where a rule lists the values of an auth-like key, policy chose the value."""
    rules = policy(allow("read", replace(READ, query={"policy": ("open",)})))
    assert permit(decide(rules, "GET https://ok.test/v1/read/x?policy=open"))


def test_client_auth_pass_permits_it_and_only_if_every_rule_says_so() -> None:
    """`client_auth: pass` is a relaxation, so merging keeps the strictest."""
    header = ("authorization", "Bearer mine")
    passing = allow("a", READ, client_auth=True)
    assert permit(decide(policy(passing), "GET https://ok.test/v1/read/x", header)).restrictions.client_auth
    both = policy(passing, allow("b", replace(READ, id="dev/b")))
    assert reason(decide(both, "GET https://ok.test/v1/read/x", header)) == "client-authority"


def _basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode()


IN_SLOT = [
    ("authorization", f"Bearer {PLACEHOLDER}"),
    ("authorization", f"bearer {PLACEHOLDER}"),
    ("authorization", f"token {PLACEHOLDER}"),
    ("authorization", _basic(f"u:{PLACEHOLDER}")),
    ("authorization", _basic(f":{PLACEHOLDER}")),
    ("authorization", _basic(f"x-access-token:{PLACEHOLDER}")),
    ("authorization", _basic(f"{PLACEHOLDER}:")),
    ("authorization", f"Bearer {OTHER_PLACEHOLDER}"),
]


@pytest.mark.parametrize("header", IN_SLOT)
def test_a_placeholder_in_its_slot_is_permitted(header: tuple[str, str]) -> None:
    """T19: every form in which clients send a token; whose placeholder it is, the vault asks later."""
    assert permit(decide(KEYED, "GET https://ok.test/v1/read/x", header)).credential == "key"


def test_a_credential_is_attached_without_a_placeholder_too() -> None:
    """Clients that send no authority at all get the credential as well."""
    assert permit(decide(KEYED, "GET https://ok.test/v1/read/x")).credential == "key"


STRAY = [
    ("GET https://ok.test/v1/read/x", ("x-custom", PLACEHOLDER), "another header"),
    ("GET https://ok.test/v1/read/x", ("user-agent", f"curl {PLACEHOLDER}"), "inside another header"),
    ("GET https://ok.test/v1/read/x", ("cookie", f"a={PLACEHOLDER}"), "a cookie"),
    ("GET https://ok.test/v1/read/x", ("x-custom", _basic(f"u:{PLACEHOLDER}")), "B092 Basic elsewhere"),
    (f"GET https://ok.test/v1/read/{PLACEHOLDER}", None, "the path"),
    (f"GET https://ok.test/v1/read/{PLACEHOLDER.replace('X', '%58')}x", None, "not even canonical"),
    (f"GET https://ok.test/v1/read/x?q={PLACEHOLDER}", None, "the query"),
    (f"GET https://ok.test/v1/read/x?q={PLACEHOLDER.replace('X', '%58')}", None, "the decoded query"),
    ("GET https://pub.test/v1/read/x", ("authorization", f"Bearer {PLACEHOLDER}"), "B090, T24 a host without it"),
    ("GET https://evil.test/", ("authorization", f"Bearer {PLACEHOLDER}"), "a host without rule"),
    ("GET https://ok.test:8443/v1/read/x", ("authorization", f"Bearer {PLACEHOLDER}"), "another port (I10)"),
]


@pytest.mark.parametrize(("line", "header", "why"), STRAY)
def test_a_placeholder_outside_its_slot_is_misuse(line: str, header: tuple[str, str] | None, why: str) -> None:
    """RULINGS 4.4: refused before any upstream byte, with the reason that raises the alarm."""
    rules = policy(
        allow("read", replace(READ, query=None), credential=CredentialRef("key")),
        allow("pub", operation("dev/pub", host="pub.test")),
        credentials=[KEY],
    )
    if "%58" in line and "?" not in line:
        with pytest.raises(ValueError):
            request(line)  # the path itself is refused: it encodes a plain letter
        return
    headers = () if header is None else (header,)
    assert reason(decide(rules, line, *headers)) == "placeholder-misuse", why


def test_a_slot_of_another_rule_is_no_slot_here() -> None:
    """The permit's own credential decides: on a public operation of the same host the placeholder is misuse."""
    rules = policy(
        allow("read", READ, credential=CredentialRef("key")),
        allow("pub", operation("dev/pub", paths=["/public"])),
        credentials=[KEY],
    )
    assert (
        reason(decide(rules, "GET https://ok.test/public", ("authorization", f"Bearer {PLACEHOLDER}")))
        == "placeholder-misuse"
    )


def test_a_denied_operation_with_the_placeholder_in_its_slot_is_just_denied() -> None:
    """An honest client that tries what it may not do gets no alarm but the reason it can act on."""
    answer = decide(KEYED, "POST https://ok.test/v1/refunds", ("authorization", f"Bearer {PLACEHOLDER}"))
    assert reason(answer) == "no-rule"


@pytest.mark.parametrize("text", [PLACEHOLDER, PLACEHOLDER.replace("X", "\\u0058"), PLACEHOLDER.replace("X", "%58")])
def test_a_placeholder_in_a_judged_body_is_misuse(text: str) -> None:
    """Also hidden behind JSON or percent escapes (B092); prompts may say `placeholders: inert`."""
    body = b'{"item":"' + text.encode() + b'","count":1}'
    line = "POST https://ok.test/v1/orders"
    wide = replace(ORDER, body=replace(ORDER.body, bound=4096))  # type: ignore[type-var]
    assert reason(decide(policy(allow("o", wide)), line, JSON, body=body)) == "placeholder-misuse"
    inert = replace(wide, placeholders_inert=True)
    assert permit(decide(policy(allow("o", inert)), line, JSON, body=body)).restrictions.placeholders_inert


def test_header_and_query_slots() -> None:
    """A header slot with a template and a query slot take the placeholder, and nothing else."""
    header = credential(kind="header", slot=Slot(where="header", name="x-api-key", template="Token {value}"))
    rules = policy(allow("read", READ, credential=CredentialRef("key")), credentials=[header])
    line = "GET https://ok.test/v1/read/x"
    assert permit(decide(rules, line, ("x-api-key", f"Token {PLACEHOLDER}")))
    assert permit(decide(rules, line, ("x-api-key", PLACEHOLDER)))
    assert reason(decide(rules, line, ("x-api-key", "mine"))) == "client-authority"
    assert reason(decide(rules, line, ("x-api-key", PLACEHOLDER), ("x-api-key", PLACEHOLDER))) == "client-authority"
    assert reason(decide(rules, line, ("authorization", f"Bearer {PLACEHOLDER}"))) == "placeholder-misuse"
    bot = credential(kind="header", slot=Slot(where="header", name="authorization", template="Token token={value}"))
    rules = policy(allow("read", READ, credential=CredentialRef("key")), credentials=[bot])
    assert permit(decide(rules, line, ("authorization", f"Token token={PLACEHOLDER}")))
    assert permit(decide(rules, line, ("authorization", f"Bearer {PLACEHOLDER}")))
    assert reason(decide(rules, line, ("authorization", "Token token=mine"))) == "client-authority"
    assert reason(decide(rules, line, ("authorization", f"Token token=mine,{PLACEHOLDER}"))) == "client-authority"
    query = credential(kind="query", slot=Slot(where="query", name="key"))
    rules = policy(
        allow("read", replace(READ, query={"key": None}), credential=CredentialRef("key")), credentials=[query]
    )
    assert permit(decide(rules, f"{line}?key={PLACEHOLDER}"))
    assert reason(decide(rules, f"{line}?key=mine")) == "client-authority"


def test_a_credential_bound_elsewhere_is_never_permitted() -> None:
    """A hand-made contradiction between rule and credential is refused at run time too (RULINGS 3.6)."""
    rules = policy(allow("read", READ, credential=CredentialRef("key")), credentials=[credential(host="pub.test")])
    assert reason(decide(rules, "GET https://ok.test/v1/read/x")) == "no-rule"
    missing = policy(allow("read", READ, credential=CredentialRef("gone")))
    assert reason(decide(missing, "GET https://ok.test/v1/read/x")) == "credential-unavailable"


def test_credentialed_calls_have_a_header_allowlist() -> None:
    """RULINGS 4.3: a base set plus what operation and rule name; plain rules pass the rest."""
    op = replace(READ, extra_request_headers=("X-Request-Id",))
    rules = policy(allow("read", op, credential=CredentialRef("key"), headers=("x-more",)), credentials=[KEY])
    headers = permit(decide(rules, "GET https://ok.test/v1/read/x")).restrictions.request_headers
    assert headers is not None
    assert {"accept", "x-request-id", "x-more"} <= headers
    assert not {"authorization", "cookie", "x-data"} & headers
    assert permit(decide(PLAIN, "GET https://ok.test/v1/read/x")).restrictions.request_headers is None


@pytest.mark.parametrize(
    "offered",
    [
        "realtime, openai-insecure-api-key.sk-mine",
        "base64url.bearer.authorization.k8s.io.bWluZQ, base64.channel.k8s.io",
        "OpenAI-Insecure-API-Key.sk-mine",
    ],
)
def test_a_key_in_the_name_of_a_subprotocol_is_the_clients_own_authority(offered: str) -> None:
    """What browser clients do for want of a header is refused like the header (RULINGS 4.2); other names pass."""
    rules = policy(allow("ws", replace(READ, websocket=True)))
    line, name = "GET https://ok.test/v1/read/x", "sec-websocket-protocol"
    assert reason(decide(rules, line, (name, offered), upgrade="websocket")) == "client-authority"
    permit(decide(rules, line, (name, "realtime, openai-beta.realtime-v1"), upgrade="websocket"))


def test_a_websocket_has_effect_write() -> None:
    """RULINGS 7.5: what goes through it is not judged."""
    rules = policy(allow("ws", replace(READ, websocket=True)))
    answer = permit(decide(rules, "GET https://ok.test/v1/read/x", upgrade="WebSocket"))
    assert answer.restrictions.websocket
    assert answer.effect == "write"
    assert not permit(decide(rules, "GET https://ok.test/v1/read/x")).restrictions.websocket


# --- tunnels ---

TUNNELS = policy(
    Rule(
        id="dev/raw",  # type: ignore[arg-type]
        action="allow",
        operations=(),
        hosts=operation(host="raw.test").hosts,
        port=443,
        tunnel=True,
        tunnel_reason="pinned client",
        max_bytes=10,
        max_seconds=5,
    ),
    allow("read", READ),
    allow("clear", operation("dev/clear", host="mcp.test", scheme="http")),
    allow("h2", operation("dev/h2", host="grpc.test"), protocol="h2"),
)

NO_TUNNEL = ["evil.test:443", "ok.test:22", "ok.test:8443", "raw.test:8443", "mcp.test:443", "notok.test:443"]


@pytest.mark.parametrize("target", NO_TUNNEL)
def test_no_tunnel_without_a_rule_for_host_and_port(target: str) -> None:
    """B045: nothing is dialled for a host:port that no rule covers."""
    assert reason(decide_tunnel(TUNNELS, sandbox(), TunnelFacts.build(target), NOW)) == "no-rule"


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("evil.test:443", ""),
        ("raw.test:8443", ""),
        ("ok.test:8443", "Nearest is dev/read: https on port 443; the port differs."),
        ("mcp.test:443", "Nearest is dev/clear: http on port 80; the port differs."),
    ],
)
def test_a_tunnel_to_another_port_of_a_known_host_says_which_port(target: str, remedy: str) -> None:
    """A client that left the port out is told which one a rule is for, and nothing of hosts that no rule names."""
    decision = decide_tunnel(TUNNELS, sandbox(), TunnelFacts.build(target), NOW)
    assert isinstance(decision, Denied)
    assert decision.remedy == remedy


def test_tunnels_say_how_they_are_served() -> None:
    """The rule picks the lane: uninspected, clear text, HTTP/2 or the main lane."""

    def tunnel(target: str) -> TunnelPermit:
        answer = decide_tunnel(TUNNELS, sandbox(), TunnelFacts.build(target), NOW)
        assert isinstance(answer, TunnelPermit)
        return answer

    raw = tunnel("raw.test:443")
    assert (raw.inspected, raw.rule, raw.reason, raw.max_bytes, raw.max_seconds) == (
        False,
        "dev/raw",
        "pinned client",
        10,
        5,
    )
    assert (tunnel("ok.test:443").inspected, tunnel("ok.test:443").clear_text) == (True, False)
    assert tunnel("mcp.test:80").clear_text
    assert tunnel("grpc.test:443").protocol == "h2"


def test_a_request_inside_a_tunnel_only_host_is_denied() -> None:
    """A tunnel rule permits bytes, never a request that we would inspect or give a credential."""
    assert reason(decide(TUNNELS, "GET https://raw.test/v1/read/x")) == "no-rule"


@pytest.mark.parametrize("host", ["raw.test", "**.test"])
def test_an_operation_that_is_denied_at_a_host_denies_tunnels_to_it(host: str) -> None:
    """Deny wins, and in a tunnel nobody sees the operation: none goes there. Tunnels to other hosts stay."""
    no_admin = operation("dev/admin", host=host, methods=("POST",), paths=("/admin/**",), port=8443)
    rules = policy(*TUNNELS.roles["dev"].rules, deny("no-admin", no_admin))
    answer = decide_tunnel(rules, sandbox(), TunnelFacts.build("raw.test:443"), NOW)
    assert (reason(answer), answer.rule) == ("denied-by-rule", "dev/no-admin")  # type: ignore[union-attr]
    assert isinstance(decide_tunnel(rules, sandbox(), TunnelFacts.build("ok.test:443"), NOW), TunnelPermit)


def test_contradicting_tunnels_are_refused() -> None:
    """A tunnel beside an inspected rule is a load error; a hand-made one is refused at run time."""
    rules = policy(*TUNNELS.roles["dev"].rules, allow("both", operation("dev/both", host="raw.test")))
    assert reason(decide_tunnel(rules, sandbox(), TunnelFacts.build("raw.test:443"), NOW)) == "ambiguous-rules"


# --- order ---

_OPERATIONS: tuple[Operation, ...] = (
    READ,
    replace(READ, id="dev/write", effect="write", methods=("GET", "POST")),
    operation("dev/one", paths=["/v1/read/{id}"], query=None),
    operation("dev/wild", host="*.test", paths=["/**"]),
    ORDER,
    replace(
        ORDER,
        id="dev/order2",
        body=BodySpec(matcher="json_fields", bound=128, params={"item": ["a"], "count": "integer"}),
    ),
)


@st.composite
def _rules(draw: st.DrawFn) -> list[Rule]:
    rules: list[Rule] = []
    for index in range(draw(st.integers(1, 6))):
        ops = tuple(draw(st.lists(st.sampled_from(_OPERATIONS), min_size=1, max_size=3, unique_by=lambda op: op.id)))
        name = f"r{index}"
        if draw(st.integers(0, 7)) == 0:
            rules.append(deny(name, ops[0]) if draw(st.booleans()) else deny(name, host="ok.test"))
            continue
        rules.append(
            allow(
                name,
                *ops,
                credential=draw(st.sampled_from([None, None, CredentialRef("key"), CredentialRef("other")])),
                result_keep=draw(st.sampled_from([None, None, ("id",), ("sku",)])),
                requests=draw(st.sampled_from([None, (1, 60), (2, 60)])),
                response_bytes=draw(st.sampled_from([None, 10, 20])),
                request_bytes=draw(st.sampled_from([None, 10, 200])),
                approval=draw(st.sampled_from([None, None, None, "ops", "legal"])),
                headers=draw(st.sampled_from([None, ("x-a",), ("x-b", "x-a")])),
                client_auth=draw(st.booleans()),
                protocol=draw(st.sampled_from(["http1", "http1", "http1", "h2"])),
            )
        )
    return rules


_REQUESTS: tuple[RequestFacts, ...] = (
    request("GET https://ok.test/v1/read/x"),
    request("GET https://ok.test/v1/read/x?q=1"),
    request("POST https://ok.test/v1/read/x"),
    request("POST https://ok.test/v1/orders", JSON, has_body=True),
    request("POST https://ok.test/v1/orders", JSON, body=b'{"item":"a","count":1}'),
    request("GET https://pub.test/v1/read/x", ("authorization", f"Bearer {PLACEHOLDER}")),
    request("GET https://ok.test/v1/read/x", ("authorization", f"Bearer {PLACEHOLDER}")),
    request("GET https://ok.test/v1/read/x", ("authorization", "Bearer mine")),
)


@tried(300)
@given(rules=_rules(), facts=st.sampled_from(_REQUESTS), data=st.data())
def test_the_order_of_rules_never_matters(rules: list[Rule], facts: RequestFacts, data: st.DataObject) -> None:
    """Shuffling rules, and operations within a rule, gives the same verdict with the same restrictions."""
    shuffled = data.draw(st.permutations(rules))
    turned = [replace(rule, operations=tuple(reversed(rule.operations))) for rule in shuffled]
    keys = [KEY, credential("other")]
    first = decide_request(policy(*rules, credentials=keys), sandbox(), facts, NOW)
    assert decide_request(policy(*turned, credentials=keys), sandbox(), facts, NOW) == first


@tried(200)
@given(rules=_rules(), facts=st.sampled_from(_REQUESTS))
def test_adding_a_deny_rule_never_permits_anything(rules: list[Rule], facts: RequestFacts) -> None:
    """With one more deny rule for the host, whatever was decided before, the answer is a denial."""
    keys = [KEY, credential("other")]
    barred = policy(*rules, deny("zz", host=facts.destination.host.text), credentials=keys)
    assert isinstance(decide_request(barred, sandbox(), facts, NOW), Denied)
