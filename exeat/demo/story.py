"""The story, told in order: what runs, what is allowed, what is refused, and the log that proves it.

Everything is real: our processes as separate principals, a sandbox with no route out, unmodified curl and pip, a
small HTTPS shop as upstream. Every claim that is printed is checked; one that fails makes the demo exit 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rich.text import Text

from audit.search import Filter, search
from exeat import session
from exeat.boundary import Surroundings
from exeat.commands.audit import describe
from exeat.commands.setup import write_installation
from exeat.demo.index import Index, find_index
from exeat.demo.shop import Shop
from exeat.environment import client_environment
from exeat.launch import BoundaryUnavailable, Plan, interpreter_view, launch, system_view
from exeat.output import EXIT_NO, EXIT_NOT_CONFINED, console, fail, note, printable
from exeat.places import Places
from exeat.principals import uid_of_sandbox
from exeat.settings import Settings, load_settings
from exeat.supervisor import StartRefused

STEPS = {
    "env": "The agent looks for keys in its environment. It finds placeholders, worthless anywhere else:",
    "pip": "pip installs a package from the index, through a rule that permits reading it:",
    "orders": "curl reads an order with the placeholder; the broker puts the key in; only kept fields come back:",
    "refund": "A refund was never permitted. The refusal says why, and what would help:",
    "release": "A release needs a person's word. It is held, with a ticket:",
    "direct": "Round the proxy there is no way: a bare address leads nowhere, and a name leads to the gateway again:",
}


UNCONFINED = "    boundary: {external: nothing, reason: a demo with a throw-away secret that says so first and last}\n"
"""Where this machine gives no namespaces, nothing arms the key but the policy's word (RULINGS 6.3)."""


@dataclass(slots=True)
class Checks:
    """What must be true at the end; `failed` holds the sentences that were not."""

    failed: list[str] = field(default_factory=list)

    def expect(self, holds: bool, sentence: str) -> None:
        console().print(Text("  ✓ " if holds else "  ✗ ", style="green" if holds else "bold red") + Text(sentence))
        if not holds:
            self.failed.append(sentence)


async def play(*, danger_shared_uid: bool, unconfined: bool) -> int:
    """Tell the story; returns the exit code: 0, 1 when a claim did not hold, 3 when nothing was confined."""
    began = time.monotonic()
    if shutil.which("curl") is None:
        fail("the demo drives curl, which is not installed", remedy="install it, for example: apt install curl")
    if not unconfined:
        unconfined = not await asyncio.to_thread(_can_confine)
    if unconfined:
        _headline("NOT CONFINED: this machine gives us no namespaces; what follows shows the proxy, not the boundary")
    checks = Checks()
    key = f"sk_live_{secrets.token_hex(16)}"
    with _folder() as folder:
        async with Shop(key) as shop:
            index = await asyncio.to_thread(find_index, os.environ.get("PIP_INDEX_URL"), shop.port)
            if index.why_local:
                note(f"{index.why_local}: using a small local index instead")
            settings = _install(folder, shop, index, unconfined)
            try:
                await _tell(settings, shop, key, index, checks, danger_shared_uid, unconfined)
            except StartRefused as error:
                fail(str(error), remedy=error.remedy)
            await asyncio.to_thread(_show_log, settings, key, checks)
    seconds = time.monotonic() - began
    if checks.failed:
        _headline(f"{len(checks.failed)} claim(s) did not hold")
        return EXIT_NO
    if unconfined:
        _headline("NOT CONFINED: the claims about the proxy held; the boundary was not there")
        return EXIT_NOT_CONFINED
    _headline(f"All claims held. {seconds:.0f} seconds; nothing is left running.")
    # In a clone the command lies in .venv/bin, which no shell knows.
    command = "exeat" if shutil.which("exeat") else str(Path(sys.executable).with_name("exeat"))
    note(f"Next: {command} init, then {command} run -- your-agent")
    return 0


