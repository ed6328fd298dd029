"""S3: bucket, key and what is done, from host, path, query and headers (the method alone says little).

Source: Amazon S3 API reference (operations, and "virtual hosting of buckets", "dual-stack endpoints", "FIPS",
"transfer acceleration", "access points"). A request is one row of _OPERATIONS or nothing: sub-resources are named by
query keys (`?uploads`, `?delete`), and a key that the row does not list makes it unknown.

Host styles: `bucket.s3.region.amazonaws.com` and `s3.region.amazonaws.com/bucket` with dualstack, FIPS, acceleration
and the old `s3-region`, `name-account.s3-accesspoint.region`. Other hosts (a `base`) are read in path style.

Refused by not matching: presigned URLs but those that a placeholder signed (others carry the authority of whoever made
them), browser form posts, copies by
an ARN, renames, another owner's ACL headers on a plain write, bypassing retention, and names that are no bucket names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.placeholders import contains
from rules.sigv4 import QUERY_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One API operation: `sub` is the query key that names it, `other` the keys that may stand beside it."""

    name: str
    method: str
    scope: str
    """service, bucket or object."""
    sub: str = ""
    other: str = ""
    values: tuple[tuple[str, str], ...] = ()
    """Keys of `other` that must be there with this value."""
    needs: str = ""
    """Keys of `other` that must be there."""


_LISTING = "prefix delimiter max-keys encoding-type"
_OPERATIONS: tuple[_Row, ...] = (
    _Row(
        name="buckets.list", method="GET", scope="service", other="max-buckets continuation-token prefix bucket-region"
    ),
    _Row(
        name="list",
        method="GET",
        scope="bucket",
        other=f"{_LISTING} list-type continuation-token start-after fetch-owner marker",
    ),
    _Row(name="list", method="GET", scope="bucket", sub="versions", other=f"{_LISTING} key-marker version-id-marker"),
    _Row(
        name="list",
        method="GET",
        scope="bucket",
        sub="uploads",
        other="prefix delimiter max-uploads encoding-type key-marker upload-id-marker",
    ),
    _Row(name="bucket.read", method="HEAD", scope="bucket"),
    *(
        _Row(name="bucket.read", method="GET", scope="bucket", sub=sub)
        for sub in (
            "accelerate cors encryption lifecycle location logging notification object-lock ownershipControls "
            "publicAccessBlock replication requestPayment tagging versioning website"
        ).split()
    ),
    *(_Row(name="bucket.policy", method="GET", scope="bucket", sub=sub) for sub in ("acl", "policy", "policyStatus")),
    _Row(name="session", method="GET", scope="bucket", sub="session"),
    _Row(name="object.delete-many", method="POST", scope="bucket", sub="delete"),
    _Row(name="object.read", method="GET", scope="object", other="versionId partNumber"),
    _Row(name="object.read", method="HEAD", scope="object", other="versionId partNumber"),
    _Row(
        name="object.read",
        method="GET",
        scope="object",
        sub="uploadId",
        other="max-parts part-number-marker encoding-type",
    ),
    *(
        _Row(name="object.read", method="GET", scope="object", sub=sub, other="versionId")
        for sub in ("attributes", "tagging", "retention", "legal-hold")
    ),
    _Row(
        name="object.select",
        method="POST",
        scope="object",
        sub="select",
        other="select-type",
        values=(("select-type", "2"),),
    ),
    _Row(name="object.policy", method="GET", scope="object", sub="acl", other="versionId"),
    _Row(name="object.policy", method="GET", scope="object", sub="torrent"),
    _Row(name="object.write", method="PUT", scope="object"),
    _Row(name="object.write", method="POST", scope="object", sub="uploads"),
    _Row(name="object.write", method="PUT", scope="object", sub="uploadId", other="partNumber", needs="partNumber"),
    _Row(name="object.write", method="POST", scope="object", sub="uploadId"),
    _Row(name="object.write", method="DELETE", scope="object", sub="uploadId"),
    _Row(name="object.write", method="PUT", scope="object", sub="tagging", other="versionId"),
    _Row(name="object.write", method="DELETE", scope="object", sub="tagging", other="versionId"),
    _Row(name="object.restore", method="POST", scope="object", sub="restore", other="versionId"),
    _Row(name="object.delete", method="DELETE", scope="object", other="versionId"),
    _Row(name="object.share", method="PUT", scope="object", sub="acl", other="versionId"),
    _Row(name="object.lock", method="PUT", scope="object", sub="retention", other="versionId"),
    _Row(name="object.lock", method="PUT", scope="object", sub="legal-hold", other="versionId"),
    _Row(name="bucket.write", method="PUT", scope="bucket"),
    _Row(name="bucket.write", method="DELETE", scope="bucket"),
    *(
        _Row(name="bucket.write", method=method, scope="bucket", sub=sub)
        for method in ("PUT", "DELETE")
        for sub in (
            "accelerate acl cors encryption lifecycle logging notification object-lock ownershipControls policy "
            "publicAccessBlock replication requestPayment tagging versioning website"
        ).split()
    ),
)
NAMES = frozenset(row.name for row in _OPERATIONS) | {"object.copy"}
"""What `operations` of the parameters may list. `object.copy` is a PUT with a source, which it states as well."""

