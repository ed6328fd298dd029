"""Token endpoints on loopback that check what they are asked with, by libraries that the product does not use.

    async with Origin("token.test") as origin:
        issuer = OAuthServer(origin); issuer.clients["crm"] = "canary-..."

Each keeps what it gave (`given`) and why it refused (`refused`), and gives tokens that name themselves, so that a test
sees which one reached an API. JWTs are checked by PyJWT, AWS signatures by botocore's own signer.
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

import jwt
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.support.origins import Exchange, Origin

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def private_pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, *, traditional: bool = False) -> str:
    form = PrivateFormat.TraditionalOpenSSL if traditional else PrivateFormat.PKCS8
    return key.private_bytes(Encoding.PEM, form, NoEncryption()).decode()


def public_pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def account_file(key: rsa.RSAPrivateKey, email: str = "robot@project.iam.example", **more: str) -> str:
    """A service account's key file as Google writes it."""
    return json.dumps(
        {
            "type": "service_account",
            "project_id": "project",
            "private_key_id": "key-1",
            "private_key": private_pem(key),
            "client_email": email,
            "client_id": "1",
            "token_uri": "https://evil.test/steal",
            **more,
        },
        indent=2,
    )


async def answer_json(exchange: Exchange, status: int, value: Any) -> None:
    await exchange.answer(status, json.dumps(value).encode(), (("Content-Type", "application/json"),))


@dataclass
class OAuthServer:
    """RFC 6749, 7523 and 8693 at /oauth/token. A refresh token works once where `rotates`."""

    origin: Origin
    clients: dict[str, str] = field(default_factory=dict)
    keys: dict[str, bytes] = field(default_factory=dict)
    """client id -> public key, for private_key_jwt and the jwt-bearer grant."""
    refresh_tokens: set[str] = field(default_factory=set)
    subject_tokens: set[str] = field(default_factory=set)
    rotates: bool = True
    expires_in: Any = 3600
    path: str = "/oauth/token"
    given: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.origin.on(self.path, self._handle)

    @property
    def url(self) -> str:
        return self.origin.url(self.path)

    async def _handle(self, exchange: Exchange) -> None:
        raw = (await exchange.read_body()).decode()
        form = dict(parse_qsl(raw, strict_parsing=True))
        self.forms.append(form)
        fault = self._fault(exchange, form)
        if fault:
            self.refused.append(fault)
            # The text quotes what was sent, as some servers do: it must go nowhere.
            await answer_json(exchange, 401 if fault == "invalid_client" else 400, {"error": fault, "text": raw})
            return
        token = f"access-{len(self.given)}-{form.get('scope', '')}".replace(" ", "+").ljust(24, "x")
        self.given.append(token)
        answer: dict[str, Any] = {"access_token": token, "token_type": "Bearer"}
        if self.expires_in is not None:
            answer["expires_in"] = self.expires_in
        if form["grant_type"] == "refresh_token" and self.rotates:
            self.refresh_tokens.discard(form["refresh_token"])
            answer["refresh_token"] = f"refresh-after-{len(self.given)}-canary"
            self.refresh_tokens.add(answer["refresh_token"])
        if form["grant_type"] == TOKEN_EXCHANGE:
            answer["issued_token_type"] = "urn:ietf:params:oauth:token-type:access_token"
        await answer_json(exchange, 200, answer)

    def _fault(self, exchange: Exchange, form: dict[str, str]) -> str:
        grant = form.get("grant_type")
        if exchange.request.method != "POST" or exchange.request.header("content-type") is None:
            return "invalid_request"
        if not self._client_known(exchange, form, optional=grant != "client_credentials"):
            return "invalid_client"
        match grant:
            case "client_credentials":
                return ""
            case "refresh_token":
                return "" if form.get("refresh_token") in self.refresh_tokens else "invalid_grant"
            case _ if grant == JWT_BEARER:
                return "" if self._assertion(form.get("assertion", ""), self.url) else "invalid_grant"
            case _ if grant == TOKEN_EXCHANGE:
                return "" if form.get("subject_token") in self.subject_tokens else "invalid_grant"
        return "unsupported_grant_type"

    def _client_known(self, exchange: Exchange, form: dict[str, str], *, optional: bool) -> bool:
        header = exchange.request.header("authorization")
        if header is not None:
            scheme, _, encoded = header.partition(" ")
            name, _, secret = base64.b64decode(encoded).decode().partition(":")
            return scheme == "Basic" and self.clients.get(unquote_plus(name)) == unquote_plus(secret)
        if "client_secret" in form:
            return self.clients.get(form.get("client_id", "")) == form["client_secret"]
        if form.get("client_assertion_type") == ASSERTION:
            return self._assertion(form["client_assertion"], self.url)
        return optional

    def _assertion(self, token: str, audience: str) -> bool:
        try:
            issuer = jwt.decode(token, options={"verify_signature": False})["iss"]
            claims = jwt.decode(
                token,
                self.keys[issuer],
                algorithms=["RS256", "ES256"],
                audience=audience,
                options={"require": ["exp", "iat", "jti", "sub"]},
            )
        except (jwt.PyJWTError, KeyError):
            return False
        if claims["jti"] in self.seen or claims["exp"] - claims["iat"] > 600:
            return False
        self.seen.add(claims["jti"])
        return True


