"""Refusals as an agent reads them: one Reason rendered as problem+json and in the shapes that clients show.

Constant per reason (I29): the text comes from the reason table, the rule id, its remedy and message from policy,
the request id and the ticket from us. Nothing of the request or of an upstream is ever put in. Sources: RFC 9457
(problem details), RFC 9209 (Proxy-Status), RULINGS 8.1, and what each client shows (reference of registries).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from rules.reasons import REFUSAL_TITLE, reason

MAX_FIELD = 1024
"""Characters of rule, remedy, message or ticket that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What is told. `code` is a reason code; unknown ones are told as internal-error."""

    code: str
    request_id: str
    rule: str = ""
    remedy: str = ""
    """What policy says would help; empty: the reason's own remedy."""
    message: str = ""
    """The operator's fixed sentence (`message:` on a rule or role)."""
    ticket: str = ""
    retry_after: int = 0
    """Seconds; 0 says nothing."""
    reply_to: str | int | None = None
    """The id of the JSON-RPC request that is refused, the one thing of a request that an answer repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A complete answer. `headers` hold everything but Connection; Content-Length is included."""

    status: int
    phrase: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def render(refusal: Refusal, shape: str = "problem", *, at_connect: bool = False) -> Rendered:
    """Return the answer for `refusal` in `shape`: one of rules.service.NATIVES, `git-push` or `lfs`.

    An unknown shape is rendered as problem. `at_connect`: it answers a CONNECT, of which clients show the phrase alone.
    Never raises.
    """
    row = reason(refusal.code)
    document = problem(refusal)
    if shape == "jsonrpc":
        content_type, body = _jsonrpc(document, refusal.reply_to)
    else:
        content_type, body = _SHAPES.get(shape, _problem)(document)
    headers = [
        ("content-type", content_type),
        ("content-length", str(len(body))),
        # RFC 9209 section 2: our name, the error type, and as details the stable code alone.
        ("proxy-status", f'exeat; error={row.proxy_error}; details="{row.code}"'),
        ("x-should-retry", "true" if row.retryable else "false"),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
    ]
    if row.status == 407:
        headers.append(("proxy-authenticate", 'Basic realm="exeat", charset="UTF-8"'))
    if refusal.retry_after > 0:
        headers.append(("retry-after", str(refusal.retry_after)))
    # git reads a report, and shows it, only where the exchange itself went well; the report says that the push did not.
    status = 200 if shape == "git-push" else row.status
    if shape == "bundler" and status == 403:
        # Bundler puts a sentence of its own about passwords in place of the text of a 401 or 403, and shows others'.
        status = 451
    if shape == "huggingface":
        # huggingface_hub shows this header and not the body.
        headers.append(("x-error-message", " ".join(_lines(document)).encode("ascii", "replace").decode("ascii")))
    phrase = REFUSAL_TITLE
    if at_connect or shape in _PHRASE_SHOWN:
        phrase = f"{REFUSAL_TITLE}: {row.code}, {document['request_id']}".encode("ascii", "replace").decode("ascii")
    return Rendered(status=status, phrase=phrase, headers=tuple(headers), body=body)


def problem(refusal: Refusal) -> dict[str, Any]:
    """The problem document (RFC 9457 section 3) as a JSON value, members in reading order."""
    row = reason(refusal.code)
    remedy = _shown(refusal.remedy) or row.remedy
    document: dict[str, Any] = {
        "type": row.type,
        "title": REFUSAL_TITLE,
        "status": row.status,
        "detail": f"{row.title} {remedy}",
        "reason": row.code,
        "request_id": _shown(refusal.request_id),
        "remedy": remedy,
        "retryable": row.retryable,
    }
    for name in ("rule", "message", "ticket"):
        value = _shown(getattr(refusal, name))
        if value:
            document[name] = value
    return document


def shape_for(native: str, user_agent: str) -> str:
    """The shape to use: the operation's own, else by the client's name where it shows only one form."""
    if native != "problem":
        return native
    lowered = user_agent.lower()
    return next((shape for prefix, shape in _AGENTS if lowered.startswith(prefix)), "problem")


# --- shapes ------------------------------------------------------------------------------------------------------

_AGENTS: tuple[tuple[str, str], ...] = (
    ("git/", "git"),
    ("git-lfs/", "lfs"),
    ("npm/", "npm"),
    ("pnpm/", "npm"),
    ("yarn/", "npm"),
    ("bun/", "npm"),
    ("pip/", "pypi"),
    ("uv/", "pypi"),
    ("twine/", "pypi"),
    ("cargo", "cargo"),
    ("go-http-client", "go"),
    ("bundler/", "bundler"),
    ("ruby, rubygems/", "bundler"),
    ("docker/", "oci"),
    ("containerd/", "oci"),
    ("buildkit/", "oci"),
    ("skopeo/", "oci"),
    ("libpod/", "oci"),
    ("buildah/", "oci"),
    ("crane/", "oci"),
    ("debian apt-http/", "apt"),
    ("apache-maven/", "registry"),
    ("gradle/", "registry"),
    ("poetry/", "pypi"),
    ("python-requests/", "registry"),
    ("python-urllib/", "registry"),
    ("wget/", "registry"),
    ("nuget ", "registry"),
    ("composer/", "registry"),
    ("conda/", "registry"),
    ("go-gh", "forge"),
    ("github cli", "forge"),
)
"""What clients call themselves, at a host that no rule describes: each still gets the form that it shows."""

_PHRASE_SHOWN = frozenset({"apt", "bundler", "npm", "pypi", "registry"})
"""Shapes whose clients show the reason phrase and little or nothing of a body: it names the reason and the request."""


