"""The framing of Arrow IPC: which bytes of a file are which record batch.

pyarrow decodes record batches but does not say where they are, and random access and range reads
need that. A file lists its record batches in a footer. A stream has no such list, so it is walked
from message to message.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.core.ranges import inside
from fmsdata.formats.arrow.flatbuffers import Table
from fmsdata.formats.damage import Truncated

MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
SCHEMA, DICTIONARY, RECORD_BATCH = MESSAGES = (1, 2, 3)  # the kinds of messages
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
ALIGNMENT = 8  # bytes, of every message and every buffer
HEADS = 4  # beginnings of messages to remember
PREFIX = 8  # bytes of the continuation marker and the metadata's size
END = 10  # bytes of the footer's size and the magic, behind the footer
NOT_WHOLE = "not a whole Arrow IPC file, it is truncated or of another kind"


def require_stream(data: memoryview) -> None:
    """Raise if a stream does not start with these bytes."""
    if not len(data):
        raise Truncated("it is empty")
    if len(data) < PREFIX or struct.unpack_from("<I", data)[0] != CONTINUATION:
        raise not_arrow()


def not_arrow() -> Truncated:
    return Truncated("it does not start as an Arrow file does")


def no_record_batch(offset: int) -> Truncated:
    return Truncated(f"no record batch at byte {offset}")


def require_inside(messages: Ints, size: int) -> None:
    """Raise if some record batches are not inside a file of this size."""
    offset, metadata, body = messages.T
    if not inside(offset, metadata, size) or not inside(offset + metadata, body, size):
        raise Truncated("record batches reach beyond its end")
    if (short := metadata < PREFIX).any():
        raise no_record_batch(offset[short][0])


def moved(messages: Ints, by: int) -> Ints:
    """The same record batches at other offsets."""
    copy = messages.copy()
    copy[:, 0] += by
    return copy


def footer_size(tail: memoryview, size: int) -> int:
    """The number of bytes from the footer to the end of a file, read from its last bytes."""
    if size < 18 or tail[-len(MAGIC) :] != MAGIC:
        raise Truncated("the end is missing")
    footer = int(struct.unpack_from("<i", tail, len(tail) - END)[0])
    if not 0 < footer <= size - END:
        raise footer_too_large(footer)
    return footer + END


def footer_too_large(size: int) -> Truncated:
    return Truncated(f"its footer can't have {size} bytes")


def read_footer(footer: memoryview) -> tuple[Ints, int]:
    """The record batches that a footer lists, and the position of that list in it."""
    start, count = Table.root(footer, 0).vector(3)
    return listed_messages(footer[start : start + count * BLOCK.itemsize], count), start


def listed_messages(data: memoryview, count: int) -> Ints:
    """The record batches in a part of the footer's list."""
    blocks = np.frombuffer(data, BLOCK, count) if count else np.empty(0, BLOCK)
    messages = np.stack([blocks[name].astype(np.int64) for name in ("offset", "metadata", "body")], axis=1)
    if (messages % ALIGNMENT).any():
        raise Truncated("record batches are not aligned to 8 bytes")
    return messages


class Walked(NamedTuple):
    """The messages that a walk through some bytes came across."""

    messages: Ints  # the record batches, as `read_framing` returns them
    position: int  # of the next message
    ended: bool  # whether that is the end of the stream


class Walker:
    """Goes from message to message through bytes in which each directly follows the one before.

    Messages of one writer begin alike, up to the number that is the size of the body. So one
    message is parsed, and only that number is read of those that begin like it.
    """

    def __init__(self) -> None:
        self.schemas = self.dictionaries = 0  # messages of these kinds so far
        self._heads: list[tuple[Callable[[memoryview, int], tuple[Any, ...]], bytes, int]] = []

    def walk(self, data: memoryview, position: int = 0, base: int = 0) -> Walked:
        """The record batches from a position on whose metadata is complete.

        `base` is the data's first byte in the file.
        """
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
            size = PREFIX + length
            valid = marker == CONTINUATION and length >= 0
            if valid and (length == 0 or position + size > len(data)):
                return Walked(_table(offset, metadata, bodies), position, ended=length == 0)
            kind, body = self._parse(data[position : position + size]) if valid else (0, 0)
            if kind not in MESSAGES or body < 0:
                raise Truncated(f"no message at byte {base + position}")
            self.schemas += kind == SCHEMA
            self.dictionaries += kind == DICTIONARY
            if kind == RECORD_BATCH:
                offset.append(position)
                metadata.append(size)
                bodies.append(body)
            position += size + body

    def _parse(self, metadata: memoryview) -> tuple[int, int]:
        """The kind of a message, and the number of bytes that follow its metadata."""
        message = Table.root(metadata, PREFIX)
        kind, body, place = message.number(1, "<B"), message.number(3), message.position(3)
        if kind == RECORD_BATCH and message.position(1) < place and message.is_before(place):
            head = (struct.Struct(f"<{place}sq").unpack_from, bytes(metadata[:place]), len(metadata))
            self._heads = [head, *self._heads][:HEADS]
        return kind, body


def _table(*columns: list[int]) -> Ints:
    return np.stack([np.array(column, np.int64) for column in columns], axis=1)
