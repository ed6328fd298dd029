"""How a refusal reads in every shape that a client shows."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from rules.reasons import REASONS
from rules.service import NATIVES
from tests.support.rows import every_row
from wire.refusals import Refusal, render, shape_for

SHAPES = sorted({*NATIVES, "lfs"} - {"bundler"})
"""Every shape whose status is the reason's own."""


@pytest.mark.parametrize("shape", SHAPES)
@every_row("code", sorted(REASONS))
def test_every_reason_has_every_shape(code: str, shape: str) -> None:
    """Status and Proxy-Status are the reason's own; the length is the body's; the id and the code can be read."""
    answer = render(Refusal(code=code, request_id="req_x", rule="dev/r"), shape)
    headers = dict(answer.headers)
    assert answer.status == REASONS[code].status
    assert answer.phrase.startswith("Refused by Exeat policy")
    assert headers["content-length"] == str(len(answer.body))
    assert headers["proxy-status"].startswith(f"exeat; error={REASONS[code].proxy_error}; ")
    assert headers["x-should-retry"] == ("true" if REASONS[code].retryable else "false")
    assert ("proxy-authenticate" in headers) == (answer.status == 407)
    assert b"req_x" in answer.body
    assert code.encode() in answer.body
    if headers["content-type"].endswith("/xml"):
        ElementTree.fromstring(answer.body)
    elif headers["content-type"] != "text/plain; charset=utf-8":
        json.loads(answer.body)


def test_git_reads_a_report_that_says_that_the_push_failed() -> None:
    """A push is refused inside a well-formed answer: text on the band that is shown, no `ok` in the report."""
    answer = render(Refusal(code="no-rule", request_id="req_x", rule="dev/r"), "git-push")
    assert answer.status == 200
    assert dict(answer.headers)["content-type"] == "application/x-git-receive-pack-result"
    assert dict(answer.headers)["proxy-status"].startswith("exeat; error=")
    packets: list[bytes] = []
    rest = answer.body
    while rest[:4] != b"0000":
        size = int(rest[:4], 16)
        packets.append(rest[4:size])
        rest = rest[size:]
    assert rest == b"0000"
    assert {packet[:1] for packet in packets[:-1]} == {b"\x02"}
    assert b"Refused by Exeat policy" in packets[0]
    assert packets[-1] == b"\x010023unpack Refused by Exeat policy\n0000"


def test_git_lfs_shows_the_message() -> None:
    """The media type that it reads, with one line for the person."""
    answer = render(Refusal(code="no-rule", request_id="req_x", rule="dev/r"), "lfs")
    assert (answer.status, dict(answer.headers)["content-type"]) == (403, "application/vnd.git-lfs+json")
    assert json.loads(answer.body)["message"].startswith("Refused by Exeat policy")


@pytest.mark.parametrize("shape", ["bundler", "cargo", "go"])
def test_package_managers_show_a_few_plain_lines(shape: str) -> None:
    """Graphic ASCII, at most 512 bytes of use, no blank line: what cargo, go and Bundler print."""
    answer = render(Refusal(code="no-rule", request_id="req_x", rule="dev/r", message="Ask \u2603 us."), shape)
    assert dict(answer.headers)["content-type"] == "text/plain; charset=utf-8"
    assert len(answer.body) <= 640
    assert b"\n\n" not in answer.body
    assert all(0x20 <= byte < 0x7F or byte == 0x0A for byte in answer.body)
    assert answer.status == (451 if shape == "bundler" else 403)


@pytest.mark.parametrize("shape", ["apt", "bundler", "npm", "pypi", "registry"])
def test_where_the_phrase_is_all_that_is_shown_it_names_reason_and_request(shape: str) -> None:
    """pip, gem, pnpm, apt and Maven print the reason phrase: ASCII, one line, nothing of the request."""
    answer = render(Refusal(code="no-rule", request_id="req_\u2603x\r\n", rule="dev/r", message="a"), shape)
    assert answer.phrase == "Refused by Exeat policy: no-rule, req_?x"


