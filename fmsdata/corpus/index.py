"""The index: counts of all shards of a corpus, in one file beside them.

The folder may be shared with other programs that have counts of their own, and that read every file
whose name has `counts` in it. So their files are only compared, unless a user asks to replace them.
"""

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fmsdata.core.wording import counted, few
from fmsdata.corpus.counts import entries_of, measure_shards
from fmsdata.corpus.counts_csv import HEADER, INDEX, Count, CountsTable, Parts, all_counts_files, read_rows
from fmsdata.corpus.growth import grow
from fmsdata.corpus.listing import (
    all_shards,
    by_kind,
    note_of_copies,
    note_of_misnamed,
    note_of_others,
    note_of_skipped,
)
from fmsdata.corpus.manifest import FILE
from fmsdata.corpus.manifest_writing import (
    counts_of_unchanged,
    folder_times,
    keep_manifest,
    outdated_above,
    remove_manifest,
)
from fmsdata.corpus.text_indexing import IndexedText, index_text
from fmsdata.corpus.tokenizer import Tokenizer
from fmsdata.errors import CountsError, DataError
from fmsdata.formats import SUFFIXES
from fmsdata.storage.location import Location

OWN = "counts.csv"  # where the index is, if no other program has counts there
REPLACED = "replaced"  # a folder in `meta` for files that were replaced
SHOWN = 5  # differences in a message


class Indexed(NamedTuple):
    """What `index_corpus` found and did."""

    file: Location  # that holds the counts
    written: bool
    rows: int
    documents: int
    tokens: int
    notes: list[str]  # what was done and found, in words
    text: IndexedText | None = None  # the index of text files, which is a file of its own
    manifest: Location | None = None  # the file that was written besides, if it changed
    added: int = 0  # Arrow shards that were not there at the last index


def write_index(
    root: str | os.PathLike[str] | Location, column: str | None = None, *, replace: bool = False
) -> Location:
    """Count every shard below a folder and write the counts, usually to `meta/counts.csv`.

    >>> write_index("corpus")     # doctest: +SKIP
    Location('corpus/meta/counts.csv')
    """
    return index_corpus(root, column, replace=replace).file


def index_corpus(
    root: str | os.PathLike[str] | Location,
    column: str | None = None,
    *,
    replace: bool = False,
    tokenizer: Tokenizer | None = None,
    append: bool = False,
) -> Indexed:
    """Count every shard below a folder, compare with the counts that are there, and write what is missing.

    Text files get an index of their own. With `tokenizer`, their tokens are counted too.

    Counts of other programs are left as they are. If they are right and complete, nothing is
    written. If they lack shards, the index becomes a file of its own that only fmsdata reads. If
    they are wrong, that is an error. With `replace`, they are replaced, and kept in `meta/replaced`.

    With `append`, runs that have begun may read the new shards, each from the next epoch of its source
    on. A shard that changed or is gone is then an error.
    """
    root = Location(root).listed()
    if root.local is not None and not root.is_dir():
        raise DataError(f"{root}: {root.why_no_folder()}; check the path")
    if not all_shards(root).names:
        raise DataError(f"{root}: no files ending in {', '.join(SUFFIXES)} below it; check the path")
    times = folder_times(root)
    found = all_shards(root)  # again, if it is local: it is what it was at these times, or a start will notice
    notes = [note_of_skipped(found.skipped)] if found.skipped else []
    arrow, not_arrow = by_kind(found.names)
    if append and not arrow:
        raise DataError(
            f"{root}: no Arrow shards: a run can't take up text files while it goes on; give new files a source of "
            "their own, and add it to the mix"
        )
    if len(arrow) + len(not_arrow) < len(found.names):
        notes.append(note_of_others([name for name in found.names if name not in {*arrow, *not_arrow}]))
    if found.misnamed:
        notes.append(note_of_misnamed(found.misnamed))
    entries = entries_of(root, found.only(arrow))
    if (corpus := outdated_above(root, entries)) is not None:
        part = f"this folder is part of the corpus at {corpus}, and runs with that path plan from the manifest there"
        if append and not (root / "meta" / FILE).is_file():
            raise DataError(f"{root}: {part}; nothing was written. Run `fmsdata index {corpus} --append`")
        notes.append(f"warning: {part}: run {_command(corpus, append=append)} too")
    text, with_tokens = index_text(root, entries_of(root, found.only(not_arrow)), column, tokenizer)
    names = sorted([*arrow, *with_tokens])
    if text is not None:
        notes += text.notes
    if not names and text is not None:
        remove_manifest(root)
        documents = sum(entry.documents for entry in text.entries.values())
        return Indexed(text.file.alone(), text.written, 0, documents, text.tokens or 0, notes, text)
    known = counts_of_unchanged(root, entries, column)
    unknown = [name for name in names if name not in known]
    measured = known | (measure_shards(root, unknown, column) if unknown else {})
    counts = {name: measured[name].counts for name in names}
    if copies := note_of_copies(root, names, counts):
        notes.append(f"warning: {copies}")
    grown = grow(root, entries, counts, append=append)
    notes += grown.notes
    notes += _nested(root, counts, append=append)
    others = [name for name in found.names if name not in counts]

    def before() -> None:
        """If only the counts say which shards are old, keep that: no times, so that a start does not rely on it."""
        if grown.unkept:
            keep_manifest(root, grown.unkept, measured, column, {}, others, None)

    file, written = _write_csv(root, counts, notes, before, replace=replace)
    manifest = None
    try:
        manifest = keep_manifest(root, entries, measured, column, times, others, grown.growth)
    except DataError as error:
        if written or append:
            raise
        notes.append(f"warning: {error}; without it, every start lists the shards")  # a folder that is only read
    documents, tokens = (sum(count[i] for count in counts.values()) for i in (0, 1))
    return Indexed(file.alone(), written, len(counts), documents, tokens, notes, text, manifest, grown.added)


