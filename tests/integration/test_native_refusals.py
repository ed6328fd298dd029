"""What a person reads when a client of theirs is refused: the reason and the request's id, from the client itself.

Unmodified clients ask a read-only sandbox for what no rule grants. Each must end with our words, ask once, and look
nowhere else: no other index, no source behind a module proxy. Clients that are not installed here are played by curl
with what they call themselves, and their carrier of text is read where they read it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rules.catalogue import builtin_services
from tests.support.gateway import Box, Completed, TestGateway
from tests.support.githttp import git_backend, make_repository
from tests.support.origins import Exchange, Origin
from tests.support.programs import lacking, program
from tests.support.registries import (
    answering,
    make_wheel,
    serve_crate,
    serve_gems,
    serve_index,
    serve_module,
    serve_registry,
)

pytestmark = pytest.mark.xdist_group("native-refusals")

NAMES = ("index", "other", "registry", "modules", "gems", "forge", "images", "crates", "svc")
POLICY = """
services:
  index: {{like: pypi, base: "{index}"}}
  other: {{like: pypi, base: "{other}"}}
  registry: {{like: npm, base: "{registry}"}}
  modules: {{like: go, base: "{modules}"}}
  gems: {{like: rubygems, base: "{gems}"}}
  forge: {{like: github, base: "{forge}"}}
  images: {{like: oci, base: "{images}"}}
  cargo: {{like: crates, base: "{crates}"}}
  java: {{like: maven, base: "{svc}/maven"}}
  net: {{like: nuget, base: "{svc}/nuget"}}
  php: {{like: packagist, base: "{svc}/php"}}
  hub: {{like: huggingface, base: "{svc}/hub"}}
  store: {{like: s3, base: "{svc}/store"}}
  table: {{like: aws-dynamodb, base: "{svc}/table"}}
  who: {{like: aws-sts, base: "{svc}/who"}}
  tracker: {{like: mcp, base: "{svc}/mcp"}}
  gpt: {{like: openai, base: "{svc}/gpt"}}
  claude: {{like: anthropic, base: "{svc}/claude"}}
roles:
  agent:
    allow:
      - {{name: index, service: index, operations: [simple.read], with: {{package: exeat-hello}}}}
      - {{service: other, operations: [read]}}
      - {{name: registry, service: registry, operations: [package.read], with: {{package: exeat-hello}}}}
      - {{name: modules, service: modules, operations: [module.read], with: {{module: "git.test/open/*"}}}}
      - {{name: source, host: git.test, methods: [GET], paths: ["/**"], query: any}}
      - {{name: gems, service: gems, operations: [index.read]}}
      - {{name: forge, service: forge, operations: [git.fetch, rest.read, graphql.query], with: {{repository: o/r}},
         client_auth: pass}}
      - {{name: images, service: images, operations: [image.pull], with: {{repository: "open/*"}}}}
      - {{name: crates, service: cargo, operations: [index.read]}}
      - {{name: maven, service: java, operations: [read]}}
      - {{name: nuget, service: net, operations: [read]}}
      - {{name: php, service: php, operations: [read]}}
      - {{name: hub, service: hub, operations: [read]}}
      - {{name: store, service: store, operations: [object.read], with: {{bucket: data}}}}
      - {{name: table, service: table, operations: [item.read], with: {{table: orders}}}}
      - {{name: who, service: who, operations: [read]}}
      - {{name: tracker, service: tracker, operations: [tools.call], with: {{tool: search}}}}
      - {{name: gpt, service: gpt, operations: [read]}}
      - {{name: claude, service: claude, operations: [read]}}
    deny:
      - {{name: closed, host: svc.test, methods: [GET], paths: ["/closed"], message: "Ask the platform team."}}
  publisher:
    allow:
      - {{service: [index, registry], operations: [read]}}
      - {{name: wheel, service: index, operations: [publish], with: {{package: exeat-hello}}, client_auth: pass}}
      - {{name: npm, service: registry, operations: [publish], with: {{package: exeat-hello}}, client_auth: pass}}
