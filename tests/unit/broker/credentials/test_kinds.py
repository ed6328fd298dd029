"""What each kind makes of a request, exactly: published vectors where there are some, the provider's form elsewhere."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

from broker.credentials import KindFault, apply, inject
from broker.credentials.totp import totp
from broker.material import guards, guards_of
from broker.scrub import Patterns, scrub_whole
from tests.support.kinds import CANARY, NOW, OTHER, PEM, PLACEHOLDER, SAMPLES, definition, outgoing, secrets, sent

# --- what is refused ---


@pytest.mark.parametrize(
    "target",
    [
        "/getMe",
        f"/bot{PLACEHOLDER}",
        f"/bot{PLACEHOLDER}x/getMe",
        f"/x/bot{PLACEHOLDER}/getMe",
        "/botmine/getMe",
        f"/bot{PLACEHOLDER}{PLACEHOLDER}/getMe",
        f"/bot{PLACEHOLDER}/{PLACEHOLDER}",
    ],
)
def test_a_path_without_the_placeholder_in_its_place_takes_no_secret(target: str) -> None:
    """Nothing is guessed about where in a path the secret would go."""
    with pytest.raises(KindFault, match="kind-request-form"):
        apply(SAMPLES["path"].definition, secrets({"value": CANARY}), outgoing(target))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (None, "kind-body-unseen"),
        (b'{"auth": {}}', "kind-request-form"),
        (f'{{"a": "{PLACEHOLDER}", "auth": {{"token": "{PLACEHOLDER}"}}}}'.encode(), "kind-request-form"),
    ],
)
def test_a_body_that_streams_or_lacks_the_placeholder_is_not_rewritten(body: bytes | None, code: str) -> None:
    """Only whole judged bodies, and only where the client's placeholder stands, once."""
    with pytest.raises(KindFault, match=code):
        apply(SAMPLES["body"].definition, secrets({"value": CANARY}), outgoing(body=body, has_body=True))


@pytest.mark.parametrize("offered", ["chat", f"chat, other.{PLACEHOLDER}", "key.bWluZQ", f"key.{PLACEHOLDER}"])
def test_an_offer_without_the_placeholder_takes_no_secret(offered: str) -> None:
    """The server chooses one of what the client offered, and the client must know it."""
    request = outgoing(headers=(("sec-websocket-protocol", offered),))
    with pytest.raises(KindFault, match="kind-request-form"):
        apply(SAMPLES["subprotocol"].definition, secrets({"value": CANARY}), request)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("totp", {"value": b"not base 32 at all 189"}),
        ("mtls", {"certificate": b"no certificate", "key": PEM}),
        ("mtls", {"certificate": b"-----BEGIN CERTIFICATE-----\n" + PEM, "key": PEM}),
        ("mtls", {"certificate": SAMPLES["mtls"].parts["certificate"], "key": b"-----BEGIN CERTIFICATE-----\nM"}),
        (
            "mtls",
            {
                "certificate": SAMPLES["mtls"].parts["certificate"],
                "key": b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nM\n-----END ENCRYPTED PRIVATE KEY-----",
            },
        ),
    ],
)
def test_material_of_another_form_is_refused(kind: str, parts: dict[str, bytes]) -> None:
    """A seed that is not base32, a key that is a certificate, a key behind a passphrase."""
    with pytest.raises(KindFault, match="kind-secret-form"):
        apply(SAMPLES[kind].definition, secrets(parts), outgoing())


def test_a_signature_over_a_body_needs_the_body() -> None:
    """A body that streams is not there to be signed; none at all is the empty one."""
    made = definition("hmac", {"header": "X-Signature", "sign": "{body}"}, shapes={})
    with pytest.raises(KindFault, match="kind-body-unseen"):
        apply(made, secrets({"value": CANARY}), outgoing(has_body=True))
    assert apply(made, secrets({"value": CANARY}), outgoing()).set_headers


def test_basic_without_any_user_is_refused() -> None:
    """Neither the definition nor the client names a user: nothing is guessed."""
    with pytest.raises(KindFault, match="kind-request-form"):
        apply(definition("basic"), secrets({"value": CANARY}), outgoing())


# --- what is set ---


