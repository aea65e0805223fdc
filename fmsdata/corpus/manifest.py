"""The manifest of a corpus: all of its Arrow shards in one file, from which any process plans.

`fmsdata index` writes it to `meta/` beside the counts. It is an Arrow IPC file with a row for each
shard, sorted by name, and without compression: it is mapped, so the processes of a node share its
pages. Nothing here makes an object per shard. Names are looked up when they are needed.

With it goes what the corpus looked like: when its folders changed last (on a local disk), where it
is (on any other), and the counts beside it. `planned.py` compares them.

A corpus that has grown has a generation for each shard: 0 for those of its first index, and the next
number with each one that found new shards. A corpus that has not grown has no such column.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.errors import CountsError, DataError
from fmsdata.formats.base import Blocks
from fmsdata.formats.damage import DAMAGE, Truncated
from fmsdata.storage.clients.base import Entry

Value = TypeVar("Value", covariant=True)
FILE = "fmsdata-manifest.ipc"  # in `meta`; it does not end in .arrow, so that nobody takes it for a shard
VERSION = b"1"
AT_ONCE = 1 << 14  # names that are made objects at once
NUMBERS = ("size", "documents", "tokens")
COLUMNS: dict[str, Any] = {
    "name": pa.large_string(),
    "size": pa.int64(),
    "version": pa.large_string(),
    "documents": pa.int64(),
    "tokens": pa.int64(),
    # of consecutive parts of the shard, where its metadata says that
    "block_documents": pa.large_list(pa.int64()),
    "block_tokens": pa.large_list(pa.int64()),
}
SCHEMA = pa.schema(COLUMNS)
GROWN = SCHEMA.append(pa.field("generation", pa.int64()))


class CountsFile(NamedTuple):
    """A file of counts beside the manifest."""

    size: int
    version: str | None
    digest: str  # of its bytes


class Corpus(NamedTuple):
    """What a corpus looked like when its manifest was made."""

    url: str | None  # where it was, if not on a local disk
    column: str | None  # whose tokens were counted
    folders: Mapping[str, int]  # when folders on a local disk changed last, in nanoseconds
    counts: Mapping[str, CountsFile]  # the files of counts beside the manifest
    others: Sequence[str]  # folders with files of other formats


class Shards(NamedTuple):
    """The columns of a manifest, in the order of the names."""

    names: Sequence[str]
    sizes: Sequence[int]
    versions: Sequence[str | None]
    documents: Sequence[int]
    tokens: Sequence[int]
    blocks: Sequence[Blocks | None] = ()  # of some of the shards; none: of no shard


class Growth(NamedTuple):
    """In which generation each shard came, and the last one that running states may take up."""

    generations: Sequence[int]
    appended: int


def write_manifest(shards: Shards, corpus: Corpus, growth: Growth | None = None) -> bytes:
    """The manifest as bytes of a file. `growth` is that of a corpus that has grown."""
    metadata = {b"fmsdata": VERSION, b"corpus": json.dumps(corpus._asdict(), sort_keys=True).encode()}
    blocks = shards.blocks or [None] * len(shards.names)
    columns: list[Any] = [*shards[:-1], *([each and each[i] for each in blocks] for i in (0, 1))]
    schema = SCHEMA
    if growth is not None:
        schema, columns = GROWN, [*columns, growth.generations]
        metadata[b"appended"] = str(growth.appended).encode()
    schema = schema.with_metadata(metadata)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


class Manifest:
    """A manifest that was opened. A copy in another process maps the same file.

    >>> Manifest.of_file(Path("corpus/meta/fmsdata-manifest.ipc")).rows("web").names[0]   # doctest: +SKIP
    'part-0.arrow'
    """

    def __init__(self, data: pa.Buffer, name: str) -> None:
        """`name` is for errors."""
        self._data = data
        self._file: tuple[str, tuple[int, ...]] | None = None  # that is mapped, and which one it was
        try:
            self._read(data)
        except (*DAMAGE, KeyError, TypeError, AttributeError) as error:
            raise CountsError(
                f"{name}: not a readable manifest ({error}); restore it, or run `fmsdata index` to make a new one, "
                "without the history of a corpus that has grown"
            ) from None

    @classmethod
    def of_file(cls, path: Path) -> "Manifest":
        """Map a file."""
        try:
            identity = _identity(path)
            with pa.memory_map(str(path)) as mapped:
                data = mapped.read_buffer()
        except OSError as error:
            raise CountsError(f"{path}: can't be read ({error}); run `fmsdata index` again") from None
        manifest = cls(data, str(path))
        manifest._file = str(path), identity
        return manifest

    @classmethod
    def of_bytes(cls, data: bytes, name: str = FILE) -> "Manifest":
        """Open a manifest that is in memory; `name` is for errors."""
        return cls(pa.py_buffer(data), name)

    def _read(self, data: pa.Buffer) -> None:
        import pyarrow.compute as pc  # which takes 20 ms

        reader = pa.ipc.open_file(pa.BufferReader(data))
        metadata = reader.schema.metadata or {}
        columns = reader.schema.remove_metadata()
        if metadata.get(b"fmsdata") != VERSION or not (columns.equals(SCHEMA) or columns.equals(GROWN)):
            raise Truncated("it has other columns, or is of another version of fmsdata")
        if reader.num_record_batches != 1:
            raise Truncated(f"it has {reader.num_record_batches} parts")
        self.batch = batch = reader.get_batch(0)
        batch.validate(full=True)
        self.names, self.versions = batch.column("name"), batch.column("version")
        if self.names.null_count or not pc.all(pc.less(self.names[:-1], self.names[1:]), min_count=0).as_py():
            raise Truncated("its names are not in order")
        numbers = [_numbers(batch.column(name)) for name in NUMBERS]
        self.sizes, self.documents, self.tokens = numbers
        self.generations = _numbers(batch.column("generation")) if columns.equals(GROWN) else None
        counts = [*numbers, *([] if self.generations is None else [self.generations])]
        if any(len(column) and column.min() < 0 for column in counts):
            raise Truncated("a number is negative")
        self._blocks = [_Lists(batch.column(name)) for name in ("block_documents", "block_tokens")]
        if not np.array_equal(self._blocks[0].ends, self._blocks[1].ends):
            raise Truncated("blocks with documents, and others with tokens")
        self.appended = int(metadata.get(b"appended", b"0"))  # the last generation that running states may take up
        made = json.loads(metadata[b"corpus"])
        self.corpus = Corpus(
            None if made["url"] is None else str(made["url"]),
            None if made["column"] is None else str(made["column"]),
            {str(name): int(time) for name, time in made["folders"].items()},
            {str(name): CountsFile(*file) for name, file in made["counts"].items()},
            [str(name) for name in made["others"]],
        )

    def blocks(self, row: int) -> Blocks | None:
        """The documents and tokens of parts of a shard, if they are known."""
        documents, tokens = (column.of(row) for column in self._blocks)
        return (documents, tokens) if len(documents) else None

    def rows(self, folder: str) -> "Rows | None":
        """The shards below a folder of the corpus, "" for all; None if there are none."""
        inside = f"{folder}/" if folder else ""
        first, stop = self.place(inside), self.place(f"{folder}0") if folder else len(self.names)  # "0" follows "/"
        return Rows(self, first, stop, inside) if first < stop else None

    def place(self, name: str, first: int = 0) -> int:
        """How many names come before this one. They are not before `first`."""
        return bisect_left(range(len(self.names)), name, lo=first, key=lambda place: self.names[place].as_py())

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is not None and _identity(Path(self._file[0])) == self._file[1]:
            return _map_again, self._file
        return Manifest.of_bytes, (
            self._data.to_pybytes(),
        )  # it was written again: this is the only copy of the old one


def _numbers(column: Any) -> Ints:
    """The numbers of a column, where they are. (`to_numpy` would import pandas.)"""
    if column.null_count:
        raise Truncated("a number is missing")
    return np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column)]


class _Lists:
    """A column of lists of numbers, where they are. One that is missing is empty."""

    def __init__(self, column: Any) -> None:
        self.ends: Ints = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
        self._values = _numbers(column.values)

    def of(self, row: int) -> Ints:
        return self._values[self.ends[row] : self.ends[row + 1]]


def _strings(*texts: str) -> Any:
    """An array of strings. (`pa.array` would import pandas.)"""
    ends = offsets(np.array([len(text) for text in texts]))
    return pa.LargeStringArray.from_buffers(
        len(texts), pa.py_buffer(ends.tobytes()), pa.py_buffer("".join(texts).encode())
    )


def _map_again(path: str, identity: tuple[int, ...]) -> Manifest:
    manifest = Manifest.of_file(Path(path))
    if manifest._file != (path, identity):
        raise DataError(f"{path}: was written again while the processes of a run were started; start it again")
    return manifest


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced; nothing if it is gone."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Rows:
    """Consecutive shards of a manifest: those of a folder. Their names are relative to it."""

    def __init__(self, manifest: Manifest, first: int, stop: int, inside: str) -> None:
        """`inside` is what all of the names begin with: the folder and a slash."""
        self.manifest, self._first, self._stop, self._inside = manifest, first, stop, inside

    def __len__(self) -> int:
        return self._stop - self._first

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.manifest, self._first, self._stop, self._inside)

    @property
    def names(self) -> "Names":
        return Names(self)

    @property
    def entries(self) -> "Entries":
        """Names, sizes and versions."""
        return Entries(self)

    @property
    def sizes(self) -> Ints:
        return self._part(self.manifest.sizes)

    @property
    def documents(self) -> Ints:
        return self._part(self.manifest.documents)

    @property
    def tokens(self) -> Ints:
        return self._part(self.manifest.tokens)

    def blocks(self, row: int) -> Blocks | None:
        return self.manifest.blocks(self._first + row)

    @property
    def generations(self) -> Ints | None:
        return None if self.manifest.generations is None else self._part(self.manifest.generations)

    @property
    def examples(self) -> list[str]:
        """The shards directly in the folder, and the first one in each of the folders in it."""
        found: list[str] = []
        place = self._first
        while place < self._stop:
            found.append(self.name(place - self._first))
            folder, slash, _ = found[-1].partition("/")
            behind = f"{self._inside}{folder}0"  # "0" follows "/"
            place = self.manifest.place(behind, place) if slash else place + 1
        return found

    def name(self, row: int) -> str:
        return str(self.manifest.names[self._first + row].as_py())[len(self._inside) :]

    def some(self, part: slice) -> list[str]:
        names = self.manifest.names[self._first : self._stop][part]
        return [str(name)[len(self._inside) :] for name in names.to_pylist()]

    def as_text(self, known: Ints | None = None) -> Iterator[memoryview]:
        """Some or all rows as text, as `Counts.digest` takes them."""
        import pyarrow.compute as pc

        manifest, columns = self.manifest, ("documents", "tokens")
        line, comma, nothing = _strings("\n", ",", "")
        rows = manifest.batch.slice(self._first, len(self))
        if known is not None:
            rows = rows.take(known)
        for first in range(0, rows.num_rows, AT_ONCE):
            part = rows.slice(first, AT_ONCE)
            names = pc.utf8_slice_codeunits(part.column("name"), len(self._inside))
            documents, tokens = (part.column(name).cast(pa.large_string()) for name in columns)
            text = pc.binary_join_element_wise(line, names, comma, documents, comma, tokens, nothing)
            yield memoryview(text.buffers()[2])

    def version(self, row: int) -> str | None:
        version: str | None = self.manifest.versions[self._first + row].as_py()
        return version

    def _part(self, column: Ints) -> Ints:
        return column[self._first : self._stop]


class _OfRows(Sequence[Value]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, item: int) -> Value: ...

    @overload
    def __getitem__(self, item: slice) -> list[Value]: ...

    def __getitem__(self, item: int | slice) -> Value | list[Value]:
        if isinstance(item, slice):
            return self._some(item)
        return self._item(range(len(self))[item])

    def _item(self, row: int) -> Value:
        raise NotImplementedError

    def _some(self, part: slice) -> list[Value]:
        return [self._item(row) for row in range(len(self))[part]]

    def __iter__(self) -> Iterator[Value]:
        for first in range(0, len(self), AT_ONCE):
            yield from self._some(slice(first, first + AT_ONCE))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self):,}>"


class Names(_OfRows[str]):
    """The names of shards, in order."""

    def _item(self, row: int) -> str:
        return self._rows.name(row)

    def _some(self, part: slice) -> list[str]:
        return self._rows.some(part)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The place of a name, found by halving."""
        found = bisect_left(self, value, start, len(self) if stop is None else min(stop, len(self)))
        if found < len(self) and self[found] == value:
            return found
        raise ValueError(f"{value!r} is not one of the names")

    def __contains__(self, value: object) -> bool:
        found = bisect_left(self, str(value))
        return found < len(self) and self[found] == value


class Entries(_OfRows[Entry]):
    """The shards as files, in the order of their names."""

    def _item(self, row: int) -> Entry:
        return Entry(self._rows.name(row), int(self._rows.sizes[row]), self._rows.version(row))
