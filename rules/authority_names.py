"""Names under which authority travels: headers and query parameters, at any provider (RULINGS 4.2).

Those of the services are package data (AUTHORITY_FILE), written from the catalogue by `make docs` and compared by a
test: a process that needs only these names reads and parses no service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rules.service import ServiceDef

AUTHORITY_FILE = "authority.json"
"""In rules/services/."""


def authority_list(services: Mapping[str, ServiceDef]) -> str:
    """The text of AUTHORITY_FILE for `services`: the union of every auth slot that they describe, sorted."""
    headers = sorted({name for service in services.values() for name in service.auth_headers})
    query = sorted({name for service in services.values() for name in service.auth_query})
    return json.dumps({"headers": headers, "query": query}, indent=1) + "\n"


_KNOWN: Mapping[str, list[str]] = json.loads(
    (resources.files("rules") / "services" / AUTHORITY_FILE).read_text(encoding="utf-8")
)

_WELL_KNOWN_HEADERS = """
    authorization proxy-authorization cookie x-api-key api-key apikey x-apikey x-auth-token x-access-token
    x-authorization x-goog-api-key x-goog-iam-authorization-token x-serverless-authorization private-token job-token
    deploy-token x-gitlab-token x-github-token x-vault-token x-consul-token x-nomad-token x-figma-token
    x-shopify-access-token x-amz-security-token x-ms-authorization-auxiliary ocp-apim-subscription-key
    x-functions-key dd-api-key dd-application-key x-sentry-auth x-datadog-api-key
    x-honeycomb-team x-session-token
    x-token x-secret-key x-client-secret x-jwt-assertion
"""
_WELL_KNOWN_QUERY = """
    access_token api_key apikey api-key x-api-key auth auth_token authorization token id_token refresh_token
    client_secret client_assertion private_token job_token password passwd secret signature sig sv se sp sr st
    skoid sktid skt ske sks skv x-amz-signature x-amz-credential x-amz-security-token x-amz-algorithm
    x-goog-signature x-goog-credential x-goog-algorithm awsaccesskeyid googleaccessid key-pair-id policy jwt
    session_token sessionid
"""

AUTH_HEADERS: frozenset[str] = frozenset(_WELL_KNOWN_HEADERS.split()) | frozenset(_KNOWN["headers"])
"""Lower-case names of every header that is known to carry authority, at any provider (RULINGS 4.2)."""

AUTH_QUERY: frozenset[str] = frozenset(_WELL_KNOWN_QUERY.split()) | frozenset(_KNOWN["query"])
"""Lower-case query names that carry authority or belong to a signed URL; compare them in lower case."""
