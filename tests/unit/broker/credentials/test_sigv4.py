"""AWS signatures: AWS's own examples, botocore as the independent verifier, and what is not signed at all."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from broker.credentials import KindFault, Outgoing, apply, inject
from broker.credentials.sigv4 import EMPTY, UNSIGNED, UNSIGNED_TRAILER, Signing, presign, sign
from rules.facts import RequestFacts, TunnelFacts
from rules.sigv4 import ALGORITHM, read_signature, unsignable
from tests.support.kinds import KEY_ID, NOW, definition, outgoing, secrets

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"
SCOPE = "20150830/us-east-1/service/aws4_request"
STAMP = "20150830T123600Z"


def signing(service: str = "service", **rest: Any) -> Signing:
    values: dict[str, Any] = {"key_id": "AKIDEXAMPLE", "secret": SECRET.encode(), "region": "us-east-1", "at": NOW}
    return Signing(service=service, **values | rest)


def aws(service: str = "service", region: str = "us-east-1", **rest: Any) -> Any:
    return definition(
        "sigv4",
        {"regions": [region], "aws_services": [service], **rest},
        shapes={"access_key_id": "AKIA{16:caps}", "session_token": "{100}"},
    )


def signed_by_client(
    service: str, *, region: str = "us-east-1", stamp: str = STAMP, signed: str = "host;x-amz-date"
) -> tuple[tuple[str, str], ...]:
    """What a client sends that signs with its placeholder; the signature itself is nobody's concern."""
    value = f"{ALGORITHM} Credential={KEY_ID}/{stamp[:8]}/{region}/{service}/aws4_request, SignedHeaders={signed}, "
    return (("x-amz-date", stamp), ("authorization", value + "Signature=" + "0" * 64))


def facts(headers: tuple[tuple[str, str], ...], target: str = "/") -> RequestFacts:
    return RequestFacts.build(
        method="PUT",
        scheme="https",
        tunnel=TunnelFacts.build("a.example:443"),
        target=target,
        headers=(("host", "a.example"), *headers),
        has_body=True,
    )


