"""Kinds whose secret is exchanged for a short-lived one: their keys in credentials.yaml, checked when it is loaded.

    crm:   {kind: oauth2, token_url: "https://login.example.com/oauth/token", grant: client_credentials,
            secret: {client_id: "env:CRM_ID", client_secret: "store:crm/secret"}, scopes: [crm.read], ...}
    app:   {kind: github-app, app_id: "123456", installation_id: "7890", secret: {private_key: "store:github/app"},
            repositories: ["${sandbox.repository}"], permissions: {contents: read}, ...}
    gcs:   {kind: google, secret: "store:gcp/key-file", scopes: ["https://www.googleapis.com/auth/pubsub"], ...}
    arm:   {kind: azure, tenant: contoso.example, secret: {client_id: "...", client_secret: "..."}, ...}
    role:  {kind: aws-sts, role_arn: "arn:aws:iam::123456789012:role/agents", regions: [...], aws_services: [...], ...}

Where a stored secret is sent stands here and nowhere else: an exact https URL of the operator's, without query,
userinfo or `${...}`. How its host is reached (private addresses, own authority) stands under `destinations:` of the
same file; only there may it become `http:`. What is asked for may hold `${sandbox.x}`, which narrows it to one word.

What is obtained is applied as a bearer token, in the header that `header:` names, or (aws-sts) as a signature.
The values end up in `CredentialDef.params`, which workers see: nothing of them is secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from rules.credential_kinds import KINDS, VALUE
from rules.credential_slots import BadForm, Form, header_name, sigv4_slots
from rules.grammar import SANDBOX_REFERENCE
from rules.names import DEFAULT_PORTS, OWN_NAME, Destination, InvalidName, Scheme, parse_authority
from rules.policy import DestinationDef, Slot

GRANTS: Final = ("client_credentials", "refresh_token", "jwt_bearer", "token_exchange")
CLIENT_AUTH: Final = ("basic", "post", "private_key_jwt", "none")
MAX_LIST: Final = 100
MAX_REPOSITORIES: Final = 500
MAX_SESSION_POLICY: Final = 2048
"""Characters (AWS STS API Reference, AssumeRole)."""
STUBS: Final[Mapping[str, tuple[str, ...]]] = {
    "oauth2": ("oauth2-token",),
    "google": ("google-token", "gce-metadata"),
    "azure": ("oauth2-token",),
    "aws-sts": ("ec2-metadata", "ecs-metadata"),
}
"""Which stub endpoints a kind can have (rules/stubs.py)."""

_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*\Z")
_TEXT = re.compile(r"[\x20-\x7e]{1,512}\Z")
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,256}\Z")  # RFC 6749 section 3.3
_REPOSITORY = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_PERMISSION = re.compile(r"[a-z][a-z_]{0,63}\Z")
_NUMBER = re.compile(r"[1-9][0-9]{0,19}\Z")
_APP = re.compile(r"(?:[1-9][0-9]{0,19}|Iv[A-Za-z0-9.]{1,40})\Z")
_TENANT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\Z")
_ROLE_ARN = re.compile(r"arn:aws[a-z-]{0,16}:iam::[0-9]{12}:role/[A-Za-z0-9_+=,.@/-]{1,512}\Z")
_EXTERNAL = re.compile(r"[A-Za-z0-9_+=,.@:/-]{2,1224}\Z")
_WORD = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_POLICY_VARIABLE = re.compile(r"\$\{(?:sandbox\.[a-z][a-z0-9_]{0,31}|[a-z0-9-]{1,32}:[A-Za-z0-9:/._-]{1,128}|[*?$])\}")

_URLS: Final = {
    "oauth2": ("token_url", ""),
    "github-app": ("api_url", "https://api.github.com"),
    "google": ("token_url", "https://oauth2.googleapis.com/token"),
    "azure": ("authority", "https://login.microsoftonline.com"),
    "aws-sts": ("sts_url", "https://sts.{region}.amazonaws.com/"),
}
"""Under which key the endpoint stands, and the provider's own."""

Written = Mapping[str, Any]


def is_exchange(kind: str) -> bool:
    return kind in _READERS


