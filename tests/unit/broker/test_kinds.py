"""Every kind: the client's authority goes first, ours is set exactly once, and nothing renders the secret."""

from __future__ import annotations

import base64
import io
import traceback

import pytest
import rich.console
import rich.traceback
import structlog

from broker.credentials import KINDS, Injection, KindFault, Outgoing, inject
from broker.credentials import apply as apply_kind
from broker.vault.secret import Secret
from net.process import complain
from rules.names import CredentialRef, Host
from rules.placeholders import make
from rules.policy import CredentialDef, PlaceholderSpec, Slot

CANARY = b"canary-0123456789+/="
PLACEHOLDER = make("sk_{24}", bytes(range(32)))
FOREIGN = (
    ("authorization", "Bearer mine"),
    ("cookie", "session=mine"),
    ("x-api-key", "mine"),
    ("private-token", "mine"),
    ("accept", "application/json"),
)


def definition(kind: str, slot: Slot, username: str | None = None) -> CredentialDef:
    return CredentialDef(
        name=CredentialRef("c"),
        kind=kind,  # type: ignore[arg-type]  # a table of kinds
        slot=slot,
        hosts=(Host("a.example"),),
        owner="o",
        placeholder=PlaceholderSpec(env="C", shape="sk_{24}"),
        username=username,
    )


TABLE = {
    "bearer": definition("bearer", Slot(where="bearer")),
    "basic": definition("basic", Slot(where="basic"), username="robot"),
    "header": definition("header", Slot(where="header", name="X-Api-Key", template="key={value}")),
    "query": definition("query", Slot(where="query", name="api_key")),
}


def outgoing(target: str = "/", headers: tuple[tuple[str, str], ...] = ()) -> Outgoing:
    return Outgoing(method="GET", authority="a.example", target=target, headers=headers, sent=headers)


def apply(made: CredentialDef, held: Secret, target: str, headers: tuple[tuple[str, str], ...]) -> Injection:
    return apply_kind(made, {"value": held}, outgoing(target, headers))


def secret(value: bytes = CANARY) -> Secret:
    return Secret(value, name="c", scrub=False)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("value", [b"a\x00bcdefghijklm", b"caf\xc3\xa9-0123456789", b" leading-0123456789"])
def test_a_secret_that_cannot_stand_in_a_header_is_refused(kind, value) -> None:
    """Control bytes never get this far; others that a header cannot carry are refused, never cut (B098)."""
    try:
        held = secret(value)
    except Exception:
        return
    if kind == "query":
        assert inject(outgoing(), apply(TABLE[kind], held, "/", ())).target.isascii()
        return
    with pytest.raises(KindFault) as caught:
        apply(TABLE[kind], held, "/", ())
    assert "0123456789" not in str(caught.value)


def test_an_unknown_kind_is_refused() -> None:
    """A kind without an entry applies nothing."""
    with pytest.raises(KindFault, match="kind-unknown"):
        apply(definition("no-such-kind", Slot(where="header")), secret(), "/", ())


def test_basic_without_any_user_is_refused() -> None:
    """Neither the definition nor the client names a user: nothing is guessed."""
    with pytest.raises(KindFault, match="kind-request-form"):
        apply(definition("basic", Slot(where="basic")), secret(), "/", ())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_clients_authority_is_removed_and_ours_set_once(kind) -> None:
    """I11: every known auth slot of the client is gone, other headers stay, our value is there exactly once."""
    held = secret()
    made = inject(outgoing("/x?api_key=mine&a=1&API_KEY=2", FOREIGN), apply(TABLE[kind], held, "/x", FOREIGN))
    target, headers = made.target, made.headers
    text = str((target, headers))
    assert "mine" not in text
    assert ("accept", "application/json") in headers
    names = [name for name, _ in headers]
    assert len(names) == len(set(names))
    where = {"bearer": "authorization", "basic": "authorization", "header": "x-api-key"}.get(kind)
    if where is None:
        assert target == "/x?a=1&api_key=canary-0123456789%2B%2F%3D"
    else:
        assert target == "/x?a=1"
        assert names.count(where) == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bearer", ("authorization", "Bearer " + CANARY.decode())),
        ("basic", ("authorization", "Basic " + base64.b64encode(b"robot:" + CANARY).decode())),
        ("header", ("x-api-key", "key=" + CANARY.decode())),
    ],
)
def test_what_is_set(kind, expected) -> None:
    """The header exactly as the provider wants it."""
    assert inject(outgoing(), apply(TABLE[kind], secret(), "/", ())).headers == (expected,)


@pytest.mark.parametrize(
    ("sent", "pair"),
    [
        (f"me:{PLACEHOLDER}", b"me:" + CANARY),
        (f"{PLACEHOLDER}:", CANARY + b":"),
        (f"{PLACEHOLDER}:x-oauth-basic", CANARY + b":x-oauth-basic"),
    ],
)
def test_basic_puts_the_secret_where_the_placeholder_stood(sent, pair) -> None:
    """As the password, or as the user name where a provider takes the key there."""
    headers = (("authorization", "Basic " + base64.b64encode(sent.encode()).decode()),)
    made = apply(definition("basic", Slot(where="basic")), secret(), "/", headers)
    assert made.set_headers == (("authorization", "Basic " + base64.b64encode(pair).decode()),)


def test_a_target_without_authority_is_left_byte_for_byte() -> None:
    """What was judged is what is sent (I02), odd but legal spellings included."""
    target = "/x?a=%20b&&c&d="
    assert inject(outgoing(target), apply(TABLE["bearer"], secret(), target, ())).target == target


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_form_that_carries_the_secret_is_named(kind) -> None:
    """The executor scrubs `forms`: raw always, and whatever the kind made of it."""
    made = apply(TABLE[kind], secret(), "/", ())
    assert CANARY in made.forms
    values = [value for _, value in (*made.set_headers, *made.set_query)]
    assert any(form.decode() in value for form in made.forms for value in values)
    assert "canary" not in repr(made)


class Stumbling(Secret):
    """A secret whose use fails with the value in a local of the frame that raises."""

    __slots__ = ()

    def reveal(self) -> bytes:
        canary = super().reveal()
        raise RuntimeError(f"failed on {canary!r}")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_fault_inside_a_kind_shows_nothing(kind, capsys) -> None:
    """RULINGS 1.6: raised inside every kind with the canary in a local and in the text, our renderer shows neither."""
    with pytest.raises(RuntimeError) as caught:
        apply(TABLE[kind], Stumbling(CANARY, name="c"), "/", ())
    complain("executor", "a kind failed", caught.value)
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert "canary" not in shown


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_foreign_renderers_find_no_value_in_a_kinds_arguments(kind) -> None:
    """Even rich, structlog and traceback, told to print locals, find no value in what a kind is called with."""
    held = secret()

    def call() -> None:
        definition_, secret_, target = TABLE[kind], held, "/"
        if definition_ and secret_ is held:
            raise KindFault("kind-request-form", target)

    try:
        call()
    except KindFault as error:
        plain = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        console = rich.console.Console(file=io.StringIO(), width=200)
        console.print(
            rich.traceback.Traceback.from_exception(type(error), error, error.__traceback__, show_locals=True)
        )
        dicts = structlog.tracebacks.ExceptionDictTransformer(show_locals=True)(
            (type(error), error, error.__traceback__)
        )
    assert "canary" not in plain + console.file.getvalue() + str(dicts)  # type: ignore[attr-defined]
