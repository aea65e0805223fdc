"""What the commands share: arguments, and how reports, progress and numbers are printed.

Modules of commands import only light things at the top, and rich, torch and the like where they are
used: a wrong option and `--help` of a command answer at once.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from fmsdata.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="The YAML file of the run, or module:function, a function of yours that returns its data or its loader.",
        show_default=False,
    ),
]
Section = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The section of the file that is the configuration, if the file holds more than that.",
        show_default="the whole file",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values that replace those in the file, such as loader.batch_size=4; of a function, its arguments.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-options",
        "-o",
        metavar="KEY=VALUE",
        help="An option for the filesystem, such as anon=true or client_kwargs.endpoint_url=http://host; or all of "
        "them as JSON or YAML. ${env:VAR} is replaced by the environment variable VAR.",
        show_default=False,
    ),
]
OutputOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="The same for the filesystem of OUTPUT, if it differs.",
        show_default="those of --storage-options",
    ),
]
Rank = Annotated[int, typer.Option(help="The data-parallel rank to look at.")]
WorldSize = Annotated[int, typer.Option(help="The number of data-parallel ranks.")]


def parse_overrides(given: list[str] | None) -> dict[str, Any]:
    """Overrides as written on the command line. Values are YAML.

    >>> parse_overrides(["loader.batch_size=4", "documents.strip=[0, 1]"])
    {'loader.batch_size': 4, 'documents.strip': [0, 1]}
    """
    from fmsdata.config.overrides import parse_override

    return dict(parse_override(text) for text in given or [])


def parse_storage_options(given: list[str] | None) -> dict[str, Any]:
    """Options for a filesystem as written on the command line.

    >>> parse_storage_options(["anon=true", "client_kwargs.endpoint_url=http://127.0.0.1:9000"])
    {'anon': True, 'client_kwargs': {'endpoint_url': 'http://127.0.0.1:9000'}}
    >>> parse_storage_options(['{"anon": true}'])
    {'anon': True}
    """
    if not given:
        return {}
    from fmsdata.config.overrides import with_override
    from fmsdata.config.problems import Place, Problem, config_error
    from fmsdata.config.yaml_file import Node, fill_in, merge, read_value, tree

    place = Place("--storage-options")
    problems: list[Problem] = []
    options = Node({})
    for text in given:
        key, separator, value = ("", "=", text) if text.lstrip().startswith("{") else text.partition("=")
        try:
            node = tree(read_value(value), place, problems)
        except ConfigError:  # without the value, which may be a secret
            raise ConfigError(f"--storage-options: the value{f' of {key!r}' * bool(key)} is not YAML") from None
        if not separator or not (key or isinstance(node.value, dict)):
            raise ConfigError("--storage-options: write KEY=VALUE, such as anon=true, or all options as JSON")
        options = with_override(options, key, node) if key else merge(options, node)
    options = fill_in(options, problems, as_text=True, name="storage_options")
    if problems:
        raise config_error(problems[:1])
    plain: dict[str, Any] = options.plain()
    return plain


def without_checkpoint(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same overrides for a command that neither reads nor writes the run's checkpoints.

    It decides itself how many batches it reads.

    >>> without_checkpoint({"seed": 1, "checkpoint.every": 10})
    {'seed': 1, 'checkpoint': None, 'loader.steps': None}
    """
    others = {key: value for key, value in overrides.items() if key.split(".")[0] != "checkpoint"}
    return {**others, "checkpoint": None, "loader.steps": None}


ENDLESS = "The configuration is a finite pass (`epochs`, `evaluation`), and was read as an endless stream"


def endless(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same overrides for a command that reads a finite pass as an endless stream.

    >>> endless({"seed": 1, "epochs": 2})
    {'seed': 1, 'epochs': None, 'evaluation': False}
    """
    others = {key: value for key, value in overrides.items() if key.split(".")[0] not in ("epochs", "evaluation")}
    return {**others, "epochs": None, "evaluation": False}


def console() -> "Console":
    """Where reports go: colours in a terminal, plain text in a pipe."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def live() -> "Progress":
    """A progress bar on stderr, if that is a terminal. A task's `note` is shown beside its bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    stderr = Console(stderr=True)
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[note]}", TimeRemainingColumn()
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


def in_terminal(text: str, stream: TextIO) -> str:
    """A text for a terminal, wrapped between words; for a pipe, as it is."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
        for line in text.splitlines()
    )


def say(text: str) -> None:
    """A line of a report that has no colours."""
    print(in_terminal(text, sys.stdout), flush=True)  # flushed here, where a closed pipe is handled


def print_json(report: Any, indent: int | None = 2) -> None:
    """A report for programs."""
    print(json.dumps(report, indent=indent), flush=True)  # flushed here, where a closed pipe is handled


def short(number: float) -> str:
    """A number in few characters.

    >>> short(3_957_854), short(812), short(1.5e12)
    ('3.96M', '812', '1.5T')
    """
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def short_bytes(number: float) -> str:
    """A number of bytes in few characters.

    >>> short_bytes(3_957_854), short_bytes(812), short_bytes(23.5e9)
    ('3.96 MB', '812 B', '23.5 GB')
    """
    text = short(number).replace("B", "G")
    return f"{text} B" if text[-1].isdigit() else f"{text[:-1]} {text[-1]}B"


def duration(seconds: float) -> str:
    """A time in the unit that fits.

    >>> duration(7), duration(5400), duration(350_000)
    ('7.0 seconds', '1.5 hours', '4.1 days')
    """
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"
