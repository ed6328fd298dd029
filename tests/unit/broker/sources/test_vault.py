"""HashiCorp Vault and OpenBao: logins and leases, beyond what every source promises (test_contract.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.sources.base import Document, SourceError
from tests.support.origins import Origin
from tests.support.secretservers import HOST, Asking, SpokenVault, VaultServer

APPROLE = "auth: {approle: {role_id: 'env:R', secret_id: 'env:S'}}"
DYNAMIC = f"s: {{kind: vault-dynamic, address: 'https://{HOST}', {APPROLE}}}"


class Spoken(SpokenVault):
    """With whatever else the environment has."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "J": self.server.jwt, "T": "root-canary-0123456789"}


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with Origin(HOST) as made:
        yield made
        assert not made.faults


async def asking(tmp_path: Path, origin: Origin, text: str = "") -> tuple[Asking, VaultServer]:
    made = await Asking(tmp_path, origin, Spoken(origin), text=text).start()
    server = made.server
    assert isinstance(server, VaultServer)
    server.put("shop", token="value-canary-0123456789")
    server.put("ro", any="x")
    return made, server


async def test_a_wrong_secret_id_opens_nothing(tmp_path: Path, origin: Origin) -> None:
    """The refusal says that it was the login; nothing else is asked for."""
    made, server = await asking(tmp_path, origin)
    server.role = ("role-1", "another")
    with pytest.raises(SourceError, match="source-refused") as caught:
        await made.value("shop")
    assert "login" in caught.value.detail
    assert "auth:" in caught.value.remedy
    assert server.asked == ["POST /v1/auth/approle/login"]


async def test_the_service_account_of_a_pod_opens_it(tmp_path: Path, origin: Origin) -> None:
    """The token is read anew at each login: Kubernetes replaces it."""
    token = tmp_path / "token"
    text = (
        f"s: {{kind: vault, address: 'https://{HOST}', auth: {{kubernetes: {{role: exeat, token: 'file:{token}'}}}}}}"
    )
    made, server = await asking(tmp_path, origin, text)
    with pytest.raises(SourceError, match="source-missing"):
        await made.value("shop")
    token.write_text("expired-jwt-0123456789")
    token.chmod(0o600)
    with pytest.raises(SourceError, match="source-refused"):
        await made.value("shop")
    token.write_text(server.jwt)
    assert await made.value("shop") == b"value-canary-0123456789"


async def test_a_login_is_renewed_in_time_and_made_anew_when_it_is_over(tmp_path: Path, origin: Origin) -> None:
    """From two thirds of its life on it is renewed; one that cannot be, or ended, is replaced."""
    made, server = await asking(tmp_path, origin)
    await made.value("shop")
    made.boot += 2399
    await made.value("shop")
    assert server.renewals == []
    made.boot += 2
    await made.value("shop")
    assert server.renewals == ["self"]
    assert len([line for line in server.asked if "approle" in line]) == 1
    made.boot += 3601
    await made.value("shop")
    assert len([line for line in server.asked if "approle" in line]) == 2
    server.renewable = False
    made.boot += 3601
    await made.value("shop")
    made.boot += 3000
    await made.value("shop")
    assert server.renewals == ["self"]
    assert len([line for line in server.asked if "approle" in line]) == 4


async def test_a_login_that_was_revoked_is_made_anew_once(tmp_path: Path, origin: Origin) -> None:
    """Then the answer counts: a role without the right is not asked for in a circle."""
    made, server = await asking(tmp_path, origin)
    await made.value("shop")
    server.tokens.clear()
    assert await made.value("shop") == b"value-canary-0123456789"
    server.how = "refuse"
    count = len(server.asked)
    with pytest.raises(SourceError, match="source-refused"):
        await made.value("shop")
    assert server.asked[count:] == ["GET /v1/kv/data/shop", "POST /v1/auth/approle/login", "GET /v1/kv/data/shop"]


