"""`exeat policy import`: what is printed is what a policy takes, and a description that makes none is told why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exeat.cli import main
from rules.service_file import parse_service

SHOP = {
    "openapi": "3.0.3",
    "info": {"title": "Shop", "version": "1"},
    "servers": [{"url": "https://api.shop.example"}],
    "paths": {"/orders/{id}": {"get": {"operationId": "getOrder"}}, "/f/{a}.pdf": {"get": {"operationId": "pdf"}}},
}


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A description in a folder of its own."""
    path = tmp_path / "shop.json"
    path.write_text(json.dumps(SHOP))
    return path


def code_of(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["policy", *arguments])
    return ended.value.code


def test_a_description_that_is_not_there_or_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 for a file that cannot be read, 1 with the place for one that makes no service."""
    assert code_of("import", "openapi", str(tmp_path / "none.json"), "--name", "shop") == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "old.json").write_text('{"swagger": "2.0"}')
    assert code_of("import", "openapi", str(tmp_path / "old.json"), "--name", "shop") == 1
    assert "old.json:1:1: openapi is 3.0.x or 3.1.x" in capsys.readouterr().err


def test_a_service_file_is_printed_that_loads(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is the file, with what was left out as comments."""
    assert code_of("import", "openapi", str(document), "--name", "shop") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# left out: pdf:")
    assert [op.id for op in parse_service(printed, "shop.yaml").operations] == ["shop/getOrder"]


def test_the_printed_entry_pins_the_description_in_a_policy(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The entry loads beside the document, and no longer once the document is another."""
    assert code_of("import", "openapi", str(document), "--name", "shop", "--operation", "getOrder", "--pin") == 0
    entry = capsys.readouterr().out.strip()
    policy = document.with_name("policy.yaml")
    rule = "{service: shop, operations: [getOrder], with: {id: [a1]}}"
    policy.write_text(f"version: 1\nservices:\n  {entry}\nroles: {{dev: {{allow: [{rule}]}}}}\n")
    url = "https://api.shop.example/orders"
    assert code_of("explain", "GET", f"{url}/a1", "-f", str(policy)) == 0
    assert code_of("explain", "GET", f"{url}/a2", "-f", str(policy)) == 1
    document.write_text(document.read_text() + "\n")
    capsys.readouterr()
    assert code_of("check", "-f", str(policy)) == 1
    assert "the description is another one" in capsys.readouterr().err
