"""Decoded record batches, row groups and stretches of lines, within a budget of bytes.

Such a part of a shard is decoded as a whole, but a block takes only some of its documents. So the decoded
parts that were used last are kept for the other blocks and lanes of the process, and a block gets
a copy of its own documents. Both count. When the copies that the pipeline holds take more than
their part, the oldest are dropped, and copied again from the shard if a line needs them.
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints
from fmsdata.core.tokens import StoredTokens, Tokens
from fmsdata.errors import FmsdataWarning
from fmsdata.formats.base import Decoded
from fmsdata.prefetch.held_tokens import HeldTokens

SHARE = 1 / 2  # of the budget, for decoded batches: the rest is for copies
WARN_BYTES, WARN_RATIO = 4 << 30, 16  # decoded, in all and for each byte of documents


class DecodedBatches:
    """The decoded record batches that were used last, and the copies that the pipeline holds."""

    def __init__(self, budget: int) -> None:
        self._budget = budget or math.inf
        self._batches: OrderedDict[Hashable, Decoded] = OrderedDict()
        self._batch_bytes = 0
        self._copies = HeldTokens()
        self._decoded = self._copied = 0  # bytes so far
        self._warned = False

    def get(self, key: Hashable, decode: Callable[[], Decoded]) -> Decoded:
        """A decoded record batch. The last one is kept even if it is larger than the budget."""
        if key in self._batches:
            self._batches.move_to_end(key)
            return self._batches[key]
        decoded = decode()
        self._batches[key] = decoded
        self._batch_bytes += decoded.nbytes
        while len(self._batches) > 1 and self._batch_bytes > self._budget * SHARE:
            self._batch_bytes -= self._batches.popitem(last=False)[1].nbytes
        self._count(decoded.nbytes)
        return decoded

    def lend(self, block: Block[Any], read: Callable[[], Block[Any]]) -> Block[StoredTokens]:
        """The block, with tokens that may be dropped and are then read again."""
        copies = [CopiedTokens(self, tokens, partial(_array, read, which)) for which, tokens in enumerate(block.arrays)]
        return Block(copies, block.array, block.start, block.length)

    def record(self, tokens: "CopiedTokens", size: int) -> int:
        """Count tokens until the pipeline drops them.

        If it holds too many now, the oldest are revoked.
        """
        self._copies.sweep()
        self._copied += size
        number = self._copies.add(tokens, size)
        self._copies.revoke_down_to(self._budget * (1 - SHARE))
        return number

    def count_copied(self, size: int) -> None:
        """A block of this size was copied, and is accounted for elsewhere."""
        self._copied += size

    def touch(self, number: int) -> None:
        """These tokens are used now."""
        self._copies.touch(number)

    def _count(self, size: int) -> None:
        self._decoded += size
        if not self._warned and self._decoded > max(WARN_BYTES, WARN_RATIO * self._copied):
            self._warned = True
            warnings.warn(
                f"{self._decoded:,} bytes of compressed record batches were decoded for {self._copied:,} bytes of "
                f"documents, because storage.prefetch_bytes is {self._budget:,}: raise it, or write the shards without "
                "compression or with smaller record batches (row groups, frames)",
                FmsdataWarning,
                stacklevel=2,
            )


class CopiedTokens:
    """The tokens of a block that was decoded.

    They may be dropped, and are then read again when they are needed.
    """

    def __init__(self, owner: DecodedBatches, tokens: Tokens, again: Callable[[], Tokens]) -> None:
        self._owner, self._again = owner, again
        self._array: Tokens | None = tokens
        self.dtype: np.dtype[Any] = tokens.dtype
        self._number = owner.record(self, tokens.nbytes)

    def __getitem__(self, where: slice) -> Tokens:
        return self._tokens()[where]

    def take(self, places: Ints) -> Tokens:
        return self._tokens().take(places)

    def revoke(self) -> None:
        self._array = None

    def _tokens(self) -> Tokens:
        array = self._array
        if array is None:
            self._array = array = self._again()
            self._number = self._owner.record(self, array.nbytes)
        else:
            self._owner.touch(self._number)
        return array


def _array(read: Callable[[], Block[Any]], which: int) -> Tokens:
    tokens: Tokens = read().arrays[which]
    return tokens