async def _tell(
    settings: Settings,
    shop: Shop,
    key: str,
    index: Index,
    checks: Checks,
    danger_shared_uid: bool,
    unconfined: bool,
) -> None:
    apart = "without separating them" if danger_shared_uid or unconfined else "as separate principals"
    _headline(f"Starting auditor, vault, executor and worker, {apart}")
    async with session.gateway(
        settings,
        danger_shared_uid=danger_shared_uid or unconfined,
        report=note,
        only_embedded=True,
        listen=settings.listen,
    ) as link:
        await asyncio.to_thread(link.admin.add_secret, "shop/orders", key.encode(), owner="team-orders")
        deploy_key = f"dp_{secrets.token_hex(20)}"
        await asyncio.to_thread(link.admin.add_secret, "shop/deploy", deploy_key.encode(), owner="team-deploy")
        said: dict[str, str] = {}
        async with _agent(link, settings, shop, index, unconfined) as lines:
            async for step, line in lines:
                if step not in said:
                    _headline(STEPS[step])
                    said[step] = ""
                if line:
                    console().print(Text("    " + printable(line)))
                    said[step] += line + "\n"
        everything = "".join(said.values())
        _headline("Was it true?")
        checks.expect(
            "sk_live_" in said["env"] and key not in everything and deploy_key not in everything,
            "the sandbox saw placeholders and never a real key",
        )
        checks.expect("error" not in said["pip"].lower() and bool(said["pip"].strip()), "pip worked, unmodified")
        order = _json(said["orders"])
        checks.expect(
            order == {"id": "7", "status": "shipped", "items": [{"sku": "tea-250g"}, {"sku": "cup-blue"}]},
            "only id, status and item numbers came back; customer and echoed key did not",
        )
        checks.expect(shop.key_seen == 1, "the shop saw the real key once, from the broker")
        checks.expect(
            _json(said["refund"]).get("reason") == "no-rule" and "POST /v1/refunds" not in shop.seen,
            "the refund was refused and never reached the shop",
        )
        release = _json(said["release"])
        checks.expect(
            release.get("reason") == "approval-required"
            and bool(release.get("ticket"))
            and "POST /release" not in shop.seen,
            "the release is held with a ticket and never reached the shop",
        )
        if not unconfined:
            # Captured where iproute2 and nftables are installed; without them nothing answers at all.
            judged_or_lost = "no-rule" in said["direct"] or "curl: (6)" in said["direct"]
            lost = re.search(r"curl: \((?:7|28|56)\)", said["direct"]) is not None
            checks.expect(
                lost and judged_or_lost and "POST /v1/refunds" not in shop.seen, "there is no way round the proxy"
            )


