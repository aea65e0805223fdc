"""`fmsdata audit`: laws 1 and 2, proven on the user's own data."""

from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from fmsdata.cli.common import (
    AsJson,
    ConfigFile,
    Overrides,
    Section,
    console,
    live,
    print_json,
)
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fmsdata.cli.audit_checks import Report

LEAST_SAMPLES, MOST_SAMPLES = 2_000, 10_000  # bounds of the default of --samples
LARGEST = 64  # the largest world size in the default of --world-sizes


def audit(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The number of samples to check, from the start of the stream; with --epoch, the most it may take.",
            show_default=f"two windows of each lane, at least {LEAST_SAMPLES}, at most {MOST_SAMPLES}",
        ),
    ] = None,
    epoch: Annotated[
        bool, typer.Option("--epoch", help="Check law 2 on a whole epoch of every source. Reads the whole corpus.")
    ] = False,
    world_sizes: Annotated[
        str | None,
        typer.Option(help="The world sizes to simulate, such as 1,2,3,8.", show_default="some up to the lanes"),
    ] = None,
    section: Section = None,
    as_json: AsJson = False,
) -> None:
    """Prove on your own data that the stream is the same at any scale, no token lost or repeated.

    Law 1, same stream: at world sizes that divide the lanes, every sample is the same, bit for bit,
    and comes from the rank that must hand it out. Law 2, exactly once: a run that is stopped and
    rescaled many times, also to world sizes that don't divide the lanes, hands out what an
    uninterrupted run does, with the stored tokens. All ranks are simulated in this process; the
    run's checkpoints are neither read nor written. For a finite pass (`epochs`, `evaluation`) both are
    checked on the endless stream, and with --epoch also law 7: it ends at the same step on every
    rank, with the same samples. Exits with code 1 if a law does not hold.

    Example: fmsdata audit run.yaml --samples 20000 --world-sizes 8,64,48
    """
    from fmsdata.cli.audit_checks import Audit
    from fmsdata.cli.run import open_run

    whole, run = (open_run(config, overrides, section, finite=finite) for finite in (True, False))
    sizes = choose_world_sizes(world_sizes, run.data.lanes)
    with live() as bar:
        report = Audit(
            run=run,
            samples=samples,
            epoch=epoch,
            world_sizes=sizes,
            finite=None if whole.data.epochs is None else whole,
        ).check(bar)
    if as_json:
        print_json(asdict(report))
    else:
        _print(report, console())
    if report.broken:
        raise typer.Exit(1)


def choose_world_sizes(given: str | None, lanes: int) -> list[int]:
    """The world sizes of --world-sizes; by default some that divide the lanes, and some that don't.

    At least two, as there is no resume otherwise.
    """
    if given is None:
        sizes = range(2, min(lanes, LARGEST) + 1)
        dividing = [size for size in sizes if lanes % size == 0]
        others = [size for size in sizes if lanes % size]
        pairs = zip_longest([1, *dividing[:3], *dividing[3:][-1:]], [*others[:1], *others[1:][-1:]])
        chosen = [size for pair in pairs for size in pair if size]
        return chosen if len(chosen) > 1 else chosen * 2
    try:
        chosen = [int(number) for number in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--world-sizes is {given!r}; write numbers and commas, as in 1,2,8") from None
    for size in chosen:
        if not 1 <= size <= lanes:
            raise ConfigError(
                f"--world-sizes: {size} is not possible; this run has {counted(lanes, 'lane')}, so it must be "
                f"from 1 to {lanes}"
            )
    return chosen if len(chosen) > 1 else chosen * 2


def _print(report: "Report", out: "Console") -> None:
    from fmsdata.display.printing import write

    if report.holds:
        laws = "Laws 1, 2 and 7" if report.pass_samples else "Laws 1 and 2"
        write(out, f"✓ {laws} hold in everything that was checked.", "bold green")
    else:
        write(out, f"✗ {report.broken}", "bold red")
    for title, sentences in (("Checked", report.checked), ("Not checked", report.not_checked)):
        if sentences:
            out.print(title, style="bold")
            for sentence in sentences:
                write(out, sentence, guide="  - ", indent="    ")
