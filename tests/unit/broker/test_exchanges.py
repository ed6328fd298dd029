"""Each exchange against an endpoint that checks what it is asked with; then every way in which it can be told no."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import BrokerError
from broker.exchanges import EXCHANGES, ExchangeError, Obtained, Plan
from broker.exchanges.base import Wish
from broker.vault.secret import Secret
from net.addresses import AddressTable
from net.client import Answer, Endpoint, HttpClient, NoAnswer, Question
from net.contexts import ClientContexts
from net.resolve import Lookups
from net.trust import TrustKey
from rules.credential_slots import BadForm
from rules.exchanges import read_exchange
from rules.facts import Sandbox
from rules.names import CredentialRef, Host
from rules.policy import CredentialDef, PlaceholderSpec
from tests.support.authority import Authority
from tests.support.origins import Origin
from tests.support.resolver import StaticResolver
from tests.support.scripts import READ, script, text
from tests.support.tokenservers import (
    GitHubServer,
    GoogleServer,
    OAuthServer,
    StsServer,
    account_file,
    private_pem,
    public_pem,
    rsa_key,
    secret_of,
)

KEY = rsa_key()
OTHER_KEY = rsa_key()
CURVE_KEY = ec.generate_private_key(ec.SECP256R1())
SANDBOX = Sandbox(
    tenant="t",
    id="sb_1",
    epoch=1,
    role="agent",
    owner="ada",
    agent="a",
    task="t-1",
    attributes={"repository": "shop", "evil": "x&scope=admin", "dots": ".."},
)
SECRET = "canary-client/secret+0123456789"


def definition(kind: str, **written: Any) -> CredentialDef:
    form = read_exchange(kind, written)
    return CredentialDef(
        name=CredentialRef("c"),
        kind=kind,
        slot=form.slots[0],
        hosts=(Host("api.test"),),
        owner="o",
        placeholder=PlaceholderSpec(env="C", shape="sk_{24}"),
        params=form.params,
        more_slots=form.slots[1:],
    )


def asker(origin: Origin) -> Any:
    client = HttpClient(
        Lookups(StaticResolver({name: ["127.0.0.1"] for name in origin.names}), clock=lambda: 0.0),
        ClientContexts(),
        AddressTable,
        interfaces=frozenset,
    )

    async def ask(plan: Plan, wish: Wish) -> Answer:
        where = Endpoint(
            destination=plan.destination,
            addresses=(ip_network("127.0.0.0/8"),),
            trust=TrustKey(ca_pem=origin.ca_pem),
        )
        answer = await client.ask(
            Question(endpoint=where, method="POST", target=plan.target, headers=wish.headers, body=wish.body)
        )
        if isinstance(answer, NoAnswer):
            raise ExchangeError("exchange-unreachable", answer.code, transient=True)
        return answer

    return ask


async def obtain(origin: Origin, made: CredentialDef, parts: Mapping[str, str], sandbox: Sandbox = SANDBOX) -> Obtained:
    exchange = EXCHANGES[made.kind]
    held = {part: Secret(value.encode(), name=part, scrub=False) for part, value in parts.items()}
    return await exchange.obtain(exchange.plan(made, sandbox), held, asker(origin), time.time())


async def refused(
    origin: Origin, made: CredentialDef, parts: Mapping[str, str], sandbox: Sandbox = SANDBOX
) -> BrokerError:
    with pytest.raises(ExchangeError) as caught:
        await obtain(origin, made, parts, sandbox)
    said = f"{caught.value} {caught.value.detail} {caught.value.remedy}"
    assert not [value for value in parts.values() if value in said]
    return caught.value


# OAuth 2


@pytest.mark.parametrize("auth", ["basic", "post", None])
async def test_client_credentials_by_secret(auth: str | None) -> None:
    """RFC 6749 section 4.4: the secret goes to the endpoint, in the way that is written, and an access token comes."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, clients={"crm:1": SECRET})
        more = {} if auth is None else {"client_auth": auth}
        made = definition(
            "oauth2", token_url=server.url, grant="client_credentials", scopes=["a", "b:${sandbox.owner}"], **more
        )
        wrong = {"client_id": "crm:1", "client_secret": "another-secret-012345"}
        assert (await refused(origin, made, wrong)).code == "exchange-refused"
        got = await obtain(origin, made, {"client_id": "crm:1", "client_secret": SECRET})
        assert got.parts == {"value": server.given[0].encode()}
        assert got.lasts == 3600 - 60
        assert server.forms[-1]["scope"] == "a b:ada"
        assert ("client_secret" in server.forms[-1]) == (auth == "post")
        assert server.given[0] not in repr(got)


