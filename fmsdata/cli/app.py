"""The command line: `fmsdata --help`.

`COMMANDS` lists every command with its summary. The function of command `x` is `x` in
`fmsdata.cli.x`, which is imported when the command is used: help and a mistyped name answer without
loading torch.
"""

import shutil
import sys
import textwrap
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fmsdata import __version__
from fmsdata.cli.common import in_terminal
from fmsdata.errors import FmsdataError

COMMANDS = {  # in the order of --help; each summary is the first line of the function's docstring
    "demo": "Build a small corpus, stream it, stop, rescale, and show that the stream stays the same.",
    "plan": "Show the pipeline, the mix, how often each source will be read, and what to look out for.",
    "preview": "Show the first batches: the documents in each row, and where they come from.",
    "bench": "Measure tokens per second, time to the first batch, time spent waiting, and memory.",
    "simulate": "Simulate a run of any size: requests, bytes, drift, mix, state size, start, and cost.",
    "audit": "Prove on your own data that the stream is the same at any scale, no token lost or repeated.",
    "trace": "Show the documents of a step (--step), or the steps that read a document (--document).",
    "index": "Count documents and tokens of every shard below a folder, and write FOLDER/meta/counts.csv.",
    "prepare": "Make token shards of text files, with counts: resumable, on all cores or on a Ray cluster.",
    "verify": "Read a whole corpus and report what is wrong: damage, counts, token ids, bad text, duplicates.",
    "convert": "Write token shards again, in another layout, token type or shard size.",
    "schema": "Print the JSON schema of the configuration, for completion and checks in an editor.",
}
IN_TERMINAL = sys.stdout.isatty()
COLUMNS = shutil.get_terminal_size().columns
LEAST_COLUMNS = 100  # for help with frames, whose columns cut words in less
STYLE: dict[str, Any] = {  # plain text in a pipe, wide enough for the summaries
    "rich_markup_mode": "markdown" if IN_TERMINAL and COLUMNS >= LEAST_COLUMNS else None,
    "context_settings": {"terminal_width": COLUMNS} if IN_TERMINAL else {"terminal_width": 160},
}


def _print_version(requested: bool) -> None:
    if requested:
        print(f"fmsdata {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One canonical stream of training samples, the same on any number of GPUs."""


class LazyCommand(TyperCommand):
    """A command that is known by name and summary, and imported when it is used."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """The context of the real command, which then runs instead."""
        return load(str(self.name)).make_context(*args, **options)


def in_whole_words(command: Any) -> Any:
    """The command, whose help breaks no word in a narrow terminal: each text stands below its option."""
    if not IN_TERMINAL or COLUMNS >= LEAST_COLUMNS:
        return command
    context: Any = command.context_class

    class Formatter(context.formatter_class):  # type: ignore[misc]
        def write_dl(self, rows: Any, *_: Any, **__: Any) -> None:
            for first, second in rows:
                self._write_filled(first, 0)
                self._write_filled(second, 4)

        def write_text(self, text: str) -> None:
            for paragraph in text.split("\n\n"):
                self._write_filled(paragraph.replace("\b", "").strip(), 0)
                self.write("\n")

        def _write_filled(self, text: str, further: int) -> None:
            indent = " " * (self.current_indent + further)
            words = " ".join(text.split())
            filled = textwrap.fill(
                words,
                self.width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            self.write(f"{filled}\n")

    class Context(context):  # type: ignore[misc]
        formatter_class = Formatter

    command.context_class = Context
    return command


def load(name: str) -> Any:
    """The real command of this name."""
    alone = typer.Typer(add_completion=False, **STYLE)
    alone.command(name)(getattr(import_module(f"fmsdata.cli.{name}"), name))
    return in_whole_words(typer.main.get_command(alone))


def command_line() -> Any:
    """All commands, not yet imported."""
    app = typer.Typer(no_args_is_help=True, **STYLE)
    app.callback()(options)
    group: Any = typer.main.get_command(app)
    for name, summary in COMMANDS.items():
        group.add_command(LazyCommand(name, help=summary, short_help=summary))
    return in_whole_words(group)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(in_terminal(f"warning: {message}", sys.stderr), file=sys.stderr)


def main() -> None:
    """Run a command. An error that a user can cause is one line on stderr, not a traceback."""
    warnings.showwarning = _warn
    try:
        command_line()()
    except BrokenPipeError:  # the reader of the pipe closed it, such as `head`
        sys.exit(1)
    except (FmsdataError, OSError) as error:
        print(in_terminal(f"error: {error}", sys.stderr), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
