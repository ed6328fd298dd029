"""git over smart HTTP: whose repository, and what a push would do to it.

Sources: gitprotocol-http(5), gitprotocol-pack(5), gitprotocol-common(5), git-check-ref-format(1), and receive-pack's
own reading of its commands.

git_repository   head: the path ends in `params.suffix` (`info/refs`; `*` is one word); what stands before it is the
                 repository, with its groups and without `.git` -> repository
git_push         body, by its beginning: the commands of a push before the pack -> ref, change, option
git_flush        body, by its beginning: the empty flush by which git asks whether it may push at all -> nothing

`change` is create, update or delete, as the old and the new id say; the server takes a command only where the old id
is the branch's own. Whether an update keeps the history cannot be told without it. `option` are push options, which
make some servers do more than move a branch: refused unless `params.options` is true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.shapes import SHAPES

MAX_COMMANDS = 64
"""Branches and tags of one push."""
MAX_GROUPS = 8
"""Path segments of a repository."""
MAX_REF = 255
"""Characters of a ref."""

_PUSH_TYPE = "application/x-git-receive-pack-request"
_CAPABILITIES = frozenset(
    {
        "report-status",
        "report-status-v2",
        "delete-refs",
        "side-band",
        "side-band-64k",
        "quiet",
        "atomic",
        "ofs-delta",
        "push-options",
    }
)
_VALUED = ("agent=", "session-id=", "object-format=")
_HASHES = {"sha1": 40, "sha256": 64}
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,98}\Z")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
_OID = re.compile(r"[0-9a-f]+\Z")
# git-check-ref-format(1), rules 1 to 10.
_REF_NEVER = re.compile(r"\.\.|@\{|//|[\x00-\x20\x7f~^:?*\[\\]|\.\Z|/\Z")


class _NotPushed(ValueError):
    """The bytes are not the commands of a push."""


# --- whose repository ---


def repository(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {"repository": "group/name"} for a path that ends in `params["suffix"]`, or None."""
    suffix = str(params["suffix"]).split("/")
    segments = facts.path.segments
    before, end = segments[: -len(suffix)], segments[-len(suffix) :]
    if facts.path.encoded_slash or not 0 < len(before) <= MAX_GROUPS or len(end) != len(suffix):
        return None
    if not all(
        _WORD.match(given) if wanted == "*" else given == wanted for wanted, given in zip(suffix, end, strict=True)
    ):
        return None
    *groups, last = before
    name = SHAPES["git-repository"](last)
    if name is None or not all(_GROUP.match(group) and not group.endswith(".git") for group in groups):
        return None
    # Servers find the repository by cutting the path at such a word: it must stand there once.
    if any(word in ("info", "git-upload-pack", "git-receive-pack", "objects") for word in before):
        return None
    return {"repository": "/".join((*groups, name))}


def check_repository(params: Mapping[str, Any]) -> None:
    """Raise ValueError unless `params` hold a suffix."""
    suffix = params.get("suffix")
    if params.keys() != {"suffix"} or not isinstance(suffix, str) or not suffix or suffix.startswith("/"):
        raise ValueError("git_repository needs suffix:, the end of the path without a slash in front")


# --- a push ---


