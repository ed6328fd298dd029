"""The self-check of a whole gateway (I28): real worker, executor, vault and log; what it leaves there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gateway import TestGateway
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("self-check")

POLICY = """
roles:
  agent:
    allow:
      - {name: plain, host: plain.test, methods: [GET], paths: ["/**"]}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestGateway]:
    folder = tmp_path_factory.mktemp("self-check")
    with TestGateway(folder, policy=POLICY, settings="self_check_seconds: 5\n") as running:
        running.awaited(4, event="selfcheck.refused")
        yield running


def test_what_the_broker_must_refuse_is_on_record_as_our_own(gateway: TestGateway) -> None:
    """Both hand-offs reach executor and vault and are refused there, under a name that is no sandbox's."""
    records = gateway.records(event="selfcheck.refused")
    assert {(record["tenant"], record["sandbox"]) for record in records} == {("exeat", "self-check")}
    forged = [record for record in records if record.get("error") == "statement-forged"]
    assert {record["process"].partition("-")[0] for record in forged} == {"executor"}
    honest = [record for record in records if record not in forged]
    assert {record["process"] for record in honest} == {"vault"}
    assert {record["reason"] for record in honest} <= {"sandbox-ended", "bad-token"}


def test_it_counts_for_nobody(gateway: TestGateway) -> None:
    """No refusal, no alarm, no request, no sandbox: an auditor who counts sees none of it."""
    assert gateway.records(refused=True) == []
    assert gateway.records(event="broker.refused") == []
    names = {record["event"] for record in gateway.records()}
    assert not names & {"request.intent", "request.handoff", "sandbox.created", "connection.refused"}
    assert gateway.admin.sandboxes() == []


def test_its_certificate_is_minted_once(gateway: TestGateway) -> None:
    """For a name that nobody can have, and on record."""
    (record,) = gateway.awaited(event="certificate.minted")
    assert (record["sandbox"], record["host"]) == ("self-check", "permitted.self-check.invalid")


def test_status_says_when_and_how_it_went(gateway: TestGateway) -> None:
    """`exeat status` has the time and the result of the last one; it moves on with the next."""
    said = gateway.exeat("status").out
    assert "self-check" in said
    assert "passed at " in said
    (first,) = [member["self_check"]["at"] for member in gateway.admin.status()["processes"] if "self_check" in member]

    def later() -> bool:
        checks = [member["self_check"] for member in gateway.admin.status()["processes"] if "self_check" in member]
        return bool(checks) and checks[0]["passed"] and checks[0]["at"] > first

    until(later)


def test_it_counts_what_it_tried(gateway: TestGateway) -> None:
    """At start without a policy in force, then with it: inside TLS, the broker, each role."""
    first, second, *_ = gateway.awaited(2, event="selfcheck.passed")
    assert second["count"] >= first["count"] + 9 + 2 + 1
