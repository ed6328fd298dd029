"""What surrounds a sandbox under `exeat run`, as a launch plan (RULINGS 6.1).

The workload sees: the operating system read-only; the working directory; a home, /tmp and /run of its own that
end with it; the tool folders that its PATH names; `/run/exeat` with the CA files. It does not see: the user's
home and the credential files in it, the state and settings folders, control sockets, the session bus, other
processes. Its environment is built from an allow list, because a variable is where people keep keys.

A working directory that holds any of that is not shown, not even with the rest masked: who may write to a folder
may also rename what lies in it, and put a policy of his own where ours is looked for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from capture import inside
from exeat.environment import REMOVED_VARIABLES, node_preload
from exeat.launch import Capture, ListenerKind, Plan, ViewEntry, covered, masks, system_view
from wire.probe import MARK

PROXY_PORT = 3128
INSIDE = "/run/exeat"
NODE_PRELOAD = f"{INSIDE}/node-proxy.cjs"
HOME = "/home/sandbox"

PASSED_VARIABLES = (
    "PATH LANG LANGUAGE TERM COLORTERM TZ SHELL NO_COLOR FORCE_COLOR COLUMNS LINES PAGER EDITOR VISUAL CI".split()
)
"""Beside LC_*: all that an `exeat run` takes over from the caller by itself."""

_TOOL_FOLDERS = (
    ".pyenv .nvm .volta .asdf .cargo/bin .rustup .bun .deno .local/bin .local/share/uv/python .local/share/uv/tools "
    ".local/share/pipx .local/share/mise .sdkman go/bin .npm-global .nix-profile .local/pipx .rbenv"
).split()
"""Folders of a home that hold programs and no keys. Only those that a PATH entry lies in are shown, read-only."""


_CREDENTIALS = (
    ".ssh .gnupg .aws .azure .kube .docker .netrc .git-credentials .npmrc .pypirc .pgpass .my.cnf .vault-token "
    ".password-store .terraform.d .m2/settings.xml .gem/credentials .composer/auth.json .cargo/credentials.toml "
    ".config/gcloud .config/gh .config/hub .config/git/credentials .config/op .config/rclone .config/containers "
    ".config/google-chrome .config/chromium .mozilla .local/share/keyrings .local/share/kwalletd"
).split()
"""Where people's keys lie in a home: never shown, also not where a path asks for them."""


_SHARED = ("/tmp", "/var/tmp", "/run")
"""The sandbox has its own; the host's hold sockets of agents, displays and sessions."""
_NEVER = ("/proc", "/sys", "/dev", "/run/user")
"""Other processes, devices, session buses."""


class BoundaryRefused(ValueError):
    """The caller asked for a view that would hand out what the boundary is for. str() names path and remedy."""


