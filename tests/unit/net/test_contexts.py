"""TLS contexts: who is not served, then sharing, bounds and what the contexts enforce."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime
import multiprocessing
import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from broker.vault.ca import CertificateAuthority
from net.contexts import ClientContexts, ContextUnavailable, ServerContexts, client_context, load_chain
from net.trust import SYSTEM_TRUST, ClientProof, TrustKey, TrustUnusable
from rules.names import Host
from tests.support.authority import Authority

NOW = datetime.datetime.now(datetime.UTC).timestamp()
AUTHORITY = CertificateAuthority.create(now=NOW, installation="test", node="node")
KEY = ec.generate_private_key(ec.SECP256R1())
API = Host.parse("api.test")


class Vault:
    """Mints what is asked for, and counts; `pause` holds answers back."""

    def __init__(self, key: ec.EllipticCurvePrivateKey = KEY) -> None:
        self.asked: list[str] = []
        self.key = key
        self.pause = asyncio.Event()
        self.pause.set()

    async def __call__(self, host: Host, owner: tuple[str, str] | None) -> str:
        self.asked.append(host.text)
        await self.pause.wait()
        return AUTHORITY.mint(host, self.key.public_key(), NOW)


async def test_a_vault_that_hangs_is_given_up() -> None:
    """No chain within the bound is ContextUnavailable, and the next try asks again."""
    vault = Vault()
    vault.pause.clear()
    contexts = ServerContexts(KEY, vault, now=lambda: NOW, seconds=0.01)
    with pytest.raises(ContextUnavailable):
        await contexts.get(API)
    vault.pause.set()
    contexts = ServerContexts(KEY, vault, now=lambda: NOW)
    await contexts.get(API)
    assert vault.asked == ["api.test", "api.test"]


async def test_a_chain_for_another_key_or_none_at_all_is_refused() -> None:
    """Only a chain that fits the worker's key makes a context; a bad answer is not kept."""
    contexts = ServerContexts(KEY, Vault(ec.generate_private_key(ec.SECP256R1())), now=lambda: NOW)
    with pytest.raises(ContextUnavailable):
        await contexts.get(API)

    async def nothing(host: Host, owner: object) -> str:
        return "canary"

    contexts = ServerContexts(KEY, nothing, now=lambda: NOW)
    with pytest.raises(ContextUnavailable) as raised:
        await contexts.get(API)
    assert "canary" not in str(raised.value)
    assert len(contexts) == 0


