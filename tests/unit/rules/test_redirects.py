"""Redirects: a declaration says whose places it means, and means nothing beside them."""

from __future__ import annotations

import pytest

from rules.catalogue import builtin_services, read_builtin, resolve_service
from rules.policy import Operation
from rules.redirects import MAX_URL, leads_to
from rules.service_file import CatalogueError, parse_service
from tests.support.rows import every_row

FILE = """\
version: 1
service: small
hosts:
  api: {host: api.small.example, mirror: ""}
  own: {host: "{shop}.shops.small.example", tenant: shop}
operations:
  items.read:
    effect: read
    why: Items.
    redirects: DECLARED
    requests:
      - {at: api, methods: [GET], paths: ["/items/{id}"]}
tests:
  - {allow: "GET https://api.small.example/items/1", operation: items.read, why: one item}
  - {deny: "POST https://api.small.example/items/1", why: a write}
"""
SIGNED = "query_keys: [X-Amz-Date, X-Amz-Signature]"


def declared(text: str) -> Operation:
    return parse_service(FILE.replace("DECLARED", text), "small.yaml").select("items.read")[0]


def problems(text: str) -> str:
    with pytest.raises(CatalogueError) as caught:
        parse_service(text, "small.yaml")
    return str(caught.value)


@every_row(
    ("text", "place", "sentence"),
    [
        ("true", "10:16", "a mapping is needed"),
        ("[]", "10:16", "at least one entry"),
        ("{path: /a/**}", "10:16", "missing key to"),
        ("{to: []}", "10:21", "at least one entry"),
        ("{to: [cdn.small.example], port: 8443}", "10:42", "unknown key"),
        ("{to: [192.0.2.7], path: /a/**}", "10:22", "never an address"),
        ('{to: ["[2001:db8::7]"], path: /a/**}', "10:22", "never an address"),
        ("{to: [exeat.internal], path: /a/**}", "10:22", "decided before policy"),
        ('{to: ["*.exeat.internal"], path: /a/**}', "10:22", "decided before policy"),
        ('{to: ["cdn.small.example:8443"]}', "10:22", "a target is a host"),
        ("{to: [https://cdn.small.example]}", "10:22", "a target is a host"),
        ("{to: [CDN.small.example]}", "10:22", "lower case"),
        ('{to: ["cdn.*.example"]}', "10:22", "a target is a host"),
        ('{to: ["*.com"], path: /a/**}', "10:22", "public suffix"),
        ('{to: ["**.s3.amazonaws.com"], path: /a/**}', "10:22", "public suffix"),
        ("{to: [cdn.small.example, cdn.small.example]}", "10:21", "each of them once"),
        ("{to: [cdn.small.example], path: a/**}", "10:48", "slash"),
        ("{to: [cdn.small.example], query_keys: any}", "10:54", "a list"),
        ("{to: [cdn.small.example], query_keys: [a, a]}", "10:54", "each of them once"),
        ("{to: [storage.googleapis.com]}", "10:16", "others may keep things there"),
        ("{to: [storage.googleapis.com], path: /**}", "10:16", "literal first segment"),
        ('{to: [storage.googleapis.com], path: "/{bucket}/**"}', "10:16", "literal first segment"),
        ("{to: [storage.googleapis.com], query_keys: [Expires]}", "10:16", "name the signature"),
        ("{to: [s3.amazonaws.com]}", "10:16", "others may keep things there"),
        ("{to: [cdn.small.example, cdn.other.example]}", "10:16", "cdn.other.example is not of this service's own"),
        ("{to: [smaller.example]}", "10:16", "others may keep things there"),
        ("[{to: [cdn.small.example]}, {to: [cdn.other.example]}]", "10:44", "others may keep things there"),
    ],
)
def test_a_declaration_that_opens_too_much_is_refused_where_it_stands(text: str, place: str, sentence: str) -> None:
    """Expect file:line:column and a sentence that says what is missing."""
    found = problems(FILE.replace("DECLARED", text))
    assert any(line.startswith(f"small.yaml:{place}:") and sentence in line for line in found.splitlines()), found


@pytest.mark.parametrize("effect", ["write", "execute", "disclose", "mint"])
def test_only_a_read_is_redirected(effect: str) -> None:
    """Expect an error for every other effect."""
    text = FILE.replace("effect: read", f"effect: {effect}").replace("DECLARED", "{to: [cdn.small.example]}")
    assert "small.yaml:10:16: only a read is redirected" in problems(text)