@pytest.mark.parametrize(
    ("sent_pair", "pair"),
    [
        (f"me:{PLACEHOLDER}", b"me:" + CANARY),
        (f"{PLACEHOLDER}:", CANARY + b":"),
        (f"{PLACEHOLDER}:x-oauth-basic", CANARY + b":x-oauth-basic"),
    ],
)
def test_basic_puts_the_secret_where_the_placeholder_stood(sent_pair: str, pair: bytes) -> None:
    """C093: as the password, or as the user name where a provider takes the key there."""
    headers = (("authorization", "Basic " + base64.b64encode(sent_pair.encode()).decode()),)
    made = apply(definition("basic"), secrets({"value": CANARY}), outgoing(headers=headers))
    assert made.set_headers == (("authorization", "Basic " + base64.b64encode(pair).decode()),)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ((), ("private-token", CANARY.decode())),
        ((("private-token", PLACEHOLDER),), ("private-token", CANARY.decode())),
        ((("authorization", f"Bearer {PLACEHOLDER}"),), ("authorization", f"Bearer {CANARY.decode()}")),
        (
            (("authorization", "Basic " + base64.b64encode(f"oauth2:{PLACEHOLDER}".encode()).decode()),),
            ("authorization", "Basic " + base64.b64encode(b"oauth2:" + CANARY).decode()),
        ),
    ],
)
def test_a_secret_with_several_places_goes_where_the_client_had_its_placeholder(header: Any, wanted: Any) -> None:
    """GitLab: PRIVATE-TOKEN, a bearer token, or a password; exactly one of them leaves."""
    made = definition("header", {"header": "PRIVATE-TOKEN", "also": ["bearer", "basic"]})
    asked = outgoing(headers=(*header, ("accept", "*/*")))
    assert inject(asked, apply(made, secrets({"value": CANARY}), asked)).headers == (("accept", "*/*"), wanted)


def test_a_secret_in_a_path_is_encoded_for_its_place() -> None:
    """C103: what a segment cannot hold is percent-encoded; a colon stays, as Telegram's tokens have one."""
    request = outgoing(f"/file/bot{PLACEHOLDER}/a%20b.txt?x={'y'}")
    made = inject(request, apply(SAMPLES["path"].definition, secrets({"value": b"a:b/c?d&e-0123"}), request))
    assert made.target == "/file/bota:b%2Fc%3Fd%26e-0123/a%20b.txt?x=y"


@pytest.mark.parametrize("field", ["form:api_key", "json:auth.token"])
def test_a_field_of_a_body_holds_exactly_the_secret(field: str) -> None:
    """C103, C109: quotes, percent signs and others in the secret are spelled as the format wants; all else stays."""
    awkward = b'a"b\\c%d&e=f+g-0123'
    made = definition("body", {"field": field})
    if field.startswith("form:"):
        body = f"a=%20b&api_key={PLACEHOLDER}&c=+".encode()
    else:
        body = f'{{ "auth" : {{"token":"{PLACEHOLDER}"}},"x":"\\u00e9" }}'.encode()
    request = outgoing(method="POST", body=body, has_body=True)
    out = inject(request, apply(made, secrets({"value": awkward}), request)).body
    assert out is not None
    if field.startswith("form:"):
        assert out == b"a=%20b&api_key=a%22b%5Cc%25d%26e%3Df%2Bg-0123&c=+"
    else:
        assert json.loads(out) == {"auth": {"token": awkward.decode()}, "x": "é"}
        assert out.startswith(b'{ "auth" : {"token":"a')


@pytest.mark.parametrize(
    ("algorithm", "key", "now", "code"),
    [
        (name, key, now, code)
        for name, key, codes in (
            ("sha1", b"12345678901234567890", ("94287082", "07081804", "14050471", "89005924", "69279037", "65353130")),
            (
                "sha256",
                b"12345678901234567890123456789012",
                ("46119246", "68084774", "67062674", "91819424", "90698825", "77737706"),
            ),
            (
                "sha512",
                b"1234567890123456789012345678901234567890123456789012345678901234",
                ("90693936", "25091201", "99943326", "93441116", "38618901", "47863826"),
            ),
        )
        for now, code in zip((59, 1111111109, 1111111111, 1234567890, 2000000000, 20000000000), codes, strict=True)
    ],
)
def test_the_vectors_of_rfc_6238(algorithm: str, key: bytes, now: int, code: str) -> None:
    """Appendix B: eight digits, thirty seconds, all three hashes."""
    assert totp(key, now, digits=8, period=30, algorithm=algorithm) == code