"""
PIP = {"PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
NPM = {"npm_config_audit": "false", "npm_config_update_notifier": "false", "npm_config_fund": "false", "CI": "1"}
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") or "uv"
WHEEL = "exeat_hello-1.0-py3-none-any.whl"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DELETE = "mutation {{ deleteRef(input: {{refId: 1}}) {{ clientMutationId }} }}"
NEVER = (401, 404, 407, 410, 429)
"""What makes clients ask for a password, look elsewhere, or ask again; so does everything from 500."""


@dataclass
class Scene:
    """The origins, a gateway, and a sandbox of each role."""

    origins: dict[str, Origin]
    gateway: TestGateway
    agent: Box
    publisher: Box

    def url(self, which: str, path: str = "/") -> str:
        return self.origins[which].url(path)

    def forget(self) -> None:
        for origin in self.origins.values():
            origin.received.clear()
        self.agent, self.publisher = self.gateway.sandbox(), self.gateway.sandbox("publisher")

    def records(self) -> list[dict[str, Any]]:
        """What the log says of requests since `forget`, once they are over."""
        since = [one for box in (self.agent, self.publisher) for one in self.gateway.settled(sandbox=box.id)]
        return [one for one in since if str(one["event"]).startswith("request.")]

    def refused(self) -> list[dict[str, Any]]:
        return [one for one in self.records() if one["event"] == "request.refused"]

    def received(self, which: str) -> list[str]:
        return [f"{one.method} {one.path}" for one in self.origins[which].received]


async def graphql_answer(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(200, b'{"data": {}}', (("Content-Type", "application/json"),))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    repositories = tmp_path_factory.mktemp("repositories")
    make_repository(repositories / "o/r.git", {"README.md": "hello\n"})
    with ExitStack() as opened:
        names = (*NAMES, "git")
        origins = {
            name: opened.enter_context(Origin(f"{name}.test", address=f"127.0.0.{111 + number}").run_in_thread())
            for number, name in enumerate(names)
        }
        serve_index(origins["index"])
        serve_index(origins["other"])
        serve_registry(origins["registry"])
        serve_gems(origins["gems"])
        serve_crate(origins["crates"])
        serve_module(origins["modules"], "git.test/open/hello")
        origins["forge"].on("/o/*", git_backend(repositories))
        origins["forge"].on("/api/graphql", graphql_answer)
        origins["images"].on("/v2/", answering(b"{}", "application/json"))
        gateway = opened.enter_context(
            TestGateway(
                tmp_path_factory.mktemp("native"),
                policy=POLICY.format(**{name: origins[name].base for name in NAMES}),
                origins=list(origins.values()),
            )
        )
        yield Scene(origins, gateway, gateway.sandbox(), gateway.sandbox("publisher"))


# --- clients -----------------------------------------------------------------------------------------------------


def pip(scene: Scene, folder: Path) -> Completed:
    url = scene.url("index", "/simple/")
    return scene.agent.command(
        *(sys.executable, "-m", "pip", "download", "--dest", str(folder), "--index-url", url, "exeat-hello"), env=PIP
    )


def uv_environment(folder: Path) -> dict[str, str]:
    return {"UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(folder / "cache"), "UV_PYTHON": sys.executable}


def uv_pip(scene: Scene, folder: Path, *words: str) -> Completed:
    target = str(folder / "target")
    return scene.agent.command(UV, "pip", "install", "--target", target, *words, env=uv_environment(folder))


def uv_artefact(scene: Scene, folder: Path) -> Completed:
    return uv_pip(scene, folder, "--default-index", scene.url("index", "/simple/"), "exeat-hello")


def npm_install(scene: Scene, folder: Path, name: str) -> Completed:
    return scene.agent.command(
        "npm",
        "install",
        "--prefix",
        str(folder),
        "--registry",
        scene.url("registry"),
        name,
        env=npm_environment(folder),
    )


def npm_elsewhere(scene: Scene, folder: Path) -> Completed:
    """Refused at CONNECT: no rule inspects that port, so nobody knows whether TLS would follow."""
    return scene.agent.command(
        "npm", "view", "x", "--registry", "https://nowhere.test:9443/", env=npm_environment(folder)
    )


def npm_environment(folder: Path) -> dict[str, str]:
    return NPM | {"npm_config_cache": str(folder / "npm-cache")}


def pnpm(scene: Scene, folder: Path) -> Completed:
    (folder / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
    store = ("--store-dir", str(folder / "store"))
    return scene.agent.command(
        "pnpm", "add", "--dir", str(folder), "--registry", scene.url("registry"), *store, "exeat-hello", env=NPM
    )


def go(scene: Scene, folder: Path, *words: str, proxy: str = "") -> Completed:
    (folder / "go.mod").write_text("module example.test/x\n\ngo 1.19\n")
    environment = {
        "GOPROXY": proxy or f"{scene.url('modules', '').rstrip('/')},direct",
        "GONOSUMDB": "*",
        "GOFLAGS": "-mod=mod -modcacherw",
        "GOPATH": str(folder / "gopath"),
        "GOCACHE": str(folder / "gocache"),
        "GOTOOLCHAIN": "local",
        "GOINSECURE": "",
    }
    return scene.agent.command("go", "get", *words, env=environment, cwd=folder)


def cargo(scene: Scene, folder: Path) -> Completed:
    (folder / "src").mkdir()
    (folder / "src/lib.rs").write_text("")
    (folder / "Cargo.toml").write_text(
        '[package]\nname = "x"\nversion = "0.1.0"\nedition = "2021"\n'
        '[dependencies]\nexeat-hello = { version = "1", registry = "local" }\n'
    )
    home = folder / "cargo-home"
    home.mkdir()
    (home / "config.toml").write_text(f'[registries.local]\nindex = "sparse+{scene.url("crates")}"\n')
    kept = {name: os.environ[name] for name in ("RUSTUP_HOME", "HOME") if name in os.environ}
    return scene.agent.command("cargo", "fetch", env={"CARGO_HOME": str(home)} | kept, cwd=folder)


def bundle(scene: Scene, folder: Path) -> Completed:
    (folder / "Gemfile").write_text(f'source "{scene.url("gems", "")}"\ngem "exeat-hello"\n')
    environment = {
        "BUNDLE_PATH": str(folder / "gems"),
        "BUNDLE_SILENCE_ROOT_WARNING": "1",
        "BUNDLE_USER_HOME": str(folder),
    }
    return scene.agent.command("bundle", "install", env=environment, cwd=folder)


def gem(scene: Scene, folder: Path) -> Completed:
    words = ("--clear-sources", "--source", scene.url("gems", "/closed/"), "--install-dir", str(folder / "gems"))
    return scene.agent.command("gem", "install", *words, "exeat-hello", env={"HOME": str(folder)})


def gh(scene: Scene, folder: Path, *words: str) -> Completed:
    host = f"forge.test:{scene.origins['forge'].port}"
    environment = {"GH_HOST": host, "GH_ENTERPRISE_TOKEN": "x", "GH_CONFIG_DIR": str(folder), "GH_PROMPT_DISABLED": "1"}
    return scene.agent.command("gh", *[word.format(host=host) for word in words], env=environment)


def git_push(scene: Scene, folder: Path) -> Completed:
    work = folder / "work"
    cloned = scene.agent.command("git", "clone", "-q", scene.url("forge", "/o/r.git"), str(work))
    assert cloned.code == 0, cloned
    return scene.agent.command("git", "-C", str(work), "push", "origin", "HEAD:refs/heads/other")


def skopeo(scene: Scene, folder: Path) -> Completed:
    image = f"docker://images.test:{scene.origins['images'].port}/closed/base:v1"
    environment = {"XDG_RUNTIME_DIR": str(folder)}
    return scene.agent.command("skopeo", "--insecure-policy", "copy", image, f"oci:{folder / 'i'}:v1", env=environment)


def twine(scene: Scene, folder: Path, box: Box | None = None, name: str = WHEEL) -> Completed:
    (folder / name).write_bytes(make_wheel())
    words = ("--non-interactive", "--disable-progress-bar", "-u", "__token__", "-p", "pypi-x")
    url = scene.url("index", "/legacy/")
    return (box or scene.agent).command(
        *("twine", "upload", *words, "--repository-url", url, str(folder / name)),
        env={"COLUMNS": "200", "HOME": str(folder)},
    )


def uv_publish(scene: Scene, folder: Path, box: Box | None = None) -> Completed:
    (folder / WHEEL).write_bytes(make_wheel())
    words = ("-u", "__token__", "-p", "pypi-x", "--publish-url", scene.url("index", "/"), str(folder / WHEEL))
    return (box or scene.agent).command(UV, "publish", *words, env=uv_environment(folder))


def npm_publish(scene: Scene, folder: Path, box: Box | None = None, name: str = "exeat-hello") -> Completed:
    work = folder / name
    work.mkdir()
    (work / "package.json").write_text(json.dumps({"name": name, "version": "2.0.0"}))
    registry = scene.url("registry")
    token = f"--{registry.removeprefix('https:')}:_authToken=npm_x"
    return (box or scene.agent).command(
        "npm", "publish", "--registry", registry, token, env=npm_environment(folder), cwd=work
    )


CLIENTS: dict[str, tuple[str, Callable[[Scene, Path], Completed]]] = {
    "pip: a file": ("pip", pip),
    "uv: a file": (UV, uv_artefact),
    "npm: a tarball": ("npm", lambda scene, folder: npm_install(scene, folder, "exeat-hello")),
    "npm: a port of no rule": ("npm", npm_elsewhere),
    "npm: a package": ("npm", lambda scene, folder: npm_install(scene, folder, "exeat-closed")),
    "pnpm: a tarball": ("pnpm", pnpm),
    "go: a version": ("go", lambda scene, folder: go(scene, folder, "git.test/closed/m@v1.0.0")),
    "go: the newest": ("go", lambda scene, folder: go(scene, folder, "git.test/closed/m")),
    "cargo: a crate": ("cargo", cargo),
    "bundler: a gem": ("bundle", bundle),
    "gem: an index": ("gem", gem),
    "gh: REST": ("gh", lambda scene, folder: gh(scene, folder, "api", "repos/o/other")),
    "gh: REST that nothing describes": ("gh", lambda scene, folder: gh(scene, folder, "api", "user/keys")),
    "gh: a list": ("gh", lambda scene, folder: gh(scene, folder, "issue", "list", "-R", "{host}/o/other")),
    "gh: GraphQL": (
        "gh",
        lambda scene, folder: gh(scene, folder, "api", "graphql", "-f", f"query={DELETE}"),
    ),
    "git: another repository": (
        "git",
        lambda scene, folder: scene.agent.command(
            "git", "clone", scene.url("forge", "/o/other.git"), str(folder / "x")
        ),
    ),
    "git: a push": ("git", git_push),
    "skopeo: a pull": ("skopeo", skopeo),
    "curl": ("curl", lambda scene, folder: scene.agent.curl("--fail-with-body", scene.url("svc", "/closed"))),
    "twine: an upload": ("twine", twine),
    "uv: an upload": (UV, uv_publish),
    "npm: a publication": ("npm", npm_publish),
}
AGAIN = {
    "bundler: a gem": ("GET /gems/exeat-hello-1.0.gem", 4),
    "gem: an index": ("GET /closed/prerelease_specs.4.8.gz", 2),
}
"""Clients that ask for one thing more than once, whatever the answer: what, and how often."""


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_shows_the_reason_and_the_request_and_looks_nowhere_else(
    scene: Scene, name: str, tmp_path: Path
) -> None:
    """C111, C119: the words are ours, the id is in the log, what was refused reached nobody, and was asked for once."""
    client, run = CLIENTS[name]
    program(client)
    scene.forget()
    done = run(scene, tmp_path)
    said = COLOURS.sub("", done.out + done.err)
    assert done.code != 0, said
    refused = scene.refused()
    assert refused, said
    told = [one for one in refused if one["request_id"] in said]
    assert told, said
    assert all(str(one["reason"]) in said and (one.get("rule") or "") in said for one in told), said
    assert "Exeat" in said, said
    assert scene.received("other") == []
    asked = Counter(f"{one['method']} {one.get('path')}" for one in refused)
    what, often = AGAIN.get(name, ("", 1))
    assert all(count <= (often if line == what else 1) for line, count in asked.items()), asked
    permitted = [one for one in scene.records() if one["event"] == "request.intent"]
    assert sum(len(origin.received) for origin in scene.origins.values()) == len(permitted)
    assert {one["host"] for one in scene.records()} == {refused[0]["host"]}


def test_pip_takes_a_refused_index_for_an_empty_one_and_says_why_only_when_asked(scene: Scene, tmp_path: Path) -> None:
    """C119: without -vv pip says that there is no such package; the phrase is in its debug lines, and it goes on to
    no other index than the person named."""
    words = (sys.executable, "-m", "pip", "download", "-vv", "--dest", str(tmp_path))
    scene.forget()
    done = scene.agent.command(*words, "--index-url", scene.url("index", "/simple/"), "exeat-closed", env=PIP)
    assert done.code != 0
    [refused] = scene.refused()
    assert refused["request_id"] in done.out + done.err
    assert {one["host"] for one in scene.records()} == {"index.test"}


def test_uv_does_not_take_from_another_index_what_the_first_refuses(scene: Scene, tmp_path: Path) -> None:
    """C119: 403 on an index ends uv's search, where 404 would have led it to the next one."""
    scene.forget()
    words = ("--index", scene.url("index", "/closed/"), "--default-index", scene.url("other", "/simple/"))
    done = uv_pip(scene, tmp_path, *words, "exeat-hello")
    assert done.code != 0, done
    assert [one["path"] for one in scene.refused()] == ["/closed/exeat-hello/"]
    assert scene.received("other") == []