@pytest.mark.parametrize("key", [KEY, CURVE_KEY], ids=["RS256", "ES256"])
async def test_client_credentials_by_a_signed_assertion(key: Any) -> None:
    """RFC 7523 section 2.2: the endpoint checks signature, audience, times and that it comes once."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, keys={"crm": public_pem(key)})
        made = definition("oauth2", token_url=server.url, grant="client_credentials", key_id="k1")
        assert (await refused(origin, made, {"client_id": "crm", "private_key": private_pem(OTHER_KEY)})).code == (
            "exchange-refused"
        )
        parts = {"client_id": "crm", "private_key": private_pem(key)}
        for _ in range(2):
            await obtain(origin, made, parts)
        assert len(server.given) == 2
        assert jwt.get_unverified_header(server.forms[-1]["client_assertion"])["kid"] == "k1"


async def test_jwt_bearer_for_a_subject() -> None:
    """RFC 7523 section 2.1, the subject narrowed to the sandbox."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, keys={"issuer-1": public_pem(KEY)})
        made = definition(
            "oauth2", token_url=server.url, grant="jwt_bearer", issuer="issuer-1", subject="${sandbox.owner}@corp.test"
        )
        got = await obtain(origin, made, {"private_key": private_pem(KEY, traditional=True)})
        assert got.parts["value"] == server.given[0].encode()
        claims = jwt.decode(server.forms[0]["assertion"], options={"verify_signature": False})
        assert (claims["iss"], claims["sub"], claims["aud"]) == ("issuer-1", "ada@corp.test", server.url)


async def test_token_exchange_gives_a_token_for_an_audience() -> None:
    """RFC 8693: the stored subject token stays here."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, clients={"crm": SECRET}, subject_tokens={"subject-canary-0123456789"})
        made = definition("oauth2", token_url=server.url, grant="token_exchange", audience="api-${sandbox.task}")
        parts = {"client_id": "crm", "client_secret": SECRET, "subject_token": "subject-canary-0123456789"}
        await obtain(origin, made, parts)
        assert server.forms[0]["audience"] == "api-t-1"
        assert server.forms[0]["subject_token_type"].endswith(":access_token")
        wrong = await refused(origin, made, {**parts, "subject_token": "another-canary-0123456789"})
        assert wrong.code == "exchange-refused"
        assert "invalid_grant" in wrong.detail


async def test_a_replaced_refresh_token_comes_back_to_be_stored() -> None:
    """And one that is not replaced does not: RFC 6749 section 6."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, clients={"crm": SECRET}, refresh_tokens={"refresh-canary-0000"})
        made = definition("oauth2", token_url=server.url, grant="refresh_token")
        parts = {"client_id": "crm", "client_secret": SECRET, "refresh_token": "refresh-canary-0000"}
        got = await obtain(origin, made, parts)
        assert set(got.rotated) == {"refresh_token"}
        assert got.rotated["refresh_token"].decode() in server.refresh_tokens
        assert (await refused(origin, made, parts)).code == "exchange-refused"
        server.rotates = False
        again = await obtain(origin, made, {**parts, "refresh_token": got.rotated["refresh_token"].decode()})
        assert again.rotated == {}


# what an endpoint may say instead

