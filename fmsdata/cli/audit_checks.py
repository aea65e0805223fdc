"""The checks of `fmsdata audit`: laws 1 and 2 on the data of a configuration, and their report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from fmsdata import testing
from fmsdata.cli.audit import LEAST_SAMPLES, MOST_SAMPLES
from fmsdata.cli.common import ENDLESS
from fmsdata.cli.outlook import window_of
from fmsdata.cli.run import Run, mixture_of
from fmsdata.core.stage import Stage
from fmsdata.core.wording import counted, listed
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.shares import expected_tokens, leaves
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.tokenize import tokenizer_of
from fmsdata.tasks.causal_lm import CausalLM
from fmsdata.testing.stored import Document

PATIENCE = 20  # give up after this many times the samples that an epoch takes on average
NEVER = 1e6  # a source without an epoch after this many times the corpus never has one


@dataclass(kw_only=True)
class Report:
    """What was checked, in numbers and in sentences, and the result."""

    holds: bool = True
    broken: str | None = None
    lanes: int
    sources: list[str]
    world_sizes: list[int] = field(default_factory=list)  # of the check of law 1
    compared: int = 0  # samples, at each world size
    fields: list[str] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # the world sizes of the check of law 2, in order
    resumes: int = 0
    samples: int = 0
    tokens: int = 0
    documents: int = 0
    documents_whole: int = 0
    epochs_begun: dict[str, int] = field(default_factory=dict)
    pass_samples: int = 0  # of a finite pass, in the check of law 7
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Checks laws 1 and 2 on the data of one configuration."""

    run: Run
    samples: int | None
    epoch: bool
    world_sizes: Sequence[int]
    finite: Run | None = None  # the same with its end, if it has one

    @property
    def data(self) -> Rescalable:
        return self.run.data

    def check(self, bar: Progress) -> Report:
        """Check both laws. Stop at the first that does not hold."""
        if self.epoch and self.run.pack.crop:
            raise ConfigError(
                "--epoch: with pack.crop, tokens are thrown away, so an epoch never comes whole; omit --epoch to check "
                "that none comes twice, or set pack.crop=false pack.pad=TOKEN"
            )
        if self.epoch and (own := self.run.own_stages):
            raise ConfigError(
                f"--epoch: {', '.join(own)} may drop and change documents, so the shards do not say what an epoch must "
                "hold; omit --epoch, or check your stage with fmsdata.testing.check_exactly_once"
            )
        report = Report(lanes=self.data.lanes, sources=sorted(_readers(self.data.lines)), chain=list(self.world_sizes))
        if self.finite is not None:
            report.checked.append(f"{ENDLESS} for laws 1 and 2.")
        try:
            self._same_stream(report, bar)
            self._exactly_once(report, bar)
            if self.finite is not None:
                self._equal_ends(self.finite, report, bar)
        except testing.Incomplete as error:
            report.holds = False
            report.broken = (
                f"Law 2 is not proven: {error}. They are lost, or in a lane whose documents are far longer than those "
                "of the others: raise --samples to find out"
            )
        except testing.LawBroken as error:
            report.holds, report.broken = False, f"A law is broken: {error}"
            report.not_checked.append("Everything that would have been checked after this.")
        report.not_checked.append("Laws 3 to 6, and changes of the configuration between stops.")
        return report

    @property
    def _compared(self) -> int:
        usual = min(max(2 * window_of(self.data.lines) * self.data.lanes, LEAST_SAMPLES), MOST_SAMPLES)
        if self.samples is None:
            return usual
        return min(usual, self.samples) if self.epoch else self.samples

    def _same_stream(self, report: Report, bar: Progress) -> None:
        samples, workers = self._compared, self._configured(self.run.num_workers)
        make = self._configured(0)
        dividing = sorted({size for size in self.world_sizes if self.data.lanes % size == 0 and size > 1})
        used = workers(0, 1).num_workers
        task = bar.add_task("law 1, same stream", total=samples * (2 + len(dividing) + 3 * bool(used)), note="")

        def progress(count: int) -> None:
            bar.advance(task, count)

        first = next(iter(make(0, 1)))
        testing.check_same_stream(make, world_sizes=dividing, samples=samples, progress=progress)
        report.world_sizes, report.compared = [1, *dividing], samples
        report.fields = sorted(testing.row_fields(first))
        if left_out := sorted(first.keys() - set(report.fields)):
            report.not_checked.append(f"Fields without an entry for each row of a batch: {', '.join(left_out)}.")
        report.checked.append(
            f"Law 1, same stream: samples 0 to {samples - 1:,} are the same, bit for bit, at world sizes "
            f"{listed(report.world_sizes)}, each from the rank that must hand it out. "
            f"The fields compared are {', '.join(report.fields)}."
        )
        if used:
            testing.check_same_stream(make, world_sizes=[], samples=samples, variants=[workers], progress=progress)
            report.checked.append(f"They are the same with {counted(used, 'worker process')}, at world size 1.")
        else:
            report.not_checked.append("Worker processes: the configuration has none.")
        if not dividing:
            report.not_checked.append("Law 1 on several ranks: no world size above 1 that divides the lanes was given.")
        if others := sorted(set(self.world_sizes) - {1, *dividing}):
            report.not_checked.append(
                f"The order at world sizes {listed(others)}: they don't divide the {counted(self.data.lanes, 'lane')}, "
                "so only law 2 holds there."
            )

    def _exactly_once(self, report: Report, bar: Progress) -> None:
        own = self.run.own_stages
        account = testing.Account(None if own else _stored(self.data), epochs=int(self.epoch))
        try:
            (self._whole_epoch if self.epoch else self._beginning)(account, bar)
        finally:
            report.resumes, report.samples, report.tokens = max(0, account.stops - 1), account.samples, account.tokens
            whole = account.whole.total()
            report.documents, report.documents_whole = whole + account.begun, whole
            report.epochs_begun = {source: epoch + 1 for source, epoch in sorted(account.latest.items())}
        report.checked.append(
            f"Law 2, exactly once: a run on {listed(self.world_sizes, ' and ')} ranks in turn, stopped and "
            f"resumed from its state {counted(report.resumes, 'time')}, handed out "
            f"{counted(account.samples, 'sample')} "
            f"with {counted(account.tokens, 'stored token')}."
        )
        if self.epoch:
            report.checked.append(
                f"Each of the {counted(account.whole[0], 'document')} of {listed(report.sources)} came exactly "
                "once in the "
                "first epoch, whole, with the stored tokens. In the parts of later epochs that were read, no token was "
                "repeated or wrong."
            )
        elif own:
            report.checked.append(
                "Each was the sample that an uninterrupted run has in its place, and the lines of each lane came in "
                "order, none twice."
            )
            report.not_checked.append(
                f"The tokens against the shards, because {', '.join(own)} may drop and change documents."
            )
        else:
            report.checked.append(
                "Each was the sample that an uninterrupted run has in its place, and the lines of each lane came in "
                f"order, none twice. The tokens are the stored ones, of {counted(report.documents, 'document')} "
                f"({whole:,} came "
                "whole; a document that came in two epochs counts twice), and none came twice in an epoch."
            )
            report.not_checked.append("The rest of the stream; --epoch checks that every document comes.")
        report.checked.append(
            f"Epochs started: {', '.join(f'{source} {count}' for source, count in report.epochs_begun.items())}."
        )
        window, lines = window_of(self.data.lines), account.samples // self.data.lanes
        if lines < window:
            report.not_checked.append(
                f"Stops in later windows: each lane handed out about {lines} of the {counted(window, 'line')} "
                "of its first "
                f"window; --samples {2 * window * self.data.lanes} covers two windows."
            )

    def _equal_ends(self, run: Run, report: Report, bar: Progress) -> None:
        if not self.epoch:
            report.not_checked.append("Law 7, equal ends: --epoch reads the whole pass.")
            return
        task = bar.add_task("law 7, equal ends", total=None, note="")
        sizes = sorted(set(self.world_sizes) - {1})
        report.pass_samples = testing.check_equal_ends(
            _simple(run, workers=0),
            world_sizes=sizes,
            progress=lambda count: bar.advance(task, count),
        )
        report.checked.append(
            f"Law 7, equal ends: the pass of {counted(report.pass_samples, 'sample')} ended at the same step on "
            "every rank, at "
            f"world sizes {listed([1, *sizes])}, with the same samples. Rows that fill up the end are marked."
        )

    def _beginning(self, account: testing.Account, bar: Progress) -> None:
        task = bar.add_task("law 2, exactly once", total=2 * self._compared, note="")
        testing.check_rescaling(
            self._lines,
            stored=account.stored,
            world_sizes=self.world_sizes,
            samples=self._compared,
            account=account,
            progress=lambda count: bar.advance(task, count),
        )

    def _whole_epoch(self, account: testing.Account, bar: Progress) -> None:
        task = bar.add_task("law 2, counting", total=None, note="")
        expected = self._epoch_samples()
        bar.update(task, total=len(account.stored), description="law 2, exactly once")
        testing.check_exactly_once(
            self._lines,
            stored=account.stored,
            world_sizes=self.world_sizes,
            steps=max(1, expected // (2 * sum(self.world_sizes))),  # so that the whole chain comes twice
            most_samples=PATIENCE * expected if self.samples is None else self.samples,
            account=account,
            progress=lambda _: bar.update(task, completed=account.whole[0]),
        )

    def _epoch_samples(self) -> int:
        """The approximate number of samples until every source has completed an epoch."""
        mixture = mixture_of(self.data)
        sizes = {name: stage.size().tokens for name, stage in mixture.sources.items()}
        tokens = sum(sizes.values())
        while late := [name for name, taken in expected_tokens(mixture, tokens).items() if taken < 0.999 * sizes[name]]:
            tokens += 1 + tokens // 4
            if tokens > NEVER * sum(sizes.values()):
                raise ConfigError(
                    f"--epoch: source {late[0]!r} is never read completely, because of its weights or max_epochs; "
                    "remove it from the sources, or use --samples instead of --epoch"
                )
        return tokens // self.run.seq_len + window_of(self.data.lines) * self.data.lanes

    def _configured(self, workers: int) -> testing.MakeLoader:
        """Loaders as configured, whose batches also name the origin of each sample."""
        return _simple(self.run, workers)

    def _lines(self, rank: int, world_size: int) -> StatefulDataLoader:
        """A loader whose batches are the lines themselves, whatever the configured task is."""
        return StatefulDataLoader(
            self.data,
            batch_size=1,
            task=CausalLM(),
            outputs=["provenance", "epochs"],
            prefetch=0,
            rank=rank,
            world_size=world_size,
        )


def _simple(run: Run, workers: int) -> testing.MakeLoader:
    """Loaders as configured, with this many workers, whose batches also name the origin of each sample."""
    outputs = tuple(dict.fromkeys([*run.settings.get("outputs", ()), "provenance", "epochs"]))
    simple: dict[str, Any] = {"num_workers": workers, "outputs": outputs, "prefetch": 1 if workers else 0}
    simple |= {"pin_memory": False, "device": None, "steps": None}
    return lambda rank, world_size: run.make_loader(rank, world_size, **simple)


class _BySource(Mapping[Document, npt.NDArray[np.int64]]):
    """The stored documents of several sources, each read in its own way."""

    def __init__(self, sources: Mapping[str, testing.StoredDocuments]) -> None:
        self._sources = sources

    def __getitem__(self, document: Document) -> npt.NDArray[np.int64]:
        return self._sources[document[0]][document]

    def __iter__(self) -> Iterator[Document]:
        return chain.from_iterable(self._sources.values())

    def __len__(self) -> int:
        return sum(map(len, self._sources.values()))


def _stored(data: Rescalable) -> _BySource:
    """What the shards of all sources hold, read as the pipeline reads them, but with plain libraries."""
    sources = {}
    for leaf in leaves(data.lines):
        reader, tokenize = leaf.stage, tokenizer_of(leaf.top)
        if isinstance(reader, ShardReader):
            strips = reader if tokenize is None else tokenize
            sources[leaf.name] = testing.StoredDocuments(
                {leaf.name: reader.path},
                strip=strips.strip,
                min_length=strips.min_length,
                column=reader.column,
                tokenizer="bytes" if tokenize is None else tokenize.given,
                files={leaf.name: reader.files},
            )
    return _BySource(sources)


def _readers(lines: Stage) -> dict[str, ShardReader]:
    """The readers below a stage, by the full names of their sources."""
    return {leaf.name: leaf.stage for leaf in leaves(lines) if isinstance(leaf.stage, ShardReader)}
