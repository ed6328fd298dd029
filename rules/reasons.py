"""`REASONS`: the table of every refusal we can give. One row per stable code.

Rules of the table:
- A code, once released, keeps its meaning; it is the last segment of the problem `type` URL (RULINGS 8.1), the
  `reason` of policy tests and the `reason` field of audit records.
- Everything in a row is constant text: nothing of the request, the upstream or the policy is put in (I29).
- Status: 400 malformed, 403 not permitted, 404 help host only, 407 no identity, 408 slow client, 413/431 too
  large, 421 names disagree, 429 a limit, 502 upstream, 503 one of our own dependencies.
- `retryable` is True only where the very same request can succeed later without anybody changing anything.
- `proxy_error` is a proxy error type of RFC 9209 section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

REFUSAL_TITLE = "Refused by Exeat policy"
"""Title of every problem document and reason phrase of every refusal (RULINGS 8.1)."""

TYPE_PREFIX = "http://exeat.internal/reasons/"
"""`TYPE_PREFIX + code` is the problem `type`; it resolves inside the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One row: `title` is one short sentence, `remedy` what the reader can do, `doc` the paragraph of the help page."""

    code: str
    status: int
    title: str
    remedy: str
    retryable: bool
    proxy_error: str
    doc: str

    @property
    def type(self) -> str:
        """The problem `type` URL (RFC 9457)."""
        return TYPE_PREFIX + self.code


_ASK = "Ask the operator for a rule, or use an operation that http://exeat.internal/ lists as permitted."
_CLIENT = "Correct the request; the same request will be refused again."
_LATER = "Try again later; if it persists, tell the operator."
_OPERATOR = "Tell the operator: a person must repair this."

_DENIED = "http_request_denied"
_ERROR = "http_request_error"
_INTERNAL = "proxy_internal_error"

# code, status, RFC 9209 error, retryable, title, remedy, doc
_TABLE: tuple[tuple[str, int, str, bool, str, str, str], ...] = (
    # --- the decision -------------------------------------------------------------------------------------------
    (
        "no-rule",
        403,
        _DENIED,
        False,
        "No rule of this role permits the request.",
        _ASK,
        "Everything that no rule permits is denied. Host, port, method, path, query and, where an operation is "
        "recognised by its body, the body must all match one permitted operation.",
    ),
    (
        "denied-by-rule",
        403,
        _DENIED,
        False,
        "A rule denies this request.",
        "Use something else: a deny rule wins over every allow rule.",
        "A deny rule of the role or of everyone matched. Deny rules win whatever else permits the request.",
    ),
    (
        "approval-required",
        403,
        _DENIED,
        False,
        "A person must approve this request first.",
        "Wait for the approval of the ticket in this answer, then send the identical request again.",
        "The operation is permitted only with a person's approval. The request was not sent. The ticket names it.",
    ),
    (
        "ambiguous-rules",
        403,
        _DENIED,
        False,
        "Two rules that permit this request contradict each other.",
        _OPERATOR,
        "Several allow rules match and name different credentials, results or protocols. Exeat does not choose.",
    ),
    (
        "unknown-role",
        403,
        _DENIED,
        False,
        "The role of this sandbox is not in the policy in force.",
        _OPERATOR,
        "The policy no longer knows the role that this sandbox was created with, so nothing is permitted.",
    ),
    (
        "method-refused",
        403,
        _DENIED,
        False,
        "This method is never forwarded.",
        _CLIENT,
        "TRACE, CONNECT inside a tunnel, and methods that are not plain upper-case tokens are never forwarded.",
    ),
    (
        "query-method-override",
        403,
        _DENIED,
        False,
        "The query asks the server to treat the request as another method.",
        "Send the method itself, not an override.",
        "Keys such as _method change what a request does after it was judged, so they are never forwarded.",
    ),
    (
        "own-name-refused",
        403,
        _DENIED,
        False,
        "This name belongs to Exeat itself.",
        "Use http://exeat.internal/ as its pages describe.",
        "The gateway's own names are decided before policy; no rule can permit or deny them.",
    ),
    (
        "address-literal-refused",
        403,
        _DENIED,
        False,
        "IP addresses are not reached by number.",
        "Use the name of the host.",
        "A literal address is reached only where the operator declared it as a destination and a rule names it. One of "
        "the sandbox itself is reached without the proxy: NO_PROXY=localhost,127.0.0.1,::1.",
    ),
    (
        "local-address",
        403,
        _DENIED,
        False,
        "This is a local address: localhost is the sandbox itself.",
        "Set the client to bypass the proxy for it: NO_PROXY=localhost,127.0.0.1,::1.",
        "The gateway connects nobody to the machine that it runs on; what listens in the sandbox is reached directly.",
    ),
    (
        "clear-text-refused",
        403,
        _DENIED,
        False,
        "Plain HTTP is not permitted to this host.",
        "Use https.",
        "Clear text passes only where a rule says `scheme: http` for that very host and port, and never with a "
        "credential.",
    ),
    (
        "websocket-refused",
        403,
        _DENIED,
        False,
        "No rule permits a WebSocket here.",
        _ASK,
        "A WebSocket is permitted only by an operation that says so.",
    ),
    (
        "upgrade-refused",
        403,
        _DENIED,
        False,
        "This protocol upgrade is not permitted.",
        _CLIENT,
        "Only a WebSocket upgrade can be permitted; every other Upgrade is refused.",
    ),
    (
        "redirect-ended",
        403,
        _DENIED,
        False,
        "The address that a redirect opened is over.",
        "Ask for the first address again: its answer opens it anew.",
        "A declared redirect opens exactly one address for its sandbox, for 8 uses within 5 minutes. It ends with the "
        "rule and the credential of the request that was redirected.",
    ),
    (
        "redirect-misused",
        403,
        _DENIED,
        False,
        "This address was opened by a redirect, to be fetched and for nothing else.",
        "Fetch it with GET or HEAD and without a body; Range is fine.",
        "What a declared redirect opens is one read: GET or HEAD of exactly that address, without a body.",
    ),
    (
        "client-authority",
        403,
        _DENIED,
        False,
        "The request carries credentials of its own.",
        "Send the request without your own keys, cookies or signed URLs; use the placeholder from the environment.",
        "A client's own key on a permitted host is a way out, so it is refused in every inspecting lane unless a "
        "rule says `client_auth: pass`.",
    ),
    (
        "request-not-signable",
        403,
        _DENIED,
        False,
        "This request cannot be signed anew with the credential.",
        _CLIENT,
        "A client signs with its placeholder; the broker signs the same request again with the real key. It does so "
        "for the regions and services of the credential, for requests of now, and for bodies that are hashed as a "
        "whole or not signed; a body signed chunk by chunk would have to be rewritten.",
    ),
    (
        "placeholder-misuse",
        403,
        _DENIED,
        False,
        "A placeholder was used where it does not belong.",
        "Send the placeholder only in the place and to the host it was given for.",
        "Placeholders are replaced only in their declared slot towards their bound host. The answer is the same for "
        "unknown, foreign and ended placeholders.",
    ),
    (
        "body-not-judged",
        403,
        _DENIED,
        False,
        "The body is not one that a rule permits.",
        "Send the documented form of a permitted operation, within its size.",
        "The operation is recognised by the body, and this body could not be read, is larger than the bound, or "
        "matches no permitted operation.",
    ),
    # --- the request's form -------------------------------------------------------------------------------------
    (
        "claim-refused",
        400,
        _DENIED,
        False,
        "This is not what http://exeat.internal/doctor takes.",
        "Send what the doctor sends: `exeat doctor`, or http://exeat.internal/doctor.sh.",
        "A POST to /doctor is one JSON document of the doctor's own words, with Content-Type application/json and no "
        "Origin but ours. Whatever it says, it arms no credential.",
    ),
    (
        "input-refused",
        400,
        _DENIED,
        False,
        "This input states no operation.",
        "See http://exeat.internal/operations for what each operation takes.",
        "A POST to /operations/<name> or /mcp is one JSON document of at most 64 KiB, with Content-Type "
        "application/json and no Origin but ours. The remedy says which part of the input does not fit the schema.",
    ),
    (
        "bad-target",
        400,
        _ERROR,
        False,
        "The request does not name one canonical host.",
        _CLIENT,
        "The host, port or URL has a form that two programs could read differently. It is refused, not repaired.",
    ),
    (
        "bad-path",
        400,
        _ERROR,
        False,
        "The path or query is not canonical.",
        _CLIENT,
        "Dot segments, empty segments, backslashes, needless or broken percent sequences and the like are refused.",
    ),
    (
        "bad-host-header",
        400,
        _ERROR,
        False,
        "The request needs exactly one Host header.",
        _CLIENT,
        "A missing or second Host header is refused.",
    ),
    (
        "authority-mismatch",
        421,
        _ERROR,
        False,
        "Tunnel, URL and Host header name different hosts.",
        _CLIENT,
        "CONNECT target, TLS server name, Host or :authority, and the URL must be one and the same host and port.",
    ),
    (
        "sni-mismatch",
        421,
        "tls_protocol_error",
        False,
        "The TLS server name differs from the tunnel's host.",
        _CLIENT,
        "The server name in the TLS handshake must be the host that the tunnel was opened for.",
    ),
    (
        "sni-absent",
        421,
        "tls_protocol_error",
        False,
        "The TLS handshake names no server.",
        _CLIENT,
        "Use a client that sends the server name (SNI); where none can be had, the operator can write `sni: optional` "
        "for that host under `destinations:`.",
    ),
    (
        "bad-head",
        400,
        _ERROR,
        False,
        "The request head is malformed.",
        _CLIENT,
        "The request line or a header breaks RFC 9112 or holds a control character.",
    ),
    (
        "bad-framing",
        400,
        _ERROR,
        False,
        "The length of the body is ambiguous.",
        _CLIENT,
        "Content-Length and Transfer-Encoding contradict each other or are malformed. The connection is closed.",
    ),
    (
        "bad-version",
        400,
        _ERROR,
        False,
        "The HTTP version is not served here.",
        _CLIENT,
        "Only HTTP/1.0 and HTTP/1.1 requests are accepted on this connection.",
    ),
    (
        "head-too-large",
        431,
        _ERROR,
        False,
        "The request head is too large.",
        _CLIENT,
        "Request line and headers together exceed the bound, or there are too many headers.",
    ),
    (
        "body-too-large",
        413,
        _ERROR,
        False,
        "The body is larger than permitted.",
        "Send less, or ask the operator for a larger bound.",
        "The rule or the operation bounds what may be sent, and this request exceeds it.",
    ),
    (
        "bad-protocol",
        400,
        _ERROR,
        False,
        "The connection does not speak a permitted protocol.",
        _CLIENT,
        "Only HTTP inside verified TLS, or listed plain HTTP, passes; any other byte stream is closed.",
    ),
    (
        "tls-required",
        400,
        "tls_protocol_error",
        False,
        "This port serves TLS only.",
        "Use https.",
        "Clear text inside the tunnel is accepted only where a rule says `scheme: http` for that host and port.",
    ),
    (
        "no-application-protocol",
        400,
        "tls_protocol_error",
        False,
        "The client offers no protocol that this rule's lane serves.",
        "Let the client offer http/1.1, or ask the operator for `protocol: h2` on the rule.",
        "An HTTP/2-only client is served only where the rule says `protocol: h2`.",
    ),
    (
        "client-distrusts-ca",
        400,
        "tls_alert_received",
        False,
        "The client does not trust the gateway's CA.",
        "Point the client's CA variable at the bundle from http://exeat.internal/.",
        "The client broke off the TLS handshake because it does not know our CA.",
    ),
    (
        "client-timeout",
        408,
        _ERROR,
        True,
        "The request did not arrive in time.",
        "Send the whole request without long pauses.",
        "A head, a handshake or a body stopped arriving for longer than the limit.",
    ),
    # --- identity and limits ------------------------------------------------------------------------------------
    (
        "auth-required",
        407,
        _DENIED,
        False,
        "The proxy needs this sandbox's token.",
        "Use the proxy URL from the environment, which holds the token.",
        "No sandbox token came with the request and the listener does not identify the sandbox by itself.",
    ),
    (
        "bad-token",
        403,
        _DENIED,
        False,
        "The token is not one that is valid here.",
        "Use the proxy URL from this sandbox's own environment.",
        "The token is unknown, or belongs to another sandbox or channel.",
    ),
    (
        "sandbox-ended",
        403,
        _DENIED,
        False,
        "This sandbox has ended.",
        "Ask for a new sandbox.",
        "The sandbox was ended or its time is over; everything that it was given died with it.",
    ),
    (
        "too-many-requests",
        429,
        _DENIED,
        True,
        "Too many connections or requests at once.",
        "Slow down and retry.",
        "A per-sandbox or per-source limit on connections, streams or refusals was reached.",
    ),
    (
        "limit-reached",
        429,
        _DENIED,
        True,
        "A limit of the rule was reached.",
        "Wait until the limit's window has passed, or ask the operator.",
        "The number of requests, names, paths or bytes that the rule or the default budget permits is used up.",
    ),
    (
        "tunnel-limit",
        429,
        "connection_limit_reached",
        True,
        "The tunnel reached its byte or time limit.",
        "Open a new connection, or ask the operator for a larger limit.",
        "Uninspected tunnels have byte and time limits; the tunnel was closed.",
    ),
    (
        "not-found",
        404,
        "proxy_internal_response",
        False,
        "The help host has no such page.",
        "Start at http://exeat.internal/.",
        "Only this sandbox's own data and constant pages are served.",
    ),
    # --- upstream -----------------------------------------------------------------------------------------------
    (
        "address-refused",
        403,
        "destination_ip_prohibited",
        False,
        "The name resolves to an address that is not reachable from here.",
        "Tell the operator: where that address is meant, `destinations:` in the policy must name it.",
        "Every address of a name is checked; private, special and our own addresses are refused unless the operator "
        "declared them for that destination.",
    ),
    (
        "dns-failed",
        502,
        "dns_error",
        True,
        "The name could not be resolved.",
        _LATER,
        "The resolver gave no usable answer in time.",
    ),
    (
        "upstream-unreachable",
        502,
        "destination_unavailable",
        True,
        "The upstream server could not be reached.",
        _LATER,
        "No connection could be made to any vetted address of the host.",
    ),
    (
        "upstream-certificate",
        502,
        "tls_certificate_error",
        False,
        "The upstream certificate could not be verified.",
        _OPERATOR,
        "The upstream certificate is expired, not yet valid, for another name, or not issued by a trusted CA. Nothing "
        "of the request was sent.",
    ),
    (
        "upstream-timeout",
        502,
        "http_response_timeout",
        True,
        "The upstream server did not answer in time.",
        _LATER,
        "The connection was made but no answer came within the limit.",
    ),
    (
        "upstream-protocol",
        502,
        "http_protocol_error",
        False,
        "The upstream server broke the protocol.",
        _LATER,
        "The answer was malformed, ambiguous in length, or of a protocol that was not asked for.",
    ),
    (
        "answer-withheld",
        502,
        "http_request_denied",
        False,
        "The answer could not be shown to be clean and was withheld.",
        _OPERATOR,
        "What cannot be decoded, scrubbed or reduced to the permitted fields is not handed on.",
    ),
    (
        "secret-echoed",
        502,
        "http_request_denied",
        False,
        "The upstream server sent a secret back.",
        _OPERATOR,
        "The credential was disarmed for this sandbox because answers kept holding it.",
    ),
    (
        "response-too-large",
        502,
        "http_response_body_size",
        False,
        "The answer is larger than permitted.",
        "Ask for less, or ask the operator for a larger bound.",
        "The rule bounds the size of answers and this one exceeds it.",
    ),
    (
        "boundary-unproven",
        403,
        _DENIED,
        False,
        "Nothing shows that this sandbox is confined, so no credential is used for it.",
        "Tell the operator: run the command under `exeat run`, or state `boundary: external` in the role.",
        "Credentials are used only for a sandbox whose confinement our own process built or whose role names what "
        "confines it. What a sandbox says about itself changes nothing. Requests without a credential still pass.",
    ),
    # --- our own dependencies -----------------------------------------------------------------------------------
    (
        "credential-unavailable",
        503,
        _INTERNAL,
        True,
        "The credential could not be obtained.",
        _LATER,
        "The secret's source is missing or did not answer. The request was not sent.",
    ),
    (
        "broker-unavailable",
        503,
        _INTERNAL,
        True,
        "The broker is not available.",
        _LATER,
        "Credentialed operations need the broker; without it they are refused, never sent without the credential.",
    ),
    (
        "audit-unavailable",
        503,
        _INTERNAL,
        True,
        "The audit log cannot be written.",
        _LATER,
        "Nothing leaves before it is written down, so requests are refused until the log can be written again.",
    ),
    (
        "policy-unavailable",
        503,
        _INTERNAL,
        True,
        "No policy is in force.",
        _LATER,
        "Without a current snapshot of policy and sandboxes everything is denied.",
    ),
    (
        "policy-changing",
        503,
        _INTERNAL,
        True,
        "The policy is changing right now.",
        "Retry in a moment.",
        "Proxy and broker judged under different policies and the broker's verdict is the stricter one.",
    ),
    (
        "internal-error",
        503,
        _INTERNAL,
        True,
        "The gateway met an unexpected condition.",
        _LATER,
        "Anything unexpected is a denial. The record of this request names the error class.",
    ),
    (
        "shutting-down",
        503,
        _INTERNAL,
        True,
        "The gateway is shutting down.",
        _LATER,
        "Running requests are finished; new ones are refused.",
    ),
)

REASONS: Mapping[str, Reason] = MappingProxyType(
    {
        code: Reason(
            code=code, status=status, proxy_error=error, retryable=retryable, title=title, remedy=remedy, doc=doc
        )
        for code, status, error, retryable, title, remedy, doc in _TABLE
    }
)


def reason(code: str) -> Reason:
    """Return the row for `code`; an unknown code is a fault of ours and gives `internal-error` (fails closed)."""
    return REASONS.get(code, REASONS["internal-error"])
