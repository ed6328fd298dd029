"""S3: every host style gives one bucket, every sub-resource its own operation, and what is unknown is nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.operations import s3
from rules.placeholders import make
from tests.support.judged import judged
from tests.support.properties import tried
from tests.support.rows import every_row

EXAMPLES = tried()
EVERYTHING = sorted(s3.NAMES)


def ask(line: str, *headers: tuple[str, str], only: str | None = None) -> Any:
    """What `GET https://host/path` is: the one name of NAMES that matches with its arguments, or None."""
    method, _, url = line.partition(" ")
    host, slash, rest = url.removeprefix("https://").partition("/")
    facts = judged(method, slash + rest, *headers, host=host, body=False)
    found = {}
    for name in [only] if only else EVERYTHING:
        arguments = s3.match({"operations": [name]}, facts)
        if arguments is not None:
            found[name] = arguments
    assert len(found) <= 1, "one request is one operation"
    return next(iter(found.items()), None)


HOST = "https://data.s3.eu-west-1.amazonaws.com"


@every_row(
    ("line", "why"),
    [
        (f"PUT {HOST}/k?X-Amz-Signature=ab&X-Amz-Credential=AKIA", "a presigned URL of someone else"),
        (f"GET {HOST}/k?X-Amz-Signature=ab", "a presigned download"),
        (f"GET {HOST}/k?x-amz-signature=ab", "and in lower case"),
        (f"GET {HOST}/k?AWSAccessKeyId=a&Signature=b&Expires=1", "the old form of it"),
        (f"POST {HOST}/", "a browser's form post"),
        (f"POST {HOST}/k", "a post to an object"),
        (f"PATCH {HOST}/k", "a method that S3 does not know"),
        (f"GET {HOST}/k?unknown", "an unknown sub-resource"),
        (f"GET {HOST}/k?acl&torrent", "two sub-resources"),
        (f"GET {HOST}/k?acl=x", "a sub-resource with a value"),
        (f"GET {HOST}/?versions&acl", "two sub-resources of a bucket"),
        (f"GET {HOST}/k?versionId=1&versionId=2", "a key twice"),
        (f"GET {HOST}/k?delete", "a sub-resource under another method"),
        (f"POST {HOST}/k?select", "a select without its type"),
        (f"POST {HOST}/k?select&select-type=1", "a select of another type"),
        (f"PUT {HOST}/k?uploadId=1", "a part without its number"),
        (f"PUT {HOST}/k?partNumber=1", "a number without an upload"),
        (f"GET {HOST}/k?response-content-type=text%2Fhtml", "an answer under another type"),
        (f"PUT {HOST}/?delete", "a bulk delete by PUT"),
        (f"GET {HOST}/a+b", "a plus, which S3 reads as a space"),
        ("GET https://s3.eu-west-1.amazonaws.com/UPPER/k", "no bucket name"),
        ("GET https://s3.eu-west-1.amazonaws.com/a/k", "a name too short"),
        ("GET https://s3.eu-west-1.amazonaws.com/a..b/k", "a name with two dots"),
        ("GET https://a.b.s3.eu-west-1.amazonaws.com/k", "a name with a dot in the host"),
        ("GET https://data.s3-website.eu-west-1.amazonaws.com/k", "a web site"),
        ("GET https://data.s3.evil.amazonaws.com/k", "no region"),
        ("GET https://data.s3express-euw1-az1.eu-west-1.amazonaws.com/k", "an express zone"),
        ("GET https://data.ec2.amazonaws.com/k", "another service"),
        ("POST https://s3.amazonaws.com/", "a post to nobody's bucket"),
        ("DELETE https://s3.amazonaws.com/", "a delete of nothing"),
    ],
    ids=lambda value: value if not value.startswith(("GET", "PUT", "POST", "PATCH", "DELETE")) else "",
)
def test_what_no_row_describes_is_nothing(line: str, why: str) -> None:
    """Expect no operation: presigned, unknown, ambiguous or elsewhere."""
    assert ask(line) is None


@every_row(
    "source",
    [
        "secret",
        "/secret",
        "/secret/",
        "/SECRET/k",
        "arn:aws:s3:eu-west-1:123456789012:accesspoint/x/object/k",
        "/secret/../data/k",
        "/secret/a//b",
        "/secret/a+b",
        "/secret/k%2500",
        "/secret/k?x=1",
        "/secret/k?versionId=1&x=2",
        "/secret/%ff",
    ],
)
def test_a_copy_source_that_could_be_read_in_two_ways_is_refused(source: str) -> None:
    """Expect nothing unless the header names one bucket and one key."""
    assert ask(f"PUT {HOST}/k", ("x-amz-copy-source", source)) is None


@pytest.mark.parametrize(
    ("line", "header"),
    [
        (f"GET {HOST}/k", ("x-amz-copy-source", "/a-bucket/k")),
        (f"POST {HOST}/k?uploads", ("x-amz-copy-source", "/a-bucket/k")),
        (f"PUT {HOST}/k?tagging", ("x-amz-copy-source", "/a-bucket/k")),
        (f"PUT {HOST}/k?acl", ("x-amz-copy-source", "/a-bucket/k")),
        (f"PUT {HOST}/k", ("x-amz-copy-source-range", "bytes=0-1")),
        (f"PUT {HOST}/k", ("x-amz-rename-source", "/data/k")),
        (f"DELETE {HOST}/k", ("x-amz-bypass-governance-retention", "true")),
        (f"GET {HOST}/k", ("x-amz-acl", "public-read")),
        (f"DELETE {HOST}/k", ("x-amz-grant-read", "id=1")),
    ],
)
def test_a_header_that_changes_the_operation_is_refused_elsewhere(line: str, header: tuple[str, str]) -> None:
    """A copy, a rename, an ACL or a bypass where no row expects it is no operation."""
    assert ask(line, header) is None


def test_a_copy_states_source_and_target() -> None:
    """Both buckets and both keys, so that a rule for one of them does not fit."""
    name, found = ask(f"PUT {HOST}/k", ("x-amz-copy-source", "/secret/a%2Fb?versionId=9"))
    assert name == "object.copy"
    assert found == {"bucket": ("data", "secret"), "key": ("a/b", "k"), "region": "eu-west-1"}
    line = f"PUT {HOST}/k?partNumber=1&uploadId=2"
    name, found = ask(line, ("x-amz-copy-source", "secret/x"), ("x-amz-copy-source-range", "bytes=0-1"))
    assert (name, found["bucket"]) == ("object.copy", ("data", "secret"))


def test_two_sources_are_one_too_many() -> None:
    """Whichever S3 takes, it is not judged."""
    headers = (("x-amz-copy-source", "/data/k"), ("x-amz-copy-source", "/secret/k"))
    assert ask(f"PUT {HOST}/k", *headers) is None


def test_a_write_that_publishes_is_not_a_plain_write() -> None:
    """An ACL or a grant on a PUT makes it another operation."""
    for header in (("x-amz-acl", "public-read"), ("x-amz-grant-read", "uri=x")):
        assert ask(f"PUT {HOST}/k", header)[0] == "object.share"
    assert ask(f"PUT {HOST}/k?acl")[0] == "object.share"


@every_row(
    ("url", "bucket", "region"),
    [
        ("https://data.s3.amazonaws.com/k", "data", None),
        ("https://data.s3.eu-west-1.amazonaws.com/k", "data", "eu-west-1"),
        ("https://data.s3-eu-west-1.amazonaws.com/k", "data", "eu-west-1"),
        ("https://data.s3.dualstack.eu-west-1.amazonaws.com/k", "data", "eu-west-1"),
        ("https://data.s3-fips.us-gov-west-1.amazonaws.com/k", "data", "us-gov-west-1"),
        ("https://data.s3-fips.dualstack.us-east-1.amazonaws.com/k", "data", "us-east-1"),
        ("https://data.s3-accelerate.amazonaws.com/k", "data", None),
        ("https://data.s3-accelerate.dualstack.amazonaws.com/k", "data", None),
        ("https://data.s3.cn-north-1.amazonaws.com.cn/k", "data", "cn-north-1"),
        ("https://s3.amazonaws.com/data/k", "data", None),
        ("https://s3.eu-west-1.amazonaws.com/data/k", "data", "eu-west-1"),
        ("https://s3-eu-west-1.amazonaws.com/data/k", "data", "eu-west-1"),
        ("https://s3.dualstack.eu-west-1.amazonaws.com/data/k", "data", "eu-west-1"),
        ("https://s3.eu-west-1.amazonaws.com/a.b.c/k", "a.b.c", "eu-west-1"),
        ("https://minio.corp.example/data/k", "data", None),
        (
            "https://reports-123456789012.s3-accesspoint.eu-west-1.amazonaws.com/k",
            "accesspoint/123456789012/reports",
            "eu-west-1",
        ),
    ],
)
def test_every_host_style_names_the_same_bucket(url: str, bucket: str, region: str | None) -> None:
    """Virtual host, path, dualstack, FIPS, acceleration and access points give bucket, key and region."""
    name, found = ask(f"GET {url}")
    assert name == "object.read"
    wanted = {"bucket": (bucket,), "key": ("k",)} | ({"region": region} if region else {})
    assert found == wanted


@every_row(
    ("line", "name"),
    [
        ("GET https://s3.amazonaws.com/", "buckets.list"),
        (f"GET {HOST}/", "list"),
        (f"GET {HOST}/?list-type=2&prefix=a%2F&delimiter=%2F", "list"),
        (f"GET {HOST}/?versions", "list"),
        (f"GET {HOST}/?uploads", "list"),
        ("GET https://s3.eu-west-1.amazonaws.com/data?list-type=2", "list"),
        ("GET https://s3.eu-west-1.amazonaws.com/data/", "list"),
        (f"HEAD {HOST}/", "bucket.read"),
        (f"GET {HOST}/?location", "bucket.read"),
        (f"GET {HOST}/?policy", "bucket.policy"),
        (f"GET {HOST}/?acl", "bucket.policy"),
        (f"GET {HOST}/?session", "session"),
        (f"POST {HOST}/?delete", "object.delete-many"),
        (f"PUT {HOST}/", "bucket.write"),
        (f"PUT {HOST}/?policy", "bucket.write"),
        (f"DELETE {HOST}/", "bucket.write"),
        (f"DELETE {HOST}/?lifecycle", "bucket.write"),
        (f"GET {HOST}/a/b%20c", "object.read"),
        (f"GET {HOST}/folder/", "object.read"),
        (f"HEAD {HOST}/k", "object.read"),
        (f"GET {HOST}/k?versionId=1&partNumber=2&x-id=GetObject", "object.read"),
        (f"GET {HOST}/k?uploadId=1", "object.read"),
        (f"GET {HOST}/k?tagging", "object.read"),
        (f"POST {HOST}/k?select&select-type=2", "object.select"),
        (f"GET {HOST}/k?acl", "object.policy"),
        (f"GET {HOST}/k?torrent", "object.policy"),
        (f"PUT {HOST}/k?x-id=PutObject", "object.write"),
        (f"POST {HOST}/k?uploads", "object.write"),
        (f"PUT {HOST}/k?partNumber=1&uploadId=2", "object.write"),
        (f"POST {HOST}/k?uploadId=2", "object.write"),
        (f"DELETE {HOST}/k?uploadId=2", "object.write"),
        (f"POST {HOST}/k?restore", "object.restore"),
        (f"DELETE {HOST}/k", "object.delete"),
        (f"DELETE {HOST}/k?versionId=1", "object.delete"),
        (f"PUT {HOST}/k?retention", "object.lock"),
    ],
)
def test_each_request_is_one_operation(line: str, name: str) -> None:
    """Method, scope and sub-resource pick the row."""
    found = ask(line)
    assert found is not None
    assert found[0] == name
    if name == "list":
        assert found[1]["prefix"] == ("a/" if "prefix=" in line else "")


@pytest.mark.parametrize(
    "params", [{}, {"operations": []}, {"operations": ["object.*"]}, {"operations": ["list"], "x": 1}]
)
def test_parameters_that_name_nothing_known_are_refused_at_load(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded."""
    with pytest.raises(ValueError):
        s3.check(params)


