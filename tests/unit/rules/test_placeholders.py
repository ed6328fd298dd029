"""Placeholders are made to be found: anywhere, whole, and not by chance."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import RequestFacts
from rules.placeholders import (
    InvalidShape,
    contains,
    find,
    find_in_basic,
    find_in_head,
    make,
    public_prefix,
    split_basic,
)
from tests.support.properties import tried

SEED = bytes(range(32))
EXAMPLES = tried(200)


def head(target: str, *headers: tuple[str, str]) -> RequestFacts:
    return RequestFacts.build(
        method="GET",
        scheme="https",
        tunnel=None,
        target=f"https://a.example{target}",
        headers=(("host", "a.example"), *headers),
    )


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("sk_{23}", "too short for a core"),
        ("sk_live_", "no place for the random part"),
        ("{24}{24}", "two places"),
        ("sk live {24}", "a space does not survive a header"),
        ("sk/{24}", "a slash does not survive a path"),
        ("Xeat{24}", "the mark itself"),
        ("{999}", "longer than clients take"),
        ("{24", "an open brace"),
    ],
)
def test_a_shape_that_cannot_be_found_again_is_refused(shape: str, why: str) -> None:
    """Expect InvalidShape, because a placeholder that is not recognised is a leak without an alarm."""
    with pytest.raises(InvalidShape):
        make(shape, SEED)


def test_too_little_randomness_is_refused() -> None:
    """Expect ValueError below 32 bytes, so that no caller weakens the core by accident."""
    with pytest.raises(ValueError, match="32"):
        make("{24}", bytes(31))


def test_text_that_only_looks_like_a_core_is_not_one() -> None:
    """Expect no alarm for the mark without its checksum: chance and prose about us stay quiet."""
    core = find(make("{24}", SEED))[0]
    changed = core[:-1] + ("A" if core[-1] != "A" else "B")
    assert find(changed) == ()
    assert find("Xeat") == ()
    assert find("Xeat" + "0" * 20) == ()


def test_a_core_inside_a_false_start_is_found() -> None:
    """Expect the core to be seen although the mark precedes it, because an attacker may write it there."""
    placeholder = make("{24}", SEED)
    assert find("XeatXeat" + placeholder) == (placeholder,)
    assert find("Xea" + placeholder + "Xeat") == (placeholder,)


@EXAMPLES
@given(random=st.binary(min_size=32, max_size=64), length=st.integers(24, 120), around=st.text(max_size=40))
def test_every_placeholder_is_found_in_any_surroundings(random: bytes, length: int, around: str) -> None:
    """Expect exactly one core whatever stands before and behind."""
    placeholder = make(f"sk_live_{{{length}}}~x", random)
    assert len(placeholder) == len("sk_live_") + length + 2
    assert len(find(around + placeholder + around)) == 1
    assert contains(placeholder)


@EXAMPLES
@given(random=st.binary(min_size=32, max_size=32))
def test_placeholders_are_deterministic_and_distinct(random: bytes) -> None:
    """Expect the same bytes to give the same placeholder and another byte another one."""
    other = bytes([random[0] ^ 1]) + random[1:]
    assert make("{24}", random) == make("{24}", random)
    assert make("{24}", random) != make("{24}", other)


@pytest.mark.parametrize(
    ("user", "password"),
    [("u", "PH"), ("", "PH"), ("x-access-token", "PH"), ("PH", "")],
    ids=["u", "none", "x", "user"],
)
def test_basic_values_are_decoded(user: str, password: str) -> None:
    """Expect the core of user or password to be found behind base64 (T19)."""
    placeholder = make("ghp_{36}", SEED)
    pair = f"{user}:{password}".replace("PH", placeholder)
    value = "Basic " + base64.b64encode(pair.encode()).decode()
    assert find_in_basic(value) == find(placeholder)
    assert split_basic(value) == tuple(pair.split(":"))


def test_sloppy_basic_values_are_decoded_too() -> None:
    """Expect lenient spellings to be searched, because a lenient origin would read them."""
    placeholder = make("{24}", SEED)
    encoded = base64.urlsafe_b64encode(f"u?>:{placeholder}".encode()).decode().rstrip("=")
    assert find_in_basic(f"bAsIc  {encoded} ") == (placeholder,)
    assert split_basic(f"Basic {encoded}!") is None
    assert find_in_basic("Bearer " + encoded) == ()
    assert find_in_basic("Basic \u00e9") == ()


def test_a_head_is_searched_in_every_place() -> None:
    """Expect path, query name, query value, header and Basic to be reported with the place."""
    placeholder = make("{24}", SEED)
    basic = "Basic " + base64.b64encode(f"u:{placeholder}".encode()).decode()
    facts = head(
        f"/bot{placeholder}/send?key={placeholder}&{placeholder}=1",
        ("x-api-key", placeholder),
        ("authorization", basic),
    )
    places = {(found.where, found.name) for found in find_in_head(facts)}
    assert places == {
        ("path", ""),
        ("query", "key"),
        ("query", ""),
        ("header", "x-api-key"),
        ("basic", "authorization"),
    }
    assert all(found.cores == (placeholder,) for found in find_in_head(facts))
    assert find_in_head(head("/plain?x=1", ("accept", "*/*"))) == ()


def test_a_percent_encoded_core_in_the_query_is_found() -> None:
    """Expect the decoded spelling to count: `%58eat` reads as the mark at the origin."""
    placeholder = make("{24}", SEED)
    facts = head(f"/?key=%58{placeholder[1:]}")
    assert [(found.where, found.name, found.cores) for found in find_in_head(facts)] == [
        ("query", "key", (placeholder,))
    ]


def test_the_public_prefix_is_what_everyone_knows() -> None:
    """Expect only the constant head of the shape."""
    assert public_prefix("sk_live_{24}") == "sk_live_"
    assert public_prefix("{40}") == ""