ANSWERS: dict[str, tuple[bytes, str]] = {
    "a redirect": (text("", 302, ("Location", "https://evil.test/")), "exchange-answer"),
    "a page": (text("<html>", 200, ("Content-Type", "text/html")), "exchange-answer"),
    "garbage": (text("{", 200, ("Content-Type", "application/json")), "exchange-answer"),
    "a list": (text("[]", 200, ("Content-Type", "application/json")), "exchange-answer"),
    "one key twice": (
        text(
            '{"access_token":"aaaaaaaaaaaaaaaa","access_token":"b","token_type":"bearer"}',
            200,
            ("Content-Type", "application/json"),
        ),
        "exchange-answer",
    ),
    "nested deeply": (text("[" * 5000, 200, ("Content-Type", "application/json")), "exchange-answer"),
    "5 MB": (text("x" * (5 << 20), 200, ("Content-Type", "application/json")), "exchange-unreachable"),
    "busy": (text("", 503), "exchange-unreachable"),
    "too often": (text("", 429), "exchange-unreachable"),
    "no": (text('{"error":"made_up_canary"}', 400, ("Content-Type", "application/json")), "exchange-refused"),
    "gone": (text("gone", 410), "exchange-refused"),
    "created": (
        text('{"access_token":"aaaaaaaaaaaaaaaa","token_type":"bearer"}', 201, ("Content-Type", "application/json")),
        "exchange-refused",
    ),
}


@pytest.mark.parametrize("case", sorted(ANSWERS))
async def test_an_answer_that_is_no_token_is_a_fixed_code(case: str) -> None:
    """None of the server's own text is repeated."""
    raw, code = ANSWERS[case]
    async with Origin("token.test") as origin:
        origin.on("/t", script(READ, raw))
        made = definition("oauth2", token_url=origin.url("/t"), grant="client_credentials")
        no = await refused(origin, made, {"client_id": "crm", "client_secret": SECRET})
        assert no.code == code
        assert "canary" not in no.detail
        assert no.transient == (code == "exchange-unreachable")
        assert len(origin.received) == 1


GOOD = {"access_token": "a" * 20, "token_type": "Bearer", "expires_in": 3600}


@pytest.mark.parametrize(
    "change",
    [
        {"token_type": "mac"},
        {"token_type": None},
        {"token_type": "N_A"},
        {"access_token": "short"},
        {"access_token": "has a blank in it 0123"},
        {"access_token": "line\r\nX-Evil: 1 0123456789"},
        {"access_token": "ümlaut-0123456789"},
        {"access_token": "x" * 20_000},
        {"access_token": 7},
        {"access_token": None},
        {"expires_in": 0},
        {"expires_in": -1},
        {"expires_in": 5},
        {"expires_in": True},
        {"expires_in": "soon"},
        {"expires_in": [3600]},
    ],
)
async def test_a_token_that_cannot_be_used_is_refused(change: dict[str, Any]) -> None:
    """It must be a bearer token that may stand in a header, of 12 bytes or more, and live a while."""
    async with Origin("token.test") as origin:
        body = json.dumps({**GOOD, **change})
        origin.on("/t", script(READ, text(body, 200, ("Content-Type", "application/json"))))
        made = definition("oauth2", token_url=origin.url("/t"), grant="client_credentials")
        no = await refused(origin, made, {"client_id": "crm", "client_secret": SECRET})
        assert no.code == "exchange-answer"


