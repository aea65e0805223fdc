"""Planning from the manifest: what is read of it, and whether the corpus still looks as it says.

What is checked takes a few calls, however many shards there are:

- on a local disk, the times of the folders of a source, which change when a file is added, removed or renamed;
- elsewhere, that the corpus is where it was when the manifest was made, so that versions mean the same;
- everywhere, the counts beside the manifest, which another program may have written since.

If a check fails, the source is listed. With the shards of the manifest, the manifest is used. With
others, it is not, and the source is read as if there were none.

A shard that was replaced under its name is found when it is opened: its size, its version or its
counts differ.
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fmsdata.core.ranges import Range
from fmsdata.corpus.counts_csv import counts_names
from fmsdata.corpus.listing import find_shards
from fmsdata.corpus.manifest import FILE, CountsFile, Manifest, Rows
from fmsdata.corpus.text_cache import TextCache, version_key
from fmsdata.errors import ConfigError, DeniedError, MissingError
from fmsdata.storage.atomic import replacing
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.io_thread import together
from fmsdata.storage.location import Location

PART = 8 << 20  # bytes of a request
log = logging.getLogger("fmsdata")


class Planned(NamedTuple):
    """A source whose shards are in a manifest."""

    root: Location  # the corpus
    rows: Rows
    entries: Sequence[Entry]
    inside: str = ""  # where the source is in the corpus

    @property
    def others(self) -> tuple[str, ...]:
        """The folders in this one with files of other formats, each with a slash behind it."""
        below = f"{self.inside}/" if self.inside else ""
        folders = (f"{folder}/" for folder in self.rows.manifest.corpus.others)
        return tuple(folder.removeprefix(below) for folder in folders if folder.startswith(below))


def find_planned(folder: Location) -> Planned | None:
    """The shards of a source, if a manifest has them as they are now: the one in the nearest `meta` folder with counts.

    A manifest that was opened for another source of the corpus is nearer: that takes no request.
    """
    folder = folder.absolute()
    for root in folder.parents:
        if (known := root.made(_Beside)) is not None and (planned := known.planned(root, folder)):
            return _checked(planned, folder) if known.same else None
    for root in (folder, *folder.parents):
        beside = _beside(root, folder)
        if planned := beside.planned(root, folder):
            return _checked(planned, folder) if beside.same else None
        if beside.counts:
            return None
    return None


def find_unmoved(folder: Location, root: Location) -> Planned | None:
    """The same, if the manifest is in this corpus and no listing is needed to be sure of it."""
    root, folder = root.absolute(), folder.absolute()
    beside = _beside(root, folder)
    planned = beside.planned(root, folder) if beside.same else None
    return planned if planned is not None and _is_unmoved(planned) else None


class _Beside(NamedTuple):
    """What is in the `meta` folder of a corpus."""

    manifest: Manifest | None
    counts: bool  # whether there are any
    same: bool  # whether they are those of the manifest

    def planned(self, root: Location, folder: Location) -> Planned | None:
        """A source that the manifest has shards of."""
        if self.manifest is None or not f"{folder.url}/".startswith(f"{root.url.rstrip('/')}/"):
            return None
        inside = "" if root.url == folder.url else folder.inside(root)
        rows = self.manifest.rows(inside)
        return None if rows is None else Planned(root, rows, rows.entries, inside)


NOTHING = _Beside(None, counts=False, same=False)


def _beside(root: Location, folder: Location) -> _Beside:
    return root.once(_Beside, partial(_look_beside, root, folder))


def _look_beside(root: Location, folder: Location) -> _Beside:
    meta = root / "meta"
    if meta.local is not None and not meta.local.is_dir():
        return NOTHING
    try:
        files = {file.name: file for file in meta.level().files}
        counts = [files[name] for name in counts_names(files)]
        if FILE not in files:
            return _Beside(None, bool(counts), same=False)
        manifest = _open(meta, files[FILE])
    except (DeniedError, MissingError) as error:  # credentials may be for the source alone
        if root.url == folder.url:
            raise
        log.info("no manifest from %s: %s", meta, error)
        return NOTHING
    same = all(_is_same(meta, file, manifest.corpus.counts) for file in counts)
    if not same:
        log.warning(
            "%s is older than the counts beside it, so it is not used; run `fmsdata index %s`", meta / FILE, root
        )
    return _Beside(manifest, bool(counts), same)


def _is_same(meta: Location, file: Entry, known: Mapping[str, CountsFile]) -> bool:
    """Whether a file of counts is the one that the manifest was made with. A copy of it is."""
    then = known.get(file.name)
    if then is None or then.size != file.size:
        return False
    return (file.version is not None and file.version == then.version) or then.digest == digest_of(meta / file.name)


def digest_of(file: Location) -> str:
    """A digest of the bytes of a file."""
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _is_unmoved(planned: Planned) -> bool:
    """Whether the corpus is where it was, and nothing was added to the folders of a source."""
    root, corpus = planned.root, planned.rows.manifest.corpus
    return corpus.url == str(root) if root.local is None else _are_times(corpus.folders, root.local, planned.inside)


def _checked(planned: Planned, folder: Location) -> Planned | None:
    """None if the manifest is not of the shards that are there."""
    root, rows = planned.root, planned.rows
    if _is_unmoved(planned):
        return planned
    if not folder.is_dir():
        return None
    listed = find_shards(folder)
    same = len(listed.names) == len(rows) and all(map(str.__eq__, listed.names, rows.names))
    if same and listed.entries:
        same = bool((np.array([entry.size for entry in listed.entries]) == rows.sizes).all())
    if not same:
        log.warning(
            "%s: its shards are others than in %s, so they are listed; run `fmsdata index %s`",
            *(folder, root / "meta" / FILE, root),
        )
        return None
    log.info("%s: listed, because it may have changed since `fmsdata index %s`; it has not", folder, root)
    return planned._replace(entries=listed.entries)


def _are_times(times: Mapping[str, int], root: Path, inside: str) -> bool:
    """Whether folders last changed when they did then."""
    below = f"{inside}/" if inside else ""
    try:
        return inside in times and all(
            os.stat(root / folder).st_mtime_ns == time
            for folder, time in times.items()
            if folder == inside or folder.startswith(below)
        )
    except OSError:
        return False


def _open(meta: Location, file: Entry) -> Manifest:
    """Map the manifest; of a remote corpus, the copy of it that the processes of a node share."""
    place = meta / file.name
    if place.local is not None:
        return Manifest.of_file(place.local)
    key = version_key(meta, file)
    if key is None:
        return Manifest.of_bytes(place.read_bytes(), str(place))
    cache = _ManifestCache(meta.storage)
    path = cache.path(key, "manifest")
    try:
        cache.make()
        if not path.is_file():
            with cache.lock(f"{place.url}\nmanifest"):
                if not path.is_file():
                    _fetch(place, file, path)
                    cache.keep_only(place.url, path)
    except (ConfigError, OSError) as error:
        log.warning("%s: can't be kept, so every process has its own: %s", place, error)
        return Manifest.of_bytes(place.read_bytes(), str(place))
    return Manifest.of_file(path)


def _fetch(place: Location, file: Entry, path: Path) -> None:
    """Copy a remote file to the disk, many parts at once."""
    connection, remote = place.connection, place.path
    with replacing(path) as unfinished, unfinished.open("wb") as target:

        async def copy(part: Range) -> None:
            data = (await connection.read(remote, part.start, part.stop, file.version)).data
            os.pwrite(target.fileno(), data, part.start)

        parts = (Range(start, min(start + PART, file.size)) for start in range(0, file.size, PART))
        connection.run(together(copy(part) for part in parts))


class _ManifestCache(TextCache):
    """The same folder of the user, with manifests in it, of each corpus the newest."""

    work = "fetches"
    contents = "manifests of corpora; set storage.cache"

    def keep_only(self, url: str, path: Path) -> None:
        """Remove older manifests of a corpus. Processes that mapped one keep it."""
        latest = self.path(url, "latest")
        try:
            older = self.folder / latest.read_text()
        except FileNotFoundError:
            older = path
        latest.write_text(path.name)
        if older != path and older.parent == self.folder and older.suffix == path.suffix:
            older.unlink(missing_ok=True)
