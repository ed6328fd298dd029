"""Git LFS: upload and download by one URL and one verb."""

import json
from typing import Any

import pytest

from rules.facts import RequestFacts
from rules.operations import check_params
from rules.operations.lfs import MAX_OBJECTS, batch, lock
from tests.support.rows import every_row

TYPE = ("content-type", "application/vnd.git-lfs+json; charset=utf-8")
OBJECT = {"oid": "c" * 64, "size": 7}
CALL = {"operation": "download", "objects": [OBJECT]}


def facts(*headers: tuple[str, str]) -> RequestFacts:
    return RequestFacts.build(
        method="POST",
        scheme="https",
        tunnel=None,
        target="https://git.test/o/r.git/info/lfs/objects/batch",
        headers=(("host", "git.test"), *(headers or (TYPE,))),
        has_body=True,
    )


def judged(value: Any, operation: str = "download", *headers: tuple[str, str]) -> object:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return batch({"operation": operation}, raw, facts(*headers))


@every_row(
    ("value", "why"),
    [
        (b'{"operation":"download","operation":"upload","objects":[]}', "a duplicate key"),
        (b'{"operation":"upload","operation":"download","objects":[]}', "the same the other way round"),
        ({**CALL, "operation": "upload"}, "the other operation"),
        ({**CALL, "operation": "Download"}, "another spelling"),
        ({**CALL, "operation": ["download"]}, "a list"),
        ({"objects": []}, "no operation"),
        ([CALL], "a list of calls"),
        ({**CALL, "extra": 1}, "an unknown field"),
        ({**CALL, "transfers": ["tus"]}, "another transfer"),
        ({**CALL, "transfers": ["basic", "multipart"]}, "another transfer beside"),
        ({**CALL, "transfers": ["ssh"]}, "no transfer by HTTP"),
        ({**CALL, "hash_algo": "md5"}, "another hash"),
        ({**CALL, "ref": {"name": "main"}}, "not a full ref"),
        ({**CALL, "ref": {"name": "refs/heads/../x"}}, "not a ref"),
        ({**CALL, "ref": "refs/heads/x"}, "not an object"),
        ({**CALL, "objects": [{"oid": "c" * 63, "size": 7}]}, "a short id"),
        ({**CALL, "objects": [{"oid": "C" * 64, "size": 7}]}, "an id in capitals"),
        ({**CALL, "objects": [{"oid": "../x", "size": 7}]}, "a path"),
        ({**CALL, "objects": [{**OBJECT, "size": -1}]}, "a negative size"),
        ({**CALL, "objects": [{**OBJECT, "size": True}]}, "not a number"),
        ({**CALL, "objects": [{**OBJECT, "authenticated": True}]}, "an unknown field of an object"),
        ({**CALL, "objects": [OBJECT] * (MAX_OBJECTS + 1)}, "too many objects"),
        (b"\xef\xbb\xbf" + json.dumps(CALL).encode(), "a byte order mark"),
        (b"", "nothing"),
    ],
)
def test_what_is_no_such_batch_states_nothing(value: Any, why: str) -> None:
    """Expect a closed form: what two parsers could read differently, or nobody described, is no match."""
    assert judged(value) is None


@pytest.mark.parametrize(
    "headers",
    [
        (("content-type", "application/json"),),
        (("content-type", "application/vnd.git-lfs+json; charset=utf-16"),),
        (TYPE, TYPE),
        (("accept", "*/*"),),
        (TYPE, ("content-encoding", "gzip")),
    ],
)
def test_a_batch_is_sent_as_one(headers: tuple[tuple[str, str], ...]) -> None:
    """Expect its media type once, in UTF-8 and without coding."""
    assert judged(CALL, "download", *headers) is None


def test_a_batch_is_what_its_operation_says() -> None:
    """Expect downloads and uploads to be told apart, with the branch where one is named."""
    assert judged(CALL) == {}
    assert judged(CALL, "upload") is None
    real = {
        "operation": "upload",
        "objects": [OBJECT],
        "transfers": ["lfs-standalone-file", "basic", "ssh"],
        "ref": {"name": "refs/heads/agent/x"},
        "hash_algo": "sha256",
    }
    assert judged(real, "upload") == {"ref": "refs/heads/agent/x"}


@pytest.mark.parametrize(
    ("call", "value", "found"),
    [
        ("create", {"path": "a.bin", "ref": {"name": "refs/heads/x"}}, {"path": "a.bin", "ref": "refs/heads/x"}),
        ("create", {"path": "a\n"}, None),
        ("create", {}, None),
        ("unlock", {"force": True}, {}),
        ("unlock", {"force": 1}, None),
        ("verify", {"ref": {"name": "refs/heads/x"}, "cursor": "7", "limit": 100}, {"ref": "refs/heads/x"}),
        ("verify", {"path": "a.bin"}, None),
    ],
)
def test_calls_about_locks(call: str, value: Any, found: object) -> None:
    """Expect each call in its own form."""
    assert lock({"call": call}, json.dumps(value).encode(), facts()) == found


def test_parameters_are_checked_when_a_service_is_read() -> None:
    """Expect a sentence for an operation or a call that LFS does not have."""
    for matcher, params in (("lfs_batch", {}), ("lfs_batch", {"operation": "verify"}), ("lfs_lock", {"call": "batch"})):
        with pytest.raises(ValueError, match="needs"):
            check_params(matcher, params)
