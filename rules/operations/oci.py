"""OCI distribution: images by name, which holds slashes, and the token call that grants more than it reads.

Sources: the distribution specification (opencontainers/distribution-spec, spec.md), and the token and scope documents
of the distribution project (docs/spec/auth).

oci         head, params `action`:
              pull     GET and HEAD of manifests, blobs, tags/list, referrers -> repository, reference
              push     an upload begun, continued, ended or given up, a manifest put -> repository, reference
              delete   a manifest, tag or blob removed -> repository, reference
oci_token   head, params `actions` (what a token may allow), `service` (whom it is for; may be left out) and `narrow`
            -> repository, action: every name and every action of every scope

An upload that mounts a blob `from` another repository states both as `repository`: it reads the one into the other,
so a rule has to permit both; without `from` the registry would choose, and the request is none of these.
With `ns` (how containerd tells a mirror whose image it means) the repository begins with that registry's host.
What ends like two of these, or holds a word of the protocol inside a name, is none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.paths import Query

ACTIONS = ("pull", "push", "delete")
MAX_NAME = 255
MAX_SCOPES = 16
MAX_ACTIONS = 8
"""Of one scope that is narrowed."""

_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*\Z")
_ORIGIN = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+(?::[0-9]{1,5})?\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_DIGEST = re.compile(r"(?:sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})\Z")
_SESSION = re.compile(r"[A-Za-z0-9._=~:@-]{1,255}\Z")
_WORDS = frozenset({"manifests", "blobs", "uploads", "tags", "referrers", "_catalog"})
# resourcescope of docs/spec/auth/scope.md; the name is looked at by `_name`.
_SCOPE = re.compile(r"([a-z0-9]+(?:\([a-z0-9]+\))?):([A-Za-z0-9._/:-]{1,255}):((?:[a-z]+|\*)(?:,(?:[a-z]+|\*))*)\Z")
_TOKEN_KEYS = frozenset({"service", "scope", "account", "client_id", "offline_token"})


def head(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return the arguments of a request that does `params["action"]` to an image, or None."""
    segments = facts.path.segments
    if facts.path.encoded_slash or len(segments) < 4 or segments[0] != "v2":
        return None
    method = "GET" if facts.method == "HEAD" else facts.method
    match params["action"], method:
        case "pull", "GET":
            return _pulled(segments[1:], facts)
        case "push", _:
            return _pushed(method, segments[1:], facts)
        case "delete", "DELETE":
            return _named(segments[1:-2], segments[-2], segments[-1], ("manifests", "blobs"))
    return None


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """What `head` may state."""
    return frozenset({"repository", "reference"})


def check_head(params: Mapping[str, Any]) -> None:
    """Raise ValueError unless `params` name one action."""
    if params.keys() != {"action"} or params["action"] not in ACTIONS:
        raise ValueError("oci needs action: pull, push or delete")


def _pulled(path: tuple[str, ...], facts: RequestFacts) -> Mapping[str, Value] | None:
    found = _asked(path, facts)
    origin = next((value for name, value in facts.query.pairs if name == "ns"), None)
    if found is None or origin is None:
        return found
    # A mirror fetches from wherever this says: the name alone would be another's image.
    return {**found, "repository": f"{origin}/{found['repository']}"} if _ORIGIN.match(origin) else None


def _asked(path: tuple[str, ...], facts: RequestFacts) -> Mapping[str, Value] | None:
    if path[-2:] == ("tags", "list"):
        name = _name(path[:-2])
        return None if name is None else {"repository": name}
    if {name for name, _ in facts.query.pairs} & {"n", "last"}:
        return None
    return _named(path[:-2], path[-2], path[-1], ("manifests", "blobs", "referrers"))


def _pushed(method: str, path: tuple[str, ...], facts: RequestFacts) -> Mapping[str, Value] | None:
    if any(name == "ns" for name, _ in facts.query.pairs):
        return None
    if method == "PUT" and path[-2] == "manifests":
        return _named(path[:-2], path[-2], path[-1], ("manifests",))
    query = dict(facts.query.pairs)
    if len(query) != len(facts.query.pairs):
        return None
    begins = path[-3:] == ("blobs", "uploads", "") or path[-2:] == ("blobs", "uploads")
    if method == "POST" and begins:
        name = _name(path[:-3] if path[-1] == "" else path[:-2])
        return None if name is None else _begun(name, query)
    if method in ("GET", "PATCH", "PUT", "DELETE") and path[-3:-1] == ("blobs", "uploads"):
        name = _name(path[:-3])
        digest = query.get("digest")
        # The session is the registry's own word, given out where the upload began.
        if name is None or not _SESSION.match(path[-1]) or query.keys() & {"mount", "from"}:
            return None
        if (method == "PUT") != (digest is not None) or (digest is not None and not _DIGEST.match(digest)):
            return None
        return {"repository": name}
    return None


def _begun(name: str, query: Mapping[str, str]) -> Mapping[str, Value] | None:
    if not query.keys() <= {"digest", "digest-algorithm", "mount", "from"}:
        return None
    if any(key in query and not _DIGEST.match(query[key]) for key in ("digest", "mount")):
        return None
    if "mount" not in query and "from" not in query:
        return {"repository": name}
    source = _name(tuple(query.get("from", "").split("/")))
    if "mount" not in query or "digest" in query or source is None:
        return None
    return {"repository": (name, source)}


