"""The command line: `fmsdata --help`."""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fmsdata import __version__
from fmsdata.cli.audit import audit
from fmsdata.cli.bench import bench
from fmsdata.cli.demo import run_demo
from fmsdata.cli.index import index
from fmsdata.cli.plan import plan
from fmsdata.cli.preview import preview
from fmsdata.cli.schema import schema
from fmsdata.cli.trace import trace
from fmsdata.errors import FmsdataError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text in a pipe, wide enough for the commands' first sentences.
    rich_markup_mode="markdown" if sys.stdout.isatty() else None,
    context_settings={} if sys.stdout.isatty() else {"terminal_width": 160},
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"fmsdata {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Tell the version.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """One canonical stream of training samples, the same on any number of GPUs."""


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Keep the demo's corpus in this folder; by default it is made anew and removed.")
    ] = None,
) -> None:
    """Build a small corpus, stream it on several simulated ranks, stop, rescale, and show that nothing changed."""
    run_demo(folder, Console())


for command in (demo, plan, preview, bench, audit, trace, index, schema):  # as --help lists them
    app.command()(command)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    """Run a command. What a user can cause ends in one line on stderr, not in a traceback."""
    warnings.showwarning = _warn
    try:
        app(standalone_mode=True)
    except FmsdataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # whoever read it has seen enough
        sys.exit(1)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
