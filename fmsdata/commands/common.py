"""What the commands share: their arguments, and how they speak."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fmsdata.overrides import parse_override

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Values to use instead, such as loader.batch_size=4.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def parse_overrides(given: list[str] | None) -> dict[str, Any]:
    """Overrides as they are written on the command line, values being YAML.

    >>> parse_overrides(["loader.batch_size=4", "documents.strip=[0, 1]"])
    {'loader.batch_size': 4, 'documents.strip': [0, 1]}
    """
    return dict(parse_override(one) for one in given or [])


def console() -> Console:
    """Where reports go: tables and colours in a terminal, plain text in a pipe."""
    return Console(soft_wrap=True, highlight=False)


def print_json(report: Any) -> None:
    """A report for programs."""
    print(json.dumps(report, indent=2))
