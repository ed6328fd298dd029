"""What stub endpoints answer: placeholders that the sandbox was given, and nothing that came from it."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.exchanges import read_exchange
from rules.facts import RequestFacts, Sandbox
from rules.names import CredentialRef, Host
from rules.placeholders import find, make
from rules.policy import CredentialDef, PlaceholderSpec, Policy
from rules.stubs import StubAnswer, answer, environment, find_stub, has_stub, leads_to_stub, seed

KEY = b"k" * 32
NOW = 1_800_000_000.0
BOX = Sandbox(tenant="t", id="sb_a", epoch=1, role="r", owner="o", agent="a", task="t")
OTHER = replace(BOX, id="sb_b")
ROLE = {"role_arn": "arn:aws:iam::123456789012:role/r", "regions": ["eu-central-1"], "aws_services": ["s3"]}


def credential(kind: str, written: dict[str, Any], shape: str = "tok_{24}", name: str = "c") -> CredentialDef:
    form = read_exchange(kind, written)
    return CredentialDef(
        name=CredentialRef(name),
        kind=kind,
        slot=form.slots[0],
        hosts=(Host("api.test"),),
        owner="o",
        placeholder=PlaceholderSpec(env="C", shape=shape),
        params=form.params,
        more_slots=form.slots[1:],
    )


OAUTH = credential(
    "oauth2", {"token_url": "https://t.test/token", "grant": "client_credentials", "stub": ["oauth2-token"]}
)
GOOGLE = credential("google", {"scopes": ["s1", "s2"], "stub": ["google-token", "gce-metadata"]})
IDENTITY = credential("google", {"audience": "https://run.test", "stub": ["google-token", "gce-metadata"]})
AWS = credential("aws-sts", {**ROLE, "stub": ["ec2-metadata", "ecs-metadata"]}, shape="AKIA{24}")
SILENT = credential("oauth2", {"token_url": "https://t.test/token", "grant": "client_credentials"})


def placeholder(definition: CredentialDef, box: Sandbox = BOX) -> str:
    return make(definition.placeholder.shape, seed(KEY, box, definition.name))


def policy(*definitions: CredentialDef) -> Policy:
    credentials = {definition.name: definition for definition in definitions}
    return Policy(digest="", document={}, roles={}, destinations={}, credentials=credentials)


def names(*definitions: CredentialDef, box: Sandbox = BOX) -> dict[str, bytes]:
    return {str(each.name): sha256(placeholder(each, box).encode()).digest() for each in definitions}


def facts(method: str, url: str, **headers: str) -> RequestFacts:
    scheme, _, rest = url.partition("://")
    fields = [("host", rest.partition("/")[0]), *((name.replace("_", "-"), value) for name, value in headers.items())]
    return RequestFacts.build(method=method, scheme=scheme, tunnel=None, target=url, headers=tuple(fields))  # type: ignore[arg-type]


def ask(
    definition: CredentialDef, request: RequestFacts, given_to: Sandbox = BOX, asking: Sandbox = BOX
) -> StubAnswer | None:
    """The answer to `asking`, of which the vault said that its placeholders are those of `given_to`."""
    known = names(definition, box=given_to)
    found = find_stub(policy(definition), known, request)
    return answer(found, request, asking, KEY, known, NOW) if found else None


def test_no_stub_where_none_was_asked_for_or_given() -> None:
    """A credential without `stub:`, and a sandbox without the credential: the request goes its ordinary way."""
    request = facts("POST", "https://t.test/token")
    assert ask(SILENT, request) is None
    assert find_stub(policy(OAUTH), {}, request) == ()
    assert not leads_to_stub(policy(OAUTH), {}, Host("t.test"), 443)
    assert leads_to_stub(policy(OAUTH), names(OAUTH), Host("t.test"), 443)
    assert not leads_to_stub(policy(OAUTH), names(OAUTH), Host("t.test"), 8443)


def test_a_name_exists_for_its_stub_and_for_no_other_sandbox() -> None:
    """Where `dns: strict` hides names, SDKs still find the places that are answered by us."""
    for definition, name in (
        (OAUTH, "t.test"),
        (GOOGLE, "metadata.google.internal"),
        (GOOGLE, "oauth2.googleapis.com"),
    ):
        assert has_stub(policy(definition), names(definition), Host(name))
        assert not has_stub(policy(definition), {}, Host(name))
    assert not has_stub(policy(OAUTH), names(OAUTH), Host("x.t.test"))


@pytest.mark.parametrize(
    "url",
    [
        "https://t.test/token/",
        "https://t.test/",
        "https://t.test/Token",
        "http://t.test/token",
        "https://t.test:8443/token",
    ],
)
def test_beside_the_exact_place_there_is_no_stub(url: str) -> None:
    """Another path, scheme or port is another place."""
    assert ask(OAUTH, facts("POST", url)) is None


def test_only_what_the_vault_gave_this_sandbox_is_said() -> None:
    """Where the pushed hash is not that of the derived placeholder, nothing is: it would be nobody's."""
    said = ask(OAUTH, facts("POST", "https://t.test/token"), given_to=OTHER)
    assert said is not None
    assert (said.status, find(said.body.decode())) == (400, ())


