"""Rescalable: the lanes of a run, and which of them a rank reads.

Sample `g` of the canonical stream is the next line of lane `g mod L`. World size, workers and batch
size decide who executes a lane, never what it yields. Rescaling only moves lanes from one rank to
another.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from fmsdata.core.blocks import Host
from fmsdata.core.checks import whole
from fmsdata.core.chunk import Item
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage, endless
from fmsdata.core.state import State
from fmsdata.errors import ConfigError
from fmsdata.planning.schedule import Segment
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.edits import edit_between
from fmsdata.run.lanes import Lanes, restoring
from fmsdata.run.ranks import rank_and_world_size
from fmsdata.run.shares import source_sizes
from fmsdata.run.state import pack_state, unpack_states

log = logging.getLogger("fmsdata")


class Rescalable(IterableDataset[Item]):
    """A pipeline, run as `lanes` independent lanes. Their number and the seed are fixed for a run.

    Choose a number of lanes with many divisors, at least as large as the largest world size: the
    stream is the same for every world size that divides it.

    >>> data = Rescalable(lines, lanes=192, seed=42)     # doctest: +SKIP

    It also works in torch's own `DataLoader`. Its state is then that of the newest iteration over it.
    """

    def __init__(self, lines: Stage, *, lanes: int, seed: int = 0) -> None:
        if not isinstance(lines, Stage):
            raise ConfigError(f"Rescalable takes a stage, got {lines!r}")
        self.lines = endless(lines, "Rescalable")
        self.lanes = whole("lanes", lanes, least=1)
        self.seed = whole("seed", seed, least=None)
        self._newest: Samples | None = None  # the iteration whose state is that of this dataset
        self._waiting: Samples | None = None  # an opened iteration for the next `iter()`

    def lanes_of(self, rank: int, world_size: int) -> range:
        """The lanes that a rank reads."""
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank} of world size {world_size}; it must be from 0 to world size - 1")
        if world_size > self.lanes:
            raise ConfigError(
                f"world size {world_size} is more than the {self.lanes} lanes of this run: "
                "some ranks would have nothing to read; use fewer ranks, or start the run with more lanes"
            )
        return range(rank, self.lanes, world_size)

    def lane(self, index: int, host: Host) -> Lane:
        """One of the lanes, as its iterators know it. Lanes that are read together share a host."""
        return Lane(index=index, count=self.lanes, seed=self.seed, host=host, window_tokens=self._window_tokens)

    @cached_property
    def _window_tokens(self) -> int:
        return self.lines.window_tokens()

    def start(
        self,
        lanes: Iterable[int],
        states: Mapping[int, State] | None = None,
        host: OpenFiles | None = None,
    ) -> "Lanes":
        """Start to read some of the lanes, or resume from their states."""
        return Lanes(self, list(lanes), states, host)

    def resume(self, states: State | Sequence[State], lanes: Sequence[int]) -> "Resumed":
        """What some of the lanes resume from, converted to the pipeline as it is now."""
        saved = unpack_states(states, self.description, lanes)
        edit = edit_between(saved.pipeline, json.loads(self.fingerprint), self.lines, saved.step)
        host = OpenFiles()

        def converted(lane: int, state: State) -> State:
            with restoring(lane):
                return edit.convert(replace(self.lane(lane, host), marks=True), state)

        return Resumed(
            saved.step,
            saved.history,
            json.dumps(edit.pipeline),
            edit.changes,
            {lane: converted(lane, state) for lane, state in saved.lanes.items()},
        )

    @cached_property
    def description(self) -> State:
        """Everything that the order and the content of the stream depend on, as plain data."""
        return {"seed": self.seed, "lanes": self.lanes, "lines": self.lines.describe()}

    @cached_property
    def fingerprint(self) -> str:
        """The description as JSON."""
        return json.dumps(self.description)

    @cached_property
    def source_sizes(self) -> dict[str, int]:
        """The names of all sources, sorted, and the tokens of one epoch of each."""
        return source_sizes(self.lines)

    @cached_property
    def columns(self) -> dict[str, int]:
        """The column of each source in a tally."""
        return {name: column for column, name in enumerate(self.source_sizes)}

    def __iter__(self) -> "Samples":
        """The samples of this rank, one by one, from the start or from the loaded state."""
        self._newest, self._waiting = self._waiting or self._open(), None
        return self._newest

    def state_dict(self) -> State:
        """The state of the newest iteration over this dataset."""
        if self._newest is None:
            self._newest = self._waiting = self._open()
        return self._newest.state_dict()

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Resume the next iteration from a state."""
        opened = self._open()
        opened.load_state_dict(state)
        self._newest = self._waiting = opened

    def _open(self) -> "Samples":
        rank, world_size = rank_and_world_size()
        lanes = self.lanes_of(rank, world_size)
        worker = get_worker_info()
        return Samples(self, lanes if worker is None else lanes[worker.id :: worker.num_workers], world_size)

    def __getstate__(self) -> State:
        """What is pickled: the recipe, not an iteration over it."""
        return {**vars(self), "_newest": None, "_waiting": None}


class Resumed(NamedTuple):
    """What a run resumes from."""

    step: int
    history: list[Segment]
    pipeline: str  # to save with its states from now on
    changes: list[str]  # what differs from the saved pipeline, in words
    lanes: dict[int, State]

    def log_changes(self) -> None:
        """Log the changes, if there are any. Call it on one rank of a run."""
        if self.changes:
            log.warning("resuming from step %d with changes: %s", self.step, "; ".join(self.changes))


class Samples(Iterator[Item]):
    """The samples of some lanes, one by one, with a state after each."""

    def __init__(self, data: Rescalable, lanes: Sequence[int], world_size: int) -> None:
        self._data, self._mine, self._world_size = data, lanes, world_size
        self._pipeline = data.fingerprint
        self._start(0, None)

    def _start(self, step: int, states: Mapping[int, State] | None) -> None:
        self._lanes = self._data.start(self._mine, states)
        self._positions = self._lanes.positions(step)
        self._turns = self._positions.turns()

    def __next__(self) -> Item:
        if not self._mine:  # more worker processes than lanes
            raise StopIteration
        try:
            samples = self._turns.take(1)
            ((chunk, row),), passed = self._lanes.take(samples)
            item = chunk[row]
        except BaseException:
            self._start(self._positions.step, self._positions.states(self._mine))
            raise
        self._positions = self._positions.after(samples, passed)
        return item

    def state_dict(self) -> State:
        """The state of these lanes."""
        return pack_state(
            self._pipeline,
            self._positions.state(),
            step=self._positions.step,
            history=[Segment(0, self._world_size, 1)],
        )

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Resume from a state."""
        saved = self._data.resume(state, self._mine)
        self._start(saved.step, saved.lanes)
        self._pipeline = saved.pipeline
        if 0 in self._mine:
            saved.log_changes()