def read_exchange(kind: str, written: Written) -> Form:
    """The form of an exchange kind, of which `written` are the keys. Raises BadForm."""
    for key in written:
        if key not in KINDS[kind].keys:
            raise BadForm(key, f"{key}: does not go with kind: {kind}")
    return _READERS[kind](written)


def wrong_parts(kind: str, params: Written, parts: frozenset[str]) -> str | None:
    """What is wrong with these parts for what the parameters say, as a sentence; None where nothing is."""
    match kind:
        case "oauth2":
            return _wrong_oauth2(params, parts)
        case "azure":
            if not ("client_secret" in parts or {"certificate", "private_key"} <= parts):
                return "kind: azure needs the part client_secret, or certificate and private_key"
    return None


def written_back(kind: str, params: Written) -> str | None:
    """The part that the endpoint may replace, and that therefore lies in the embedded store; None for none."""
    return "refresh_token" if kind == "oauth2" and params.get("grant") == "refresh_token" else None


def endpoint_of(kind: str, params: Written) -> str | None:
    """The URL below which a credential's stored secret is sent; None for a kind that sends it nowhere."""
    if kind not in _URLS:
        return None
    key, default = _URLS[kind]
    region = next(iter(params.get("regions", ())), "")
    return str(params.get(key, default.replace("{region}", region)))


def clear_text(kind: str, params: Written, destinations: Mapping[str, DestinationDef]) -> str | None:
    """A sentence where the stored secret would go over http and the operator's `destinations:` do not say so."""
    url = endpoint_of(kind, params)
    if url is None or not url.startswith("http:"):
        return None
    place = destinations.get(place_of(url)[0].host.text)
    if place is not None and place.scheme == "http":
        return None
    return "secrets are sent over https; where it has to be http, say so under destinations: of this file"


def token_endpoint(kind: str, params: Written) -> tuple[Destination, str] | None:
    """Where exactly a client of the provider itself would ask for a token: what a stub stands in for."""
    url = endpoint_of(kind, params)
    if url is None or kind not in ("oauth2", "google", "azure"):
        return None
    destination, path = place_of(url)
    return destination, f"{path.rstrip('/')}/{params['tenant']}/oauth2/v2.0/token" if kind == "azure" else path


def stubs_of(params: Written) -> tuple[str, ...]:
    """The stub endpoints that a credential asks for."""
    return tuple(params.get("stub", ()))


def place_of(url: str) -> tuple[Destination, str]:
    """Where a URL leads, and its path. Raises InvalidName for what no endpoint of ours is."""
    scheme, found, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    if not found or scheme not in DEFAULT_PORTS:
        raise InvalidName("not https://HOST/PATH")
    known: Scheme = "http" if scheme == "http" else "https"
    host, port = parse_authority(authority, DEFAULT_PORTS[known])
    if host.text == OWN_NAME or host.text.endswith("." + OWN_NAME):
        raise InvalidName("this name is ours")
    if not _PATH.match(slash + path):
        raise InvalidName("its path holds more than a path")
    return Destination(known, host, port), slash + path or "/"


def _oauth2(written: Written) -> Form:
    params: dict[str, Any] = {"token_url": _url(written, "token_url"), "grant": _word(written, "grant", GRANTS)}
    if "client_auth" in written:
        params["client_auth"] = _word(written, "client_auth", CLIENT_AUTH)
    _scopes(written, params)
    for key in ("audience", "resource", "key_id"):
        _optional(written, params, key)
    for key, grant in (
        ("issuer", "jwt_bearer"),
        ("subject", "jwt_bearer"),
        ("subject_token_type", "token_exchange"),
        ("actor_token_type", "token_exchange"),
        ("requested_token_type", "token_exchange"),
    ):
        if key in written and params["grant"] != grant:
            raise BadForm(key, f"{key}: goes with grant: {grant}")
        _optional(written, params, key)
    return _applied("oauth2", written, params)


