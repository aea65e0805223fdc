"""The shards of a folder: which files are shards, and whether some of them are copies of others.

Everything here comes from names, counts and the numbers of files on the disk. No shard is read.
"""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from fmsdata.core.wording import counted
from fmsdata.errors import DataError
from fmsdata.formats import SUFFIXES
from fmsdata.planning.counts import Counts
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.local import FileId, list_files, list_ids
from fmsdata.storage.location import Location

# Hugging Face datasets writes the results of map, filter and shuffle beside the data, as `cache-*.arrow`.
LEFTOVER_FILE = re.compile(r"cache-.*\.arrow|tmp[a-z0-9_]{8}\.arrow")
LEFTOVER_FOLDER = re.compile(r".*\.incomplete|_temporary")
COPIED = re.compile(
    r"(?P<of>.+?)(?: ?\(\d+\)| - copy(?: \(\d+\))?|[ ._-](?:copy|bak|backup|old)[ ._-]?\d*)"
    r"|copy[ _-]of[ _-](?P<of_>.+)",
    re.IGNORECASE,
)
ENOUGH_DOCUMENTS = 100  # so that two shards don't have the same counts by chance
MOST_CHECKED = 100


class ShardList(NamedTuple):
    """The shards of a folder, sorted by name."""

    names: list[str]
    entries: tuple[Entry, ...] = ()  # sizes and versions, if they are not local
    skipped: tuple[str, ...] = ()  # files that end like shards, but that other programs left behind


def is_leftover(name: str) -> bool:
    """Whether a file, by its path inside the source, is the cache or the unfinished work of another program.

    >>> is_leftover("cache-5b3f1c0d9e8a7b6c_00000_of_00004.arrow"), is_leftover("part-0.arrow")
    (True, False)
    """
    *folders, file = name.split("/")
    return bool(LEFTOVER_FILE.fullmatch(file)) or any(map(LEFTOVER_FOLDER.fullmatch, folders))


def find_shards(folder: Location) -> ShardList:
    """The shards below a folder, of which there may be none."""
    if folder.local is not None:
        names = list_files(folder.local, SUFFIXES)
        return ShardList([name for name in names if not is_leftover(name)], (), tuple(filter(is_leftover, names)))
    entries = folder.files(SUFFIXES)
    kept = tuple(entry for entry in entries if not is_leftover(entry.name))
    skipped = tuple(entry.name for entry in entries if is_leftover(entry.name))
    return ShardList([entry.name for entry in kept], kept, skipped)


def list_shards(folder: Location) -> ShardList:
    """The shards of a source, of which there must be at least one."""
    found = find_shards(folder) if folder.local is None or folder.is_dir() else ShardList([])
    if found.names:
        return found
    if not folder.is_dir():
        raise DataError(f"{folder}: {folder.why_no_folder()}; check `path` of the source")
    only = f" ({note_of_skipped(found.skipped)})" if found.skipped else ""
    raise DataError(f"{folder}: no shards; a source is a folder with files ending in {', '.join(SUFFIXES)}{only}")


def note_of_skipped(skipped: Sequence[str]) -> str:
    """What to say of files that were left out."""
    return (
        f"skipped {counted(len(skipped), 'file')} that another program left there, such as {skipped[0]}: names like "
        "cache-*.arrow are those of Hugging Face's caches; if it is data, rename it"
    )


def note_of_copies(folder: Location, names: Sequence[str], counts: Mapping[str, tuple[int, int]]) -> str | None:
    """What to say if the shards look as if some of them were there twice."""
    same = _same_files(folder, names)
    pairs = {**dict(_copies(names, counts)), **same}
    if not pairs:
        return None
    first = min(pairs)
    how = "is the same file as" if first in same else "has the same counts as"
    return (
        f"{len(pairs):,} of {counted(len(names), 'file')} look like copies of others ({first} {how} {pairs[first]}): "
        "a source that holds both reads their documents twice in every epoch; remove the copies"
    )


def _copies(names: Sequence[str], counts: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Shards that look like copies, each with the shard that it is a copy of."""
    known = set(names)
    folders: dict[str, list[str]] = defaultdict(list)
    for name in names:
        folder, file = posixpath.split(name)
        folders[folder].append(file)
        stem, suffix = posixpath.splitext(file)
        found = COPIED.fullmatch(stem)
        if found:
            original = posixpath.join(folder, f"{found['of'] or found['of_']}{suffix}")
            if original in known and counts[original] == counts[name]:
                yield name, original
    twins: dict[object, list[str]] = defaultdict(list)
    for folder, files in folders.items():
        inside = tuple((file, counts[posixpath.join(folder, file)]) for file in files)
        if _tell_apart(count for _, count in inside):
            twins[inside].append(folder)
    for alike in twins.values():
        first, *others = sorted(alike, key=lambda folder: (folder.count("/") + bool(folder), folder))
        for folder in others:
            for file in folders[folder]:
                yield posixpath.join(folder, file), posixpath.join(first, file)


def counts_tell_apart(counts: Counts) -> bool:
    """Whether another source would hardly have the same counts."""
    return _tell_apart(zip(counts.documents.tolist(), counts.tokens.tolist(), strict=True))


def _tell_apart(counts: Iterable[tuple[int, int]]) -> bool:
    """Whether other documents would hardly have the same counts.

    Documents of one length do, as in shards of packed rows.
    """
    irregular = {(documents, tokens) for documents, tokens in counts if documents and tokens % documents}
    return len(irregular) > 1 or sum(documents for documents, _ in irregular) >= ENOUGH_DOCUMENTS


def _same_files(folder: Location, names: Sequence[str]) -> dict[str, str]:
    """Local files that have two names, by a link: each with its first name."""
    if folder.local is None:
        return {}
    first: dict[FileId, str] = {}
    pairs: dict[str, str] = {}
    wanted = set(names)
    for name, found in sorted(list_ids(folder.local, SUFFIXES)):
        if name in wanted and (other := first.setdefault(found, name)) != name:
            pairs[name] = other
    with suppress(OSError):  # a file that is gone is reported when it is read
        for name, other in list(pairs.items())[:MOST_CHECKED]:  # some network filesystems list no true number
            if not os.path.samefile(folder.local / name, folder.local / other):
                return {}
    return pairs
