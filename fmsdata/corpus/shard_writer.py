"""Writing shards: documents in, Arrow files out.

`ShardWriter` takes many documents at once, as one array of tokens and the ends of the documents in
it. What it writes depends on the documents alone, not on how many come with each call.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.tokens import Tokens
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.storage.atomic import replacing
from fmsdata.storage.location import Location

Layout = Literal["list", "batch"]
LAYOUTS = ("list", "batch")
ROWS = 1024  # documents in a record batch of lists
BATCH_TOKENS = 1 << 26  # at most in a record batch, but for a longer document: list offsets have 32 bits
LONGEST = (1 << 31) - 1  # tokens of a document


class ShardWriter:
    """Writes the documents of one shard. Use `writing_shard` to get one."""

    def __init__(self, writer: Any, schema: pa.Schema, layout: Layout, rows: int) -> None:
        self._writer, self._schema, self._layout, self._most_rows = writer, schema, layout, rows
        self._parts: list[Tokens] = []
        self._lengths: list[Ints] = []
        self._rows = self._tokens = 0  # in the parts
        self.documents = self.tokens = 0  # that were written

    def write(self, tokens: Tokens, ends: Ints) -> None:
        """Add documents: number `i` is `tokens[ends[i] : ends[i + 1]]`. The tokens must fit the type of the shard."""
        self.documents += len(ends) - 1
        self.tokens += int(ends[-1] - ends[0])
        if self._layout == "batch":
            kind = self._schema.field(0).type
            for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                self._writer.write_batch(pa.record_batch([pa.array(tokens[start:stop], kind)], schema=self._schema))
            return
        first, count = 0, len(ends) - 1
        while first < count:
            room = int(np.searchsorted(ends, ends[first] + BATCH_TOKENS - self._tokens, "right")) - 1
            stop = min(count, first + self._most_rows - self._rows, room)
            if stop <= first:
                if self._rows:
                    self.flush()
                    continue
                stop = first + 1
            self._parts.append(tokens[ends[first] : ends[stop]])
            self._lengths.append(np.diff(ends[first : stop + 1]))
            self._rows += stop - first
            self._tokens += int(ends[stop] - ends[first])
            first = stop
            if self._rows == self._most_rows:
                self.flush()

    def flush(self) -> None:
        """Write the record batch in progress."""
        if not self._rows:
            return
        if self._tokens > LONGEST:
            raise ConfigError(
                f"a document has {counted(self._tokens, 'token')}; a shard holds at most {LONGEST:,} in one"
            )
        kind = self._schema.field(0).type.value_type
        ends = pa.array(offsets(np.concatenate(self._lengths)).astype(np.int32), pa.int32())
        values = pa.array(np.concatenate(self._parts), kind)
        self._parts, self._lengths, self._rows, self._tokens = [], [], 0, 0
        self._writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(ends, values)], schema=self._schema))


@contextmanager
def writing_shard(
    file: Location,
    *,
    dtype: npt.DTypeLike,
    layout: Layout = "list",
    column: str = "tokens",
    stream: bool = False,
    rows: int = ROWS,
) -> Iterator[ShardWriter]:
    """A writer for one shard, local or remote. The file is there, complete, when the context ends.

    A remote shard is held in memory until then.

    >>> with writing_shard(Location("corpus/web/part-0.arrow"), dtype=np.uint16) as writer:   # doctest: +SKIP
    ...     writer.write(np.array([5, 6, 7, 8, 9], np.uint16), np.array([0, 3, 5]))
    """
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r}: use 'list' or 'batch'")
    schema = pa.schema([(column, pa.list_(kind) if layout == "list" else kind)])
    open_writer: Any = pa.ipc.new_stream if stream else pa.ipc.new_file

    @contextmanager
    def writing(sink: Any) -> Iterator[ShardWriter]:
        with sink, open_writer(sink, schema) as writer:
            shard = ShardWriter(writer, schema, layout, rows)
            yield shard
            shard.flush()

    if file.local is not None:
        with replacing(file.local) as unfinished, writing(pa.OSFile(str(unfinished), "wb")) as shard:
            yield shard
    else:
        with writing(memory := pa.BufferOutputStream()) as shard:
            yield shard
        file.write_bytes(memory.getvalue().to_pybytes())


def write_shard(
    path: str | Path,
    documents: Iterable[npt.ArrayLike],
    *,
    dtype: npt.DTypeLike = np.uint32,
    layout: Layout = "list",
    column: str = "tokens",
    stream: bool = False,
    rows: int = ROWS,
) -> None:
    """Write tokenized documents as one shard.

    With `layout="list"` they are the rows of a list column, with `layout="batch"` each is a record
    batch.

    >>> write_shard("corpus/web/part-0.arrow", [[5, 6, 7], [8, 9]])   # doctest: +SKIP
    """
    kind = np.dtype(dtype)
    local = Location(Path(path))
    with writing_shard(local, dtype=kind, layout=layout, column=column, stream=stream, rows=rows) as writer:
        held: list[Tokens] = []
        for document in documents:
            held.append(_tokens(document, kind))
            if len(held) == rows:
                writer.write(*_joined(held))
                held.clear()
        if held:
            writer.write(*_joined(held))


def _tokens(document: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    tokens = np.asarray(document)
    if tokens.dtype.kind not in "iu":  # numpy takes some lists of large integers for floats
        tokens = np.asarray(document, dtype=object)
    if tokens.ndim != 1 or (tokens.dtype.kind == "O" and not all(isinstance(token, int) for token in tokens)):
        raise ConfigError(f"a document is a list of integers, not {np.asarray(document).dtype} of shape {tokens.shape}")
    if len(tokens) and not np.iinfo(dtype).min <= tokens.min() <= tokens.max() <= np.iinfo(dtype).max:
        raise ConfigError(f"tokens from {tokens.min()} to {tokens.max()} do not fit {dtype}; use a wider `dtype`")
    return tokens.astype(dtype)


def _joined(documents: list[Tokens]) -> tuple[Tokens, Ints]:
    return np.concatenate(documents), offsets(np.array([len(document) for document in documents], np.int64))
