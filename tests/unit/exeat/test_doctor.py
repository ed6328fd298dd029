"""What `exeat doctor` makes of what it sees: what was not shown does not hold."""

from __future__ import annotations

import errno
import re
import shutil
import socket
import subprocess
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from exeat import doctor
from exeat.doctor import CLIENTS, DATAGRAMS, FAILS, HOLDS, STREAMS, UNKNOWN
from proxy.doctor import DOCTOR

CA = "-----BEGIN CERTIFICATE-----\nAAAA1\nAAAA2\n-----END CERTIFICATE-----\n"


class Scripted:
    """A socket whose connect, send and answer are told; each may be an error."""

    def __init__(self, *, connect: OSError | None = None, send: OSError | None = None, answer: Any = b"") -> None:
        self._connect, self._send, self._answer = connect, send, answer

    def __call__(self, *_: object) -> Scripted:
        return self

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def settimeout(self, seconds: float) -> None:
        assert seconds == doctor.SECONDS

    def connect(self, place: tuple[str, int]) -> None:
        if self._connect:
            raise self._connect

    def sendall(self, data: bytes) -> None:
        if self._send:
            raise self._send

    send = sendall

    def recv(self, size: int) -> bytes:
        if isinstance(self._answer, OSError):
            raise self._answer
        return bytes(self._answer)


def system(number: int) -> OSError:
    return OSError(number, "told")


