"""What every reader gives: a block of documents, as places in arrays of tokens."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fmsdata.keys import Ints

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]


class Block(NamedTuple):
    """A run of consecutive documents of one shard.

    Document `i` is `arrays[array[i]][start[i] : start[i] + length[i]]`. Nothing is copied: the arrays are
    views of the mapped file.
    """

    arrays: list[Tokens]
    array: Ints
    start: Ints
    length: Ints
