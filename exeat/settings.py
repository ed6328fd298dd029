"""exeat.yaml: the operator's settings. One flat frozen value; every error names file, line, column and remedy.

version: 1
listen: 127.0.0.1:3128          # where sandboxes reach the proxy; `none` for `exeat run` only
state: /var/lib/exeat           # store, database, CA
log: /var/lib/exeat/log         # audit segments
run: /run/exeat-gateway         # control sockets
policy: policy.yaml             # a file or a folder, relative to this file
credentials: credentials.yaml
key: {file: keys/store.key}     # or {passphrase_file: ...}, {systemd: NAME} of LoadCredentialEncrypted=, or
                                # {wrapped: FILE, by: {...}}: a key service unwraps it (rules/wrapping_keys.py)
workers: 1
executors: 1
self_check_seconds: 180         # between two self-checks of the gateway, and two probes in a sandbox of `exeat run`
admins: [1000]                  # uids that may use the control socket beside the gateway's own user
self_addresses: []              # further addresses of this host that no sandbox may reach
internal_ranges: []             # further ranges that are never public
upstream: {proxy: ...}          # the corporate proxy that everything leaves through (exeat/upstream.py)
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exeat.places import Places
from exeat.upstream import Upstream, parse_upstream
from rules.names import InvalidName, parse_authority
from rules.reader import Node, Problems
from rules.wrapping_keys import read_wrapping_key
from rules.yaml12 import Marks, YamlError, load

_CREDENTIAL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
MIN_SELF_CHECK, MAX_SELF_CHECK = 5, 600
"""Bounds of self_check_seconds: rarer than every ten minutes would leave a hole open for long."""


class SettingsError(ValueError):
    """The settings cannot be used. str() is `file:line:column: message` or `file: message`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Paths are absolute; `listen` is None when no socket is opened outside sandboxes."""

    file: Path
    listen: tuple[str, int] | None
    state: Path
    log: Path
    run: Path
    policy: Path
    credentials: Path | None
    key_file: Path | None
    passphrase_file: Path | None
    key_credential: str | None = None
    """The name of a credential that the service manager hands over, which holds the key."""
    wrapped_file: Path | None = None
    """Holds the key as a key service wrapped it, and:"""
    wrapping: str | None = None
    """JSON {"by", "folder"}: `by:` as it stands in the file, whose folder the paths in it are relative to."""
    workers: int = 1
    executors: int = 1
    self_check_seconds: int = 180
    admins: tuple[int, ...] = ()
    self_addresses: tuple[str, ...] = ()
    internal_ranges: tuple[str, ...] = ()
    upstream: Upstream | None = None

    @property
    def proof_seconds(self) -> float:
        """How long the proof of a sandbox's boundary counts: two may be missed."""
        return 3.0 * self.self_check_seconds + 60.0

    @property
    def vault_state(self) -> Path:
        """The vault's own folder: store, database, CA keys. Nobody else enters it."""
        return self.state / "vault"

    @property
    def auditor_state(self) -> Path:
        """The auditor's own folder: the key that signs checkpoints, apart from the log that it signs."""
        return self.state / "auditor"

    @property
    def admin_socket(self) -> Path:
        return self.run / "admin.sock"

    @property
    def control_socket(self) -> Path:
        """Where `exeat run` hands listening sockets to the supervisor."""
        return self.run / "control.sock"

    @property
    def private(self) -> tuple[Path, ...]:
        """What no sandbox, worker or executor may see: state, log, sockets, settings, policy, credentials, keys."""
        files = [self.credentials, self.passphrase_file, self.key_file and self.key_file.parent]
        files.append(self.wrapped_file and self.wrapped_file.parent)
        files.append(self.upstream.credential_file if self.upstream is not None else None)
        known = [self.state, self.log, self.run, self.file.parent, self.policy, *files]
        return tuple(sorted({path for path in known if path is not None}))

    @property
    def client_files(self) -> Path:
        """ca.pem and bundle.pem for sandboxes on this machine."""
        return self.run / "client"


