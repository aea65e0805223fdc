"""The shards of a folder: which files are shards, and whether some of them are copies of others.

Everything here comes from names, counts and the numbers of files on the disk. No shard is read.
"""

import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fmsdata.core.limits import describe_os_error
from fmsdata.core.wording import counted
from fmsdata.corpus.selection import Files, has_patterns, select
from fmsdata.errors import DataError, DeniedError, MissingError
from fmsdata.formats import SUFFIXES, format_of
from fmsdata.planning.counts import Counts
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.local import FileId, file_entry, list_files, list_ids
from fmsdata.storage.location import Location

ARROW = ".arrow"
# Hugging Face datasets writes the results of map, filter and shuffle beside the data, as `cache-*.arrow`.
LEFTOVER_FILE = re.compile(r"cache-.*\.arrow|tmp[a-z0-9_]{8}\.arrow")
LEFTOVER_FOLDER = re.compile(r".*\.incomplete|_temporary")
COPIED = re.compile(
    r"(?P<of>.+?)(?: ?\(\d+\)| - copy(?: \(\d+\))?|[ ._-](?:copy|bak|backup|old)[ ._-]?\d*)"
    r"|copy[ _-]of[ _-](?P<of_>.+)",
    re.IGNORECASE,
)
VALIDATION = "validation"  # the folder with the documents that `fmsdata prepare` held out
UNFINISHED = ".fmsdata-prepare"  # the folder with its work in progress
MANIFEST = "fmsdata-prepare.json"  # in `meta` of a corpus that `fmsdata prepare` wrote
ENOUGH_DOCUMENTS = 100  # so that two shards don't have the same counts by chance
MOST_CHECKED = 100
# Endings that are not read, but look as if they were: each with the one that is.
OTHER_ENDINGS = {ending.upper(): ending for ending in SUFFIXES} | {
    other + packed: ".jsonl" + packed for other in (".ndjson", ".jsonlines") for packed in ("", ".gz", ".zst")
}


class ShardList(NamedTuple):
    """The shards of a folder, sorted by name."""

    names: list[str]
    entries: tuple[Entry, ...] = ()  # sizes and versions, if they are not local
    skipped: tuple[str, ...] = ()  # files that end like shards, but that other programs left behind
    others: tuple[str, ...] = ()  # files of other formats, which are not read because there are Arrow shards
    misnamed: tuple[str, ...] = ()  # files that are not read because of their ending, though they look like shards

    def only(self, names: Sequence[str]) -> "ShardList":
        """Some of these shards."""
        chosen = set(names)
        return self._replace(names=list(names), entries=tuple(e for e in self.entries if e.name in chosen))


def is_leftover(name: str) -> bool:
    """Whether a file, by its path inside the source, is the cache or the unfinished work of another program.

    >>> is_leftover("cache-5b3f1c0d9e8a7b6c_00000_of_00004.arrow"), is_leftover("part-0.arrow")
    (True, False)
    """
    *folders, file = name.split("/")
    return bool(LEFTOVER_FILE.fullmatch(file)) or any(map(LEFTOVER_FOLDER.fullmatch, folders))


def all_shards(folder: Location) -> ShardList:
    """The files of all formats below a folder, of which there may be none."""
    if folder.local is not None:
        names, entries = list_files(folder.local, (*SUFFIXES, *OTHER_ENDINGS)), []
    else:
        entries = folder.files((*SUFFIXES, *OTHER_ENDINGS))
        names = [entry.name for entry in entries]
    named = [name for name in names if name.endswith(SUFFIXES)]
    kept = [name for name in named if _is_shard(name) and not is_leftover(name)]
    misnamed = tuple(name for name in names if not name.endswith(SUFFIXES) and _is_shard(name))
    return ShardList(named, tuple(entries), tuple(filter(is_leftover, named)), (), misnamed).only(kept)


def find_shards(folder: Location) -> ShardList:
    """The shards below a folder, of which there may be none. Where there are Arrow shards, other files are not read."""
    found = all_shards(folder)
    names, others = arrow_first(found.names)
    return found.only(names)._replace(others=others)


