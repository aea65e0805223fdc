"""The framing of Arrow IPC: which bytes of a file are which record batch, and what its metadata says.

pyarrow decodes record batches but does not tell where they lie, and that is what random access and range reads
need. Arrow describes its messages in flatbuffers; `Table` reads the little of that format which is used here.
"""

import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.errors import DataError

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
RECORD_BATCH = 3
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
TEMPLATES = 8  # kinds of metadata to remember; a writer has two or three
HEADS = 4  # beginnings of messages to remember
PREFIX = 8  # the continuation marker and the metadata's size
END = 10  # the footer's size and the magic, behind the footer
NO_END = "the end-of-stream marker is missing"


class Truncated(Exception):
    """The bytes do not make up a whole Arrow file."""


DAMAGE = (struct.error, IndexError, ValueError, OverflowError, OSError, Truncated, pa.ArrowException)
NOT_WHOLE = "not a whole Arrow IPC file, it is truncated or of another kind"


class Guarded:
    """Whatever damaged bytes make other code raise is an error that names the file.

    >>> with Guarded("a.arrow"):
    ...     raise Truncated("no end")
    Traceback (most recent call last):
    ...
    fmsdata.errors.DataError: a.arrow: the file is damaged (no end); write it again or remove it
    """

    def __init__(self, name: str, what: str = "the file is damaged") -> None:
        self._name, self._what = name, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, DAMAGE):
            raise DataError(f"{self._name}: {self._what} ({error}); write it again or remove it") from None


class Table:
    """A flatbuffers table at a position of some bytes."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        (back,) = struct.unpack_from("<i", data, position)
        self._slots = position - back
        (self._end,) = struct.unpack_from("<H", data, self._slots)

    @classmethod
    def root(cls, data: memoryview, position: int) -> "Table":
        return cls(data, position + struct.unpack_from("<I", data, position)[0])

    def position(self, field: int) -> int:
        """Where a field's value lies, or 0 if it was left out because it has its default."""
        slot = 4 + 2 * field
        if slot >= self._end:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._slots + slot)
        return self._position + offset if offset else 0

    def lies_before(self, place: int) -> bool:
        """Whether all that tells where the fields are is in front of a place."""
        return self._position + 4 <= place and bool(self._slots + self._end <= place)

    def number(self, field: int, form: str = "<q") -> int:
        position = self.position(field)
        return int(struct.unpack_from(form, self._data, position)[0]) if position else 0

    def table(self, field: int) -> "Table":
        return Table.root(self._data, self.position(field))

    def vector(self, field: int) -> tuple[int, int]:
        """The position of a vector's first element, and the number of elements."""
        position = self.position(field)
        if not position:
            return 0, 0
        position += struct.unpack_from("<I", self._data, position)[0]
        return position + 4, struct.unpack_from("<I", self._data, position)[0]


def read_framing(buffer: pa.Buffer) -> tuple[pa.Schema, Ints]:
    """The schema, and per record batch the offset, the size of its metadata and the size of its body."""
    data = memoryview(buffer)
    if data[:6] == MAGIC:
        messages, _ = read_footer(data[len(data) - footer_size(data, len(data)) :])
        schema = pa.ipc.open_file(buffer).schema
    else:
        require_stream(data)
        walked = Walker().walk(data)
        if not walked.ended:
            raise Truncated(NO_END)
        messages = walked.messages
        schema = pa.ipc.open_stream(buffer).schema
    require_inside(messages, len(data))
    return schema, messages


def require_stream(data: memoryview) -> None:
    """Raise if this is not how a stream starts."""
    if len(data) < PREFIX or struct.unpack_from("<I", data)[0] != CONTINUATION:
        raise Truncated("it does not start as an Arrow file does" if len(data) else "it is empty")


def require_inside(messages: Ints, size: int) -> None:
    """Raise if some record batches are not inside a file of this size."""
    offset, metadata, body = messages.T
    if messages.min(initial=0) < 0 or (offset > size).any() or (body > size - offset - metadata).any():
        raise Truncated("record batches lie beyond its end")
    if (short := metadata < PREFIX).any():
        raise Truncated(f"no record batch at byte {offset[short][0]}")


def moved(messages: Ints, by: int) -> Ints:
    """The same record batches at other offsets."""
    copy = messages.copy()
    copy[:, 0] += by
    return copy


