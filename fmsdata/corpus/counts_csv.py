"""What `meta/*counts*.csv` tell: rows of a shard's path, its documents and its tokens.

Rows come in many spellings, with more or less of the path in front of the shard's name, and each shard finds its own.
"""

import csv
import logging
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeAlias

from fmsdata.errors import CountsError, DeniedError, MissingError
from fmsdata.formats import SUFFIXES
from fmsdata.storage.location import Location

Parts: TypeAlias = tuple[str, ...]
Count: TypeAlias = tuple[int, int]  # documents and tokens
HEADER = ("dataset/filename", "documents", "tokens")
FILES = "*counts*.csv"
log = logging.getLogger("fmsdata")


def told_by_csv(folder: Location, shards: list[str]) -> tuple[dict[str, Count], Location | None]:
    """What the nearest `meta` folder with rows about a source says of its shards, and the folder that holds it."""
    folder = folder.absolute()
    for root in (folder, *folder.parents):
        table = root.once(_Table, partial(_read_table, root, folder))
        told = table.match(() if root is folder else _parts(folder.inside(root)), shards)
        if told:
            return told, root
    return {}, None


def counts_files(root: Location) -> list[Location]:
    """The files in its `meta` that hold counts."""
    if root.local is not None:
        return [root / f"meta/{file.name}" for file in sorted((root.local / "meta").glob(FILES))]
    meta = root / "meta"
    return [meta / file.name for file in meta.level().files if fnmatchcase(file.name, FILES)]


def _read_table(root: Location, folder: Location) -> "_Table":
    try:
        files = counts_files(root)
    except (DeniedError, MissingError) as error:  # credentials may be for the source alone
        if root.url == folder.url:
            raise
        log.info("no counts from %s/meta: %s", root, error)
        files = []
    return _Table(files[0], _read_rows(files)) if files else _Table(root, {})


class _Table:
    """The rows of a folder's counts."""

    def __init__(self, file: Location, rows: dict[Parts, Count]) -> None:
        self._file = file  # the first of them
        self._rows = rows
        self._by_name: dict[str, list[Parts]] = defaultdict(list)
        for row in rows:
            if row:
                self._by_name[row[-1]].append(row)

    def match(self, source: Parts, shards: list[str]) -> dict[str, Count]:
        """Find each shard's row, however much of the path in front of it the row tells."""
        if not self._rows:
            return {}
        told: dict[str, Count] = {}
        folders: set[Parts] = {source} - {()}  # the source's folder, as the rows write it
        for shard in shards:
            inside = _parts(shard)
            path = source + inside
            best = _best_rows(self._by_name.get(path[-1], []), path)
            if len({self._rows[row] for row in best}) > 1:
                some = ", ".join("/".join(row) for row in best)
                raise CountsError(f"{self._file}: several rows fit {'/'.join(path)} and disagree: {some}; keep one")
            if best:
                told[shard] = self._rows[best[0]]
                folders.add(best[0][: len(best[0]) - len(inside)])
        listed = set(shards)
        for row in self._rows:
            for folder in folders:
                if row[: len(folder)] != folder:
                    continue
                name = "/".join(row[len(folder) :])
                if name.endswith(SUFFIXES) and name not in listed:
                    raise CountsError(
                        f"{self._file}: counts list {'/'.join(row)}, but there is no such file; "
                        "bring it back, or run `fmsdata index` to rebuild the counts"
                    )
        return told


def _read_rows(files: Iterable[Location]) -> dict[Parts, Count]:
    rows: dict[Parts, Count] = {}
    for file in files:
        try:
            lines = list(csv.reader(file.read_bytes().decode().splitlines()))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CountsError(
                f"{file}: not a CSV file that can be read ({error}); remove it, or run `fmsdata index`"
            ) from None
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


def _best_rows(rows: list[Parts], path: Parts) -> list[Parts]:
    """The rows that name this path: all of it, all of it behind some prefix, or else the longest end of it."""
    exact = [row for row in rows if row == path]
    behind = [row for row in rows if row[-len(path) :] == path]
    ends = [row for row in rows if 1 < len(row) < len(path) and path[-len(row) :] == row]
    longest = max(map(len, ends), default=0)
    return exact or behind or [row for row in ends if len(row) == longest]


def _parts(path: str) -> Parts:
    return tuple(part for part in path.split("/") if part not in ("", "."))
