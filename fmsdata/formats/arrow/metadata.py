"""The metadata of record batches: their numbers of rows, and the places of their buffers."""

import struct
from typing import NamedTuple

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.core.ranges import inside
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
        if nodes.min(initial=0) < 0 or not inside(buffers[:, :, 0], buffers[:, :, 1], messages[:, 2:]):
            raise Truncated("buffers are outside their record batch")
        buffers[:, :, 0] += messages[:, :1] + messages[:, 1:2]
        return nodes, buffers

    def _learn(self, data: memoryview, words: Ints, message: Ints, base: int) -> "_Template":
        template = _Template(data, words, message.tolist(), base)
        if len(self._templates) < TEMPLATES:
            self._templates.append(template)
        return template


def _words(data: memoryview) -> Ints:
    return np.frombuffer(data, np.int64, len(data) // 8)


class _Template:
    """Parsed metadata of a record batch: the positions of its numbers, and all other words."""

    def __init__(self, data: memoryview, words: Ints, place: list[int], base: int) -> None:
        offset, size, body = place
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
        if message.number(3) != body:
            raise _other_size()
        aligned = size % 8 == 0 and not any(place % 8 for place in [offset, *places])
        self._size = size if aligned else -1  # -1: no other batch can be compared with it
        numbers = [place // 8 for place in places]
        self._has_body, self._single = bool(message.position(3)), len(single)
        self._numbers = np.array(numbers, np.int64)
        self._fixed = np.setdiff1d(np.arange(size // 8), numbers)
        self._words = words[offset // 8 : (offset + size) // 8].copy() if aligned else np.empty(0, np.int64)
        self._text = self._words[self._fixed] if aligned else self._words
        self._is_number = np.zeros(len(self._words), bool)
        self._is_number[numbers if aligned else []] = True

    def empty(self, count: int) -> Ints:
        """Room for the numbers of this many record batches."""
        return np.empty((count, 2 * (self.shape.nodes + self.shape.buffers)), np.int64)

    def read(self, words: Ints, messages: Ints, which: Ints, numbers: Ints) -> Ints:
        """Fill in the numbers of those in `which` that look like this one. Returns the others."""
        if len(which) == len(messages) and (found := self._read_all(words, messages)) is not None:
            numbers[:] = found[:, self._single :]
            return which[:0]
        chosen = messages.take(which, axis=0)
        like = (chosen[:, 1] == self._size) & (chosen[:, 0] & 7 == 0)
        if not like.all():
            chosen = chosen[like]
        start = chosen[:, :1] >> 3
        same = (words.take(start + self._fixed) == self._text).all(axis=1)
        if not same.all():
            start, chosen = start[same], chosen[same]
            like[like] = same
        found = words.take(start + self._numbers)
        self._require(found, chosen)
        numbers[which[like]] = found[:, self._single :]
        unlike: Ints = which[~like]
        return unlike

    def _read_all(self, words: Ints, messages: Ints) -> Ints | None:
        """The numbers of record batches that are all like this one, if `words` is nothing but their metadata."""
        size = len(self._words)
        if not size or len(words) != len(messages) * size or np.count_nonzero(messages[:, 1] != self._size):
            return None
        table = words.reshape(-1, size)
        if not ((table == self._words) | self._is_number).all():
            return None
        found = table.take(self._numbers, axis=1)
        self._require(found, messages)
        return found

    def _require(self, found: Ints, messages: Ints) -> None:
        """Raise if what is said twice differs. A field that was left out is 0."""
        body = found[:, 0] if self._has_body else 0
        rows = found[:, self._single - 1] if self._single > self._has_body else 0
        if np.count_nonzero(found[:, self._single] != rows):
            raise _short_column()
        if np.count_nonzero(messages[:, 2] != body):
            raise _other_size()


def _other_size() -> Truncated:
    return Truncated("a record batch has another size than the footer says")


def _short_column() -> Truncated:
    return Truncated("a column is shorter than its record batch")