_SUBRESOURCES = frozenset(row.sub for row in _OPERATIONS if row.sub)
_INFORMS = "x-id"
"""A key that clients add to say which operation they mean; S3 does not look at it."""
_COPY = "x-amz-copy-source"
_REFUSED_HEADERS = frozenset({"x-amz-rename-source", "x-amz-bypass-governance-retention", "x-amz-mfa"})
_SHARING = ("x-amz-acl", "x-amz-grant-")
_LOCKING = ("x-amz-object-lock-", "x-amz-bucket-object-lock-")
"""A write that keeps the object from being removed, by whoever owns it too."""


def match(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return `bucket`, `key`, `region` and `prefix` as far as the request states them, or None.

    `params`: `operations`, names of NAMES. A copy states source and target both, so that a rule must allow both.
    """
    if "+" in facts.path.raw:
        return None  # S3 reads it as a space, and clients that mean a plus write %2B
    place = _place(facts)
    if place is None or facts.query.duplicates() or any(name in _REFUSED_HEADERS for name, _ in facts.headers):
        return None
    bucket, region, key = place
    scope = "service" if bucket is None else "object" if key else "bucket"
    row = _row(facts, scope)
    if row is None:
        return None
    name = row.name
    buckets, keys = [bucket] if bucket is not None else [], [key] if key else []
    sources = [value for header, value in facts.headers if header.startswith(_COPY)]
    if sources:
        # A copied part and a copied object are written by PUT; anywhere else nobody knows what the header does.
        source = _source(facts)
        if source is None or row.name != "object.write" or row.method != "PUT" or row.sub == "tagging":
            return None
        name = "object.copy"
        buckets.append(source[0])
        keys.append(source[1])
    if any(header.startswith(_SHARING) for header, _ in facts.headers):
        # A write that also says who else may read.
        if name not in ("object.write", "object.share", "bucket.write"):
            return None
        name = "object.share" if scope == "object" else name
    if any(header.startswith(_LOCKING) for header, _ in facts.headers):
        # A write that says two further things is none of these.
        if name != "object.write" or row.method not in ("PUT", "POST"):
            return None
        name = "object.lock"
    if name not in params["operations"]:
        return None
    found: dict[str, Value] = {}
    if buckets:
        found["bucket"] = tuple(sorted(set(buckets)))
    if keys:
        found["key"] = tuple(sorted(set(keys)))
    if region:
        found["region"] = region
    if name == "list":
        found["prefix"] = next((value for known, value in facts.query.pairs if known == "prefix"), "")
    return found


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded."""
    operations = params.get("operations")
    if params.keys() != {"operations"} or not isinstance(operations, list | tuple) or not operations:
        raise ValueError("S3 takes operations: a list of names")
    if not set(operations) <= NAMES:
        raise ValueError(f"known S3 operations: {', '.join(sorted(NAMES))}")


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    listed = set(params.get("operations", ()))
    found = {"bucket", "region"} if listed - {"buckets.list"} else {"region"}
    if any(name.startswith("object.") for name in listed - {"object.delete-many"}):
        found.add("key")
    if "list" in listed:
        found.add("prefix")
    return frozenset(found)


# --- where it is ---

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_REGION = r"(?P<region>[a-z]{2}(?:-[a-z]+){1,3}-[0-9]{1,2})"
_LABEL = r"(?P<bucket>[a-z0-9][a-z0-9-]{1,61}[a-z0-9])"
_HOSTS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern + r"\.amazonaws\.com(?:\.cn)?\Z")
    for pattern in (
        rf"(?:{_LABEL}\.)?s3(?:-fips)?(?:\.dualstack)?(?:\.{_REGION})?",
        rf"(?:{_LABEL}\.)?s3-{_REGION}",
        rf"{_LABEL}\.s3-accelerate(?:\.dualstack)?",
    )
)
_ACCESS_POINT = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9-]{1,48})-(?P<account>[0-9]{12})"
    rf"\.s3-accesspoint(?:-fips)?(?:\.dualstack)?\.{_REGION}\.amazonaws\.com(?:\.cn)?\Z"
)


