"""`fmsdata plan`: what a configuration will do, told from counts alone."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from fmsdata.commands.common import AsJson, ConfigFile, Overrides, console, parse_overrides, print_json
from fmsdata.config import build_data, make_task, read_config
from fmsdata.errors import ConfigError
from fmsdata.lanes import Rescalable
from fmsdata.mixture import Mixture
from fmsdata.plan import BLOCKS_PER_LANE, cut_blocks
from fmsdata.reader import CHUNK_DOCUMENTS, CHUNK_TOKENS, ShardReader
from fmsdata.sections import Config
from fmsdata.stage import Stage

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MANY_EPOCHS = 4.5  # "up to 4 epochs are almost as good as new data" is the usual wisdom
SPAN_BYTES, DOCUMENT_BYTES = 56, 400  # a row of a table of spans; a document that is read, with all that is kept of it
COPIES = 5  # of a window's table while it is made


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tell what the run has read after so many tokens: 300e9, 300B, 1.5T. Default: all there are."
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(help="How many data-parallel ranks there will be.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show the pipeline, the mix, how often each source will be read, and what to look out for.

    Reads counts, not data: with `fmsdata index` or a counts file it takes moments for a corpus of any size.

    Example: fmsdata plan run.yaml --tokens 300B --world-size 64 sources.wiki.weight=3
    """
    told = read_config(config, parse_overrides(overrides))
    data = build_data(told)
    report = outlook(told, data, None if tokens is None else count_of_tokens(tokens), world_size)
    if as_json:
        print_json(report)
    else:
        _show(report, data, console())


def count_of_tokens(text: str) -> int:
    """A number of tokens as people write it.

    >>> count_of_tokens("1.5T"), count_of_tokens("300e9")
    (1500000000000, 300000000000)
    """
    plain = text.strip().lower().replace("_", "").replace(",", "")
    unit = UNITS.get(plain[-1:], 1)
    try:
        count = float(plain[:-1] if unit > 1 else plain) * unit
        if not 1 <= count < 1e18:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--tokens is {text!r}; write a number such as 300e9, 300B or 1.5T") from None
    return round(count)


def outlook(config: Config, data: Rescalable, tokens: int | None, world_size: int) -> dict[str, Any]:
    """What a run will do, as plain data."""
    mixture = mixture_of(data.lines)
    readers: dict[str, Any] = dict(mixture.sources)
    tokens = tokens or sum(reader.size().tokens for reader in readers.values())
    taken = expected_tokens(mixture, tokens)
    sources = {name: _source(reader, mixture, data.lanes, taken[name], tokens) for name, reader in readers.items()}
    lanes_per_rank = len(data.lanes_of(0, world_size))
    task = make_task(config)
    line = config.pack.seq_len + task.extra_tokens
    report = {
        "seed": data.seed,
        "lanes": data.lanes,
        "world_size": world_size,
        "same_stream_at_world_sizes": [size for size in range(1, data.lanes + 1) if data.lanes % size == 0],
        "tokens": tokens,
        "tokens_per_step": config.loader.batch_size * world_size * config.pack.seq_len,
        "steps": tokens / (config.loader.batch_size * world_size * config.pack.seq_len),
        "sources": sources,
        "phases": [{"until_tokens": phase.until_tokens, "shares": dict(phase.weights)} for phase in mixture.course],
        "lines": {
            "tokens": line,
            "window": config.shuffle.window,
            "samples_between_neighbouring_lines": _distance(config.shuffle.window) * data.lanes,
        },
        "memory_per_worker_bytes": _memory(config, sources, line, lanes_per_rank),
    }
    return {**report, "warnings": list(_warnings(report, mixture))}


def expected_tokens(mixture: Mixture, tokens: int) -> dict[str, float]:
    """How much of so many tokens each source will have given: phase by phase, until one has had its `max_epochs`."""
    taken = dict.fromkeys(mixture.sources, 0.0)
    most = {
        name: stage.size().tokens * stage.max_epochs
        if isinstance(stage, ShardReader) and stage.max_epochs is not None
        else math.inf
        for name, stage in mixture.sources.items()
    }
    done = 0.0
    while done < tokens:
        phase = mixture.phase_at(math.floor(done))
        active = {name: share for name, share in phase.weights.items() if share and taken[name] < most[name]}
        total = math.fsum(active.values())
        until = min(tokens, phase.until_tokens or tokens)
        used_up = {name: done + (most[name] - taken[name]) * total / share for name, share in active.items()}
        now = min([until, *used_up.values()])
        for name, share in active.items():
            taken[name] = most[name] if used_up[name] <= now else taken[name] + (now - done) * share / total
        done = now
    return taken


