"""Rescalable: the lanes of a run, and which of them a rank reads.

Sample `g` of the canonical stream is the next line of lane `g mod L`. World size, workers and batch size
decide who executes a lane, never what it yields; rescaling moves lanes from one rank to another and that is
all there is to it.
"""

import heapq
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from fmsdata.arguments import whole
from fmsdata.batch import Row
from fmsdata.chunk import Chunk, Item
from fmsdata.edits import edit_between
from fmsdata.errors import ConfigError, StageError, StateError
from fmsdata.files import Files
from fmsdata.keys import Ints
from fmsdata.mixture import down_to_mixture
from fmsdata.stage import Lane, Stage, State, endless, number, part, to_nobody
from fmsdata.state import Segment, pack_state, unpack_states
from fmsdata.stats import Tallies, Tally, count_tokens, source_sizes

log = logging.getLogger("fmsdata")


class Rescalable(IterableDataset[Item]):
    """A pipeline run as `lanes` independent lanes. Fixed for a run: the number of lanes and the seed.

    Pick a number with many divisors, and at least as large as the largest world size: the stream is the same
    for every world size that divides it.

    >>> data = Rescalable(lines, lanes=192, seed=42)     # doctest: +SKIP

    It also works in torch's own `DataLoader`, where the state is that of the newest iteration over it.
    """

    def __init__(self, lines: Stage, *, lanes: int, seed: int = 0) -> None:
        if not isinstance(lines, Stage):
            raise ConfigError(f"Rescalable takes a stage, not {lines!r}")
        self.lines = endless(lines, "Rescalable")
        self.lanes = whole("lanes", lanes, least=1)
        self.seed = whole("seed", seed, least=None)
        self._newest: Samples | None = None  # the iteration whose state this dataset tells
        self._waiting: Samples | None = None  # an iteration that was opened and nobody iterates over yet

    def lanes_of(self, rank: int, world_size: int) -> range:
        """The lanes that a rank reads."""
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of world size {world_size}: ranks are 0 to world size - 1")
        if world_size > self.lanes:
            raise ConfigError(
                f"world size {world_size} is more than the {self.lanes} lanes of this run: "
                "some ranks would have nothing to read; use fewer ranks, or start the run with more lanes"
            )
        return range(rank, self.lanes, world_size)

    def lane(self, index: int, files: Files) -> Lane:
        """One of the lanes, as its iterators know it. Lanes that are read together share what is open or fetched."""
        return Lane(index=index, count=self.lanes, seed=self.seed, files=files, burst=self._burst)

    @cached_property
    def _burst(self) -> int:
        """The tokens of a window."""
        stages = down_to_mixture(self.lines)
        return math.prod(getattr(stage, "window", 1) * getattr(stage, "seq_len", 1) for stage in stages)

    def start(
        self,
        lanes: Iterable[int],
        states: Mapping[int, State] | None = None,
        reading: Callable[[str], None] = to_nobody,
    ) -> "Lanes":
        """Begin to read some of the lanes, or go on from their states."""
        return Lanes(self, lanes, states, reading)

    def resume(self, states: State | Sequence[State], lanes: Sequence[int]) -> "Resumed":
        """What some of the lanes go on from, in the pipeline as it is now."""
        saved = unpack_states(states, self.description, lanes)
        edit = edit_between(saved.pipeline, json.loads(self.fingerprint), self.lines, saved.step)
        files = Files()

        def converted(lane: int, state: State) -> State:
            try:
                return edit.convert(replace(self.lane(lane, files), marks=True), state)
            except (StateError, KeyError, TypeError, IndexError, ValueError) as error:
                raise StateError(f"the state of lane {lane} can't be used: {error}") from None

        return Resumed(
            saved.step,
            saved.history,
            json.dumps(edit.pipeline),
            edit.changes,
            {lane: converted(lane, state) for lane, state in saved.lanes.items()},
        )

    @cached_property
    def description(self) -> State:
        """All that the order and the content of the stream depend on, as plain data."""
        return {"seed": self.seed, "lanes": self.lanes, "lines": self.lines.describe()}

    @cached_property
    def fingerprint(self) -> str:
        """The description as text."""
        return json.dumps(self.description)

    @cached_property
    def source_sizes(self) -> dict[str, int]:
        """The names of all sources, in order, and the tokens of one epoch of each."""
        return source_sizes(self.lines)

    @cached_property
    def columns(self) -> dict[str, int]:
        """Which column of a tally is whose."""
        return {name: column for column, name in enumerate(self.source_sizes)}

    def __iter__(self) -> "Samples":
        """This rank's samples, one by one, from the start or from the state that was loaded."""
        self._newest, self._waiting = self._waiting or self._open(), None
        return self._newest

    def state_dict(self) -> State:
        """Where the newest iteration over this dataset stands."""
        if self._newest is None:
            self._newest = self._waiting = self._open()
        return self._newest.state_dict()

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """The next iteration goes on from a state."""
        opened = self._open()
        opened.load_state_dict(state)
        self._newest = self._waiting = opened

    def _open(self) -> "Samples":
        rank, world_size = rank_and_world_size()
        lanes = self.lanes_of(rank, world_size)
        worker = get_worker_info()
        return Samples(self, lanes if worker is None else lanes[worker.id :: worker.num_workers], world_size)

    def __getstate__(self) -> State:
        """What a process that is given this dataset needs: the recipe, not an iteration over it."""
        return {**vars(self), "_newest": None, "_waiting": None}


