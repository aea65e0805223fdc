"""Drift: how far the lanes of a run are apart when an epoch of a source ends.

Lanes read the same number of tokens at the same time, but an epoch does not give each of them the
same number: it gives them about the same number of blocks, of documents of different lengths. So
some lanes are in the next epoch while others are still in this one. The fewer documents a lane
reads in an epoch, the more its tokens differ from the mean.

Everything is computed from counts. They do not say how long single documents are, so their spread
is assumed, unless all shards have the same whole number of tokens per document.
"""

import math

import numpy as np

from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.counts import Counts

SPREAD = 1.5  # the standard deviation of the lengths of documents, in means; text is between 1 and 2


def drift(counts: Counts, lanes: int, block_tokens: int) -> float:
    """The share of an epoch's worth of tokens that is already of the next epoch.

    That is at the moment when the run has read as many tokens of the source as one epoch has. The
    tokens of a lane's epoch are taken to be gamma distributed, for which it is half of the mean
    absolute deviation.

    >>> counts = Counts(("a",), np.array([20_000]), np.array([9_990_000]))
    >>> [f"{drift(counts, lanes, block_tokens=1 << 18):.0%}" for lanes in (1024, 96)]
    ['13%', '4%']
    """
    documents = int(counts.documents.sum())
    blocks = cut_blocks(counts, lanes, block_tokens).blocks
    if not documents or lanes == 1:
        return 0.0
    per_lane = blocks / lanes
    uneven = (blocks % lanes) * (lanes - blocks % lanes) / blocks**2  # some lanes get a block more than others
    mean = counts.tokens / np.maximum(1, counts.documents) / counts.mean_length
    between_shards = float(np.average((mean - 1) ** 2, weights=counts.documents))
    spread = 0 if have_one_length(counts) else SPREAD
    variance = (spread**2 * lanes / documents + between_shards / per_lane + uneven) * (1 - 1 / lanes)
    if not variance:
        return 0.0
    shape = 1 / variance
    expected = math.exp(shape * math.log(shape) - shape - math.lgamma(shape + 1))
    return max(expected, 1 - per_lane)


def have_one_length(counts: Counts) -> bool:
    """Whether all documents seem to have the same number of tokens, such as packed rows."""
    length = round(counts.mean_length)
    return bool((counts.tokens == counts.documents * length).all())


def lanes_within(counts: Counts, block_tokens: int, *, bound: float, below: int, world_size: int = 1) -> int | None:
    """The largest well divisible number of lanes below `below` with a drift within `bound`.

    It is a multiple of the world size. None: there is none.
    """
    for factor in reversed(well_divisible((below - 1) // world_size)):
        if drift(counts, factor * world_size, block_tokens) <= bound:
            return factor * world_size
    return None


def well_divisible(limit: int) -> list[int]:
    """The numbers up to a limit that have at least as many divisors as every smaller number.

    >>> well_divisible(200)
    [1, 2, 3, 4, 6, 8, 10, 12, 18, 20, 24, 30, 36, 48, 60, 72, 84, 90, 96, 108, 120, 168, 180]
    """
    divisors = np.zeros(limit + 1, np.int64)
    for number in range(1, limit + 1):
        divisors[number::number] += 1
    most = np.maximum.accumulate(divisors)
    return [int(number) for number in np.flatnonzero(divisors == most) if number]