@pytest.mark.parametrize(
    ("said", "lasts"), [(3600, 3540), ("3600", 3540), (None, 270), (10**9, 86_340), (100, 90), (3600.5, 3540.5)]
)
async def test_how_long_a_token_is_kept_has_bounds(said: Any, lasts: float) -> None:
    """Never past what the endpoint said, less a margin, and never past a day."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, clients={"crm": SECRET}, expires_in=said)
        made = definition("oauth2", token_url=server.url, grant="client_credentials")
        assert (await obtain(origin, made, {"client_id": "crm", "client_secret": SECRET})).lasts == lasts


@pytest.mark.parametrize("name", ["evil", "dots", "missing"])
async def test_an_attribute_that_is_no_plain_word_narrows_nothing(name: str) -> None:
    """It refuses instead: nothing was asked, and no wider token was made."""
    async with Origin("token.test") as origin:
        server = OAuthServer(origin, clients={"crm": SECRET})
        made = definition(
            "oauth2", token_url=server.url, grant="client_credentials", scopes=["r:${sandbox." + name + "}"]
        )
        no = await refused(origin, made, {"client_id": "crm", "client_secret": SECRET})
        assert (no.code, origin.untouched) == ("exchange-material", True)


@pytest.mark.parametrize(
    "pem", ["", "no key", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "small"]
)
async def test_a_key_that_cannot_sign_is_told_without_asking(pem: str) -> None:
    """Wrong PEM and RSA below 2048 bits (RFC 7518 section 3.3)."""
    async with Origin("token.test") as origin:
        made = definition("oauth2", token_url=origin.url("/t"), grant="jwt_bearer", issuer="i")
        key = (
            private_pem(rsa_key(1024))
            if pem == "small"
            else pem or private_pem(ec.generate_private_key(ec.SECP384R1()))
        )
        no = await refused(origin, made, {"private_key": key})
        assert (no.code, origin.untouched) == ("exchange-material", True)


# GitHub App


async def test_an_installation_token_is_narrowed_to_the_sandbox() -> None:
    """The App's JWT is checked by its public key; repositories and permissions stand in the request."""
    async with Origin("api.github.test") as origin:
        server = GitHubServer(origin, "123456", public_pem(KEY))
        made = definition(
            "github-app",
            app_id="123456",
            installation_id="7890",
            api_url=origin.base,
            repositories=["${sandbox.repository}", "docs"],
            permissions={"contents": "read"},
        )
        got = await obtain(origin, made, {"private_key": private_pem(KEY, traditional=True)})
        assert got.parts == {"value": server.given[0].encode()}
        assert server.wanted == [{"repositories": ["docs", "shop"], "permissions": {"contents": "read"}}]
        assert 3000 < got.lasts < 3600
        assert (await refused(origin, made, {"private_key": private_pem(OTHER_KEY)})).code == "exchange-refused"
        one_line = private_pem(KEY).replace("\n", "\\n")
        await obtain(origin, made, {"private_key": one_line})


async def test_a_token_that_reaches_further_than_asked_is_refused() -> None:
    """A server that ignores the narrowing would hand every repository to one sandbox."""
    async with Origin("api.github.test") as origin:
        GitHubServer(origin, "123456", public_pem(KEY), generous=True)
        base = {"app_id": "123456", "installation_id": "7890", "api_url": origin.base}
        for narrowing in ({"repositories": ["shop"]}, {"permissions": {"contents": "read"}}):
            made = definition("github-app", **base, **narrowing)
            no = await refused(origin, made, {"private_key": private_pem(KEY)})
            assert no.code == "exchange-answer"


async def test_equal_narrowings_are_one_plan_and_others_are_not() -> None:
    """What is shared is decided by what is asked for."""
    made = definition("github-app", app_id="1", installation_id="2", repositories=["${sandbox.repository}"])
    exchange = EXCHANGES["github-app"]

    def plan(repository: str) -> str:
        box = Sandbox(
            tenant="t",
            id=repository,
            epoch=1,
            role="r",
            owner="o",
            agent="a",
            task="t",
            attributes={"repository": repository},
        )
        return exchange.plan(made, box).text

    assert plan("shop") == plan("shop")
    assert plan("shop") != plan("till")


# Google


async def test_a_service_account_gets_a_token_for_its_scopes() -> None:
    """At the endpoint that the operator named: the key file's own token_uri is not asked."""
    async with Origin("oauth2.test") as origin:
        server = GoogleServer(origin, KEY)
        made = definition("google", token_url=origin.url("/token"), scopes=["https://scope.test/a", "b"])
        got = await obtain(origin, made, {"value": account_file(KEY)})
        assert got.parts == {"value": server.given[0].encode()}
        assert server.claims[0]["scope"] == "https://scope.test/a b"
        assert (await refused(origin, made, {"value": account_file(OTHER_KEY)})).code == "exchange-refused"
        for wrong in ("{}", "not json", json.dumps({"type": "service_account"}), account_file(KEY, type="user")):
            assert (await refused(origin, made, {"value": wrong})).code == "exchange-material"


