"""The kernel's side of capture (capture/gateway.py): put a plan in force, read it back, say where the two differ.

Needs root, nftables and iproute2. What the kernel should say is not guessed at: the plan's
rules are loaded into an empty network namespace of their own and printed by the same tool as those in force.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from typing import Final, Literal

from capture.gateway import TABLE, read_counters, read_drops, read_plan, ruleset
from capture.plan import Interface, Plan, PlanError

_FOLDERS: Final = "/usr/sbin:/sbin:/usr/bin:/bin"
_SECONDS: Final = 20.0
_GUARD_PRIORITY: Final = 1
"""After the table of local addresses, before every other one."""
_ROUTING: Final = ("-4", "-6")


class NetfilterError(RuntimeError):
    """The kernel's rules cannot be read or changed. str() is the cause; `remedy` what helps."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """What the kernel has: the plan that its set holds, the rules as it prints them, the counters."""

    plan: Plan
    text: str
    counters: dict[str, int]


class Netfilter:
    """nftables of this machine's network namespace. Every method may raise NetfilterError."""

    def __init__(self) -> None:
        """Raises NetfilterError: not root, or a tool is missing."""
        if os.geteuid() != 0:
            raise NetfilterError("the kernel's rules are root's to read and to change", "run this as root")
        self._nft = _tool("nft", "nftables")
        self._ip = _tool("ip", "iproute2")

    def in_force(self) -> InForce | None:
        """What the kernel has now, or None: nothing of ours."""
        families = self._families()
        if "inet" not in families:
            return None
        found = json.loads(self._run([self._nft, "-j", "list", "table", "inet", TABLE]))
        if "bridge" in families:
            beside = json.loads(self._run([self._nft, "-j", "list", "table", "bridge", TABLE]))
            found["nftables"] += beside["nftables"]
        try:
            plan = read_plan(found)
        except PlanError as error:
            raise NetfilterError(str(error), error.remedy) from None
        return InForce(plan=plan or Plan(), text=self._printed(families), counters=read_counters(found))

    def drops(self) -> dict[str, dict[str, int]]:
        """Packets that were dropped, by interface and kind; nothing where nothing is captured."""
        if "inet" not in self._families():
            return {}
        return read_drops(json.loads(self._run([self._nft, "-j", "list", "sets", "inet"])))

    def put(self, plan: Plan) -> None:
        """Put `plan` in force in one transaction; on NetfilterError nothing has changed."""
        self._run([self._nft, "-f", "-"], ruleset(plan, had_bridges="bridge" in self._families()))

    def guard(self, plan: Plan, forgotten: Iterable[str]) -> None:
        """Beside the rules, for the day when somebody flushes them all: what comes in by an interface of the plan is
        routed to this machine or nowhere. Kept by name in the routing policy, whether the interface is there or not.
        """
        held = self._guarded()
        for family in _ROUTING:
            for one in plan.interfaces:
                if (family, one.name) not in held:
                    self._run([self._ip, family, "rule", "add", *_guard(one.name)])
            for name in forgotten:
                if (family, name) in held:
                    self._run([self._ip, family, "rule", "del", *_guard(name)])

    def unguarded(self, plan: Plan) -> list[str]:
        """Interfaces of the plan whose packets could be routed on, as sentences."""
        held = self._guarded()
        return [
            f"{one.name}: no rule of the IPv{family[1]} routing policy keeps its packets here"
            for one in plan.interfaces
            for family in _ROUTING
            if (family, one.name) not in held
        ]

    def differences(self, plan: Plan, found: InForce | None) -> list[str]:
        """Lines of a comparison: `-` what the plan says and the kernel has not, `+` the other way round."""
        if found is None:
            return [f"- table inet {TABLE}: there is none"]
        wanted = _apart(lambda: self._loaded(plan))
        return list(unified_diff(wanted.splitlines(), found.text.splitlines(), "plan", "kernel", lineterm="", n=1))

    def misfits(self, interface: Interface) -> list[str]:
        """Why `interface`, as this machine has it, cannot be what the plan says. Empty: it is."""
        done = subprocess.run(
            [self._ip, "-j", "-d", "addr", "show", "dev", interface.name],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        if done.returncode != 0:
            return [f"{interface.name}: there is no such interface"]
        link = next(entry for entry in json.loads(done.stdout) if entry)
        wrong = []
        if "UP" not in link.get("flags", ()):
            wrong.append("it is down")
        if link.get("master"):
            wrong.append(f"it is a port of {link['master']}: capture the bridge, with one sandbox on it")
        if (link.get("linkinfo", {}).get("info_kind") == "bridge") != (interface.kind == "bridge"):
            wrong.append("it is a bridge" if interface.kind == "link" else "it is not a bridge")
        for family, gateway in (("inet", interface.gateway4), ("inet6", interface.gateway6)):
            held = [
                f"{one['local']}/{one['prefixlen']}"
                for one in link.get("addr_info", ())
                if one.get("family") == family and one.get("scope") == "global"
            ]
            if held != ([str(gateway)] if gateway is not None else []):
                wrong.append(f"it has {', '.join(held) or 'no address'} where the plan says {gateway or 'none'}")
        return [f"{interface.name}: {one}" for one in wrong]

    # --- the tools ---

    def _families(self) -> list[str]:
        """Those in which there is a table of ours, `inet` first."""
        tables = json.loads(self._run([self._nft, "-j", "list", "tables"]))["nftables"]
        found = {entry["table"]["family"] for entry in tables if entry.get("table", {}).get("name") == TABLE}
        return [family for family in ("inet", "bridge") if family in found]

    def _printed(self, families: Iterable[str]) -> str:
        return "".join(self._run([self._nft, "-s", "list", "table", family, TABLE]) for family in families)

    def _loaded(self, plan: Plan) -> str:
        self._run([self._nft, "-f", "-"], ruleset(plan))
        return self._printed(self._families())

    def _guarded(self) -> set[tuple[str, str]]:
        """(option of the family, interface) for each guard that is there."""
        return {
            (family, str(rule["iif"]))
            for family in _ROUTING
            for rule in json.loads(self._run([self._ip, "-j", family, "rule", "show"]))
            if rule.get("priority") == _GUARD_PRIORITY and rule.get("action") == "prohibit" and "iif" in rule
            # A rule with more conditions would not catch everything.
            if set(rule) <= {"priority", "src", "iif", "iif_detached", "action", "protocol"} and rule["src"] == "all"
        }

    def _run(self, argv: Sequence[str], text: str = "") -> str:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=_SECONDS)
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.strip().splitlines()
        remedy = ""
        if any("ibrname" in line for line in said):
            remedy = "this kernel cannot tell bridges apart (nft_meta_bridge): give the sandbox a veth or a tap"
        raise NetfilterError(f"{os.path.basename(argv[0])}: {said[0] if said else f'exit {done.returncode}'}", remedy)


def _guard(name: str) -> list[str]:
    return ["pref", str(_GUARD_PRIORITY), "iif", name, "prohibit"]


def _apart(work: Callable[[], str]) -> str:
    """Do `work` in a network namespace of its own: namespaces belong to threads, and this thread ends with it."""

    def alone() -> str:
        try:
            os.unshare(os.CLONE_NEWNET)
        except OSError as error:
            raise NetfilterError(f"no network namespace to compare in: {error.strerror}") from None
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(alone).result()


def _tool(name: Literal["nft", "ip"], package: str) -> str:
    found = shutil.which(name, path=_FOLDERS)
    if found is None:
        raise NetfilterError(f"'{name}' is not installed", f"install the package {package}")
    return found