@pytest.mark.parametrize("shape", ["git", "problem", "openai", "graphql", "oci", "go", "cargo"])
def test_where_a_body_is_shown_the_phrase_is_the_title(shape: str) -> None:
    """Nothing is said twice."""
    assert render(Refusal(code="no-rule", request_id="req_x"), shape).phrase == "Refused by Exeat policy"


@pytest.mark.parametrize("shape", ["git", "problem", "openai", "pypi"])
def test_an_answer_to_connect_names_reason_and_request_in_its_phrase(shape: str) -> None:
    """pip, npm and gem show that much of a tunnel that is refused; curl and git show the status alone."""
    answer = render(Refusal(code="no-rule", request_id="req_x"), shape, at_connect=True)
    assert answer.phrase == "Refused by Exeat policy: no-rule, req_x"


def test_uv_shows_title_and_detail() -> None:
    """So the detail names reason, request and rule; the title is not in it again."""
    document = json.loads(render(Refusal(code="denied-by-rule", request_id="req_x", rule="dev/r"), "pypi").body)
    assert document["detail"].endswith("reason denied-by-rule, request req_x, rule dev/r")
    assert "Refused" not in document["detail"]


def test_clients_of_a_forge_show_the_message() -> None:
    """gh, glab and their libraries read `message`; the operator's sentence is part of it."""
    answer = render(Refusal(code="no-rule", request_id="req_x", message="Ask us."), "forge")
    document = json.loads(answer.body)
    assert document["message"].startswith("Refused by Exeat policy")
    assert "Ask us." in document["message"]
    assert "reason no-rule, request req_x" in document["message"]
    assert dict(answer.headers)["content-type"] == "application/problem+json"


def test_an_image_client_is_told_denied() -> None:
    """The error form of the distribution specification, with the code that means so."""
    answer = render(Refusal(code="no-rule", request_id="req_x", rule="dev/r"), "oci")
    (error,) = json.loads(answer.body)["errors"]
    assert (answer.status, error["code"]) == (403, "DENIED")
    assert "req_x" in error["message"]


def test_the_hubs_client_is_told_by_a_header() -> None:
    """huggingface_hub shows `X-Error-Message`; the body stays the problem document."""
    answer = render(Refusal(code="no-rule", request_id="req_x", message="a\nb\u2603"), "huggingface")
    told = dict(answer.headers)["x-error-message"]
    assert told.startswith("Refused by Exeat policy")
    assert "req_x" in told
    assert told.isascii()
    assert told.isprintable()
    assert json.loads(answer.body)["reason"] == "no-rule"


def test_an_unknown_code_is_told_as_internal_error() -> None:
    """A fault of ours fails closed."""
    assert json.loads(render(Refusal(code="nonsense", request_id="r")).body)["reason"] == "internal-error"


def test_an_unknown_shape_is_a_problem_document() -> None:
    """The media type is exactly the one uv looks for."""
    assert dict(render(Refusal(code="no-rule", request_id="r"), "nonsense").headers)["content-type"] == (
        "application/problem+json"
    )


def test_text_of_policy_cannot_add_a_header_or_a_line() -> None:
    """Control and bidirectional characters are dropped from what policy names."""
    refusal = Refusal(code="no-rule", request_id="r", rule="a\r\nX: y", remedy="\u202egnp.exe\x00", message="m\n\n")
    answer = render(refusal, "git")
    assert b"X: y" not in answer.body.split(b"\n")
    assert b"\x00" not in answer.body
    assert answer.body.count(b"\n") == 3
    shown = json.loads(render(refusal).body)
    assert (shown["rule"], shown["remedy"]) == ("aX: y", "gnp.exe")


def test_a_ticket_says_when_to_ask_again() -> None:
    """Retry-After stands only where a time is known."""
    answer = render(Refusal(code="approval-required", request_id="r", ticket="r", retry_after=30))
    assert dict(answer.headers)["retry-after"] == "30"
    assert json.loads(answer.body)["ticket"] == "r"
    assert "retry-after" not in dict(render(Refusal(code="no-rule", request_id="r")).headers)