async def test_an_id_token_is_kept_as_long_as_it_says() -> None:
    """For an audience, with its own `exp`; one without is refused."""
    async with Origin("oauth2.test") as origin:
        server = GoogleServer(origin, KEY)
        made = definition("google", token_url=origin.url("/token"), audience="https://run.test/${sandbox.owner}")
        got = await obtain(origin, made, {"value": account_file(KEY)})
        assert server.claims[0]["target_audience"] == "https://run.test/ada"
        assert got.parts == {"value": server.given[0].encode()}
        assert 3500 < got.lasts <= 3540
        for token in ("no.jwt.at-all", "aaaa.e30.cccccccccccc", "aaaaaaaaaaaaaaaa"):
            body = json.dumps({"id_token": token})
            origin.on("/token", script(READ, text(body, 200, ("Content-Type", "application/json"))))
            assert (await refused(origin, made, {"value": account_file(KEY)})).code == "exchange-answer"


# Azure


async def test_an_entra_application_by_secret_and_by_certificate() -> None:
    """Client credentials at the tenant's endpoint; a certificate is named by its SHA-256."""
    async with Origin("login.test") as origin:
        server = OAuthServer(origin, clients={"app": SECRET}, keys={"app": b""}, path="/contoso.test/oauth2/v2.0/token")
        made = definition("azure", tenant="contoso.test", authority=origin.base, scope="https://vault.test/.default")
        got = await obtain(origin, made, {"client_id": "app", "client_secret": SECRET})
        assert got.parts == {"value": server.given[0].encode()}
        assert server.forms[0]["scope"] == "https://vault.test/.default"
        whole = Authority().issue(("app.test",)).decode()
        key, certificate = whole[: whole.index("-----BEGIN CERT")], whole[whole.index("-----BEGIN CERT") :]
        loaded = x509.load_pem_x509_certificate(certificate.encode())
        server.keys["app"] = loaded.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        await obtain(origin, made, {"client_id": "app", "certificate": certificate, "private_key": key})
        named = jwt.get_unverified_header(server.forms[1]["client_assertion"])["x5t#S256"]
        assert jwt.utils.base64url_decode(named) == loaded.fingerprint(hashes.SHA256())
        wrong = {"client_id": "app", "certificate": "none", "private_key": key}
        assert (await refused(origin, made, wrong)).code == "exchange-material"


# AWS STS

ROLE = "arn:aws:iam::123456789012:role/agents"


async def test_a_role_is_assumed_for_one_sandbox() -> None:
    """The question's signature is checked by botocore; the session is named for the sandbox and cut by the policy."""
    async with Origin("sts.test") as origin:
        server = StsServer(origin, {"AKIAEXAMPLE000000000": SECRET})
        made = definition(
            "aws-sts",
            role_arn=ROLE,
            sts_url=origin.url("/"),
            regions=["eu-central-1"],
            aws_services=["s3"],
            external_id="ext-1",
            duration="30m",
            session_policy={"Statement": [{"Resource": "arn:aws:s3:::b/${sandbox.owner}/${aws:username}/*"}]},
        )
        parts = {"access_key_id": "AKIAEXAMPLE000000000", "secret_access_key": SECRET}
        got = await obtain(origin, made, parts)
        key_id = server.given[0]
        assert got.parts == {
            "access_key_id": key_id.encode(),
            "secret_access_key": secret_of(key_id).encode(),
            "session_token": f"session-of-{key_id}".encode(),
        }
        form = server.forms[0]
        assert (form["RoleArn"], form["RoleSessionName"], form["DurationSeconds"]) == (ROLE, "exeat-sb_1", "1800")
        assert json.loads(form["Policy"])["Statement"][0]["Resource"] == "arn:aws:s3:::b/ada/${aws:username}/*"
        assert EXCHANGES["aws-sts"].plan(made, SANDBOX).own
        no = await refused(origin, made, {**parts, "secret_access_key": "another-secret-0123456789"})
        assert (no.code, "SignatureDoesNotMatch" in no.detail) == ("exchange-refused", True)


