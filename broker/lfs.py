"""Answers of the Git LFS batch call behind a credential: where objects are, without the authority that a forge adds.

A forge answers with URLs and headers by which whoever holds them gets or stores an object (batch.md of git-lfs).
What was made from the broker's credential stays here: of an action the bare URL at the very place that answered is
kept, and calls to it get the credential as every call does. An object elsewhere is told as one that cannot be had,
unless the operation declares that place and the vault granted the very address (decision 14).
"""

from __future__ import annotations

from typing import Any, Final

from broker.headers import is_bare_location, is_own_location
from broker.result import ResultRefused, rewrite

ELSEWHERE: Final = {
    "code": 403,
    "message": "Refused by Exeat policy: the object lies on another host or behind a signed URL; nothing permits it",
}
_ACTIONS: Final = ("download", "upload", "verify")
_ABOUT_OBJECT: Final = ("oid", "size")


def without_authority(raw: bytes, bound: int, here: str, granted: frozenset[str] = frozenset()) -> bytes:
    """Return the batch answer `raw` of the authority `here` without what others could use. Raises ResultRefused.

    `granted` are the addresses elsewhere that the sandbox may fetch: those stay, byte for byte.
    """
    return rewrite(raw, bound, lambda message: _answer(message, here, granted))


def elsewhere(raw: bytes, bound: int, here: str) -> bytes:
    """Return where `raw` says that objects can be fetched, other than bare addresses at `here`: one a line.

    Raises ResultRefused.
    """
    found: dict[str, None] = {}

    def collect(message: Any) -> Any:
        for one in _objects(message):
            actions = one.get("actions")
            action = actions.get("download") if isinstance(actions, dict) else None
            href = action.get("href") if isinstance(action, dict) else None
            if isinstance(href, str) and not _is_here(href, here) and href.isascii() and href.isprintable():
                found[href] = None
        return None

    rewrite(raw, bound, collect)
    return "\n".join(found).encode("ascii")


def _objects(message: Any) -> list[dict[str, Any]]:
    objects = message.get("objects") if isinstance(message, dict) else None
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise ResultRefused("the answer is not one of the batch call")
    return objects


def _answer(message: Any, here: str, granted: frozenset[str]) -> Any:
    objects = _objects(message)
    kept = {name: message[name] for name in ("transfer", "hash_algo") if isinstance(message.get(name), str)}
    return {**kept, "objects": [_object(one, here, granted) for one in objects]}


def _object(one: dict[str, Any], here: str, granted: frozenset[str]) -> dict[str, Any]:
    shown = {name: one[name] for name in _ABOUT_OBJECT if isinstance(one.get(name), str | int)}
    error = one.get("error")
    if isinstance(error, dict):
        told = {name: error[name] for name in ("code", "message") if isinstance(error.get(name), str | int)}
        return {**shown, "error": told}
    actions = one.get("actions", {})
    if not isinstance(actions, dict) or not all(isinstance(action, dict) for action in actions.values()):
        raise ResultRefused("the answer is not one of the batch call")
    if not all(_stays(name, action.get("href"), here, granted) for name, action in actions.items()):
        return {**shown, "error": ELSEWHERE}
    if actions:
        shown["actions"] = {name: {"href": action["href"]} for name, action in actions.items()}
    return shown


def _stays(name: str, href: Any, here: str, granted: frozenset[str]) -> bool:
    return (name in _ACTIONS and _is_here(href, here)) or (name == "download" and href in granted)


def _is_here(href: Any, here: str) -> bool:
    return isinstance(href, str) and is_bare_location(href) and is_own_location(href, here)
