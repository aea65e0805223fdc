"""Finding the counts of a source: from `meta/*counts*.csv` beside or above it, else from its shards.

Planning trusts a CSV. It is checked when a shard is opened.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from fmsdata.core.ranges import Range
from fmsdata.corpus.counts_csv import Count, find_counts
from fmsdata.corpus.listing import list_shards, note_of_copies, note_of_skipped
from fmsdata.errors import CountsError
from fmsdata.formats import SUFFIXES, open_shard, read_layout
from fmsdata.planning.counts import Counts
from fmsdata.prefetch.range_queue import drive
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.connection import Connection
from fmsdata.storage.io_thread import together
from fmsdata.storage.location import Location
from fmsdata.storage.mapped import MappedFile

log = logging.getLogger("fmsdata")


def read_counts(folder: str | os.PathLike[str] | Location, column: str | None = None) -> Counts:
    """The counts of one source: from a CSV that lists its shards, else from the shards themselves.

    >>> read_counts("corpus/web").shards    # doctest: +SKIP
    ('part-0.arrow', 'part-1.arrow')
    """
    folder = Location(folder).listed()
    listed = list_shards(folder)
    shards = listed.names
    counts, root = find_counts(folder, shards)
    unlisted = [shard for shard in shards if shard not in counts] if root is not None else []
    # A shard with 0 documents according to the CSV would never be opened, so its count would never be checked.
    uncertain = [shard for shard in shards if counts.get(shard, (0, 0))[0] == 0]
    if uncertain:
        for shard, count in count_shards(folder, uncertain, column).items():
            if counts.setdefault(shard, count) != count:
                raise CountsError(
                    f"{folder}: counts say 0 documents in {shard} but the file holds {count[0]}; "
                    f"run `fmsdata index` to rebuild the counts (they are in {root}/meta)"
                )
    notes = list(filter(None, [note_of_copies(folder, shards, counts)]))
    if listed.skipped:
        notes.append(note_of_skipped(listed.skipped))
    if unlisted:
        notes.append(
            f"the counts in {root}/meta lack {len(unlisted):,} of the {len(shards):,} shards, such as {unlisted[0]}: "
            f"these are counted from the files at every start; run `fmsdata index {root}` once instead"
        )
    for note in notes:
        log.warning("%s: %s", folder, note)
    pairs = np.array([counts[shard] for shard in shards], np.int64)
    return Counts(tuple(shards), pairs[:, 0], pairs[:, 1], None if root is None else str(root), tuple(notes))


def count_shards(folder: Location, shards: Sequence[str], column: str | None = None) -> dict[str, Count]:
    """Count documents and tokens in the files themselves, several at a time."""
    log.info("counting %d shards in %s; `fmsdata index` saves the counts in a file", len(shards), folder)
    with _progress(f"counting {folder.name}", len(shards)) as done:
        if folder.local is not None:
            return dict(zip(shards, _count_local(folder.local, shards, column, done), strict=True))
        entries = {entry.name: entry for entry in folder.files(SUFFIXES)}
        return count_remote(folder, [entries[shard] for shard in shards], column, done)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if that is a terminal. Yields what to call for each finished shard."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # only where a bar is shown
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _count_local(folder: Path, shards: Sequence[str], column: str | None, done: Callable[[], None]) -> list[Count]:
    def count(shard: str) -> Count:
        with MappedFile(folder / shard) as file:
            opened = open_shard(file, str(folder / shard), column)
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
    """Count by byte ranges: of a shard with a list column, only its layout is read."""
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
