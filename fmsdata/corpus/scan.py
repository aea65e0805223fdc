"""Reading a whole file, local or remote and of any format, in order and in bounded memory.

Planning reads blocks at any place. This is for what looks at every document once: `fmsdata verify`,
`convert` and `prepare`.
"""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.copying import TokenCopies
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.memory import Source
from fmsdata.core.ranges import Range
from fmsdata.core.spans import COLUMNS, LENGTH, START, Buffer
from fmsdata.core.tokens import Tokens
from fmsdata.formats import open_shard, read_layout
from fmsdata.prefetch.range_queue import drive
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location
from fmsdata.storage.mapped import MappedFile

Read = TypeVar("Read")
BLOCK_BYTES = 8 << 20  # of a file that are read at once


class Scanned(NamedTuple):
    """Some documents of a file, in order: number `first + i` is `tokens[ends[i] : ends[i + 1]]`."""

    tokens: Tokens
    ends: Ints
    first: int
    text: bool  # whether the tokens are UTF-8 bytes
    bad: Sequence[tuple[int, str]] = ()  # documents that could not be read, and why; they are empty here


def scan_file(file: Location, entry: Entry, column: str | None = None, *, skip_bad: bool = False) -> Iterator[Scanned]:
    """All documents of a file, as its listing showed it.

    With `skip_bad`, a document that can't be read is empty and listed in `bad`. Else it is an error.

    >>> sum(len(some.ends) - 1 for some in scan_file(folder / entry.name, entry))   # doctest: +SKIP
    812
    """
    if file.local is not None:
        with MappedFile(file.local) as mapped:
            shard = open_shard(mapped, str(file), column)
            for first, stop in _blocks(shard.documents, mapped.size):
                yield Scanned(*_joined(shard.read(first, stop)), first, shard.text)
        return
    connection = file.connection
    read = partial(_read, file, entry.version)
    layout = connection.run(drive(read_layout(str(file), entry.size, column), read))
    blocks = list(_blocks(layout.documents, entry.size))
    if len(blocks) > 1:
        bounds = [first for first, _ in blocks]
        layout = connection.run(drive(read_layout(str(file), entry.size, column, bounds, dense=True), read))
    waiting = [partial(drive, layout.block(first, stop), read) for first, stop in blocks]
    for (first, _), block in zip(blocks, _one_ahead(file, waiting), strict=True):
        yield Scanned(*_joined(block), first, layout.text)


def _blocks(documents: int, size: int) -> Iterator[tuple[int, int]]:
    step = max(1, documents * BLOCK_BYTES // max(1, size))
    return ((first, min(first + step, documents)) for first in range(0, documents, step))


def _joined(block: Block[Any]) -> tuple[Tokens, Ints]:
    """The tokens of a block in one array, copied and checked, and the ends of the documents."""
    spans = np.zeros((len(block.length), COLUMNS), np.int64)
    spans[:, 0], spans[:, START], spans[:, LENGTH] = block.array, block.start, block.length
    buffers = [Buffer(array) for array in block.arrays]
    unchecked: set[Source] = set()
    copies = TokenCopies(buffers, spans, np.array([0, len(spans)]), block.arrays[0].dtype)
    tokens = copies.read(0, unchecked)
    for source in unchecked:
        source.check()
    return tokens, offsets(block.length)


async def _read(file: Location, version: str | None, wanted: Range) -> bytes:
    return (await file.connection.read(file.path, wanted.start, wanted.stop, version)).data


def _one_ahead(file: Location, waiting: Sequence[Callable[[], Coroutine[Any, Any, Read]]]) -> Iterator[Read]:
    """The results of coroutines in order. While one is used, the next runs."""
    ahead = [file.connection.start(make()) for make in waiting[:1]]
    try:
        for make in [*waiting[1:], None]:
            result = ahead.pop().result()
            if make is not None:
                ahead.append(file.connection.start(make()))
            yield result
    finally:
        for future in ahead:
            future.cancel()