# --- Go's module proxy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["@v/list", "@latest", "@v/v1.0.0.info", "@v/v1.0.0.mod", "@v/v1.0.0.zip"])
def test_a_denied_module_is_403_for_everything_that_is_asked_of_it(scene: Scene, path: str) -> None:
    """T27, C123: never 404 or 410, which send go to the source; a few graphic lines, which go prints."""
    scene.forget()
    answer = ask(scene, scene.url("modules", f"/git.test/closed/m/{path}"), "-A", "Go-http-client/1.1")
    assert answer.status == 403
    assert answer.headers.get_content_type() == "text/plain"
    lines = answer.body.splitlines()
    assert len(lines) <= 8
    assert len(answer.body) <= 648
    assert all(line and line.isascii() and line.isprintable() for line in lines)
    assert scene.refused()[0]["request_id"] in answer.body
    assert scene.received("modules") == []


def test_the_checksum_database_is_refused_in_words(scene: Scene) -> None:
    """C123: a lookup would tell the name of a private module; where no rule grants it, go prints why."""
    host = builtin_services()["go"].endpoints["sums"].host
    assert host is not None
    scene.forget()
    for path in ("supported", "latest", "lookup/git.test/closed/m@v1.0.0"):
        answer = ask(scene, scene.url("modules", f"/sumdb/{host.text}/{path}"), "-A", "Go-http-client/1.1")
        assert answer.status == 403
        assert "reason no-rule" in answer.body
    assert scene.received("modules") == []


