"""What the commands share: their arguments, and how they speak."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

from fmsdata.overrides import parse_override

PIPE_WIDTH = 240
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values to use instead, such as loader.batch_size=4.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Rank = Annotated[int, typer.Option(help="The data-parallel rank to look at.")]
WorldSize = Annotated[int, typer.Option(help="How many data-parallel ranks there are.")]


def parse_overrides(given: list[str] | None) -> dict[str, Any]:
    """Overrides as they are written on the command line, values being YAML.

    >>> parse_overrides(["loader.batch_size=4", "documents.strip=[0, 1]"])
    {'loader.batch_size': 4, 'documents.strip': [0, 1]}
    """
    return dict(parse_override(one) for one in given or [])


def without_checkpoint(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same overrides for a command that neither goes on from the run's checkpoints nor adds to them.

    >>> without_checkpoint({"seed": 1, "checkpoint.every": 10})
    {'seed': 1, 'checkpoint': None}
    """
    others = {key: value for key, value in overrides.items() if key.split(".")[0] != "checkpoint"}
    return {**others, "checkpoint": None}


def console() -> Console:
    """Where reports go: tables and colours in a terminal, plain text in a pipe, wide enough for any row."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def live() -> Progress:
    """Where progress is shown: on stderr, if that is a terminal. A task's field `note` is shown beside it."""
    stderr = Console(stderr=True)
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[note]}", TimeRemainingColumn()
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


def print_json(report: Any, indent: int | None = 2) -> None:
    """A report for programs."""
    print(json.dumps(report, indent=indent), flush=True)  # here, where a closed pipe is no surprise