class Resumed(NamedTuple):
    """What a run goes on from."""

    step: int
    history: list[Segment]
    pipeline: str  # to be saved with its states from now on
    changes: list[str]  # in words, what is not as it was saved
    lanes: dict[int, State]

    def tell(self) -> None:
        """Log what changed, if it did; on one rank of a run."""
        if self.changes:
            log.warning("going on from step %d with changes: %s", self.step, "; ".join(self.changes))


class Anchor(NamedTuple):
    """A moment that a lane can return to: the lines it had given, and the state of its pipeline then, as JSON."""

    lane: int
    lines: int
    state: str


Passed: TypeAlias = Anchor | Tally  # what lanes come by on their way, at some number of lines


class Turns:
    """Whose turn it is: the lane with the fewest lines taken, ties by number.

    Line `n` of lane `l` is sample `n * L + l`, so that is the lowest sample which was not taken yet.
    """

    def __init__(self, lines: Mapping[int, int], lanes: int) -> None:
        self._lanes = lanes
        self._next = sorted(taken * lanes + lane for lane, taken in lines.items())

    def take(self, count: int) -> list[int]:
        """The next samples."""
        taken = []
        for _ in range(count):
            taken.append(self._next[0])
            heapq.heapreplace(self._next, self._next[0] + self._lanes)
        return taken