def footer_size(tail: memoryview, size: int) -> int:
    """How many bytes it is from the footer to the end, as the end of a file of this size tells."""
    if size < 18 or tail[-len(MAGIC) :] != MAGIC:
        raise Truncated("the end is missing")
    footer = int(struct.unpack_from("<i", tail, len(tail) - END)[0])
    if not 0 < footer <= size - END:
        raise Truncated(f"its footer can't have {footer} bytes")
    return footer + END


def read_footer(footer: memoryview) -> tuple[Ints, int]:
    """The record batches that a footer lists, and where in it that list is."""
    start, count = Table.root(footer, 0).vector(3)
    return listed_messages(footer[start : start + count * BLOCK.itemsize], count), start


def listed_messages(data: memoryview, count: int) -> Ints:
    """Record batches as a part of the footer's list has them."""
    blocks = np.frombuffer(data, BLOCK, count) if count else np.empty(0, BLOCK)
    return np.stack([blocks[name].astype(np.int64) for name in ("offset", "metadata", "body")], axis=1)


class Walked(NamedTuple):
    """What there is in some bytes."""

    messages: Ints  # the record batches, as `read_framing` gives them
    position: int  # where the next message is
    ended: bool  # whether that is the end of the stream


class Walker:
    """Goes from message to message where one lies behind the other.

    Messages of one writer begin alike, up to the number that is the size of the body. So one of them is taken
    apart, and of those that begin like it only that number is read.
    """

    def __init__(self) -> None:
        self._heads: list[tuple[Callable[[memoryview, int], tuple[Any, ...]], bytes, int]] = []

    def walk(self, data: memoryview, position: int = 0, base: int = 0) -> Walked:
        """The record batches from a position on whose metadata is all there. `base` is the data's place in the file."""
        offset: list[int] = []
        metadata: list[int] = []
        bodies: list[int] = []
        while True:
            for unpack, head, size in self._heads:
                last = len(data) - size
                while position <= last:
                    start, body = unpack(data, position)
                    if start != head or body < 0:
                        break
                    offset.append(position)
                    bodies.append(body)
                    position += size + body
                metadata += [size] * (len(offset) - len(metadata))
            if position + PREFIX > len(data):
                return Walked(_table(offset, metadata, bodies), position, ended=False)
            marker, length = struct.unpack_from("<Ii", data, position)
            if marker != CONTINUATION or length < 0:
                raise Truncated(f"no message at byte {base + position}")
            size = PREFIX + length
            if length == 0 or position + size > len(data):
                return Walked(_table(offset, metadata, bodies), position, ended=length == 0)
            kind, body = self._take_apart(data[position : position + size])
            if kind not in (1, 2, 3) or body < 0:
                raise Truncated(f"no message at byte {base + position}")
            if kind == RECORD_BATCH:
                offset.append(position)
                metadata.append(size)
                bodies.append(body)
            position += size + body

    def _take_apart(self, metadata: memoryview) -> tuple[int, int]:
        """Which kind of message it is, and how many bytes follow it."""
        message = Table.root(metadata, PREFIX)
        kind, body, place = message.number(1, "<B"), message.number(3), message.position(3)
        if kind == RECORD_BATCH and message.position(1) < place and message.lies_before(place):
            head = (struct.Struct(f"<{place}sq").unpack_from, bytes(metadata[:place]), len(metadata))
            self._heads = [head, *self._heads][:HEADS]
        return kind, body


def _table(*columns: list[int]) -> Ints:
    return np.stack([np.array(column, np.int64) for column in columns], axis=1)


class Shape(NamedTuple):
    """What the record batches of a file have in common."""

    nodes: int
    buffers: int
    compressed: bool