# --- what is not signed ---


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        (signed_by_client("s3", region="eu-west-1"), "region eu-west-1"),
        (signed_by_client("sqs"), "signed for sqs"),
        (signed_by_client("s3", stamp="20150830T140000Z"), "own date"),
        (signed_by_client("s3", stamp="20150830T110000Z"), "own date"),
        ((("x-amz-date", STAMP), ("authorization", "AWS4-ECDSA-P256-SHA256 Credential=a")), "cannot be read"),
        ((("x-amz-date", STAMP), ("authorization", f"{ALGORITHM} Credential=a/b/c, Signature=d")), "cannot be read"),
        (signed_by_client("s3")[1:], "cannot be read"),
        ((*signed_by_client("s3"), ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")), "chunk by chunk"),
        (
            (*signed_by_client("s3"), ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER")),
            "chunk by chunk",
        ),
        ((*signed_by_client("s3"), ("x-amz-region-set", "*")), "SigV4a"),
    ],
)
def test_what_cannot_be_signed_anew_is_refused_with_a_sentence(headers: Any, why: str) -> None:
    """C113: before anything is dialled, and the client is told what to do instead."""
    assert why in (unsignable(aws("s3"), facts(headers), NOW) or "")


def test_a_request_that_is_not_signed_needs_one_region_and_one_service() -> None:
    """Nothing is guessed from a host: the operator's definition says what is signed for."""
    several = definition("sigv4", {"regions": ["a", "b"], "aws_services": ["s3"]}, shapes={"access_key_id": "{24}"})
    assert unsignable(several, facts(()), NOW) is not None
    assert unsignable(aws("s3"), facts(()), NOW) is None
    with pytest.raises(KindFault, match="kind-request-form"):
        apply(several, secrets({"access_key_id": b"AKIDEXAMPLE", "secret_access_key": SECRET.encode()}), outgoing())


@pytest.mark.parametrize(("service", "claim"), [("sqs", ""), ("s3", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")])
def test_a_body_that_is_not_here_is_not_signed(service: str, claim: str) -> None:
    """A service that wants the body's hash gets no other; a chunk-signed body is refused here as well."""
    headers = (*signed_by_client(service), *((("x-amz-content-sha256", claim),) if claim else ()))
    request = outgoing(method="PUT", headers=headers, has_body=True)
    with pytest.raises(KindFault, match=r"kind-(body-unseen|request-form)"):
        apply(aws(service), secrets({"access_key_id": b"AKIDEXAMPLE", "secret_access_key": SECRET.encode()}), request)


def test_a_region_outside_the_credential_is_refused_by_the_kind_too() -> None:
    """Policy said no before; the executor does not rely on it."""
    request = outgoing(headers=signed_by_client("s3", region="eu-west-1"))
    with pytest.raises(KindFault, match="kind-request-form"):
        apply(aws("s3"), secrets({"access_key_id": b"AKIDEXAMPLE", "secret_access_key": SECRET.encode()}), request)


# --- AWS's own examples: the SigV4 test suite (published with aws-c-auth) and the S3 API reference ---


@pytest.mark.parametrize(
    ("path", "headers", "token", "signature"),
    [
        ("/", (), "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("/", (), TOKEN, "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8"),
        ("/?ሴ=bar", (), "", "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"),
        ("/ሴ", (), "", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
        ("/example space/", (), "", "652487583200325589f1fba4c7e578f72c47cb61beeca81406b39ddec1366741"),
        ("//example//", (), "", "9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84"),
        ("/example1/example2/../..", (), "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        (
            "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
            (),
            "",
            "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
        ),
        (
            "/",
            (("my-header1", "value1"), ("my-header2", '"a   b   c"')),
            "",
            "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
        ),
        (
            "/",
            tuple(("my-header1", f"value{number}") for number in (4, 1, 3, 2)),
            "",
            "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01",
        ),
    ],
)
def test_the_suite_of_aws_in_a_header(path: str, headers: Any, token: str, signature: str) -> None:
    """Each signature as the suite states it; its requests are not percent-encoded, and are encoded once."""
    request = Outgoing(method="GET", authority="example.amazonaws.com", target=path, headers=headers, now=NOW)
    made, found = sign(signing(token=token), request, EMPTY, [name for name, _ in headers], show_payload=False)
    assert found == signature
    assert dict(made)["authorization"].startswith(f"{ALGORITHM} Credential=AKIDEXAMPLE/{SCOPE}, SignedHeaders=host;")


@pytest.mark.parametrize(
    ("path", "token", "signature"),
    [
        ("/?Param2=value2&Param1=value1", "", "86012e2c9ad4d77369f5d81c11f75158aae4f895a085212cc6d3f923d300bed5"),
        ("/", TOKEN, "7ff2b50b376cb4d151970630573d6291dc128cc5c2a12ffb237f73cc53f67b6c"),
    ],
)
def test_the_suite_of_aws_in_a_query(path: str, token: str, signature: str) -> None:
    """A presigned URL: the signature is over the query that it stands in."""
    request = Outgoing(method="GET", authority="example.amazonaws.com", target=path, now=NOW)
    _, found = presign(signing(token=token), request, EMPTY, 3600)
    assert found == signature


S3_NOW = 1_369_353_600.0
"""2013-05-24T00:00:00Z: the day of the examples in the S3 API reference."""


@pytest.mark.parametrize(
    ("method", "target", "headers", "body", "signature"),
    [
        (
            "GET",
            "/test.txt",
            (("range", "bytes=0-9"),),
            b"",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test%24file.text",
            (("date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")),
            b"Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        ("GET", "/?lifecycle", (), b"", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            "GET",
            "/?max-keys=2&prefix=J",
            (),
            b"",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_the_examples_of_s3(method: str, target: str, headers: Any, body: bytes, signature: str) -> None:
    """S3 encodes a path once and always shows the body's hash."""
    payload = sha256(body).hexdigest()
    made = signing("s3", key_id="AKIAIOSFODNN7EXAMPLE", secret=b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", at=S3_NOW)
    request = Outgoing(
        method=method, authority="examplebucket.s3.amazonaws.com", target=target, headers=headers, now=S3_NOW
    )
    _, found = sign(made, request, payload, [name for name, _ in headers], show_payload=True)
    assert found == signature


def test_the_presigned_example_of_s3() -> None:
    """The URL of the S3 API reference, for a day."""
    made = signing("s3", key_id="AKIAIOSFODNN7EXAMPLE", secret=b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", at=S3_NOW)
    request = Outgoing(method="GET", authority="examplebucket.s3.amazonaws.com", target="/test.txt", now=S3_NOW)
    _, found = presign(made, request, UNSIGNED, 86400)
    assert found == "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"


# --- botocore verifies ---


class Then(datetime):
    """botocore's clock, at the hour of the examples."""

    @classmethod
    def now(cls, tz: Any = None) -> Then:
        return cls.fromtimestamp(NOW, tz or UTC)

    @classmethod
    def utcnow(cls) -> Then:
        return cls.fromtimestamp(NOW, UTC).replace(tzinfo=None)


@pytest.fixture
def then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda **_: Then.utcnow(), raising=False)


TARGETS = [
    "/",
    "/a/b",
    "/a%20b/c%2Bd",
    "/%E1%88%B4",
    "/a?x=1&b=2&a=3",
    "/a?list-type=2&prefix=a%2Fb&delimiter=%2F",
    "/a?empty=&also",
    "/a?z=%E1%88%B4&z=a&z=B",
]


def test_s3_signs_what_a_path_means_and_not_how_it_is_spelled() -> None:
    """S3 encodes the key that it read: a client that leaves parentheses as they are gets the same signature."""
    odd, plain = (
        sign(signing("s3"), outgoing(target), EMPTY, show_payload=True)[1]
        for target in ("/a+b/(c)!*'~", "/a%2Bb/%28c%29%21%2A%27~")
    )
    assert odd == plain


@pytest.mark.parametrize("service", ["s3", "sqs", "execute-api"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.usefixtures("then")
def test_botocore_would_have_signed_the_same(service: str, target: str, token: str) -> None:
    """The kind, fed with a client's placeholder signature, against botocore's signer with the real key."""
    body = b'{"a":1}'
    sent = (
        ("content-type", "application/x-amz-json-1.0"),
        ("x-amz-target", "AmazonSQS.SendMessage"),
        *signed_by_client(service, signed="content-type;host;x-amz-date;x-amz-target"),
    )
    request = outgoing(target, sent, method="POST", authority="q.example:8443", body=body, has_body=True)
    values = {"access_key_id": b"AKIDEXAMPLE", "secret_access_key": SECRET.encode()}
    if token:
        values["session_token"] = token.encode()
    made = inject(request, apply(aws(service), secrets(values), request))
    theirs = _botocore(service, made, body, token)
    ours = dict(made.headers)
    assert ours["authorization"] == theirs["Authorization"]
    assert ours["x-amz-date"] == theirs["X-Amz-Date"] == STAMP
    assert ours.get("x-amz-content-sha256") == theirs.get("X-Amz-Content-SHA256")
    assert KEY_ID not in str(made.headers)


def _botocore(service: str, made: Outgoing, body: bytes, token: str) -> Any:
    signer = botocore.auth.S3SigV4Auth if service == "s3" else botocore.auth.SigV4Auth
    kept = {name: value for name, value in made.headers if name in ("content-type", "x-amz-target")}
    asked = AWSRequest(method="POST", url=f"https://q.example:8443{made.target}", data=body, headers=kept)
    asked.context["payload_signing_enabled"] = True
    signer(Credentials("AKIDEXAMPLE", SECRET, token or None), service, "us-east-1").add_auth(asked)
    return asked.headers


@pytest.mark.parametrize(
    ("claim", "body", "wanted"),
    [
        (UNSIGNED, None, UNSIGNED),
        (UNSIGNED_TRAILER, None, UNSIGNED_TRAILER),
        ("a" * 64, None, "a" * 64),
        ("", None, UNSIGNED),
        (UNSIGNED_TRAILER, b"5\r\nhello\r\n0\r\n", UNSIGNED_TRAILER),
        ("", b"", EMPTY),
    ],
)
def test_how_a_body_of_s3_is_stated(claim: str, body: bytes | None, wanted: str) -> None:
    """C113: hashed by the client, unsigned, and unsigned with a trailer stream through, not buffered."""
    headers = (*signed_by_client("s3"), *((("x-amz-content-sha256", claim),) if claim else ()))
    request = outgoing(method="PUT", headers=headers, has_body=body is None or bool(body), body=body)
    held = secrets({"access_key_id": b"AKIDEXAMPLE", "secret_access_key": SECRET.encode()})
    made = dict(inject(request, apply(aws("s3"), held, request)).headers)
    assert made["x-amz-content-sha256"] == wanted
    assert "x-amz-content-sha256" in made["authorization"]


def test_a_presigned_url_is_presigned_again() -> None:
    """The client's URL comes with the placeholder in its query: same parameters, our key, and no longer than needed."""
    scope = quote(f"{KEY_ID}/20150830/us-east-1/s3/aws4_request", safe="")
    query = (
        f"response-content-type=text%2Fplain&X-Amz-Algorithm={ALGORITHM}&X-Amz-Credential={scope}&X-Amz-Date={STAMP}"
        f"&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature={'0' * 64}"
    )
    request = outgoing(f"/k.txt?{query}")
    held = secrets({"access_key_id": b"AKIDEXAMPLE", "secret_access_key": SECRET.encode()})
    made = inject(request, apply(aws("s3"), held, request))
    assert "authorization" not in dict(made.headers)
    assert KEY_ID not in made.target
    assert re.findall(r"([A-Za-z-]+)=", made.target) == [
        "response-content-type", "X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires",
        "X-Amz-SignedHeaders", "X-Amz-Signature",
    ]  # fmt: skip
    assert "X-Amz-Expires=300&" in made.target
    found = read_signature(facts((), made.target))
    assert found is not None
    assert not isinstance(found, str)
    assert (found.key_id, found.expires) == ("AKIDEXAMPLE", 300)


def test_nothing_shows_the_secret_of_a_signing() -> None:
    """A Signing in a traceback shows no key and no token."""
    shown = repr(replace(signing(), token=TOKEN))
    assert SECRET not in shown
    assert TOKEN not in shown
