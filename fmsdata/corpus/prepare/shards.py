"""The second pass: documents of many pieces become the shards of the corpus.

With shuffling, the pieces of a source are taken in keyed order, in groups. The documents of a group
are distributed evenly over its shards: each shard takes a run of every piece (whose documents are in
keyed order already), and permutes what it took. Without, the shards of a file hold its documents in
order.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fmsdata.core.keys import Ints, key_of, keyed_order, offsets
from fmsdata.core.tokens import Tokens
from fmsdata.corpus.listing import VALIDATION
from fmsdata.corpus.prepare.removal import read_dropped
from fmsdata.corpus.prepare.settings import Settings, Unit
from fmsdata.corpus.prepare.units import Piece, UnitRecord
from fmsdata.corpus.prepare.work_folder import SHARDS, WorkFolder
from fmsdata.corpus.shard_writer import writing_shard
from fmsdata.storage.location import Location

WRITTEN = 1 << 14  # documents that are put in order at once


class Run(NamedTuple):
    """The documents of a piece that begin at the tokens `start` to `stop - 1`, of those for its split."""

    unit: str
    piece: int
    holds: Piece
    start: int
    stop: int


class ShardPlan(NamedTuple):
    """A shard to write."""

    number: int
    source: str
    path: str  # relative to the output
    held: bool  # for validation
    key: int | None  # of the order of its documents; None: as they are
    runs: tuple[Run, ...]
    tokens: int  # about how many

    def __str__(self) -> str:
        return self.path


def plan_shards(settings: Settings, units: Sequence[Unit], records: Mapping[int, UnitRecord]) -> list[ShardPlan]:
    """All shards of the corpus. Depends on the settings and on what the files hold, and nothing else."""
    plans: list[ShardPlan] = []
    for held in (False, True) if settings.validation else (False,):
        series = (_shuffled if settings.shuffle else _in_order)(settings, units, records, held)
        for source, path, key, runs, tokens in series:
            folder = f"{VALIDATION}/" if held else ""
            plans.append(ShardPlan(len(plans), source, f"{folder}{path}", held, key, tuple(runs), tokens))
    return plans


def _tokens(piece: Piece, held: bool) -> int:
    return piece.held_tokens if held else piece.tokens


def _documents(piece: Piece, held: bool) -> int:
    return piece.held_documents if held else piece.documents


def _shuffled(
    settings: Settings, units: Sequence[Unit], records: Mapping[int, UnitRecord], held: bool
) -> Iterator[tuple[str, str, int | None, list[Run], int]]:
    for source in sorted({unit.file.source for unit in units}):
        pieces = []
        for unit in units:
            if unit.file.source == source:
                for number, piece in enumerate(records[unit.number].pieces):
                    if _documents(piece, held):
                        name = (unit.file.inner, unit.part, number)
                        pieces.append((key_of(settings.seed, "pieces", source, *name), name, unit.name, number, piece))
        pieces.sort(key=lambda piece: piece[:2])
        groups, shard = -(-len(pieces) // settings.group_pieces), 0
        for group in range(groups):
            inside = pieces[len(pieces) * group // groups : len(pieces) * (group + 1) // groups]
            total = sum(_tokens(piece, held) for *_, piece in inside)
            documents = sum(_documents(piece, held) for *_, piece in inside)  # a shard has at least one
            count = max(1, min(documents, -(-total // (settings.shard_tokens or total or 1))))
            for i in range(count):
                runs = [
                    Run(unit, number, piece, size * i // count, size * (i + 1) // count)
                    for _, _, unit, number, piece in inside
                    if (size := _tokens(piece, held))
                ]
                key = key_of(settings.seed, source, held, shard)
                yield source, f"{source}/part-{shard:05}.arrow", key, runs, total // count
                shard += 1


def _in_order(
    settings: Settings, units: Sequence[Unit], records: Mapping[int, UnitRecord], held: bool
) -> Iterator[tuple[str, str, int | None, list[Run], int]]:
    files: dict[str, list[Unit]] = {}
    for unit in units:
        files.setdefault(unit.file.path, []).append(unit)
    for inside in files.values():
        file = inside[0].file
        pieces = [
            (unit.name, number, piece)
            for unit in inside
            for number, piece in enumerate(records[unit.number].pieces)
            if _documents(piece, held)
        ]
        if not pieces:
            continue
        total = sum(_tokens(piece, held) for *_, piece in pieces)
        documents = sum(_documents(piece, held) for *_, piece in pieces)  # a shard has at least one
        most = max(settings.shard_tokens or total, -(-total // max(documents, 1)), 1)
        count = max(1, -(-total // most))
        for i in range(count):
            runs, before = [], 0
            low, high = i * most, (i + 1) * most if i < count - 1 else total + 1
            for name, number, piece in pieces:
                size = _tokens(piece, held)
                start, stop = max(0, low - before), high - before
                if stop > 0 and start <= size:  # empty documents may begin where the piece ends
                    runs.append(Run(name, number, piece, start, stop))
                before += size
            part = f"-{i:05}" if settings.shard_tokens else ""
            yield file.source, f"{file.source}/{file.inner}{part}.arrow", None, runs, min(most, total)


def write_planned(output: Location, work: WorkFolder, settings: Settings, plan: ShardPlan) -> dict[str, Any]:
    """Write a shard, and record its counts. A shard without documents is not written."""
    dtype = np.dtype(settings.dtype)
    parts = (_read(work, settings, run, plan.held, dtype) for run in plan.runs)
    counts = {"documents": 0, "tokens": 0}
    documents = (part for part in parts if len(part[1]) > 1)
    if plan.key is not None:
        loaded = list(documents)
        tokens = np.concatenate([part for part, _ in loaded]) if loaded else np.empty(0, dtype)
        ends = offsets(np.concatenate([np.diff(ends) for _, ends in loaded])) if loaded else np.zeros(1, np.int64)
        del loaded
        documents = _permuted(tokens, ends, keyed_order(len(ends) - 1, plan.key))
    first = next(documents, None)
    if first is not None:
        with writing_shard(output / plan.path, dtype=dtype) as writer:
            writer.write(*first)
            for some in documents:
                writer.write(*some)
        counts = {"documents": writer.documents, "tokens": writer.tokens}
    work.done(SHARDS, f"{plan.number:06}", counts)
    return counts


def _permuted(tokens: Tokens, ends: Ints, order: Ints) -> Generator[tuple[Tokens, Ints], None, None]:
    starts, stops = ends[:-1], ends[1:]
    for first in range(0, len(order), WRITTEN):
        some = order[first : first + WRITTEN]
        pairs = zip(starts[some].tolist(), stops[some].tolist(), strict=True)
        joined = np.concatenate([tokens[start:stop] for start, stop in pairs])
        yield joined, offsets(stops[some] - starts[some])


def _read(work: WorkFolder, settings: Settings, run: Run, held: bool, dtype: np.dtype[Any]) -> tuple[Tokens, Ints]:
    """The documents of a run, without those that are dropped."""
    before = run.holds.documents if held else 0
    count = run.holds.held_documents if held else run.holds.documents
    index = work.unit_file(run.unit, run.piece, "index")
    length = np.frombuffer(index.read_range(8 * before, 8 * (before + count)), np.int64)
    ends = offsets(length)
    first, stop = np.searchsorted(ends[:-1], [run.start, run.stop]).tolist()
    base = run.holds.tokens if held else 0
    low, high = int(ends[first]), int(ends[stop])
    start, end = ((base + token) * dtype.itemsize for token in (low, high))
    tokens = np.frombuffer(work.unit_file(run.unit, run.piece, "tokens").read_range(start, end), dtype)
    ends = ends[first : stop + 1] - low
    if settings.deduplicate:
        kept = np.ones(stop - first, np.bool_)
        gone = read_dropped(work, run.unit, run.piece) - (before + first)
        kept[gone[(gone >= 0) & (gone < len(kept))]] = False
        if not kept.all():
            length = np.diff(ends)
            tokens, ends = tokens[np.repeat(kept, length)], offsets(length[kept])
    return tokens, ends