WHOLE_XML = (
    "<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>{key}</AccessKeyId>"
    "<SecretAccessKey>secret-0123456789</SecretAccessKey><SessionToken>token-0123456789</SessionToken>"
    "<Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
)
HOSTILE_XML = {
    "whole, but with a document type": "<!DOCTYPE AssumeRoleResponse>" + WHOLE_XML.format(key="ASIA000000000000"),
    "whole, but with an entity": '<!DOCTYPE a [<!ENTITY k "ASIA000000000000">]>' + WHOLE_XML.format(key="&k;"),
    "whole, but one part is short": WHOLE_XML.format(key="ASIA"),
    "whole, but one part has a blank": WHOLE_XML.format(key="ASIA 00000000000"),
    "a document type": '<!DOCTYPE a [<!ENTITY x "y">]><AssumeRoleResponse>&x;</AssumeRoleResponse>',
    "an outside entity": '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>',
    "deep": "<a>" * 2000 + "</a>" * 2000,
    "many": "<a>" + "<b/>" * 5000 + "</a>",
    "twice": "<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>AAAAAAAAAAAAAAAA</AccessKeyId>"
    "<AccessKeyId>BBBBBBBBBBBBBBBB</AccessKeyId></Credentials></AssumeRoleResult></AssumeRoleResponse>",
    "cut": "<AssumeRoleResponse>",
    "JSON": "{}",
    "nothing of it": "<AssumeRoleResponse/>",
}


async def test_the_plain_answer_of_sts_is_taken() -> None:
    """What the hostile ones below are made of."""
    async with Origin("sts.test") as origin:
        origin.on("/", script(READ, text(WHOLE_XML.format(key="ASIA000000000000"), 200, ("Content-Type", "text/xml"))))
        scope = {"regions": ["eu-central-1"], "aws_services": ["s3"]}
        made = definition("aws-sts", role_arn=ROLE, sts_url=origin.url("/"), **scope)
        got = await obtain(origin, made, {"access_key_id": "AKIAEXAMPLE000000000", "secret_access_key": SECRET})
        assert got.parts["access_key_id"] == b"ASIA000000000000"


@pytest.mark.parametrize("case", sorted(HOSTILE_XML))
async def test_xml_that_is_no_answer_of_sts_is_refused(case: str) -> None:
    """No entity is expanded, nothing outside is read, and depth and count have bounds."""
    async with Origin("sts.test") as origin:
        origin.on("/", script(READ, text(HOSTILE_XML[case], 200, ("Content-Type", "text/xml"))))
        made = definition(
            "aws-sts", role_arn=ROLE, sts_url=origin.url("/"), regions=["eu-central-1"], aws_services=["s3"]
        )
        parts = {"access_key_id": "AKIAEXAMPLE000000000", "secret_access_key": SECRET}
        assert (await refused(origin, made, parts)).code == "exchange-answer"


# every kind, any answer


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["oauth2", "github-app", "azure", "aws-sts", "google"]),
    status=st.sampled_from([200, 201, 302, 400, 401, 403, 500]),
    body=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=20),
            lambda inner: st.dictionaries(
                st.sampled_from(
                    ["access_token", "token", "expires_in", "expires_at", "token_type", "error", "id_token"]
                ),
                inner,
            ),
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
async def test_no_answer_makes_an_exchange_raise_anything_else(kind: str, status: int, body: bytes) -> None:
    """Whatever comes, the outcome is a token within its bounds or an ExchangeError."""
    written: dict[str, dict[str, Any]] = {
        "oauth2": {"token_url": "https://t.test/x", "grant": "client_credentials"},
        "github-app": {"app_id": "1", "installation_id": "2"},
        "azure": {"tenant": "t"},
        "aws-sts": {"role_arn": ROLE, "regions": ["eu-central-1"], "aws_services": ["s3"]},
        "google": {"scopes": ["a"]},
    }
    parts = {
        "client_id": "crm",
        "client_secret": SECRET,
        "private_key": private_pem(KEY),
        "access_key_id": "AKIAEXAMPLE000000000",
        "secret_access_key": SECRET,
        "value": account_file(KEY),
    }

    async def ask(plan: Plan, wish: Wish) -> Answer:
        return Answer(status=status, headers=(("content-type", "application/json"),), body=body)

    exchange = EXCHANGES[kind]
    held = {part: Secret(value.encode(), name=part, scrub=False) for part, value in parts.items()}
    plan = exchange.plan(definition(kind, **written[kind]), SANDBOX)
    try:
        got = await exchange.obtain(plan, held, ask, 1.0)
    except ExchangeError:
        return
    assert 0 < got.lasts <= 86_400
    assert all(len(value) >= 12 and b"\n" not in value for value in got.parts.values())