def test_a_host_of_many_tenants_is_not_the_services_own() -> None:
    """Expect that where a rule must bind a tenant, the service's own name does not tell whose place it is."""
    text = FILE.replace("DECLARED", "{to: [api.small.example]}").replace(
        "    why: Items.\n", '    why: Items.\n    bind: [item]\n    arguments: {item: "{id}"}\n'
    )
    assert "small.yaml:12:16: api.small.example is not of this service's own domain" in problems(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{to: [cdn.small.example]}", "the service's own domain"),
        ('{to: ["*.small.example", "**.cdn.small.example"]}', "wildcards below it"),
        ("{to: [storage.googleapis.com], path: /bucket-of-ours/**}", "the path names the bucket"),
        ("{to: [storage.googleapis.com], query_keys: [X-Goog-Signature]}", "a signature is asked for"),
        ("[{to: [cdn.small.example]}, {to: [cdn.other.example], path: /ours/**}]", "several declarations"),
    ],
)
def test_a_declaration_that_says_whose_places_it_means_is_taken(text: str, why: str) -> None:
    """Expect the operation to carry it."""
    assert declared(text).redirects, why


ELSEWHERE = [
    ("http://cdn.other.example/ours/a?X-Amz-Signature=1", "plain HTTP"),
    ("https://cdn.other.example:8443/ours/a?X-Amz-Signature=1", "another port"),
    ("https://192.0.2.7/ours/a?X-Amz-Signature=1", "an address"),
    ("https://a.cdn.other.example/ours/a?X-Amz-Signature=1", "a host below it"),
    ("https://cdn.other.example.attacker.example/ours/a?X-Amz-Signature=1", "a host that begins like it"),
    ("https://cdn.other.example@attacker.example/ours/a?X-Amz-Signature=1", "a user name that looks like it"),
    ("https://cdn.other.example/theirs/a?X-Amz-Signature=1", "another bucket"),
    ("https://cdn.other.example/ours/../theirs/a?X-Amz-Signature=1", "a way out of the bucket"),
    ("https://cdn.other.example/ours%2fa?X-Amz-Signature=1", "another spelling of the slash"),
    ("https://cdn.other.example/ours/a?X-Amz-Signature=1#x", "a fragment"),
    ("https://cdn.other.example/ours/a?X-Amz-Signature=1&note=secret", "a name that is not declared"),
    ("https://cdn.other.example/ours/a?X-Amz-Signature=1&X-Amz-Signature=2", "one name twice"),
    ("https://cdn.other.example/ours/a?x-amz-signature=1", "another case of the name"),
    ("https://cdn.other.example/ours/a?X-Amz-Date=1", "no signature where one is declared"),
    ("https://cdn.other.example/ours/a", "no query where a signature is declared"),
    ("https://cdn.other.example/ours/" + "a" * MAX_URL + "?X-Amz-Signature=1", "too long"),
    ("//cdn.other.example/ours/a?X-Amz-Signature=1", "no scheme"),
    ("/ours/a?X-Amz-Signature=1", "no host"),
    ("https://cdn.other.\u00e9xample/ours/a?X-Amz-Signature=1", "another letter than ASCII has"),
    ("", "nothing"),
]


@every_row(("location", "why"), ELSEWHERE)
def test_what_is_not_declared_is_not_meant(location: str, why: str) -> None:
    """Expect no for everything beside the declared place."""
    (spec,) = declared(f"{{to: [cdn.other.example], path: /ours/**, {SIGNED}}}").redirects
    assert not leads_to(spec, location), why


def test_what_is_declared_is_meant() -> None:
    """Expect yes for the declared place, with the port written and with fewer parameters."""
    (spec,) = declared(f"{{to: [cdn.other.example], path: /ours/**, {SIGNED}}}").redirects
    assert leads_to(spec, "https://cdn.other.example/ours/a/b?X-Amz-Date=1&X-Amz-Signature=2")
    assert leads_to(spec, "https://cdn.other.example:443/ours/a?X-Amz-Signature=2")


