"""Sources that start a program: what it is given, what it may print, and what never comes out."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import traceback
from pathlib import Path

import pytest

from broker.sources import program as program_module
from broker.sources.base import Document, SourceError
from broker.sources.registry import Opened, Sources
from broker.sources.store import StoreSource
from rules.secret_references import WHOLE
from tests.support.secretsources import CANARY, all_sources, definitions, program, sandbox
from tests.support.waiting import until

NOW = 1_800_000_000.0


async def configured(folder: Path, text: str, environment: dict[str, str] | None = None) -> Sources:
    sources = all_sources(folder, environment, now=lambda: NOW)
    await sources.configure(definitions(text), {})
    return sources


async def read(sources: Sources, reference: str) -> tuple[Document, bytes]:
    opened, place = sources.named(reference, sandbox())
    document = await opened.source.read(place.document, None)
    return document, document.value(place.field, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sentence", "body", "code"),
    [
        ("it fails, and prints a value", f"echo {CANARY.decode()}; exit 3", "source-refused"),
        ("it fails by a signal", f"echo {CANARY.decode()}; kill -9 $$", "source-refused"),
        ("it prints too much", f"while :; do echo {CANARY.decode() * 50}; done", "source-refused"),
        ("it never ends", f"echo {CANARY.decode()}; sleep 600", "source-unreachable"),
        ("it leaves a child behind", f"echo {CANARY.decode()}; sleep 600 & exec sleep 601", "source-unreachable"),
    ],
)
async def test_what_a_program_does_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str, body: str, code: str
) -> None:
    """A fixed code that names the program; nothing that it printed, and nothing of it is left running."""
    monkeypatch.setattr(program_module, "MAX_OUTPUT", 10_000)
    path = program(tmp_path, "helper", f"echo $$ >> {tmp_path}/pids\n{body}\n")
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {path}}}")
    opened, _ = sources.named("h:x", None)
    object.__setattr__(opened.source._program, "seconds", 1.0)  # type: ignore[attr-defined]  # frozen; shorter for us
    with pytest.raises(SourceError) as caught:
        await read(sources, "h:x")
    assert caught.value.code == code, sentence
    assert str(path) in caught.value.detail
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caught.value.remedy
    assert CANARY.decode() not in shown.replace(body, "")
    leader = int((tmp_path / "pids").read_text())
    await asyncio.to_thread(until, lambda: not group_lives(leader), 10, "the end of the program's group")


def group_lives(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("sentence", "mode", "said"),
    [("others may write it", 0o722, "others may write"), ("nobody may run it", 0o600, "cannot be started")],
)
async def test_a_program_that_is_not_the_operators_alone(tmp_path: Path, sentence: str, mode: int, said: str) -> None:
    """Whoever could write it would choose the secret."""
    path = program(tmp_path, "helper", f"echo {CANARY.decode()}")
    path.chmod(mode)
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {path}}}")
    if mode == 0o600 and os.geteuid() == 0:
        path.chmod(0o600)  # root may start nothing either where no execute bit is set
    with pytest.raises(SourceError, match="source-refused") as caught:
        await read(sources, "h:x")
    assert said in caught.value.detail, sentence
    assert caught.value.remedy


@pytest.mark.parametrize("place", ["missing", "folder"])
async def test_a_program_that_is_not_there(tmp_path: Path, place: str) -> None:
    """The refusal says so, and it is asked again later without a restart."""
    if place == "folder":
        (tmp_path / "folder").mkdir()
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {tmp_path}/{place}}}")
    with pytest.raises(SourceError, match="source-refused") as caught:
        await read(sources, "h:x")
    assert caught.value.remedy


async def test_a_word_of_the_sandbox_never_becomes_an_option(tmp_path: Path) -> None:
    """What was written was checked; what a sandbox's attribute makes of it is checked again."""
    path = program(tmp_path, "helper", 'echo "got $1"')
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {path}}}")
    with pytest.raises(SourceError, match="source-refused"):
        sources.named("h:${sandbox.who}", sandbox(who="-rf"))
    assert sources.named("h:${sandbox.who}", sandbox(who="ok"))[1].document == "ok"


