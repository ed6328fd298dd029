"""Answers of the LFS batch call: places without the authority that a forge adds to them."""

import json
from typing import Any

import pytest

from broker.lfs import elsewhere, without_authority
from broker.result import ResultRefused

HERE = "forge.test:8443"
URL = f"https://{HERE}/o/r.git/info/lfs/objects/1"
OBJECT = {"oid": "a" * 64, "size": 7}


def shown(value: Any) -> Any:
    return json.loads(without_authority(json.dumps(value).encode(), 1 << 20, HERE))


def batch(*objects: Any, **more: Any) -> dict[str, Any]:
    return {"transfer": "basic", "objects": list(objects), **more}


@pytest.mark.parametrize(
    "href",
    [
        "https://storage.test/1?X-Amz-Signature=s",
        "https://storage.test/1",
        f"{URL}?token=s",
        f"{URL}#s",
        f"http://{HERE}/o/r.git/info/lfs/objects/1",
        f"https://user:s@{HERE}/1",
        "https://forge.test/1",
        "ftp://x",
        "//storage.test/1",
        "",
        None,
    ],
)
def test_an_object_behind_other_authority_cannot_be_had(href: object) -> None:
    """Expect an error in place of a signed or foreign URL, and nothing of it in the answer."""
    answer = shown(batch({**OBJECT, "actions": {"download": {"href": href}}}))
    (one,) = answer["objects"]
    assert one.keys() == {"oid", "size", "error"}
    assert one["error"]["code"] == 403
    assert "storage" not in json.dumps(answer)


def test_one_foreign_action_takes_the_others_with_it() -> None:
    """Expect no upload whose verification could not be called."""
    actions = {"upload": {"href": URL}, "verify": {"href": "https://other.test/verify"}}
    (one,) = shown(batch({**OBJECT, "actions": actions}))["objects"]
    assert "actions" not in one


def test_headers_and_unknown_members_stay_here() -> None:
    """Expect a token that the forge made for this object, in whatever member, never to come back."""
    secret = {"header": {"Authorization": "Basic c2VjcmV0"}, "expires_in": 3600, "x": "c2VjcmV0"}
    answer = shown(
        batch(
            {**OBJECT, "authenticated": True, "y": "c2VjcmV0", "actions": {"download": {"href": URL, **secret}}}, z="c2"
        )
    )
    assert answer == batch({**OBJECT, "actions": {"download": {"href": URL}}})


def test_errors_and_objects_that_need_nothing_are_told() -> None:
    """Expect what the forge says of an object, and one without actions, as they are."""
    said = {**OBJECT, "error": {"code": 404, "message": "not here", "more": "x"}}
    answer = shown(batch(said, OBJECT, hash_algo="sha256"))
    assert answer["objects"] == [{**OBJECT, "error": {"code": 404, "message": "not here"}}, OBJECT]
    assert answer["hash_algo"] == "sha256"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"objects":{}}',
        b'{"objects":[1]}',
        b'{"objects":[{"actions":[]}]}',
        b'{"objects":[{"actions":{"download":"x"}}]}',
        b'{"objects":[],"objects":[]}',
        b"not json",
    ],
)
def test_what_is_no_such_answer_is_withheld(raw: bytes) -> None:
    """Expect a fixed refusal where nobody could say what the answer holds."""
    with pytest.raises(ResultRefused):
        without_authority(raw, 1 << 20, HERE)


SIGNED = "https://store.test/1?X-Amz-Signature=s%2b"


def test_what_lies_elsewhere_is_named_once_and_bare_places_here_are_not() -> None:
    """Expect the addresses of downloads alone: only those are asked about."""
    here = {"download": {"href": URL}}
    answer = batch(
        {**OBJECT, "actions": {"download": {"href": SIGNED}}},
        {**OBJECT, "actions": {"download": {"href": SIGNED}}},
        {**OBJECT, "actions": {"upload": {"href": "https://store.test/up?X-Amz-Signature=u"}}},
        {**OBJECT, "actions": here},
        {**OBJECT, "actions": {"download": {"href": "https://store.test/\n"}}},
        {**OBJECT, "actions": {"download": {"href": None}}},
    )
    assert elsewhere(json.dumps(answer).encode(), 1 << 20, HERE) == SIGNED.encode()


def test_a_granted_address_stays_byte_for_byte_and_without_the_forges_header() -> None:
    """Expect the one that was granted to be shown, another to be refused, and an upload never to be granted."""
    other = SIGNED.replace("/1", "/2")
    actions = [{"download": {"href": href, "header": {"Authorization": "x"}}} for href in (SIGNED, other)]
    actions.append({"upload": {"href": SIGNED}})
    raw = json.dumps(batch(*({**OBJECT, "actions": one} for one in actions))).encode()
    first, second, third = json.loads(without_authority(raw, 1 << 20, HERE, frozenset({SIGNED})))["objects"]
    assert first["actions"] == {"download": {"href": SIGNED}}
    assert second["error"]["code"] == third["error"]["code"] == 403
