"""Documents and tokens per shard: the only thing that planning reads.

They come from `meta/*counts*.csv` beside or above the source, and from the shards themselves where no CSV
tells. A CSV is believed for planning and checked when its shards are opened.
"""

import csv
import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fmsdata.connection import Connection, Entry
from fmsdata.counts_csv import HEADER, Count, counts_files, told_by_csv
from fmsdata.errors import CountsError, DataError
from fmsdata.fetch import drive
from fmsdata.io_thread import together
from fmsdata.keys import Ints
from fmsdata.location import Location
from fmsdata.readers import SUFFIXES, open_shard
from fmsdata.readers.ranges import Range, read_layout

log = logging.getLogger("fmsdata")


@dataclass(frozen=True, eq=False)
class Counts:
    """The shards of a source, sorted by path, with the documents and tokens in each.

    >>> counts = Counts(("a.arrow", "b.arrow"), np.array([10, 20]), np.array([500, 900]))
    >>> counts.mean_length
    46.666666666666664
    """

    shards: tuple[str, ...]
    documents: Ints
    tokens: Ints
    csv_root: str | None = None  # the folder whose `meta` told some of them
    entries: tuple[Entry, ...] = ()  # sizes and versions of the shards, if they are not local

    @cached_property
    def mean_length(self) -> float:
        return max(1.0, float(self.tokens.sum()) / max(1, int(self.documents.sum())))

    @cached_property
    def digest(self) -> str:
        """Changes with any shard's name or number of documents or tokens."""
        text = "\n".join(
            f"{shard},{documents},{tokens}"
            for shard, documents, tokens in zip(self.shards, self.documents.tolist(), self.tokens.tolist(), strict=True)
        )
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_counts(folder: str | os.PathLike[str] | Location, column: str | None = None) -> Counts:
    """The counts of one source: from a CSV where one speaks of its shards, else from the shards.

    >>> read_counts("corpus/web").shards    # doctest: +SKIP
    ('part-0.arrow', 'part-1.arrow')
    """
    folder = Location(folder).listed()
    shards, entries = _shards(folder)
    told, root = told_by_csv(folder, shards)
    # A shard that is told to be empty would never be opened, and so never be held against its counts.
    uncertain = [shard for shard in shards if told.get(shard, (0, 0))[0] == 0]
    if uncertain:
        for shard, count in count_shards(folder, uncertain, column).items():
            if told.setdefault(shard, count) != count:
                raise CountsError(
                    f"{folder}: counts say 0 documents in {shard} but the file holds {count[0]}; "
                    f"run `fmsdata index` to rebuild the counts (they are in {root}/meta)"
                )
    pairs = np.array([told[shard] for shard in shards], np.int64)
    return Counts(tuple(shards), pairs[:, 0], pairs[:, 1], None if root is None else str(root), entries)


def _shards(folder: Location) -> tuple[list[str], tuple[Entry, ...]]:
    """The shards of a source, of which there must be one."""
    if folder.local is None:
        entries = folder.files(SUFFIXES)
        if entries:
            return [entry.name for entry in entries], tuple(entries)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder}: the source's folder {what}; check `path`")
    shards = folder.names(SUFFIXES)
    if not shards:
        raise DataError(f"{folder}: no shards; a source is a folder with files ending in {', '.join(SUFFIXES)}")
    return shards, ()


def count_shards(folder: Location, shards: Sequence[str], column: str | None = None) -> dict[str, Count]:
    """Count documents and tokens in the files themselves, several at a time."""
    log.info("counting %d shards in %s; `fmsdata index` keeps the counts in a file", len(shards), folder)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"counting {folder.name}", total=len(shards))

        def done() -> None:
            progress.advance(task)

        if folder.local is not None:
            return dict(zip(shards, _count_local(folder.local, shards, column, done), strict=True))
        entries = {entry.name: entry for entry in folder.files(SUFFIXES)}
        return count_remote(folder, [entries[shard] for shard in shards], column, done)


def _count_local(folder: Path, shards: Sequence[str], column: str | None, done: Callable[[], None]) -> list[Count]:
    def count(shard: str) -> Count:
        opened = open_shard(folder / shard, column)
        counted = opened.documents, opened.tokens()
        done()
        return counted

    with ThreadPoolExecutor(max_workers=min(16, 4 * (os.cpu_count() or 1))) as pool:
        try:
            return list(pool.map(count, shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def count_remote(
    folder: Location, entries: Sequence[Entry], column: str | None, done: Callable[[], None]
) -> dict[str, Count]:
    """Count by ranges: of a shard with lists, only its layout is read."""
    connection = folder.connection
    counted: dict[str, Count] = {}

    async def count(waiting: Iterator[Entry]) -> None:
        for entry in waiting:
            shard = folder / entry.name
            read = partial(_read, connection, shard.path, entry.version)
            layout = await drive(read_layout(str(shard), entry.size, column, ()), read)
            tokens = await drive(layout.tokens(), read)
            counted[entry.name] = layout.documents, tokens
            done()

    waiting = iter(entries)
    connection.run(together(count(waiting) for _ in range(min(folder.storage.connections, len(entries)))))
    return counted


async def _read(connection: Connection, path: str, version: str | None, wanted: Range) -> bytes:
    return (await connection.read(path, wanted.start, wanted.stop, version)).data


def write_index(root: str | os.PathLike[str] | Location, column: str | None = None) -> Location:
    """Count every shard below a folder and keep the counts in `meta/counts.csv`.

    Counts that were there before are kept under another name: two files that disagree would be an error.
    """
    root = Location(root).listed()
    if root.local is not None and not root.is_dir():
        raise DataError(f"{root}: no such folder")
    shards = root.names(SUFFIXES)
    if not shards:
        raise DataError(f"{root}: no files ending in {', '.join(SUFFIXES)} below it; check the path")
    counts = count_shards(root, shards, column)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((shard, *counts[shard]) for shard in shards)
    meta = root / "meta"
    target = meta / "counts.csv"
    try:
        before = counts_files(root)
        for old in before:
            (meta / f"{old.name}.old").write_bytes(old.read_bytes())
        target.write_bytes(table.getvalue().encode())
        for old in before:
            if old.url != target.url:
                old.remove()
    except OSError as error:
        raise DataError(f"{meta}: the counts can't be written there: {error.strerror}") from None
    return target.alone()