@every_row(
    ("native", "agent", "shape"),
    [
        ("anthropic", "git/2.39", "anthropic"),
        ("problem", "git/2.39.5", "git"),
        ("problem", "npm/10.2 node/v20", "npm"),
        ("problem", "pip/24.2", "pypi"),
        ("problem", "Go-http-client/1.1", "go"),
        ("problem", "cargo 1.88.0", "cargo"),
        ("problem", "bundler/2.3.15 rubygems/3.3.15 ruby/3.1.2", "bundler"),
        ("problem", "Ruby, RubyGems/3.3.15 x86_64-linux Ruby/3.1.2", "bundler"),
        ("problem", "Debian APT-HTTP/1.3 (2.6.1)", "apt"),
        ("problem", "docker/27.1.1 go/go1.21.12", "oci"),
        ("problem", "skopeo/1.9.3", "oci"),
        ("problem", "git-lfs/3.3.0 (GitHub; linux amd64)", "lfs"),
        ("problem", "pnpm/9.15.9 npm/? node/v20.20.2 linux x64", "npm"),
        ("problem", "python-requests/2.32.3", "registry"),
        ("forge", "git/2.39.5", "forge"),
        ("problem", "curl/8.5", "problem"),
        ("problem", "", "problem"),
    ],
)
def test_the_operation_chooses_the_shape_before_the_client_does(native: str, agent: str, shape: str) -> None:
    """A client that shows only one form gets that form."""
    assert shape_for(native, agent) == shape


@pytest.mark.parametrize("reply_to", [None, 0, 7, "a", 'x"\n\u202e'])
def test_a_json_rpc_refusal_answers_the_same_id(reply_to: str | int | None) -> None:
    """The one thing of a request that comes back, as JSON; the text stands in the message that clients raise."""
    answer = render(Refusal(code="no-rule", request_id="r-1", rule="dev/x", reply_to=reply_to), "jsonrpc")
    document = json.loads(answer.body)
    assert document["id"] == reply_to
    assert document["error"]["data"]["reason"] == "no-rule"
    assert "Refused by Exeat policy" in document["error"]["message"]
    assert answer.body.isascii()


def test_a_graphql_refusal_is_an_error_with_a_message() -> None:
    """Clients show `errors[].message`, and of a failed status `message`."""
    document = json.loads(render(Refusal(code="no-rule", request_id="r-1"), "graphql").body)
    assert document["errors"][0]["message"] == document["message"]
    assert document["errors"][0]["extensions"]["exeat"]["reason"] == "no-rule"


@pytest.mark.parametrize(("shape", "root"), [("s3", "Error"), ("aws-query", "ErrorResponse/Error")])
def test_an_xml_refusal_has_code_and_message_where_clients_look(shape: str, root: str) -> None:
    """Whatever an operator's sentence holds, the document stays well formed and its text is shown."""
    answer = render(Refusal(code="no-rule", request_id="r-1", message="<b> & \u00fc \x00 ]]>"), shape)
    outer, _, inner = root.partition("/")
    tree = ElementTree.fromstring(answer.body)
    assert tree.tag == outer
    error = tree.find(inner) if inner else tree
    assert error is not None
    assert error.findtext("Code") == "AccessDenied"
    assert "<b> & \u00fc" in str(error.findtext("Message"))
    assert tree.findtext("RequestId") == "r-1"


def test_an_aws_json_refusal_has_a_type_and_a_message() -> None:
    """As the JSON protocols tell an error."""
    document = json.loads(render(Refusal(code="no-rule", request_id="r-1"), "aws-json").body)
    assert document["__type"] == "AccessDeniedException"
    assert "Refused by Exeat policy" in document["message"]


@every_row("shape", [*SHAPES, "bundler", "cargo", "go", "oci", "lfs", "huggingface"])
def test_no_refusal_that_stays_one_sends_the_client_elsewhere_or_asks_it_to_try_again(shape: str) -> None:
    """401 and 407 ask for passwords, 404 and 410 mean that there is no such thing, 429 and 503 that there will be.

    Apart: no token came (407 is how one is asked for), a page that the help host has not, and what heals by itself.
    """
    for code, row in REASONS.items():
        status = render(Refusal(code=code, request_id="req_x"), shape).status
        if not row.retryable and code not in ("auth-required", "not-found"):
            assert status not in (401, 404, 407, 410, 429, 503), (code, shape)
