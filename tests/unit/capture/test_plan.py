"""What may stand in a plan of captured interfaces: what would let two sandboxes meet is refused."""

from __future__ import annotations

import pytest

from capture.plan import Plan, PlanError, parse_interface
from tests.support.rows import every_row

REFUSED = [
    ("tap0", "is not NAME=", "a name alone says nothing about addresses"),
    ("=198.19.0.1/30", "no interface", "an empty name"),
    ("lo=198.19.0.1/30", "no interface", "loopback leads to no sandbox"),
    ('a"b=198.19.0.1/30', "no interface", "a quote would end the string in the rules"),
    ("a b=198.19.0.1/30", "no interface", "a blank"),
    ("a*=198.19.0.1/30", "no interface", "a star is a wildcard for nft"),
    ("a\n=198.19.0.1/30", "no interface", "a line break"),
    ("abcdefghijklmnop=198.19.0.1/30", "no interface", "16 bytes are more than the kernel takes"),
    ("-a=198.19.0.1/30", "no interface", "a dash would read as an option"),
    ("a=198.19.0.1", "no prefix length", "a subnet must be stated"),
    ("a=198.19.0.1/x", "no address", "a prefix that is no number"),
    ("a=gateway/30", "no address", "names are not looked up"),
    ("a=198.19.0.1/8", "not within", "a subnet that could hold everything"),
    ("a=198.19.0.1/32", "not within", "nobody else would be in it"),
    ("a=fd65::1/48", "not within", "the same for IPv6"),
    ("a=198.19.0.0/30", "no machine", "the subnet's own address"),
    ("a=198.19.0.3/30", "no machine", "the broadcast address"),
    ("a=fd65::/126", "every router", "the subnet-router anycast address"),
    ("a=127.0.0.1/30", "cannot be", "loopback"),
    ("a=224.0.0.1/30", "cannot be", "multicast"),
    ("a=169.254.0.1/30", "cannot be", "link-local"),
    ("a=fe80::1/64", "cannot be", "link-local"),
    ("a=198.18.7.1/30", "overlaps", "the stub resolver gives these addresses out"),
    ("a=198.19.0.1/30,198.19.0.5/30", "at most", "two of one family"),
    ("a=198.19.0.1/30,fd65::1/126,fd66::1/126", "at most", "two of one family"),
]


@every_row(("text", "why", "sentence"), REFUSED)
def test_an_interface_that_cannot_be_kept_apart_is_refused(text: str, why: str, sentence: str) -> None:
    """Each row says what would be wrong with it."""
    with pytest.raises(PlanError, match=why):
        parse_interface(text)


def test_sandboxes_with_overlapping_subnets_are_refused() -> None:
    """Equal, nested, and nested beside a third one that lies between; IPv6 as well."""
    for texts in (
        ("a=198.19.0.1/30", "b=198.19.0.2/30"),
        ("a=10.0.0.1/24", "b=10.0.0.129/30"),
        ("a=10.0.0.1/24", "b=10.0.0.65/30", "c=10.0.0.129/30"),
        ("a=198.19.0.1/30,fd65::1/64", "b=198.19.0.5/30,fd65::5/126"),
    ):
        with pytest.raises(PlanError, match="overlapping"):
            Plan.of(parse_interface(text) for text in texts)


def test_one_interface_is_one_sandbox() -> None:
    """A name twice is refused, whether the addresses agree or not."""
    with pytest.raises(PlanError, match="twice"):
        Plan.of([parse_interface("a=198.19.0.1/30"), parse_interface("a=198.19.0.5/30")])


def test_neighbouring_subnets_are_a_plan_in_order_of_names() -> None:
    """The order in which they were given means nothing."""
    plan = Plan.of([parse_interface("b=198.19.0.5/30"), parse_interface("a=198.19.0.1/30,fd65::1/126")])
    assert [one.name for one in plan.interfaces] == ["a", "b"]
    assert plan.interface("a").option == "--interface a=198.19.0.1/30,fd65::1/126"
    assert parse_interface("br-x=10.1.0.1/24", "bridge").option == "--bridge br-x=10.1.0.1/24"


def test_adding_replaces_the_same_name_and_leaves_the_others() -> None:
    """So one sandbox more never takes another one's rules away."""
    plan = Plan.of([parse_interface("a=198.19.0.1/30"), parse_interface("b=198.19.0.5/30")])
    grown = plan.with_interfaces([parse_interface("b=198.19.0.9/30"), parse_interface("c=198.19.0.13/30")])
    assert [one.option for one in grown.interfaces] == [
        "--interface a=198.19.0.1/30",
        "--interface b=198.19.0.9/30",
        "--interface c=198.19.0.13/30",
    ]
    with pytest.raises(PlanError, match="twice"):
        plan.with_interfaces([parse_interface("c=198.19.0.9/30"), parse_interface("c=198.19.0.13/30")])


def test_what_is_not_in_the_plan_can_be_neither_named_nor_forgotten() -> None:
    """The refusal says what there is."""
    plan = Plan.of([parse_interface("a=198.19.0.1/30")])
    for attempt in (lambda: plan.interface("b"), lambda: plan.without(["b"])):
        with pytest.raises(PlanError) as caught:
            attempt()
        assert "captured: a" in caught.value.remedy
    assert plan.without(["a"]) == Plan()
