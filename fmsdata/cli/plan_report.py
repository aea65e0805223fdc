"""The report of `fmsdata plan`: the pipeline as a tree, the sources as a table, and warnings."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from fmsdata.cli.common import short
from fmsdata.cli.outlook import MANY_EPOCHS
from fmsdata.core.wording import counted, few
from fmsdata.display.printing import write, write_outline, write_table
from fmsdata.run.rescalable import Rescalable

MOST_WORLD_SIZES = 40  # that are listed


def print_plan(report: Mapping[str, Any], data: Rescalable, out: Console) -> None:
    """Print what `outlook` returned."""
    write_outline(out, data.outline())
    out.print()
    _print_sources(report, out)
    if len(report["phases"]) > 1:
        out.print()
        _print_phases(report, out)
    out.print()
    for name, value in _facts(report):
        write(out, value, guide=Text(f"{name:13}", "bold"), indent=" " * 13)
    for warning in report["warnings"]:
        write(out, f"warning: {warning}", "yellow")


def _print_sources(report: Mapping[str, Any], out: Console) -> None:
    sources = report["sources"]
    changing = any(abs(source["share"] - source["share_of_all"]) > 1e-6 for source in sources.values())
    columns = ("source", "documents", "tokens", "mean", "share", *["overall"] * changing, "read", "epochs", "blocks")
    rows = []
    for name, source in sources.items():
        about = "~" if source["tokens_are_estimated"] else ""
        epochs = f"{source['epochs']:.2f}" if source["epochs"] < 1000 else short(source["epochs"])
        rows.append(
            (
                name,
                short(source["documents"]),
                about + short(source["tokens"]),
                about + short(source["mean_document"]),
                f"{source['share']:.2%}",
                *([f"{source['share_of_all']:.2%}"] if changing else []),
                short(source["tokens_read"]),
                epochs + ("" if source["max_epochs"] is None else f" of {source['max_epochs']:g}"),
                short(source["blocks"]),
            )
        )
    styles = ["bold red" if source["epochs"] > MANY_EPOCHS else "" for source in sources.values()]
    title = f"after {short(report['tokens'])} tokens"
    write_table(out, columns, rows, left=["source"], title=title, styles=styles)


def _print_phases(report: Mapping[str, Any], out: Console) -> None:
    phases = report["phases"]
    ends = [
        "to the end" if phase["until_tokens"] is None else f"until {short(phase['until_tokens'])}" for phase in phases
    ]
    rows = [
        (name, *(f"{phase['shares'][name]:.2%}" if phase["shares"][name] else "-" for phase in phases))
        for name in report["sources"]
    ]
    write_table(out, ("source", *ends), rows, left=["source"], title="shares by phase")


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    sizes = report["same_stream_at_world_sizes"]
    yield (
        "same stream",
        f"on {few(sizes, MOST_WORLD_SIZES)} ranks; on any other number up to {report['lanes']:,}, "
        "nothing is lost or repeated either",
    )
    lines = report["lines"]
    if report["pass"] is not None:
        end = report["pass"]
        yield (
            "evaluation" if end["evaluation"] else "pass",
            f"{counted(end['samples'], 'sample')} in {counted(end['steps'], 'step')} on every rank, and then it ends; "
            f"{counted(end['filled_rows'], 'row')} of padding fill up the last batches",
        )
    else:
        yield (
            "steps",
            f"{'at least' if lines['padded'] else 'about'} {report['steps']:,.0f}, "
            f"each {counted(report['lines_per_step'], 'line')} on {counted(report['world_size'], 'rank')}",
        )
    yield (
        "distance",
        f"neighbouring lines are {lines['samples_between_neighbouring_lines']:,.0f} samples apart on average, "
        f"{lines['samples_of_a_rank_between_neighbouring_lines']:,.0f} of a rank "
        f"(windows of {counted(lines['window'], 'line')} in {counted(report['lanes'], 'lane')})",
    )
    if report["pass"] is None:
        name, source = max(report["sources"].items(), key=lambda item: float(item[1]["drift"]))
        yield (
            "drift",
            f"when an epoch's worth of {name!r} was read, {source['drift']:.1%} of it is already of the next epoch"
            + ("; less of the other sources" if len(report["sources"]) > 1 else ""),
        )
    prefetched, tokenized = report["remote_shards_per_worker_bytes"], report["tokenized_per_worker_bytes"]
    spooled = report["remote_shards_spooled_per_worker_bytes"]
    yield (
        "memory",
        f"up to about {_megabytes(report['memory_per_worker_bytes'])} per worker, "
        f"{_megabytes(report['windows_per_worker_bytes'])} of it for shuffle windows"
        + (f" with the tokens of text ({_megabytes(tokenized)}), " if tokenized else ", ")
        + (f"{_megabytes(prefetched)} for remote shards" if prefetched else "plus memory-mapped shards")
        + (f", and {_megabytes(spooled)} of them on a disk of the node" if spooled else ""),
    )


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 1e6):,} MB"
