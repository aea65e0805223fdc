"""Writing shards: documents in, Arrow files out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.errors import ConfigError
from fmsdata.storage.atomic import replacing

Layout = Literal["list", "batch"]


def write_shard(
    path: str | Path,
    documents: Iterable[npt.ArrayLike],
    *,
    dtype: npt.DTypeLike = np.uint32,
    layout: Layout = "list",
    column: str = "tokens",
    stream: bool = False,
    rows: int = 1024,
) -> None:
    """Write tokenized documents as one shard.

    With `layout="list"` they are the rows of a list column, with `layout="batch"` each is a record
    batch.

    >>> write_shard("corpus/web/part-0.arrow", [[5, 6, 7], [8, 9]])   # doctest: +SKIP
    """
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    if layout not in ("list", "batch"):
        raise ConfigError(f"layout {layout!r}: use 'list' or 'batch'")
    schema = pa.schema([(column, pa.list_(kind) if layout == "list" else kind)])
    open_writer: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
    with (
        replacing(Path(path)) as unfinished,
        pa.OSFile(str(unfinished), "wb") as file,
        open_writer(file, schema) as writer,
    ):
        held: list[npt.NDArray[Any]] = []
        for document in documents:
            held.append(_tokens(document, np.dtype(dtype)))
            if layout == "batch":
                writer.write_batch(pa.record_batch([pa.array(held.pop(), kind)], schema=schema))
            elif len(held) == rows:
                writer.write_batch(_list_batch(held, schema))
                held.clear()
        if held:
            writer.write_batch(_list_batch(held, schema))


def _tokens(document: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    tokens = np.asarray(document)
    if tokens.dtype.kind not in "iu":  # numpy takes some lists of large integers for floats
        tokens = np.asarray(document, dtype=object)
    if tokens.ndim != 1 or (tokens.dtype.kind == "O" and not all(isinstance(token, int) for token in tokens)):
        raise ConfigError(f"a document is a list of integers, not {np.asarray(document).dtype} of shape {tokens.shape}")
    if len(tokens) and not np.iinfo(dtype).min <= tokens.min() <= tokens.max() <= np.iinfo(dtype).max:
        raise ConfigError(f"tokens from {tokens.min()} to {tokens.max()} do not fit {dtype}; use a wider `dtype`")
    return tokens.astype(dtype)


def _list_batch(documents: list[npt.NDArray[Any]], schema: pa.Schema) -> pa.RecordBatch:
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int32)
    values = pa.array(np.concatenate(documents), schema.field(0).type.value_type)
    return pa.record_batch([pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)], schema=schema)
