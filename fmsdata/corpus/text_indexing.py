"""`fmsdata index` for text: the index beside the corpus, made anew only of files that have changed."""

from collections.abc import Sequence
from typing import NamedTuple

from fmsdata.corpus.progress import progress
from fmsdata.corpus.text_copy import needs_copy
from fmsdata.corpus.text_counts import read_index, try_entries
from fmsdata.corpus.text_index import FILE, TextEntry, TextIndex, summed, write_table
from fmsdata.corpus.token_lengths import token_lengths
from fmsdata.corpus.tokenizer import Tokenizer
from fmsdata.errors import CountsError, DataError
from fmsdata.formats import format_of
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location


class IndexedText(NamedTuple):
    """What was found and done."""

    file: Location  # that holds the index
    written: bool
    entries: dict[str, TextEntry]
    tokens: int | None  # of all files, if they were counted
    notes: list[str]  # in words


def index_text(
    root: Location, files: Sequence[Entry], column: str | None, tokenizer: Tokenizer | None = None
) -> tuple[IndexedText | None, list[str]]:
    """Write the index of the text files among these, and return the names of those that hold tokens.

    Without `tokenizer`, tokens that were counted before are kept.
    """
    place = root / "meta" / FILE
    notes: list[str] = []
    try:
        before = read_index(root)
    except CountsError as error:
        before = TextIndex({})
        notes.append(f"made anew: {error}")
    same = {file.name: entry for file in files if (entry := _unchanged(before, file, column)) is not None}
    missing = [file for file in files if file.name not in same]
    read = try_entries(root, missing, column) if missing else {}
    with_tokens = [name for name, entry in read.items() if entry is None]
    entries = {**same, **{name: entry for name, entry in read.items() if entry is not None}}
    field = column or ""
    if before.field != field:
        entries = {name: entry._replace(tokens=None) for name, entry in entries.items()}
    if not entries and not before.entries:
        return None, with_tokens
    identity = before.tokenizer
    try:
        if tokenizer is not None:
            identity = tokenizer.identity
            entries = _count(root, [file for file in files if file.name in entries], entries, column, tokenizer, notes)
        if all(entry.tokens is None for entry in entries.values()):
            identity = None
        data = write_table(TextIndex(entries, identity, field))
        written = not (place.is_file() and place.read_bytes() == data)
        if written:
            place.write_bytes(data)
    except OSError as error:
        raise DataError(f"{place.parent}: the index can't be written: {error.strerror}") from None
    if missing and same:
        notes.append(f"read {len(missing):,} text files; {len(same):,} did not change since they were indexed")
    if whole := [name for name, entry in entries.items() if needs_copy(name, entry)]:
        notes.append(
            f"{len(whole):,} text files, such as {min(whole)}, can't be read from the middle: each machine that reads "
            "them copies them once to its cache folder; compress them in smaller frames, or prepare them, to avoid that"
        )
    return IndexedText(place, written, dict(sorted(entries.items())), summed(entries.values()), notes), with_tokens


def _unchanged(before: TextIndex, file: Entry, column: str | None) -> TextEntry | None:
    """What is known of a file from before, if it is the same."""
    entry = before.entries.get(file.name)
    if entry is None or file.version is None or (entry.size, entry.version) != (file.size, file.version):
        return None
    if format_of(file.name).kind == "parquet" and entry.column != (entry.column if column is None else column):
        return None
    return entry


def _count(
    root: Location,
    files: Sequence[Entry],
    entries: dict[str, TextEntry],
    column: str | None,
    tokenizer: Tokenizer,
    notes: list[str],
) -> dict[str, TextEntry]:
    """Count the tokens of each document of each file."""
    counted, again = dict(entries), 0
    with progress("tokenizing", len(files)) as done:
        for file in files:
            entry = entries[file.name]
            found, new = token_lengths(root, file, entry.column or column, tokenizer, entry.documents)
            counted[file.name] = entry._replace(tokens=found.tokens)
            again += not new
            done()
    if again:
        notes.append(f"{again:,} text files were tokenized before with the same tokenizer")
    return counted