def _wrong_oauth2(params: Written, parts: frozenset[str]) -> str | None:
    grant, auth = params["grant"], params.get("client_auth")
    needed = {
        "client_credentials": ("client_id",),
        "refresh_token": ("client_id", "refresh_token"),
        "jwt_bearer": ("private_key",),
        "token_exchange": ("subject_token",),
    }[grant]
    missing = [name for name in needed if name not in parts]
    if missing:
        return f"grant: {grant} needs the part {missing[0]} under secret:"
    proof = {"basic": "client_secret", "post": "client_secret", "private_key_jwt": "private_key"}.get(auth or "")
    if proof is not None and not {"client_id", proof} <= parts:
        return f"client_auth: {auth} needs the parts client_id and {proof}"
    if grant == "client_credentials" and (auth == "none" or not {"client_secret", "private_key"} & parts):
        return "grant: client_credentials needs a proof: the part client_secret or private_key under secret:"
    if "client_secret" in parts and "client_id" not in parts:
        return "a client_secret needs the part client_id beside it"
    if grant == "jwt_bearer" and "issuer" not in params and "client_id" not in parts:
        return "grant: jwt_bearer needs issuer:, or the part client_id"
    for name, only in (("refresh_token", "refresh_token"), ("subject_token", "token_exchange")):
        if name in parts and grant != only:
            return f"the part {name} goes with grant: {only}"
    return None


def _github_app(written: Written) -> Form:
    params: dict[str, Any] = {
        "app_id": _matching(written, "app_id", _APP, "an app is named by its id or its client id, in quotes"),
        "installation_id": _matching(written, "installation_id", _NUMBER, "an installation is a number, in quotes"),
    }
    if "api_url" in written:
        params["api_url"] = _url(written, "api_url")
    if "repositories" in written:
        names = _list(written, "repositories", MAX_REPOSITORIES)
        for name in names:
            plain = SANDBOX_REFERENCE.sub("x", name)
            if not _REPOSITORY.match(plain) or plain in (".", ".."):
                raise BadForm("repositories", "repositories of the installation, without their owner")
        params["repositories"] = names
    if "permissions" in written:
        found = written["permissions"]
        if not isinstance(found, Mapping) or not found or len(found) > MAX_LIST:
            raise BadForm("permissions", "a mapping of permissions to read, write or admin")
        for name, level in found.items():
            if not isinstance(name, str) or not _PERMISSION.match(name) or level not in ("read", "write", "admin"):
                raise BadForm("permissions", "a mapping of permissions to read, write or admin")
        params["permissions"] = dict(found)
    return _applied("github-app", written, params)


def _google(written: Written) -> Form:
    params: dict[str, Any] = {}
    if "token_url" in written:
        params["token_url"] = _url(written, "token_url")
    if ("scopes" in written) == ("audience" in written):
        raise BadForm("scopes", "scopes: for an access token, or audience: for an ID token, and one of them")
    _scopes(written, params)
    for key in ("audience", "subject"):
        _optional(written, params, key)
    return _applied("google", written, params)


def _azure(written: Written) -> Form:
    params: dict[str, Any] = {"tenant": _matching(written, "tenant", _TENANT, "a tenant is its id or its domain")}
    if "authority" in written:
        params["authority"] = _url(written, "authority")
    _optional(written, params, "scope")
    return _applied("azure", written, params)


def _aws_sts(written: Written) -> Form:
    params: dict[str, Any] = {
        "role_arn": _matching(written, "role_arn", _ROLE_ARN, "expected arn:aws:iam::ACCOUNT:role/NAME"),
        "regions": _words(written, "regions"),
        "services": _words(written, "aws_services"),
    }
    if "sts_url" in written:
        params["sts_url"] = _url(written, "sts_url")
    if "external_id" in written:
        params["external_id"] = _matching(written, "external_id", _EXTERNAL, "2 to 1224 plain characters")
    if "duration" in written:
        seconds = _seconds(written["duration"])
        if seconds is None or not 900 <= seconds <= 43_200:
            raise BadForm("duration", "a session lasts 15m to 12h")
        params["duration"] = seconds
    if "session_policy" in written:
        params["session_policy"] = _session_policy(written["session_policy"])
    _stubs("aws-sts", written, params)
    return Form(slots=sigv4_slots(), params=params)


_READERS: Final[Mapping[str, Callable[[Written], Form]]] = {
    "oauth2": _oauth2,
    "github-app": _github_app,
    "google": _google,
    "azure": _azure,
    "aws-sts": _aws_sts,
}