def test_what_may_be_stated_follows_from_the_operations() -> None:
    """A rule that binds `key` on a listing is a mistake that the loader can tell."""
    s3.check({"operations": EVERYTHING})
    assert s3.arguments({"operations": ["buckets.list"]}) == {"region"}
    assert s3.arguments({"operations": ["list"]}) == {"bucket", "region", "prefix"}
    assert s3.arguments({"operations": ["object.read"]}) == {"bucket", "region", "key"}


@EXAMPLES
@given(
    st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"]),
    st.lists(
        st.sampled_from("acl policy delete uploads uploadId session versionId partNumber x-id a".split()), max_size=3
    ),
    st.sampled_from(["", "/", "/k", "/a/b", "/k/"]),
)
def test_a_request_is_at_most_one_operation_in_either_style(method: str, keys: list[str], path: str) -> None:
    """Whatever comes, at most one row fits, and both styles fit the same one for the same bucket and key."""
    query = "?" + "&".join(keys) if keys else ""
    virtual_host = ask(f"{method} {HOST}{path or '/'}{query}")
    path_style = ask(f"{method} https://s3.eu-west-1.amazonaws.com/data{path}{query}")
    assert virtual_host == path_style
    if virtual_host is not None:
        assert virtual_host[1]["bucket"] == ("data",)


def test_a_url_that_a_placeholder_presigned_says_what_it_asks_for() -> None:
    """The signature's keys are no part of the operation; whatever else stands in the query is."""
    key_id = make("AKIA{16:caps}", bytes(range(32)))
    signed = f"X-Amz-Credential={key_id}%2F20261201%2Feu-west-1%2Fs3%2Faws4_request&X-Amz-Signature=ab&X-Amz-Expires=9"
    assert ask(f"GET {HOST}/k?{signed}") == ask(f"GET {HOST}/k")
    assert ask(f"GET {HOST}/k?{signed}&acl") != ask(f"GET {HOST}/k")
    assert ask(f"PUT {HOST}/k?{signed}&X-Amz-Copy-Source=%2Fa%2Fb") is None
    assert ask(f"GET {HOST}/k?{signed.replace(key_id, 'AKIAIOSFODNN7EXAMPLE')}") is None