async def test_a_program_gets_its_arguments_and_named_variables_and_nothing_else(tmp_path: Path) -> None:
    """No shell, no variable that is not named, no descriptor of ours, an empty standard input."""
    path = program(
        tmp_path,
        "helper",
        f"""
        for word in "$@"; do echo "<$word>"; done > {tmp_path}/arguments
        /usr/bin/env > {tmp_path}/variables
        ls -l /proc/self/fd > {tmp_path}/descriptors
        cat > {tmp_path}/input
        echo {CANARY.decode()}
        """,
    )
    text = (
        f"h: {{kind: exec, program: {path}, arguments: [get, '--for={{name}}', '$HOME; id'], environment: [SESSION]}}"
    )
    sources = await configured(tmp_path, text, {"SESSION": "s-1", "OTHER": "other", "PATH": "/nowhere"})
    ours = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(ours, True)
    try:
        document, value = await read(sources, "h:team/x")
    finally:
        os.close(ours)
    assert value == CANARY
    assert document.lasts is None
    assert (tmp_path / "arguments").read_text() == "<get>\n<--for=team/x>\n<$HOME; id>\n"
    names = {line.partition("=")[0] for line in (tmp_path / "variables").read_text().splitlines()}
    assert names <= {"SESSION", "PWD", "SHLVL", "_", "OLDPWD"}
    assert "SESSION" in names
    assert (tmp_path / "input").read_bytes() == b""
    links = [line for line in (tmp_path / "descriptors").read_text().splitlines() if " -> " in line]
    assert {line.split(" -> ")[0].split()[-1] for line in links} <= {"0", "1", "2", "3"}, links


@pytest.mark.parametrize(
    ("sentence", "printed", "code"),
    [
        ("no JSON", CANARY.decode(), "source-unreadable"),
        ("no version", {"SecretAccessKey": CANARY.decode()}, "source-unreadable"),
        ("another version", {"Version": 2, "SecretAccessKey": CANARY.decode()}, "source-unreadable"),
        ("a list", [CANARY.decode()], "source-unreadable"),
        ("an end without a zone", {"Version": 1, "K": "v", "Expiration": "2027-01-15T08:00:00"}, "source-unreadable"),
        ("an end that is no time", {"Version": 1, "K": "v", "Expiration": CANARY.decode()}, "source-unreadable"),
        ("nested too deep", "[" * 100_000, "source-unreadable"),
    ],
)
async def test_what_is_no_credential_process(tmp_path: Path, sentence: str, printed: object, code: str) -> None:
    """`format: json` takes exactly the documented shape; what was printed instead is not repeated."""
    (tmp_path / "printed").write_text(printed if isinstance(printed, str) else json.dumps(printed))
    path = program(tmp_path, "helper", f"cat {tmp_path}/printed")
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {path}, format: json}}")
    with pytest.raises(SourceError) as caught:
        await read(sources, "h:x#SecretAccessKey")
    assert caught.value.code == code, sentence
    assert CANARY.decode() not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None or CANARY.decode() not in repr(vars(caught.value.__context__))


async def test_a_credential_process_gives_fields_and_an_end(tmp_path: Path) -> None:
    """Every text is a field, and `Expiration` is in seconds from now; parts of one document come together."""
    shape = {"Version": 1, "AccessKeyId": "AKIAEXAMPLE", "SecretAccessKey": CANARY.decode(), "SessionToken": "s" * 20}
    (tmp_path / "printed").write_text(json.dumps({**shape, "Expiration": "2027-01-15T09:00:00+01:00"}))
    path = program(tmp_path, "helper", f"cat {tmp_path}/printed")
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {path}, format: json}}")
    document, value = await read(sources, "h:x#SecretAccessKey")
    assert value == CANARY
    assert document.fields["AccessKeyId"] == b"AKIAEXAMPLE"
    assert document.lasts == 0.0  # NOW is that very moment: the cache takes nothing up that is over
    with pytest.raises(SourceError, match="source-missing") as caught:
        document.value("Missing", "h:x")
    assert "name a field" in caught.value.remedy
    with pytest.raises(SourceError, match="source-missing"):
        document.value(WHOLE, "h:x")