def _named(before: tuple[str, ...], word: str, last: str, words: tuple[str, ...]) -> Mapping[str, Value] | None:
    name = _name(before)
    if name is None or word not in words:
        return None
    digest = _DIGEST.match(last) is not None
    if not digest and (word != "manifests" or not _TAG.match(last)):
        return None
    return {"repository": name, "reference": last}


def _name(segments: tuple[str, ...]) -> str | None:
    name = "/".join(segments)
    if not _NAME.match(name) or len(name) > MAX_NAME or _WORDS & set(segments):
        return None
    return name


# --- tokens ---


def token(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return every `repository` and `action` that the token of this call would be good for, or None.

    One token for all scopes: a rule that binds both arguments permits it only where each of them is permitted.
    """
    pairs = facts.query.pairs
    single = [name for name, _ in pairs if name != "scope"]
    if len(set(single)) != len(single) or not {*single, "scope"} <= _TOKEN_KEYS:
        return None
    given = dict(pairs)
    if "service" in params and given.get("service") != params["service"]:
        return None
    if given.get("offline_token", "false") != "false":
        return None  # the answer would hold a key without an end
    scopes = [scope for name, value in pairs if name == "scope" for scope in value.split(" ")]
    if not 0 < len(scopes) <= MAX_SCOPES:
        return None
    names: set[str] = set()
    actions: set[str] = set()
    for scope in scopes:
        kind, _, rest = scope.partition(":")
        name, _, said = rest.rpartition(":")
        wanted = said.split(",")
        if kind != "repository" or _name(tuple(name.split("/"))) is None or not set(wanted) <= set(params["actions"]):
            return None
        names.add(name)
        actions.update(wanted)
    if max(params["actions"], key=ACTIONS.index) not in actions:
        return None  # what asks for less is the smaller operation's
    return {"repository": tuple(names), "action": tuple(actions)}


def check_token(params: Mapping[str, Any]) -> None:
    """Raise ValueError unless `params` list actions, and a service's name where one is written."""
    actions = params.get("actions")
    known = params.keys() <= {"actions", "service", "narrow"} and isinstance(params.get("service", ""), str)
    if not known or not isinstance(params.get("narrow", False), bool):
        raise ValueError("oci_token takes actions:, service: and narrow:")
    if not isinstance(actions, list | tuple) or not actions or not set(actions) <= set(ACTIONS):
        raise ValueError("oci_token needs actions: a list of pull, push, delete")


# --- scopes that are narrowed (decision 13) ---


def parts(query: Query) -> Iterator[tuple[Mapping[str, str], Query]]:
    """Every single name and action that the scopes of `query` ask for: its arguments, and a query for it alone.

    Nothing where `narrow` would leave nothing whatever is granted.
    """
    found = _scopes(query)
    wanted = {(name, action) for _, scopes in found or () for name, actions, _ in scopes for action in actions}
    for name, action in sorted(wanted):
        alone = narrow({"actions": ACTIONS}, query, lambda *asked, one=(name, action): asked == one)
        if alone is not None:
            yield {"repository": name, "action": action}, alone[0]


def narrow(params: Mapping[str, Any], query: Query, granted: Callable[[str, str], bool]) -> tuple[Query, int] | None:
    """Return `query` with what `granted(repository, action)` says of its scopes, and how many actions are left.

    Of the actions those of `params["actions"]`. None where no scope is left, or where one is not of the
    specification's form. What is kept whole, and every other parameter, stays as it is written.
    """
    found = _scopes(query)
    if found is None:
        return None
    kept: list[str] = []
    count = 0
    for part, scopes in found:
        left: list[str] = []
        for name, actions, said in scopes:
            some = [action for action in actions if action in params["actions"] and granted(name, action)]
            count += len(some)
            if some:
                left.append(
                    said if some == said.rpartition(":")[2].split(",") else f"repository:{name}:{','.join(some)}"
                )
        if left == [said for _, _, said in scopes]:
            kept.append(part)
        elif left:
            kept.append(f"{part.partition('=')[0]}={'%20'.join(left)}")
    return (Query.parse("&".join(kept)), count) if count else None


_Scopes = list[tuple[str, tuple[str, ...], str]]


def _scopes(query: Query) -> list[tuple[str, _Scopes]] | None:
    """Every parameter as written, with its scopes: name, known actions (each once), text. None: not the form.

    A class or name that is none of ours has no actions. Of a parameter that is no scope the list is empty.
    """
    found: list[tuple[str, _Scopes]] = []
    total = 0
    for part, (key, value) in zip(query.raw.split("&") if query.raw else (), query.pairs, strict=True):
        scopes: _Scopes = []
        for text in value.split(" ") if key == "scope" else ():
            matched = _SCOPE.match(text)
            total += 1
            if matched is None or total > MAX_SCOPES:
                return None
            kind, name, said = matched.groups()
            wanted = said.split(",")
            if len(wanted) > MAX_ACTIONS:
                return None
            ours = kind == "repository" and _name(tuple(name.split("/"))) is not None
            known = ACTIONS if "*" in wanted else tuple(dict.fromkeys(one for one in wanted if one in ACTIONS))
            scopes.append((name, known if ours else (), text))
        found.append((part, scopes))
    return found if total else None
