"""References to secrets, in both forms, and `sources:`: what is accepted, what each complaint says and never shows."""

from __future__ import annotations

import pytest

from rules.names import Destination, Host
from rules.policy import DestinationDef
from rules.reader import Node, Problems
from rules.secret_references import Reference, read_reference, split
from rules.secret_sources import KUBERNETES_TOKEN, SourceDef, read_sources

SOURCES = {
    "corp": "vault",
    "db": "vault-dynamic",
    "aws": "aws-secrets-manager",
    "ssm": "aws-parameter-store",
    "gcp": "gcp-secret-manager",
    "azure": "azure-key-vault",
    "op": "onepassword",
    "sops": "sops",
    "age": "age",
    "ring": "keyring",
    "helper": "exec",
}
CANARY = "canary-0123456789"


def read(text: str) -> str:
    problems = Problems()
    node = Node.load(f"secret: {text}\n", "credentials.yaml", problems).child("secret")
    found = ""
    with problems.collecting():
        found = read_reference(node, SOURCES)
    if problems.errors:
        raise ValueError("; ".join(map(str, problems.errors)))
    return found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CANARY, "never written here"),
        (f"'none:{CANARY}'", "never written here"),
        (f"'vault:kv/{CANARY}#f'", "never written here"),
        ("'store:../x'", "not a reference of that source"),
        ("'corp:kv/../sys/raw#x'", "not a reference of that source"),
        ("'corp:kv/./a#x'", "not a reference of that source"),
        ("'corp:kv//a#x'", "not a reference of that source"),
        ("'corp:#x'", "not a reference of that source"),
        ("'corp:kv/a#'", "not a field of corp:"),
        ("'corp:kv/a#../x'", "not a field of corp:"),
        ("'corp:kv/a?list=true#x'", "not for corp: (?version=... may stand there)"),
        ("'corp:kv/a?version=1&list=true#x'", "not for corp:"),
        ("'corp:kv/${env.X}#x'", "only ${sandbox.name} is substituted"),
        ("'db:creds/ro?version=1#x'", "nothing may stand there"),
        ("'ring:service'", "not a reference of that source"),
        ("'ring:a/b#c'", "not a field of ring:"),
        ("'op:vault/item/field'", "not a reference of that source"),
        ("'op://vault/field'", "not a reference of that source"),
        ("'sops:relative.yaml#a'", "not a reference of that source"),
        ("'helper:-rf'", "not a reference of that source"),
        ("'helper:a b'", "not a reference of that source"),
        ("'gcp:projects/other/secrets/x'", "not a reference of that source"),
        ("'azure:name/version'", "not a reference of that source"),
        ("'systemd:../x'", "not a reference of that source"),
        ("{path: a/b, field: c}", "says from:"),
        ("{from: corpp, path: a/b, field: c}", "did you mean corp?"),
        ("{from: corp, field: c}", "missing key path"),
        ("{from: corp, mount: kv, path: a, feild: c}", "did you mean field?"),
        ("{from: corp, mount: kv, path: 'a#b', field: c}", "holds no ? and no #"),
        ("{from: corp, mount: kv, path: 'a?version=1', field: c}", "holds no ? and no #"),
        ("{from: aws, name: a, version: v1, stage: AWSCURRENT}", "version: already says which one"),
        ("{from: env, name: lower-case}", "not a reference of that source"),
        ("[a, b]", "expected text"),
    ],
)
def test_what_is_no_reference(text: str, said: str) -> None:
    """Each complaint names what is wrong, and none repeats the text: it may be the secret, pasted."""
    with pytest.raises(ValueError) as caught:
        read(text)
    assert said in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "typed"),
    [
        ("env:API_KEY", "{from: env, name: API_KEY}"),
        ("file:/run/secrets/a#b?c", "{from: file, path: '/run/secrets/a#b?c'}"),
        ("store:shop/orders", "{from: store, name: shop/orders}"),
        ("systemd:shop-key", "{from: systemd, name: shop-key}"),
        ("corp:kv/team/github#token", "{from: corp, mount: kv, path: team/github, field: token}"),
        ("corp:kv/team/github?version=3#token", "{from: corp, path: kv/team/github, field: token, version: 3}"),
        ("corp:kv/${sandbox.owner}/github#token", "{from: corp, path: 'kv/${sandbox.owner}/github', field: token}"),
        ("db:database/creds/ro#password", "{from: db, mount: database, path: creds/ro, field: password}"),
        ("aws:prod/github-AbCdEf?stage=AWSPREVIOUS#token", "{from: aws, name: prod/github-AbCdEf, "
         "stage: AWSPREVIOUS, field: token}"),
        ("ssm:/prod/github/token", "{from: ssm, name: /prod/github/token}"),
        ("gcp:github-token?version=7", "{from: gcp, name: github-token, version: '7'}"),
        ("azure:github-token", "{from: azure, name: github-token}"),
        ("op://Team/GitHub bot/token", "{from: op, vault: Team, item: GitHub bot, field: token}"),
        ("op://Team/bot/login/code?attribute=otp", "{from: op, vault: Team, item: bot, section: login, field: code, "
         "attribute: otp}"),
        ("sops:/etc/exeat/keys.yaml#github.token", "{from: sops, path: /etc/exeat/keys.yaml, field: github.token}"),
        ("age:/etc/exeat/key.age", "{from: age, path: /etc/exeat/key.age}"),
        ("ring:github/bot", "{from: ring, service: github, user: bot}"),
        ("helper:team/github#token", "{from: helper, name: team/github, field: token}"),
    ],
)  # fmt: skip
def test_both_forms_are_one_reference(uri: str, typed: str) -> None:
    """What the vault works with is the text of the short form, whichever was written."""
    assert read(f"'{uri}'") == uri
    assert read(typed) == uri