async def test_a_plain_value_that_is_json_has_fields_too(tmp_path: Path) -> None:
    """The whole, without its line end, or one of its fields by a dotted name."""
    path = program(tmp_path, "helper", """echo '{"a": {"b": "inner-value-0123"}, "n": 7, "list": ["x"]}'""")
    sources = await configured(tmp_path, f"h: {{kind: exec, program: {path}}}")
    document, value = await read(sources, "h:x#a.b")
    assert value == b"inner-value-0123"
    assert document.fields["n"] == b"7"
    assert document.value(WHOLE, "").startswith(b'{"a"')
    assert not document.value(WHOLE, "").endswith(b"\n")
    assert set(document.fields) == {WHOLE, "a.b", "n"}


async def test_1password_is_asked_by_its_own_program(tmp_path: Path) -> None:
    """`op read` with the reference as written; the service account's token goes by its variable, never by argv."""
    path = program(
        tmp_path,
        "op",
        f"""
        echo "$@" > {tmp_path}/arguments
        [ "$OP_SERVICE_ACCOUNT_TOKEN" = ops_token-0123456789 ] || exit 6
        printf %s {CANARY.decode()}
        """,
    )
    sources = await configured(
        tmp_path, f"op: {{kind: onepassword, program: {path}, auth: {{token: 'env:T'}}}}", {"T": "ops_token-0123456789"}
    )
    _, value = await read(sources, "op://Team/GitHub bot/token")
    assert value == CANARY
    assert (tmp_path / "arguments").read_text() == "read --no-newline op://Team/GitHub bot/token\n"
    with pytest.raises(SourceError, match="source-unknown"):
        sources.named("other://Team/GitHub/token", None)


async def test_what_a_program_is_opened_with_is_read_at_each_use(tmp_path: Path) -> None:
    """A token that is missing refuses, and one that was put there counts at once."""
    path = program(tmp_path, "op", 'printf "%s" "value-of-$OP_SERVICE_ACCOUNT_TOKEN"')
    token = tmp_path / "token"
    sources = await configured(tmp_path, f"op: {{kind: onepassword, program: {path}, auth: {{token: 'file:{token}'}}}}")
    with pytest.raises(SourceError, match="source-missing"):
        await read(sources, "op://a/b/c")
    token.write_text("first-token\n")
    token.chmod(0o600)
    assert (await read(sources, "op://a/b/c"))[1] == b"value-of-first-token"
    token.write_text("second-token\n")
    assert (await read(sources, "op://a/b/c"))[1] == b"value-of-second-token"


async def test_sops_decrypts_in_memory(tmp_path: Path) -> None:
    """The program gets the file and the key by its variable; a field of what it prints is taken. Nothing is written."""
    key = "AGE-SECRET-KEY-1EXAMPLE"
    path = program(
        tmp_path,
        "sops",
        f"""
        echo "$@" > {tmp_path}/arguments
        [ "$SOPS_AGE_KEY" = {key} ] || exit 128
        echo '{{"github": {{"token": "{CANARY.decode()}"}}}}'
        """,
    )
    sources = await configured(tmp_path, f"s: {{kind: sops, program: {path}, auth: {{age_key: 'env:K'}}}}", {"K": key})
    before = sorted(tmp_path.iterdir())
    _, value = await read(sources, "s:/etc/exeat/keys.yaml#github.token")
    assert value == CANARY
    assert (tmp_path / "arguments").read_text() == "--decrypt --output-type json /etc/exeat/keys.yaml\n"
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in before} <= {"arguments"}
    path.write_text("#!/bin/sh\necho canary-0123456789\n")
    with pytest.raises(SourceError, match="source-unreadable"):
        await read(sources, "s:/etc/exeat/keys.yaml#github.token")


