"""The command line: `fmsdata --help`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fmsdata.commands.plan import plan
from fmsdata.commands.schema import schema
from fmsdata.commands.trace import trace
from fmsdata.counts import write_index
from fmsdata.demo import run_demo
from fmsdata.errors import FmsdataError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One canonical stream of training samples, the same on any number of GPUs.",
)

app.command()(plan)
app.command()(schema)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Keep the demo's corpus in this folder; by default it is made anew and removed.")
    ] = None,
) -> None:
    """Build a small corpus, stream it on several simulated ranks, stop, rescale, and show that nothing changed."""
    run_demo(folder, Console())


@app.command()
def index(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the sources.")],
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens.")] = None,
) -> None:
    """Count the documents and tokens of every shard below a folder, and keep the counts in FOLDER/meta/counts.csv."""
    Console().print(f"wrote {write_index(folder, column)}", soft_wrap=True)


app.command()(trace)


def main() -> None:
    """Run a command. What a user can cause ends in one line on stderr, not in a traceback."""
    try:
        app(standalone_mode=True)
    except FmsdataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
