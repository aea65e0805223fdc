"""Files of text in every format, for the tests of every folder."""

import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from fmsdata.core.blocks import Block
from fmsdata.formats.base import Documents

Texts = Sequence[str | None]
SUFFIXES = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst", "zst")


def in_frames(data: bytes, compress: Callable[[bytes], bytes], size: int) -> bytes:
    """The data in frames of this many bytes, wherever lines end."""
    return b"".join(compress(data[i : i + size]) for i in range(0, max(1, len(data)), size))


def encode(
    texts: Texts, suffix: str, *, frame: int = 1 << 30, rows: int = 7, column: str = "text", kind: Any = None
) -> bytes:
    """A file of texts. Null is an empty line where there is no null."""
    if suffix == "parquet":
        sink = io.BytesIO()
        array: Any = pa.array(texts, pa.string())
        array = array.dictionary_encode() if kind == "dictionary" else array.cast(kind or pa.string())
        pq.write_table(pa.table({"id": range(len(texts)), column: array}), sink, row_group_size=rows)
        return sink.getvalue()
    lines = [json.dumps({"id": i, column: text}) for i, text in enumerate(texts)] if "jsonl" in suffix else texts
    data = "".join(f"{line or ''}\n" for line in lines).encode()
    if suffix.endswith("gz"):
        return in_frames(data, gzip.compress, frame)
    return in_frames(data, zstandard.ZstdCompressor().compress, frame) if suffix.endswith("zst") else data


def write(path: Path, texts: Texts, **options: Any) -> Path:
    """The same, to a file whose name says the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(texts, path.name.partition(".")[2], **options))
    return path


def write_source(folder: Path, texts: Texts, suffix: str, shards: int = 3, **options: Any) -> Path:
    for shard in range(shards):
        write(folder / f"part-{shard}.{suffix}", texts[shard::shards], **options)
    return folder


def of_block(block: Block[Any]) -> list[bytes]:
    """The documents of a block."""
    places = zip(block.array.tolist(), block.start.tolist(), block.length.tolist(), strict=True)
    return [bytes(block.arrays[array][start : start + length]) for array, start, length in places]


def of_stream(parts: Sequence[Documents]) -> list[bytes]:
    """The documents of parts of a stream."""
    found: list[bytes] = []
    for part in parts:
        assert part.first == len(found)
        found += [bytes(part.tokens[part.ends[i] : part.ends[i + 1]]) for i in range(len(part))]
    return found


def expected(texts: Texts) -> list[bytes]:
    return [(text or "").encode() for text in texts]
