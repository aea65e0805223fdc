"""The documents that are stored, read with plain pyarrow: independent of what is tested."""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.corpus.listing import find_shards
from fmsdata.errors import DataError
from fmsdata.storage.local import Recent
from fmsdata.storage.location import Location

Document: TypeAlias = tuple[str, str, int]  # source, shard, number in the shard
Stored: TypeAlias = Mapping[Document, npt.NDArray[np.int64]]
OPEN_SHARDS = 16
RECENT_BATCHES, REMOTE_BUFFER = 4, 1 << 20  # of a remote shard


class StoredDocuments(Mapping[Document, npt.NDArray[np.int64]]):
    """All documents that an epoch must contain, read with plain pyarrow, each when it is requested.

    Stripped tokens are -1.

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
    ) -> None:
        self._folders = {source: Location(folder, storage_options) for source, folder in sources.items()}
        self._strip, self._min_length, self._column = np.array(sorted(strip), np.int64), max(1, min_length), column
        self._shards: Recent[_PlainShard] = Recent(OPEN_SHARDS)

    def __getitem__(self, document: Document) -> npt.NDArray[np.int64]:
        source, shard, number = document
        path = self._folders[source] / shard
        opened = self._shards.get(path.url, lambda: _PlainShard(path, self._column))
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
            for name in find_shards(folder).names:
                shard = _PlainShard(folder / name, self._column)
                documents = ((source, name, number) for number in range(shard.documents))
                yield from (document for document in documents if document in self)

    def __len__(self) -> int:
        return self._count

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
) -> dict[Document, npt.NDArray[np.int64]]:
    """All documents that an epoch must contain, in memory. See `StoredDocuments`."""
    return dict(
        StoredDocuments(sources, strip=strip, min_length=min_length, column=column, storage_options=storage_options)
    )


class _PlainShard:
    """A shard as pyarrow reads it."""

    def __init__(self, path: Location, column: str | None) -> None:
        self._batch: Callable[[int], pa.RecordBatch]
        try:
            file = pa.memory_map(str(path.local)) if path.local is not None else pa.PythonFile(_open_remote(path), "r")
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


def _open_remote(path: Location) -> io.BufferedReader:
    return io.BufferedReader(_RemoteFile(path), REMOTE_BUFFER)


class _RemoteFile(io.RawIOBase):
    """A remote file, read in the ranges that are requested."""

    def __init__(self, path: Location) -> None:
        self._connection, self._path = path.connection, path.path
        self._size = self._connection.run(self._connection.info(self._path)).size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._place + len(buffer))
        data = self._connection.run(self._connection.read(self._path, self._place, max(self._place, stop))).data
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