def arrow_first(names: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The names that are read, and those that are not because there are Arrow shards."""
    arrow = [name for name in names if name.endswith(ARROW)]
    return (arrow, tuple(name for name in names if not name.endswith(ARROW))) if arrow else (list(names), ())


def by_kind(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arrow shards, and files of other formats in folders without Arrow shards."""
    arrow = [name for name in names if name.endswith(ARROW)]
    folders = {posixpath.dirname(name) for name in arrow}
    return arrow, [name for name in names if not name.endswith(ARROW) and posixpath.dirname(name) not in folders]


def list_shards(folder: Location, files: Files = None) -> ShardList:
    """The shards of a source, of which there must be at least one, all of one kind unless `files` selects them."""
    if files is not None:
        return _named_files(folder, files) if not has_patterns(files) else _selected(folder, files)
    found = find_shards(folder) if folder.local is None or folder.is_dir() else ShardList([])
    if found.names:
        kinds = Counter(format_of(name).kind for name in found.names)
        if len(kinds) > 1:
            counts = " and ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
            raise DataError(
                f"{folder}: {counts} files; a source has files of one kind: select them with `files`, such as "
                f"'*{posixpath.splitext(found.names[0])[1]}', or move the others away"
            )
        return found
    if not folder.is_dir():
        raise DataError(f"{folder}: {folder.why_no_folder()}; check `path` of the source")
    only = f" ({note_of_skipped(found.skipped)})" if found.skipped else _found_instead(folder)
    raise DataError(f"{folder}: no shards; a source is a folder with files ending in {', '.join(SUFFIXES)}{only}")


def shard_entries(folder: Location) -> list[Entry]:
    """The shards of all sources below a folder, at least one, with their sizes and versions."""
    found = all_shards(folder) if folder.local is None or folder.is_dir() else ShardList([])
    names = sorted(name for names in by_kind(found.names) for name in names) or list_shards(folder).names
    if folder.local is None:
        return list(found.only(names).entries)
    entries = []
    for name in names:
        try:
            entries.append(file_entry(folder.local, name))
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be read: {describe_os_error(error)}") from None
    return entries


def held_out(root: Location) -> set[str]:
    """The folders of a corpus that are no sources: the documents that `fmsdata prepare` held out."""
    try:
        files = (root / "meta").level().files
    except (DeniedError, MissingError):
        return set()
    return {VALIDATION} if any(entry.name == MANIFEST for entry in files) else set()


def _selected(folder: Location, files: Sequence[str]) -> ShardList:
    if not folder.is_dir():
        raise DataError(f"{folder}: {folder.why_no_folder()}; check `path` of the source")
    found = all_shards(folder)
    return found.only(select(found.names, files, folder))


def _named_files(folder: Location, files: Sequence[str]) -> ShardList:
    """Files that are named one by one. The folder is not listed: it may hold much else."""
    for name in files:
        if not name.endswith(SUFFIXES):
            raise DataError(f"{folder / name}: unknown format; files end in {', '.join(SUFFIXES)}")
        if folder.local is not None and not (folder.local / name).is_file():
            raise DataError(f"{folder / name}: no such file; check `path` and `files` of the source")
    if folder.local is not None:
        return ShardList(sorted(files))
    connection = folder.connection
    paths = {name: (folder / name).path for name in sorted(files)}
    found = {name: connection.run(connection.info(path)) for name, path in paths.items()}
    return ShardList(sorted(files), tuple(entry._replace(name=name) for name, entry in found.items()))


def _is_shard(name: str) -> bool:
    """Whether a file is not in a `meta` folder, which holds counts and what others noted."""
    return name.endswith(ARROW) or "meta" not in name.split("/")[:-1]


def _found_instead(folder: Location) -> str:
    """What to say of the files of a folder without shards."""
    names = [name for name in folder.names(("",)) if "meta" not in name.split("/")[:-1]]
    endings = Counter(posixpath.splitext(name)[1] for name in names)
    if not names:
        return "; it has no files"
    counts = ", ".join(f"{count:,} {ending or 'without an ending'}" for ending, count in endings.most_common(3))
    more = "; rename .json files with one object a line to .jsonl" if ".json" in endings else ""
    if misnamed := [name for name in names if name.endswith(tuple(OTHER_ENDINGS))]:
        more += f"; {_rename(misnamed[0])}"
    return f", but this has {counted(len(names), 'file')} ({counts}), such as {names[0]}{more}"


def note_of_skipped(skipped: Sequence[str]) -> str:
    """What to say of files that were left out."""
    return (
        f"skipped {counted(len(skipped), 'file')} that another program left there, such as {skipped[0]}: names like "
        "cache-*.arrow are those of Hugging Face's caches; if it is data, rename it"
    )


def note_of_others(others: Sequence[str]) -> str:
    """What to say of files of other formats beside Arrow shards."""
    return (
        f"does not read {counted(len(others), 'file')} of other formats beside the Arrow shards, such as {others[0]}; "
        "select them with `files` to read them"
    )


def note_of_misnamed(misnamed: Sequence[str]) -> str:
    """What to say of files whose endings are almost those of shards."""
    return f"does not read {counted(len(misnamed), 'file')}, such as {misnamed[0]}, because of the ending; " + _rename(
        misnamed[0]
    )


def _rename(name: str) -> str:
    ending = max((ending for ending in OTHER_ENDINGS if name.endswith(ending)), key=len)
    return f"rename {ending} to {OTHER_ENDINGS[ending]}"


def note_of_copies(
    folder: Location, names: Sequence[str], counts: Mapping[str, tuple[int, int]], *, named: bool = False
) -> str | None:
    """What to say if the shards look as if some of them were there twice. `named`: the folder was not listed."""
    same = _same_files(folder, names, named=named)
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
    stems: dict[str, str] = {}
    for name in names:
        folder, file = posixpath.split(name)
        folders[folder].append(file)
        suffix = max((ending for ending in SUFFIXES if file.endswith(ending)), key=len, default="")
        stem = file.removesuffix(suffix)
        other = stems.setdefault(posixpath.join(folder, stem), name)
        if other != name and counts[other] == counts[name]:  # plain and compressed
            yield name, other
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


def _same_files(folder: Location, names: Sequence[str], *, named: bool) -> dict[str, str]:
    """Local files that have two names, by a link: each with its first name."""
    if folder.local is None:
        return {}
    first: dict[FileId, str] = {}
    pairs: dict[str, str] = {}
    wanted = set(names)
    for name, found in sorted(_ids(folder.local, names) if named else list_ids(folder.local, SUFFIXES)):
        if name in wanted and (other := first.setdefault(found, name)) != name:
            pairs[name] = other
    with suppress(OSError):  # a file that is gone is reported when it is read
        for name, other in list(pairs.items())[:MOST_CHECKED]:  # some network filesystems list no true number
            if not os.path.samefile(folder.local / name, folder.local / other):
                return {}
    return pairs


def _ids(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, FileId]]:
    for name in names:
        with suppress(OSError):
            status = os.stat(folder / name)
            yield name, (status.st_dev, status.st_ino)
