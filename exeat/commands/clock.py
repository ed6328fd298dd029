"""`exeat clock`: what an operator does about a machine whose clock was wrong (RULINGS 9.6)."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain
from exeat.output import Output, print_json, say

app = typer.Typer(help="The machine's clock, where it was wrong: reset.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `reset` a word of its own, although it is the only one."""


@app.command()
def reset(
    why: Annotated[str, typer.Option("--why", help="One sentence, at most 200 characters; it goes on record.")],
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Take the machine's clock as right, although a later time is on record.

    A clock that was ahead and was set back lies behind the latest time on record. Until it has caught up credentials
    are refused, so that setting it back brings no expired sandbox to life. Set the clock first.
    """
    try:
        answer = admin(config).reset_clock(why)
    except AdminError as error:
        explain(error)
    print_json(answer) if output is Output.json else say("the machine's clock is taken as right, and that is on record")