_CAPTURING: tuple[tuple[ListenerKind, str, int], ...] = (
    ("captured", "127.0.0.1", inside.CAPTURE_PORT),
    ("captured", "::1", inside.CAPTURE_PORT),
    ("dns-udp", "127.0.0.1", inside.DNS_PORT),
    ("dns-udp", "::1", inside.DNS_PORT),
    ("dns-tcp", "127.0.0.1", inside.DNS_PORT),
    ("dns-tcp", "::1", inside.DNS_PORT),
    ("counters", "", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTools:
    """Absolute paths of iproute2's `ip` and of nftables' `nft`."""

    ip: str
    nft: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts about the caller that the plan depends on; collected by the command, so that this stays testable."""

    environment: Mapping[str, str]
    home: str
    cwd: str
    hidden: tuple[str, ...]
    """State, settings and run folders of this installation, its policy and its keys: never visible inside."""


def plan_sandbox(
    *,
    argv: Sequence[str],
    surroundings: Surroundings,
    variables: Mapping[str, str],
    ca_pem: str,
    bundle_pem: str,
    uid: int,
    gid: int,
    read_only: Sequence[str] = (),
    read_write: Sequence[str] = (),
    port: int = PROXY_PORT,
    tools: CaptureTools | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Return the plan that runs `argv` in a sandbox whose only opening is the listener on `port`.

    `variables` (proxy, CA, placeholders, --env) win over what is passed from the caller. `files`: path below INSIDE ->
    text.
    Raises BoundaryRefused where a requested path would show a hidden folder or the whole home.
    """
    view: list[ViewEntry] = system_view()
    view += [
        ("tmpfs", "mode=1777", "/tmp"),
        ("tmpfs", "mode=0755", "/run"),
        ("tmpfs", "mode=1777", "/var/tmp"),
        ("tmpfs", f"mode=0700,uid={uid},gid={gid}", HOME),
        ("file", ca_pem, f"{INSIDE}/ca.pem"),
        ("file", bundle_pem, f"{INSIDE}/bundle.pem"),
        ("file", node_preload(), NODE_PRELOAD),
        *(("file", text, path) for path, text in files.items()),
    ]
    view += masks(surroundings.hidden, view)
    if covered(surroundings.home, view) and not _is_program_folder(surroundings):
        view.append(("tmpfs", "mode=0755", os.path.realpath(surroundings.home)))
    for folder in tool_folders(surroundings.environment.get("PATH", ""), surroundings.home):
        if not covered(folder, view):
            view.append(("ro", os.path.realpath(folder), folder))
    for mode, paths in (("ro", read_only), ("rw", read_write)):
        for path in paths:
            _check_visible(path, surroundings)
            view.append((mode, os.path.realpath(path), path))  # type: ignore[arg-type]  # one of the two literals
    cwd = surroundings.cwd
    if _shows_hidden(cwd, surroundings) or _holds_credentials(cwd, surroundings.home) or _is_never_shown(cwd):
        cwd = HOME if cwd not in _SHARED else cwd
    elif not covered(cwd, view) or _within(cwd, "/opt"):
        view.append(("rw", cwd, cwd))
    view += masks(surroundings.hidden, view)
    return Plan(
        argv=tuple(argv),
        env=workload_environment(surroundings.environment, variables, cwd),
        view=tuple(view),
        cwd=cwd,
        uid=uid,
        gid=gid,
        hostname="sandbox",
        network=True,
        listeners=(("proxy", "127.0.0.1", port), ("proxy", "::1", port), *(_CAPTURING if tools else ())),
        capture=None if tools is None else capture_plan(tools),
        reap=True,
        hold=True,
        umask=0o022,
    )


def capture_plan(tools: CaptureTools) -> Capture:
    """The commands that make everything in the namespace lead to our listeners."""
    steps = [(tuple(argv), "") for argv in inside.commands(tools.ip)]
    return Capture(commands=(*steps, ((tools.nft, "-f", "-"), inside.ruleset(MARK))))


def find_capture_tools() -> CaptureTools | None:
    """iproute2 and nftables of this machine, or None: then only clients that use the proxy variables get out."""
    folders = "/usr/sbin:/sbin:/usr/bin:/bin"
    ip, nft = shutil.which("ip", path=folders), shutil.which("nft", path=folders)
    return CaptureTools(ip=ip, nft=nft) if ip and nft else None


def workload_environment(caller: Mapping[str, str], variables: Mapping[str, str], cwd: str) -> dict[str, str]:
    """The environment inside: the allow list, a home of its own, then `variables`."""
    passed = {name: value for name, value in caller.items() if name in PASSED_VARIABLES or name.startswith("LC_")} | {
        "HOME": HOME,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "PWD": cwd,
        "TMPDIR": "/tmp",
    }
    passed.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    for name in REMOVED_VARIABLES:
        passed.pop(name, None)
    return passed | dict(variables)


def tool_folders(path_variable: str, home: str) -> list[str]:
    """The program folders of `home` that `path_variable` uses (a PATH entry in ~/.pyenv/shims shows ~/.pyenv)."""
    found: list[str] = []
    entries = [os.path.normpath(entry) for entry in path_variable.split(":") if entry.startswith("/")]
    for tool in _TOOL_FOLDERS:
        folder = os.path.join(home, tool)
        if any(entry == folder or entry.startswith(folder + "/") for entry in entries) and os.path.isdir(folder):
            found.append(folder)
    return found


def _check_visible(path: str, surroundings: Surroundings) -> None:
    if not os.path.isabs(path) or os.path.normpath(path) != (path.rstrip("/") or "/"):
        raise BoundaryRefused(f"{path}: give an absolute path without dots")
    if not os.path.exists(path):
        raise BoundaryRefused(f"{path}: does not exist")
    if _shows_hidden(path, surroundings):
        raise BoundaryRefused(f"{path}: holds the home folder or Exeat's own files; name the folder you need")
    if _is_never_shown(path):
        raise BoundaryRefused(f"{path}: the sandbox has its own; name the folder in it that you need")
    if found := _holds_credentials(path, surroundings.home):
        raise BoundaryRefused(f"{path}: shows {found}, where keys lie; name the folder you need, without it")


def _shows_hidden(path: str, surroundings: Surroundings) -> bool:
    real = os.path.realpath(path)
    if any(_within(os.path.realpath(entry), real) for entry in (surroundings.home, *surroundings.hidden)):
        return True
    return any(_within(real, os.path.realpath(entry)) for entry in surroundings.hidden)


def _holds_credentials(path: str, home: str) -> str:
    """The known place of keys that `path` lies in or holds, or an empty string."""
    real = os.path.realpath(path)
    for name in _CREDENTIALS:
        place = os.path.join(home, name)
        target = os.path.realpath(place)
        if os.path.lexists(place) and (_within(real, target) or _within(target, real)):
            return place
    return ""


def _is_never_shown(path: str) -> bool:
    real = os.path.realpath(path)
    return real in _SHARED or any(_within(real, folder) for folder in _NEVER)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_program_folder(surroundings: Surroundings) -> bool:
    """Some system users have /usr/sbin as their home; hiding it would take the system's programs away."""
    entries = surroundings.environment.get("PATH", "").split(":")
    return os.path.realpath(surroundings.home) in {os.path.realpath(entry) for entry in entries if entry}
