"""The blocks that a lane reads of a source in a whole run, by arithmetic.

The order of a lane gives any of its blocks without those before it. So a run of any length is walked
block by block where that is affordable, and else in stretches spread over the run: each starts at
a block that the lane may have reached by then, drawn as the blocks between would drift.

Counts say how many tokens a shard has, not how long its documents are. The tokens of a block are drawn
from a gamma distribution around what the counts say, with the spread that `fmsdata plan` assumes too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, key_of
from fmsdata.planning.drift import SPREAD
from fmsdata.planning.lane_order import LaneOrder

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stretch:
    """Consecutive blocks of a lane, and the tokens of the source that the lane has read before each."""

    first: int  # place
    tokens: Floats
    before: Floats
    addresses: Ints
    epochs: Floats  # how many epochs of the source the lane is in, at each block


def walk(order: LaneOrder, tokens: float, *, stretches: int, most: int, spread: float = SPREAD) -> list[Stretch]:
    """The blocks of a lane until it has read `tokens` of the source.

    All of them, if there are at most `most`; else that many, in as many stretches as given.
    """
    plan = order.plan
    mean = float(np.dot(plan.mean_lengths, plan.documents)) / plan.blocks
    if tokens <= 0 or not mean:
        return []
    if tokens / mean <= most:
        return [_stretch(order, 0, 0.0, tokens, math.inf, spread)]
    each = tokens / stretches
    found = []
    for number, first in enumerate(_reached(order, each / mean, stretches, spread)):
        found.append(_stretch(order, first, each * number, tokens, most / stretches, spread))
    return found


def _reached(order: LaneOrder, blocks: float, count: int, spread: float) -> list[int]:
    """The blocks that a lane may have read at moments that are this many blocks apart on average.

    It reads more blocks than others if they have fewer tokens. One lane alone reads all blocks of an epoch, so
    it can't.
    """
    plan = order.plan
    parts = np.diff(plan.first_block).astype(np.float64)
    documents = np.array(plan.documents) / np.maximum(1, parts)  # of a block of each shard
    tokens = documents * plan.mean_lengths
    squares = tokens**2 + documents * (plan.mean_lengths * spread) ** 2
    mean, square = (float(np.dot(values, parts)) / plan.blocks for values in (tokens, squares))
    deviation = math.sqrt(max(0.0, square / mean**2 - 1) * (1 - 1 / order.lanes) * blocks)
    random = np.random.default_rng(key_of(order.seed, "reached", order.source, order.lane))
    steps = np.maximum(0, blocks + deviation * random.standard_normal(count - 1))
    return [0, *np.rint(np.cumsum(steps)).astype(np.int64).tolist()]


def _stretch(order: LaneOrder, first: int, start: float, stop: float, most: float, spread: float) -> Stretch:
    plan, place, read = order.plan, first, start
    tokens: list[Floats] = []
    addresses: list[Ints] = []
    random = np.random.default_rng(key_of(order.seed, "simulate", order.source, order.lane, first))
    while read < stop and place - first < most:
        blocks = order.blocks(place)
        if blocks is None:
            break
        addresses.append(blocks.addresses)
        tokens.append(_tokens(blocks.addresses, plan.mean_lengths, spread, random))
        read += float(tokens[-1].sum())
        place += len(blocks)
    if not tokens:
        return Stretch(first, np.zeros(0), np.zeros(0), np.zeros((0, 3), np.int64), np.zeros(0))
    each = np.concatenate(tokens)
    before = start + np.concatenate([[0.0], np.cumsum(each)[:-1]])
    count = int(min(float(np.searchsorted(before, stop)), most))
    places = np.arange(first, first + count)
    epochs = (order.lane + places * order.lanes) / plan.blocks
    return Stretch(first, each[:count], before[:count], np.concatenate(addresses)[:count], epochs)


def _tokens(addresses: Ints, mean: Floats, spread: float, random: np.random.Generator) -> Floats:
    documents = (addresses[:, 2] - addresses[:, 1]).astype(np.float64)
    length = mean.take(addresses[:, 0])
    if not spread:
        return documents * length
    return random.gamma(np.maximum(documents, 1e-9) / spread**2) * length * spread**2


def at(stretches: list[Stretch], tokens: Floats, value: Callable[[Stretch], Floats]) -> Floats:
    """The value of the block that a lane is in when it has read this many tokens of the source."""
    starts = np.array([stretch.before[0] if len(stretch.before) else math.inf for stretch in stretches])
    found = np.zeros(len(tokens))
    for number, wanted in enumerate(tokens.tolist()):
        stretch = stretches[max(0, int(np.searchsorted(starts, wanted, "right")) - 1)]
        if len(stretch.before):
            found[number] = value(stretch)[max(0, int(np.searchsorted(stretch.before, wanted, "right")) - 1)]
    return found