def test_a_seed_is_read_as_providers_write_it() -> None:
    """Base32 in groups, in small letters, with or without padding."""
    made = definition("totp", {"header": "X-OTP", "template": "otp={value}"}, shapes={})
    codes = {
        apply(made, secrets({"value": seed}), outgoing()).set_headers
        for seed in (b"gezd gnbv gy3t qojq gezd gnbv gy3t qojq", b"GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ")
    }
    assert codes == {(("x-otp", "otp=" + totp(b"12345678901234567890", NOW, digits=6, period=30, algorithm="sha1")),)}


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        ("sha256", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (
            "sha512",
            "87aa7cdea5ef619d4ff0b4241a1d6cb02379f4e2ce4ec2787ad0b30545e17cdedaa833b7d6b8a702038b274eaea3f4e4"
            "be9d914eeb61f1702e696c203a126854",
        ),
    ],
)
def test_the_vectors_of_rfc_4231(algorithm: str, digest: str) -> None:
    """Test case 1: a key of twenty bytes 0x0b, given in hex, over `Hi There`."""
    made = definition(
        "hmac",
        {"header": "X-Signature", "sign": "{body}", "algorithm": algorithm, "key_encoding": "hex"},
        shapes={},
    )
    request = outgoing(method="POST", body=b"Hi There", has_body=True)
    assert apply(made, secrets({"value": b"0b" * 20}), request).set_headers == (("x-signature", digest),)


def test_what_hmac_signs_is_the_request_as_it_goes_out() -> None:
    """Every name of `sign:`, line breaks as `\\n`; values are never read as templates again."""
    body = b"{timestamp}"
    words = "{method}\\n{host}\\n{path}\\n{query}\\n{target}\\n{timestamp}\\n{key_id}\\n{body_sha256}\\n{body}"
    made = definition(
        "hmac",
        {
            "header": "Authorization",
            "sign": words,
            "template": "HMAC {key_id}:{signature}",
            "encoding": "base64",
            "key_encoding": "base64",
            "clock": "iso8601",
            "timestamp_header": "X-Date",
        },
        shapes={"key_id": "key_{24}"},
    )
    held = secrets({"value": base64.b64encode(CANARY), "key_id": b"key-of-ours"})
    request = outgoing("/a?b=c", method="PUT", body=body, has_body=True)
    fields = dict(apply(made, held, request).set_headers)
    text = (
        "PUT\na.example\n/a\nb=c\n/a?b=c\n2015-08-30T12:36:00Z\nkey-of-ours\n"
        f"{hashlib.sha256(body).hexdigest()}\n{{timestamp}}"
    )
    wanted = base64.b64encode(hmac.digest(CANARY, text.encode(), "sha256")).decode()
    assert fields == {"authorization": f"HMAC key-of-ours:{wanted}", "x-date": "2015-08-30T12:36:00Z"}


def test_a_certificate_is_for_the_connection_and_not_for_the_request() -> None:
    """Nothing of it is in the head; the key is handed on as a secret."""
    injection = SAMPLES["mtls"].apply()
    assert injection.certificate is not None
    assert injection.certificate.key.reveal() == PEM
    assert sent(SAMPLES["mtls"]).headers == ()


# --- what must not come back ---


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_what_a_kind_adds_is_masked_where_it_comes_back(kind: str) -> None:
    """I22: an upstream that echoes the whole request shows no secret part in any spelling that the kind made."""
    sample = SAMPLES[kind]
    injection = sample.apply()
    parts = secrets(sample.parts)
    made = inject(sample.request, injection)
    patterns = Patterns(guards_of(sample.definition, parts, injection.forms))
    echo = "\n".join((made.target, *(f"{name}: {value}" for name, value in made.headers))).encode()
    echo += b"\n" + (made.body or b"") + b"\n" + b"\n".join(sample.hidden.values())
    shown, _ = scrub_whole(echo, patterns)
    for name, value in sample.hidden.items():
        body = value.splitlines()[1] if value.startswith(b"-----") else value
        assert body not in shown, name
        if name in sample.seen:
            assert sample.seen[name] not in shown, name


def test_a_key_file_is_guarded_for_its_key_and_not_for_its_armour() -> None:
    """Another key's PEM, and JSON with the same names, come through unchanged."""
    own = [guard.value for guard in guards(PEM)]
    assert own == [PEM.splitlines()[1]]
    file = json.dumps({"type": "service_account", "private_key": PEM.decode(), "private_key_id": "f00", "n": 1})
    assert [guard.value for guard in guards(file.encode())] == own
    patterns = Patterns(guards(PEM))
    other = b"-----BEGIN PRIVATE KEY-----\nTm90IG91cnMgYXQgYWxsLCBub3QgYXQgYWxs\n-----END PRIVATE KEY-----\n"
    assert scrub_whole(other, patterns)[0] == other
    assert OTHER not in own