def _write_csv(
    root: Location, counts: Mapping[str, Count], notes: list[str], before: Callable[[], None], *, replace: bool
) -> tuple[Location, bool]:
    """Compare with the counts that are there and write what is missing: the file with the counts, if it was written.

    `before` is called before they are written.
    """
    meta = root / "meta"
    try:
        files = {file.name: file for file in all_counts_files(root)}
        own = {name for name, file in files.items() if _is_own(file)}
        others = [file for name, file in files.items() if name not in own]
        compared = [_compare(file, counts) for file in others]
        wrong = [
            f"{file}: {difference}" for file, other in zip(others, compared, strict=True) for difference in other.wrong
        ]
        lacking = [shard for shard in counts if not any(shard in other.listed for other in compared)]
        if wrong and not replace:
            raise CountsError(
                f"the counts of another program disagree with the shards: {few(wrong, SHOWN, '; ')}; "
                "nothing was written. Correct them there, or run `fmsdata index --replace` to replace them "
                f"(they are kept in {meta / REPLACED})"
            )
        target, stale = meta / OWN, own - {OWN}
        if others and (wrong or lacking) and replace:
            target = others[0] if len(others) == 1 else target
            for file in others:
                (meta / REPLACED / file.name).write_bytes(file.read_bytes())
                notes.append(f"replaced {file}, which is kept as {meta / REPLACED / file.name}")
            stale = (own | {file.name for file in others}) - {target.name}
        elif others:
            for file, other in zip(others, compared, strict=True):
                missing = counted(len(counts) - len(other.listed), "shard")
                finding = f"lacks {missing}" if lacking else "agrees with the shards"
                notes.append(f"left {file} as it is: another program's, it {finding}{other.elsewhere}")
            if not lacking and not own:
                return others[0], False
            target, stale = meta / (OWN if OWN in own else INDEX), set()
        table = _table(counts)
        written = not (target.name in files and target.read_bytes() == table)
        if written:
            before()
            target.write_bytes(table)
        for name in sorted(stale):
            files[name].remove()
            notes.append(f"removed {files[name]}, which is in {target.name} now")
    except OSError as error:
        raise DataError(f"{meta}: the counts can't be written: {error.strerror}") from None
    if written and target.name == INDEX:
        notes.append(f"fmsdata reads {target} instead of the other counts there; fms-fsdp's loader ignores it")
    return target, written