def _place(facts: RequestFacts) -> tuple[str | None, str, str] | None:
    """(bucket or None, region or "", key or ""), or None where the host or the bucket's name is not understood."""
    host = facts.destination.host.text
    segments = facts.path.segments
    point = _ACCESS_POINT.match(host)
    if point is not None:
        # No bucket is called so: the slash keeps the two kinds of names apart.
        return f"accesspoint/{point['account']}/{point['name']}", point["region"], "/".join(segments)
    found = next((matched for pattern in _HOSTS if (matched := pattern.match(host))), None)
    if found is None and host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return None
    groups = {} if found is None else found.groupdict()
    region = groups.get("region") or ""
    if groups.get("bucket"):
        return groups["bucket"], region, "/".join(segments)
    first, *rest = segments
    if first == "":
        return None, region, ""
    if not _is_bucket(first):
        return None
    return first, region, "/".join(rest)


def _is_bucket(text: str) -> bool:
    return _BUCKET.match(text) is not None and ".." not in text


def _source(facts: RequestFacts) -> tuple[str, str] | None:
    """(bucket, key) of `x-amz-copy-source: /bucket/key?versionId=...`, or None if it could be read in two ways."""
    values = facts.header(_COPY)
    if len(values) != 1:
        return None
    raw, question, version = values[0].strip().partition("?")
    if "+" in raw or (question and not re.match(r"versionId=[A-Za-z0-9._-]{1,1024}\Z", version)):
        return None
    try:
        text = unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        return None
    bucket, slash, key = text.removeprefix("/").partition("/")
    steps = key.split("/")
    if not slash or not key or not _is_bucket(bucket) or not key.isprintable() or "%" in text or "?" in text:
        return None
    return None if any(step in (".", "..") for step in steps) or "" in steps[:-1] else (bucket, key)


# --- what is done ---


def _row(facts: RequestFacts, scope: str) -> _Row | None:
    given = {name: value for name, value in facts.query.pairs if name != _INFORMS}
    if contains(given.get("X-Amz-Credential", "")):
        # Presigned with a placeholder: what is asked for is said beside the signature, which is made anew.
        given = {name: value for name, value in given.items() if name not in QUERY_KEYS}
    subs = given.keys() & _SUBRESOURCES
    if len(subs) > 1:
        return None
    sub = next(iter(subs), "")
    if sub not in ("", "uploadId") and given[sub] != "":
        return None
    for row in _OPERATIONS:
        if (row.method, row.scope, row.sub) != (facts.method, scope, sub):
            continue
        allowed = {*row.other.split(), *({sub} if sub else ())}
        if given.keys() <= allowed and all(given.get(key) == value for key, value in row.values):
            return row if set(row.needs.split()) <= given.keys() else None
    return None
