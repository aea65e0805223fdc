"""Trace: what was in a step of a run, and in which steps a document was seen.

Which samples are in a step follows from the world and batch sizes that the run had, which a checkpoint tells. What
is in a sample comes from planning its lane up to there, from the start or from a checkpoint: no tokens are gathered,
and nothing is written. A document is in one block, and each epoch gives that block to one lane at one place: that
lane is read, if any lane at all has come that far.
"""

import copy
import difflib
import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.core.chunk import DOCUMENT, Chunk, epochs, provenance
from fmsdata.core.lane import Lane
from fmsdata.core.state import State, number, part
from fmsdata.errors import CheckpointError, ConfigError, StateError
from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.lane_order import place_of
from fmsdata.planning.schedule import Schedule, Segment, continued
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.rescalable import Rescalable, Resumed
from fmsdata.stages.mixture import Mixture, down_to_mixture
from fmsdata.stages.shard_reader import ShardReader

NAME = re.compile(r"(.+)#([0-9]{1,18})")


class Seen(NamedTuple):
    """A run of stored tokens, and where in the run it was seen: `row` is the row of that rank's batch.

    Steps count from 0: step `n` is the batch that a loader hands out when `loader.state_dict()["step"]` is `n`.
    """

    step: int
    rank: int
    row: int
    sample: int
    source: str
    shard: str
    document: int
    start: int
    stop: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """A document, and all that was seen of it: an epoch brings its tokens `start` to `stop`.

    The two are the same for a document that is skipped, because too little is left of it after stripping.
    """

    source: str
    shard: str
    document: int
    start: int
    stop: int
    seen: tuple[Seen, ...]