def test_a_token_url_gives_a_token_answer_whatever_is_presented() -> None:
    """RFC 6749 section 5.1; another method gives none."""
    said = ask(OAUTH, facts("POST", "https://t.test/token"))
    assert said is not None
    assert json.loads(said.body) == {"access_token": placeholder(OAUTH), "token_type": "Bearer", "expires_in": 3600}
    for method in ("GET", "PUT", "DELETE"):
        refused = ask(OAUTH, facts(method, "https://t.test/token"))
        assert refused is not None
        assert (refused.status, find(refused.body.decode())) == (405, ())


def test_google_has_an_id_token_where_the_credential_has_an_audience() -> None:
    """At the token endpoint and at the metadata server alike."""
    said = ask(IDENTITY, facts("POST", "https://oauth2.googleapis.com/token"))
    assert said is not None
    assert json.loads(said.body) == {"id_token": placeholder(IDENTITY)}
    base = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default"
    identity = ask(IDENTITY, facts("GET", f"{base}/identity?audience=x", metadata_flavor="Google"))
    assert identity is not None
    assert identity.body.decode() == placeholder(IDENTITY)
    none = ask(IDENTITY, facts("GET", f"{base}/token", metadata_flavor="Google"))
    assert none is not None
    assert none.status == 404


def test_the_metadata_server_of_google_wants_its_header() -> None:
    """And names one account, its scopes, and no more."""
    base = "http://metadata.google.internal/computeMetadata/v1"
    without = ask(GOOGLE, facts("GET", f"{base}/instance/service-accounts/default/token"))
    assert without is not None
    assert (without.status, find(without.body.decode())) == (403, ())
    for path, wanted in {
        "/instance/service-accounts/default/token": placeholder(GOOGLE),
        "/instance/service-accounts/default/email": "default@exeat.invalid",
        "/instance/service-accounts/default/?recursive=true": '"scopes":["s1","s2"]',
        "/project/project-id": "exeat",
    }.items():
        said = ask(GOOGLE, facts("GET", base + path, metadata_flavor="Google"))
        assert said is not None
        assert said.status == 200
        assert wanted in said.body.decode()
        assert ("metadata-flavor", "Google") in said.headers
    unknown = ask(GOOGLE, facts("GET", base + "/instance/attributes/ssh-keys", metadata_flavor="Google"))
    assert unknown is not None
    assert unknown.status == 404


