"""Rescalable: the lanes of a run, and which of them a rank reads.

Sample `g` of the canonical stream is the next line of lane `g mod L`. World size, workers and batch size
decide who executes a lane, never what it yields; rescaling moves lanes from one rank to another and that is
all there is to it.
"""

import heapq
import os
from collections.abc import Iterable, Iterator, Mapping

import torch.distributed
from torch.utils.data import IterableDataset

from fmsdata.arguments import whole
from fmsdata.chunk import Chunk, Item
from fmsdata.errors import ConfigError, StateError
from fmsdata.readers import ArrowShard
from fmsdata.stage import OPEN_SHARDS, Lane, Stage, State, number, part
from fmsdata.storage import Mapped, Recent


class Rescalable(IterableDataset[Item]):
    """A pipeline run as `lanes` independent lanes. Fixed for a run: the number of lanes and the seed.

    Pick a number with many divisors, and at least as large as the largest world size: the stream is the same
    for every world size that divides it.

    >>> data = Rescalable(lines, lanes=192, seed=42)     # doctest: +SKIP
    """

    def __init__(self, lines: Stage, *, lanes: int, seed: int = 0) -> None:
        if not isinstance(lines, Stage):
            raise ConfigError(f"Rescalable takes a stage, not {lines!r}")
        self.lines = lines
        self.lanes = whole("lanes", lanes, least=1)
        self.seed = whole("seed", seed, least=None)

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

    def start(self, lanes: Iterable[int], states: Mapping[str, State] | None = None) -> "Lanes":
        """Begin to read some of the lanes, or go on from their states."""
        return Lanes(self, lanes, states)

    def describe(self) -> State:
        return {"seed": self.seed, "lanes": self.lanes, "lines": self.lines.describe()}

    def __iter__(self) -> Iterator[Item]:
        """This rank's samples, one by one, from the start."""
        lanes = self.start(self.lanes_of(*rank_and_world_size()))
        while True:
            ((chunk, row),) = lanes.take(1)
            yield chunk[row]


class Lanes:
    """Some lanes at work.

    The lane with the fewest lines taken comes next, ties by number; so which one is next is not state.
    """

    def __init__(self, data: Rescalable, lanes: Iterable[int], states: Mapping[str, State] | None) -> None:
        shards: Recent[ArrowShard] = Recent(OPEN_SHARDS)
        mapped = Mapped()
        self._data = data
        self._running = {
            lane: _RunningLane(
                data.lines,
                Lane(index=lane, count=data.lanes, seed=data.seed, shards=shards, mapped=mapped),
                None if states is None else states[str(lane)],
            )
            for lane in lanes
        }
        self._marks: dict[int, tuple[int, int, State]] = {}  # where the lanes of the last `take` stood before it
        self._turns = [(running.lines, lane) for lane, running in self._running.items()]
        heapq.heapify(self._turns)

    def take(self, count: int) -> list[tuple[Chunk, int]]:
        """The next lines, each as a chunk and the number of the line in it."""
        taken = []
        self._marks.clear()
        for _ in range(count):
            lines, lane = self._turns[0]
            running = self._running[lane]
            if lane not in self._marks:
                self._marks[lane] = running.mark()
            taken.append(running.take())
            heapq.heapreplace(self._turns, (lines + 1, lane))
        return taken

    def undone(self) -> "Lanes":
        """These lanes opened anew where they stood before the last `take`, whatever it did to them."""
        marks = {lane: self._marks.get(lane) or running.mark() for lane, running in self._running.items()}
        states = {str(lane): dict(zip(("lines", "skip", "anchor"), mark, strict=True)) for lane, mark in marks.items()}
        return Lanes(self._data, self._running, states)

    def state(self) -> dict[str, State]:
        """Per lane: the lines taken since the run began, an anchor, and how many lines to drop after it."""
        return {str(lane): running.state() for lane, running in self._running.items()}


class _RunningLane:
    def __init__(self, stage: Stage, lane: Lane, state: State | None) -> None:
        try:
            self.lines = number(state, "lines")
            self._row = number(state, "skip")
            if self._row > self.lines:
                raise StateError(f"'skip' is {self._row}, more than the {self.lines} lines taken")
            self._iterator = stage.open(lane, part(state, "anchor"))
        except (StateError, KeyError, TypeError, IndexError, ValueError) as error:
            raise StateError(f"the state of lane {lane.index} can't be used: {error}") from None
        self._anchor = self._iterator.state(0)
        self._chunk: Chunk | None = None

    def take(self) -> tuple[Chunk, int]:
        while self._chunk is None or self._row >= len(self._chunk):
            if self._chunk is not None:
                self._row -= len(self._chunk)
                self._anchor = self._iterator.state(len(self._chunk))
            self._chunk = self._iterator.read()
        chunk, row = self._chunk, self._row
        self._row += 1
        self.lines += 1
        if self._row == len(chunk):
            self._chunk, self._row, self._anchor = None, 0, self._iterator.state(len(chunk))
        return chunk, row

    def mark(self) -> tuple[int, int, State]:
        """What makes up the state, the anchor shared."""
        return self.lines, self._row, self._anchor

    def state(self) -> State:
        return {"lines": self.lines, "skip": self._row, "anchor": _copy(self._anchor)}


def _copy(state: State) -> State:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in state.items()}


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
    told = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(told[0]), int(told[1])
    except ValueError:
        raise ConfigError(
            f"RANK={told[0]!r}, WORLD_SIZE={told[1]!r} in the environment: both must be numbers"
        ) from None