def test_without_query_keys_there_is_no_query() -> None:
    """Expect that a declaration which names none means addresses without one."""
    (spec,) = declared("{to: [cdn.small.example]}").redirects
    assert not leads_to(spec, "https://cdn.small.example/a?x=1")
    assert leads_to(spec, "https://cdn.small.example/a")


SAS = "sp=r&sv=2018-11-09&sr=b&spr=https&se=2026-02-22T15%3A30%3A41Z&sig=c2ln"
V4 = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=a%2Fb&X-Amz-Date=20260302T210014Z&X-Amz-Expires=1200"
V4 += "&X-Amz-SignedHeaders=host&X-Amz-Signature=00ff"

CATALOGUE = [
    (
        "github/release.download",
        f"https://release-assets.githubusercontent.com/github-production-release-asset/1/2-3?{SAS}&jwt=eyJ0",
        "https://release-assets.githubusercontent.com/another/1/2-3?sig=c2ln",
    ),
    (
        "github/archive.read",
        "https://codeload.github.com/acme/shop/tar.gz/refs/heads/main",
        "https://codeload.github.com/acme/shop/tar.gz/refs/heads/main?token=x",
    ),
    (
        "dockerhub/image.pull",
        f"https://production.cloudfront.docker.com/registry-v2/docker/registry/v2/blobs/sha256/aa/aabb/data?{V4}",
        f"https://attacker.s3.dualstack.us-east-1.amazonaws.com/registry-v2/docker/x?{V4}",
    ),
    (
        "ghcr/image.pull",
        f"https://pkg-containers.githubusercontent.com/ghcr1/blobs/sha256:aabb?{SAS}",
        "https://pkg-containers.githubusercontent.com/ghcr1/blobs/sha256:aabb",
    ),
    (
        "quay/image.pull",
        f"https://cdn01.quay.io/quayio-production-s3/sha256/5c/5c1b?{V4}&region=us-east-1&namespace=a&repo_name=b",
        f"https://cdn01.quay.io/another/sha256/5c/5c1b?{V4}",
    ),
    (
        "huggingface/file.download",
        f"https://cas-bridge.xethub.hf.co/xet-bridge-us/a/b?{V4}&X-Xet-Cas-Uid=public&x-id=GetObject",
        "https://cas-bridge.xethub.hf.co/xet-bridge-us/a/b",
    ),
    (
        "go/module.read",
        "https://storage.googleapis.com/proxy-golang-org-prod/0a-x.zip?Expires=1&GoogleAccessId=a&Signature=b",
        "https://storage.googleapis.com/attacker/evil.zip?Expires=1&GoogleAccessId=a&Signature=b",
    ),
    (
        "google-maven/artifact.read",
        "https://dl.google.com/dl/android/maven2/androidx/core/core/1.0.0/core-1.0.0.pom",
        "https://dl.google.com/another/core-1.0.0.pom",
    ),
    (
        "gradle/distribution.download",
        "https://github.com/gradle/gradle-distributions/releases/download/v9.0.0/gradle-9.0.0-bin.zip",
        "https://github.com/attacker/gradle-distributions/releases/download/v9.0.0/gradle-9.0.0-bin.zip",
    ),
]


@pytest.mark.parametrize(("name", "meant", "beside"), CATALOGUE, ids=[row[0] for row in CATALOGUE])
def test_the_catalogue_declares_where_downloads_lead(name: str, meant: str, beside: str) -> None:
    """Expect the provider's own storage to be declared, and what lies beside it not to be."""
    service, _, operation = name.partition("/")
    for op in builtin_services()[service].select(operation):
        assert not any(leads_to(spec, beside) for spec in op.redirects)
        assert any(leads_to(spec, meant) for spec in op.redirects)


def test_every_declaration_of_the_catalogue_is_checked() -> None:
    """Expect what reading with all checks makes to be what reading without them makes."""
    for file, text in read_builtin().items():
        if file.endswith(".yaml"):
            checked = parse_service(text, file)
            packaged = builtin_services()[checked.name]
            assert [op.redirects for op in packaged.operations] == [op.redirects for op in checked.operations]


def test_what_lies_under_a_base_of_ones_own_is_declared_by_nobody() -> None:
    """Expect a service made by `like:` to redirect nowhere: its storage is another's than the public one's."""
    mirrored = resolve_service(builtin_services(), "modules", "go", "https://modules.corp.example")
    assert mirrored.operations
    assert not any(op.redirects for op in mirrored.operations)