class Metadata:
    """Reads the numbers in the metadata of record batches.

    The metadata of record batches of one writer differs in a few numbers only. So one batch is taken apart,
    the others are compared with it word by word, and their numbers are picked from the same words. What looks
    different (empty batches do) is the next to be taken apart.
    """

    def __init__(self) -> None:
        self._templates: list[_Template] = []

    def shape(self, data: memoryview, messages: Ints, base: int = 0) -> Shape:
        """The shape of the first of some record batches."""
        words = _words(data)
        for template in self._templates:
            if not len(template.read(words, messages[:1], np.zeros(1, np.int64), template.empty(1))):
                return template.shape
        return self._learn(data, words, messages[0], base).shape

    def read(self, data: memoryview, messages: Ints, shape: Shape, base: int = 0) -> tuple[Ints, Ints]:
        """For each batch: per node its length and nulls; per buffer its first byte in the data and its size.

        All of them must have the shape. `base` is where in the file the data begins.
        """
        words = _words(data)
        numbers = np.empty((len(messages), 2 * (shape.nodes + shape.buffers)), np.int64)
        rest = np.arange(len(messages))
        for template in self._templates:
            if template.shape == shape:
                rest = template.read(words, messages, rest, numbers)
        while len(rest):
            template = self._learn(data, words, messages[rest[0]], base)
            if template.shape != shape:
                where = base + int(messages[rest[0], 0])
                raise Truncated(f"the record batch at byte {where} has other columns or compression")
            numbers[rest[0]] = template.first
            rest = template.read(words, messages, rest[1:], numbers)
        pairs = numbers.reshape(len(messages), -1, 2)
        nodes, buffers = pairs[:, : shape.nodes], pairs[:, shape.nodes :]
        if numbers.min(initial=0) < 0 or (buffers[:, :, 0] > messages[:, 2:] - buffers[:, :, 1]).any():
            raise Truncated("buffers lie outside their record batch")
        buffers[:, :, 0] += messages[:, :1] + messages[:, 1:2]
        return nodes, buffers

    def _learn(self, data: memoryview, words: Ints, message: Ints, base: int) -> "_Template":
        offset, size, _ = message.tolist()
        template = _Template(data, words, offset, size, base)
        if len(self._templates) < TEMPLATES:
            self._templates.append(template)
        return template


def _words(data: memoryview) -> Ints:
    return np.frombuffer(data, np.int64, len(data) // 8)


class _Template:
    """One record batch's metadata, taken apart: where it keeps its numbers, and all that is not a number."""

    def __init__(self, data: memoryview, words: Ints, offset: int, size: int, base: int) -> None:
        metadata = data[offset : offset + size]
        marker, length = struct.unpack_from("<Ii", metadata)
        message = Table.root(metadata, PREFIX)
        if marker != CONTINUATION or length + PREFIX != size or message.number(1, "<B") != RECORD_BATCH:
            raise Truncated(f"no record batch at byte {base + offset}")
        batch = message.table(2)
        both = batch.vector(1), batch.vector(2)
        self.shape = Shape(both[0][1], both[1][1], bool(batch.position(3)))
        self.first = [n for start, count in both for n in struct.unpack_from(f"<{2 * count}q", metadata, start)]
        single = [position for position in (message.position(3), batch.position(0)) if position]
        places = single + [start + 8 * i for start, count in both for i in range(2 * count)]
        if batch.number(0) != self.first[0]:
            raise Truncated(f"a column of the record batch at byte {base + offset} is shorter than it")
        self._rows = [position // 8 for position in (batch.position(0),) if position]
        aligned = size % 8 == 0 and not any(place % 8 for place in [offset, *places])
        self._size = size if aligned else -1  # -1: no other is like it
        numbers = [place // 8 for place in places]
        self._numbers = np.array(numbers[len(single) :], np.int64)
        self._fixed = np.setdiff1d(np.arange(size // 8), numbers)
        self._text = words[offset // 8 : (offset + size) // 8][self._fixed] if aligned else np.empty(0, np.int64)

    def empty(self, count: int) -> Ints:
        """Room for the numbers of this many record batches."""
        return np.empty((count, 2 * (self.shape.nodes + self.shape.buffers)), np.int64)

    def read(self, words: Ints, messages: Ints, some: Ints, numbers: Ints) -> Ints:
        """Fill in the numbers of those of some record batches that are like this one, and tell which are not."""
        chosen = messages.take(some, axis=0)
        like = (chosen[:, 1] == self._size) & (chosen[:, 0] & 7 == 0)
        start = chosen[:, :1] >> 3
        if not like.all():
            start = start[like]
        same = (words.take(start + self._fixed) == self._text).all(axis=1)
        like[like] = same
        start = start[same]
        found = words.take(start + self._numbers)
        if (words.take(start + self._rows) != found[:, :1]).any() if self._rows else found[:, 0].any():
            raise Truncated("a column is shorter than its record batch")
        numbers[some[like]] = found
        unlike: Ints = some[~like]
        return unlike