@pytest.mark.skipif(shutil.which("age") is None, reason="Debian's package age is not installed")
async def test_age_itself_decrypts(tmp_path: Path) -> None:
    """The real program: a whole value, a field, a wrong identity, and a file that is none."""
    identity, other, plain = tmp_path / "identity", tmp_path / "other", tmp_path / "plain"
    for path in (identity, other):
        subprocess.run(["age-keygen", "-o", path], check=True, capture_output=True)
    recipient = subprocess.run(
        ["age-keygen", "-y", identity], check=True, capture_output=True, text=True
    ).stdout.strip()
    for name, value in (("whole", CANARY + b"\n"), ("json", b'{"token": "' + CANARY + b'"}')):
        plain.write_bytes(value)
        subprocess.run(["age", "-r", recipient, "-o", tmp_path / f"{name}.age", plain], check=True)
    plain.unlink()
    program_path = Path(shutil.which("age") or "").resolve()
    sources = await configured(tmp_path, f"a: {{kind: age, program: {program_path}, identity: {identity}}}")
    assert (await read(sources, f"a:{tmp_path}/whole.age"))[1] == CANARY
    assert (await read(sources, f"a:{tmp_path}/json.age#token"))[1] == CANARY
    with pytest.raises(SourceError, match="source-refused"):
        await read(sources, f"a:{tmp_path}/none.age")
    wrong = await configured(tmp_path, f"a: {{kind: age, program: {program_path}, identity: {other}}}")
    with pytest.raises(SourceError, match="source-refused"):
        await read(wrong, f"a:{tmp_path}/whole.age")


async def test_a_keyring_is_asked_by_secret_tool(tmp_path: Path) -> None:
    """By service and user; an empty answer is a secret that is not there."""
    path = program(
        tmp_path,
        "secret-tool",
        f"""
        echo "$@ on $DBUS_SESSION_BUS_ADDRESS" > {tmp_path}/arguments
        [ "$5" = bot ] && printf %s {CANARY.decode()}
        exit 0
        """,
    )
    sources = await configured(
        tmp_path,
        f"ring: {{kind: keyring, program: {path}, environment: [DBUS_SESSION_BUS_ADDRESS]}}",
        {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus"},
    )
    assert (await read(sources, "ring:github/bot"))[1] == CANARY
    said = (tmp_path / "arguments").read_text()
    assert said == "lookup service github username bot on unix:path=/run/user/1000/bus\n"
    with pytest.raises(SourceError, match="source-missing"):
        await read(sources, "ring:github/nobody")


async def test_a_changed_definition_is_another_source(tmp_path: Path) -> None:
    """Those that changed or went are named, the others stay as they are; one that went is unknown."""
    path = program(tmp_path, "helper", f"echo {CANARY.decode()}")
    text = f"a: {{kind: exec, program: {path}}}\nb: {{kind: exec, program: {path}}}"
    sources = await configured(tmp_path, text)
    kept: Opened = sources.named("b:x", None)[0]
    changed = await sources.configure(definitions(text.replace("program", "ttl: 1s, program", 1)), {})
    assert changed == {"a"}
    assert sources.named("b:x", None)[0] is kept
    assert await sources.configure(definitions(f"a: {{kind: exec, ttl: 1s, program: {path}}}"), {}) == {"b"}
    with pytest.raises(SourceError, match="source-unknown"):
        sources.named("b:x", None)


async def test_a_replaced_key_opens_its_sources_anew(tmp_path: Path) -> None:
    """Only those that are opened with it."""
    path = program(tmp_path, "op", f"echo {CANARY.decode()}")
    text = (
        f"a: {{kind: onepassword, program: {path}, auth: {{token: 'store:op'}}}}\n"
        f"b: {{kind: onepassword, program: {path}, auth: {{token: 'env:OP'}}}}"
    )
    sources = await configured(tmp_path, text)
    assert isinstance(sources._at_hand["store"], StoreSource)
    assert await sources.reopen("store:op") == {"a"}
    assert await sources.reopen("store:none") == frozenset()
