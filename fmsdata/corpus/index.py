"""The index: counts of all shards of a corpus, in one file beside them."""

import csv
import io
import os

from fmsdata.corpus.counts import count_shards
from fmsdata.corpus.counts_csv import HEADER, counts_files
from fmsdata.errors import DataError
from fmsdata.formats import SUFFIXES
from fmsdata.storage.location import Location


def write_index(root: str | os.PathLike[str] | Location, column: str | None = None) -> Location:
    """Count every shard below a folder and write the counts to `meta/counts.csv`.

    Existing counts files are renamed to `*.old`: two files that disagree would be an error.

    >>> write_index("corpus")     # doctest: +SKIP
    Location('corpus/meta/counts.csv')
    """
    root = Location(root).listed()
    if root.local is not None and not root.is_dir():
        raise DataError(f"{root}: {root.why_no_folder()}; check the path")
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
        raise DataError(f"{meta}: the counts can't be written: {error.strerror}") from None
    return target.alone()
