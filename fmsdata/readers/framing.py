"""The framing of Arrow IPC: which bytes of a file are which record batch, and what its metadata says.

pyarrow decodes record batches but does not tell where they lie, and that is what random access and range reads
need. Arrow describes its messages in flatbuffers; `Table` reads the little of that format which is used here.
"""

import struct

import numpy as np
import pyarrow as pa

from fmsdata.keys import Ints

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
RECORD_BATCH = 3
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
TEMPLATES = 8  # kinds of metadata to remember; a writer has two or three
PREFIX = 8  # the continuation marker and the metadata's size


class Truncated(Exception):
    """The bytes do not make up a whole Arrow file."""


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
        messages = _from_footer(data)
        schema = pa.ipc.open_file(buffer).schema
    elif len(data) >= PREFIX and struct.unpack_from("<I", data)[0] == CONTINUATION:
        messages = _from_stream(data)
        schema = pa.ipc.open_stream(buffer).schema
    else:
        raise Truncated("it does not start as an Arrow file does" if len(data) else "it is empty")
    if len(messages) and (messages.min() < 0 or int(messages.sum(axis=1).max()) > len(data)):
        raise Truncated("record batches lie beyond its end")
    return schema, messages


def _from_footer(data: memoryview) -> Ints:
    if len(data) < 18 or data[-6:] != MAGIC:
        raise Truncated("the end is missing")
    (size,) = struct.unpack_from("<i", data, len(data) - 10)
    footer = Table.root(data, len(data) - 10 - size)
    start, count = footer.vector(3)
    blocks = np.frombuffer(data, BLOCK, count, start) if count else np.empty(0, BLOCK)
    return np.stack([blocks[name].astype(np.int64) for name in ("offset", "metadata", "body")], axis=1)


def _from_stream(data: memoryview) -> Ints:
    messages: list[tuple[int, int, int]] = []
    offset = 0
    while True:
        if offset + PREFIX > len(data):
            raise Truncated("the end-of-stream marker is missing")
        marker, size = struct.unpack_from("<Ii", data, offset)
        if marker != CONTINUATION or size < 0:
            raise Truncated(f"no message at byte {offset}")
        if size == 0:
            return np.array(messages, np.int64).reshape(-1, 3)
        message = Table.root(data, offset + PREFIX)
        body = message.number(3)
        if message.number(1, "<B") not in (1, 2, 3) or body < 0:
            raise Truncated(f"no message at byte {offset}")
        if message.number(1, "<B") == RECORD_BATCH:
            messages.append((offset, PREFIX + size, body))
        offset += PREFIX + size + body


class Metadata:
    """The numbers in the metadata of a file's record batches.

    The metadata of record batches of one writer differs in a few numbers only. So one batch is taken apart,
    the others are compared with it word by word, and their numbers are picked from the same words. What looks
    different (empty batches do) is the next to be taken apart.
    """

    def __init__(self, buffer: pa.Buffer, messages: Ints) -> None:
        self._data = memoryview(buffer)
        self._messages = messages
        self._words = np.frombuffer(self._data, np.int64, buffer.size // 8)
        self._templates: list[_Template] = []
        self._shape = (0, 0, False)
        if len(messages):
            self._shape = self._learn(messages[0]).shape

    @property
    def compressed(self) -> bool:
        return self._shape[2]

    def read(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """For each batch: per node its length and nulls; per buffer its first byte in the file and its size."""
        messages = self._messages[begin:end]
        nodes, buffers, _ = self._shape
        numbers = np.empty((end - begin, 2 * (nodes + buffers)), np.int64)
        rest = np.arange(end - begin)
        for template in self._templates:
            rest = template.read(self._words, messages, rest, numbers)
        while len(rest):
            template = self._learn(messages[rest[0]])
            if template.shape != self._shape:
                raise Truncated(f"the record batch at byte {messages[rest[0], 0]} has other columns or compression")
            numbers[rest[0]] = template.first
            rest = template.read(self._words, messages, rest[1:], numbers)
        pairs = numbers.reshape(end - begin, -1, 2)
        if numbers.min(initial=0) < 0 or (pairs[:, nodes:, 0] > messages[:, 2:] - pairs[:, nodes:, 1]).any():
            raise Truncated("buffers lie outside their record batch")
        pairs[:, nodes:, 0] += messages[:, :1] + messages[:, 1:2]
        return pairs[:, :nodes], pairs[:, nodes:]

    def _learn(self, message: Ints) -> "_Template":
        template = _Template(self._data, self._words, *message[:2].tolist())
        if len(self._templates) < TEMPLATES:
            self._templates.append(template)
        return template


class _Template:
    """One record batch's metadata, taken apart: where it keeps its numbers, and all that is not a number."""

    def __init__(self, data: memoryview, words: Ints, offset: int, size: int) -> None:
        marker, length = struct.unpack_from("<Ii", data, offset)
        message = Table.root(data, offset + PREFIX)
        if marker != CONTINUATION or length + PREFIX != size or message.number(1, "<B") != RECORD_BATCH:
            raise Truncated(f"no record batch at byte {offset}")
        batch = message.table(2)
        both = batch.vector(1), batch.vector(2)
        self.shape = (both[0][1], both[1][1], bool(batch.position(3)))
        self.first = [n for start, count in both for n in struct.unpack_from(f"<{2 * count}q", data, start)]
        single = [position for position in (message.position(3), batch.position(0)) if position]
        places = single + [start + 8 * i for start, count in both for i in range(2 * count)]
        if batch.number(0) != self.first[0]:
            raise Truncated(f"a column of the record batch at byte {offset} is shorter than it")
        self._rows = [(position - offset) // 8 for position in (batch.position(0),) if position]
        aligned = size % 8 == 0 and not any(place % 8 for place in [offset, *places])
        self._size = size if aligned else -1  # -1: no other is like it
        numbers = [(place - offset) // 8 for place in places]
        self._numbers = np.array(numbers[len(single) :], np.int64)
        self._fixed = np.setdiff1d(np.arange(size // 8), numbers)
        self._text = words[offset // 8 : (offset + size) // 8][self._fixed] if aligned else words[:0]

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
