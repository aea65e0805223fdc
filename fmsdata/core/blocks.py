"""Blocks: runs of consecutive documents of one shard, the unit of reading.

A lane knows which block it needs at each place of its order. It does not know where
the bytes come from: `LaneBlocks` reads them, from shards that are mapped or fetched.
"""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.tokens import StoredTokens

if TYPE_CHECKING:
    from fmsdata.core.lane import Lane

Array_co = TypeVar("Array_co", bound=StoredTokens, covariant=True)


class Address(NamedTuple):
    """The documents `first` to `stop - 1` of a shard."""

    shard: int
    first: int
    stop: int


class BlockName(NamedTuple):
    """A block that a lane reads, for a person to read."""

    source: str
    shard: str
    first: int
    stop: int
    lane: int

    def __str__(self) -> str:
        documents = f"documents {self.first} to {self.stop - 1}"
        return f"source {self.source!r}, {self.shard}, {documents}, lane {self.lane}"


class Block(NamedTuple, Generic[Array_co]):
    """The documents of a block.

    Document `i` is `arrays[array[i]][start[i] : start[i] + length[i]]`.

    Nothing is copied: the arrays are views of a mapped file or of the bytes that were fetched.
    """

    arrays: Sequence[Array_co]
    array: Ints
    start: Ints
    length: Ints
    offsets: Sequence[int | None] = ()  # of each array its first byte in the file; None if it was decoded


class Located(NamedTuple):
    """The documents of several blocks, in any order of the blocks.

    Document `i` is `arrays[array[i]][start[i] : start[i] + length[i]]`.
    """

    arrays: Sequence[StoredTokens]
    shards: list[int]  # of each array
    block: Ints  # of each document, as a place in the list of blocks
    number: Ints  # of each document, in its shard
    array: Ints
    start: Ints
    length: Ints
    are_shared: bool = False  # whether the arrays are those of all lanes


class InShards(NamedTuple):
    """The documents of several blocks that are stored as they are, by the tables of their shards.

    Document `i` of block `b` is row `row[b] + i` of table `shard[b]`, which says where it starts in the array of the
    shard, and its length.
    """

    arrays: list[StoredTokens]
    shards: list[int]  # of each array
    starts: list[Ints]
    lengths: list[npt.NDArray[np.signedinteger[Any]]]
    shard: Ints  # of each block, as a place in these lists
    row: Ints  # of each block

    def located(self, addresses: Ints) -> Located:
        """The same document by document."""
        order = self.shard.argsort(kind="stable")
        ordered = addresses.take(order, axis=0)
        sizes = ordered[:, 2] - ordered[:, 1]
        ends, shard = offsets(sizes), self.shard.take(order)
        rows = numbers(self.row.take(order), sizes)
        cuts = ends.take(shard.searchsorted(np.arange(len(self.arrays) + 1))).tolist()
        parts = [rows[low:high] for low, high in pairwise(cuts)]
        return Located(
            self.arrays,
            self.shards,
            np.repeat(order, sizes),
            numbers(ordered[:, 1], sizes),
            np.repeat(shard, sizes),
            np.concatenate([start.take(part) for start, part in zip(self.starts, parts, strict=True)]),
            np.concatenate(
                [length.take(part) for length, part in zip(self.lengths, parts, strict=True)], dtype=np.int64
            ),
            are_shared=True,
        )


class LaneBlocks(Protocol):
    """Reads the blocks of one source for one lane, wherever they are stored."""

    @property
    def tokens_at_once(self) -> float:
        """How many tokens the lane may request at once."""

    def start(self, place: int) -> None:
        """Announce that the lane reads from this place on."""

    def read(self, place: int, address: Address) -> Block[StoredTokens]:
        """The block at a place of the lane's order. Places only grow.

        It must not be used before `check` was called.
        """

    def read_all(self, place: int, addresses: Ints, announce: Callable[[Address], None]) -> Located | InShards:
        """The blocks from a place on. Their documents must not be used before `check` was called.

        `addresses` are rows of shard, first document, and the document after the last. `announce` is
        called before a file is touched, with a block that is read from it.
        """

    def check(self) -> None:
        """Raise if a file is not the one that blocks were read from."""

    def look_up(self, address: Address) -> Block[StoredTokens]:
        """A block out of order."""


class Host(Protocol):
    """What lanes need from outside: it opens files for them, and is notified of what they read."""

    @property
    def share(self) -> float:
        """The share of the run's lanes that are read together."""

    def open_blocks(self, files: Any, order: Any, lane: "Lane") -> LaneBlocks:
        """Read a source for a lane.

        `files` are its shards, and `order` is the order of their blocks. Only a host uses them.
        """

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """What lanes have in common under a key, made by the first of them."""

    def reading(self, block: BlockName) -> None:
        """Called with each block before it is read."""


def read_each(blocks: LaneBlocks, place: int, addresses: Ints, announce: Callable[[Address], None]) -> Located:
    """`LaneBlocks.read_all`, block by block."""
    read: list[Block[StoredTokens]] = []
    for at, row in enumerate(addresses.tolist(), place):
        announce(address := Address(*row))
        read.append(blocks.read(at, address))
    arrays = [len(block.arrays) for block in read]
    sizes = addresses[:, 2] - addresses[:, 1]
    block = np.repeat(np.arange(len(read)), sizes)
    return Located(
        list(chain.from_iterable(block.arrays for block in read)),
        np.repeat(addresses[:, 0], arrays).tolist(),
        block,
        numbers(addresses[:, 1], sizes),
        np.concatenate([block.array for block in read]) + offsets(np.array(arrays)).take(block),
        np.concatenate([block.start for block in read]),
        np.concatenate([block.length for block in read]),
    )


def numbers(first: Ints, sizes: Ints) -> Ints:
    """The documents of blocks of these sizes, from these first documents on."""
    ends = offsets(sizes)
    return np.arange(ends[-1]) + np.repeat(first - ends[:-1], sizes)
