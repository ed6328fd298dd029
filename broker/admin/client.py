"""`AdminClient`: a small blocking client of the admin API for commands. Standard library only; no proxy, no netrc."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from broker.errors import BrokerError
from wire.marks import Mark

MAX_ANSWER = 16 * 1024 * 1024
MAX_BACKUP = 1 << 30


class AdminError(BrokerError):
    """The API refused, or is not there. `code`, `detail`, `remedy` for people; `status` 0 when nothing answered."""

    def __init__(
        self, code: str, detail: str = "", remedy: str = "", *, status: int = 0, body: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(code, detail, remedy)
        self.status = status
        self.body: Mapping[str, Any] = body or {}


class AdminClient:
    """Calls over the Unix socket at `path`. One connection per call. Every method raises AdminError."""

    def __init__(self, path: str | Path, *, timeout: float = 30.0) -> None:
        self._path = str(path)
        self._timeout = timeout

    def status(self) -> dict[str, Any]:
        return self.call("GET", "/v1/status")

    def create_sandbox(
        self,
        role: str,
        *,
        ttl: int | str | None = None,
        owner: str = "",
        agent: str = "",
        task: str = "",
        attributes: Mapping[str, str] | None = None,
        channel: Mapping[str, Any] | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:
        """Create a sandbox; returns after the workers know it. The answer holds its token, shown once."""
        body: dict[str, Any] = {
            "role": role,
            "owner": owner,
            "agent": agent,
            "task": task,
            "attributes": dict(attributes or {}),
            "channel": dict(channel or {"kind": "shared"}),
        }
        if ttl is not None:
            body["ttl"] = ttl
        if tenant is not None:
            body["tenant"] = tenant
        return self.call("POST", "/v1/sandboxes", body)

    def sandboxes(self, *, ended: bool = False) -> list[dict[str, Any]]:
        return list(self.call("GET", "/v1/sandboxes" + ("?all=1" if ended else ""))["sandboxes"])

    def sandbox(self, sandbox_id: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/sandboxes/{quote(sandbox_id, safe='')}")

    def end_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """End it; returns after every process closed what belonged to it, with what was deleted and what remains."""
        return self.call("DELETE", f"/v1/sandboxes/{quote(sandbox_id, safe='')}")

    def prove_boundary(self, sandbox_id: str, how: str = "namespaces") -> dict[str, Any]:
        """Say that a probe of ours has found no way out of this sandbox; `how` names what it tried."""
        return self.call("POST", f"/v1/sandboxes/{quote(sandbox_id, safe='')}/boundary", {"proven": how})

    def break_boundary(self, sandbox_id: str, ways: tuple[str, ...]) -> dict[str, Any]:
        """Say that a probe of ours got out of this sandbox by `ways`: its credentials are disarmed for good."""
        return self.call("POST", f"/v1/sandboxes/{quote(sandbox_id, safe='')}/boundary", {"broken": list(ways)})

    def thaw_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """Give it its budgets anew: {id, thawed: operations that were frozen}."""
        return self.call("POST", f"/v1/sandboxes/{quote(sandbox_id, safe='')}/thaw", {})

    def count_drops(
        self, sandbox: str, counts: Mapping[str, int], *, interface: str = "", error: str = ""
    ) -> dict[str, Any]:
        """Put on record what the kernel dropped of this sandbox's packets since the last time."""
        body = {"counts": dict(counts), "interface": interface, "error": error}
        return self.call("POST", f"/v1/sandboxes/{quote(sandbox, safe='')}/drops", body)

    def policy(self) -> dict[str, Any]:
        return self.call("GET", "/v1/policy")

    def reload_policy(self) -> dict[str, Any]:
        return self.call("POST", "/v1/policy/reload", {})

    def decide(
        self,
        method: str,
        url: str,
        *,
        sandbox: str | None = None,
        role: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """What would be decided; nothing is sent, charged or recorded as a request."""
        body: dict[str, Any] = {"method": method, "url": url, "headers": dict(headers or {})}
        if sandbox is not None:
            body["sandbox"] = sandbox
        if role is not None:
            body["role"] = role
        return self.call("POST", "/v1/policy/decide", body)

    def secrets(self) -> list[dict[str, Any]]:
        """Names, owners and versions; never values."""
        return list(self.call("GET", "/v1/secrets")["secrets"])

    def add_secret(self, name: str, value: bytes, *, owner: str, scrub: bool = True) -> dict[str, Any]:
        body = {"name": name, "owner": owner, "value_base64": _encode(value), "scrub": scrub}
        return self.call("POST", "/v1/secrets", body)

    def rotate_secret(self, name: str, value: bytes) -> dict[str, Any]:
        return self.call("PUT", f"/v1/secrets/{quote(name)}", {"value_base64": _encode(value)})

    def remove_secret(self, name: str) -> dict[str, Any]:
        return self.call("DELETE", f"/v1/secrets/{quote(name)}")

    def rotate_key(self, key: bytes | None) -> dict[str, Any]:
        """Give the store another key: one made and put into the key file, or `key` (its text, or a passphrase)."""
        return self.call("POST", "/v1/store/rotate-key", {} if key is None else {"value_base64": _encode(key)})

    def backup(self) -> bytes:
        """Store and state of this moment, as the bytes of a backup."""
        status, raw = self._exchange("POST", "/v1/store/backup", {}, MAX_BACKUP)
        if status >= 400:
            raise _error(status, _object(raw, self._path))
        return raw

    def check_credentials(self, credential: str | None = None, *, sandbox: str | None = None) -> list[dict[str, Any]]:
        """Whether each reference gives a secret now, a row each; never values."""
        return self._ask_sources("check", credential, sandbox)

    def sync_credentials(self, credential: str | None = None, *, sandbox: str | None = None) -> list[dict[str, Any]]:
        """As `check_credentials`, and what comes is what uses get from now on."""
        return self._ask_sources("sync", credential, sandbox)

    def _ask_sources(self, verb: str, credential: str | None, sandbox: str | None) -> list[dict[str, Any]]:
        body = {name: text for name, text in (("credential", credential), ("sandbox", sandbox)) if text is not None}
        return list(self.call("POST", f"/v1/credentials/{verb}", body)["references"])

    def marks(self) -> tuple[bytes, list[Mark], list[str]]:
        """(key, marks, what is missing): what a scan for the gateway's secrets looks for."""
        answer = self.call("POST", "/v1/store/marks", {})
        found = [
            Mark(
                name=row["name"],
                form=row["form"],
                lead=bytes.fromhex(row["lead"]),
                length=row["length"],
                digest=bytes.fromhex(row["digest"]),
            )
            for row in answer["marks"]
        ]
        return bytes.fromhex(answer["key"]), found, list(answer["missing"])

    def ca(self) -> dict[str, Any]:
        return self.call("GET", "/v1/ca")

    def reset_clock(self, why: str) -> dict[str, Any]:
        """Take the machine's clock as right although it is behind the highest time on record."""
        return self.call("POST", "/v1/clock/reset", {"why": why})

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request and its JSON answer. Raises AdminError."""
        status, raw = self._exchange(method, path, body, MAX_ANSWER)
        answer = _object(raw, self._path)
        if status >= 400:
            raise _error(status, answer)
        return answer

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None, limit: int) -> tuple[int, bytes]:
        connection = _UnixConnection(self._path, self._timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            headers = {} if content is None else {"Content-Type": "application/json"}
            connection.request(method, path, body=content, headers=headers)
            response = connection.getresponse()
            raw = response.read(limit + 1)
        except (FileNotFoundError, ConnectionRefusedError):
            raise AdminError(
                "not-running", f"nothing answers at {self._path}", "start the gateway with `exeat up`"
            ) from None
        except PermissionError:
            raise AdminError(
                "not-permitted", f"{self._path} is not yours to use", "run as the gateway's user"
            ) from None
        except (OSError, http.client.HTTPException):
            raise _unusable(self._path) from None
        finally:
            connection.close()
        if len(raw) > limit:
            raise _unusable(self._path)
        return response.status, raw


def _object(raw: bytes, path: str) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _unusable(path)
    return answer


def _error(status: int, answer: Mapping[str, Any]) -> AdminError:
    return AdminError(
        str(answer.get("error", "admin-unavailable")),
        str(answer.get("detail", "")),
        str(answer.get("remedy", "")),
        status=status,
        body=answer,
    )


def _unusable(path: str) -> AdminError:
    return AdminError("admin-unavailable", f"no usable answer from {path}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._unix_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._unix_path)


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
