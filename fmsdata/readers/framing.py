"""The framing of Arrow IPC: which bytes of a file are which record batch, and what its metadata says.

pyarrow decodes record batches but does not tell where they lie, and that is what random access and range reads need. Arrow describes
its messages in flatbuffers; `Table` reads the little of that format which is used here.
"""

import struct

import numpy as np
import pyarrow as pa

from fmsdata.keys import Ints

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
RECORD_BATCH = 3
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
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
        if message.number(1, "<B") == RECORD_BATCH:
            messages.append((offset, PREFIX + size, body))
        offset += PREFIX + size + body


class Metadata:
    """The numbers in the metadata of a file's record batches, of which there must be at least one.

    The metadata of record batches of one writer differs in a few numbers only. So one batch is taken apart, the others are compared with it
    word by word, and their numbers are picked from the same words; those that look different are taken apart one by one.
    """

    def __init__(self, buffer: pa.Buffer, messages: Ints) -> None:
        self._data = memoryview(buffer)
        self._messages = messages
        self._words = np.frombuffer(buffer, np.int64, buffer.size // 8)
        offset, size, _ = messages[int(messages[:, 2].argmax())].tolist()
        self._places = places = _Places(self._data, offset)
        self._size = (
            size if places.aligned and offset % 8 == 0 else -1
        )  # of the metadata that looks like this one
        self.compressed = places.compressed
        if self._size > 0:
            fixed = np.ones(size // 8, bool)
            fixed[places.words] = False
            self._fixed = np.flatnonzero(fixed)
            self._template = self._words[offset // 8 : (offset + size) // 8][fixed]
            self._numbers = np.array(places.words[-2 * (places.node_count + places.buffer_count) :])

    def read(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """For each batch: per node its length and nulls; per buffer its first byte in the file and its size."""
        messages, places = self._messages[begin:end], self._places
        numbers = np.empty((end - begin, 2 * (places.node_count + places.buffer_count)), np.int64)
        alike = (messages[:, 1] == self._size) & (messages[:, 0] & 7 == 0)
        if alike.any():
            start = (messages[alike, 0] >> 3)[:, None]
            same = (self._words[start + self._fixed] == self._template).all(axis=1)
            alike[alike] = same
            numbers[alike] = self._words[start[same] + self._numbers]
        for odd in np.flatnonzero(~alike).tolist():
            other = _Places(self._data, int(messages[odd, 0]))
            if other.shape != places.shape:
                raise Truncated(
                    f"the record batch at byte {messages[odd, 0]} has other columns or compression"
                )
            numbers[odd] = other.read(self._data)
        pairs = numbers.reshape(end - begin, -1, 2)
        nodes, buffers = pairs[:, : places.node_count], pairs[:, places.node_count :]
        if numbers.min() < 0 or (buffers.sum(axis=2) > messages[:, 2:]).any():
            raise Truncated("buffers lie outside their record batch")
        buffers[:, :, 0] += messages[:, :1] + messages[:, 1:2]
        return nodes, buffers


class _Places:
    """Where one record batch's metadata keeps its numbers."""

    def __init__(self, data: memoryview, offset: int) -> None:
        message = Table.root(data, offset + PREFIX)
        batch = message.table(2)
        self._nodes, self.node_count = batch.vector(1)
        self._buffers, self.buffer_count = batch.vector(2)
        self.compressed = bool(batch.position(3))
        self.shape = (self.node_count, self.buffer_count, self.compressed)
        single = [position for position in (message.position(3), batch.position(0)) if position]
        both = ((self._nodes, self.node_count), (self._buffers, self.buffer_count))
        places = single + [start + 8 * i for start, count in both for i in range(2 * count)]
        self.aligned = not any((place - offset) % 8 for place in places)
        self.words = [(place - offset) // 8 for place in places]

    def read(self, data: memoryview) -> list[int]:
        nodes = struct.unpack_from(f"<{2 * self.node_count}q", data, self._nodes)
        return [*nodes, *struct.unpack_from(f"<{2 * self.buffer_count}q", data, self._buffers)]