async def test_a_fault_of_the_source_reaches_every_waiter() -> None:
    """What the vault's link raises is not turned into a context."""

    async def broken(host: Host, owner: object) -> str:
        raise RuntimeError("link lost")

    contexts = ServerContexts(KEY, broken, now=lambda: NOW)
    outcomes = await asyncio.gather(*(contexts.get(API) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 3


async def test_concurrent_waiters_share_one_chain_and_one_context() -> None:
    """Twenty connections to one host cost one leaf, also when one of the waiters gives up."""
    vault = Vault()
    vault.pause.clear()
    contexts = ServerContexts(KEY, vault, now=lambda: NOW)
    waiting = [asyncio.ensure_future(contexts.get(API)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    vault.pause.set()
    made = {id(context) for context in await asyncio.gather(*waiting[1:])}
    assert len(made) == 1
    assert vault.asked == ["api.test"]


async def test_one_sandboxs_refusal_is_not_anothers() -> None:
    """While box1's request for a leaf is refused, box2 waiting for the same host is asked for and served by itself."""
    held = asyncio.Event()

    async def budgeted(host: Host, owner: tuple[str, str] | None) -> str:
        await held.wait()
        if owner == ("t", "box1"):
            raise ContextUnavailable("limit-reached")
        return AUTHORITY.mint(host, KEY.public_key(), NOW)

    contexts = ServerContexts(KEY, budgeted, now=lambda: NOW)
    first = asyncio.ensure_future(contexts.get(API, owner=("t", "box1")))
    second = asyncio.ensure_future(contexts.get(API, owner=("t", "box2")))
    await asyncio.sleep(0)
    held.set()
    with pytest.raises(ContextUnavailable):
        await first
    made = await second
    assert await contexts.get(API, owner=("t", "box1")) is made


async def test_contexts_are_bounded_least_recently_used_first_out() -> None:
    """Beyond the capacity the host not asked for longest is forgotten."""
    vault = Vault()
    contexts = ServerContexts(KEY, vault, now=lambda: NOW, capacity=2)
    a, b, c = (Host.parse(f"{name}.api.test") for name in "abc")
    for host in (a, b, a, c, a):
        await contexts.get(host)
    assert vault.asked == [a.text, b.text, c.text]
    await contexts.get(b)
    assert vault.asked[-1] == b.text
    assert len(contexts) == 2


async def test_a_context_ends_a_day_before_its_leaf_and_with_the_authority() -> None:
    """An old leaf is replaced before it expires; `clear` forgets every one."""
    vault, now = Vault(), [NOW]
    contexts = ServerContexts(KEY, vault, now=lambda: now[0])
    await contexts.get(API)
    now[0] = NOW + 90 * 86400
    await contexts.get(API)
    assert len(vault.asked) == 2
    now[0] = NOW
    contexts.clear()
    await contexts.get(API)
    assert len(vault.asked) == 3


async def test_a_context_serves_its_host_to_a_strict_client_and_speaks_only_http1() -> None:
    """The handshake succeeds against our root alone and settles on http/1.1; h2 only where it was asked for."""
    contexts = ServerContexts(KEY, Vault(), now=lambda: NOW)
    for alpn, expected in ((("http/1.1",), "http/1.1"), (("h2",), "h2")):
        context = await contexts.get(API, alpn)
        client = ssl.create_default_context(cadata=AUTHORITY.root_pem)
        client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        client.set_alpn_protocols(["h2", "http/1.1"])
        a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
        near = client.wrap_bio(a, b, server_hostname="api.test")
        far = context.wrap_bio(b, a, server_side=True)
        for _ in range(4):
            for end in (near, far):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        assert near.selected_alpn_protocol() == expected


@pytest.mark.parametrize("pem", ["", "canary", "-----BEGIN CERTIFICATE-----\ncanary\n-----END CERTIFICATE-----\n"])
async def test_an_unusable_ca_is_a_fault_and_not_an_open_context(pem: str) -> None:
    """No certificate in `ca:` never means that anything is believed; the fault is not kept."""
    contexts = ClientContexts()
    for _ in range(2):
        with pytest.raises(TrustUnusable):
            await contexts.get(TrustKey(ca_pem=pem))


async def test_a_client_certificate_that_fits_no_key_makes_no_context() -> None:
    """Two halves of two pairs, or no PEM at all: TrustUnusable with a fixed sentence, and nothing of either in it."""
    authority = Authority()
    trust = TrustKey(ca_pem=authority.pem)
    one, other = (authority.issue(("client.test",), usage="client") for _ in range(2))
    key, chain = one.partition(b"-----BEGIN CERTIFICATE-----")[0], other[other.index(b"-----BEGIN CERTIFICATE-----") :]
    for proof in (ClientProof.of(key, chain), ClientProof.of(b"no key", b"no chain")):
        with pytest.raises(TrustUnusable, match="cannot be used together"):
            await ClientContexts().get(trust, proof)


async def test_a_context_with_a_key_is_for_one_connection() -> None:
    """It is never kept or shared; what it proves is told by a digest, and shown nowhere."""
    authority = Authority()
    trust = TrustKey(ca_pem=authority.pem)
    pem = authority.issue(("client.test",), usage="client")
    key, begin, chain = pem.partition(b"-----BEGIN CERTIFICATE-----")
    proof = ClientProof.of(key, begin + chain)
    contexts = ClientContexts()
    with_key = await contexts.get(trust, proof)
    assert with_key is not await contexts.get(trust, proof)
    assert with_key is not await contexts.get(trust)
    assert await contexts.get(trust) is await contexts.get(trust)
    assert proof == ClientProof(digest=proof.digest, pem=b"")
    assert "PRIVATE" not in repr(proof)


async def test_client_contexts_verify_and_are_shared_by_trust_set() -> None:
    """Equal trust sets share one context; every one verifies chain and name, strictly, from TLS 1.2 on."""
    contexts = ClientContexts()
    trust = TrustKey(ca_pem=Authority().pem)
    first, second = await asyncio.gather(contexts.get(trust), contexts.get(TrustKey(ca_pem=trust.ca_pem)))
    assert first is second
    for context in (first, await contexts.get(SYSTEM_TRUST)):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.check_hostname
        assert not context.hostname_checks_common_name
        assert context.verify_flags & ssl.VerifyFlags.VERIFY_X509_STRICT
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert first.cert_store_stats()["x509"] == 1


async def test_a_destinations_ca_is_believed_for_it_alone() -> None:
    """The context of an extra CA holds that certificate and no system root, and the other way round."""
    authority = Authority()
    own = client_context(TrustKey(ca_pem=authority.pem))
    system = client_context(SYSTEM_TRUST)
    assert [cert["subject"] for cert in own.get_ca_certs()] == [((("commonName", "Test origins"),),)]
    assert ((("commonName", "Test origins"),),) not in [cert["subject"] for cert in system.get_ca_certs()]


async def test_a_new_policy_drops_the_trust_sets_it_no_longer_names() -> None:
    """After `prepare` only the named sets are kept."""
    contexts = ClientContexts()
    old, new = TrustKey(ca_pem=Authority().pem), TrustKey(ca_pem=Authority().pem)
    before = await contexts.get(old)
    await contexts.prepare(frozenset({new}))
    assert await contexts.get(old) is not before


def _load_as_nobody(pem: bytes, results: multiprocessing.SimpleQueue[str]) -> None:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem)
        results.put("loaded")
    except BaseException as fault:
        results.put(repr(fault))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_chain_loads_without_a_file_in_a_hardened_unprivileged_process(tmp_path: Path, monkeypatch) -> None:
    """memfd works although /proc/self is not ours to the outside once the process is not dumpable."""
    monkeypatch.chdir(tmp_path)
    pem = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem += AUTHORITY.mint(API, KEY.public_key(), NOW).encode()
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=_load_as_nobody, args=(pem, results))
    child.start()
    assert results.get() == "loaded"
    child.join(60)
    results.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_context_made_across_a_rotation_is_not_kept() -> None:
    """A chain that was asked for before `clear` serves its waiter and nobody after it."""
    vault = Vault()
    vault.pause.clear()
    contexts = ServerContexts(KEY, vault, now=lambda: NOW)
    waiting = asyncio.ensure_future(contexts.get(API))
    while not vault.asked:
        await asyncio.sleep(0)
    contexts.clear()
    vault.pause.set()
    await waiting
    assert len(contexts) == 0
