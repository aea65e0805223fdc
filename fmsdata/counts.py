"""Documents and tokens per shard: the only thing that planning reads.

They come from `meta/*counts*.csv` beside or above the source, and from the shards themselves where no CSV
tells. A CSV is believed for planning and checked when its shards are opened.
"""

import csv
import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fmsdata.errors import CountsError, DataError
from fmsdata.keys import Ints
from fmsdata.readers import SUFFIXES, open_shard
from fmsdata.storage import list_files

Parts: TypeAlias = tuple[str, ...]
Count: TypeAlias = tuple[int, int]
HEADER = ("dataset/filename", "documents", "tokens")
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
    csv_root: Path | None = None  # the folder whose `meta` told some of them

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


def read_counts(folder: Path, column: str | None = None) -> Counts:
    """The counts of one source: from a CSV where one speaks of its shards, else from the shards.

    >>> read_counts(Path("corpus/web")).shards    # doctest: +SKIP
    ('part-0.arrow', 'part-1.arrow')
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder}: the source's folder {what}; check `path`")
    shards = list_files(folder, SUFFIXES)
    if not shards:
        raise DataError(f"{folder}: no shards; a source is a folder with files ending in {', '.join(SUFFIXES)}")
    told, root = _told_by_csv(folder, shards)
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
    return Counts(tuple(shards), pairs[:, 0], pairs[:, 1], root)


def count_shards(folder: Path, shards: list[str], column: str | None = None) -> dict[str, Count]:
    """Count documents and tokens in the files themselves, several at a time."""

    def count(shard: str) -> Count:
        opened = open_shard(folder / shard, column)
        return opened.documents, opened.tokens()

    log.info("counting %d shards in %s; `fmsdata index` keeps the counts in a file", len(shards), folder)
    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(max_workers=min(16, 4 * (os.cpu_count() or 1))) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        counted = progress.track(pool.map(count, shards), total=len(shards), description=f"counting {folder.name}")
        try:
            return dict(zip(shards, counted, strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write_index(root: Path, column: str | None = None) -> Path:
    """Count every shard below a folder and keep the counts in `meta/counts.csv`.

    Counts that were there before are renamed, not lost: two files that disagree would be an error.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    shards = list_files(root, SUFFIXES)
    if not shards:
        raise DataError(f"{root}: no files ending in {', '.join(SUFFIXES)} below it")
    counts = count_shards(root, shards, column)
    meta = root / "meta"
    try:
        meta.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{meta}: cannot be made a folder: {error.strerror}") from None
    target = meta / "counts.csv"
    unfinished = meta / ".counts.unfinished"
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows((shard, *counts[shard]) for shard in shards)
    for old in sorted(meta.glob("*counts*.csv")):
        old.rename(old.with_suffix(".csv.old"))
    unfinished.rename(target)
    return target


def _told_by_csv(folder: Path, shards: list[str]) -> tuple[dict[str, Count], Path | None]:
    """What the nearest `meta` folder with rows about this source says of its shards, and where that folder is."""
    folder = Path(os.path.abspath(folder))
    for root in (folder, *folder.parents):
        files = sorted((root / "meta").glob("*counts*.csv"))
        if not files:
            continue
        told = _match(_read_rows(files), folder.relative_to(root).parts, shards, files[0])
        if told:
            return told, root
    return {}, None


def _read_rows(files: Iterable[Path]) -> dict[Parts, Count]:
    rows: dict[Parts, Count] = {}
    for file in files:
        try:
            lines = list(csv.reader(file.read_text().splitlines()))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CountsError(
                f"{file}: not a CSV file that can be read ({error}); remove it, or run `fmsdata index`"
            ) from None
        header = [name.strip() for name in lines[0]] if lines else []
        if len(header) < 3 or "documents" not in header[1:] or "tokens" not in header[1:]:
            raise CountsError(f"{file}: the header is {','.join(header)!r}, expected {','.join(HEADER)!r}")
        columns = header.index("documents"), header.index("tokens")
        for number, row in enumerate(lines[1:], start=2):
            if not row:
                continue
            where = f"{file}:{number}: {','.join(row)!r}"
            try:
                count = int(row[columns[0]]), int(row[columns[1]])
            except (ValueError, IndexError):
                raise CountsError(f"{where} is not a row of {','.join(HEADER)}") from None
            if not all(0 <= one < 1 << 62 for one in count):
                raise CountsError(
                    f"{where} has a number that can't be a count; run `fmsdata index` to rebuild the counts"
                )
            parts = _parts(row[0].strip())
            if rows.setdefault(parts, count) != count:
                raise CountsError(
                    f"{where} disagrees with another row, of {rows[parts][0]} documents and {rows[parts][1]} tokens; "
                    "run `fmsdata index` to rebuild the counts"
                )
    return rows


def _match(rows: dict[Parts, Count], source: Parts, shards: list[str], file: Path) -> dict[str, Count]:
    """Find each shard's row, however much of the path in front of it the row tells."""
    by_name: dict[str, list[Parts]] = defaultdict(list)
    for row in rows:
        if row:
            by_name[row[-1]].append(row)
    told: dict[str, Count] = {}
    folders: set[Parts] = {source} - {()}  # the source's folder, as the rows write it
    for shard in shards:
        path = source + _parts(shard)
        best = _best_rows(by_name[path[-1]], path)
        if len({rows[row] for row in best}) > 1:
            some = ", ".join("/".join(row) for row in best)
            raise CountsError(f"{file}: several rows fit {'/'.join(path)} and disagree: {some}; keep one")
        if best:
            told[shard] = rows[best[0]]
            folders.add(best[0][: len(best[0]) - len(_parts(shard))])
    listed = set(shards)
    for row in rows:
        for folder in folders:
            inside = "/".join(row[len(folder) :])
            if row[: len(folder)] == folder and inside.endswith(SUFFIXES) and inside not in listed:
                raise CountsError(
                    f"{file}: counts list {'/'.join(row)}, but there is no such file; "
                    "bring it back, or run `fmsdata index` to rebuild the counts"
                )
    return told


def _best_rows(rows: list[Parts], path: Parts) -> list[Parts]:
    """The rows that name this path: all of it, all of it behind some prefix, or else the longest end of it."""
    exact = [row for row in rows if row == path]
    behind = [row for row in rows if row[-len(path) :] == path]
    ends = [row for row in rows if 1 < len(row) < len(path) and path[-len(row) :] == row]
    longest = max(map(len, ends), default=0)
    return exact or behind or [row for row in ends if len(row) == longest]


def _parts(path: str) -> Parts:
    return tuple(part for part in path.split("/") if part not in ("", "."))
