"""Credentials with an exchange, as credentials.yaml writes them: what does not fit together does not load."""

from __future__ import annotations

import pytest

from rules.compile import compile_policy
from rules.exchanges import endpoint_of, is_exchange, token_endpoint
from rules.parse import Parsed, PolicyError, Sources, parse_sources
from rules.schema import credentials_schema

POLICY = """\
version: 1
roles:
  agent:
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/**"], credential: c}
"""

HEAD = """\
version: 1
destinations:
  clear.test: {addresses: [192.0.2.1/32], scheme: http}
  secure.test: {addresses: [192.0.2.2/32]}
credentials:
  c:
    hosts: [api.test]
    owner: team
    placeholder: {env: TOKEN, shape: "t_{24}"}
"""

GOOD = {
    "client credentials": """
        kind: oauth2
        token_url: "https://t.test/token"
        grant: client_credentials
        secret: {client_id: "env:ID", client_secret: "store:s"}
        scopes: ["a:${sandbox.owner}"]
        stub: [oauth2-token]""",
    "a refresh token": """
        kind: oauth2
        token_url: "https://t.test:8443/token"
        grant: refresh_token
        secret: {client_id: "env:ID", refresh_token: "store:r/${sandbox.owner}"}
        header: X-Token""",
    "clear text where it is said": """
        kind: oauth2
        token_url: "http://clear.test/token"
        grant: jwt_bearer
        issuer: me
        secret: {private_key: "file:/run/key.pem"}""",
    "an app": """
        kind: github-app
        app_id: "1"
        installation_id: "2"
        repositories: ["${sandbox.repository}"]
        permissions: {contents: read}
        secret: {private_key: "store:app"}""",
    "a service account": """
        kind: google
        scopes: [a]
        secret: "store:account"
        stub: [google-token, gce-metadata]""",
    "an application": """
        kind: azure
        tenant: contoso.test
        secret: {client_id: "env:ID", certificate: "file:/c.pem", private_key: "store:k"}""",
    "a role": """
        kind: aws-sts
        role_arn: "arn:aws:iam::123456789012:role/r"
        regions: [eu-central-1]
        aws_services: [s3]
        session_policy: {Version: "2012-10-17", Statement: [{Effect: Allow, Resource: "x/${sandbox.owner}/*"}]}
        secret: {access_key_id: "env:A", secret_access_key: "store:b"}
        stub: [ec2-metadata, ecs-metadata]""",
}

BAD = {
    "a refresh token that cannot be written back": (
        """
        kind: oauth2
        token_url: "https://t.test/token"
        grant: refresh_token
        secret: {client_id: "env:ID", refresh_token: "env:REFRESH"}""",
        "lies in the store",
    ),
    "a grant without its part": (
        """
        kind: oauth2
        token_url: "https://t.test/token"
        grant: refresh_token
        secret: {client_id: "env:ID", client_secret: "store:s"}""",
        "needs the part refresh_token",
    ),
    "a client that proves nothing": (
        """
        kind: oauth2
        token_url: "https://t.test/token"
        grant: client_credentials
        secret: {client_id: "env:ID"}""",
        "needs a proof",
    ),
    "a proof that is not there": (
        """
        kind: oauth2
        token_url: "https://t.test/token"
        grant: client_credentials
        client_auth: private_key_jwt
        secret: {client_id: "env:ID", client_secret: "store:s"}""",
        "client_auth: private_key_jwt needs",
    ),
    "a part of another grant": (
        """
        kind: oauth2
        token_url: "https://t.test/token"
        grant: client_credentials
        secret: {client_id: "env:ID", client_secret: "store:s", refresh_token: "store:r"}""",
        "goes with grant: refresh_token",
    ),
    "clear text": (
        """
        kind: oauth2
        token_url: "http://secure.test/token"
        grant: client_credentials
        secret: {client_id: "env:ID", client_secret: "store:s"}""",
        "over https",
    ),
    "a part that the kind has not": (
        """
        kind: google
        scopes: [a]
        secret: {key: "store:account"}""",
        "has no part key",
    ),
    "another kind's key": (
        """
        kind: azure
        tenant: t
        scopes: [a]
        secret: {client_id: "env:ID", client_secret: "store:s"}""",
        "scopes: does not go with kind: azure",
    ),
    "an application without a proof": (
        """
        kind: azure
        tenant: t
        secret: {client_id: "env:ID", private_key: "store:s"}""",
        "needs the part client_secret, or certificate and private_key",
    ),
    "a stub of another kind": (
        """
        kind: github-app
        app_id: "1"
        installation_id: "2"
        stub: [oauth2-token]
        secret: {private_key: "store:app"}""",
        "stub: does not go with kind: github-app",
    ),
}


def parse(entry: str) -> Parsed:
    lines = [line.removeprefix("    ") for line in entry.splitlines() if line]
    written = HEAD + "\n".join(lines) + "\n"
    return parse_sources(Sources(policy={"policy.yaml": POLICY}, credentials=("credentials.yaml", written)))


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_together_does_not_load(case: str) -> None:
    """Each with the sentence that says what would."""
    entry, sentence = BAD[case]
    with pytest.raises(PolicyError) as caught:
        parse(entry)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("case", sorted(GOOD))
def test_what_is_whole_loads_and_compiles_to_the_same(case: str) -> None:
    """A worker that compiles the document knows where a stub stands and never a reference."""
    parsed = parse(GOOD[case])
    definition = compile_policy(parsed.document).credentials["c"]  # type: ignore[index]
    assert is_exchange(definition.kind)
    assert endpoint_of(definition.kind, definition.params)
    assert "store:" not in repr(parsed.document)
    assert "file:" not in repr(parsed.document)


def test_a_stub_stands_exactly_where_the_providers_client_asks() -> None:
    """At the whole path: of Entra's it names the tenant."""
    for case, where in {
        "client credentials": ("https://t.test", "/token"),
        "a refresh token": ("https://t.test:8443", "/token"),
        "a service account": ("https://oauth2.googleapis.com", "/token"),
        "an application": ("https://login.microsoftonline.com", "/contoso.test/oauth2/v2.0/token"),
    }.items():
        definition = compile_policy(parse(GOOD[case]).document).credentials["c"]  # type: ignore[index]
        found = token_endpoint(definition.kind, definition.params)
        assert found is not None
        assert (str(found[0]), found[1]) == where


def test_the_schema_knows_every_kind_with_an_exchange() -> None:
    """An editor that uses it offers them."""
    assert "aws-sts" in repr(credentials_schema())
