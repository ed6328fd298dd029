"""Storage hosts that belong to everybody who has an account there: a rule for one says whose place it means.

A permitted host of that kind is a way out that looks like a download: anybody can own a bucket on it and put there, or
read from its log, what a sandbox sends (RULINGS 7.4). What a permitted download leads to there is opened by a grant.

Sources: Amazon S3 (endpoints and quotas; path-style requests), Google Cloud Storage (request endpoints), Azure Storage
(path-style at the emulator only), Cloudflare R2, Backblaze B2, DigitalOcean Spaces, Wasabi, Firebase Storage.
"""

from __future__ import annotations

import re
from typing import Final

from rules.policy import HostPattern, Operation

_LABEL = r"[a-z0-9-]+"
SHARED: Final = tuple(
    re.compile(pattern + r"\Z")
    for pattern in (
        rf"s3(?:[.-](?:fips|dualstack|accelerate))?(?:[.-]{_LABEL})*\.amazonaws\.com(?:\.cn)?",
        r"storage(?:-upload|-download)?\.googleapis\.com",
        r"storage\.cloud\.google\.com",
        r"(?:commondatastorage|firebasestorage)\.googleapis\.com",
        rf"(?:{_LABEL}\.)?s3\.wasabisys\.com|s3(?:\.{_LABEL})*\.wasabisys\.com",
        rf"{_LABEL}\.digitaloceanspaces\.com",
        rf"(?:f[0-9]{{3}}|s3\.{_LABEL})\.backblazeb2\.com",
    )
)
"""Hosts on which the first segment of a path tells whose place it is."""
ROOTS: Final = frozenset(
    {
        "amazonaws.com",
        "amazonaws.com.cn",
        "backblazeb2.com",
        "cloudfront.net",
        "core.windows.net",
        "digitaloceanspaces.com",
        "googleapis.com",
        "r2.cloudflarestorage.com",
        "r2.dev",
        "wasabisys.com",
    }
)
"""Below these a name is anybody's, or a storage host lies; a wildcard above one covers it too."""


def shared_storage(pattern: HostPattern) -> bool:
    """True if `pattern` is a storage host of many owners, or a wildcard under which one lies."""
    if pattern.kind == "template":
        return False
    if pattern.kind == "exact":
        return any(shared.match(pattern.suffix) for shared in SHARED)
    below = any(_within(pattern.suffix, root) for root in ROOTS)
    return below or (pattern.kind == "many" and any(_within(root, pattern.suffix) for root in ROOTS))


def says_whose(op: Operation) -> bool:
    """True if each path of `op` begins with a literal segment: a bucket, on a host whose paths begin with one."""
    return all(pattern.segments and pattern.segments[0] for pattern in op.paths)


def _within(name: str, parent: str) -> bool:
    return name == parent or name.endswith("." + parent)