def mixture_of(lines: Stage) -> Mixture:
    """The mixture in a pipeline that was made of a configuration."""
    while not isinstance(lines, Mixture):
        lines = lines.children()["below"]
    return lines


def _source(reader: ShardReader, mixture: Mixture, lanes: int, taken: float, tokens: int) -> dict[str, Any]:
    size = reader.size()
    blocks = cut_blocks(reader.counts, lanes, reader.block_tokens).blocks
    return {
        "shards": len(reader.counts.shards),
        "documents": size.documents,
        "tokens": size.tokens,
        "share": mixture.phase_at(0).weights[reader.name],
        "share_of_all": taken / tokens,
        "tokens_read": round(taken),
        "epochs": taken / max(1, size.tokens),
        "max_epochs": reader.max_epochs,
        "blocks": blocks,
        "mean_document": size.tokens / max(1, size.documents),
        "counts": "file" if reader.counts.csv_root else "shards",
    }


def _distance(window: int) -> float:
    """How many lines of their lane two neighbouring lines are apart, on average over all orders of a window."""
    return max(1.0, (window + 1) / 3)


def _memory(config: Config, sources: Mapping[str, Any], line: int, lanes: int) -> int:
    """Roughly what a worker, or the trainer without workers, needs beside the mapped shards, in bytes."""
    workers = max(1, config.loader.num_workers)
    read = [one for one in sources.values() if one["share_of_all"]]
    documents = sum(min(CHUNK_DOCUMENTS, 1 + CHUNK_TOKENS / one["mean_document"], one["documents"]) for one in read)
    spans = line * sum(one["share_of_all"] / one["mean_document"] for one in read) + 1
    per_lane = documents * DOCUMENT_BYTES + config.shuffle.window * spans * SPAN_BYTES * COPIES
    batch = config.loader.batch_size * line * 16
    return int(per_lane * math.ceil(lanes / workers) + batch * (config.loader.prefetch + 2))


def _warnings(report: Mapping[str, Any], mixture: Mixture) -> Iterator[str]:
    lanes = report["lanes"]
    for name, one in report["sources"].items():
        if not one["share_of_all"]:
            yield f"source {name!r} is not read at all: its weight is 0"
        if one["epochs"] > MANY_EPOCHS:
            yield (
                f"source {name!r} is read {one['epochs']:,.1f} times in {report['tokens']:,} tokens; "
                "lower its weight, or give it max_epochs"
            )
        if one["max_epochs"] is not None and one["epochs"] >= one["max_epochs"] * 0.999:
            yield f"source {name!r} is used up after {one['max_epochs']:g} epochs; then the others have its share"
        if one["blocks"] < lanes:
            yield (
                f"source {name!r} has {one['blocks']:,} blocks for {lanes:,} lanes: lanes are in different epochs from "
                "the start, so its documents come back early; fewer lanes or more documents would help"
            )
        elif one["blocks"] < BLOCKS_PER_LANE * lanes / 4:
            yield (
                f"source {name!r} has only {one['blocks'] / lanes:.1f} blocks a lane: "
                "some lanes begin its next epoch well before others end this one"
            )
    folders = Counter(str(one.path) for one in mixture.sources.values() if isinstance(one, ShardReader))
    for folder, count in folders.items():
        if count > 1:
            yield f"{count} sources read {folder}: its documents come once an epoch for each of them"
    if lanes % report["world_size"]:
        yield (
            f"{report['world_size']} ranks don't divide {lanes} lanes: nothing is lost or repeated, "
            "but the order is another than at the world sizes that do"
        )
    last = max((phase["until_tokens"] or 0 for phase in report["phases"]), default=0)
    if mixture.phases and last > report["tokens"]:
        yield f"the last phase begins or ends after {last:,} tokens; this is the outlook for {report['tokens']:,}"
    if report["same_stream_at_world_sizes"] == [1, lanes] and lanes > 2:
        yield f"{lanes} is prime: the stream is the same only on 1 and on {lanes} ranks; take 192, 720 or 2520 lanes"


