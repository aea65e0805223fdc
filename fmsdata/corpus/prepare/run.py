"""Preparing a corpus from text, from the listing of the input to the finished manifest.

1. Units: every part of a file is tokenized, in any process, into pieces in the work folder.
2. Duplicates are found, if they are to be removed.
3. Shards: documents of many pieces are written in their final order.
4. Counts, the list of skipped documents and the manifest are written, and the work folder is removed.

Whatever is done is recorded, so a run that was killed continues.
"""

import csv
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import cloudpickle

from fmsdata.core.checks import flag, rate, whole
from fmsdata.corpus.counts_csv import Count
from fmsdata.corpus.index import write_counts
from fmsdata.corpus.listing import MANIFEST, UNFINISHED, VALIDATION
from fmsdata.corpus.output import require_apart, require_empty
from fmsdata.corpus.prepare.engines import Engine, EngineName, open_engine
from fmsdata.corpus.prepare.inputs import find_inputs, plan_units
from fmsdata.corpus.prepare.lock import only_run
from fmsdata.corpus.prepare.removal import find_dropped
from fmsdata.corpus.prepare.settings import PIECE_TOKENS, SHARD_TOKENS, UNIT_BYTES, Settings, Unit
from fmsdata.corpus.prepare.shards import ShardPlan, plan_shards
from fmsdata.corpus.prepare.tasks import Job
from fmsdata.corpus.prepare.units import UnitRecord
from fmsdata.corpus.prepare.work_folder import SHARDS, UNITS, WorkFolder, read_if_there
from fmsdata.corpus.progress import showing_progress
from fmsdata.corpus.tokenizer import open_tokenizer, token_type
from fmsdata.errors import ConfigError, DataError
from fmsdata.storage.location import Location

SKIPPED = "fmsdata-skipped.csv"  # in `meta`: the documents that could not be read
READERS = 16  # records that are read at once


@dataclass
class PreparedSource:
    """What was written for a source."""

    name: str
    shards: int = 0
    documents: int = 0
    tokens: int = 0
    validation_shards: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0


NOTHING_WRITTEN = "an earlier run with the same files and options had finished: nothing was written"


@dataclass
class Prepared:
    """What `prepare_corpus` wrote."""

    output: str
    dtype: str
    vocabulary: int | None
    sources: list[PreparedSource] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    empty: int = 0  # documents without text
    bad: int = 0  # documents that could not be read, and were skipped
    bad_listed: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, reason
    duplicates: int = 0  # documents that were dropped
    seconds: float = 0.0  # of this run
    continued: bool = False  # this run continued an earlier one, or found that it had finished
    notes: list[str] = field(default_factory=list)


def prepare_corpus(
    source: str | os.PathLike[str] | Location,
    output: str | os.PathLike[str] | Location,
    tokenizer: Any,
    *,
    processes: int | None = None,
    shard_tokens: int | None = None,
    validation: float = 0.0,
    skip_bad: bool = False,
    shuffle: bool = True,
    engine: EngineName = "processes",
    column: str | None = None,
    seed: int = 0,
    deduplicate: bool = False,
    unit_bytes: int = UNIT_BYTES,
    piece_tokens: int = PIECE_TOKENS,
) -> Prepared:
    """Make token shards of text files, with counts, by source. A run that was stopped continues.

    What is written depends on the files, the tokenizer and the options, not on the number of
    `processes` nor on the `engine`. `unit_bytes` is the size of the parts that files are cut into,
    and `piece_tokens` is how many tokens a process holds in memory while it tokenizes one.

    >>> prepare_corpus("texts", "corpus", "tokenizer.json", validation=0.01).tokens    # doctest: +SKIP
    98110224
    """
    began = time.monotonic()
    workers = None if processes is None else whole("processes", processes, least=1)
    root, target = Location(source, error=DataError), Location(output, error=DataError)
    require_apart(root, target)
    opened = open_tokenizer(tokenizer)
    root, files, notes = find_inputs(root)
    share = rate("validation", validation)
    if share and any(file.source == VALIDATION for file in files):
        raise ConfigError(f"a source is named {VALIDATION!r}, like the folder for held-out documents; rename it")
    most = SHARD_TOKENS if shard_tokens is None and shuffle else shard_tokens
    settings = Settings(
        tokenizer=opened.identity,
        dtype=str(token_type(opened.vocabulary)),
        column=column,
        seed=whole("seed", seed),
        shuffle=flag("shuffle", shuffle),
        shard_tokens=None if most is None else whole("shard_tokens", most, least=1),
        validation=share,
        skip_bad=flag("skip_bad", skip_bad),
        deduplicate=flag("deduplicate", deduplicate),
        unit_bytes=whole("unit_bytes", unit_bytes, least=1),
        piece_tokens=whole("piece_tokens", piece_tokens, least=1),
        files=tuple(files),
    )
    done = _finished(target, settings)
    if done is None:
        if WorkFolder(target).settings() is None:
            require_empty(target, but=UNFINISHED)
        with only_run(target):
            job = Job(root, target, settings, cloudpickle.dumps(opened))
            with open_engine(engine, job, workers) as running:
                done = _Run(job, opened.vocabulary, running).run()
    done.notes = notes + done.notes
    done.seconds = time.monotonic() - began
    return done


def _finished(target: Location, settings: Settings) -> Prepared | None:
    """What an earlier run wrote, if it had finished."""
    data = read_if_there(target / "meta", MANIFEST)
    if data is None:
        return None
    settings.require_same(Settings.parse(data, str(target / "meta" / MANIFEST)), str(target))
    summary = json.loads(data)["summary"]
    summary["sources"] = [PreparedSource(**found) for found in summary["sources"]]
    WorkFolder(target).remove()
    return Prepared(**summary | {"output": str(target), "continued": True, "notes": [NOTHING_WRITTEN]})


