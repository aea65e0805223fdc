"""What every reader gives: a block of documents, as places in arrays of tokens.

Readers of mapped files give it at once. Those of remote files are generators without any input or output of their
own: they ask for ranges of bytes and are sent them.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fmsdata.keys import Ints

Read = TypeVar("Read")
Tokens: TypeAlias = npt.NDArray[np.integer[Any]]


class StoredTokens(Protocol):
    """What chunks take tokens from: an array, or what brings the tokens of one when they are asked for."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, where: slice, /) -> Tokens: ...

    def take(self, places: Ints, /) -> Tokens: ...


class Block(NamedTuple):
    """A run of consecutive documents of one shard.

    Document `i` is `arrays[array[i]][start[i] : start[i] + length[i]]`. Nothing is copied: the arrays are
    views of the mapped file.
    """

    arrays: list[Tokens]
    array: Ints
    start: Ints
    length: Ints


class Range(NamedTuple):
    """Some bytes of a file."""

    start: int
    stop: int


Data: TypeAlias = bytes | memoryview
# Asks for ranges of one file, is sent their bytes in the same order, and so on; returns what it read.
Reading: TypeAlias = Generator[list[Range], Sequence[Data], Read]


class Piece(NamedTuple):
    """An array of a block that was fetched."""

    tokens: Tokens
    offset: int | None  # its first byte in the file, if its bytes lie there as they are; None if it was decoded


class FetchedBlock(NamedTuple):
    """A run of consecutive documents, as `Block`: document `i` is a part of `pieces[array[i]].tokens`."""

    pieces: list[Piece]
    array: Ints
    start: Ints
    length: Ints


class Layout(Protocol):
    """What is known of a shard without having it: enough to ask for the ranges that a block needs."""

    documents: int
    known_tokens: int | None  # all tokens, if the layout tells
    nbytes: int  # memory that it takes, roughly

    def block(self, first: int, stop: int) -> Reading[FetchedBlock]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""

    def tokens(self) -> Reading[int]:
        """All tokens of the shard; it may have to be read for that, in ranges of at most 8 MB."""
