"""`redirects:` of a service file: where the answer of an operation may send its client. Reviewed like an allow rule.

    redirects:
      to: [storage.googleapis.com]              # host patterns as in a rule; https, port 443
      path: /proxy-golang-org-prod/**           # left out: any path
      query_keys: [X-Goog-Signature, ...]       # the only names that the query may hold; left out: no query
      then: {to: [...], ...}                    # where that address may lead in its turn; left out: nowhere

What a declaration has to say, so that a place which somebody else can fill is not opened (`check_redirect`):

- Only a read is redirected, to a named host of others: no address, no name of ours, no wildcard at or above a public
  suffix.
- Whose place it is must be told. Below the service's own domain the name tells it. Anywhere else the path does, by a
  literal first segment (a bucket), or else a signature is asked for: then the address was made by who holds a key
  there, for a short time, and is none that a client composes. That is weaker, since it does not say whose key.

Sources: AWS Signature Version 4 (query parameters), Amazon CloudFront (signed URLs, canned policy), Google Cloud
Storage (V2 and V4 signed URLs), Azure Storage (service SAS).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from rules.grammar import is_public_suffix, registrable
from rules.matching import match_path
from rules.names import OWN_NAME, Host, InvalidName, parse_authority
from rules.paths import CanonicalPath, InvalidTarget, Query
from rules.policy import HostPattern, RedirectSpec

SIGNATURES: Final = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature"})
"""Lower-case names of the query parameters that hold a signature over the URL."""
MAX_QUERY_KEYS: Final = 64
MAX_URL: Final = 4096
"""Characters of an address that an answer may lead to."""
MAX_TARGETS: Final = 16
"""Hosts of one declaration."""


STATUSES: Final = frozenset({301, 302, 303, 307, 308})
"""Answers whose Location a client follows (RFC 9110 section 15.4)."""


class InvalidRedirect(ValueError):
    """A declaration that opens too much or says nothing. str() is for whoever writes the service file."""


def parse_target(text: str) -> HostPattern:
    """Return the pattern of one entry of `to`: `x`, `*.x` or `**.x`. Raises InvalidRedirect."""
    marks = {"**.": "many", "*.": "one"}
    mark = next((mark for mark in marks if text.startswith(mark)), "")
    name = text.removeprefix(mark)
    try:
        host = Host.parse("x." + name if mark else name)
    except InvalidName as error:
        raise InvalidRedirect(f"a target is a host, *.host or **.host: {error}") from None
    if host.is_literal:
        raise InvalidRedirect("a target is a name, never an address")
    if host.text == OWN_NAME or host.text.endswith("." + OWN_NAME):
        raise InvalidRedirect(f"{OWN_NAME} is no target: it is decided before policy")
    suffix = host.text.removeprefix("x.") if mark else host.text
    if suffix != name:
        raise InvalidRedirect("a target is written in lower case, without a dot at its end")
    if mark and is_public_suffix(suffix):
        raise InvalidRedirect("a wildcard at or above a public suffix: anybody can register names there")
    match marks.get(mark):
        case "many":
            return HostPattern(kind="many", suffix=suffix)
        case "one":
            return HostPattern(kind="one", suffix=suffix)
        case _:
            return HostPattern(kind="exact", suffix=suffix)


def host_of(location: str) -> str:
    """The canonical host of an absolute address; "" for every other text. For records, not for decisions."""
    scheme, separator, rest = location.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return ""
    authority = rest.partition("/")[0].partition("?")[0].partition("#")[0].rpartition("@")[2]
    try:
        return parse_authority(authority, 443)[0].text
    except InvalidName:
        return ""


def declared(alternatives: Sequence[Sequence[RedirectSpec]], location: str) -> RedirectSpec | None:
    """The first declaration that means `location`, if every operation that a request is has one; else None.

    `alternatives` are the declarations of each of those operations (Restrictions.redirects). Never raises.
    """
    found = [next((spec for spec in specs if leads_to(spec, location)), None) for specs in alternatives]
    if not found or any(spec is None for spec in found):
        return None
    first = found[0]
    # Two operations that both lead there: what follows would have to be declared by both, and is by neither.
    return first if first is None or len(found) == 1 else replace(first, then=())


def place_of(location: str) -> tuple[Host, str]:
    """The host and the target (path and query, as written) of a `location` for which `leads_to` is true."""
    authority, slash, below = location.partition("://")[2].partition("/")
    return parse_authority(authority, 443)[0], slash + below


def leads_to(spec: RedirectSpec, location: str) -> bool:
    """True if `spec` declares `location`, the absolute URL that an answer names.

    https on port 443 without user, fragment or second spelling, at most MAX_URL characters; a host and a path that
    fit; in the query only declared names, each once; and a signature where one is declared. Never raises.
    """
    scheme, _, rest = location.partition("://")
    if scheme.lower() != "https" or len(location) > MAX_URL or not location.isascii() or "#" in rest:
        return False
    authority, slash, below = rest.partition("/")
    raw_path, question, raw_query = below.partition("?")
    try:
        host, port = parse_authority(authority, 443)
        path = CanonicalPath.parse(slash + raw_path)
        query = Query.parse(raw_query if question else None)
    except (InvalidName, InvalidTarget):
        return False
    names = [name for name, _ in query.pairs]
    signatures = {key for key in spec.query_keys if key.lower() in SIGNATURES}
    return (
        port == 443
        and not host.is_literal
        and any(pattern.matches(host) for pattern in spec.to)
        and (spec.path is None or match_path(spec.path, path) is not None)
        and not query.duplicates()
        and set(names) <= set(spec.query_keys)
        and (not signatures or not signatures.isdisjoint(names))
    )


def check_redirect(spec: RedirectSpec, own: Iterable[Host]) -> None:
    """Raise InvalidRedirect where `spec` does not tell whose places it means.

    `own` are the hosts that belong to the service alone: none where a tenant has to be bound, since others lie there.
    """
    if spec.path is not None and spec.path.segments and spec.path.segments[0]:
        return
    if any(key.lower() in SIGNATURES for key in spec.query_keys):
        return
    domains = {registrable(host.text) for host in own} - {None}
    for pattern in spec.to:
        if registrable(pattern.suffix) not in domains:
            raise InvalidRedirect(
                f"{pattern.text} is not of this service's own domain, so others may keep things there: "
                "say path: with a literal first segment, or name the signature in query_keys:"
            )