def test_ec2_gives_keys_for_a_session_token_of_its_own_and_this_sandbox() -> None:
    """IMDSv2: without the PUT, or with another sandbox's session, nothing."""
    base = "http://169.254.169.254/latest"
    path = base + "/meta-data/iam/security-credentials/"
    began = ask(AWS, facts("PUT", base + "/api/token", x_aws_ec2_metadata_token_ttl_seconds="21600"))
    others = ask(AWS, facts("PUT", base + "/api/token"), given_to=OTHER, asking=OTHER)
    assert began is not None
    assert others is not None
    session = began.body.decode()
    assert session != others.body.decode()
    for headers in ({}, {"x_aws_ec2_metadata_token": "made-up"}, {"x_aws_ec2_metadata_token": others.body.decode()}):
        refused = ask(AWS, facts("GET", path + "c", **headers))
        assert refused is not None
        assert (refused.status, refused.body) == (401, b"")
    listed = ask(AWS, facts("GET", path, x_aws_ec2_metadata_token=session))
    assert listed is not None
    assert listed.body == b"c"
    keys = ask(AWS, facts("GET", path + "c", x_aws_ec2_metadata_token=session))
    assert keys is not None
    said = json.loads(keys.body)
    assert said["AccessKeyId"] == placeholder(AWS)
    assert said["Expiration"] == "2027-01-15T09:00:00Z"
    for rest in ("meta-data/placement/region", "dynamic/instance-identity/document"):
        region = ask(AWS, facts("GET", f"{base}/{rest}", x_aws_ec2_metadata_token=session))
        assert region is not None
        assert b"eu-central-1" in region.body
    missing = ask(AWS, facts("GET", base + "/user-data", x_aws_ec2_metadata_token=session))
    assert missing is not None
    assert missing.status == 404


def test_two_services_at_one_address_are_told_apart_by_the_header() -> None:
    """169.254.169.254 is EC2's and Google's."""
    known = names(AWS, replace(GOOGLE, name=CredentialRef("g")))
    both = policy(AWS, replace(GOOGLE, name=CredentialRef("g")))
    plain = facts("PUT", "http://169.254.169.254/latest/api/token")
    google = facts("GET", "http://169.254.169.254/computeMetadata/v1/project/project-id", metadata_flavor="Google")
    kinds = [answer(find_stub(both, known, each), each, BOX, KEY, known, NOW).stub.kind for each in (plain, google)]
    assert kinds == ["ec2-metadata", "gce-metadata"]


def test_the_environment_leads_to_the_stubs_and_holds_no_placeholder() -> None:
    """Only to those that the credential asks for."""
    assert environment(OAUTH) == environment(SILENT) == {}
    assert environment(AWS)["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] == "/exeat/c"
    assert environment(AWS)["AWS_EC2_METADATA_DISABLED"] == "false"
    assert environment(GOOGLE)["GCE_METADATA_HOST"] == "metadata.google.internal"


def test_derived_placeholders_differ_by_sandbox_epoch_name_and_key() -> None:
    """And are the same wherever they are derived."""
    made = {
        seed(KEY, BOX, "c"),
        seed(KEY, OTHER, "c"),
        seed(KEY, replace(BOX, epoch=2), "c"),
        seed(KEY, replace(BOX, tenant="u"), "c"),
        seed(KEY, BOX, "d"),
        seed(b"l" * 32, BOX, "c"),
    }
    assert len(made) == 6
    assert seed(KEY, BOX, "c") in made


_PATHS = st.lists(
    st.sampled_from(
        "latest computeMetadata v1 api token meta-data iam security-credentials c instance service-accounts default "
        "identity exeat x".split()
    ),
    max_size=7,
).map(lambda words: "/" + "/".join(words))


@given(
    definition=st.sampled_from([OAUTH, GOOGLE, IDENTITY, AWS]),
    host=st.sampled_from(
        ["http://169.254.169.254", "http://169.254.170.2", "http://metadata.google.internal", "https://t.test"]
    ),
    path=_PATHS,
    method=st.sampled_from(["GET", "PUT", "POST", "HEAD", "DELETE"]),
    flavor=st.sampled_from(["", "Google", "google"]),
)
def test_no_request_draws_anothers_placeholder(
    definition: CredentialDef, host: str, path: str, method: str, flavor: str
) -> None:
    """Whatever is asked, the only cores in an answer are this sandbox's own."""
    headers = {"metadata_flavor": flavor} if flavor else {}
    said = ask(definition, facts(method, host + path, **headers))
    own = set(find(placeholder(definition)))
    if said is not None:
        assert set(find(said.body.decode())) <= own
        assert said.status in (200, 400, 401, 403, 404, 405)
    other = ask(definition, facts(method, host + path, **headers), given_to=OTHER)
    assert other is None or find(other.body.decode()) == ()
