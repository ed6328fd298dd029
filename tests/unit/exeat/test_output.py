"""What commands print: nothing that a terminal would obey, plain in a pipe, errors with cause and remedy."""

from __future__ import annotations

import io
import json

import pytest

from exeat.cli import main
from exeat.output import fail, note, print_fields, print_json, print_table, printable, say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\u001b[2Jgone"),
        ("a\nb\r\tc", "a\\u000ab\\u000d\\u0009c"),
        ("\a\b\x7f\x9b", "\\u0007\\u0008\\u007f\\u009b"),
        ("pay \u202e001\u202c", "pay \\u202e001\\u202c"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("zero\u200bwidth\u2028line", "zero\\u200bwidth\\u2028line"),
        ("Grüße, 日本 €", "Grüße, 日本 €"),
        ("", ""),
    ],
)
def test_nothing_that_a_terminal_obeys_is_printed(text: str, shown: str) -> None:
    """Control, escape, bidirectional and invisible characters appear as what they are (B156)."""
    assert printable(text) == shown


def test_a_table_in_a_pipe_is_tab_separated(capsys: pytest.CaptureFixture[str]) -> None:
    """One header line, one line a row, no frame; a cell cannot add a column or a row."""
    print_table(["A", "B"], [["1\t2", "x\ny"], [None, 3]])
    assert capsys.readouterr().out == "A\tB\n1\\u00092\tx\\u000ay\n\t3\n"


def test_colour_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets no escape sequence; a terminal does, unless NO_COLOR is set."""
    say("text", "red")
    note("remark")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    monkeypatch.setattr("sys.stdout", coloured)
    say("text", "red")
    assert "\x1b[31m" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    monkeypatch.setattr("sys.stdout", plain)
    say("text", "red")
    assert "\x1b" not in plain.getvalue()


def test_data_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets and colons in what sandboxes send are text."""
    say("[red]no[/red] :smile: [link=http://x]y[/link]")
    assert capsys.readouterr().out == "[red]no[/red] :smile: [link=http://x]y[/link]\n"


def test_an_error_names_cause_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Both go to standard error, and the exit code is the caller's."""
    with pytest.raises(SystemExit) as caught:
        fail("the cause", remedy="the remedy", code=2)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "exeat: the cause\n       the remedy\n"


def test_json_is_one_sorted_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read one document with sorted keys."""
    print_json({"b": 1, "a": [None]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": [None], "b": 1}
    assert out.index('"a"') < out.index('"b"')


def test_an_unexpected_error_is_one_line_without_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Class and place are named; the message, which may hold a secret, and local variables are not (RULINGS 1.6)."""

    def broken(*_: object) -> None:
        canary = "canary-44d1c0ffee"
        raise ValueError(canary)

    monkeypatch.setattr("exeat.commands.policy.json_schema", broken)
    with pytest.raises(SystemExit) as caught:
        main(["policy", "schema"])
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert "canary" not in shown.out + shown.err
    assert "Traceback" not in shown.err
    assert "unexpected ValueError at test_output.py:" in shown.err


def test_fields_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Names in one column; lists, times, truth and nothing in words; no notation of a programming language."""
    print_fields(
        {
            "id": "sb_1",
            "created_at": 1_767_225_600.5,
            "roles": ["a", "b"],
            "channel": {"kind": "shared"},
            "claimed": {"at": 1_767_225_600.5},
            "ended_at": None,
            "list": [],
            "armed": False,
            "count": 0,
            "task": "x\ny",
        }
    )
    assert capsys.readouterr().out.splitlines() == [
        "id          sb_1",
        "created_at  2026-01-01 00:00:00 UTC",
        "roles       a, b",
        "channel     kind shared",
        "claimed     at 2026-01-01 00:00:00 UTC",
        "ended_at    none",
        "list        none",
        "armed       no",
        "count       0",
        "task        x\\u000ay",
    ]
