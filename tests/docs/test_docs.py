"""Documented = tested: pages that follow from the code are current, and every YAML block and command in them works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from exeat.places import Places
from exeat.settings import Settings, parse_settings
from rules.catalogue import builtin_services, parse_service
from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from rules.policytests import run_tests
from rules.reasons import REASONS
from rules.servicetests import run_service_tests
from tests.support.rows import every_row

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
PLACES = Places(config=Path("/c"), state=Path("/s"), run=Path("/r"))


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        found += [(page.name, text) for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]
    return found


YAML = blocks("yaml")
CREDENTIALS = [text for _, text in YAML if "\ncredentials:" in text]


def test_generated_pages_are_what_the_code_says() -> None:
    """docs/commands.md, docs/refusals.md and docs/services.md are current."""
    result = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_there_are_yaml_blocks_to_load() -> None:
    """The next test looks at something."""
    assert len(YAML) >= 5


@every_row(("page", "text"), YAML, ids=[f"{page}-{n}" for n, (page, _) in enumerate(YAML)])
def test_every_yaml_block_loads_and_its_tests_pass(page: str, text: str) -> None:
    """A block that a reader copies is accepted by the product as it stands."""
    if page == "settings.md":
        parse_settings(text, Path("/c/exeat.yaml"), PLACES)
        return
    if "\noperations:" in text:
        assert run_service_tests(parse_service(text, "service.yaml")) == ()
        return
    if "\ncredentials:" in text:
        names = re.findall(r"^  ([\w-]+):", text, re.M)
        hosts = re.findall(r"hosts: \[([\w.-]+)\]", text)
        assert names
        policy = "version: 1\nroles: {r: {allow: [{service: pypi, operations: [read]}]}}\n"
        if hosts:
            policy = (
                "version: 1\nroles: {r: {allow: [{name: a, host: "
                + hosts[0]
                + ", methods: [GET], paths: [/x], credential: "
                + names[0]
                + "}]}}\n"
            )
        parse_sources(Sources(policy={"policy.yaml": policy}, credentials=("credentials.yaml", text), services={}))
        return
    named = re.findall(r"\bcredential: ([\w-]+)", text)
    known = [CREDENTIALS[0], (ROOT / "docs/examples/credentials.yaml").read_text("utf-8")]
    fitting = [written for written in known if all(f"\n  {name}:" in written for name in named)]
    assert fitting, named
    credentials = ("credentials.yaml", fitting[0]) if named else None
    parsed = parse_sources(Sources(policy={"policy.yaml": text}, credentials=credentials, services={}))
    policy_value = compile_policy(parsed.document)
    failed = [str(result) for result in run_tests(policy_value, parsed.tests) if not result.passed]
    assert failed == [], page


def test_every_setting_is_documented() -> None:
    """docs/settings.md has a row for each key of exeat.yaml, and the defaults that it names are the real ones."""
    page = (ROOT / "docs/settings.md").read_text("utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    derived = {"file", "key_file", "passphrase_file", "key_credential", "wrapped_file", "wrapping"}
    known = {name for name in Settings.__dataclass_fields__ if name not in derived} | {"version", "key"}
    assert documented >= known, known - documented
    settings = parse_settings("version: 1\n", Path("/c/exeat.yaml"), PLACES)
    assert settings.listen == ("127.0.0.1", 3128)
    assert (settings.workers, settings.executors) == (1, 1)


def test_every_reason_is_documented() -> None:
    """docs/refusals.md has a row for each code."""
    page = (ROOT / "docs/refusals.md").read_text("utf-8")
    assert {code for code in REASONS if f"| `{code}` |" not in page} == set()


def test_every_operation_of_every_service_is_in_the_services_page() -> None:
    """A service that nobody can find is of no use: each has a section with all its operations and its variable."""
    page = (ROOT / "docs/services.md").read_text("utf-8")
    for name, service in builtin_services().items():
        _, found, section = page.partition(f"(`{name}`)\n")
        assert found, name
        section = section.partition("\n## ")[0]
        assert {f"| `{operation}` |" in section for operation in service.operation_names} == {True}, name
        held = () if service.credential is None else service.credential.placeholders
        assert all(f"`{spec.env}`" in section for _, spec in held), name


def test_commands_in_the_readme_exist() -> None:
    """`exeat WORD` in README and docs is a command of the program."""
    known = set(re.findall(r"^## `exeat ([\w -]+)`", (ROOT / "docs/commands.md").read_text("utf-8"), re.M))
    first = {name.split()[0] for name in known}
    for page, text in blocks("console"):
        for line in text.splitlines():
            if match := re.match(r"\$ (?:printf .* \| )?exeat ([\w-]+)(?: ([\w-]+))?", line):
                assert match[1] in first, (page, line)
                if match[1] not in known:
                    assert f"{match[1]} {match[2]}" in known, (page, line)


def test_links_between_documents_lead_somewhere() -> None:
    """A relative link names a file that exists."""
    for page in PAGES:
        for target in re.findall(r"\]\(((?!https?:)[^)#]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_every_page_is_reached_from_the_readme() -> None:
    """Each page of docs/ stands in the README's table, each decision once in docs/architecture.md under its number."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []
    rows = re.findall(
        r"^\| (\d+) \| \[(.+)\]\(decisions/(.+)\) \|$", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M
    )
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    titles = [(int(page.name[:4]), page.read_text("utf-8").partition("\n")[0], page.name) for page in records]
    assert titles == [(int(number), f"# {number}. {title}", name) for number, title, name in rows]
    assert [number for number, _, _ in titles] == list(range(1, len(titles) + 1))


def test_every_ruling_that_is_cited_is_explained() -> None:
    """`RULINGS n.m` in code, tests and documents leads to a row of docs/rulings.md."""
    known = set(re.findall(r"^\| (\d+\.\d+) \|", (ROOT / "docs/rulings.md").read_text("utf-8"), re.M))
    cited: dict[str, str] = {}
    for room in (*ROOT.glob("*/"), ROOT / "tests"):
        if room.name.startswith(".") or room.name in ("dist", "build"):
            continue
        for path in (*room.rglob("*.py"), *room.rglob("*.md")):
            for text in re.findall(r"RULINGS ((?:\d+\.\d+(?:, | and )?)+)", path.read_text("utf-8")):
                cited |= {number: str(path) for number in re.findall(r"\d+\.\d+", text)}
    assert len(cited) > 40
    assert {number: where for number, where in cited.items() if number not in known} == {}
