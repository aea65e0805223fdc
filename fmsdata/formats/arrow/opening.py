"""Opening an Arrow file or stream that is in memory or mapped: its schema, and where its record batches are."""

import struct

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.formats.arrow.framing import (
    MAGIC,
    PREFIX,
    Walker,
    footer_size,
    moved,
    read_footer,
    require_inside,
    require_stream,
)
from fmsdata.formats.base import ShardBytes
from fmsdata.formats.damage import Truncated

TAIL = 1 << 12  # bytes at the end of a file that are read first
STEP = 1 << 16  # bytes of a stream that are read at once


def read_framing(data: ShardBytes) -> tuple[pa.Schema, Ints]:
    """The schema, and for each record batch its offset and the sizes of metadata and body."""
    size = data.size
    head = data.read(0, PREFIX)
    if head[: len(MAGIC)] == MAGIC:
        tail = data.read(max(0, size - TAIL), size)
        length = footer_size(tail, size)
        footer = tail[len(tail) - length :] if length <= len(tail) else data.read(size - length, size)
        messages, _ = read_footer(footer)
        schema = pa.ipc.open_file(pa.py_buffer(b"".join([MAGIC, b"\0\0", footer]))).schema
    else:
        require_stream(head)
        walker = Walker()
        messages = _walk(walker, data)
        length = PREFIX + int(struct.unpack_from("<i", head, 4)[0])
        schema = pa.ipc.open_stream(pa.py_buffer(data.read(0, length))).schema
        if walker.schemas > 1 or (walker.dictionaries and not any(_has_dictionary(field.type) for field in schema)):
            raise Truncated("it has messages that do not belong to its schema")
    require_inside(messages, size)
    return schema, messages


def _walk(walker: Walker, data: ShardBytes) -> Ints:
    """The record batches of a stream, which is read piece by piece. Long bodies are skipped."""
    position, step = 0, STEP
    found: list[Ints] = []
    while position < data.size:
        walked = walker.walk(data.read(position, position + step), 0, position)
        found.append(moved(walked.messages, position))
        if walked.ended:
            return np.concatenate(found)
        if not walked.position:  # the metadata of the next message is longer than what was read
            if position + step >= data.size:
                break
            step *= 4
        position += walked.position
    raise Truncated("the end-of-stream marker is missing")


def _has_dictionary(kind: pa.DataType) -> bool:
    """Whether values of this type are in dictionaries, which are messages of their own."""
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
