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
from fmsdata.core.limits import describe_os_error
from fmsdata.core.memory import Source
from fmsdata.core.ranges import Range
from fmsdata.core.spans import COLUMNS, LENGTH, START, Buffer
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats import format_of, open_shard, open_stream, read_layout
from fmsdata.formats.base import Decoded, Documents
from fmsdata.formats.compression import is_compressed
from fmsdata.formats.lines import bad_line
from fmsdata.prefetch.range_queue import drive
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location
from fmsdata.storage.mapped import MappedFile

Read = TypeVar("Read")
BLOCK_BYTES = 8 << 20  # of a file that are read at once
LINE_BYTES = 1 << 16  # read at once to find the next line


class Scanned(NamedTuple):
    """Some documents of a file, in order: number `first + i` is `tokens[ends[i] : ends[i + 1]]`."""

    tokens: Tokens
    ends: Ints
    first: int
    text: bool  # whether the tokens are UTF-8 bytes
    bad: Sequence[tuple[int, str]] = ()  # documents that could not be read, and why; they are empty here


def scan_file(file: Location, entry: Entry, column: str | None = None, *, skip_bad: bool = False) -> Iterator[Scanned]:
    """All documents of a file, as its listing showed it.

    With `skip_bad`, a line that can't be read is an empty document and listed in `bad`. Else it is an
    error.

    >>> sum(len(some.ends) - 1 for some in scan_file(folder / entry.name, entry))   # doctest: +SKIP
    812
    """
    for some in scan_part(file, entry, column, 0, 1):
        for line, reason in () if skip_bad else some.bad:
            raise bad_line(str(file), line, reason)
        yield some


def scan_part(file: Location, entry: Entry, column: str | None, part: int, parts: int) -> Iterator[Scanned]:
    """The documents of one of several parts of a file, which together hold each document once.

    Files of lines are cut by bytes: numbers of documents and lines then count from the start of the
    part, see `line_before`. Other files are cut by documents. Compressed lines have only one part.
    """
    if is_lines(entry.name):
        yield from _scan_lines(file, entry, column, part, parts)
    elif file.local is not None:
        with MappedFile(file.local) as mapped:
            shard = open_shard(mapped, str(file), column)
            shard.keep = _Last().keep
            for first, stop in _blocks(shard.documents, mapped.size, part, parts):
                yield Scanned(*_joined(shard.read(first, stop)), first, shard.text)
    else:
        yield from _scan_remote(file, entry, column, part, parts)


def is_lines(name: str) -> bool:
    """Whether the documents of a file are lines."""
    return format_of(name).parse is not None


def most_parts(entry: Entry, size: int) -> int:
    """The number of parts of about `size` bytes that a file can be read in."""
    return 1 if is_lines(entry.name) and is_compressed(entry.name) else max(1, -(-entry.size // size))


def line_before(file: Location, entry: Entry, part: int, parts: int) -> int:
    """The number of lines (or documents) before a part: to add to the numbers of `scan_part`. Reads all of them."""
    if part == 0 or not is_lines(entry.name):
        return 0
    first = _first_line(file, entry, entry.size * part // parts)
    ranges = _ranges(0, entry.size if first is None else first)
    return sum(data.count(b"\n") for data in _read_ranges(file, entry, ranges))


def _scan_lines(file: Location, entry: Entry, column: str | None, part: int, parts: int) -> Iterator[Scanned]:
    """The lines that begin in a part of the bytes."""
    stream = open_stream(str(file), column, skip_bad=True)
    start, stop = (_first_line(file, entry, entry.size * at // parts) for at in (part, part + 1))
    if start is None or start == stop:
        return
    shift = 0
    if part:
        stream.feed(b"\n")  # a mark at the start of a part is not at the start of the file
        shift = 1
    for data in _read_ranges(file, entry, _ranges(start, entry.size if stop is None else stop)):
        yield _shifted(stream.feed(data), shift)
    yield _shifted(stream.finish(), shift)


def _shifted(some: Documents, shift: int) -> Scanned:
    bad = [(line - shift, reason) for line, reason in some.bad]
    return Scanned(some.tokens, some.ends, some.first - shift, True, bad)


def _first_line(file: Location, entry: Entry, place: int) -> int | None:
    """Where the first line begins that begins at this place or behind it; None if none does."""
    if place == 0:
        return 0
    for at in range(place - 1, entry.size, LINE_BYTES):
        data = next(_read_ranges(file, entry, [Range(at, min(at + LINE_BYTES, entry.size))]))
        found = data.find(b"\n")
        if found >= 0:
            return at + found + 1 if at + found + 1 < entry.size else None
    return None


def _ranges(start: int, stop: int) -> list[Range]:
    return [Range(at, min(at + BLOCK_BYTES, stop)) for at in range(start, stop, BLOCK_BYTES)]


def _read_ranges(file: Location, entry: Entry, ranges: Sequence[Range]) -> Iterator[bytes]:
    """The bytes of ranges, one after the other, of the file that was listed."""
    if file.local is None:
        yield from _one_ahead(file, [partial(_read, file, entry.version, each) for each in ranges])
        return
    try:
        with file.local.open("rb") as opened:
            for start, stop in ranges:
                opened.seek(start)
                data = opened.read(stop - start)
                if len(data) != stop - start:
                    raise DataError(f"{file}: the file ends at byte {start + len(data)}; it was longer when listed")
                yield data
        now = file_entry(file.local.parent, file.local.name)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {describe_os_error(error)}") from None
    if (now.size, now.version) != (entry.size, entry.version):
        raise DataError(f"{file}: the file changed while it was read; run again when it is complete")


def _scan_remote(file: Location, entry: Entry, column: str | None, part: int, parts: int) -> Iterator[Scanned]:
    connection = file.connection
    read, keep = partial(_read, file, entry.version), _Last().keep
    layout = connection.run(drive(read_layout(str(file), entry.size, column, keep=keep), read))
    blocks = list(_blocks(layout.documents, entry.size, part, parts))
    if not blocks:
        return
    if len(blocks) > 1 or parts > 1:
        bounds = [first for first, _ in blocks] + [blocks[-1][1]]
        reading = read_layout(str(file), entry.size, column, bounds, dense=parts == 1, keep=keep)
        layout = connection.run(drive(reading, read))
    waiting = [partial(drive, layout.block(first, stop), read) for first, stop in blocks]
    for (first, _), block in zip(blocks, _one_ahead(file, waiting), strict=True):
        yield Scanned(*_joined(block), first, layout.text)


def _blocks(documents: int, size: int, part: int, parts: int) -> Iterator[tuple[int, int]]:
    step = max(1, documents * BLOCK_BYTES // max(1, size))
    begin, end = documents * part // parts, documents * (part + 1) // parts
    return ((first, min(first + step, end)) for first in range(begin, end, step))


class _Last:
    """Keeps the part that was decoded last, for the next block."""

    def __init__(self) -> None:
        self._kept: tuple[int, Decoded] | None = None

    def keep(self, part: int, decode: Callable[[], Decoded]) -> Decoded:
        if self._kept is None or self._kept[0] != part:
            decoded = decode()
            self._kept = part, decoded
        return self._kept[1]


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
    return bytes((await file.connection.read(file.path, wanted.start, wanted.stop, version)).data)


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
