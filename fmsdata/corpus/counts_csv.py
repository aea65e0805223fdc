"""Counts in `meta/*counts*.csv`: one row per shard with its path, documents and tokens.

Rows write paths in many ways, with more or fewer of the parent folders. Each shard finds its row.
"""

import csv
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeAlias

from fmsdata.core.wording import counted
from fmsdata.corpus.listing import is_leftover
from fmsdata.errors import CountsError, DeniedError, MissingError
from fmsdata.formats import SUFFIXES
from fmsdata.storage.location import Location

Parts: TypeAlias = tuple[str, ...]
Count: TypeAlias = tuple[int, int]  # documents and tokens
HEADER = ("dataset/filename", "documents", "tokens")
FILES = "*counts*.csv"
INDEX = "fmsdata-index.csv"  # read instead of the others; fms-fsdp ignores it, whose counts have `counts` in the name
log = logging.getLogger("fmsdata")


def find_counts(folder: Location, shards: list[str], *, some: bool = False) -> tuple[dict[str, Count], Location | None]:
    """The counts of shards in the nearest `meta` folder that lists them, and that folder's parent.

    `some`: they are not all shards of the folder.
    """
    folder = folder.absolute()
    for root in (folder, *folder.parents):
        table = root.once(CountsTable, partial(_read_table, root, folder))
        counts = table.match(() if root is folder else _parts(folder.inside(root)), shards, some=some)
        if counts:
            return counts, root
    return {}, None


def all_counts(root: Location, shards: Sequence[str]) -> dict[str, Count]:
    """The counts of all shards below a folder that have any, each from the `meta` folder nearest to it."""
    counts: dict[str, Count] = {}
    for folder in sorted({shard.rpartition("/")[0] for shard in shards}, key=lambda folder: -folder.count("/")):
        inside = f"{folder}/" if folder else ""
        below = [shard.removeprefix(inside) for shard in shards if shard.startswith(inside)]
        found, _ = find_counts(root / folder if folder else root, below)
        counts = {inside + shard: count for shard, count in found.items()} | counts
    return counts


def counts_files(root: Location) -> list[Location]:
    """The counts files in the `meta` folder that are read: the index, or else all others."""
    files = {file.name: file for file in all_counts_files(root)}
    return [files[name] for name in counts_names(files)]


def all_counts_files(root: Location) -> list[Location]:
    """All counts files in the `meta` folder."""
    meta = root / "meta"
    if root.local is not None:
        names = [file.name for file in (root.local / "meta").glob("*.csv")]
    else:
        names = [file.name for file in meta.level().files]
    return [meta / name for name in sorted(names) if _holds_counts(name)]


def counts_names(names: Iterable[str]) -> list[str]:
    """Those of the files in a `meta` folder that `counts_files` reads."""
    files = sorted(filter(_holds_counts, names))
    return [name for name in files if name == INDEX] or files


def _holds_counts(name: str) -> bool:
    return name == INDEX or fnmatchcase(name, FILES)


def _read_table(root: Location, folder: Location) -> "CountsTable":
    try:
        files = counts_files(root)
    except (DeniedError, MissingError) as error:  # credentials may be for the source alone
        if root.url == folder.url:
            raise
        log.info("no counts from %s/meta: %s", root, error)
        files = []
    return CountsTable(files[0], read_rows(files)) if files else CountsTable(root, {})


class CountsTable:
    """The rows of all counts files of a folder."""

    def __init__(self, file: Location, rows: dict[Parts, Count]) -> None:
        self._file = file  # the first file, for errors
        self._rows = rows
        self._by_name: dict[str, list[Parts]] = defaultdict(list)
        for row in rows:
            if row:
                self._by_name[row[-1]].append(row)

    def match(self, source: Parts, shards: list[str], *, some: bool = False) -> dict[str, Count]:
        """Find the row of each shard, however many parent folders the row writes."""
        if not self._rows:
            return {}
        rows = self.rows_of(source, shards)
        if some:
            return {shard: self._rows[row] for shard, row in rows.items()}
        folders: set[Parts] = {source} - {()}  # the folder of the source, as the rows write it
        folders |= {row[: len(row) - len(_parts(shard))] for shard, row in rows.items()}
        listed = set(shards)
        for row in self._rows:
            for folder in folders:
                if row[: len(folder)] != folder:
                    continue
                name = "/".join(row[len(folder) :])
                if name.endswith(SUFFIXES) and name not in listed and not is_leftover(name):
                    raise CountsError(
                        f"{self._file}: counts list {'/'.join(row)}, but there is no such file; "
                        "restore it, or run `fmsdata index` to rebuild the counts"
                    )
        return {shard: self._rows[row] for shard, row in rows.items()}

    def rows_of(self, source: Parts, shards: list[str]) -> dict[str, Parts]:
        """The row of each shard that has one."""
        found: dict[str, Parts] = {}
        for shard in shards:
            path = source + _parts(shard)
            best = [path] if path in self._rows else _best_rows(self._by_name.get(path[-1], []), path)
            if len({self._rows[row] for row in best}) > 1:
                rows = ", ".join("/".join(row) for row in best)
                raise CountsError(f"{self._file}: several rows match {'/'.join(path)} and disagree: {rows}; keep one")
            if best:
                found[shard] = best[0]
        return found


def read_rows(files: Iterable[Location]) -> dict[Parts, Count]:
    rows: dict[Parts, Count] = {}
    for file in files:
        try:
            lines = list(csv.reader(file.read_bytes().decode().splitlines()))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CountsError(f"{file}: not a readable CSV file ({error}); remove it, or run `fmsdata index`") from None
        header = [title.strip() for title in lines[0]] if lines else []
        if len(header) < 3 or "documents" not in header[1:] or "tokens" not in header[1:]:
            raise CountsError(f"{file}: the header is {','.join(header)!r}, expected {','.join(HEADER)!r}")
        columns, name = (header.index("documents"), header.index("tokens")), str(file)
        for number, row in enumerate(lines[1:], start=2):
            if not row:
                continue
            where = f"{name}:{number}: {','.join(row)!r}"
            try:
                count = int(row[columns[0]]), int(row[columns[1]])
            except (ValueError, IndexError):
                raise CountsError(f"{where} is not a row of {','.join(HEADER)}") from None
            if not all(0 <= value < 1 << 62 for value in count):
                raise CountsError(
                    f"{where} has a number that is not a valid count; run `fmsdata index` to rebuild the counts"
                )
            parts = _parts(row[0].strip())
            if rows.setdefault(parts, count) != count:
                raise CountsError(
                    f"{where} disagrees with another row, of {counted(rows[parts][0], 'document')} and "
                    f"{counted(rows[parts][1], 'token')}; "
                    "run `fmsdata index` to rebuild the counts"
                )
    return rows


def _best_rows(rows: list[Parts], path: Parts) -> list[Parts]:
    """The rows for a path that has none of its own: those that end in it, or else the longest ones that it ends in."""
    longer = [row for row in rows if row[-len(path) :] == path]
    shorter = [row for row in rows if 1 < len(row) < len(path) and path[-len(row) :] == row]
    longest = max(map(len, shorter), default=0)
    return longer or [row for row in shorter if len(row) == longest]


def _parts(path: str) -> Parts:
    return tuple(part for part in path.split("/") if part not in ("", "."))