@pytest.mark.skipif(lacking("go") != "", reason=lacking("go") or "go is there")
def test_go_does_not_ask_the_source_of_a_denied_module(scene: Scene, tmp_path: Path) -> None:
    """T27, C123: with `GOPROXY=...,direct` and a rule that would permit the source, go stops at the refusal.

    The same command with `direct` alone does ask the source: so the log would show it.
    """
    scene.forget()
    done = go(scene, tmp_path, "git.test/closed/m@v1.0.0")
    assert done.code != 0
    assert "Exeat" in done.err
    assert {one["host"] for one in scene.records()} == {"modules.test"}
    scene.forget()
    assert go(scene, tmp_path, "git.test/closed/m@v1.0.0", proxy="direct").code != 0
    assert "git.test" in {one["host"] for one in scene.records()}


@pytest.mark.skipif(lacking("go") != "", reason=lacking("go") or "go is there")
def test_go_gets_a_permitted_module(scene: Scene, tmp_path: Path) -> None:
    """T27: under the same policy a module that a rule names comes."""
    scene.forget()
    done = go(scene, tmp_path, "git.test/open/hello@v1.0.0")
    assert done.code == 0, done
    assert not any("/hello/" in one["path"] for one in scene.refused())  # beside it go asks for what it may lie in
    assert "GET /git.test/open/hello/@v/v1.0.0.zip" in scene.received("modules")