def _show(report: Mapping[str, Any], data: Rescalable, out: Console) -> None:
    out.print(_tree(data))
    out.print()
    table = Table(title=f"after {report['tokens']:,} tokens", title_justify="left", box=None, header_style="bold")
    for name in (
        "source",
        "documents",
        "tokens",
        "mean length",
        "share now",
        "share of all",
        "tokens read",
        "epochs",
        "blocks",
    ):
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for name, one in report["sources"].items():
        table.add_row(
            name,
            f"{one['documents']:,}",
            f"{one['tokens']:,}",
            f"{one['mean_document']:,.0f}",
            f"{one['share']:.3%}",
            f"{one['share_of_all']:.3%}",
            f"{one['tokens_read']:,}",
            f"{one['epochs']:,.2f}" + ("" if one["max_epochs"] is None else f" of {one['max_epochs']:g}"),
            f"{one['blocks']:,}",
            style="bold red" if one["epochs"] > MANY_EPOCHS else None,
        )
    out.print(table)
    if len(report["phases"]) > 1:
        _show_phases(report, out)
    out.print()
    sizes = report["same_stream_at_world_sizes"]
    shown = ", ".join(map(str, sizes[:40])) + (f" and {len(sizes) - 40} more" if len(sizes) > 40 else "")
    for name, value in (
        (
            "same stream on",
            f"{shown} ranks (any other number up to {report['lanes']:,} loses and repeats nothing either)",
        ),
        (
            "a step",
            f"{report['tokens_per_step']:,} tokens on {report['world_size']:,} ranks; {report['steps']:,.0f} steps",
        ),
        (
            "neighbouring lines",
            f"{report['lines']['samples_between_neighbouring_lines']:,.0f} samples apart on average "
            f"(a window of {report['lines']['window']:,} lines in each of {report['lanes']:,} lanes)",
        ),
        ("memory", f"up to about {report['memory_per_worker_bytes'] / 1e6:,.0f} MB a worker, beside the mapped shards"),
    ):
        out.print(f"[bold]{name:20}[/]{value}")
    for warning in report["warnings"]:
        out.print(f"[yellow]warning: {warning}[/]")


def _show_phases(report: Mapping[str, Any], out: Console) -> None:
    out.print()
    table = Table(title="phases", title_justify="left", box=None, header_style="bold")
    table.add_column("until tokens", justify="right", no_wrap=True)
    for name in report["sources"]:
        table.add_column(name, justify="right", no_wrap=True)
    for phase in report["phases"]:
        until = "the end" if phase["until_tokens"] is None else f"{phase['until_tokens']:,}"
        table.add_row(until, *(f"{share:.3%}" if share else "-" for share in phase["shares"].values()))
    out.print(table)


def _tree(data: Rescalable) -> Tree:
    """The stages, from the top down to the sources."""
    root = Tree(f"[bold]Rescalable[/] lanes={data.lanes} seed={data.seed}", guide_style="dim")
    _add(root, "", data.lines)
    return root


def _add(tree: Tree, name: str, stage: Stage) -> None:
    label = f"[bold]{type(stage).__name__}[/]"
    if isinstance(stage, ShardReader):
        size = stage.size()
        label += f" {len(stage.counts.shards)} shards, {size.documents:,} documents, {size.tokens:,} tokens"
        if stage.strip:
            label += f", strip={list(stage.strip)}"
        label += f"  [dim]{stage.path}[/]"
    elif isinstance(stage, Mixture):
        label += f" of {len(stage.sources)}" + (f", {len(stage.phases)} phases" if stage.phases else "")
    else:
        told = stage.parameters().items()
        label += "".join(f" {key}={value}" for key, value in told if value is not None)
    below = tree.add(f"{name}: {label}" if name else label)
    for child, one in stage.children().items():
        _add(below, "" if child == "below" else child, one)
