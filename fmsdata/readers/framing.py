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


class RecordBatch:
    """The metadata of one record batch: the positions of its numbers."""

    def __init__(self, data: memoryview, offset: int) -> None:
        message = Table.root(data, offset + PREFIX)
        header = message.table(2)
        self.rows = header.number(0)
        self.body_position = message.position(3)
        self.rows_position = header.position(0)
        self.nodes, self.node_count = header.vector(1)
        self.buffers, self.buffer_count = header.vector(2)
        self.compressed = bool(header.position(3))


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


def locate(buffer: pa.Buffer, messages: Ints, node: int, vector: int, itemsize: int) -> tuple[Ints, Ints]:
    """The byte where each record batch keeps the values of one primitive column, and how many there are.

    The metadata of record batches of one writer differs in a few numbers only. So one batch is taken apart, all others are compared with it
    word by word, and the numbers are picked from the same words. Where a batch looks different, the byte is -1.
    """
    start = np.full(len(messages), -1, np.int64)
    length = np.zeros(len(messages), np.int64)
    if not len(messages):
        return start, length
    offset, metadata, _ = messages[int(messages[:, 2].argmax())].tolist()
    batch = RecordBatch(memoryview(buffer), offset)
    numbers = [position for position in (batch.body_position, batch.rows_position) if position]
    numbers += range(batch.nodes, batch.nodes + 16 * batch.node_count, 8)
    numbers += range(batch.buffers, batch.buffers + 16 * batch.buffer_count, 8)
    if batch.compressed or any((position - offset) % 8 for position in numbers) or batch.buffer_count <= vector:
        return start, length
    alike = np.flatnonzero((messages[:, 1] == metadata) & (messages[:, 0] % 8 == 0))
    words = np.frombuffer(buffer, np.int64, buffer.size // 8)
    heads = words[(messages[alike, 0] // 8)[:, None] + np.arange(metadata // 8)]
    fixed = np.ones(metadata // 8, bool)
    fixed[[(position - offset) // 8 for position in numbers]] = False
    template = words[offset // 8 : (offset + metadata) // 8]
    rows, nulls = (heads[:, (batch.nodes + 16 * node + 8 * i - offset) // 8] for i in range(2))
    begin, size = (heads[:, (batch.buffers + 16 * vector + 8 * i - offset) // 8] for i in range(2))
    body = messages[alike, 2]
    good = (heads[:, fixed] == template[fixed]).all(axis=1) & (nulls == 0) & (rows >= 0) & (begin >= 0)
    first = messages[alike, 0] + metadata + begin
    good &= (rows * itemsize <= size) & (begin + size <= body) & (first % itemsize == 0)
    start[alike[good]] = first[good]
    length[alike[good]] = rows[good]
    return start, length
