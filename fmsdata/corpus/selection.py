"""Which files a source reads: all of a folder, or those that names and patterns select.

A source can be given as a folder, a pattern such as `corpus/web/*.parquet`, or a list of files. The
last two become a folder and patterns relative to it. `*` and `?` stand for characters of one name,
`**` for any number of folders.
"""

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from typing import Any, TypeAlias

from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, DataError
from fmsdata.storage.location import Location
from fmsdata.storage.settings import Storage

SourcePath: TypeAlias = "str | os.PathLike[str] | Location | Sequence[str | os.PathLike[str]]"
Files: TypeAlias = "tuple[str, ...] | None"
MAGIC = re.compile(r"[*?[]")


def locate(
    path: SourcePath,
    files: str | Collection[str] | None = None,
    options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> tuple[Location, Files]:
    """The folder of a source, and the names and patterns of the files in it; None for all.

    >>> locate(["corpus/web/a.parquet", "corpus/web/new/b.parquet"])
    (Location('corpus/web'), ('a.parquet', 'new/b.parquet'))
    >>> locate("s3://bucket/web/*.parquet")
    (Location('s3://bucket/web'), ('*.parquet',))
    """
    paths: list[str]
    if isinstance(path, Location):
        return Location(path, options, storage), check_files(files)
    if isinstance(path, str | os.PathLike):
        if not _is_pattern(os.fspath(path)):
            return Location(path, options, storage), check_files(files)
        paths = [os.fspath(path)]
    else:
        if not (
            isinstance(path, Sequence) and path and all(each and isinstance(each, str | os.PathLike) for each in path)
        ):
            raise ConfigError(f"path is {shown(path)}; it must be a folder, a pattern, or a list of files")
        paths = [os.fspath(each) for each in path]
    if not any("://" in each for each in paths):
        paths = [os.path.normpath(os.path.expanduser(each)) for each in paths]
        if any(os.path.isabs(each) or each.startswith("..") for each in paths):
            paths = [os.path.abspath(each) for each in paths]
    if files is not None:
        raise ConfigError(f"files is {shown(files)}, but the path already selects files; give a folder, or no `files`")
    folder = _common_folder([_fixed_folder(each) for each in paths])
    below = [each[len(folder) :].lstrip("/") if folder not in ("", ".") else each for each in paths]
    return Location(folder or ".", options, storage), check_files(below)


def check_files(files: str | Collection[str] | None) -> Files:
    """Names and patterns relative to a folder, sorted: their order has no meaning."""
    if files is None:
        return None
    each = (files,) if isinstance(files, str) else tuple(files) if isinstance(files, Collection) else ()
    if not each or not all(isinstance(name, str) and name for name in each):
        raise ConfigError(f"files is {shown(files)}; it must be a pattern such as '*.parquet', or a list of names")
    for name in each:
        if name.startswith("/") or "://" in name or ".." in name.split("/"):
            raise ConfigError(f"files has {name!r}; names are relative to the folder of the source, and inside of it")
    normal = sorted(posixpath.normpath(name) for name in each)
    for one, two in pairwise(normal):
        if one == two:
            raise ConfigError(f"files has {one!r} twice; its documents would come twice in every epoch")
    return tuple(normal)


def has_patterns(files: Iterable[str]) -> bool:
    """Whether the files of a folder must be listed to know which ones are selected."""
    return any(map(MAGIC.search, files))


def select(names: Sequence[str], files: Sequence[str], folder: Location) -> list[str]:
    """Those of the names that are selected, sorted."""
    chosen: dict[str, str] = {}
    known = set(names)
    for pattern in files:
        if pattern in known:
            found = [pattern]
        else:
            parts = pattern.split("/")
            found = [name for name in names if _matches(name.split("/"), parts)]
        if not found:
            raise DataError(f"{folder}: no file matches {pattern!r}; {_examples(names)}")
        for name in found:
            if (other := chosen.setdefault(name, pattern)) != pattern:
                raise ConfigError(f"{folder}: {name} is selected twice, by {other!r} and by {pattern!r}; change one")
    return sorted(chosen)


def _examples(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"it has {shown}" if names else "it has no files of a known format"


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a name match those of a pattern."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[i:], pattern[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _is_pattern(path: str) -> bool:
    return bool(MAGIC.search(path)) and not os.path.isdir(path)  # a folder may be named like a pattern


def _fixed_folder(path: str) -> str:
    """The folder of a path, up to its first part with a pattern."""
    protocol, separator, inside = path.partition("://")
    if not separator:
        protocol, inside = "", path
    parts = inside.split("/")[:-1]
    fixed = next((i for i, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    folder = "/".join(parts[:fixed])
    return f"{protocol}{separator}{folder}" or ("/" if path.startswith("/") else "")


def _common_folder(folders: Sequence[str]) -> str:
    """The folder that contains all of these."""
    levels = zip(*(folder.split("/") for folder in folders), strict=False)
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    folder = "/".join(shared)
    if "://" in folders[0] and len(shared) < 4 and folders[0] != folder:
        raise ConfigError(f"{folders[0]} and {folders[-1]} have no common folder; make them two sources")
    return folder if folder or not folders[0].startswith("/") else "/"
