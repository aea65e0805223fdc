"""Reading shards as byte ranges, apart from fetching them.

A reading is a generator: it asks for ranges of one file, is sent their bytes, and returns what it made of them.
Who fetches them, when and how often is not its business, so every format works over any storage.
"""

from collections.abc import Sequence

from fmsdata.readers.arrow_ranges import read_arrow_layout
from fmsdata.readers.base import Data, FetchedBlock, Layout, Piece, Range, Read, Reading

__all__ = ["Data", "FetchedBlock", "Layout", "Piece", "Range", "Reading", "read_from", "read_layout"]


def read_layout(
    name: str, size: int, column: str | None = None, bounds: Sequence[int] = (), *, dense: bool = False
) -> Reading[Layout]:
    """The layout of a shard of `size` bytes: how many documents it has, and where.

    Blocks can then be read between any two of the `bounds`, numbers of documents. (The first and the last are always
    among them.) A layout keeps some numbers for each of them, not for each document. `dense`: most blocks will be read,
    so it is worth while to keep where the documents are that lie around one.

    >>> reading = read_layout("part-0.arrow", 1_000_000, bounds=[0, 500, 812])
    >>> next(reading)
    [Range(start=934464, stop=1000000)]
    """
    return read_arrow_layout(name, size, column, bounds, dense)


def read_from(data: Data, reading: Reading[Read]) -> Read:
    """Let a reading have what it asks for from the bytes of the whole file.

    >>> layout = read_from(data, read_layout("part-0.arrow", len(data)))     # doctest: +SKIP
    >>> read_from(data, layout.block(0, layout.documents)).length.sum()      # doctest: +SKIP
    48211
    """
    view = memoryview(data)
    try:
        ranges = next(reading)
        while True:
            ranges = reading.send([view[start:stop] for start, stop in ranges])
    except StopIteration as done:
        result: Read = done.value
        return result