def write_counts(root: Location, counts: Mapping[str, Count]) -> Location:
    """Write the counts of a corpus that was just made, as `index_corpus` would."""
    file = root / "meta" / OWN
    file.write_bytes(_table(counts))
    return file


def _table(counts: Mapping[str, Count], slash: str = "/") -> bytes:
    """The file. Paths begin with a slash, by which fms-fsdp's loader finds the dataset in them."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((f"{slash}{shard}", *counts[shard]) for shard in sorted(counts))
    return table.getvalue().encode()


def _is_own(file: Location) -> bool:
    """Whether a file is an index: by its name, and by being exactly what would be written for its rows."""
    if file.name == INDEX:
        return True
    if file.name != OWN:
        return False
    content = file.read_bytes()
    try:
        rows = {"/".join(row): count for row, count in read_rows([file]).items()}
    except CountsError:
        return False
    return content in (_table(rows), _table(rows, slash=""))  # earlier versions wrote no slash


class _Compared(NamedTuple):
    """A counts file beside what the shards hold."""

    listed: set[str]  # shards that have a row
    wrong: list[str]  # differences, in words
    elsewhere: str = ""  # what to add about rows of folders that are not here


def _compare(file: Location, counts: Mapping[str, Count]) -> _Compared:
    try:
        rows = read_rows([file])
        of_shards = CountsTable(file, rows).rows_of((), list(counts))
    except CountsError as error:
        return _Compared(set(), [str(error).removeprefix(f"{file}: ")])
    wrong = [
        f"{shard} has {_count(rows[row])} there, and the file {_count(counts[shard])}"
        for shard, row in of_shards.items()
        if rows[row] != counts[shard]
    ]
    folders = {tuple(shard.split("/")[:-1]) for shard in counts}
    prefixes = {row[: -len(shard.split("/"))] for shard, row in of_shards.items()} | {()}
    used, elsewhere = set(of_shards.values()), 0
    for row in rows.keys() - used:
        if not row or not row[-1].endswith(SUFFIXES):
            continue
        if _folder_is_here(row, folders, prefixes):
            wrong.append(f"it lists {'/'.join(row)}, but there is no such file")
        else:
            elsewhere += 1
    return _Compared(
        set(of_shards),
        sorted(wrong),
        f"; {counted(elsewhere, 'row')} {'is' if elsewhere == 1 else 'are'} of other folders" if elsewhere else "",
    )


def _folder_is_here(row: Parts, folders: set[Parts], prefixes: set[Parts]) -> bool:
    return any(row[: len(prefix)] == prefix and row[len(prefix) : -1] in folders for prefix in prefixes)


def _nested(root: Location, counts: Mapping[str, Count], *, append: bool) -> Iterator[str]:
    """What to say of counts in folders further down. A source that is read by itself has the nearest."""
    folders = {"/".join(parts[:i]) for shard in counts for parts in [shard.split("/")] for i in range(1, len(parts))}
    for folder in sorted(folders):
        files = all_counts_files(root / folder)
        if not files:
            continue
        inside = {shard[len(folder) + 1 :]: count for shard, count in counts.items() if shard.startswith(f"{folder}/")}
        compared = [(file, _compare(file, inside)) for file in files]
        for file, other in compared:
            if other.wrong:
                raise CountsError(
                    f"{file} disagrees with the shards: {few(other.wrong, SHOWN, '; ')}; nothing was written. "
                    f"Correct it, or run `fmsdata index {root / folder} --replace`"
                )
        lacking = inside.keys() - set().union(*(other.listed for _, other in compared))
        if compared and lacking:
            yield (
                f"warning: {compared[0][0]} is nearer to its shards than this index, but lacks "
                f"{counted(len(lacking), 'shard')}; a reader of {root / folder} by itself, and a run whose path is not "
                f"{root}, use what is nearer: run {_command(root / folder, append=append)} too"
            )


def _command(folder: Location, *, append: bool) -> str:
    return f"`fmsdata index {folder}{' --append' if append else ''}`"


def _count(count: Count) -> str:
    return f"{counted(count[0], 'document')} and {counted(count[1], 'token')}"
