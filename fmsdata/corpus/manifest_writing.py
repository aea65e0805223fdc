"""Writing the manifest of a corpus. An earlier one saves counting the shards that did not change."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from fmsdata.corpus.counts import Measured
from fmsdata.corpus.counts_csv import counts_names
from fmsdata.corpus.manifest import FILE, Corpus, CountsFile, Growth, Manifest, Shards, write_manifest
from fmsdata.corpus.planned import digest_of
from fmsdata.errors import DataError, FmsdataError
from fmsdata.storage import local
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

SETTLED = 50_000_000  # nanoseconds: a folder that changes later than this has another time


def folder_times(root: Location) -> dict[str, int]:
    """The times of all folders on a local disk, which change if something is added to them from now on."""
    if root.local is None:
        return {}
    with suppress(OSError):  # writing the counts fails too then, and says why
        (root.local / "meta").mkdir(exist_ok=True)
    times = local.folder_times(root.local)
    if time.time_ns() - max(times.values()) < SETTLED:
        time.sleep(SETTLED / 1e9)
    return times


def manifest_of(root: Location) -> Manifest | None:
    """The manifest of a corpus, whether or not the corpus still looks like that."""
    place = root / "meta" / FILE
    if not place.is_file():
        return None
    return Manifest.of_bytes(place.read_bytes(), str(place)) if place.local is None else Manifest.of_file(place.local)


def outdated_above(root: Location, entries: Sequence[Entry]) -> Location | None:
    """The nearest corpus that this folder is part of, and whose manifest has other shards of it than these."""
    root = root.absolute()
    shards = [(entry.name, entry.size) for entry in entries]
    for corpus in root.parents:
        rows = None
        with suppress(FmsdataError, OSError):  # credentials may be for the folder alone
            manifest = manifest_of(corpus)
            rows = None if manifest is None else manifest.rows(root.inside(corpus))
        if rows is not None and shards != list(zip(rows.names, rows.sizes.tolist(), strict=True)):
            return corpus
    return None


def counts_of_unchanged(root: Location, entries: Sequence[Entry], column: str | None) -> dict[str, Measured]:
    """The counts of shards that look as they did when the manifest was made."""
    try:
        manifest = manifest_of(root)
    except FmsdataError:  # it is damaged, and made again
        return {}
    rows = None if manifest is None else manifest.rows("")
    if manifest is None or rows is None or manifest.corpus.column != column:
        return {}
    counts = zip(rows.documents.tolist(), rows.tokens.tolist(), strict=True)
    measured = (Measured(count, rows.blocks(row)) for row, count in enumerate(counts))
    then = dict(zip(rows.entries, measured, strict=True))
    return {entry.name: then[entry] for entry in entries if entry.version is not None and entry in then}


def keep_manifest(
    root: Location,
    entries: Sequence[Entry],
    counts: Mapping[str, Measured],
    column: str | None,
    times: Mapping[str, int],
    others: Sequence[str],
    growth: Growth | None,
) -> Location | None:
    """Write the manifest if it changed. `others` are files that are not counted."""
    if not entries:
        remove_manifest(root)
        return None
    meta = (root / "meta").alone()  # without the listing: the counts were just written
    files = {file.name: file for file in meta.level().files}
    beside = {
        name: CountsFile(files[name].size, files[name].version, digest_of(meta / name)) for name in counts_names(files)
    }
    corpus = Corpus(
        url=None if root.local is not None else str(root),
        column=column,
        folders=times,
        counts=beside,
        others=sorted({name.rpartition("/")[0] for name in others}),
    )
    names, sizes, versions = zip(*entries, strict=True)
    documents, tokens = zip(*(counts[name].counts for name in names), strict=True)
    blocks = [counts[name].blocks for name in names]
    data = write_manifest(Shards(names, sizes, versions, documents, tokens, blocks), corpus, growth)
    place = meta / FILE
    try:
        if FILE in files and files[FILE].size == len(data) and place.read_bytes() == data:
            return None
        place.write_bytes(data)
    except OSError as error:
        raise DataError(f"{place}: the manifest can't be written: {error.strerror}") from None
    return place


def remove_manifest(root: Location) -> None:
    """Remove the manifest of a corpus that has no Arrow shards any more."""
    place = root / "meta" / FILE
    if place.is_file():
        place.remove()
