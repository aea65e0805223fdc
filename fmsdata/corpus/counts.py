"""Finding the counts of a source: from `meta/*counts*.csv` beside or above it, else from its shards.

Planning trusts a CSV. It is checked when a shard is opened.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fmsdata.core.ranges import Range
from fmsdata.corpus.counts_csv import Count, find_counts
from fmsdata.corpus.listing import (
    ShardList,
    list_shards,
    note_of_copies,
    note_of_misnamed,
    note_of_others,
    note_of_skipped,
)
from fmsdata.corpus.planned import Planned, find_planned
from fmsdata.corpus.progress import progress
from fmsdata.corpus.selection import Files, has_patterns
from fmsdata.corpus.text_copy import copy_files
from fmsdata.corpus.text_counts import find_text, holds_text
from fmsdata.corpus.text_index import TextEntry, summed
from fmsdata.errors import CountsError, DataError
from fmsdata.formats import SUFFIXES, format_of, open_shard, read_layout
from fmsdata.formats.base import Blocks, Data
from fmsdata.formats.parquet import NoColumn
from fmsdata.planning.counts import Counts
from fmsdata.prefetch.range_queue import drive
from fmsdata.prefetch.shard_files import CountedText, ShardFiles
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.connection import Connection
from fmsdata.storage.io_thread import together
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location
from fmsdata.storage.mapped import MappedFile

BLOCK_TOKENS = 1 << 22  # about, of the blocks of a shard that are counted
MOST_COMPARED = 10_000  # shards of a manifest whose names are made objects, and compared, at every start
log = logging.getLogger("fmsdata")


def read_counts(folder: str | os.PathLike[str] | Location, column: str | None = None, files: Files = None) -> Counts:
    """The counts of one source: from a CSV that lists its shards, else from the shards themselves.

    >>> read_counts("corpus/web").shards    # doctest: +SKIP
    ('part-0.arrow', 'part-1.arrow')
    """
    return open_source(Location(folder), column, files).counts


def open_source(folder: Location, column: str | None = None, files: Files = None) -> ShardFiles:
    """The shards of one source, with their counts. `files` selects some of the folder.

    They come from the manifest of the corpus, if there is one and it lists them, else from a listing.
    """
    folder = folder.listed()
    planned = find_planned(folder) if files is None else None
    if planned is not None:
        return _open_planned(folder, planned, column)
    listed = list_shards(folder, files)
    notes = [note_of_skipped(listed.skipped)] if listed.skipped else []
    if listed.others:
        notes.append(note_of_others(listed.others))
    if listed.misnamed and files is None:
        notes.append(note_of_misnamed(listed.misnamed))
    named = files is not None and not has_patterns(files)
    if _is_text(folder, listed, column):
        return _open_text(folder, listed, column, notes, named=named)
    shards = listed.names
    counts, root = find_counts(folder, shards, some=files is not None)
    unlisted = [shard for shard in shards if shard not in counts] if root is not None else []
    # A shard with 0 documents according to the CSV would never be opened, so its count would never be checked.
    uncertain = [shard for shard in shards if counts.get(shard, (0, 0))[0] == 0]
    for shard, count in count_shards(folder, uncertain, column).items() if uncertain else ():
        if counts.setdefault(shard, count) != count:
            raise _not_empty(folder, shard, count, root)
    notes = [*filter(None, [note_of_copies(folder, shards, counts, named=named)]), *notes]
    if unlisted:
        notes.append(_note_of_unlisted(f"the counts in {root}/meta lack", unlisted, shards, root))
    pairs = np.array([counts[shard] for shard in shards], np.int64)
    source = None if root is None else str(root)
    found = Counts(tuple(shards), pairs[:, 0], pairs[:, 1], source, _logged(folder, notes))
    return ShardFiles(location=folder.alone(), column=column, counts=found, entries=listed.entries)


def _open_planned(folder: Location, planned: Planned, column: str | None) -> ShardFiles:
    """A source whose shards are in a manifest."""
    rows, names, root = planned.rows, planned.rows.names, planned.root
    empty = np.flatnonzero(rows.documents == 0).tolist()
    if empty:  # these would never be opened
        entries = [planned.entries[row] for row in empty]
        for shard, count in count_shards(folder, [names[row] for row in empty], column, entries).items():
            if count[0]:
                raise _not_empty(folder, shard, count, root)
    notes: list[str | None] = []
    shards: Sequence[str] = names
    if len(names) <= MOST_COMPARED:
        shards = tuple(names)  # which are found a hundred times faster
        counts = dict(zip(shards, zip(rows.documents.tolist(), rows.tokens.tolist(), strict=True), strict=True))
        notes = [note_of_copies(folder, shards, counts)]
    logged = _logged(folder, [*filter(None, notes)])
    found = Counts(
        shards,
        rows.documents,
        rows.tokens,
        str(root),
        logged,
        rows=rows.as_text,
        blocks=rows.blocks,
        generations=rows.generations,
        appended=rows.manifest.appended,
    )
    files = planned.entries if folder.local is None else ()
    return ShardFiles(location=folder.alone(), column=column, counts=found, entries=files, sizes=rows.sizes)


def _not_empty(folder: Location, shard: str, count: Count, root: Location | None) -> CountsError:
    return CountsError(
        f"{folder}: counts say 0 documents in {shard} but the file holds {count[0]}; "
        f"run `fmsdata index` to rebuild the counts (they are in {root}/meta)"
    )


def _open_text(folder: Location, listed: ShardList, column: str | None, notes: list[str], *, named: bool) -> ShardFiles:
    """A source of text: documents, and bytes of text, of each file."""
    names = listed.names
    files = entries_of(folder, listed)
    text = find_text(folder, files, column)
    if text.missing and text.place is not None:
        notes.append(_note_of_unlisted(f"{text.place} lacks", text.missing, names, text.place.parent.parent))
    pairs = {name: (entry.documents, entry.nbytes) for name, entry in text.entries.items()}
    if copies := note_of_copies(folder, names, pairs, named=named):
        notes.append(copies)
    numbers = np.array(list(pairs.values()), np.int64)
    root = None if text.place is None else text.place.parent.parent
    counts = Counts(
        tuple(names),
        numbers[:, 0],
        numbers[:, 1],
        None if root is None else str(root),
        _logged(folder, notes),
        text=True,
        text_tokens=summed(text.entries.values()) if text.tokenizer is not None else None,
        tokenizer=text.tokenizer,
    )
    return ShardFiles(
        location=folder.alone(),
        column=column,
        counts=counts,
        entries=listed.entries,
        lines={i: entry.lines for i, entry in enumerate(text.entries.values()) if entry.lines is not None},
        copies={names.index(name): path for name, path in copy_files(folder, files, text.entries, column).items()},
        counted=None if root is None or text.tokenizer is None else _as_counted(root, folder, text.entries, column),
    )


def _as_counted(root: Location, folder: Location, entries: Mapping[str, TextEntry], column: str | None) -> CountedText:
    """The files of a source as they were when the corpus at `root` was indexed."""
    folder = folder.absolute()
    inside = "" if folder.url == root.url else f"{folder.inside(root)}/"
    files = (
        (Entry(f"{inside}{name}", entry.size, entry.version), entry.column or column) for name, entry in entries.items()
    )
    return CountedText(root.alone(), tuple(files))


def entries_of(folder: Location, listed: ShardList) -> Sequence[Entry]:
    """The files with their sizes and versions."""
    return listed.entries if folder.local is None else [file_entry(folder.local, name) for name in listed.names]


def _is_text(folder: Location, listed: ShardList, column: str | None) -> bool:
    """Whether a source holds text. Parquet files may hold text or tokens: the first one says."""
    kinds = {format_of(name).kind for name in listed.names}
    parquet = [i for i, name in enumerate(listed.names) if format_of(name).kind == "parquet"]
    text = bool(kinds & {"jsonl", "text"})
    if parquet:
        try:
            text = holds_text(folder, entries_of(folder, listed)[parquet[0]], column) or text
        except NoColumn as error:
            which = f"column{'' if len(error.columns) == 1 else 's'} {', '.join(error.columns)}"
            raise DataError(
                f"{folder}: no .arrow shards, but {len(parquet):,} .parquet file{'' if len(parquet) == 1 else 's'} "
                + (f"with the {which}; set documents.column" if error.columns else f"without text or tokens: {error}")
            ) from None
    if text and "arrow" in kinds:
        raise DataError(
            f"{folder}: `files` selects Arrow shards, which hold tokens, and files of text; select one kind"
        )
    return text


def _note_of_unlisted(what: str, unlisted: Sequence[str], shards: Sequence[str], root: Location | None) -> str:
    return (
        f"{what} {len(unlisted):,} of the {len(shards):,} shards, such as {unlisted[0]}: these are counted from the "
        f"files at every start; run `fmsdata index {root}` once instead"
    )


def _logged(folder: Location, notes: Sequence[str]) -> tuple[str, ...]:
    for note in notes:
        log.warning("%s: %s", folder, note)
    return tuple(notes)


class Measured(NamedTuple):
    """The counts of a shard, and those of its blocks, as far as its metadata says them."""

    counts: Count
    blocks: Blocks | None

    @classmethod
    def of(cls, count: Count, blocks: Blocks | None) -> "Measured":
        """With larger blocks, of about `BLOCK_TOKENS`."""
        if blocks is None or not count[0]:
            return cls(count, None)
        ends = np.cumsum(blocks[1])
        full = ends // BLOCK_TOKENS
        last = np.append(np.flatnonzero(full[1:] != full[:-1]), len(ends) - 1)
        documents, tokens = (np.diff(np.cumsum(column)[last], prepend=0) for column in blocks)
        kept = documents > 0
        return cls(count, (documents[kept], tokens[kept]))


def count_shards(
    folder: Location, shards: Sequence[str], column: str | None = None, entries: Sequence[Entry] | None = None
) -> dict[str, Count]:
    """Count documents and tokens in the files themselves, several at a time. `entries` are these files, if known."""
    return {name: measured.counts for name, measured in measure_shards(folder, shards, column, entries).items()}


def measure_shards(
    folder: Location, shards: Sequence[str], column: str | None = None, entries: Sequence[Entry] | None = None
) -> dict[str, Measured]:
    """The same, with the counts of their blocks."""
    log.info("counting %d shards in %s; `fmsdata index` saves the counts in a file", len(shards), folder)
    with progress(f"counting {folder.name}", len(shards)) as done:
        if folder.local is not None:
            return dict(zip(shards, _measure_local(folder.local, shards, column, done), strict=True))
        if entries is None:
            known = {entry.name: entry for entry in folder.files(SUFFIXES)}
            entries = [known[shard] for shard in shards]
        return _measure_remote(folder, entries, column, done)


def _measure_local(folder: Path, shards: Sequence[str], column: str | None, done: Callable[[], None]) -> list[Measured]:
    def measure(shard: str) -> Measured:
        with MappedFile(folder / shard) as file:
            opened = open_shard(file, str(folder / shard), column)
            measured = Measured.of((opened.documents, opened.tokens()), opened.blocks)
        done()
        return measured

    with ThreadPoolExecutor(max_workers=min(16, 4 * (os.cpu_count() or 1))) as pool:
        try:
            return list(pool.map(measure, shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _measure_remote(
    folder: Location, entries: Sequence[Entry], column: str | None, done: Callable[[], None]
) -> dict[str, Measured]:
    """Count by byte ranges: of a shard with a list column, only its layout is read."""
    connection = folder.connection
    measured: dict[str, Measured] = {}

    async def measure(waiting: Iterator[Entry]) -> None:
        for entry in waiting:
            shard = folder / entry.name
            read = partial(_read, connection, shard.path, entry.version)
            layout = await drive(read_layout(str(shard), entry.size, column, ()), read)
            tokens = await drive(layout.tokens(), read)
            measured[entry.name] = Measured.of((layout.documents, tokens), layout.blocks)
            done()

    waiting = iter(entries)
    connection.run(together(measure(waiting) for _ in range(min(folder.storage.connections, len(entries)))))
    return measured


async def _read(connection: Connection, path: str, version: str | None, wanted: Range) -> Data:
    return (await connection.read(path, wanted.start, wanted.stop, version)).data
