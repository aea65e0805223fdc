"""Generations: which shards of a source each epoch of a run reads, if shards were appended meanwhile.

`fmsdata index --append` gives the shards that it adds the next generation. A run has a timeline: from
which of its epochs on it reads the shards up to which generation. Epochs before a switch keep the
plan that they had, so no position in them changes its meaning.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fmsdata.core.state import State, is_count
from fmsdata.planning.blocks import BlockKeys, BlockPlan, Place, cut_blocks
from fmsdata.planning.counts import Counts


class Switch(NamedTuple):
    """From this epoch on, a run reads the shards up to this generation."""

    epoch: int
    generation: int


Timeline: TypeAlias = tuple[Switch, ...]  # by epoch, the first from epoch 0 on; empty: all shards from the start


class _Stretch(NamedTuple):
    """Consecutive epochs that follow one plan."""

    epoch: int  # the first
    start: int  # its first block, among all blocks of all epochs
    plan: BlockPlan


@dataclass(frozen=True, eq=False)
class GrownPlan(BlockPlan):
    """The plan of a source that has grown during a run. Its arrays are those of the newest generation."""

    stretches: tuple[_Stretch, ...] = ()

    def at(self, index: int) -> Place:
        epoch, start, plan = self.stretches[bisect_right(self.stretches, index, key=lambda s: s.start) - 1]
        later, position = divmod(index - start, plan.blocks)
        return Place(epoch + later, position, plan)

    def index(self, epoch: int, position: int) -> int:
        first, start, plan = self._stretch(epoch)
        return start + (epoch - first) * plan.blocks + position

    def of_epoch(self, epoch: int) -> BlockPlan:
        return self._stretch(epoch).plan

    def blocks_in(self, epochs: float) -> int:
        first, start, plan = self._stretch(epochs)
        return start + math.floor((epochs - first) * plan.blocks)

    def keys(self, seed: int, source: str, epoch: int, shard: int) -> BlockKeys:
        return self.of_epoch(epoch).keys(seed, source, epoch, shard)

    def bounds(self, shard: int) -> list[int]:
        """Where blocks of the shard begin or end, in any of the epochs."""
        bounds = {bound for stretch in self.stretches for bound in stretch.plan.bounds(shard)}
        return sorted(bounds | {0, int(self.documents[shard])})

    def _stretch(self, epoch: float) -> _Stretch:
        return self.stretches[bisect_right(self.stretches, epoch, key=lambda s: s.epoch) - 1]


@lru_cache(maxsize=256)
def plan_blocks(counts: Counts, timeline: Timeline, lanes: int, block_tokens: int) -> BlockPlan:
    """Cut a source into blocks, as its epochs read it. `counts` are those of all its shards."""
    if not timeline:
        return cut_blocks(counts, lanes, block_tokens)
    plans = [cut_blocks(counts.until(switch.generation), lanes, block_tokens) for switch in timeline]
    if len(plans) == 1:
        return plans[0]
    stretches = [_Stretch(0, 0, plans[0])]
    for (before, now), plan in zip(pairwise(timeline), plans[1:], strict=True):
        last = stretches[-1]
        stretches.append(_Stretch(now.epoch, last.start + (now.epoch - before.epoch) * last.plan.blocks, plan))
    newest = plans[-1]
    arrays = newest.documents, newest.first_block, newest.mean_lengths
    return GrownPlan(*arrays, newest.counted, stretches=tuple(stretches))


def describe_timeline(counts: Counts, timeline: Timeline) -> State:
    """What a description of the source says of its timeline: nothing, if all epochs read the same shards.

    Else, for each generation that the run reads: its first epoch, and the number and the digest of its
    shards.
    """
    if len(timeline) < 2:
        return {}
    generations = [(switch.epoch, counts.until(switch.generation)) for switch in timeline]
    return {"generations": [[epoch, known.number, known.digest] for epoch, known in generations]}


def saved_timeline(counts: Counts, saved: State | None) -> Timeline:
    """The timeline of a source that was described so.

    Empty if these shards are not known to be earlier generations of it, or if what came after them was
    not appended for running states.
    """
    if counts.generations is None or not isinstance(saved, Mapping):
        return ()
    timeline: list[Switch] = []
    for entry in _entries(saved):
        epoch, number, digest = entry
        generation = counts.generation_of(number)
        if generation is None or counts.until(generation).digest != digest:
            return ()
        timeline.append(Switch(epoch, generation))
    if not timeline or (timeline[-1].generation < counts.newest and counts.newest > counts.appended):
        return ()
    return () if timeline[-1] == Switch(0, counts.newest) else tuple(timeline)


def extended(timeline: Timeline, epoch: int, generation: int) -> Timeline:
    """The timeline with another switch, at an epoch that was not begun."""
    return (*(earlier for earlier in timeline if earlier.epoch < epoch), Switch(epoch, generation))


def tokens_in(counts: Counts, timeline: Timeline, epochs: float) -> float:
    """The tokens of the first epochs of a source, of which the last need not be whole."""
    if not timeline:
        return float(counts.tokens.sum()) * epochs
    begins = [min(float(switch.epoch), epochs) for switch in timeline] + [epochs]
    sizes = [int(counts.until(switch.generation).tokens.sum()) for switch in timeline]
    return math.fsum(size * (stop - start) for size, (start, stop) in zip(sizes, pairwise(begins), strict=True))


def earlier_epochs(counts: Counts, timeline: Timeline) -> tuple[tuple[int, int], ...]:
    """How many epochs have how many tokens, before those of the newest generation."""
    return tuple(
        (later.epoch - switch.epoch, int(counts.until(switch.generation).tokens.sum()))
        for switch, later in pairwise(timeline)
    )


def _entries(saved: Mapping[str, Any]) -> Sequence[tuple[int, int, str]]:
    """First epoch, shards and digest of each generation in a description; none if they are damaged."""
    listed = saved.get("generations", [[0, saved.get("shards"), saved.get("digest")]])
    if not isinstance(listed, list) or not all(isinstance(entry, list) and len(entry) == 3 for entry in listed):
        return []
    epochs = [entry[0] for entry in listed]
    if not all(map(is_count, epochs)) or epochs[:1] != [0] or (np.diff(epochs) <= 0).any():
        return []
    return [(epoch, number, str(digest)) for epoch, number, digest in listed if is_count(number)]
