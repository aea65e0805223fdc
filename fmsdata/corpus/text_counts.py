"""The counts of a source of text, and what its files need to be read in blocks.

Each file has an entry: from the index beside the corpus, from the user's cache folder, or from one
pass over the file. (Parquet files say all of it in their footers.) Files that can only be decoded
in large parts are copied once, see `text_copy.py`.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fmsdata.core.ranges import Range
from fmsdata.core.wording import counted
from fmsdata.corpus.progress import progress
from fmsdata.corpus.text_cache import TextCache, version_key
from fmsdata.corpus.text_index import FILE, TextEntry, TextIndex, line_entry, read_table, write_table
from fmsdata.errors import ConfigError, CountsError, DataError, DeniedError, MissingError
from fmsdata.formats import format_of
from fmsdata.formats.base import Data, Reading, read_ranges
from fmsdata.formats.line_index import index_lines
from fmsdata.formats.parquet import NAMES, ParquetRows, read_parquet_footer
from fmsdata.prefetch.range_queue import drive
from fmsdata.storage.atomic import write_whole
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.io_thread import together
from fmsdata.storage.location import Location
from fmsdata.storage.mapped import MappedFile

log = logging.getLogger("fmsdata")


class TextSource(NamedTuple):
    """What is known of the files of a source."""

    entries: dict[str, TextEntry]
    place: Location | None  # the file beside the corpus that lists them
    tokenizer: str | None  # the identity of the tokenizer that counted tokens, if all files list some
    missing: list[str]  # files that the index beside the corpus lacks


def find_text(folder: Location, files: Sequence[Entry], column: str | None) -> TextSource:
    """The entries of text files, from an index or from the files."""
    found, index, tokenizer = _beside(folder, files, column)
    missing = [file for file in files if file.name not in found]
    lines = [file for file in missing if format_of(file.name).parse is not None]
    cache = TextCache(folder.storage)
    cached = {file.name: entry for file in lines if (entry := _cached(cache, folder, file)) is not None}
    uncached = [file for file in missing if file.name not in cached]
    if any(file.name not in cached for file in lines):
        cached |= _index_once(cache, folder, uncached, column)
    elif uncached:
        cached |= read_entries(folder, uncached, column)
    entries = {**found, **cached}
    if not index or any(entries[file.name].tokens is None for file in files):
        tokenizer = None
    unlisted = [file.name for file in missing] if index else []
    return TextSource({file.name: entries[file.name] for file in files}, index, tokenizer, unlisted)


def read_entries(folder: Location, files: Sequence[Entry], column: str | None) -> dict[str, TextEntry]:
    """Read the entries of text files from the files themselves, several at a time."""
    entries = try_entries(folder, files, column)
    for name, entry in entries.items():
        if entry is None:
            raise DataError(f"{folder / name}: holds tokens, but the source holds text; select files of one kind")
    return {name: entry for name, entry in entries.items() if entry is not None}


def try_entries(folder: Location, files: Sequence[Entry], column: str | None) -> dict[str, TextEntry | None]:
    """The same; None of files that hold tokens."""
    log.info("reading %d text files in %s to index them; `fmsdata index` keeps the index", len(files), folder)
    with progress(f"indexing {folder.name}", len(files)) as done:
        if folder.local is not None:
            return dict(zip((file.name for file in files), _read_local(folder.local, files, column, done), strict=True))
        return _read_remote(folder, files, column, done)


def entry_reading(name: str, file: Entry, column: str | None) -> Reading[TextEntry | None]:
    """Read the entry of one file; None if it holds tokens."""
    if format_of(file.name).parse is not None:
        return line_entry(file.size, file.version, (yield from index_lines(name, file.size)))
    footer = yield from read_parquet_footer(name, file.size)
    rows = ParquetRows(name, file.size, footer, column)
    if not rows.text:
        return None
    largest = max(rows.group_bytes, default=0)
    return TextEntry(file.size, file.version, rows.column, rows.documents, rows.estimate(), largest, None)


def _read_local(
    folder: Path, files: Sequence[Entry], column: str | None, done: Callable[[], None]
) -> list[TextEntry | None]:
    def read(file: Entry) -> TextEntry | None:
        with MappedFile(folder / file.name) as mapped:
            if (mapped.size, str(mapped.version.modified)) != (file.size, file.version):
                raise DataError(
                    f"{folder / file.name}: the file was written to while it was read; wait until it is whole"
                )
            entry = read_ranges(entry_reading(str(folder / file.name), file, column), mapped.read)
        done()
        return entry

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(read, files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read_remote(
    folder: Location, files: Sequence[Entry], column: str | None, done: Callable[[], None]
) -> dict[str, TextEntry | None]:
    connection = folder.connection
    entries: dict[str, TextEntry | None] = {}
    waiting = iter(files)

    async def read(path: str, version: str | None, wanted: Range) -> Data:
        return (await connection.read(path, wanted.start, wanted.stop, version)).data

    async def work() -> None:
        for file in waiting:
            place = folder / file.name
            entries[file.name] = await drive(
                entry_reading(str(place), file, column), partial(read, place.path, file.version)
            )
            done()

    connection.run(together(work() for _ in range(min(folder.storage.connections, len(files)))))
    return entries


def _index_once(cache: TextCache, folder: Location, files: Sequence[Entry], column: str | None) -> dict[str, TextEntry]:
    """Read entries and keep them, while other processes of this user wait for them."""
    try:
        with cache.lock(f"{folder.absolute().url}\nindex"):
            ready = {file.name: entry for file in files if (entry := _cached(cache, folder, file)) is not None}
            missing = [file for file in files if file.name not in ready]
            entries = read_entries(folder, missing, column) if missing else {}
            for file in missing:
                _keep(cache, folder, file, entries[file.name])
            return {**ready, **entries}
    except ConfigError as error:
        log.warning("%s: its index can't be kept, and is made at every start: %s", folder, error)
        return read_entries(folder, files, column)


def _cached(cache: TextCache, folder: Location, file: Entry) -> TextEntry | None:
    key = version_key(folder, file, "index")
    if key is None or format_of(file.name).parse is None:
        return None
    path = cache.path(key, "index")
    try:
        entries = read_table(path.read_bytes(), str(path)).entries
    except (OSError, CountsError):  # not there, or damaged: it is made again
        return None
    entry = entries.get(file.name)
    return entry if entry is not None and entry.size == file.size else None


def _keep(cache: TextCache, folder: Location, file: Entry, entry: TextEntry) -> None:
    key = version_key(folder, file, "index")
    if key is not None and format_of(file.name).parse is not None:
        try:
            write_whole(cache.path(key, "index"), write_table(TextIndex({file.name: entry})))
        except OSError as error:
            raise cache.unwritable(error) from None


def _beside(
    folder: Location, files: Sequence[Entry], column: str | None
) -> tuple[dict[str, TextEntry], Location | None, str | None]:
    """Entries in the nearest `meta` folder whose index lists any of the files."""
    folder = folder.absolute()
    for root in (folder, *folder.parents):
        index = root.once(TextIndex, partial(_read_index, root, folder))
        inside = "" if root is folder else f"{folder.inside(root)}/"
        listed = {
            file.name: index.entries[f"{inside}{file.name}"]
            for file in files
            if f"{inside}{file.name}" in index.entries
        }
        place = root / "meta" / FILE
        for file in files:
            if file.name in listed and listed[file.name].size != file.size:
                raise CountsError(
                    f"{place}: lists {inside}{file.name} with {counted(listed[file.name].size, 'byte')}, but "
                    "the file has "
                    f"{file.size:,}; run `fmsdata index {root}` to rebuild the index"
                )
        found = {name: entry for name, entry in listed.items() if _is_of_column(name, entry, column)}
        if found:
            return found, place, index.tokenizer if index.field == (column or "") else None
    return {}, None, None


def _is_of_column(name: str, entry: TextEntry, column: str | None) -> bool:
    return format_of(name).parse is not None or entry.column == (NAMES[0] if column is None else column)


def _read_index(root: Location, folder: Location) -> TextIndex:
    try:
        return read_index(root)
    except (DeniedError, MissingError) as error:  # credentials may be for the source alone
        if root.url == folder.url:
            raise
        log.info("no index of text from %s/meta: %s", root, error)
        return TextIndex({})


def read_index(root: Location) -> TextIndex:
    """The index beside a corpus; empty if there is none."""
    meta = root / "meta"
    place = meta / FILE
    if root.local is not None:
        there = (root.local / "meta" / FILE).is_file()
    else:
        there = any(file.name == FILE for file in meta.level().files)
    return read_table(place.read_bytes(), str(place)) if there else TextIndex({})


def holds_text(folder: Location, file: Entry, column: str | None) -> bool:
    """Whether a file holds text: of Parquet, its footer says."""
    chosen = format_of(file.name)
    if chosen.kind != "parquet":
        return chosen.parse is not None
    return try_entries(folder, [file], column)[file.name] is not None
