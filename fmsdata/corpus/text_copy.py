"""Copies of text files that can't be entered in the middle.

A gzip file is usually one member, and a zstd file one frame: to read its last line, all of it must be
decompressed. The same holds for a Parquet file with large row groups. Such a file is copied once, to
the user's cache folder, as Parquet with small row groups, and its blocks are read from there. That
takes one pass over the file, and disk space for its text, compressed; of JSON, only the field.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from fmsdata.core.wording import counted
from fmsdata.corpus.progress import progress
from fmsdata.corpus.text_cache import TextCache, version_key
from fmsdata.corpus.text_documents import read_documents
from fmsdata.corpus.text_index import TextEntry
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.formats import format_of
from fmsdata.formats.base import Documents
from fmsdata.formats.compression import is_compressed
from fmsdata.storage.atomic import replacing
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

MOST_LINES = 4 << 20  # bytes that may be decompressed to read a line
MOST_ROWS = 16 << 20  # the same for a row group of Parquet
GROUP = 1 << 20  # bytes of text in a row group of a copy
COLUMN = "text"
log = logging.getLogger("fmsdata")


def needs_copy(name: str, entry: TextEntry) -> bool:
    """Whether reading one document of a file decodes too much of it."""
    if format_of(name).kind == "parquet":
        return entry.largest > MOST_ROWS
    return is_compressed(name) and entry.largest > MOST_LINES


def copy_files(
    folder: Location, files: Sequence[Entry], entries: dict[str, TextEntry], column: str | None
) -> dict[str, Path]:
    """The copies of those files that need one. Missing ones are made, while other processes of this user wait."""
    needed = [file for file in files if needs_copy(file.name, entries[file.name])]
    if not needed:
        return {}
    cache = TextCache(folder.storage)
    paths = {file.name: _path(cache, folder, file, column) for file in needed}
    if all(path.is_file() for path in paths.values()):
        return paths
    with cache.lock(f"{folder.absolute().url}\ncopies"):
        missing = [file for file in needed if not paths[file.name].is_file()]
        for file in missing:
            cache.clean(paths[file.name])
        if missing:
            size = sum(entries[file.name].nbytes for file in missing)
            log.warning(
                "%s: copying %d files with %s bytes of text to %s, because they can't be read from the middle; "
                "compress them in frames of at most %d MiB (Parquet: row groups of at most %d MiB), or prepare them",
                *(folder, len(missing), f"{size:,}", cache.folder, MOST_LINES >> 20, MOST_ROWS >> 20),
            )
            _make(folder, missing, entries, column, paths)
    return paths


def _path(cache: TextCache, folder: Location, file: Entry, column: str | None) -> Path:
    key = version_key(folder, file, "copy", format_of(file.name).kind, column or "")
    if key is None:
        raise DataError(
            f"{folder / file.name}: is compressed as a whole, and its filesystem does not say when it changes, so it "
            "can't be copied; compress it in smaller frames, or prepare the corpus"
        )
    return cache.path(key, "parquet")


def _make(
    folder: Location, files: Sequence[Entry], entries: dict[str, TextEntry], column: str | None, paths: dict[str, Path]
) -> None:
    with (
        progress(f"copying {folder.name}", len(files)) as done,
        ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
    ):

        def copy(file: Entry) -> int:
            size = make_copy(folder, file, column, paths[file.name], entries[file.name].documents)
            done()
            return size

        try:
            sizes = list(pool.map(copy, files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    log.warning("%s: copied %d files, which take %s bytes", folder, len(files), f"{sum(sizes):,}")


def make_copy(folder: Location, file: Entry, column: str | None, target: Path, documents: int) -> int:
    """Copy one file, and return the size of the copy."""
    import pyarrow.parquet as pq

    schema = pa.schema({COLUMN: pa.large_string()})
    try:
        with replacing(target) as unfinished:
            copied = 0
            with pq.ParquetWriter(
                unfinished, schema, compression="zstd", compression_level=1, use_dictionary=False
            ) as writer:
                for texts in _groups(read_documents(folder, file, column)):
                    writer.write_table(pa.table([texts], schema=schema))
                    copied += len(texts)
            if copied != documents:
                raise CountsError(
                    f"{folder / file.name}: holds {counted(copied, 'document')}, but {documents} when it was "
                    "indexed; run "
                    "`fmsdata index` to rebuild the index"
                )
        return target.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"{target.parent}: can't hold a copy of {folder / file.name} ({error.strerror or error}); set "
            "storage.cache to a folder with room, compress the file in smaller frames, or prepare the corpus"
        ) from None


def _groups(parts: Iterable[Documents]) -> Iterator[Any]:
    """The same documents, in row groups of about `GROUP` bytes. A longer document is alone in its group."""
    held: list[Any] = []
    room = GROUP
    for tokens, ends, _, _ in parts:
        first = 0
        while first < len(ends) - 1:
            stop = max(int(ends.searchsorted(ends[first] + room, "right")) - 1, first + 1)
            own = ends[first : stop + 1]
            data = pa.py_buffer(tokens[own[0] : own[-1]].data)
            held.append(pa.LargeStringArray.from_buffers(stop - first, pa.py_buffer((own - own[0]).data), data))
            room -= int(own[-1] - own[0])
            if room <= 0 or stop < len(ends) - 1:
                yield pa.concat_arrays(held)
                held, room = [], GROUP
            first = stop
    if held:
        yield pa.concat_arrays(held)
