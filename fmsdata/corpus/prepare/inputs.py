"""The files to prepare: which of them belong to which source, and how they are cut into units of work."""

from collections import Counter
from collections.abc import Sequence

from fmsdata.core.limits import describe_os_error
from fmsdata.core.wording import counted
from fmsdata.corpus.listing import is_leftover
from fmsdata.corpus.prepare.settings import InputFile, Settings, Unit
from fmsdata.corpus.scan import most_parts
from fmsdata.errors import ConfigError, DataError
from fmsdata.formats import SUFFIXES
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location

TEXTS = tuple(suffix for suffix in SUFFIXES if suffix != ".arrow")
SHOWN = 5  # kinds of files in a message


def find_inputs(source: Location) -> tuple[Location, list[InputFile], list[str]]:
    """The folder, its text files in order, and notes for the user.

    Folders in it are sources. Files directly in it are a source with the name of the folder. A single
    file is a source with its own name.
    """
    if source.name.endswith(SUFFIXES) and source.is_file():
        name = source.name
        inside = [entry for entry in _entries(source.parent, [name]) if entry.name == name]
        stem = name[: -max(len(suffix) for suffix in SUFFIXES if name.endswith(suffix))]
        return source.parent, [InputFile(stem or name, name, name, *entry[1:]) for entry in inside], []
    if not source.is_dir():
        raise DataError(f"{source}: {source.why_no_folder()}; check the path")
    entries = [entry for entry in _entries(source) if entry.name.partition("/")[0] != "meta"]
    texts = [entry for entry in entries if entry.name.endswith(SUFFIXES) and not is_leftover(entry.name)]
    others = [entry.name for entry in entries if not entry.name.endswith(SUFFIXES)]
    if not texts:
        raise DataError(f"{source}: no text to prepare; {_found(others)}")
    files = [_input(source, entry) for entry in texts]
    _require_sources(source, files)
    notes = []
    if others:
        notes.append(
            f"left out {counted(len(others), 'file')} whose ending is none of {', '.join(TEXTS)}, such as {others[0]}"
        )
    if len(texts) + len(others) < len(entries):
        notes.append("left out files that another program left behind, such as caches")
    return source, sorted(files, key=lambda file: (file.source, file.inner)), notes


def _entries(folder: Location, names: Sequence[str] | None = None) -> list[Entry]:
    """All files below a folder, with sizes and versions."""
    if folder.local is None:
        return folder.files(("",))
    entries = []
    for name in folder.names(("",)) if names is None else names:
        try:
            entries.append(file_entry(folder.local, name))
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be read: {describe_os_error(error)}") from None
    return entries


def _input(root: Location, entry: Entry) -> InputFile:
    folder, slash, inner = entry.name.partition("/")
    return InputFile(folder if slash else root.name, entry.name, inner if slash else entry.name, *entry[1:])


def _require_sources(root: Location, files: Sequence[InputFile]) -> None:
    """Raise if the files make no sources."""
    for file in files:
        if file.path.endswith(".arrow"):
            raise DataError(
                f"{root / file.path} is a shard of tokens; `fmsdata prepare` makes tokens of text: "
                "move it elsewhere, or use `fmsdata convert`"
            )
    loose = next((file for file in files if "/" not in file.path), None)
    if loose is not None and any("/" in file.path and file.source == loose.source for file in files):
        raise ConfigError(
            f"{root}: {loose.path} would be in a source {loose.source!r}, like the folder of this name; "
            "move it into a folder"
        )


def _found(others: Sequence[str]) -> str:
    if not others:
        return "the folder is empty"
    kinds = Counter(f".{name.rpartition('.')[2]}" if "." in name.rpartition("/")[2] else "no ending" for name in others)
    found = ", ".join(f"{count:,} with {kind}" for kind, count in kinds.most_common(SHOWN))
    return f"its files must end in one of {', '.join(TEXTS)}; there are {len(others):,} others: {found}"


def plan_units(settings: Settings) -> list[Unit]:
    """The units of all files, in the order of sources, files and parts."""
    units: list[Unit] = []
    for file in settings.files:
        parts = most_parts(Entry(file.path, file.size, file.version), settings.unit_bytes)
        units += [Unit(len(units) + part, file, part, parts) for part in range(parts)]
    return units