@contextlib.asynccontextmanager
async def _agent(
    link: session.Gateway, settings: Settings, shop: Shop, index: Index, unconfined: bool
) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
    """Run script.sh as the agent, confined or not; yields (step, line) as it prints."""
    script = resources.files("exeat").joinpath("demo", "script.sh").read_text("utf-8")
    variables = {
        "DEMO_PORT": str(shop.port),
        "DEMO_INDEX": index.simple_url,
        "DEMO_PACKAGE": index.package,
        "DEMO_PIP": f"{sys.executable} -m pip" if importlib.util.find_spec("pip") else "",
    }
    argv = ["/bin/sh", "-c", script]
    if not unconfined:
        folder = str(settings.file.parent.parent)
        async with session.sandbox(
            link,
            argv=argv,
            surroundings=Surroundings(
                environment=dict(os.environ), home=str(Path.home()), cwd="/tmp", hidden=(folder,)
            ),
            role="shop-agent",
            owner="demo",
            agent="demo-agent",
            task="orders",
            variables=variables,
            read_only=[path for _, path, _ in interpreter_view(system_view())],
            capture=True,
        ) as running:
            assert running.confined.process.stdout is not None
            yield _lines(running.confined.process)
            await running.wait()
        return
    assert link.embedded is not None
    answer = await asyncio.to_thread(
        link.admin.create_sandbox, "shop-agent", owner="demo", agent="demo-agent", task="orders"
    )
    environment = client_environment(
        proxy_url=f"http://session:{answer['token']}@127.0.0.1:{link.embedded.port}",
        ca_file=str(settings.client_files / "ca.pem"),
        bundle_file=str(settings.client_files / "bundle.pem"),
    )
    with tempfile.TemporaryDirectory() as home:
        environment |= {**answer["env"], **variables, "PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": home}
        process = subprocess.Popen(  # noqa: ASYNC220 - starting takes no time worth a thread
            argv, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        yield _lines(process)
        await asyncio.to_thread(process.wait)
        shutil.rmtree("/tmp/site", ignore_errors=True)


async def _lines(process: subprocess.Popen[bytes]) -> AsyncIterator[tuple[str, str]]:
    step = ""
    assert process.stdout is not None
    while raw := await asyncio.to_thread(process.stdout.readline):
        line = raw.decode(errors="replace").rstrip("\n")
        if line.startswith("\x1e"):
            step, line = line[1:], ""
        if step in STEPS:
            yield step, line


def _show_log(settings: Settings, key: str, checks: Checks) -> None:
    """Show the log, verify it, change one byte of a copy, and let verify name the record."""
    _headline("The log, as an auditor reads it:")
    for record in search(settings.log, Filter()):
        if record.get("sandbox"):
            console().print(Text("    " + describe(record)))
    raw = b"".join(path.read_bytes() for path in sorted(settings.log.glob("*.jsonl")))
    _headline("exeat-verify checks it offline:")
    good = _verify(settings.log)
    checks.expect(good.returncode == 0, "the log verifies")
    checks.expect(key.encode() not in raw, "no key is in the log")
    with tempfile.TemporaryDirectory() as copy_name:
        copy = Path(copy_name) / "log"
        shutil.copytree(settings.log, copy)
        victim = sorted(copy.glob("*.jsonl"))[0]
        lines = victim.read_bytes().splitlines(keepends=True)
        number = next(n for n, line in enumerate(lines) if b'"no-rule"' in line)
        sequence = json.loads(lines[number])["seq"]
        lines[number] = lines[number].replace(b'"no-rule"', b'"no-ruIe"', 1)
        victim.write_bytes(b"".join(lines))
        _headline(f"One byte of record {sequence} is changed in a copy:")
        bad = _verify(copy)
        checks.expect(
            bad.returncode == 1 and str(sequence) in bad.stdout, f"verify refuses the copy and names record {sequence}"
        )


def _verify(folder: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-I", "-m", "audit", "verify", str(folder), "--key", str(folder / "checkpoint.pub")],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={},
    )
    for line in (result.stdout + result.stderr).splitlines():
        console().print(Text("    " + printable(line)))
    return result


def _install(folder: Path, shop: Shop, index: Index, unconfined: bool) -> Settings:
    config = folder / "config"
    policy = resources.files("exeat").joinpath("demo", "policy.yaml").read_text("utf-8")
    policy = (
        policy.replace("PORT", str(shop.port))
        .replace("# INDEX DESTINATIONS\n", "".join(index.destinations))
        .replace("# INDEX SERVICE\n", index.services_block)
        .replace("# BOUNDARY\n", UNCONFINED if unconfined else "")
        .replace("INDEX", index.service)
    )
    listen = "127.0.0.1:0" if unconfined else "none"
    texts = {
        "policy.yaml": policy,
        "credentials.yaml": resources.files("exeat")
        .joinpath("demo", "credentials.yaml")
        .read_text("utf-8")
        .replace("PORT", str(shop.port)),
        "exeat.yaml": (
            f"version: 1\nlisten: none\nstate: {folder}/state\nrun: {folder}/run\npolicy: policy.yaml\n"
            "credentials: credentials.yaml\nkey: {file: keys/store.key}\n"
        ),
    }
    write_installation(config, texts)
    (config / "shop-ca.pem").write_text(shop.ca_pem)
    places = Places(config=config, state=folder / "state", run=folder / "run")
    settings = load_settings(config / "exeat.yaml", places)
    return replace(settings, listen=("127.0.0.1", 0)) if listen != "none" else settings


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="exeat-demo-") as name:
        path = Path(name)
        path.chmod(0o711)
        yield path


def _can_confine() -> bool:
    """Whether this machine lets us build the boundary, tried with a program that does nothing."""
    is_root = os.geteuid() == 0
    uid = uid_of_sandbox(0) if is_root else os.getuid()
    gid = uid if is_root else os.getgid()
    plan = Plan(
        argv=("/bin/true",),
        env={},
        view=tuple(system_view()),
        cwd="/",
        uid=uid,
        gid=gid,
        hostname="probe",
        network=True,
    )
    try:
        launch(plan).process.wait(10)
    except BoundaryUnavailable as error:
        note(str(error))
        return False
    return True


def _headline(text: str) -> None:
    console().print()
    console().print(Text(text, style="bold"))


def _json(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
