"""What a wrong file, a taken address or a wrong word does: refused with cause and remedy, and nothing is half started.

One installation that was used once is broken in one way at a time and mended again; a running one is given wrong
files and words. Kills and a full disk are in test_kills.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from exeat.cli import main
from exeat.environment import FORMATS
from exeat.principals import uid_of
from tests.support.gateway import EXEAT, PATH, Completed, TestGateway, completed
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text

pytestmark = pytest.mark.xdist_group("bad-input")

POLICY = """
roles:
  agent:
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/**"]}
  other:
    allow: [{name: read, host: api.test, methods: [GET], paths: [/other]}]
"""
SECRET = "canary-5b0c9e7d1a3f4826"


@dataclass
class Installation:
    """Files of a gateway that ran once and was stopped."""

    gateway: TestGateway

    @property
    def config(self) -> Path:
        return self.gateway.config

    @property
    def state(self) -> Path:
        return self.gateway.state

    def up(self, *options: str, file: Path | None = None) -> Completed:
        """`exeat up`, which is expected to end by itself."""
        return completed(
            subprocess.run(
                [EXEAT, "up", "--config", str(file or self.gateway.settings_file), *options],
                env={"PATH": PATH, "HOME": str(self.gateway.home)},
                cwd=self.gateway.home,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=90,
                check=False,
            )
        )

    @contextlib.contextmanager
    def changed(self, path: Path) -> Iterator[Path]:
        """What the block does to `path` is undone afterwards: content, mode, owner, existence."""
        before = path.lstat() if path.exists() else None
        content = path.read_bytes() if before is not None and stat.S_ISREG(before.st_mode) else None
        try:
            yield path
        finally:
            if path.is_dir() and (before is None or not stat.S_ISDIR(before.st_mode)):
                shutil.rmtree(path)
            if content is not None and before is not None:
                path.unlink(missing_ok=True)
                path.write_bytes(content)
            elif before is None:
                path.unlink(missing_ok=True)
            if before is not None:
                os.chown(path, before.st_uid, before.st_gid)
                path.chmod(stat.S_IMODE(before.st_mode))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    gateway = TestGateway(tmp_path_factory.mktemp("stopped") / "g", policy=POLICY, secrets={"api": SECRET})
    gateway.folder.parent.chmod(0o755)
    with gateway:
        pass
    return Installation(gateway)


def invoke(*words: str) -> Completed:
    """The command in this process, which saves the start of an interpreter; output goes where a pipe would be."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code
    return Completed(code=code if isinstance(code, int) else 0, out=out.getvalue(), err=err.getvalue())


Break = Callable[[Path], object]
ROWS: list[tuple[str, str, Break, list[str]]] = [
    # what is wrong, the file, what is done to it, words of cause and remedy
    ("no policy", "config/policy.yaml", Path.unlink, ["policy.yaml does not exist", "exeat init"]),
    ("an empty policy", "config/policy.yaml", lambda p: p.write_text("# nothing\n"), ["says nothing", "exeat init"]),
    ("a policy with errors", "config/policy.yaml", lambda p: p.write_text("version: 1\nroles: {a: {alow: []}}\n"),
     ["policy.yaml:2:", "alow", "2 problem(s)", "see the lines"]),
    ("a policy whose tests fail", "config/policy.yaml",
     lambda p: p.write_text(p.read_text() + "tests: [{role: agent, deny: \"GET https://api.test/x\"}]\n"),
     ["policy.yaml:", "1 test(s) of the policy fail", "policy explain"]),
    ("no credentials file", "config/credentials.yaml", Path.unlink, ["credentials.yaml does not exist", "exeat init"]),
    ("no settings", "config/exeat.yaml", Path.unlink, ["no settings yet", "exeat init"]),
    ("empty settings", "config/exeat.yaml", lambda p: p.write_text(""), ["exeat.yaml:1:1: ", "exeat init"]),
    ("an unknown setting", "config/exeat.yaml", lambda p: p.write_text(p.read_text() + "wrkers: 2\n"),
     ["exeat.yaml:8:1: unknown setting 'wrkers'", "known are"]),
    ("no key", "config/keys/store.key", Path.unlink, ["store.key cannot be opened", "exeat init"]),
    ("another key", "config/keys/store.key", lambda p: p.write_text("ab" * 32 + "\n"),
     ["does not open with this key", "restore the key"]),
    ("a key that others may read", "config/keys/store.key", lambda p: p.chmod(0o644), ["mode 0600", "chmod 600"]),
    ("a key that others may replace", "config/keys", lambda p: p.chmod(0o777), ["others may replace", "chmod go-w"]),
    ("a damaged store", "state/vault/store.json", lambda p: p.write_bytes(p.read_bytes()[:-40]),
     ["the store file is damaged", "restore store.json"]),
    ("a store that others may read", "state/vault/store.json", lambda p: p.chmod(0o644), ["mode 0600", "chmod 600"]),
    ("a store that is gone", "state/vault/store.json", Path.unlink, ["the last recorded one is", "newest backup"]),
    ("a damaged database", "state/vault/state.sqlite", lambda p: p.write_bytes(b"garbage " * 512), ["state", "backup"]),
    ("a vault folder that others enter", "state/vault", lambda p: p.chmod(0o755), ["loose permissions", "chmod 700"]),
    ("a state folder that others may change", "state", lambda p: p.chmod(0o777), ["loose permissions", "chmod 711"]),
    ("a log folder that others may read", "state/log", lambda p: p.chmod(0o755), ["loose permissions", "chmod 700"]),
    ("a log file that others may read", "state/log/exeat-000001.jsonl", lambda p: p.chmod(0o644),
     ["exeat-000001.jsonl", "0600", "the log cannot be written"]),
    ("a signing key that others may read", "state/auditor/signing.key", lambda p: p.chmod(0o644),
     ["signing key", "0600"]),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "name", "damage", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_a_start_with_something_wrong_is_refused(
    stopped: Installation, wrong: str, name: str, damage: Break, words: list[str]
) -> None:
    """`exeat up` ends with an error, names cause and remedy on standard error, and leaves nothing open."""
    with stopped.changed(stopped.gateway.folder / name) as path:
        damage(path)
        answer = stopped.up()
    assert answer.code in (1, 2), wrong
    assert answer.out == ""
    for word in words:
        assert word in answer.err, answer.err
    for sign in ("Traceback", SECRET, "\x1b"):
        assert sign not in answer.err
    assert answer.err.count("exeat: ") == 1, answer.err
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", stopped.gateway.port), timeout=1):
        pass


def test_a_mended_installation_starts_again(stopped: Installation) -> None:
    """None of the refused starts above damaged anything: it starts, and every secret is there."""
    stopped.gateway.start()
    try:
        assert [row["name"] for row in stopped.gateway.admin.secrets() if row["name"] == "api"] == ["api"]
    finally:
        assert stopped.gateway.stop() == 0
    assert stopped.gateway.exeat("audit", "verify").code == 0


def test_a_state_folder_that_cannot_be_made_is_named(stopped: Installation, tmp_path: Path) -> None:
    """A file where a folder should be: the path, the system's reason, and what to change."""
    (tmp_path / "file").write_text("")
    file = stopped.config / "other.yaml"
    with stopped.changed(file):
        original = stopped.gateway.settings_file.read_text()
        file.write_text(original.replace(f"state: {stopped.state}", f"state: {tmp_path}/file/state"))
        answer = stopped.up(file=file)
    assert answer.code == 1
    assert f"{tmp_path}/file/state: Not a directory" in answer.err
    assert "exeat.yaml" in answer.err


def test_a_key_beside_the_store_is_refused_unless_said(stopped: Installation) -> None:
    """Whoever copies the state folder would have both; `--danger-key-beside-store` accepts it in so many words."""
    file, key = stopped.config / "beside.yaml", stopped.state / "vault" / "store.key"
    with stopped.changed(file), stopped.changed(key):
        shutil.copy(stopped.config / "keys" / "store.key", key)
        if os.geteuid() == 0:
            os.chown(key, uid_of("vault"), uid_of("vault"))
        key.chmod(0o600)
        file.write_text(stopped.gateway.settings_file.read_text().replace("keys/store.key", str(key)))
        answer = stopped.up(file=file)
        assert answer.code == 1
        assert "lies in the state directory" in answer.err
        assert "--danger-key-beside-store" in answer.err


def test_init_writes_only_what_is_missing(tmp_path: Path) -> None:
    """A second `exeat init` changes nothing and says so; after the loss of one file it writes that one."""

    def init() -> Completed:
        command = [EXEAT, "init", "--dir", str(tmp_path / "c")]
        environment = {"PATH": PATH, "HOME": str(tmp_path)}
        return completed(subprocess.run(command, env=environment, capture_output=True, timeout=90, check=False))

    assert init().code == 0
    key = (tmp_path / "c" / "keys" / "store.key").read_text()
    again = init()
    assert again.code == 1
    assert "nothing was changed" in again.err
    (tmp_path / "c" / "policy.yaml").unlink()
    third = init()
    assert third.code == 0
    assert f"Wrote policy.yaml in {tmp_path}/c" in third.out
    assert (tmp_path / "c" / "keys" / "store.key").read_text() == key
    assert stat.S_IMODE((tmp_path / "c" / "keys" / "store.key").stat().st_mode) == 0o600


# --- a running gateway --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def origin() -> Iterator[Origin]:
    with Origin("api.test", address="127.0.0.51", handler=script(READ, text("answer"))).run_in_thread() as made:
        yield made


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, origin: Origin) -> Iterator[TestGateway]:
    folder = tmp_path_factory.mktemp("running")
    folder.chmod(0o755)
    with TestGateway(folder / "g", policy=POLICY, origins=[origin], secrets={"api": SECRET}) as made:
        yield made


@pytest.mark.parametrize(
    ("wrong", "policy", "words"),
    [
        ("cut short", "version: 1\nroles: {agent: {allow: [", ["policy.yaml:2:"]),
        ("an unknown key", "version: 1\nroles: {agent: {alow: []}}\n", ["policy.yaml:2:", "alow"]),
        ("a key twice", "version: 1\nroles: {agent: {allow: []}}\nroles: {}\n", ["policy.yaml:3:", "roles"]),
        ("an alias bomb", "version: 1\nroles: &a {b: {allow: [*a, *a]}}\n", ["policy.yaml:2:"]),
        ("a Python tag", "version: 1\nroles: !!python/object/apply:os.system [id]\n", ["policy.yaml:2:"]),
        ("a YAML 1.1 boolean", "version: 1\nroles: {agent: {allow: [{name: a, host: a.test, tunnel: yes}]}}\n",
         ["policy.yaml:2:"]),
        ("nothing", "", ["says nothing", "exeat init"]),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)  # fmt: skip
def test_a_broken_policy_is_rejected_and_the_last_good_one_stays(
    gateway: TestGateway, origin: Origin, wrong: str, policy: str, words: list[str]
) -> None:
    """B188: `policy reload` exits 1 naming the place, requests go on as before, and `policy show` says so."""
    digest = gateway.admin.policy()["digest"]
    before = len(gateway.records(event="policy.rejected"))
    (gateway.config / "policy.yaml").write_text(policy)
    answer = gateway.exeat("policy", "reload")
    assert answer.code == 1
    for word in words:
        assert word in answer.err, (wrong, answer.err)
    assert "Traceback" not in answer.err
    assert gateway.admin.policy()["digest"] == digest
    assert gateway.sandbox().curl(origin.url("/x")).out == "answer"
    assert "rejected" in gateway.exeat("policy", "show", "--output", "json").out
    assert gateway.awaited(before + 1, event="policy.rejected")[-1]["reason"]
    gateway.write_policy(POLICY)
    assert gateway.exeat("policy", "reload").code == 0
    assert not gateway.admin.policy().get("rejected")


def test_a_second_start_on_the_same_folders_is_refused(gateway: TestGateway, origin: Origin) -> None:
    """The second says that a gateway runs there and how to see it; the first goes on."""
    answer = Installation(gateway).up()
    assert answer.code == 1
    assert "already running" in answer.err
    assert "exeat status" in answer.err
    assert gateway.sandbox().curl(origin.url("/x")).out == "answer"


def test_a_second_start_on_the_same_address_is_refused(gateway: TestGateway, tmp_path: Path) -> None:
    """With SO_REUSEPORT it would silently share the port and judge by its own policy (RULINGS 9.4)."""
    other = TestGateway(tmp_path / "g", policy=POLICY, listen=f"127.0.0.1:{gateway.port}")
    answer = Installation(other).up()
    assert answer.code == 1
    assert f"cannot listen on 127.0.0.1:{gateway.port}: Address already in use" in answer.err
    assert "listen:" in answer.err


def test_a_port_of_something_else_is_refused(tmp_path: Path) -> None:
    """Whoever listens there already keeps the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = TestGateway(tmp_path / "g", policy=POLICY, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        answer = Installation(other).up()
    assert answer.code == 1
    assert "Address already in use" in answer.err


WRONG_WORDS: list[tuple[list[str], int, str]] = [
    (["run", "--role", "agent", "--"], 2, "no command to run"),
    (["run", "--role", "agent"], 2, "no command to run"),
    (["run", "--", "true"], 2, "2 roles"),
    (["run", "--role", "nobody", "--", "true"], 2, "no role 'nobody'"),
    (["run", "--role", "agent", "--env", "NOT_SET_ANYWHERE", "--", "true"], 2, "neither NAME=value"),
    (["run", "--role", "agent", "--rw", "/no/such/folder", "--", "true"], 2, "does not exist"),
    (["run", "--role", "agent", "--attribute", "x", "--", "true"], 2, "not name=value"),
    (["run", "--role", "agent", "--ttl", "soon", "--", "true"], 2, "ttl"),
    (["run", "--wrong", "--", "true"], 2, "No such option"),
    (["up", "--wrong"], 2, "No such option"),
    (["status", "--wrong"], 2, "No such option"),
    (["sandbox", "create", "--role", "nobody"], 2, "no role 'nobody'"),
    (["sandbox", "show", "sb_nothing"], 1, "no sandbox has this id"),
    (["sandbox", "end", "sb_nothing"], 1, "no live sandbox has this id"),
    (["env", "--role", "agent", "--format", "csh"], 2, "unknown format 'csh'"),
    (["secret", "rotate", "nothing"], 2, "the secret is empty"),
    (["secret", "remove", "nothing"], 1, "nothing"),
    (["policy", "explain", "GET", "ftp://x"], 2, "role"),
    (["audit", "search", "--since", "yesterday"], 2, "such as 2026-01-31"),
    (["audit", "show", "req_nothing"], 1, ""),
    (["why", "req_nothing"], 1, ""),
    (["why", "nothing"], 2, "nor a reason code"),
]


@pytest.mark.parametrize(("words", "code", "said"), WRONG_WORDS, ids=[" ".join(row[0]) for row in WRONG_WORDS])
def test_a_wrong_word_says_what_is_wrong(gateway: TestGateway, words: list[str], code: int, said: str) -> None:
    """Exit 2 for usage, 1 for an answer that is no; one clear sentence, no traceback, nothing started."""
    answer = invoke(*_with_config(words, gateway))
    assert answer.code == code, answer.err + answer.out
    assert said in answer.err + answer.out
    assert "Traceback" not in answer.err
    assert "\x1b" not in answer.err + answer.out


def _with_config(words: list[str], gateway: TestGateway) -> list[str]:
    if words == ["up", "--wrong"]:
        return words
    groups = ("sandbox", "secret", "policy", "audit", "ca", "clock")
    at = 2 if words[0] in groups else 1
    return [*words[:at], "--config", str(gateway.settings_file), *words[at:]]


@pytest.mark.parametrize("words", [["bogus"], ["sandbox", "bogus"], ["init", "--for", "nobody"]], ids=" ".join)
def test_an_unknown_command_is_a_usage_error(words: list[str], tmp_path: Path) -> None:
    """A misspelt command or template exits 2 and writes nothing."""
    result = subprocess.run(
        [EXEAT, *words], env={"PATH": PATH, "HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, check=False
    )
    assert result.returncode == 2
    assert not list(tmp_path.rglob("exeat.yaml"))


def test_without_a_gateway_commands_say_how_to_start_one(stopped: Installation) -> None:
    """Exit 4, and the sentence names `exeat up`."""
    for words in (["status"], ["sandbox", "list"], ["secret", "list"], ["policy", "show"], ["ca", "show"]):
        answer = invoke(*_with_config(words, stopped.gateway))
        assert answer.code == 4, words
        assert "exeat up" in answer.err, answer.err


# --- what scripts rely on -----------------------------------------------------------------------------------


def test_json_output_parses_everywhere(gateway: TestGateway, origin: Origin) -> None:
    """Every command with `--output json` prints one document and nothing else on standard output."""
    box = gateway.sandbox()
    box.curl(origin.url("/x"))
    box.curl("-X", "POST", origin.url("/x"))
    request = gateway.awaited(event="request.intent", sandbox=box.id)[0]["request_id"]
    commands = [
        ["status"],
        ["sandbox", "create", "--role", "agent"],
        ["sandbox", "list"],
        ["sandbox", "list", "--all"],
        ["sandbox", "show", box.id],
        ["secret", "list"],
        ["policy", "check"],
        ["policy", "test"],
        ["policy", "explain", "GET", "https://api.test/x", "--role", "agent"],
        ["policy", "show"],
        ["policy", "reload"],
        ["audit", "search", "--event", "request.intent"],
        ["audit", "show", request],
        ["audit", "verify"],
        ["why", request],
        ["why", f"https://api.test:{origin.port}/x", "--role", "agent"],
        ["ca", "show"],
        ["clock", "reset", "--why", "a test"],
        ["sandbox", "end", box.id],
    ]
    for words in commands:
        answer = invoke(*_with_config(words, gateway), "--output", "json")
        assert answer.code in (0, 1), (words, answer.err)
        assert _documents(answer.out), (words, answer)
        assert len(_documents(answer.out)) == 1, words
    lines = invoke(*_with_config(["audit", "tail", "--once"], gateway), "--output", "json").out
    assert len(_documents(lines)) == 10
    assert set(json.loads(invoke("version", "--output", "json").out)) == {"version", "python"}
    assert isinstance(json.loads(invoke("policy", "schema").out), dict)


def _documents(text: str) -> list[object]:
    """The JSON documents that follow one another in `text`."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


def test_piped_output_is_plain(gateway: TestGateway) -> None:
    """No escape sequence and no frame in a pipe, whatever FORCE_COLOR says; tables are tab-separated."""
    variables = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "200"}
    for words in (
        ["sandbox", "list", "--all"],
        ["status", "--wrong"],
        ["audit", "tail", "--once"],
        ["env", "--role", "agent"],
    ):
        answer = gateway.exeat(*words, env=variables)
        assert not re.search("[\x1b╭╮╰╯│─]", answer.out + answer.err), words
    rows = gateway.exeat("secret", "list", env=variables).out.splitlines()
    assert rows[0] == "NAME\tOWNER\tVERSION"
    assert any(row.startswith("api\t") for row in rows)


def test_no_color_is_respected_on_a_terminal(gateway: TestGateway) -> None:
    """On a terminal there is colour and a table; with NO_COLOR the same text without any escape sequence."""
    shown = {}
    for value in ("", "1"):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [EXEAT, "policy", "explain", "--config", str(gateway.settings_file), "GET", "ftp://x"],
            env={"PATH": PATH, "HOME": str(gateway.home), "TERM": "xterm-256color", "NO_COLOR": value},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        ) as process:
            os.close(theirs)
            data = b""
            with contextlib.suppress(OSError):  # how a pseudo-terminal says that its other end is closed
                while piece := os.read(ours, 4096):
                    data += piece
            os.close(ours)
            assert process.wait(60) == 2
        shown[value] = data.decode()
    assert "\x1b[" in shown[""]
    assert "\x1b" not in shown["1"]
    assert "exeat: " in shown["1"]


def test_every_environment_format_is_printed_alone(gateway: TestGateway) -> None:
    """`exeat env` writes the variables to standard output and remarks to standard error, so that eval is safe."""
    for format_ in FORMATS:
        answer = invoke(*_with_config(["env", "--role", "agent"], gateway), "--format", format_)
        assert answer.code == 0
        assert "created sandbox" in answer.err
        assert "created sandbox" not in answer.out
        assert "HTTPS_PROXY" in answer.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_there(shell: str, tmp_path: Path) -> None:
    """`exeat --show-completion SHELL` prints a script, and completing `exeat sa` offers `sandbox`."""
    environment = {"PATH": PATH, "HOME": str(tmp_path)}
    shown = subprocess.run(
        [EXEAT, "--show-completion", shell], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "_EXEAT_COMPLETE" in shown
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0
        offered = subprocess.run(
            [EXEAT],
            env=environment | {"_EXEAT_COMPLETE": "complete_bash", "COMP_WORDS": "exeat sa", "COMP_CWORD": "1"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        assert "sandbox" in offered.split()
