"""Every kind: the client's authority goes first, ours is set exactly once, and nothing renders the secret.

A kind that is registered and has no sample (tests/support/kinds.py) fails here.
"""

from __future__ import annotations

import io
import traceback
from dataclasses import replace

import pytest
import rich.console
import rich.traceback
import structlog

from broker.credentials import KINDS, KindFault, Outgoing, apply, inject
from broker.vault.secret import Secret
from net.process import complain
from rules.credential_kinds import KINDS as ROWS
from rules.policy import CredentialDef
from tests.support.kinds import FOREIGN, NOW, SAMPLES, Sample, definition, outgoing, secrets, sent, text_of

EVERY = pytest.mark.parametrize("sample", list(SAMPLES.values()), ids=list(SAMPLES))


def test_every_kind_is_in_every_register_and_has_a_sample() -> None:
    """A kind that one room knows and another does not would be refused at run time; one without a sample is untried."""
    assert set(KINDS) == set(ROWS)
    tried = {KINDS[sample.definition.kind] for sample in SAMPLES.values()}
    assert {kind for kind, apply_it in KINDS.items() if apply_it not in tried} == set()


def test_an_unknown_kind_is_refused() -> None:
    """A kind without an entry applies nothing."""
    made = replace(definition("bearer"), kind="no-such-kind")
    with pytest.raises(KindFault, match="kind-unknown"):
        apply(made, {}, outgoing())


@EVERY
def test_half_a_credential_is_not_sent(sample: Sample) -> None:
    """A part that the kind needs and that is not there refuses; nothing goes out with what is left."""
    row = ROWS[sample.definition.kind]
    needed = tuple(sample.parts) if row.open else row.obtained or row.required
    for missing in needed:
        held = secrets({name: value for name, value in sample.parts.items() if name != missing})
        with pytest.raises(KindFault, match="kind-part-missing"):
            apply(sample.definition, held, sample.request)


@EVERY
@pytest.mark.parametrize("value", [b"caf\xc3\xa9-0123456789", b" leading-0123456789", b"semi;colon, and space"])
def test_a_secret_goes_as_it_is_or_not_at_all(sample: Sample, value: bytes) -> None:
    """B098: what a place cannot hold is refused, never cut or escaped in a way of ours; a head is printable ASCII."""
    for name in sample.hidden:
        try:
            made = inject(sample.request, sample.apply(**{name: value}))
        except KindFault as fault:
            said = str(fault)
            assert "0123456789" not in said  # some kinds take what others refuse
            continue
        assert made.target.isascii()
        assert all(text.isascii() and text.isprintable() and text == text.strip() for _, text in made.headers)


@EVERY
def test_the_clients_authority_is_removed_and_ours_set_once(sample: Sample) -> None:
    """I11: every known auth slot of the client is gone, other headers stay, ours are there exactly once."""
    separator = "&" if "?" in sample.request.target else "?"
    request = replace(
        sample.request,
        target=f"{sample.request.target}{separator}api_key=mine&b=1&API_KEY=mine",
        headers=(*FOREIGN, *sample.request.headers),
    )
    made = inject(request, apply(sample.definition, secrets(sample.parts), request))
    assert b"mine" not in text_of(made)
    assert ("accept", "application/json") in made.headers
    assert "b=1" in made.target
    names = [name for name, _ in made.headers]
    assert len(names) == len(set(names))


@EVERY
def test_each_part_stands_where_the_kind_promises_and_nowhere_else(sample: Sample) -> None:
    """The canary of each part once in its place; a part that only signs or proves is nowhere in the request."""
    made = sent(sample)
    places = {
        "header": "\n".join(f"{name}: {value}" for name, value in made.headers).encode(),
        "target": made.target.encode(),
        "body": made.body or b"",
    }
    for name, value in sample.parts.items():
        wanted = sample.seen.get(name)
        if wanted is None:
            assert value not in text_of(made), name
            continue
        assert places[sample.at].count(wanted) == 1, name
        rest = text_of(made).replace(wanted, b"")
        assert value not in rest, name


@EVERY
def test_every_form_that_carries_a_secret_is_named(sample: Sample) -> None:
    """The executor scrubs `forms`: every hidden part as it is, and whatever the kind made of it for the request."""
    injection = sample.apply()
    for name, value in sample.hidden.items():
        assert value in injection.forms, name
        spelled = sample.seen.get(name)
        if spelled is not None:
            assert any(form in spelled or spelled in form for form in injection.forms), name
    public = {name: value for name, value in sample.parts.items() if name not in sample.hidden}
    assert not any(form == value for form in injection.forms for value in public.values())


@EVERY
def test_what_is_asked_for_shows_no_value(sample: Sample) -> None:
    """An Injection or a request in a traceback or a log line shows no secret."""
    injection = sample.apply()
    shown = repr(injection) + repr(inject(sample.request, replace(injection, set_path=None)))
    if sample.at == "target":
        shown = repr(injection)
    assert "canary" not in shown
    assert not any(value.decode("latin-1") in shown for value in sample.hidden.values())


def test_a_target_without_authority_is_left_byte_for_byte() -> None:
    """What was judged is what is sent (I02), odd but legal spellings included."""
    target = "/x?a=%20b&&c&d="
    for kind in ("bearer", "headers", "hmac", "totp", "mtls"):
        sample = SAMPLES[kind]
        request = replace(sample.request, target=target)
        assert inject(request, sample.apply(request)).target == target


@EVERY
def test_the_same_call_is_applied_the_same_way(sample: Sample) -> None:
    """Pure: a function of definition, parts, request and the time that it is told."""
    assert sent(sample) == sent(sample)
    later = replace(sample.request, now=NOW + 3600)
    moves = sample.definition.kind in ("sigv4", "hmac", "totp")
    assert (text_of(sent(sample, later)) != text_of(sent(sample))) is moves


class Stumbling(Secret):
    """A secret whose use fails with the value in a local of the frame that raises."""

    __slots__ = ()

    def reveal(self) -> bytes:
        canary = super().reveal()
        raise RuntimeError(f"failed on {canary!r}")


@EVERY
def test_a_fault_inside_a_kind_shows_nothing(sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    """RULINGS 1.6: raised inside every kind with the canary in a local and in the text, our renderer shows neither."""
    held = {name: Stumbling(value, name="c", scrub=False) for name, value in sample.parts.items()}
    with pytest.raises(RuntimeError) as caught:
        apply(sample.definition, held, sample.request)
    complain("executor", "a kind failed", caught.value)
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert "canary" not in shown


@EVERY
def test_foreign_renderers_find_no_value_in_a_kinds_arguments(sample: Sample) -> None:
    """Even rich, structlog and traceback, told to print locals, find no value in what a kind is called with."""
    assert "canary" not in _rendered(sample.definition, secrets(sample.hidden), sample.request)


def _rendered(made: CredentialDef, held: dict[str, Secret], asked: Outgoing) -> str:
    def call() -> None:
        definition_, parts, request = made, held, asked
        if definition_ and parts is held:
            raise KindFault("kind-request-form", request.method)

    try:
        call()
    except KindFault as error:
        plain = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        shown = io.StringIO()
        rich.console.Console(file=shown, width=200).print(
            rich.traceback.Traceback.from_exception(type(error), error, error.__traceback__, show_locals=True)
        )
        dicts = structlog.tracebacks.ExceptionDictTransformer(show_locals=True)(
            (type(error), error, error.__traceback__)
        )
        return plain + shown.getvalue() + str(dicts)
    raise AssertionError("nothing was raised")
