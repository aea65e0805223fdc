"""What the commands share: their arguments, and how they speak."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

from fmsdata.config.overrides import parse_override, with_override
from fmsdata.config.yaml_file import Node, fill_in, merge, read_value, tree
from fmsdata.errors import ConfigError

PIPE_WIDTH = 240
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values to use instead, such as loader.batch_size=4.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-options",
        "-o",
        metavar="KEY=VALUE",
        help="An option for the filesystem, such as anon=true or client_kwargs.endpoint_url=http://host; or all of "
        "them as JSON or YAML. ${env:VAR} is what the environment says.",
        show_default=False,
    ),
]
Rank = Annotated[int, typer.Option(help="The data-parallel rank to look at.")]
WorldSize = Annotated[int, typer.Option(help="How many data-parallel ranks there are.")]


def parse_overrides(given: list[str] | None) -> dict[str, Any]:
    """Overrides as they are written on the command line, values being YAML.

    >>> parse_overrides(["loader.batch_size=4", "documents.strip=[0, 1]"])
    {'loader.batch_size': 4, 'documents.strip': [0, 1]}
    """
    return dict(parse_override(one) for one in given or [])


def parse_storage_options(given: list[str] | None) -> dict[str, Any]:
    """Options for a filesystem as they are written on the command line.

    >>> parse_storage_options(["anon=true", "client_kwargs.endpoint_url=http://127.0.0.1:9000"])
    {'anon': True, 'client_kwargs': {'endpoint_url': 'http://127.0.0.1:9000'}}
    >>> parse_storage_options(['{"anon": true}'])
    {'anon': True}
    """
    problems: list[str] = []
    options = Node({})
    for text in given or []:
        key, separator, value = ("", "=", text) if text.lstrip().startswith("{") else text.partition("=")
        try:
            node = tree(read_value(value), "--storage-options", problems)
        except ConfigError:  # without the value, which may be a secret
            raise ConfigError(f"--storage-options: what is given{f' for {key!r}' * bool(key)} is not YAML") from None
        if not separator or not (key or isinstance(node.value, dict)):
            raise ConfigError("--storage-options: write KEY=VALUE, such as anon=true, or all options as JSON")
        options = with_override(options, key, node) if key else merge(options, node)
    options = fill_in(options, problems, as_text=True, name="storage_options")
    if problems:
        raise ConfigError(problems[0])
    plain: dict[str, Any] = options.plain()
    return plain


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