def push(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return every `ref`, `change` and push `option` of a receive-pack request, or None."""
    if [value.strip().lower() for value in facts.header("content-type")] != [_PUSH_TYPE]:
        return None
    try:
        return _commands(body, partial=facts.partial, options_allowed=bool(params.get("options", False)))
    except _NotPushed:
        return None


def push_arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """What `push` may state."""
    return frozenset({"ref", "change", "option"} if params.get("options") else {"ref", "change"})


def check_push(params: Mapping[str, Any]) -> None:
    """Raise ValueError unless `params` say at most whether push options are taken."""
    if not params.keys() <= {"options"} or not isinstance(params.get("options", False), bool):
        raise ValueError("git_push takes options: true or false")


def flush(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {} for a receive-pack request that states nothing: one flush packet."""
    typed = [value.strip().lower() for value in facts.header("content-type")] == [_PUSH_TYPE]
    return {} if typed and body == b"0000" and not facts.partial else None


def _commands(body: bytes, *, partial: bool, options_allowed: bool) -> Mapping[str, Value]:
    lines = _Lines(body)
    capabilities: frozenset[str] | None = None
    refs: list[str] = []
    changes: set[str] = set()
    width = 0
    for line in lines:
        line = line.removesuffix(b"\n")  # receive-pack takes one off, and only at the end of the packet
        if line.startswith(b"shallow ") and capabilities is None:
            shallow = _text(line[8:])
            if not _OID.match(shallow) or len(shallow) not in _HASHES.values():
                raise _NotPushed("a shallow line")
            continue
        if capabilities is None:
            line, nul, said = line.partition(b"\x00")
            capabilities = _capabilities(said if nul else b"")
            width = _HASHES[next((c[14:] for c in capabilities if c.startswith("object-format=")), "sha1")]
        ref, change = _command(line, width)
        refs.append(ref)
        changes.add(change)
        if len(refs) > MAX_COMMANDS:
            raise _NotPushed("too many commands")
    if capabilities is None or len(set(refs)) != len(refs):
        raise _NotPushed("no command, or two for one ref")
    found: dict[str, Value] = {"ref": tuple(refs), "change": tuple(changes)}
    if "push-options" in capabilities:
        options = tuple(_option(line) for line in lines)
        if options and not options_allowed:
            raise _NotPushed("push options")
        if options:
            found["option"] = options
    _check_pack(body[lines.position :], partial=partial, wanted=changes != {"delete"})
    return found


def _capabilities(said: bytes) -> frozenset[str]:
    """The first command's list. One that we do not know may change what the commands mean."""
    words = _text(said).split()
    for word in words:
        if word not in _CAPABILITIES and not word.startswith(_VALUED):
            raise _NotPushed("an unknown capability")
    formats = [word for word in words if word.startswith("object-format=")]
    if len(formats) > 1 or any(word[14:] not in _HASHES for word in formats):
        raise _NotPushed("an unknown object format")
    return frozenset(words)


def _command(line: bytes, width: int) -> tuple[str, str]:
    old, _, rest = _text(line).partition(" ")
    new, _, ref = rest.partition(" ")
    if not (_OID.match(old) and _OID.match(new) and len(old) == len(new) == width):
        raise _NotPushed("an object id")
    if not is_ref(ref):
        raise _NotPushed("a ref that git would not take")
    zero = "0" * width
    if old == zero and new == zero:
        raise _NotPushed("a command that says nothing")
    return ref, "create" if old == zero else "delete" if new == zero else "update"


def is_ref(ref: str) -> bool:
    """Whether `ref` is a full ref name that git takes, in printable text."""
    parts = ref.split("/")
    return (
        len(parts) > 2
        and parts[0] == "refs"
        and len(ref) <= MAX_REF
        and ref.isprintable()
        and not _REF_NEVER.search(ref)
        and not any(part.startswith(".") or part.endswith(".lock") or part == "@" for part in parts)
    )


def _option(line: bytes) -> str:
    text = _text(line.removesuffix(b"\n"))
    if not text or len(text) > MAX_REF or not text.isprintable():
        raise _NotPushed("a push option")
    return text


def _check_pack(rest: bytes, *, partial: bool, wanted: bool) -> None:
    """A pack follows unless branches are only deleted; nothing else does."""
    if not wanted:
        if rest or partial:
            raise _NotPushed("bytes behind a deletion")
    elif not (rest.startswith(b"PACK") or (partial and b"PACK".startswith(rest))):
        raise _NotPushed("no pack")


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _NotPushed("not UTF-8") from None
    if "\x00" in text:
        raise _NotPushed("a NUL")  # receive-pack reads capabilities behind one, in every line
    return text


class _Lines:
    """pkt-lines up to the next flush (gitprotocol-common). `position` stands behind what was read."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.position = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            size = self._body[self.position : self.position + 4]
            if len(size) != 4 or not re.match(rb"[0-9a-f]{4}\Z", size):
                raise _NotPushed("no packet")
            length = int(size, 16)
            if length == 0:
                self.position += 4
                return
            # 1 and 2 are marks of protocol 2, which pushes do not have; 3 is nothing, 4 an empty line.
            if length < 5 or length > 65520 or self.position + length > len(self._body):
                raise _NotPushed("a packet of that size")
            line = self._body[self.position + 4 : self.position + length]
            self.position += length
            yield line