@dataclass
class GitHubServer:
    """POST /app/installations/{id}/access_tokens: a token narrowed as asked, or wider where `generous`."""

    origin: Origin
    app_id: str
    key: bytes
    installation: str = "7890"
    generous: bool = False
    wanted: list[dict[str, Any]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin.on(f"/app/installations/{self.installation}/access_tokens", self._handle)

    async def _handle(self, exchange: Exchange) -> None:
        wanted = json.loads(await exchange.read_body())
        try:
            token = (exchange.request.header("authorization") or "").removeprefix("Bearer ")
            claims = jwt.decode(token, self.key, algorithms=["RS256"], options={"require": ["exp", "iat", "iss"]})
        except jwt.PyJWTError as error:
            self.refused.append(type(error).__name__)
            await answer_json(exchange, 401, {"message": "A JSON web token could not be decoded"})
            return
        if claims["iss"] != self.app_id or claims["exp"] - claims["iat"] > 600:
            self.refused.append("claims")
            await answer_json(exchange, 401, {"message": "claims"})
            return
        self.wanted.append(wanted)
        self.given.append(f"ghs_{len(self.given):036d}")
        every = self.generous or "repositories" not in wanted
        answer = {
            "token": self.given[-1],
            "expires_at": datetime.fromtimestamp(int(time.time()) + 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "permissions": {"contents": "write", "administration": "write", "metadata": "read"}
            if self.generous
            else {**wanted.get("permissions", {"contents": "write"}), "metadata": "read"},
            "repository_selection": "all" if every else "selected",
        }
        await answer_json(exchange, 201, answer)


@dataclass
class GoogleServer:
    """POST /token with a service account's assertion: an access token, or an ID token for `target_audience`."""

    origin: Origin
    key: rsa.RSAPrivateKey
    email: str = "robot@project.iam.example"
    claims: list[dict[str, Any]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin.on("/token", self._handle)

    async def _handle(self, exchange: Exchange) -> None:
        form = dict(parse_qsl((await exchange.read_body()).decode(), strict_parsing=True))
        try:
            assert form["grant_type"] == JWT_BEARER
            claims = jwt.decode(
                form["assertion"], public_pem(self.key), algorithms=["RS256"], audience=self.origin.url("/token")
            )
            assert claims["iss"] == self.email
            assert jwt.get_unverified_header(form["assertion"])["kid"] == "key-1"
        except (jwt.PyJWTError, AssertionError):
            await answer_json(exchange, 400, {"error": "invalid_grant", "error_description": "Invalid JWT"})
            return
        self.claims.append(claims)
        if "target_audience" in claims:
            ends = {"aud": claims["target_audience"], "exp": int(time.time()) + 3600, "n": len(self.given)}
            self.given.append(jwt.encode(ends, private_pem(self.key), algorithm="RS256"))
            await answer_json(exchange, 200, {"id_token": self.given[-1]})
            return
        self.given.append(f"ya29.{len(self.given)}-canary-{'g' * 20}")
        await answer_json(exchange, 200, {"access_token": self.given[-1], "expires_in": 3599, "token_type": "Bearer"})


@dataclass
class StsServer:
    """AssumeRole at /, its signature checked by botocore's own signer."""

    origin: Origin
    keys: dict[str, str]
    region: str = "eu-central-1"
    forms: list[dict[str, str]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin.on("/", self._handle)

    async def _handle(self, exchange: Exchange) -> None:
        body = await exchange.read_body()
        fault = self._fault(exchange, body)
        if fault:
            self.refused.append(fault)
            text = (
                f"<ErrorResponse><Error><Code>{fault}</Code><Message>{body.decode()}</Message></Error></ErrorResponse>"
            )
            await exchange.answer(403, text.replace("&", "&amp;").encode(), (("Content-Type", "text/xml"),))
            return
        self.forms.append(dict(parse_qsl(body.decode())))
        self.given.append(f"ASIA{len(self.given):016d}")
        ends = datetime.fromtimestamp(int(time.time()) + 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = (
            '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
            f"<AccessKeyId>{self.given[-1]}</AccessKeyId>"
            f"<SecretAccessKey>{secret_of(self.given[-1])}</SecretAccessKey>"
            f"<SessionToken>session-of-{self.given[-1]}</SessionToken><Expiration>{ends}</Expiration>"
            "</Credentials><AssumedRoleUser><Arn>arn:x</Arn></AssumedRoleUser></AssumeRoleResult></AssumeRoleResponse>"
        )
        await exchange.answer(200, text.encode(), (("Content-Type", "text/xml"),))

    def _fault(self, exchange: Exchange, body: bytes) -> str:
        request = exchange.request
        value = request.header("authorization") or ""
        key_id = value.partition("Credential=")[2].partition("/")[0]
        if key_id not in self.keys:
            return "InvalidClientTokenId"
        wanted = signature_of(
            request.method,
            f"https://{request.header('host')}{request.target}",
            {"host": request.header("host") or "", "content-type": request.header("content-type") or ""},
            body,
            (key_id, self.keys[key_id], None),
            ("sts", self.region),
            request.header("x-amz-date") or "",
        )
        return "" if value == wanted else "SignatureDoesNotMatch"


def secret_of(key_id: str) -> str:
    """The secret key of a key that StsServer gave."""
    return f"secret-of-{key_id}-canary"


def signature_of(
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes,
    keys: tuple[str, str, str | None],
    scope: tuple[str, str],
    stamp: str,
) -> str:
    """The Authorization value that botocore would have sent at `stamp`."""
    request = AWSRequest(method=method, url=url, data=body, headers=headers)
    request.context["timestamp"] = stamp
    signer = SigV4Auth(Credentials(*keys), *scope)
    del request.headers["X-Amz-Date"]  # setting adds
    request.headers["X-Amz-Date"] = stamp
    canonical = signer.canonical_request(request)
    text = signer.string_to_sign(request, canonical)
    signed = signer.signed_headers(signer.headers_to_sign(request))
    return (
        f"AWS4-HMAC-SHA256 Credential={signer.scope(request)}, SignedHeaders={signed}, "
        f"Signature={signer.signature(text, request)}"
    )