def _applied(kind: str, written: Written, params: dict[str, Any]) -> Form:
    """Where the obtained token goes: bearer, or the header that is named."""
    _stubs(kind, written, params)
    if "header" not in written:
        if "template" in written:
            raise BadForm("template", "template: goes with header:")
        return Form(slots=(Slot(where="bearer"),), params=params)
    name = header_name("header", _text(written, "header"))
    template = written.get("template", "{value}")
    if not isinstance(template, str) or template.count("{value}") != 1 or not template.isascii():
        raise BadForm("template", "a template is text with {value} once")
    return Form(slots=(Slot(where="header", name=name, template=template, part=VALUE),), params=params)


def _stubs(kind: str, written: Written, params: dict[str, Any]) -> None:
    if "stub" in written:
        offered, found = STUBS.get(kind, ()), _list(written, "stub", MAX_LIST)
        if any(name not in offered for name in found):
            raise BadForm("stub", f"the stub endpoints of kind: {kind} are: {', '.join(offered) or 'none'}")
        params["stub"] = found


def _text(written: Written, key: str) -> str:
    value = written.get(key)
    if value is None:
        raise BadForm(key, f"this kind needs {key}:")
    if not isinstance(value, str) or not value:
        raise BadForm(key, "expected text (a number stands in quotes)")
    return value


def _matching(written: Written, key: str, pattern: re.Pattern[str], complaint: str) -> str:
    text = _text(written, key)
    if not pattern.match(text):
        raise BadForm(key, complaint)
    return text


def _word(written: Written, key: str, allowed: tuple[str, ...]) -> str:
    text = _text(written, key)
    if text not in allowed:
        raise BadForm(key, f"one of {', '.join(allowed)}")
    return text


def _url(written: Written, key: str) -> str:
    text = _text(written, key)
    try:
        place_of(text)
    except InvalidName as error:
        raise BadForm(key, f"an endpoint is https://HOST/PATH, without query and userinfo: {error}") from None
    return text


def _optional(written: Written, params: dict[str, Any], key: str) -> None:
    if key in written:
        params[key] = _narrowing(key, _matching(written, key, _TEXT, f"{key}: is one line of plain text"))


def _narrowing(key: str, text: str) -> str:
    if "${" in SANDBOX_REFERENCE.sub("", text):
        raise BadForm(key, "only ${sandbox.name} is substituted")
    return text


def _scopes(written: Written, params: dict[str, Any]) -> None:
    if "scopes" in written:
        params["scopes"] = _list(written, "scopes", MAX_LIST)
        if any(not _SCOPE.match(scope) for scope in params["scopes"]):
            raise BadForm("scopes", "a scope is one word (RFC 6749 section 3.3)")


def _words(written: Written, key: str) -> list[str]:
    found = _list(written, key, MAX_LIST)
    if any(not _WORD.match(word) for word in found):
        raise BadForm(key, "exact names in lower case: a signature is made for one region and one service")
    return found


def _list(written: Written, key: str, most: int) -> list[str]:
    value = written.get(key)
    if value is None:
        raise BadForm(key, f"this kind needs {key}:")
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) and item for item in value):
        raise BadForm(key, "expected a list of texts")
    if len(set(value)) != len(value) or len(value) > most:
        raise BadForm(key, f"at most {most}, each once")
    return [_narrowing(key, item) for item in value]


_DURATION = re.compile(r"([1-9][0-9]{0,4})(s|m|h)\Z")


def _seconds(value: Any) -> int | None:
    match = _DURATION.match(value) if isinstance(value, str) else None
    return None if match is None else int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _session_policy(value: Any) -> str:
    """A mapping as compact JSON. In its texts `${sandbox.x}` and AWS's own variables may stand."""
    if not isinstance(value, Mapping):
        raise BadForm("session_policy", "a session policy is a mapping with Version and Statement")
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        raise BadForm("session_policy", "a session policy holds text, numbers, lists and mappings") from None
    if "${" in _POLICY_VARIABLE.sub("", text):
        raise BadForm("session_policy", "only ${sandbox.name} and AWS's own variables, ${aws:...}, stand in it")
    if len(text) > MAX_SESSION_POLICY:
        raise BadForm("session_policy", f"a session policy has at most {MAX_SESSION_POLICY} characters")
    return text
