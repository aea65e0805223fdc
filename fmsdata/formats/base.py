"""What every format returns: blocks of documents, as places in arrays of tokens.

The documents of a text format are UTF-8 bytes, as arrays of uint8. Everything up to the stage
`Tokenize` handles them as it handles tokens: a count of tokens is then a count of bytes.

Readers of mapped files return a block at once. Readers of remote files are generators that do no
I/O: they ask for byte ranges of one file, are sent the bytes, and return what they read. They do
not know who fetches the bytes, when and how often, so every format works with any storage.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints
from fmsdata.core.pages import Data as Data
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import StoredTokens, Tokens

Read = TypeVar("Read")
# Asks for ranges of a file, is sent their bytes in the same order, asks again or returns a result.
Reading: TypeAlias = Generator[list[Range], Sequence[Data], Read]


class ShardBytes(Protocol):
    """The bytes of a shard, in memory or mapped. Those of a mapped file are copied before they are looked at."""

    size: int

    def read(self, start: int, stop: int) -> memoryview:
        """Some of the bytes, as far as there are any."""

    def collect(self, ranges: Ints) -> tuple[memoryview, Ints]:
        """Bytes with all these ranges in them, and where each range starts in them.

        Ranges are rows of first byte and size, and must be inside the file.
        """

    def tokens(self, dtype: npt.DTypeLike) -> StoredTokens:
        """All bytes as one array. (Arrow aligns everything in a file to 8 bytes.)"""


class InMemory:
    """Bytes that nobody changes."""

    def __init__(self, buffer: pa.Buffer) -> None:
        self.size: int = buffer.size
        self._data = memoryview(buffer)

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]

    def collect(self, ranges: Ints) -> tuple[memoryview, Ints]:
        return self._data, ranges[:, 0]

    def tokens(self, dtype: npt.DTypeLike) -> Tokens:
        return np.frombuffer(self._data, dtype, self.size // np.dtype(dtype).itemsize)


class Decoded(NamedTuple):
    """A decoded part of a shard: document `i` of it is `tokens[ends[i] : ends[i + 1]]`."""

    tokens: Tokens
    ends: Ints
    nbytes: int  # of memory that it takes


Keep: TypeAlias = Callable[[int, Callable[[], Decoded]], Decoded]


def keep_nothing(part: int, decode: Callable[[], Decoded]) -> Decoded:  # noqa: ARG001
    """Decode a part each time that it is needed."""
    return decode()


def find_kept(keep: Keep, part: int) -> Decoded | None:
    """A decoded part, if it was kept."""
    try:
        return keep(part, _not_kept)
    except _NotKept:
        return None


class _NotKept(Exception):
    """A part must be decoded."""


def _not_kept() -> Decoded:
    raise _NotKept


Blocks: TypeAlias = tuple[Ints, Ints]  # the documents and the tokens of each of some consecutive parts of a shard


class Shard(Protocol):
    """A shard whose bytes are in memory or mapped."""

    text: bool  # whether the documents are UTF-8 bytes, not tokens

    keep: Keep  # called for each part that must be decoded, with its number: it may have kept it

    known_tokens: int | None  # the number of tokens, where it need not be computed

    @property
    def documents(self) -> int: ...

    @property
    def plain(self) -> bool:
        """Whether the tokens are stored as they are, so that reading decodes nothing."""

    @property
    def blocks(self) -> Blocks | None:
        """Its record batches, if what they hold is known without decoding them."""

    def read(self, first: int, stop: int) -> Block[StoredTokens]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""

    def tokens(self) -> int:
        """The number of tokens in the shard."""


class Layout(Protocol):
    """What is known of a remote shard: enough to ask for the byte ranges that a block needs."""

    text: bool  # whether the documents are UTF-8 bytes, not tokens
    documents: int
    known_tokens: int | None  # the number of tokens, if the layout says
    nbytes: int  # of memory that it takes, roughly

    @property
    def blocks(self) -> Blocks | None:
        """Its record batches, if they are known. They may be known only after `tokens`."""

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""

    def tokens(self) -> Reading[int]:
        """The number of tokens. They may have to be read for that, in ranges of at most 8 MB."""


def read_from(data: Data, reading: Reading[Read]) -> Read:
    """Run a reading on the bytes of the whole file.

    >>> layout = read_from(data, read_layout("part-0.arrow", len(data)))     # doctest: +SKIP
    >>> read_from(data, layout.block(0, layout.documents)).length.sum()      # doctest: +SKIP
    48211
    """
    view = memoryview(data)
    return read_ranges(reading, lambda start, stop: view[start:stop])


def read_ranges(reading: Reading[Read], read: Callable[[int, int], Data]) -> Read:
    """Run a reading on bytes that are at hand: `read` returns those between two places."""
    try:
        ranges = next(reading)
        while True:
            ranges = reading.send([read(start, stop) for start, stop in ranges])
    except StopIteration as done:
        result: Read = done.value
        return result


class Documents(NamedTuple):
    """Some consecutive documents of a text file: document `i` is `tokens[ends[i] : ends[i + 1]]`, in UTF-8."""

    tokens: Tokens
    ends: Ints
    first: int  # the number of the first document in its file
    bad: list[tuple[int, str]]  # lines that were skipped, as empty documents: number (from 1) and reason

    def __len__(self) -> int:
        return len(self.ends) - 1


class DocumentStream(Protocol):
    """A text file that is read from its beginning to its end, in little memory.

    >>> stream = open_stream("a.jsonl.gz", "text")                  # doctest: +SKIP
    >>> for data in stored_bytes:                                   # doctest: +SKIP
    ...     documents = stream.feed(data)
    >>> rest = stream.finish()                                      # doctest: +SKIP
    """

    def feed(self, data: Data) -> Documents:
        """Stored bytes, which may be compressed, in; documents that are complete out."""

    def finish(self) -> Documents:
        """The rest. Raises DataError if the file is cut."""
