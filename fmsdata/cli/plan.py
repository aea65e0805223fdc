"""`fmsdata plan`: what a configuration will do, told from counts alone."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fmsdata.cli.common import AsJson, ConfigFile, Overrides, console, parse_overrides, print_json
from fmsdata.config.build import build_data, make_task
from fmsdata.config.read import read_config
from fmsdata.config.sections import Config
from fmsdata.core.stage import Stage
from fmsdata.errors import ConfigError
from fmsdata.planning.blocks import BLOCKS_PER_LANE, cut_blocks
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.mixture import Mixture, down_to_mixture, expected_tokens
from fmsdata.stages.shard_reader import CHUNK_DOCUMENTS, CHUNK_TOKENS, ShardReader

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
    mixture = mixture_of(data)
    readers: dict[str, Any] = dict(mixture.sources)
    tokens = tokens or sum(reader.size().tokens for reader in readers.values())
    taken = expected_tokens(mixture, tokens)
    sources = {name: _source(reader, mixture, data.lanes, taken[name], tokens) for name, reader in readers.items()}
    lanes_per_rank = len(data.lanes_of(0, world_size))
    task = make_task(config)
    line = config.pack.seq_len + task.extra_tokens
    held = config.storage.prefetch_bytes if any(one.path.local is None for one in readers.values()) else 0
    report = {
        "seed": data.seed,
        "lanes": data.lanes,
        "world_size": world_size,
        "same_stream_at_world_sizes": [size for size in range(1, data.lanes + 1) if data.lanes % size == 0],
        "tokens": tokens,
        "lines_per_step": config.loader.batch_size * world_size,
        "tokens_per_step": config.loader.batch_size * world_size * config.pack.seq_len,
        "steps": _lines(config, sources, line) / (config.loader.batch_size * world_size),
        "sources": sources,
        "phases": [{"until_tokens": phase.until_tokens, "shares": dict(phase.weights)} for phase in mixture.course],
        "lines": {
            "tokens": line,
            "window": config.shuffle.window,
            "padded": config.pack.mode == "pad",
            "samples_between_neighbouring_lines": _distance(config.shuffle.window) * data.lanes,
        },
        "memory_per_worker_bytes": _memory(config, sources, line, lanes_per_rank) + held,
        "remote_shards_per_worker_bytes": held,
    }
    return {**report, "warnings": list(_warnings(report, mixture))}


def mixture_of(data: Rescalable) -> Mixture:
    """The mixture in a pipeline that was made of a configuration."""
    return cast(Mixture, down_to_mixture(data.lines)[-1])


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
        "mean_document": max(1, size.tokens) / max(1, size.documents),
        "counts": "file" if reader.counts.csv_root else "shards",
    }


def _lines(config: Config, sources: Mapping[str, Any], length: int) -> float:
    """How many lines all that is read fills, with BOS and EOS, and without padding."""
    documents, pack = config.documents, config.pack
    inserted = (documents.bos is not None) + (documents.eos is not None)
    total = sum(one["tokens_read"] * (1 + inserted / one["mean_document"]) for one in sources.values())
    return float(total / (length - (pack.bol is not None) - (pack.eol is not None)))


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
    lanes, tokens, sources = report["lanes"], report["tokens"], report["sources"]
    planned = lanes * report["lines"]["window"] * report["lines"]["tokens"]

    def those(which: Callable[[str, Any], bool], how: Callable[[Any], str]) -> str:
        """The sources of which something is true, and how much."""
        return ", ".join(f"{name!r} ({how(one)})" for name, one in sources.items() if which(name, one))

    def epochs(one: Any) -> str:
        return f"{one['epochs']:,.1f} times"

    if some := those(lambda name, _: not any(phase.weights[name] for phase in mixture.course), lambda _: "weight 0"):
        yield f"not read at all: {some}"
    if some := those(lambda _, one: one["epochs"] > MANY_EPOCHS, epochs):
        yield f"read again and again in {short(tokens)} tokens: {some}; lower their weights, or give them max_epochs"
    if some := those(lambda _, one: one["max_epochs"] and one["epochs"] >= 0.999 * one["max_epochs"], epochs):
        yield f"used up: {some}; from then on the other sources have their share"
    if some := those(
        lambda _, one: one["share_of_all"] * planned > one["tokens"] > 0,
        lambda one: f"{short(one['share_of_all'] * planned)} of {short(one['tokens'])} tokens",
    ):
        yield (
            f"the windows of all lanes hold {short(planned)} tokens, more than an epoch of {some}: documents of "
            "several epochs are shuffled together; a smaller window or fewer lanes would help"
        )
    if some := those(lambda _, one: one["blocks"] < lanes, lambda one: f"{one['blocks']:,} blocks"):
        yield (
            f"fewer blocks than the {lanes:,} lanes: {some}; lanes are in different epochs of them from the start, so "
            "their documents come back early; fewer lanes or more documents would help"
        )
    if some := those(
        lambda _, one: lanes <= one["blocks"] < BLOCKS_PER_LANE * lanes / 4, lambda one: f"{one['blocks'] / lanes:.1f}"
    ):
        yield f"few blocks a lane: {some}; some lanes begin the next epoch of them well before others end this one"
    folders = Counter(str(one.path) for one in mixture.sources.values() if isinstance(one, ShardReader))
    for folder, count in folders.items():
        if count > 1:
            yield f"{count} sources read {folder}: its documents come once an epoch for each of them"
    remote = {name for name, one in mixture.sources.items() if isinstance(one, ShardReader) and one.path.local is None}
    if some := those(
        lambda name, one: name in remote and one["counts"] == "shards", lambda one: f"{one['shards']:,} shards"
    ):
        yield f"counted from remote shards, by every process that starts: {some}; `fmsdata index` does it once"
    if lanes % report["world_size"]:
        yield (
            f"{report['world_size']} ranks don't divide {lanes} lanes: nothing is lost or repeated, "
            "but the order is another than at the world sizes that do"
        )
    last = max((phase["until_tokens"] or 0 for phase in report["phases"]), default=0)
    if last > tokens:
        yield f"the last phase begins or ends after {short(last)} tokens; this is the outlook for {short(tokens)}"
    if report["same_stream_at_world_sizes"] == [1, lanes] and lanes > 2:
        yield f"{lanes} is prime: the stream is the same only on 1 and on {lanes} ranks; take 192, 720 or 2520 lanes"


def short(number: float) -> str:
    """A number in few letters.

    >>> short(3_957_854), short(812), short(1.5e12)
    ('3.96M', '812', '1.5T')
    """
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 1e6):,} MB"


def _show(report: Mapping[str, Any], data: Rescalable, out: Console) -> None:
    out.print(_tree(data), soft_wrap=False)
    out.print()
    sources = report["sources"]
    changing = any(abs(one["share"] - one["share_of_all"]) > 1e-6 for one in sources.values())
    table = Table(title=f"after {short(report['tokens'])} tokens", title_justify="left", box=None, header_style="bold")
    table.add_column("source", overflow="fold")
    for name in (
        "documents",
        "tokens",
        "mean",
        "share",
        *(["of all"] if changing else []),
        "read",
        "epochs",
        "blocks",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in sources.items():
        table.add_row(
            name,
            *(short(one[key]) for key in ("documents", "tokens", "mean_document")),
            f"{one['share']:.2%}",
            *([f"{one['share_of_all']:.2%}"] if changing else []),
            short(one["tokens_read"]),
            (f"{one['epochs']:.2f}" if one["epochs"] < 1000 else short(one["epochs"]))
            + ("" if one["max_epochs"] is None else f" of {one['max_epochs']:g}"),
            short(one["blocks"]),
            style="bold red" if one["epochs"] > MANY_EPOCHS else None,
        )
    out.print(table, soft_wrap=False)
    if len(report["phases"]) > 1:
        _show_phases(report, out)
    out.print()
    sizes = report["same_stream_at_world_sizes"]
    shown = ", ".join(map(str, sizes[:40])) + (f" and {len(sizes) - 40} more" if len(sizes) > 40 else "")
    lines, held = report["lines"], report["remote_shards_per_worker_bytes"]
    for name, value in (
        (
            "same stream",
            f"on {shown} ranks; any other number up to {report['lanes']:,} loses and repeats nothing either",
        ),
        (
            "steps",
            f"{'at least ' if lines['padded'] else 'about '}{report['steps']:,.0f}, "
            f"each {report['lines_per_step']:,} lines on {report['world_size']:,} ranks",
        ),
        (
            "distance",
            f"neighbouring lines are {lines['samples_between_neighbouring_lines']:,.0f} samples apart on average "
            f"(windows of {lines['window']:,} lines in {report['lanes']:,} lanes)",
        ),
        (
            "memory",
            f"up to about {_megabytes(report['memory_per_worker_bytes'])} a worker, "
            + (f"{_megabytes(held)} of it for remote shards" if held else "beside mapped shards"),
        ),
    ):
        out.print(f"[bold]{name:13}[/]{value}", soft_wrap=not out.is_terminal)
    for warning in report["warnings"]:
        out.print(Text(f"warning: {warning}", "yellow"), soft_wrap=not out.is_terminal)


def _show_phases(report: Mapping[str, Any], out: Console) -> None:
    out.print()
    table = Table(title="shares by phase", title_justify="left", box=None, header_style="bold")
    table.add_column("source", overflow="fold")
    for phase in report["phases"]:
        until = "to the end" if phase["until_tokens"] is None else f"until {short(phase['until_tokens'])}"
        table.add_column(until, justify="right", no_wrap=True)
    for name in report["sources"]:
        shares = [phase["shares"][name] for phase in report["phases"]]
        table.add_row(name, *(f"{share:.2%}" if share else "-" for share in shares))
    out.print(table, soft_wrap=False)


def _tree(data: Rescalable) -> Tree:
    """The stages, from the top down to the sources."""
    root = Tree(f"[bold]Rescalable[/] lanes={data.lanes} seed={data.seed}", guide_style="dim")
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
        told = stage.parameters().items()
        label += "".join(f" {key}={value}" for key, value in told if value is not None)
    below = tree.add(f"{name}: {label}" if name else label)
    for child, one in stage.children().items():
        _add(below, "" if child == "below" else child, one)