# --- publishing --------------------------------------------------------------------------------------------------

UPLOADS: dict[str, tuple[str, str, Callable[[Scene, Path, Box], Completed], str]] = {
    "npm": ("npm", "registry", npm_publish, "PUT /exeat-hello"),
    "twine": ("twine", "index", twine, "POST /legacy/"),
    "uv": (UV, "index", uv_publish, "POST /"),
}


def refuse_another(scene: Scene, folder: Path, which: str) -> Completed:
    if which == "npm":
        return npm_publish(scene, folder, scene.publisher, "exeat-other")
    words = ("-F", ":action=file_upload", "-F", "name=exeat-other", "-F", "version=1.0")
    upload = ("-F", "content=@/dev/null;filename=exeat_other-1.0-py3-none-any.whl")
    return scene.publisher.curl("--fail-with-body", *words, *upload, scene.url("index", "/legacy/"))


@pytest.mark.parametrize("which", UPLOADS)
def test_reading_is_no_publishing(scene: Scene, which: str, tmp_path: Path) -> None:
    """A role that reads a registry uploads nothing there: no byte of the attempt arrives."""
    client, origin, run, line = UPLOADS[which]
    program(client)
    scene.forget()
    assert run(scene, tmp_path, scene.agent).code != 0
    assert line not in scene.received(origin)
    assert [one.method for one in scene.origins[origin].received if one.method not in ("GET", "HEAD")] == []


