"""The documents that are stored, read with plain libraries: independent of what is tested."""

import gzip
import io
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from fmsdata.corpus.listing import list_shards
from fmsdata.corpus.selection import check_files
from fmsdata.corpus.tokenizer import Tokenizer, open_tokenizer
from fmsdata.errors import DataError
from fmsdata.formats.compression import zstd_library
from fmsdata.storage.local import Recent
from fmsdata.storage.location import Location
from fmsdata.storage.seekable import RemoteFile

Document: TypeAlias = tuple[str, str, int]  # source, shard, number in the shard
Stored: TypeAlias = Mapping[Document, npt.NDArray[np.int64]]
OPEN_SHARDS = 16
RECENT_BATCHES, REMOTE_BUFFER = 4, 1 << 20  # of a remote shard


class StoredDocuments(Mapping[Document, npt.NDArray[np.int64]]):
    """All documents that an epoch must contain, read with plain libraries, each when it is requested.

    Stripped tokens are -1. Text becomes tokens with `tokenizer` (see `fmsdata.Tokenize`); without it, its
    tokens are its bytes. `files` are those of sources that do not read their whole folder.

    >>> StoredDocuments({"web": "corpus/web"})["web", "part-0.arrow", 17]     # doctest: +SKIP
    array([ 10, 522,  73])
    """

    def __init__(
        self,
        sources: Mapping[str, str | Path | Location],
        *,
        strip: Iterable[int] = (),
        min_length: int = 1,
        column: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        tokenizer: object = "bytes",
        files: Mapping[str, Sequence[str] | None] | None = None,
    ) -> None:
        self._folders = {source: Location(folder, storage_options) for source, folder in sources.items()}
        self._files = {source: check_files((files or {}).get(source)) for source in sources}
        self._tokenizer = open_tokenizer(tokenizer)
        self._strip, self._min_length, self._column = np.array(sorted(strip), np.int64), max(1, min_length), column
        self._shards: Recent[_PlainShard | _PlainText] = Recent(OPEN_SHARDS)

    def __repr__(self) -> str:
        return f"StoredDocuments({', '.join(f'{source}: {folder}' for source, folder in self._folders.items())})"

    def __getitem__(self, document: Document) -> npt.NDArray[np.int64]:
        source, shard, number = document
        path = self._folders[source] / shard
        opened = self._shards.get(path.url, lambda: self._open(path))
        if number >= opened.documents:
            raise KeyError(document)
        tokens = opened.document(number)
        kept = np.flatnonzero(~np.isin(tokens, self._strip))
        if not len(kept) or kept[-1] + 1 - kept[0] < self._min_length:
            raise KeyError(document)
        stored = np.full(len(tokens), -1, np.int64)
        stored[kept[0] : kept[-1] + 1] = tokens[kept[0] : kept[-1] + 1]
        return stored

    def __iter__(self) -> Iterator[Document]:
        for source, folder in self._folders.items():
            for name in list_shards(folder, self._files[source]).names:
                shard = self._shards.get((folder / name).url, partial(self._open, folder / name))
                documents = ((source, name, number) for number in range(shard.documents))
                yield from (document for document in documents if document in self)

    def __len__(self) -> int:
        return self._count

    def _open(self, path: Location) -> "_PlainShard | _PlainText":
        return (_PlainShard if path.name.endswith(".arrow") else partial(_PlainText, self._tokenizer))(
            path, self._column
        )

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self)


def stored_documents(
    sources: Mapping[str, str | Path | Location],
    *,
    strip: Iterable[int] = (),
    min_length: int = 1,
    column: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **text: Any,
) -> dict[Document, npt.NDArray[np.int64]]:
    """All documents that an epoch must contain, in memory. See `StoredDocuments`."""
    options: Any = {"strip": strip, "min_length": min_length, "column": column, "storage_options": storage_options}
    return dict(StoredDocuments(sources, **options, **text))


class _PlainShard:
    """A shard as pyarrow reads it."""

    def __init__(self, path: Location, column: str | None) -> None:
        self._batch: Callable[[int], pa.RecordBatch]
        try:
            file = (
                pa.memory_map(str(path.local))
                if path.local is not None
                else pa.PythonFile(io.BufferedReader(RemoteFile(path), REMOTE_BUFFER), "r")
            )
            try:
                reader = pa.ipc.open_file(file)
                recent: Recent[pa.RecordBatch] = Recent(1 if path.local is not None else RECENT_BATCHES)
                self._batch = lambda i: recent.get(i, lambda: reader.get_batch(i))
                count = reader.num_record_batches
            except pa.ArrowInvalid:
                file.seek(0)
                batches = list(pa.ipc.open_stream(file))
                self._batch, count = (lambda i: batches[i]), len(batches)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        names = self._batch(0).schema.names if count else []
        self._column = column or ("tokens" if "tokens" in names or len(names) != 1 else names[0])
        self._listed = count > 0 and not pa.types.is_integer(self._batch(0).column(self._column).type)
        rows = [self._batch(i).num_rows if self._listed else 1 for i in range(count)]
        self._ends = np.cumsum(rows).tolist()
        self.documents = sum(rows)

    def document(self, number: int) -> npt.NDArray[np.int64]:
        batch = bisect_right(self._ends, number)
        values: Any = self._batch(batch).column(self._column)
        if self._listed:
            values = values[number - self._ends[batch]].values  # counted from the end of the batch
        return np.array([] if values is None else values, np.int64)


class _PlainText:
    """A file of another format, as pyarrow, gzip, zstandard and json read it."""

    def __init__(self, tokenizer: Tokenizer, path: Location, column: str | None) -> None:
        self._tokenizer = tokenizer
        data = path.read_bytes()
        self._values: list[Any]
        if path.name.endswith(".parquet"):
            table = parquet.read_table(io.BytesIO(data))
            self._values = table.column(column or ("text" if "text" in table.column_names else "tokens")).to_pylist()
        else:
            if path.name.endswith(".gz"):
                data = gzip.decompress(data)
            elif path.name.endswith(".zst"):
                library = zstd_library()
                decompressor = library.ZstdDecompressor(max_window_size=1 << 31)
                data = decompressor.stream_reader(data, read_across_frames=True).read()
            lines = data.decode("utf-8-sig").split("\n")
            lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
            if ".jsonl" in path.name:
                self._values = [json.loads(line)[column or "text"] if line.strip() else None for line in lines]
            else:
                self._values = lines
        self.documents = len(self._values)

    def document(self, number: int) -> npt.NDArray[np.int64]:
        value = self._values[number]
        if not value or isinstance(value, list):  # documents without text are skipped
            return np.array(value or [], np.int64)
        return self._tokenizer.encode([value if isinstance(value, str) else value.decode()])[0].astype(np.int64)