def test_a_reference_is_taken_apart() -> None:
    """What is asked for, and which of its fields; for sources at hand the name is the whole rest."""
    assert split("corp:kv/a?version=2#f") == Reference(source="corp", document="kv/a?version=2", field="f")
    assert split("aws:a") == Reference(source="aws", document="a", field="")
    assert split("file:/a#b") == Reference(source="file", document="/a#b", field="")


# --- sources: --------------------------------------------------------------------------------------------------------


def sources(text: str, destinations: dict[str, DestinationDef] | None = None) -> dict[str, SourceDef]:
    problems = Problems()
    found = read_sources(Node.load(text, "credentials.yaml", problems), destinations or {})
    if problems.errors:
        raise ValueError("; ".join(map(str, problems.errors)))
    return found


TOKEN = "auth: {token: 'store:vault/token'}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file: {kind: exec, program: /bin/x}", "is a source already"),
        ("Corp: {kind: exec, program: /bin/x}", "lower-case letters"),
        ("a: {kind: valt}", "did you mean vault?"),
        ("a: corp", "a mapping with kind:"),
        (f"a: {{kind: vault, {TOKEN}}}", "missing key address"),
        ("a: {kind: vault, address: 'https://v.test'}", "missing key auth"),
        (f"a: {{kind: vault, address: 'http://v.test', {TOKEN}}}", "secrets would come in clear text"),
        (f"a: {{kind: vault, address: 'https://u@v.test', {TOKEN}}}", "expected https://host"),
        (f"a: {{kind: vault, address: 'https://v.test/?x=1', {TOKEN}}}", "expected https://host"),
        (f"a: {{kind: vault, address: v.test, {TOKEN}}}", "expected https://host"),
        (f"a: {{kind: vault, address: 'https://v.test/../x', {TOKEN}}}", "expected https://host"),
        (f"a: {{kind: vault, address: 'https://v.test', auth: {{token: {CANARY}}}}}", "never written here"),
        ("a: {kind: vault, address: 'https://v.test', auth: {token: 'b:kv/x#y'}}", "named by its place"),
        ("a: {kind: vault, address: 'https://v.test', auth: {token: 'store:${sandbox.owner}'}}", "for every sandbox"),
        ("a: {kind: vault, address: 'https://v.test', auth: {token: 'env:A', approle: {}}}", "says one way"),
        ("a: {kind: vault, address: 'https://v.test', auth: {ldap: {}}}", "no such way"),
        ("a: {kind: vault, address: 'https://v.test', auth: {approle: {role_id: 'env:A'}}}", "missing key secret_id"),
        (f"a: {{kind: vault, address: 'https://v.test', kv: {{'../sys': 1}}, {TOKEN}}}", "a mount is words"),
        (f"a: {{kind: vault, address: 'https://v.test', kv: {{kv: 3}}, {TOKEN}}}", "from 1 to 2"),
        (f"a: {{kind: vault, address: 'https://v.test', ttl: 40d, {TOKEN}}}", "a day at most"),
        (f"a: {{kind: vault, address: 'https://v.test', program: /x, {TOKEN}}}", "unknown key 'program'"),
        ("a: {kind: exec, program: helper}", "its absolute path"),
        ("a: {kind: exec, program: /opt/../bin/sh}", "its absolute path"),
        ("a: {kind: exec, program: /bin/x, arguments: 'get {name}'}", "expected a list"),
        ("a: {kind: exec, program: /bin/x, environment: [LD_PRELOAD]}", "steers how a program is loaded"),
        ("a: {kind: exec, program: /bin/x, environment: ['A=b']}", "names of variables"),
        ("a: {kind: age, program: /usr/bin/age, identity: key.txt}", "absolute path"),
        ("a: {kind: aws-secrets-manager, auth: {keys: {access_key_id: 'env:A', secret_access_key: 'env:B'}}}",
         "missing key region"),
        ("a: {kind: gcp-secret-manager, project: a/b, auth: {service_account: 'file:/x'}}", "one word"),
    ],
)  # fmt: skip
def test_what_is_no_source(text: str, said: str) -> None:
    """Each complaint says what would do; what may be a pasted secret is not repeated."""
    with pytest.raises(ValueError) as caught:
        sources(text)
    assert said in str(caught.value)
    assert CANARY not in str(caught.value)