class _Run:
    def __init__(self, job: Job, vocabulary: int | None, engine: Engine) -> None:
        self._job, self._engine = job, engine
        self._settings, self._work = job.settings, WorkFolder(job.output)
        self._units = plan_units(job.settings)
        self._done = Prepared(str(job.output), job.settings.dtype, vocabulary)

    def run(self) -> Prepared:
        before = self._work.settings()
        if before is not None and self._work.records(UNITS):  # else nothing is lost
            self._settings.require_same(before, str(self._job.output))
            self._done.continued = True
        elif before is None:
            require_empty(self._job.output, but=UNFINISHED)
        self._work.begin(self._settings)
        records = self._tokenize()
        if self._settings.deduplicate:
            self._done.duplicates = self._find_duplicates(records)
        plans = plan_shards(self._settings, self._units, records)
        self._finish(records, plans, self._write(plans))
        return self._done

    def _tokenize(self) -> dict[int, UnitRecord]:
        names = self._work.records(UNITS)
        known = [unit for unit in self._units if unit.name in names]
        with ThreadPoolExecutor(READERS) as pool:
            found = pool.map(lambda unit: self._work.record(UNITS, unit.name), known)
            pairs = zip(known, found, strict=True)
            records = {unit.number: UnitRecord.parse(record) for unit, record in pairs if record is not None}
        missing = [unit for unit in self._units if unit.number not in records]
        total = sum(unit.stored_bytes for unit in missing)
        began, tokens = time.monotonic(), 0
        with showing_progress("tokenizing", total, lines=True) as progress:
            for task, result in self._engine.run(missing):
                if isinstance(task, Unit) and isinstance(result, UnitRecord):
                    records[task.number] = result
                    tokens += sum(piece.tokens + piece.held_tokens for piece in result.pieces)
                    speed = tokens / (time.monotonic() - began)
                    progress.advance(task.stored_bytes, f"{tokens:,} tokens, {speed:,.0f} tokens/s")
        return records

    def _find_duplicates(self, records: dict[int, UnitRecord]) -> int:
        record = self._work.record("", "duplicates")
        if record is None:
            pieces = [
                (unit.name, number, piece)
                for unit in self._units
                for number, piece in enumerate(records[unit.number].pieces)
            ]
            documents, tokens = find_dropped(self._work, pieces)
            record = {"documents": documents, "tokens": tokens}
            self._work.done("", "duplicates", record)
        return int(record["documents"])

    def _write(self, plans: Sequence[ShardPlan]) -> dict[int, Count]:
        counts: dict[int, Count] = {}
        names = self._work.records(SHARDS)
        for plan in plans:
            if f"{plan.number:06}" in names:
                record = self._work.record(SHARDS, f"{plan.number:06}") or {}
                counts[plan.number] = record["documents"], record["tokens"]
        missing = [plan for plan in plans if plan.number not in counts]
        with showing_progress("writing shards", sum(plan.tokens for plan in missing), lines=True) as progress:
            for task, result in self._engine.run(missing):
                if isinstance(task, ShardPlan) and isinstance(result, dict):
                    counts[task.number] = result["documents"], result["tokens"]
                    progress.advance(task.tokens, f"{len(counts):,} of {len(plans):,} shards")
        return counts

    def _finish(self, records: dict[int, UnitRecord], plans: Sequence[ShardPlan], counts: dict[int, Count]) -> None:
        done, output = self._done, self._job.output
        train: dict[str, Count] = {}
        held: dict[str, Count] = {}
        sources = {name: PreparedSource(name) for name in sorted({file.source for file in self._settings.files})}
        for plan in plans:
            documents, tokens = counts[plan.number]
            if not documents:
                continue
            path = plan.path.removeprefix(f"{VALIDATION}/") if plan.held else plan.path
            (held if plan.held else train)[path] = documents, tokens
            source = sources[plan.source]
            if plan.held:
                source.validation_shards += 1
                source.validation_documents += documents
                source.validation_tokens += tokens
            else:
                source.shards += 1
                source.documents += documents
                source.tokens += tokens
        done.sources = list(sources.values())
        for name in ("documents", "tokens", "validation_documents", "validation_tokens"):
            setattr(done, name, sum(getattr(source, name) for source in done.sources))
        done.empty = sum(record.empty for record in records.values())
        done.bad = sum(record.bad for record in records.values())
        done.bad_listed = list(_bad(self._units, records))
        if not train and not held:
            raise DataError(
                f"{self._job.source}: all {done.empty + done.bad:,} documents are empty or bad; nothing to write"
            )
        self._work.remove_unfinished(output)
        write_counts(output, train)
        if held:
            write_counts(output / VALIDATION, held)
        if done.bad:
            (output / "meta" / SKIPPED).write_bytes(_table(done.bad_listed))
            done.bad_listed = done.bad_listed[:100]
        summary = asdict(done) | {"output": "", "notes": [], "seconds": 0.0, "continued": False}
        manifest = json.dumps({"settings": self._settings.to_json(), "summary": summary}, indent=1)
        (output / "meta" / MANIFEST).write_bytes(manifest.encode() + b"\n")
        self._work.remove()


def _bad(units: Sequence[Unit], records: dict[int, UnitRecord]) -> Iterator[tuple[str, int, str]]:
    """The documents that were skipped: file, line and reason. Lines of a part count from its start."""
    before = 0
    for unit in units:
        before = before if unit.part else 0
        record = records[unit.number]
        for line, reason in record.bad_listed:
            yield unit.file.path, before + line, reason
        before += record.lines


def _table(rows: Sequence[tuple[str, int, str]]) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("file", "line", "reason"))
    writer.writerows(rows)
    return table.getvalue().encode()