def _shown(text: str) -> str:
    """One printable line: controls and bidirectional marks are dropped, the rest is cut to MAX_FIELD."""
    return "".join(char for char in text[:MAX_FIELD] if char.isprintable())


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def _problem(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # uv wants exactly this media type, without a charset parameter.
    return "application/problem+json", _json(document)


def _pypi(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # uv shows title and detail; pip and twine the reason phrase.
    return _problem({**document, "detail": " ".join(_lines(document)).removeprefix(f"{document['title']}: ")})


def _forge(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # The REST APIs of GitHub and GitLab tell an error in `message`, which gh, glab and the client libraries show.
    return "application/problem+json", _json({**document, "message": " ".join(_lines(document))})


def _lines(document: Mapping[str, Any]) -> list[str]:
    lines = [f"{document['title']}: {document['detail']}"]
    if "message" in document:
        lines.append(str(document["message"]))
    named = [f"reason {document['reason']}", f"request {document['request_id']}"]
    named += [f"{name} {document[name]}" for name in ("rule", "ticket") if name in document]
    lines.append(", ".join(named))
    return lines


def _git(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # go drops a text with a non-graphic or non-ASCII character and stops after 8 lines.
    text = "\n".join(_lines(document)).encode("ascii", "replace") + b"\n"
    return "text/plain; charset=utf-8", text[:640]


def _git_push(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # gitprotocol-pack(5), "Report Status", in side-band-64k: band 2 is shown to the person, band 1 is the report.
    shown = b"".join(_packet(b"\x02" + line.encode("ascii", "replace") + b"\n") for line in _lines(document))
    report = _packet(f"unpack {document['title']}\n".encode("ascii", "replace")) + b"0000"
    return "application/x-git-receive-pack-result", shown + _packet(b"\x01" + report) + b"0000"


def _lfs(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # docs/api/batch.md of git-lfs, "Response Errors": the client shows `message`.
    return "application/vnd.git-lfs+json", _json({"message": " ".join(_lines(document)), "exeat": document})


def _packet(data: bytes) -> bytes:
    return b"%04x" % (len(data) + 4) + data


def _npm(document: Mapping[str, Any]) -> tuple[str, bytes]:
    return "application/problem+json", _json({**document, "error": " ".join(_lines(document))})


def _openai(document: Mapping[str, Any]) -> tuple[str, bytes]:
    error = {
        "message": " ".join(_lines(document)),
        "type": "exeat_refusal",
        "param": None,
        "code": document["reason"],
    }
    return "application/json", _json({"error": error, "exeat": document})


def _anthropic(document: Mapping[str, Any]) -> tuple[str, bytes]:
    error = {"type": "permission_error", "message": " ".join(_lines(document))}
    return "application/json", _json(
        {"type": "error", "error": error, "request_id": document["request_id"], "exeat": document}
    )


def _jsonrpc(document: Mapping[str, Any], reply_to: str | int | None) -> tuple[str, bytes]:
    # JSON-RPC 2.0 section 5: the same id, so that the client's call ends; null where none could be read.
    error = {"code": -32001, "message": " ".join(_lines(document)), "data": document}
    return "application/json", _json({"jsonrpc": "2.0", "id": reply_to, "error": error})


def _xml_error(document: Mapping[str, Any]) -> str:
    text = escape(" ".join(_lines(document)))
    return f"<Code>AccessDenied</Code><Message>{text}</Message>"


def _s3(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # S3 API reference, "Error responses": one Error element.
    request = escape(str(document["request_id"]))
    body = f"{_XML}<Error>{_xml_error(document)}<RequestId>{request}</RequestId></Error>\n"
    return "application/xml", body.encode("ascii", "xmlcharrefreplace")


def _aws_query(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # Smithy awsQuery, "Operation error serialization": the error inside an ErrorResponse.
    request = escape(str(document["request_id"]))
    error = f"<Error><Type>Sender</Type>{_xml_error(document)}</Error><RequestId>{request}</RequestId>"
    body = f"{_XML}<ErrorResponse>{error}</ErrorResponse>\n"
    return "text/xml", body.encode("ascii", "xmlcharrefreplace")


def _aws_json(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # Smithy awsJson1_1, "Operation error serialization": `__type` and a message.
    error = {"__type": "AccessDeniedException", "message": " ".join(_lines(document)), "exeat": document}
    return "application/x-amz-json-1.1", _json(error)


_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'


def _graphql(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # GraphQL specification 7.1: errors with a message; clients of GitHub also show `message` of a failed status.
    text = " ".join(_lines(document))
    error = {"message": text, "extensions": {"code": "FORBIDDEN", "exeat": document}}
    return "application/json", _json({"message": text, "errors": [error]})


def _oci(document: Mapping[str, Any]) -> tuple[str, bytes]:
    # OCI distribution specification 1.1, "Error Codes": DENIED is "requested access to the resource is denied".
    error = {"code": "DENIED", "message": " ".join(_lines(document)), "detail": document}
    return "application/json", _json({"errors": [error]})


_SHAPES: dict[str, Callable[[Mapping[str, Any]], tuple[str, bytes]]] = {
    "problem": _problem,
    "pypi": _pypi,
    "forge": _forge,
    "apt": _problem,
    "huggingface": _problem,
    "registry": _problem,
    "git": _git,
    "git-push": _git_push,
    "lfs": _lfs,
    "bundler": _git,
    "cargo": _git,
    "go": _git,
    "npm": _npm,
    "oci": _oci,
    "openai": _openai,
    "anthropic": _anthropic,
    "graphql": _graphql,
    "s3": _s3,
    "aws-query": _aws_query,
    "aws-json": _aws_json,
}
