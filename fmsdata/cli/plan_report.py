"""The report of `fmsdata plan`: the pipeline as a tree, the sources as a table, and warnings."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fmsdata.cli.common import short
from fmsdata.cli.outlook import MANY_EPOCHS
from fmsdata.core.stage import Stage
from fmsdata.core.wording import counted, few
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.shard_reader import ShardReader

MOST_WORLD_SIZES = 40  # that are listed


def print_plan(report: Mapping[str, Any], data: Rescalable, out: Console) -> None:
    """Print what `outlook` returned."""
    out.print(_tree(data), soft_wrap=False)
    out.print()
    out.print(_sources(report), soft_wrap=False)
    if len(report["phases"]) > 1:
        out.print()
        out.print(_phases(report), soft_wrap=False)
    out.print()
    for name, value in _facts(report):
        out.print(f"[bold]{name:13}[/]{value}", soft_wrap=not out.is_terminal)
    for warning in report["warnings"]:
        out.print(Text(f"warning: {warning}", "yellow"), soft_wrap=not out.is_terminal)


def _tree(data: Rescalable) -> Tree:
    """The stages, from the top down to the sources."""
    epochs = "" if data.epochs is None else f" epochs={data.epochs}"
    root = Tree(f"[bold]Rescalable[/] lanes={data.lanes} seed={data.seed}{epochs}", guide_style="dim")
    _add(root, "", data.lines)
    return root


def _add(tree: Tree, name: str, stage: Stage) -> None:
    label = f"[bold]{type(stage).__name__}[/]"
    if isinstance(stage, ShardReader):
        label += f" shards={len(stage.counts.shards)}"
        label += f" strip={list(stage.strip)}" if stage.strip else ""
        label += f" min_length={stage.min_length}" if stage.min_length > 1 else ""
    elif isinstance(stage, Mixture):
        label += f" of {len(stage.sources)}" + (f", {len(stage.phases)} phases" if stage.phases else "")
    else:
        label += "".join(f" {key}={value}" for key, value in stage.parameters().items() if value is not None)
    below = tree.add(f"{name}: {label}" if name else label)
    for child_name, child in stage.children().items():
        _add(below, "" if child_name == "below" else child_name, child)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column("source", overflow="fold")
    return table


def _sources(report: Mapping[str, Any]) -> Table:
    sources = report["sources"]
    changing = any(abs(source["share"] - source["share_of_all"]) > 1e-6 for source in sources.values())
    table = _table(f"after {short(report['tokens'])} tokens")
    overall = ["overall"] if changing else []
    for name in ("documents", "tokens", "mean", "share", *overall, "read", "epochs", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, source in sources.items():
        epochs = f"{source['epochs']:.2f}" if source["epochs"] < 1000 else short(source["epochs"])
        table.add_row(
            name,
            short(source["documents"]),
            *(
                ("~" if source["tokens_are_estimated"] else "") + short(source[key])
                for key in ("tokens", "mean_document")
            ),
            f"{source['share']:.2%}",
            *([f"{source['share_of_all']:.2%}"] if changing else []),
            short(source["tokens_read"]),
            epochs + ("" if source["max_epochs"] is None else f" of {source['max_epochs']:g}"),
            short(source["blocks"]),
            style="bold red" if source["epochs"] > MANY_EPOCHS else None,
        )
    return table


def _phases(report: Mapping[str, Any]) -> Table:
    table = _table("shares by phase")
    for phase in report["phases"]:
        until = "to the end" if phase["until_tokens"] is None else f"until {short(phase['until_tokens'])}"
        table.add_column(until, justify="right", no_wrap=True)
    for name in report["sources"]:
        shares = [phase["shares"][name] for phase in report["phases"]]
        table.add_row(name, *(f"{share:.2%}" if share else "-" for share in shares))
    return table


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
    yield (
        "memory",
        f"up to about {_megabytes(report['memory_per_worker_bytes'])} per worker, "
        f"{_megabytes(report['windows_per_worker_bytes'])} of it for shuffle windows"
        + (f" with the tokens of text ({_megabytes(tokenized)}), " if tokenized else ", ")
        + (f"{_megabytes(prefetched)} for remote shards" if prefetched else "plus memory-mapped shards"),
    )


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 1e6):,} MB"