@pytest.mark.parametrize("which", UPLOADS)
def test_a_named_publication_goes_on_for_the_package_that_the_rule_binds_and_no_other(
    scene: Scene, which: str, tmp_path: Path
) -> None:
    """The operation must be named and its package bound; another package is refused by the same rule."""
    client, origin, run, line = UPLOADS[which]
    program(client)
    scene.forget()
    refused = refuse_another(scene, tmp_path, which)
    assert refused.code != 0
    assert "package must be exeat-hello" in refused.out + refused.err, refused
    assert not any(one.startswith(("PUT", "POST")) for one in scene.received(origin))
    scene.forget()
    done = run(scene, tmp_path, scene.publisher)
    assert line in scene.received(origin), done
    sent = next(one for one in scene.origins[origin].received if one.method in ("PUT", "POST"))
    assert sent.complete
    assert sent.header("authorization")
    outcome = [one for one in scene.records() if one["event"] == "request.outcome" and one["method"] == sent.method][-1]
    assert outcome["operation"] == f"{origin}/publish"
    assert "package=exeat-hello" in outcome["arguments"]
    assert done.code == 0, done


# --- clients that are not here: what they read, from curl --------------------------------------------------------


@dataclass
class Answer:
    status: int
    phrase: str
    headers: Message
    body: str


def ask(scene: Scene, url: str, *arguments: str) -> Answer:
    """One request of the agent's over HTTP/1.1, its answer in parts."""
    done = scene.agent.curl("-i", "--suppress-connect-headers", *arguments, url)
    head, _, body = done.out.replace("\r\n", "\n").partition("\n\n")
    line, _, rest = head.partition("\n")
    status, _, phrase = line.partition(" ")[2].partition(" ")
    return Answer(int(status), phrase, Parser().parsestr(rest, headersonly=True), body)


def phrase(answer: Answer) -> str:
    return answer.phrase


def body(answer: Answer) -> str:
    return answer.body


def header(answer: Answer) -> str:
    return str(answer.headers["x-error-message"])


def text_at(*path: str | int) -> Callable[[Answer], str]:
    """What a JSON body holds at `path`."""

    def read(answer: Answer) -> str:
        value = json.loads(answer.body)
        for step in path:
            value = value[step]
        return str(value)

    return read


def xml_at(path: str) -> Callable[[Answer], str]:
    return lambda answer: str(ElementTree.fromstring(answer.body).findtext(path))