class Places:
    """Where some lanes stand after a step: the lines taken of each, the last anchor before there, and the tallies.

    Never changed, but replaced: whatever interrupts a step, the places are those before it or those after it.
    """

    def __init__(
        self, step: int, lines: Mapping[int, int], anchors: Mapping[int, Anchor], tallies: Tallies, lanes: int
    ) -> None:
        self.step, self.lines, self.tallies = step, lines, tallies
        self._anchors, self._lanes = anchors, lanes

    def after(self, samples: Iterable[int], passed: Sequence[Passed]) -> "Places":
        """The places one step on, in which these samples were taken and these anchors and tallies passed."""
        taken = {sample % self._lanes: sample // self._lanes + 1 for sample in samples}
        anchors, tallies = self._anchors, self.tallies
        if passed:  # seldom: when windows turn over
            anchors = {**anchors, **{one.lane: one for one in passed if isinstance(one, Anchor)}}
            tallies = tallies.after([one for one in passed if isinstance(one, Tally)], self.lines)
        return Places(self.step + 1, {**self.lines, **taken}, anchors, tallies, self._lanes)

    def tokens(self) -> Ints:
        """What was taken of each source, by the columns of tallies."""
        return self.tallies.tokens(self.lines)

    def turns(self) -> Turns:
        return Turns(self.lines, self._lanes)

    def state(self) -> dict[str, str]:
        """Per lane, as JSON: the step, the lines taken, an anchor, and how many lines to drop after it."""
        anchors = self._anchors
        return {
            str(lane): f'{{"step":{self.step},"lines":{lines},"skip":{lines - anchors[lane].lines},'
            f'"anchor":{anchors[lane].state}}}'
            for lane, lines in self.lines.items()
        }

    def states(self, lanes: Iterable[int]) -> dict[int, State]:
        """The same of some of the lanes, as data."""
        told = self.state()
        return {lane: json.loads(told[str(lane)]) for lane in lanes}


class Lanes:
    """Some lanes at work."""

    def __init__(
        self,
        data: Rescalable,
        lanes: Iterable[int],
        states: Mapping[int, State] | None,
        reading: Callable[[str], None] = to_nobody,
    ) -> None:
        lanes = list(lanes)
        self.files = Files(len(lanes) / data.lanes)
        self._data, self._count = data, data.lanes
        self._running = {
            lane: _RunningLane(
                data,
                replace(data.lane(lane, self.files), reading=reading),
                None if states is None else states[lane],
            )
            for lane in lanes
        }
        self._told = {lane: running.anchor for lane, running in self._running.items()}

    def take(self, samples: Iterable[int]) -> tuple[list[Row], list[Passed]]:
        """The next lines of the lanes of these samples, and what was passed."""
        rows: list[Row] = []
        passed: list[Passed] = []
        for sample in samples:
            running = self._running[sample % self._count]
            rows.append(running.take())
            if running.tallies:
                passed += running.tallies
                running.tallies = []
            if running.anchor is not self._told[running.lane]:
                self._told[running.lane] = running.anchor
                passed.append(running.anchor)
        return rows, passed

    def places(self, step: int) -> Places:
        """Where these lanes were opened."""
        lines = {lane: running.lines for lane, running in self._running.items()}
        tallies = Tallies.at(self._data, (anchor.state for anchor in self._told.values()))
        return Places(step, lines, dict(self._told), tallies, self._count)


class _RunningLane:
    def __init__(self, data: Rescalable, lane: Lane, state: State | None) -> None:
        self.lane, self._columns = lane.index, data.columns
        self.tallies: list[Tally] = []  # of chunks that were begun, until somebody takes them
        try:
            self.lines = number(state, "lines")
            self._row = number(state, "skip")
            if self._row > self.lines:
                raise StateError(f"'skip' is {self._row}, more than the {self.lines} lines taken")
            self._iterator = data.lines.open(lane, part(state, "anchor"))
        except (StateError, KeyError, TypeError, IndexError, ValueError) as error:
            raise StateError(f"the state of lane {lane.index} can't be used: {error}") from None
        self._chunk: Chunk | None = None
        self._drop_anchor(0)

    def take(self) -> Row:
        while self._chunk is None or self._row >= len(self._chunk):
            if self._chunk is not None:
                self._leave(self._chunk)
            self._chunk = self._iterator.read()
            self.tallies.append(Tally(self.lane, self.lines - self._row, count_tokens(self._chunk, self._columns)))
        chunk, row = self._chunk, self._row
        self._row += 1
        self.lines += 1
        if self._row == len(chunk):
            self._leave(chunk)
        return chunk, row

    def _leave(self, chunk: Chunk) -> None:
        self._chunk, self._row = None, self._row - len(chunk)
        self._drop_anchor(len(chunk))

    def _drop_anchor(self, taken: int) -> None:
        state = self._iterator.state(taken)
        try:
            text = json.dumps(state, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise StageError(f"a stage's state must be plain data (numbers, strings, lists, dicts): {error}") from None
        self.anchor = Anchor(self.lane, self.lines - self._row, text)


class Samples(Iterator[Item]):
    """The samples of some lanes, one by one, with a state after each."""

    def __init__(self, data: Rescalable, lanes: Sequence[int], world_size: int) -> None:
        self._data, self._mine, self._world_size = data, lanes, world_size
        self._pipeline = data.fingerprint
        self._start(0, None)

    def _start(self, step: int, states: Mapping[int, State] | None) -> None:
        self._lanes = self._data.start(self._mine, states)
        self._places = self._lanes.places(step)
        self._turns = self._places.turns()

    def __next__(self) -> Item:
        if not self._mine:  # a worker process more than there are lanes
            raise StopIteration
        try:
            samples = self._turns.take(1)
            ((chunk, row),), passed = self._lanes.take(samples)
            item = chunk[row]
        except BaseException:
            self._start(self._places.step, self._places.states(self._mine))
            raise
        self._places = self._places.after(samples, passed)
        return item

    def state_dict(self) -> State:
        """Where these lanes stand."""
        return pack_state(
            self._pipeline,
            self._places.state(),
            step=self._places.step,
            history=[Segment(0, self._world_size, 1)],
        )

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Go on from a state."""
        saved = self._data.resume(state, self._mine)
        self._start(saved.step, saved.lanes)
        self._pipeline = saved.pipeline
        if 0 in self._mine:
            saved.tell()


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """The arguments, else torch.distributed, else the environment, else 0 of 1.

    >>> rank_and_world_size(3, 8)
    (3, 8)
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size is {world_size}: give both or neither")
    if rank is not None and world_size is not None:
        return whole("rank", rank, least=None), whole("world_size", world_size, least=None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        only = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        raise ConfigError(f"{only}={os.environ[only]} in the environment, but not its twin: set both, or neither")
    told = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(told[0]), int(told[1])
    except ValueError:
        raise ConfigError(
            f"RANK={told[0]!r}, WORLD_SIZE={told[1]!r} in the environment: both must be numbers"
        ) from None
