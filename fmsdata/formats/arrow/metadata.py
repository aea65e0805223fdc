"""The metadata of record batches: their numbers of rows, and the places of their buffers."""

import struct
from typing import NamedTuple

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.formats.arrow.flatbuffers import Table
from fmsdata.formats.arrow.framing import CONTINUATION, PREFIX, RECORD_BATCH, no_record_batch
from fmsdata.formats.damage import Truncated

TEMPLATES = 8  # kinds of metadata to remember; a writer has two or three


class Shape(NamedTuple):
    """What all record batches of a file have in common."""

    nodes: int
    buffers: int
    compressed: bool


class Metadata:
    """Reads the numbers in the metadata of record batches, many at a time.

    The metadata of one writer's record batches differs only in a few numbers. So one batch is
    parsed, the others are compared with it word by word, and their numbers are picked from the same
    words. A batch that looks different (as empty ones do) is parsed next.
    """

    def __init__(self) -> None:
        self._templates: list[_Template] = []

    def shape(self, data: memoryview, messages: Ints, base: int = 0) -> Shape:
        """The shape of the first record batch. `base` is the data's first byte in the file."""
        words = _words(data)
        for template in self._templates:
            if not len(template.read(words, messages[:1], np.zeros(1, np.int64), template.empty(1))):
                return template.shape
        return self._learn(data, words, messages[0], base).shape

    def read(self, data: memoryview, messages: Ints, shape: Shape, base: int = 0) -> tuple[Ints, Ints]:
        """The length and nulls of each node, and the first byte and size of each buffer, per batch.

        All batches must have this shape. `base` is the data's first byte in the file.
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
                offset = base + int(messages[rest[0], 0])
                raise Truncated(f"the record batch at byte {offset} has other columns or compression")
            numbers[rest[0]] = template.first
            rest = template.read(words, messages, rest[1:], numbers)
        pairs = numbers.reshape(len(messages), -1, 2)
        nodes, buffers = pairs[:, : shape.nodes], pairs[:, shape.nodes :]
        if numbers.min(initial=0) < 0 or (buffers[:, :, 0] > messages[:, 2:] - buffers[:, :, 1]).any():
            raise Truncated("buffers are outside their record batch")
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
    """Parsed metadata of a record batch: the positions of its numbers, and all other words."""

    def __init__(self, data: memoryview, words: Ints, offset: int, size: int, base: int) -> None:
        metadata = data[offset : offset + size]
        marker, length = struct.unpack_from("<Ii", metadata)
        message = Table.root(metadata, PREFIX)
        if marker != CONTINUATION or length + PREFIX != size or message.number(1, "<B") != RECORD_BATCH:
            raise no_record_batch(base + offset)
        batch = message.table(2)
        nodes, buffers = vectors = batch.vector(1), batch.vector(2)
        self.shape = Shape(nodes[1], buffers[1], bool(batch.position(3)))
        self.first = [n for start, count in vectors for n in struct.unpack_from(f"<{2 * count}q", metadata, start)]
        single = [position for position in (message.position(3), batch.position(0)) if position]
        places = single + [start + 8 * i for start, count in vectors for i in range(2 * count)]
        if batch.number(0) != self.first[0]:
            raise _short_column()
        self._rows = [position // 8 for position in (batch.position(0),) if position]
        aligned = size % 8 == 0 and not any(place % 8 for place in [offset, *places])
        self._size = size if aligned else -1  # -1: no other batch can be compared with it
        numbers = [place // 8 for place in places]
        self._numbers = np.array(numbers[len(single) :], np.int64)
        self._fixed = np.setdiff1d(np.arange(size // 8), numbers)
        self._text = words[offset // 8 : (offset + size) // 8][self._fixed] if aligned else np.empty(0, np.int64)

    def empty(self, count: int) -> Ints:
        """Room for the numbers of this many record batches."""
        return np.empty((count, 2 * (self.shape.nodes + self.shape.buffers)), np.int64)

    def read(self, words: Ints, messages: Ints, which: Ints, numbers: Ints) -> Ints:
        """Fill in the numbers of those in `which` that look like this one. Returns the others."""
        chosen = messages.take(which, axis=0)
        like = (chosen[:, 1] == self._size) & (chosen[:, 0] & 7 == 0)
        start = chosen[:, :1] >> 3
        if not like.all():
            start = start[like]
        same = (words.take(start + self._fixed) == self._text).all(axis=1)
        like[like] = same
        start = start[same]
        found = words.take(start + self._numbers)
        if (words.take(start + self._rows) != found[:, :1]).any() if self._rows else found[:, 0].any():
            raise _short_column()
        numbers[which[like]] = found
        unlike: Ints = which[~like]
        return unlike


def _short_column() -> Truncated:
    return Truncated("a column is shorter than its record batch")
