"""Rescalable: the lanes of a run, and which of them a rank reads.

Sample `g` of the canonical stream is the next line of lane `g mod L`. World size, workers and batch size
decide who executes a lane, never what it yields; rescaling moves lanes from one rank to another and that is
all there is to it.
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
from fmsdata.errors import ConfigError, StateError
from fmsdata.planning.schedule import Segment
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.edits import edit_between
from fmsdata.run.lanes import Lanes
from fmsdata.run.ranks import rank_and_world_size
from fmsdata.run.shares import source_sizes
from fmsdata.run.state import pack_state, unpack_states

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

    def lane(self, index: int, host: Host) -> Lane:
        """One of the lanes, as its iterators know it. Lanes that are read together share what is open or fetched."""
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
        """Begin to read some of the lanes, or resume from their states."""
        return Lanes(self, list(lanes), states, host)

    def resume(self, states: State | Sequence[State], lanes: Sequence[int]) -> "Resumed":
        """What some of the lanes go on from, in the pipeline as it is now."""
        saved = unpack_states(states, self.description, lanes)
        edit = edit_between(saved.pipeline, json.loads(self.fingerprint), self.lines, saved.step)
        host = OpenFiles()

        def converted(lane: int, state: State) -> State:
            try:
                return edit.convert(replace(self.lane(lane, host), marks=True), state)
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
