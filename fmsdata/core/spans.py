"""Spans: runs of consecutive tokens of one buffer, as rows of a table of integers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from fmsdata.core.keys import mix
from fmsdata.core.tokens import StoredTokens

# The columns of the table.
BUFFER = 0  # which buffer holds the tokens
START = 1  # where in the buffer they start
LENGTH = 2
DOCUMENT = 3  # the number of the document in its shard, or INSERTED or PADDING
POSITION = 4  # where in the stored document the span starts
BEGINS = 5  # 1 if a document begins here; also CONTINUED and UNFINISHED, and what is CROPPED
TAIL = 6  # 0, or 1 + a token that is added behind the stored ones; it counts in the length
COLUMNS = 7

# Values of DOCUMENT for tokens that are in no shard.
INSERTED = -1  # BOS, EOS and the like
PADDING = -2

# Flags in BEGINS, for parts of documents.
CONTINUED = 2  # the part does not start with the stored document: no BOS belongs in front
UNFINISHED = 4  # the part does not end with the stored document: no EOS belongs behind
CROPPED = 3  # the bits from here on: how many stored tokens were thrown away behind the last span of a line


@dataclass(slots=True, eq=False)  # frozen would make it three times as slow to create
class Buffer:
    """An array of tokens, and where they come from.

    Inserted tokens are in no shard, and have the source of their document. Padding has none.
    `keys` returns the key of a document in the array, from its number; None if it has no documents.
    """

    tokens: StoredTokens
    source: str = ""
    shard: str = ""
    epoch: int = 0
    keys: Callable[[int], int] | None = None

    def key(self, document: int) -> int:
        """A 64-bit key of the part of the source that a document is in, for random choices."""
        return 0 if self.keys is None else self.keys(document)

    def with_key(self, number: int | None = None) -> "Buffer":
        """The same with other keys, which are made from the keys and a number."""
        return replace(self, keys=partial(_mixed, self.keys, number))


def _mixed(keys: Callable[[int], int] | None, number: int | None, document: int) -> int:
    key = 0 if keys is None else keys(document)
    return mix(key if number is None else key ^ number)


class Span(NamedTuple):
    """A run of stored tokens: `start` and `stop` are offsets in the stored document."""

    source: str
    shard: str
    document: int
    start: int
    stop: int
