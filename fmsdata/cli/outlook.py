"""What a run will do, as plain data: computed from counts and settings, without reading a shard."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from fmsdata.cli.common import short
from fmsdata.cli.run import Run
from fmsdata.core.options import PREFETCH
from fmsdata.core.stage import Stage
from fmsdata.core.wording import counted
from fmsdata.corpus.listing import counts_tell_apart
from fmsdata.loader.pass_end import checked_evaluation, plan_folder
from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.drift import drift, lanes_within
from fmsdata.planning.schedule import Schedule, Segment
from fmsdata.prefetch.budget import RESERVED
from fmsdata.run.shares import expected_tokens
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.mixture import Mixture, stages_down_to_mixture
from fmsdata.stages.pack import MODES
from fmsdata.stages.shard_documents import CHUNK_DOCUMENTS, CHUNK_TOKENS
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.stages.tokenize import is_counted, reader_of, tokenizer_of
from fmsdata.storage.spool import shortage

LARGEST_DRIFT = 0.05  # of an epoch, above which a source is warned about
LARGE_WINDOWS = 4 << 30  # bytes of the windows of a worker
ROOM = 1.5  # remote shards take this much more than what the windows hold of them (docs/cloud.md)
MANY_EPOCHS = 4.5  # the usual rule: up to 4 epochs are almost as good as new data
SPAN_BYTES = 56  # a row of a table of spans
DOCUMENT_BYTES = 400  # a document in progress, with everything that is kept for it
KEPT, BUILT = 1.3, 2.0  # memory of a window: in each lane, and in addition while one is built


def outlook(run: Run, tokens: int | None, world_size: int) -> dict[str, Any]:
    """What a run will do up to this many tokens. None: as many as the corpus has."""
    data, mixture, readers, pack = run.data, run.mixture, run.readers, run.pack
    tokens = tokens or _all_tokens(mixture, data.epochs)
    taken = expected_tokens(mixture, tokens, data.epochs)
    lanes_per_rank = len(data.lanes_of(0, world_size))
    sources = {
        name: {
            **_source(name, reader, mixture, data.lanes, taken[name], tokens),
            **_drift(reader, data.lanes, world_size),
            "notes": list(reader.counts.notes),
        }
        for name, reader in readers.items()
    }
    line, window = pack.seq_len, window_of(data.lines)
    lanes_per_worker = math.ceil(lanes_per_rank / max(1, run.num_workers))
    remote = [reader.path.storage for reader in readers.values() if reader.path.local is None]
    prefetched = max((storage.prefetch_bytes for storage in remote), default=0)
    in_windows = _remote_in_windows(readers, sources, line * window * lanes_per_worker)
    room = max((storage.spool.limit for storage in remote if storage.spool is not None), default=0)
    in_memory = prefetched - int(prefetched * RESERVED) if room else prefetched
    windows = _windows(sources, line, window, lanes_per_worker)
    tokenized = _tokenized(mixture, sources, data.lines.window_tokens(), lanes_per_worker)
    report = {
        "seed": data.seed,
        "lanes": data.lanes,
        "world_size": world_size,
        "same_stream_at_world_sizes": [size for size in range(1, data.lanes + 1) if data.lanes % size == 0],
        "tokens": tokens,
        "lines_per_step": run.batch_size * world_size,
        "tokens_per_step": run.batch_size * world_size * run.seq_len,
        "steps": _lines(run, sources) / (run.batch_size * world_size),
        "pass": None if data.epochs is None else _pass(run, world_size),
        "sources": sources,
        "phases": [{"until_tokens": phase.until_tokens, "shares": dict(phase.weights)} for phase in mixture.all_phases],
        "lines": {
            "tokens": line,
            "window": window,
            "window_is_automatic": any(
                isinstance(stage, Shuffle) and stage.is_automatic for stage in stages_down_to_mixture(data.lines)
            ),
            "padded": not (MODES[pack.mode].fills_lines or pack.crop),
            "samples_between_neighbouring_lines": _distance(window) * data.lanes,
            "samples_of_a_rank_between_neighbouring_lines": _distance(window) * lanes_per_rank,
        },
        "drift": {
            "largest": max(source["drift"] for source in sources.values()),
            "bound": LARGEST_DRIFT,
            "proposed_lanes": min(
                (source["proposed_lanes"] for source in sources.values() if source["proposed_lanes"]), default=None
            ),
        },
        "windows_per_worker_bytes": windows + tokenized,
        "tokenized_per_worker_bytes": tokenized,
        "memory_per_worker_bytes": windows + tokenized + _memory(run, sources, line, lanes_per_worker) + prefetched,
        "remote_shards_per_worker_bytes": prefetched,
        "remote_shards_in_windows_bytes": in_windows,
        "remote_shards_spooled_per_worker_bytes": min(room, max(0, int(ROOM * in_windows) - in_memory)),
    }
    return {**report, "warnings": list(_warnings(report, mixture))}


def _shortages(readers: Iterable[ShardReader], size: int) -> Iterator[str]:
    """Spools that would not take this many bytes on this machine."""
    if size:
        spools = {reader.path.storage.spool for reader in readers if reader.path.local is None}
        for problem in sorted({shortage(spool, size) for spool in spools if spool is not None} - {""}):
            yield (
                f"storage.spool needs {short(size)}B for each worker, and on this machine {problem}: give "
                "storage.spool.path a folder on a disk with room, or set a smaller shuffle.distance or shuffle.window"
            )


def _all_tokens(mixture: Mixture, epochs: int | None) -> int:
    """The tokens of a finite pass, or those of the corpus."""
    if epochs is None:
        return sum(stage.size().tokens for stage in mixture.sources.values())
    read = {name: stage for name, stage in mixture.sources.items() if mixture.weights[name]}
    return max(1, round(sum(min(stage.total_tokens(), epochs * stage.size().tokens) for stage in read.values())))


def _pass(run: Run, world_size: int) -> dict[str, Any]:
    """The length of a finite pass. For that, the lengths of all documents are read."""
    data = run.data
    _, samples = checked_evaluation(run.evaluation, data, None)
    lines = data.plan(samples, plan_folder(run.checkpoints)).result().lines
    now = Segment(0, world_size, run.batch_size)
    steps = Schedule([now], data.lanes, lines).end(now)
    total = int(lines.sum())
    return {
        "epochs": data.epochs,
        "evaluation": bool(run.evaluation),
        "samples": total,
        "steps": steps,
        "filled_rows": steps * world_size * run.batch_size - total,
    }


def window_of(stage: Stage) -> int:
    """The longest window of a pipeline, in lines, of a shuffle or of best-fit packing; else 1."""
    below = max(map(window_of, stage.children().values()), default=1)
    return max(stage.window if isinstance(stage, Shuffle) else stage.window_items(), below)


def _source(name: str, reader: ShardReader, mixture: Mixture, lanes: int, taken: float, tokens: int) -> dict[str, Any]:
    source = mixture.sources[name]
    size = source.size()
    blocks = cut_blocks(reader.counts, lanes, reader.block_size).blocks
    return {
        "shards": len(reader.counts.shards),
        "documents": size.documents,
        "tokens": size.tokens,
        "tokens_are_estimated": not is_counted(source),
        "share": mixture.phase_at(0).weights[name],
        "share_of_all": taken / tokens,
        "tokens_read": round(taken),
        "epochs": taken / max(1, size.tokens),
        "max_epochs": reader.max_epochs,
        "blocks": blocks,
        "mean_document": max(1, size.tokens) / max(1, size.documents),
        "counts": "file" if reader.counts.csv_root else "shards",
    }


def _drift(reader: ShardReader, lanes: int, world_size: int) -> dict[str, Any]:
    """The drift of a source, and the number of lanes that would keep it within the bound."""
    far = drift(reader.counts, lanes, reader.block_size)
    proposed = None
    if far > LARGEST_DRIFT:
        proposed = lanes_within(
            reader.counts, reader.block_size, bound=LARGEST_DRIFT, below=lanes, world_size=world_size
        )
    return {"drift": far, "proposed_lanes": proposed}


def _lines(run: Run, sources: Mapping[str, Any]) -> float:
    """The number of lines that the tokens fill, with BOS and EOS, and without padding."""
    pack = run.pack
    delimits = [stage for stage in stages_down_to_mixture(pack) if isinstance(stage, Delimit)]
    each_has_bos = any(stage.bos is not None for stage in delimits) or pack.mode == "bestfit"
    inserted = each_has_bos + any(stage.eos is not None for stage in delimits)
    total = sum(source["tokens_read"] * (1 + inserted / source["mean_document"]) for source in sources.values())
    in_lines = 0 if pack.mode == "bestfit" else (pack.bol is not None) + (pack.eol is not None)
    return float(total / (pack.seq_len - in_lines))


def _distance(window: int) -> float:
    """The mean distance of two neighbouring lines in their lane, over all orders of a window."""
    return max(1.0, (window + 1) / 3)


def _windows(sources: Mapping[str, Any], line: int, window: int, lanes: int) -> int:
    """Roughly the bytes of the windows of some lanes, while one of them is built."""
    read = [source for source in sources.values() if source["share_of_all"]]
    spans = line * sum(source["share_of_all"] / source["mean_document"] for source in read) + 1
    return int(window * spans * SPAN_BYTES * (KEPT * lanes + BUILT))


def _tokenized(mixture: Mixture, sources: Mapping[str, Any], window: int, lanes: int) -> int:
    """The bytes of tokens that some lanes hold of text: of their windows, and as many for the next ones."""
    return sum(
        round(2 * window * sources[name]["share_of_all"] * lanes * tokenize.token_bytes)
        for name, source in mixture.sources.items()
        if (tokenize := tokenizer_of(source)) is not None
    )


def _memory(run: Run, sources: Mapping[str, Any], line: int, lanes: int) -> int:
    """Roughly the bytes that a worker needs besides windows and mapped shards."""
    documents = sum(
        min(CHUNK_DOCUMENTS, 1 + CHUNK_TOKENS / source["mean_document"], source["documents"])
        for source in sources.values()
        if source["share_of_all"]
    )
    batch = run.batch_size * line * 16
    return int(documents * DOCUMENT_BYTES * lanes + batch * (run.settings.get("prefetch", PREFETCH) + 2))


def _remote_in_windows(readers: Mapping[str, ShardReader], sources: Mapping[str, Any], tokens: int) -> int:
    """The bytes of remote shards that this many tokens of the mix come from."""
    return int(
        sum(
            tokens * sources[name]["share_of_all"] * reader.remote_bytes / max(1, sources[name]["tokens"])
            for name, reader in readers.items()
        )
    )


def _warnings(report: Mapping[str, Any], mixture: Mixture) -> Iterator[str]:
    lanes, tokens, sources = report["lanes"], report["tokens"], report["sources"]
    in_windows = lanes * report["lines"]["window"] * report["lines"]["tokens"]
    readers = {name: reader for name, stage in mixture.sources.items() if (reader := reader_of(stage))}
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
    if found := those(lambda _, source: source["tokens_are_estimated"], lambda source: f"{short(source['tokens'])}"):
        yield (
            f"text, whose tokens are an estimate of a quarter of its bytes: {found}; the numbers of epochs are as rough"
        )
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
    once = report["pass"] is not None and report["pass"]["epochs"] == 1  # then no document comes again
    if not once and (
        found := those(lambda _, source: source["blocks"] < lanes, lambda source: counted(source["blocks"], "block"))
    ):
        yield (
            f"fewer blocks than the {counted(lanes, 'lane')}: {found}; the lanes start in different epochs of "
            "these sources, so "
            "their documents repeat early; use fewer lanes or more documents"
        )
    if not once and (found := those(_drifts(lanes), _describe_drift)):
        yield (
            "lanes finish an epoch at different times, so part of an epoch's worth of tokens is already of the next "
            f"epoch: {found}; use fewer lanes or more documents"
        )
    if report["windows_per_worker_bytes"] > LARGE_WINDOWS:
        yield (
            f"the shuffle windows of {counted(report['lines']['window'], 'line')} take about "
            f"{report['windows_per_worker_bytes'] / 1e9:.1f} GB per worker; set shuffle.distance or shuffle.window, "
            "or use more ranks or fewer lanes"
        )
    yield from _shortages(readers.values(), report["remote_shards_spooled_per_worker_bytes"])
    needed, budget = ROOM * report["remote_shards_in_windows_bytes"], report["remote_shards_per_worker_bytes"]
    spooled = report["remote_shards_spooled_per_worker_bytes"]
    held = budget - int(budget * RESERVED) if spooled else budget
    if needed > held + spooled + 1:
        yield (
            f"the shuffle windows of a worker hold {short(needed / ROOM)}B of remote shards, which does not fit into "
            f"storage.prefetch_bytes ({short(budget)}B){f' and storage.spool ({short(spooled)}B)' if spooled else ''}: "
            f"blocks are fetched again and again; set storage.spool.limit to {math.ceil((needed - held) / 1e6):,}MB, "
            "or set a smaller shuffle.distance or shuffle.window"
        )
    for name, source in sources.items():
        yield from (f"source {name!r}: {note}" for note in source["notes"])
    yield from _doubled_sources(readers)
    for folder, count in Counter(str(reader.path) for reader in readers.values()).items():
        if count > 1:
            yield f"{counted(count, 'source')} read {folder}: each reads all of its documents once per epoch"
    if found := those(
        lambda name, source: name in remote and source["counts"] == "shards",
        lambda source: counted(source["shards"], "shard"),
    ):
        yield f"counted from the remote shards by every process that starts: {found}; run `fmsdata index` once instead"
    if lanes % report["world_size"]:
        yield (
            f"{counted(report['world_size'], 'rank')} don't divide {counted(lanes, 'lane')}: nothing is lost or "
            "repeated, "
            "but the order differs from that at the world sizes that do"
        )
    last = max((phase["until_tokens"] or 0 for phase in report["phases"]), default=0)
    if last > tokens:
        yield f"the last phase starts or ends after {short(last)} tokens; this report covers only {short(tokens)}"
    if report["same_stream_at_world_sizes"] == [1, lanes] and lanes > 2:
        yield f"lanes={lanes} is prime: the stream is the same only on 1 and on {lanes} ranks; use 192, 720 or 2520"


def _drifts(lanes: int) -> Callable[[str, Any], bool]:
    """Whether a source drifts too far in a run that reaches the end of an epoch of it."""

    def check(_: str, source: Any) -> bool:
        reaches_end = source["epochs"] + source["drift"] >= 1
        return bool(reaches_end and source["drift"] > LARGEST_DRIFT and source["blocks"] >= lanes)

    return check


def _describe_drift(source: Any) -> str:
    better = source["proposed_lanes"]
    return f"{source['drift']:.0%}" + (f", below {LARGEST_DRIFT:.0%} with {counted(better, 'lane')}" if better else "")


def _doubled_sources(readers: Mapping[str, ShardReader]) -> Iterator[str]:
    """Sources whose folders are copies of one another, or inside one another."""
    for first, second in combinations(readers, 2):
        a, b = readers[first], readers[second]
        if a.files is not None or b.files is not None:
            shared = sorted(_files(a) & _files(b))
            if shared:
                yield f"sources {first!r} and {second!r} both read {counted(len(shared), 'file')}, such as {shared[0]}"
            continue
        if a.path.url == b.path.url:
            continue
        if a.counts.digest == b.counts.digest and counts_tell_apart(a.counts):
            yield f"sources {first!r} and {second!r} have the same shards, by names and counts: one may be a copy"
        for outer, inner in ((a, b), (b, a)):
            if f"{inner.path.absolute().url}/".startswith(f"{outer.path.absolute().url}/"):
                yield (
                    f"{inner.path} is a folder inside another source, {outer.path}: "
                    "both read its documents; name the folders beside it instead"
                )


def _files(reader: ShardReader) -> set[str]:
    folder = reader.path.absolute()
    return {f"{folder}/{shard}" for shard in reader.counts.shards}
