"""The realised mix of sampled lanes: the real mixture, at any moment of a run, over made-up lengths."""

import warnings
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.core.blocks import LaneBlocks
from fmsdata.core.iterator import Exhausted
from fmsdata.core.keys import key_of
from fmsdata.core.lane import Lane
from fmsdata.core.state import State
from fmsdata.errors import FmsdataWarning
from fmsdata.planning.drift import SPREAD, have_one_length
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.run.lengths_only import LengthBlocks
from fmsdata.run.tally import count_tokens
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.mixture.source_state import SourceState, pack_sources

MOST_DOCUMENTS = 4096  # lengths that are made up for a shard; longer shards repeat them


class MadeUpLengths(OpenFiles):
    """A host that reads nothing: documents have lengths around the mean of their shard."""

    def open_blocks(self, files: ShardFiles, order: LaneOrder, lane: Lane) -> LaneBlocks:  # noqa: ARG002
        spread = 0.0 if have_one_length(files.counts) else SPREAD
        plan, sigma = order.plan, float(np.sqrt(np.log1p(spread**2)))

        @lru_cache(maxsize=64)
        def lengths(shard: int) -> npt.NDArray[Any]:
            mean, documents = max(1.0, float(plan.mean_lengths[shard])), int(plan.documents[shard])
            random = np.random.default_rng(key_of(order.seed, "lengths", order.source, shard))
            drawn = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, min(documents, MOST_DOCUMENTS))
            return np.resize(np.maximum(1, np.rint(drawn)).astype(np.int64), documents)

        return LengthBlocks(lengths)


def realised_shares(mixture: Mixture, lane: Lane, at: dict[str, tuple[int, int]], tokens: int) -> dict[str, float]:
    """The share of each source in the next `tokens` of a lane.

    `at` are the tokens that the lane has taken of each source, and the place of its next block.
    """
    start = mixture.open(lane).state(0)
    total = sum(taken for taken, _ in at.values())
    weights = mixture.phase_at(total, lane.count).weights
    sources = {  # each source is as far as its weight says, whatever the phases before have given it
        name: SourceState(
            taken=at[name][0],
            shift=round(weights[name] * total) - at[name][0],
            below=_moved(start["sources"][name]["below"], at[name][1]),
        )
        for name in mixture.sources
    }
    iterator = mixture.open(lane, pack_sources(sources))
    columns = {lane.named(name).source: number for number, name in enumerate(mixture.sources)}
    read = np.zeros(len(columns), np.int64)
    with suppress(Exhausted), warnings.catch_warnings():
        warnings.simplefilter("ignore", FmsdataWarning)  # that a source has ended
        while read.sum() < tokens:
            read += count_tokens(iterator.read(), columns)[-1][: len(columns)]
    total = max(1, int(read.sum()))
    return {name: count / total for name, count in zip(mixture.sources, read.tolist(), strict=True)}


def _moved(state: Any, place: int) -> Any:
    """The state of a source at the start, moved to another block."""
    if not isinstance(state, dict):
        return state
    moved: State = {key: _moved(value, place) for key, value in state.items()}
    return {**moved, "block": place, "document": 0} if "block" in moved and "document" in moved else moved