# what credentials.yaml refuses


@pytest.mark.parametrize(
    ("kind", "written", "key"),
    [
        ("oauth2", {"grant": "client_credentials"}, "token_url"),
        ("oauth2", {"token_url": "https://t.test/x"}, "grant"),
        ("oauth2", {"token_url": "https://t.test/x", "grant": "password"}, "grant"),
        ("oauth2", {"token_url": "https://u:p@t.test/x", "grant": "refresh_token"}, "token_url"),
        ("oauth2", {"token_url": "https://t.test/x?a=b", "grant": "refresh_token"}, "token_url"),
        ("oauth2", {"token_url": "https://${sandbox.owner}.test/x", "grant": "refresh_token"}, "token_url"),
        ("oauth2", {"token_url": "https://exeat.internal/x", "grant": "refresh_token"}, "token_url"),
        ("oauth2", {"token_url": "ftp://t.test/x", "grant": "refresh_token"}, "token_url"),
        ("oauth2", {"token_url": "https://*.test/x", "grant": "refresh_token"}, "token_url"),
        ("oauth2", {"token_url": "https://t.test/x", "grant": "refresh_token", "subject": "x"}, "subject"),
        ("oauth2", {"token_url": "https://t.test/x", "grant": "refresh_token", "scopes": ["a b"]}, "scopes"),
        ("oauth2", {"token_url": "https://t.test/x", "grant": "refresh_token", "scopes": ["${env.X}"]}, "scopes"),
        ("oauth2", {"token_url": "https://t.test/x", "grant": "refresh_token", "header": "Host"}, "header"),
        ("oauth2", {"token_url": "https://t.test/x", "grant": "refresh_token", "stub": ["ec2-metadata"]}, "stub"),
        ("github-app", {"app_id": "x", "installation_id": "2"}, "app_id"),
        ("github-app", {"app_id": "1", "installation_id": "../2"}, "installation_id"),
        ("github-app", {"app_id": "1", "installation_id": "2", "repositories": ["a/b"]}, "repositories"),
        ("github-app", {"app_id": "1", "installation_id": "2", "permissions": {"contents": "all"}}, "permissions"),
        ("google", {}, "scopes"),
        ("google", {"scopes": ["a"], "audience": "b"}, "scopes"),
        ("azure", {"tenant": "a/b"}, "tenant"),
        ("aws-sts", {"role_arn": "arn:x", "regions": ["r-1"], "aws_services": ["s3"]}, "role_arn"),
        ("aws-sts", {"role_arn": ROLE, "regions": ["R"], "aws_services": ["s3"]}, "regions"),
        ("aws-sts", {"role_arn": ROLE, "regions": ["r"], "aws_services": ["s3"], "duration": "1m"}, "duration"),
        (
            "aws-sts",
            {"role_arn": ROLE, "regions": ["r"], "aws_services": ["s3"], "session_policy": {"a": "${evil}"}},
            "session_policy",
        ),
        (
            "aws-sts",
            {"role_arn": ROLE, "regions": ["r"], "aws_services": ["s3"], "session_policy": {"a": "x" * 2100}},
            "session_policy",
        ),
    ],
)
def test_what_an_exchange_cannot_have_is_refused_at_load(kind: str, written: dict[str, Any], key: str) -> None:
    """Each fault is told at the key where it stands."""
    with pytest.raises(BadForm) as caught:
        read_exchange(kind, written)
    assert caught.value.key == key