JSON = ("-H", "Content-Type: application/json")
CALL = '{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "delete", "arguments": {}}}'
AMZ = ("-H", "Content-Type: application/x-amz-json-1.0", "-H", "X-Amz-Target: DynamoDB_20120810.DeleteItem")
CARRIERS: dict[str, tuple[str, tuple[str, ...], Callable[[Answer], str]]] = {
    "docker": (
        "images /v2/closed/base/manifests/v1",
        ("-A", "docker/27.1.1 go/go1.21"),
        text_at("errors", 0, "message"),
    ),
    "cargo": ("crates /api/v1/crates/exeat_hello/1.0.0/download", ("-A", "cargo 1.88.0"), lambda got: got.body[:512]),
    "Maven": ("svc /maven/org/x/y/1/y-1.jar", ("-T", "/dev/null"), phrase),
    "NuGet": ("svc /nuget/api/v2/package", ("-T", "/dev/null"), phrase),
    "Composer": ("svc /php/api/create-package", ("-X", "POST"), phrase),
    "huggingface_hub": ("svc /hub/api/repos/create", (*JSON, "-d", "{}"), header),
    "S3": ("svc /store/other/key", (), xml_at("Message")),
    "AWS, JSON": ("svc /table/", (*AMZ, "-d", '{"TableName": "orders"}'), text_at("message")),
    "AWS, query": ("svc /who/", ("-d", "Action=AssumeRole&Version=2011-06-15"), xml_at("Error/Message")),
    "MCP": (
        "svc /mcp",
        (*JSON, "-H", "Accept: application/json, text/event-stream", "-d", CALL),
        text_at("error", "message"),
    ),
    "OpenAI": ("svc /gpt/v1/files", (*JSON, "-d", "{}"), text_at("error", "message")),
    "Anthropic": ("svc /claude/v1/files", (*JSON, "-d", "{}"), text_at("error", "message")),
    "git-lfs": (
        "forge /o/other.git/info/lfs/objects/batch",
        ("-H", "Accept: application/vnd.git-lfs+json", "-H", "Content-Type: application/vnd.git-lfs+json", "-d", "{}"),
        text_at("message"),
    ),
    "apt, elsewhere": ("http://nowhere.test/dists/stable/InRelease", ("-A", "Debian APT-HTTP/1.3 (2.6.1)"), phrase),
    "pip, elsewhere": ("https://nowhere.test/simple/x/", ("-A", "pip/24.2 {}"), phrase),
    "uv, elsewhere": ("https://nowhere.test/simple/x/", ("-A", "uv/0.9.1"), text_at("detail")),
    "npm, elsewhere": ("https://nowhere.test/x", ("-A", "npm/10.2.0 node/v20"), text_at("error")),
    "pnpm, elsewhere": ("https://nowhere.test/x", ("-A", "pnpm/9.15.9 npm/? node/v20"), phrase),
    "docker, elsewhere": (
        "https://nowhere.test/v2/x/manifests/v1",
        ("-A", "docker/27.1"),
        text_at("errors", 0, "message"),
    ),
    "go, elsewhere": ("https://nowhere.test/x/@v/list", ("-A", "Go-http-client/1.1"), body),
    "Bundler, elsewhere": ("https://nowhere.test/versions", ("-A", "bundler/2.3.15 rubygems/3.3.15"), phrase),
    "wget, elsewhere": ("https://nowhere.test/x", ("-A", "Wget/1.21.3"), phrase),
}


@pytest.mark.parametrize("name", CARRIERS)
def test_each_client_finds_reason_and_request_where_it_reads(scene: Scene, name: str) -> None:
    """C111, C123: a status that sends nobody elsewhere, and the text in the one place that this client shows."""
    place, arguments, read = CARRIERS[name]
    which, _, path = place.partition(" ")
    scene.forget()
    answer = ask(scene, scene.url(which, path) if path else place, *arguments)
    [refused] = scene.refused()
    assert answer.status not in NEVER
    assert 400 <= answer.status < 500
    told = read(answer)
    assert refused["reason"] in told, answer
    assert refused["request_id"] in told, answer
    assert answer.headers["x-should-retry"] == "false"
    assert which not in scene.origins or scene.received(which) == []