def test_a_source_is_where_the_operator_says() -> None:
    """Defaults follow the region; a port under `destinations:` counts; clear text only where that says so."""
    keys = "auth: {keys: {access_key_id: 'env:A', secret_access_key: 'env:B'}}"
    found = sources(f"aws: {{kind: aws-secrets-manager, region: eu-central-1, {keys}}}")["aws"]
    host = Host.parse("secretsmanager.eu-central-1.amazonaws.com")
    assert found.places["address"].destination == Destination("https", host, 443)
    here = {"v.test": DestinationDef(host=Host.parse("v.test"), port=8200, scheme="http")}
    found = sources(f"a: {{kind: vault, address: 'http://v.test/edge', {TOKEN}}}", here)["a"]
    assert found.places["address"].destination == Destination("http", Host.parse("v.test"), 8200)
    assert found.places["address"].base == "/edge"


def test_ways_to_open_a_source_have_their_defaults() -> None:
    """Mount points and the service account's token need not be written."""
    text = "a: {kind: vault, address: 'https://v.test', kv: {team/kv: 1}, auth: {kubernetes: {role: exeat}}}"
    found = sources(text)["a"]
    assert found.secrets == {"token": KUBERNETES_TOKEN}
    assert found.settings == {"auth": "kubernetes", "role": "exeat", "mount": "kubernetes"}
    assert found.words == {"kv": ("team/kv=1",)}
    assert (found.ttl, found.failure_ttl, found.stale) == (300, 5, 0)
    helper = sources("h: {kind: exec, program: /usr/bin/helper, ttl: 10m, failure_ttl: 2s, stale: 1h}")["h"]
    assert helper.words["arguments"] == ("{name}",)
    assert (helper.ttl, helper.failure_ttl, helper.stale) == (600, 2, 3600)