def load_settings(file: Path, places: Places) -> Settings:
    """Read `file`. Raises SettingsError; a missing file names `exeat init`."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{file}: there are no settings yet; run 'exeat init' to write them") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
    return parse_settings(text, file, places)


def parse_settings(text: str, file: Path, places: Places) -> Settings:
    """Return the settings in `text`; relative paths are relative to `file`. Raises SettingsError."""
    try:
        document, marks = load(text, str(file))
    except YamlError as error:
        fresh = "; 'exeat init' writes a fresh one" if error.problems[0].message.startswith("the file is") else ""
        raise SettingsError(f"{error}{fresh}") from None
    if not isinstance(document, Mapping) or document.get("version") != 1:
        raise SettingsError(f"{file}: the settings are empty or lack 'version: 1'; 'exeat init' writes a fresh file")
    reader = _Reader(document, marks, file)
    key = reader.take("key", Mapping, {"file": "keys/store.key"})
    kinds = ({"file"}, {"passphrase_file"}, {"systemd"}, {"wrapped", "by"})
    if set(key) not in kinds or not all(isinstance(value, str) for name, value in key.items() if name != "by"):
        ways = "{file: PATH}, {passphrase_file: PATH}, {systemd: NAME} and {wrapped: FILE, by: {...}}"
        raise reader.error("key", f"say one of {ways}")
    if not _CREDENTIAL.match(key.get("systemd", "key")):
        raise reader.error("key", "a credential of systemd is named by letters, digits, dot, underscore and hyphen")
    settings = Settings(
        file=file,
        listen=reader.listen(),
        state=reader.path("state", places.state),
        log=reader.path("log", None) or reader.path("state", places.state) / "log",
        run=reader.path("run", places.run),
        policy=reader.path("policy", file.parent / "policy.yaml"),
        credentials=reader.path("credentials", file.parent / "credentials.yaml"),
        key_file=reader.resolve(str(key["file"])) if "file" in key else None,
        passphrase_file=reader.resolve(str(key["passphrase_file"])) if "passphrase_file" in key else None,
        key_credential=key.get("systemd"),
        wrapped_file=reader.resolve(key["wrapped"]) if "wrapped" in key else None,
        wrapping=reader.wrapping(key["by"]) if "by" in key else None,
        workers=reader.count("workers"),
        executors=reader.count("executors"),
        self_check_seconds=reader.seconds("self_check_seconds", 180, MIN_SELF_CHECK, MAX_SELF_CHECK),
        admins=reader.numbers("admins"),
        self_addresses=reader.checked("self_addresses", lambda value: str(ipaddress.ip_address(value))),
        internal_ranges=reader.checked("internal_ranges", lambda value: str(ipaddress.ip_network(value))),
        upstream=reader.upstream(),
    )
    if unknown := sorted(set(document) - reader.known):
        raise reader.error(unknown[0], f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(reader.known))}")
    return settings


class _Reader:
    def __init__(self, document: Mapping[str, Any], marks: Marks, file: Path) -> None:
        self._document = document
        self._marks = marks
        self._file = file
        self.known = {"version"}

    def error(self, key: str, message: str) -> SettingsError:
        return self.error_at((key,), message)

    def error_at(self, path: tuple[str | int, ...], message: str) -> SettingsError:
        mark = self._marks.key(path)
        return SettingsError(f"{self._file}:{mark.line}:{mark.column}: {message}")

    def take(self, key: str, kind: Any, default: Any) -> Any:
        self.known.add(key)
        value = self._document.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.error(key, f"{key} has the wrong form")
        return value

    def resolve(self, text: str) -> Path:
        return (self._file.parent / text).absolute()

    def path(self, key: str, default: Path | None) -> Any:
        value = self.take(key, str, default)
        return self.resolve(value) if isinstance(value, str) else value

    def count(self, key: str) -> int:
        value = self.take(key, int, 1)
        if isinstance(value, bool) or not 1 <= value <= 64:
            raise self.error(key, f"{key} is a number from 1 to 64")
        return int(value)

    def seconds(self, key: str, default: int, least: int, most: int) -> int:
        value = self.take(key, int, default)
        if isinstance(value, bool) or not least <= value <= most:
            raise self.error(key, f"{key} is a number of seconds from {least} to {most}")
        return int(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self.take(key, list, [])
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            raise self.error(key, f"{key} is a list of uids")
        return tuple(value)

    def checked(self, key: str, check: Callable[[str], str]) -> tuple[str, ...]:
        value = self.take(key, list, [])
        try:
            return tuple(check(str(item)) for item in value)
        except ValueError:
            raise self.error(key, f"{key} holds something that is not an address (or range)") from None

    def listen(self) -> tuple[str, int] | None:
        value = self.take("listen", str, "127.0.0.1:3128")
        if value == "none":
            return None
        try:
            host, port = parse_authority(value, None)
        except InvalidName:
            host = None
        if host is None or not host.is_literal:
            raise self.error("listen", "listen is ADDRESS:PORT with a numeric address, or none")
        if port in (80, 443):  # no address may be dialled on a listener's port, so this would close the web
            raise self.error("listen", "listen on another port than 80 and 443; 3128 is customary")
        return host.text, port

    def wrapping(self, value: Any) -> str:
        """`by:` of the key, checked as the vault will read it. Certificates that it names are the vault's to read."""
        problems = Problems()
        node = Node(value=value, path=("key", "by"), file=str(self._file), marks=self._marks, problems=problems)
        with problems.collecting():
            read_wrapping_key(node, lambda path: "-----BEGIN CERTIFICATE-----")
        if problems.errors:
            raise SettingsError(str(problems.errors[0]))
        return json.dumps({"by": value, "folder": str(self._file.parent)})

    def upstream(self) -> Upstream | None:
        self.known.add("upstream")
        if "upstream" not in self._document:
            return None
        found = parse_upstream(self._document["upstream"], self.error_at, self.resolve)
        listen = self.listen()
        if listen is not None and _reaches(listen, found.host, found.port):
            raise self.error_at(("upstream", "proxy"), "this is the address that listen: opens: the gateway itself")
        return found


def _reaches(listen: tuple[str, int], host: str, port: int) -> bool:
    """Whether a connection to the numeric `host` and `port` would arrive at `listen`."""
    try:
        ours, theirs = ipaddress.ip_address(listen[0]), ipaddress.ip_address(host)
    except ValueError:
        return False  # a name: the dialer judges what it resolves to
    return port == listen[1] and (ours == theirs or (ours.is_unspecified and theirs.is_loopback))
