"""What a run will do, as plain data: computed from counts and settings, without reading a shard."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from fmsdata.cli.common import short
from fmsdata.config.build import make_task
from fmsdata.config.sections import Config
from fmsdata.planning.blocks import BLOCKS_PER_LANE, cut_blocks
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.shares import expected_tokens
from fmsdata.stages.mixture import Mixture, stages_down_to_mixture
from fmsdata.stages.pack import MODES
from fmsdata.stages.shard_reader import CHUNK_DOCUMENTS, CHUNK_TOKENS, ShardReader

MANY_EPOCHS = 4.5  # the usual rule: up to 4 epochs are almost as good as new data
SPAN_BYTES = 56  # a row of a table of spans
DOCUMENT_BYTES = 400  # a document in progress, with everything that is kept for it
COPIES = 5  # of a window's table while it is built


def outlook(config: Config, data: Rescalable, tokens: int | None, world_size: int) -> dict[str, Any]:
    """What a run will do up to this many tokens. None: as many as the corpus has."""
    mixture = mixture_of(data)
    readers: dict[str, Any] = dict(mixture.sources)
    tokens = tokens or sum(reader.size().tokens for reader in readers.values())
    taken = expected_tokens(mixture, tokens)
    sources = {name: _source(reader, mixture, data.lanes, taken[name], tokens) for name, reader in readers.items()}
    lanes_per_rank = len(data.lanes_of(0, world_size))
    line = config.pack.seq_len + make_task(config).extra_tokens
    is_remote = any(reader.path.local is None for reader in readers.values())
    prefetched = config.storage.prefetch_bytes if is_remote else 0
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
        "phases": [{"until_tokens": phase.until_tokens, "shares": dict(phase.weights)} for phase in mixture.all_phases],
        "lines": {
            "tokens": line,
            "window": config.shuffle.window,
            "padded": not MODES[config.pack.mode].fills_lines,
            "samples_between_neighbouring_lines": _distance(config.shuffle.window) * data.lanes,
        },
        "memory_per_worker_bytes": _memory(config, sources, line, lanes_per_rank) + prefetched,
        "remote_shards_per_worker_bytes": prefetched,
    }
    return {**report, "warnings": list(_warnings(report, mixture))}


def mixture_of(data: Rescalable) -> Mixture:
    """The mixture in a pipeline that was built from a configuration."""
    return cast(Mixture, stages_down_to_mixture(data.lines)[-1])


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
    """The number of lines that the tokens fill, with BOS and EOS, and without padding."""
    documents, pack = config.documents, config.pack
    inserted = (documents.bos is not None) + (documents.eos is not None)
    total = sum(source["tokens_read"] * (1 + inserted / source["mean_document"]) for source in sources.values())
    return float(total / (length - (pack.bol is not None) - (pack.eol is not None)))


def _distance(window: int) -> float:
    """The mean distance of two neighbouring lines in their lane, over all orders of a window."""
    return max(1.0, (window + 1) / 3)


def _memory(config: Config, sources: Mapping[str, Any], line: int, lanes: int) -> int:
    """Roughly the bytes that a worker (or the trainer, if none) needs besides mapped shards."""
    workers = max(1, config.loader.num_workers)
    read = [source for source in sources.values() if source["share_of_all"]]
    documents = sum(
        min(CHUNK_DOCUMENTS, 1 + CHUNK_TOKENS / source["mean_document"], source["documents"]) for source in read
    )
    spans = line * sum(source["share_of_all"] / source["mean_document"] for source in read) + 1
    per_lane = documents * DOCUMENT_BYTES + config.shuffle.window * spans * SPAN_BYTES * COPIES
    batch = config.loader.batch_size * line * 16
    return int(per_lane * math.ceil(lanes / workers) + batch * (config.loader.prefetch + 2))


def _warnings(report: Mapping[str, Any], mixture: Mixture) -> Iterator[str]:
    lanes, tokens, sources = report["lanes"], report["tokens"], report["sources"]
    in_windows = lanes * report["lines"]["window"] * report["lines"]["tokens"]
    readers = {name: stage for name, stage in mixture.sources.items() if isinstance(stage, ShardReader)}
    remote = {name for name, reader in readers.items() if reader.path.local is None}

    def those(condition: Callable[[str, Any], bool], describe: Callable[[Any], str]) -> str:
        """The sources for which the condition holds, each with a description."""
        return ", ".join(
            f"{name!r} ({describe(source)})" for name, source in sources.items() if condition(name, source)
        )

    def epochs(source: Any) -> str:
        return f"{source['epochs']:,.1f} times"

    def is_unread(name: str, _: Any) -> bool:
        return not any(phase.weights[name] for phase in mixture.all_phases)

    if found := those(is_unread, lambda _: "weight 0"):
        yield f"not read at all: {found}"
    if found := those(lambda _, source: source["epochs"] > MANY_EPOCHS, epochs):
        yield f"read many times in {short(tokens)} tokens: {found}; lower their weights, or set max_epochs"
    if found := those(
        lambda _, source: source["max_epochs"] and source["epochs"] >= 0.999 * source["max_epochs"], epochs
    ):
        yield f"used up: {found}; after that, their share goes to the other sources"
    if found := those(
        lambda _, source: source["share_of_all"] * in_windows > source["tokens"] > 0,
        lambda source: f"{short(source['share_of_all'] * in_windows)} of them, {short(source['tokens'])} an epoch",
    ):
        yield (
            f"the shuffle windows of all lanes hold {short(in_windows)} tokens, more than an epoch of {found}: "
            "documents of several epochs are shuffled together; use a smaller window or fewer lanes"
        )
    if found := those(lambda _, source: source["blocks"] < lanes, lambda source: f"{source['blocks']:,} blocks"):
        yield (
            f"fewer blocks than the {lanes:,} lanes: {found}; the lanes start in different epochs of these sources, so "
            "their documents repeat early; use fewer lanes or more documents"
        )
    if found := those(
        lambda _, source: lanes <= source["blocks"] < BLOCKS_PER_LANE * lanes / 4,
        lambda source: f"{source['blocks'] / lanes:.1f}",
    ):
        yield f"few blocks per lane: {found}; some lanes start the next epoch well before others finish this one"
    for folder, count in Counter(str(reader.path) for reader in readers.values()).items():
        if count > 1:
            yield f"{count} sources read {folder}: each reads all of its documents once per epoch"
    if found := those(
        lambda name, source: name in remote and source["counts"] == "shards",
        lambda source: f"{source['shards']:,} shards",
    ):
        yield f"counted from the remote shards by every process that starts: {found}; run `fmsdata index` once instead"
    if lanes % report["world_size"]:
        yield (
            f"{report['world_size']} ranks don't divide {lanes} lanes: nothing is lost or repeated, "
            "but the order differs from that at the world sizes that do"
        )
    last = max((phase["until_tokens"] or 0 for phase in report["phases"]), default=0)
    if last > tokens:
        yield f"the last phase starts or ends after {short(last)} tokens; this report covers only {short(tokens)}"
    if report["same_stream_at_world_sizes"] == [1, lanes] and lanes > 2:
        yield f"lanes={lanes} is prime: the stream is the same only on 1 and on {lanes} ranks; use 192, 720 or 2520"