@pytest.mark.parametrize(
    ("sentence", "seen", "state"),
    [
        ("somebody at a documentation address answers", {"answer": b"HTTP/1.1 200 OK\r\n\r\n"}, FAILS),
        ("somebody greets", {"answer": b"SSH-2.0-x\r\n"}, FAILS),
        ("nothing answers: no proof", {"connect": TimeoutError()}, UNKNOWN),
        ("it is taken and never answered", {"answer": TimeoutError()}, UNKNOWN),
        ("no route", {"connect": system(errno.ENETUNREACH)}, HOLDS),
        ("forbidden by the kernel", {"connect": system(errno.EPERM)}, HOLDS),
        ("reset near by", {"answer": system(errno.ECONNRESET)}, HOLDS),
        ("taken and closed", {"answer": b""}, HOLDS),
        ("taken and refused in words", {"answer": b"HTTP/1.1 403 Refused by Exeat policy\r\n\r\n"}, HOLDS),
    ],
)
def test_a_connection(sentence: str, seen: dict[str, Any], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is a way out, silence is no proof, an error of the own kernel is one."""
    monkeypatch.setattr(doctor.socket, "socket", Scripted(**seen))
    assert doctor.stream("192.0.2.1", 443)[0] == state, sentence


@pytest.mark.parametrize(
    ("sentence", "seen", "state"),
    [
        ("sent, and nothing came back", {"answer": TimeoutError()}, UNKNOWN),
        ("no route", {"connect": system(errno.ENETUNREACH)}, HOLDS),
        ("forbidden when sending", {"send": system(errno.EPERM)}, HOLDS),
        ("caught by a resolver near by", {"answer": b"answer"}, HOLDS),
    ],
)
def test_a_datagram(sentence: str, seen: dict[str, Any], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent and vanished is no proof."""
    monkeypatch.setattr(doctor.socket, "socket", Scripted(**seen))
    assert doctor.datagram("192.0.2.53", 53)[0] == state, sentence


def test_another_interface_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something may lead out the doctor names it."""
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    found = doctor.interfaces()
    assert found.state == UNKNOWN
    assert "eth0" in found.why
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo")])
    assert doctor.interfaces().state == HOLDS


def test_a_gateway_that_is_not_there_or_not_ours_fails() -> None:
    """No answer, a refusal, and somebody else's page are told apart."""

    def gone(url: str) -> bytes:
        raise urllib.error.URLError("told")

    def refused(url: str) -> bytes:
        raise urllib.error.HTTPError(url, 407, "told", Message(), None)

    assert "http_proxy" in doctor.help_host(gone)[1].why
    assert "407" in doctor.help_host(refused)[1].why
    assert doctor.help_host(lambda _: b"<html>")[1].state == FAILS
    assert doctor.help_host(lambda _: CA.encode()) == (CA, doctor.help_host(lambda _: CA.encode())[1])


def test_each_client_is_told_what_it_lacks(tmp_path: Path) -> None:
    """A missing variable, a missing file and a file without our CA are named; what is not installed is left out."""
    good, other = tmp_path / "good.pem", tmp_path / "other.pem"
    good.write_text("-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----\n" + CA)
    other.write_text("-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----\n")
    proxies = {"https_proxy": "http://127.0.0.1:3128", "http_proxy": "http://127.0.0.1:3128"}

    def told(environment: dict[str, str], name: str = "curl") -> doctor.Finding:
        (found,) = doctor.clients(environment, CA, lambda wanted: "/bin/x" if wanted == name else None)
        return found

    assert told({}).why == "CURL_CA_BUNDLE is missing; https_proxy is missing; http_proxy is missing"
    assert "without the gateway's CA" in told(proxies | {"CURL_CA_BUNDLE": str(other)}).why
    assert "cannot be read" in told(proxies | {"SSL_CERT_FILE": str(tmp_path / "none")}).why
    assert told(proxies | {"SSL_CERT_FILE": str(good)}).state == HOLDS
    assert "NODE_USE_ENV_PROXY" in told(proxies | {"NODE_EXTRA_CA_CERTS": str(good)}, "node").why
    assert list(doctor.clients({}, CA, lambda _: None)) == []


def test_captured_clients_need_the_ca_and_no_proxy(tmp_path: Path) -> None:
    """Where connections reach the gateway by themselves, only a missing CA is a client's problem."""
    good = tmp_path / "good.pem"
    good.write_text(CA)

    def told(environment: dict[str, str]) -> dict[str, str]:
        found = doctor.clients(environment, CA, lambda wanted: "/x" if wanted in ("curl", "node") else None, True)
        return {finding.what: finding.why for finding in found}

    bare = told({})
    assert bare == {"client curl": "CURL_CA_BUNDLE is missing", "client node": "NODE_EXTRA_CA_CERTS is missing"}
    whole = told({"CURL_CA_BUNDLE": str(good), "NODE_EXTRA_CA_CERTS": str(good)})
    assert set(whole.values()) == {"its variables are set"}


def test_the_script_asks_the_same() -> None:
    """doctor.sh tries the same addresses and names the same variables for the same clients."""
    for _, _, address, _ in STREAMS:
        assert address in DOCTOR
    for name, groups in CLIENTS.items():
        line = next(line for line in DOCTOR.splitlines() if line.startswith(f"client {name} &&"))
        assert [tuple(found.split()) for found in re.findall(r"one ([^;]+);", line)] == list(groups)


def test_only_documentation_addresses_are_tried() -> None:
    """A packet that gets out harms nobody (RFC 5737, RFC 3849)."""
    for _, _, address, _ in (*STREAMS, *DATAGRAMS):
        assert address.startswith(("192.0.2.", "198.51.100.", "203.0.113.", "2001:db8:")), address
    for address in re.findall(r"\d+\.\d+\.\d+\.\d+", DOCTOR):
        assert address.startswith(("192.0.2.", "198.51.100.", "203.0.113.")), address


@pytest.mark.skipif(shutil.which("dash") is None, reason="dash is not installed")
def test_the_script_is_posix() -> None:
    """The strictest shell at hand reads it."""
    done = subprocess.run(["dash", "-n"], input=DOCTOR.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_file_alone_needs_nothing_of_ours() -> None:
    """It can be copied into any sandbox that has a Python."""
    text = Path(doctor.__file__).read_text()
    assert not re.search(r"^(?:from|import) (?:rules|wire|net|audit|state|broker|proxy|capture|exeat)\b", text, re.M)
    assert doctor._family("2001:db8::1") == socket.AF_INET6