async def test_a_version_that_was_deleted_is_missing(tmp_path: Path, origin: Origin) -> None:
    """A named version is asked for by name, and another than the newest is another document."""
    made, server = await asking(tmp_path, origin)
    server.put("shop", token="second-canary-0123456789")
    document = await made.document("s:kv/shop?version=2#token")
    assert (document.version, document.fields["token"]) == ("2", b"second-canary-0123456789")
    with pytest.raises(SourceError, match="source-missing"):
        await made.document("s:kv/shop?version=1#token")
    with pytest.raises(SourceError, match="source-refused") as caught:
        await made.document("s:kv#token")
    assert "MOUNT/PATH" in caught.value.remedy


async def test_stopping_gives_the_login_back(tmp_path: Path, origin: Origin) -> None:
    """And only our own: a token that was given to us is somebody else's to revoke."""
    made, server = await asking(tmp_path, origin)
    await made.value("shop")
    await made.sources.close()
    assert server.revoked == ["self"]
    text = f"s: {{kind: vault, address: 'https://{HOST}', auth: {{token: 'env:T'}}}}"
    made, server = await asking(tmp_path, origin, text)
    assert await made.value("shop") == b"value-canary-0123456789"
    await made.sources.close()
    assert server.revoked == []


# --- leases


async def lease(made: Asking, before: Document | None = None) -> Document:
    return await made.document("s:db/creds/ro#password", before)


async def test_a_lease_has_all_parts_of_one_making(tmp_path: Path, origin: Origin) -> None:
    """User and password come together, for as long as the lease says and the login lives."""
    made, server = await asking(tmp_path, origin, DYNAMIC)
    document = await lease(made)
    assert document.fields["username"] == b"v-made"
    assert document.fields["password"].startswith(b"made-password")
    assert document.lasts == server.lease_seconds
    server.lease_seconds = 10_000
    assert (await lease(made)).lasts == server.life
    assert made.sources.made_for_one("s")


async def test_what_gives_no_lease_is_refused(tmp_path: Path, origin: Origin) -> None:
    """A stored secret is not a made one: nothing could be revoked with the sandbox."""
    made, _ = await asking(tmp_path, origin, DYNAMIC)
    with pytest.raises(SourceError, match="source-unreadable") as caught:
        await made.document("s:kv/data/shop#token")
    assert "kind: vault" in caught.value.remedy
    with pytest.raises(SourceError, match="source-missing"):
        await made.document("s:db/creds/none#password")


async def test_a_lease_is_renewed_or_made_anew(tmp_path: Path, origin: Origin) -> None:
    """The same one with more time, while Vault gives it; then another one."""
    made, server = await asking(tmp_path, origin, DYNAMIC)
    first = await lease(made)
    again = await lease(made, first)
    assert (again.lease, again.fields) == (first.lease, first.fields)
    assert server.renewals == [first.lease]
    server.greatest = True
    other = await lease(made, again)
    assert other.lease != first.lease
    server.leases.clear()
    server.greatest = False
    third = await lease(made, other)
    assert third.lease not in (first.lease, other.lease)


async def test_a_lease_is_revoked_once(tmp_path: Path, origin: Origin) -> None:
    """One that is gone already is no fault; after the login was given back there is nothing left to revoke."""
    made, server = await asking(tmp_path, origin, DYNAMIC)
    document = await lease(made)
    opened, _ = made.sources.named("s:db/creds/ro#password", None)
    await opened.source.revoke(document)
    assert server.revoked == [document.lease]
    assert server.leases == {}
    await opened.source.revoke(document)
    other = await lease(made)
    await opened.source.close()
    count = len(server.asked)
    await opened.source.revoke(other)
    assert len(server.asked) == count


async def test_a_token_that_was_given_to_us_is_refused_once(tmp_path: Path, origin: Origin) -> None:
    """We cannot make another one: the answer counts."""
    made, server = await asking(
        tmp_path, origin, f"s: {{kind: vault, address: 'https://{HOST}', auth: {{token: 'env:T'}}}}"
    )
    server.tokens.clear()
    with pytest.raises(SourceError, match="source-refused"):
        await made.value("shop")
    assert server.asked == ["GET /v1/kv/data/shop"]