class Trace:
    """A run that can be asked what was in a step, and when a document was seen. Nothing is written.

    The newest complete checkpoint tells which world and batch sizes the run had, and the nearest one before a step is
    where reading starts; with `from_start`, it starts where the run did. `world_size` and `batch_size` are those of
    the steps after the newest checkpoint, or of all steps if there is none.

    >>> run = Trace(data, checkpoints=Checkpoints("s3://bucket/run/loader"))          # doctest: +SKIP
    >>> run.step(12345, rank=3)                                                       # doctest: +SKIP
    >>> run.documents(["web/part-0.arrow#17"])                                        # doctest: +SKIP
    """

    def __init__(
        self,
        data: Rescalable,
        *,
        checkpoints: Checkpoints | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        from_start: bool = False,
        watch: Callable[[float, int], None] = lambda _done, _lanes: None,
    ) -> None:
        self.data = data
        self._checkpoints = checkpoints
        self._watch = watch  # is told how many lanes are read, of how many
        self._host = OpenFiles()
        steps = [] if checkpoints is None else [one for one in checkpoints.steps() if checkpoints.is_complete(one)]
        self.newest = max(steps, default=0)
        self._edited = 0  # the first step with the newest edit of the mix
        history = self._history() if steps else []
        self._assumed = world_size is not None
        if world_size is not None:
            data.lanes_of(0, whole("world size", world_size))
            history = continued(history, Segment(self.newest, world_size, whole("batch size", batch_size, least=1)))
        if not history:
            where = "" if checkpoints is None else f" in {checkpoints}"
            raise ConfigError(
                f"no complete checkpoint{where} tells on how many ranks the run was: give its world size (--world-size)"
            )
        self.schedule = Schedule(history, data.lanes)
        if steps and self.schedule.lines(self.newest)[0] != self._first_lane_lines:
            raise StateError(
                f"{checkpoints}: the run did not begin at the start of the stream, but went on from another run, or "
                "counts its steps from a model's; what was in its steps can't be told"
            )
        self._starts = [] if self._edited else [0]  # the steps at which reading can start
        if not from_start:
            self._starts += sorted(step for step in steps if step >= max(1, self._edited))

    def step(self, step: int, rank: int | None = None) -> list[Seen]:
        """All that was in a step, or in one rank's part of it, row by row."""
        self._check(whole("step", step))
        world_size = self.schedule.segment(step).world_size
        if rank is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank}: step {step} was read by {world_size} ranks, 0 to {world_size - 1}")
        wanted: dict[int, list[int]] = defaultdict(list)
        for one, samples in enumerate(self.schedule.samples(step)):
            for sample in samples if rank in (None, one) else ():
                wanted[sample % self.data.lanes].append(sample // self.data.lanes)
        seen: list[Seen] = []
        states = self._states(self.start(step), sorted(wanted))
        for done, (lane, state) in enumerate(states.items()):
            opened = _OpenLane(self.data, self._lane(lane), state)
            for first, chunk in self._read(opened, max(wanted[lane]) + 1, done, len(states)):
                rows = [line - first for line in wanted[lane] if first <= line < first + len(chunk)]
                seen += self._seen(lane, first, chunk, rows)
        return sorted(seen, key=lambda one: (one.rank, one.row))

    def documents(self, names: Iterable[str], until: int | None = None) -> list[Found]:
        """When documents, written `source/shard#number`, were seen, before step `until` or the newest checkpoint."""
        if until is None and not self.newest:
            raise ConfigError("no checkpoint tells how far the run got: give the step to look until (--until)")
        until = self.newest if until is None else whole("until", until, least=1)
        self._check(until - 1)
        asked = [self._document(name) for name in names]
        found: dict[_Document, list[Seen]] = {document: [] for document in asked}
        places = self._places([document for document in found if document.start < document.stop], until)
        for done, (lane, wanted) in enumerate(sorted(places.items())):
            for document, one in self._search(lane, wanted, until, done, len(places)):
                found[document].append(one)
        return [
            Found(
                source=document.source,
                shard=document.shard,
                document=document.number,
                start=document.start,
                stop=document.stop,
                seen=tuple(sorted(found[document], key=lambda one: (one.epoch, one.start))),
            )
            for document in asked
        ]

    @property
    def since(self) -> int:
        """The step from which on the run can be looked at: 0, but for a run whose mix was edited."""
        return self._starts[0] if self._starts else self._edited

    def start(self, step: int) -> int:
        """The last step, this one or before, at which reading can start: that of a checkpoint, or 0."""
        usable = [one for one in self._starts if one <= step]
        if not usable:
            raise StateError(
                f"the mix was edited at step {self._edited}, and no checkpoint of the steps from there to {step} "
                "is left to start from"
            )
        return usable[-1]

    def _history(self) -> list[Segment]:
        saved, pipeline = self._load(self.newest, [0])
        self._edited = max(pipeline.get("edits", []), default=0)
        self._first_lane_lines = number(saved.lanes[0], "lines")
        return saved.history

    def _check(self, step: int) -> None:
        if step < self._edited:
            raise StateError(
                f"the mix was edited at step {self._edited}, and step {step} was read before that: to trace it, "
                "give the configuration of then and a folder whose newest checkpoint is of then"
            )
        if self._assumed and step < self.newest:
            raise ConfigError(
                f"the checkpoint of step {self.newest} tells the world size of step {step}: "
                "don't give one, it is for later steps"
            )

    def _load(self, step: int, lanes: Sequence[int]) -> tuple[Resumed, State]:
        """What a checkpoint holds of these lanes, and the pipeline that it was saved with."""
        if self._checkpoints is None:
            raise CheckpointError(f"there is no folder with a checkpoint of step {step}")
        states = self._checkpoints.read(step, lanes)
        try:
            saved = self.data.resume(states, lanes)
            if saved.changes and step != self._edited:  # the run went on with this mix from there
                raise StateError(f"the state belongs to another mix: {'; '.join(saved.changes)}")
        except StateError as error:
            raise StateError(
                f"{self._checkpoints}/step-{step}: {error}; trace with the configuration that the run had then"
            ) from None
        return saved, json.loads(states[0]["pipeline"])

    def _states(self, step: int, lanes: Sequence[int]) -> dict[int, State | None]:
        """The states of these lanes after a step that reading can start from; None at the start of the run."""
        if step == 0:
            return dict.fromkeys(lanes)
        saved, _ = self._load(step, lanes)
        lines = self.schedule.lines(step).tolist()
        for lane, state in saved.lanes.items():
            if number(state, "lines") != lines[lane]:
                raise StateError(
                    f"{self._checkpoints}/step-{step}: {state['lines']} lines of lane {lane} were taken, but "
                    f"{lines[lane]} by the history of the newest checkpoint; it is of another run: move it away"
                )
        return dict(saved.lanes)

    def _lane(self, lane: int) -> Lane:
        return self.data.lane(lane, self._host)

    def _read(self, opened: "_OpenLane", stop: int, done: int, lanes: int) -> Iterator[tuple[int, Chunk]]:
        """The chunks of a lane until a line, each with the number of its first line."""
        begin = opened.line
        while (first := opened.line) < stop:
            yield first, opened.read()
            self._watch(done + min(1.0, (opened.line - begin) / (stop - begin)), lanes)

    def _seen(self, lane: int, first: int, chunk: Chunk, rows: Iterable[int]) -> Iterator[Seen]:
        """What these rows of a chunk hold, and when that was handed out."""
        for row in rows:
            line = chunk.slice(row, row + 1)
            sample = (first + row) * self.data.lanes + lane
            step, rank, batch_row = self.schedule.when(sample)
            for span, epoch in zip(provenance(line)[0], epochs(line)[0], strict=True):
                yield Seen(step, rank, batch_row, sample, *span, epoch)

    def _document(self, name: str) -> "_Document":
        """The document that a user means, and what an epoch brings of it."""
        readers = _readers(self.data)
        source, shard, document = _parse(name, readers)
        reader = readers[source]
        plan = cut_blocks(reader.counts, self.data.lanes, reader.block_tokens)
        block = plan.block_of(reader.counts.shards.index(shard), document)
        found = _Document(source, shard, document, block, plan.blocks, 0, 0)
        lane, place = self._place(found, 0)
        endless = copy.copy(reader)
        endless.max_epochs = None
        chunk = endless.open(self._lane(lane).named(source), {"block": place, "document": 0}).read()
        spans = [span for spans in provenance(chunk) for span in spans if span[:3] == found[:3]]
        return found._replace(start=spans[0].start, stop=spans[0].stop) if spans else found

    def _place(self, document: "_Document", epoch: int) -> tuple[int, int]:
        """The lane that reads a document in an epoch, and the place of its block in the lane's order."""
        return place_of(
            document.block,
            epoch,
            blocks=document.blocks,
            lanes=self.data.lanes,
            seed=self.data.seed,
            source=document.source,
        )

    def _places(self, documents: Iterable["_Document"], until: int) -> "dict[int, _Wanted]":
        """Per lane, the documents and epochs that it may have come to by a step, and the places of their blocks."""
        reached: dict[str, int] = defaultdict(int)  # the furthest that any lane has come in each source
        lines = self.schedule.lines(until).tolist()
        for done, (lane, state) in enumerate(self._states(self.start(until), range(self.data.lanes)).items()):
            opened = _OpenLane(self.data, self._lane(lane), state)
            for _ in self._read(opened, lines[lane], done, self.data.lanes):
                pass
            for source, block in opened.blocks().items():
                reached[source] = max(reached[source], block)
        places: dict[int, _Wanted] = defaultdict(dict)
        for document in documents:
            for epoch in count():
                lane, place = self._place(document, epoch)
                if place > reached[document.source]:
                    break
                places[lane][document, epoch] = place
        return places

    def _search(
        self, lane: int, wanted: "_Wanted", until: int, done: int, lanes: int
    ) -> Iterator[tuple["_Document", Seen]]:
        """Read a lane, from the last checkpoint before any of these documents, until all of them were found."""

        def too_late(step: int) -> bool:
            blocks = _blocks(part(self._states(step, [lane])[lane], "anchor"))
            return any(blocks[document.source] >= place for (document, _), place in wanted.items())

        starts = [step for step in self._starts if step <= until]
        start = starts[bisect_left(starts[1:], True, key=too_late)]
        by_name = {document[:3]: document for document, _ in wanted}
        numbers = np.array(sorted({document.number for document, _ in wanted}))
        left = {(document, epoch): document.stop - document.start for document, epoch in wanted}
        opened = _OpenLane(self.data, self._lane(lane), self._states(start, [lane])[lane])
        stop = int(self.schedule.lines(until)[lane])
        for first, chunk in self._read(opened, stop, done, lanes):
            spans = np.flatnonzero(np.isin(chunk.spans[:, DOCUMENT], numbers))
            rows = np.unique(np.searchsorted(chunk.first, spans, side="right") - 1)
            for one in self._seen(lane, first, chunk, rows[rows < stop - first].tolist()):
                document = by_name.get((one.source, one.shard, one.document))
                if document is not None and one.step >= self.since:
                    left[document, one.epoch] -= one.stop - one.start
                    yield document, one
            if not any(left.values()):
                return


class _Document(NamedTuple):
    """A document of a source: the block that it is in, of how many, and what is left of it after stripping."""

    source: str
    shard: str
    number: int
    block: int
    blocks: int
    start: int
    stop: int


_Wanted: TypeAlias = dict[tuple[_Document, int], int]  # documents and epochs, with the places of their blocks


class _OpenLane:
    """A lane that is read chunk by chunk, from its start or from a saved state."""

    def __init__(self, data: Rescalable, lane: Lane, state: State | None) -> None:
        self.line = number(state, "lines") - number(state, "skip")  # the next one
        self._iterator = data.lines.open(lane, part(state, "anchor"))
        self._taken = 0

    def read(self) -> Chunk:
        chunk = self._iterator.read()
        self._taken = len(chunk)
        self.line += len(chunk)
        return chunk

    def blocks(self) -> dict[str, int]:
        """How many blocks of each source it has left behind."""
        return _blocks(self._iterator.state(self._taken))


def _blocks(state: State | None) -> dict[str, int]:
    """How many blocks of each source a lane has left behind, from the state of its pipeline."""
    while state is not None and "sources" not in state:
        state = part(state, "below")
    sources = part(state, "sources") or {}
    return {source: number(part(one, "below"), "block") for source, one in sources.items()}


def _readers(data: Rescalable) -> dict[str, ShardReader]:
    """The sources, where they are shards that a mixture is made of."""
    stage = down_to_mixture(data.lines)[-1]
    readers = {name: one for name, one in stage.children().items() if isinstance(one, ShardReader)}
    if not isinstance(stage, Mixture) or len(readers) < len(stage.sources):
        raise ConfigError("documents can be looked for where the sources of the one Mixture are ShardReaders")
    return readers


def _parse(name: str, readers: Mapping[str, ShardReader]) -> tuple[str, str, int]:
    """The source, the shard and the number of a document. Names of sources may hold slashes: the longest that fits."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"document {name!r}: write source/shard#number, such as web/part-0.arrow#17")
    path, document = match[1], int(match[2])
    fitting = [source for source in sorted(readers, key=len, reverse=True) if path.startswith(f"{source}/")]
    if not fitting:
        folder = path.rpartition("/")[0] or path
        raise ConfigError(f"document {name!r}: there is no such source; {_suggestion(folder, sorted(readers))}")
    for source in fitting:
        shard, counts = path[len(source) + 1 :], readers[source].counts
        if shard in counts.shards:
            documents = int(counts.documents[counts.shards.index(shard)])
            if document >= documents:
                raise ConfigError(f"document {name!r}: the shard has {documents} documents, 0 to {documents - 1}")
            return source, shard, document
    close = _suggestion(path[len(fitting[0]) + 1 :], readers[fitting[0]].counts.shards)
    raise ConfigError(f"document {name!r}: source {fitting[0]!r} has no such shard; {close}")


def _suggestion(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are {', '.join(known[:10])}" + (f" and {len(known) - 10} more" if len(known) > 10 else "")
