"""Verifying a corpus: every document is read once, and everything that is wrong is reported.

Unlike planning, which stops at the first error, this reads on: a file that is damaged does not hide
what is wrong with the next one.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fmsdata.core.checks import whole
from fmsdata.core.keys import Ints
from fmsdata.core.wording import counted
from fmsdata.corpus.counts_csv import Count, all_counts
from fmsdata.corpus.duplicates import document_hashes, joined, repeated
from fmsdata.corpus.listing import ARROW, UNFINISHED, all_shards, note_of_copies, note_of_skipped, shard_entries
from fmsdata.corpus.manifest_writing import manifest_of
from fmsdata.corpus.progress import showing_progress
from fmsdata.corpus.scan import Scanned, scan_file
from fmsdata.corpus.text_counts import read_index
from fmsdata.errors import FmsdataError
from fmsdata.formats import format_of
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

LISTED = 10  # problems that are listed for each shard, and duplicates for the corpus


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and where."""

    shard: str  # relative to the corpus; empty for the corpus as a whole
    document: int | None  # its number in the shard; for lines of text, the first one is 0
    problem: str

    def __str__(self) -> str:
        where = f"{self.shard}, document {self.document}" if self.document is not None else self.shard
        return f"{where}: {self.problem}" if where else self.problem


@dataclass
class SourceReport:
    """What a source holds."""

    name: str
    kind: str = ""  # tokens or text
    format: str = ""
    dtypes: list[str] = field(default_factory=list)
    shards: int = 0
    documents: int = 0
    tokens: int = 0  # or bytes, for text
    empty: int = 0  # documents without tokens
    longest: int = 0
    smallest: int | None = None  # of the token ids
    largest: int | None = None


@dataclass
class VerifyReport:
    """What `verify_corpus` found. The corpus is right if there are no problems."""

    path: str
    sources: list[SourceReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    duplicates: int | None = None  # documents that are there before; None if they were not looked for


def verify_corpus(
    path: str | os.PathLike[str] | Location,
    *,
    vocabulary: int | None = None,
    column: str | None = None,
    duplicates: bool = False,
) -> VerifyReport:
    """Read every document below a folder, and report what is wrong.

    `vocabulary` is the number of token ids. `duplicates` looks for documents that are exactly equal,
    which takes about 100 bytes of memory for each document.

    >>> verify_corpus("corpus", vocabulary=50_257).problems     # doctest: +SKIP
    []
    """
    root = Location(path).listed()
    size = None if vocabulary is None else whole("vocabulary", vocabulary, least=1)
    return _Verification(root, size, column, duplicates).run()


class _Verification:
    def __init__(self, root: Location, vocabulary: int | None, column: str | None, duplicates: bool) -> None:
        self._root, self._vocabulary, self._column = root, vocabulary, column
        self._uncompared = False  # whether some counts can't be read
        self._listed: dict[str, tuple[int, int, int]] = {}  # size, documents and tokens in the manifest
        self._report = VerifyReport(str(root))
        self._sources: dict[str, SourceReport] = {}
        self._hashes: list[npt.NDArray[np.void]] | None = [] if duplicates else None
        self._hashed: list[tuple[int, str, Ints]] = []  # first hash, shard and documents of each part
        self._count = 0

    def run(self) -> VerifyReport:
        entries = shard_entries(self._root)
        names = [entry.name for entry in entries]
        counts = self._counts(entries)
        found: dict[str, Count] = {}
        with showing_progress(f"verifying {self._root.name}", sum(entry.size for entry in entries)) as progress:
            for entry in entries:
                count = self._shard(entry)
                if count is not None:
                    found[entry.name] = count
                    if (expected := counts.get(entry.name, count)) != count:
                        self._compare(entry.name, expected, count)
                    else:
                        self._compare_with_manifest(entry, count)
                progress.advance(entry.size)
        self._look_for_duplicates()
        if UNFINISHED in self._root.folders():
            self._wrong("", None, f"{self._root}: `fmsdata prepare` did not finish; run it again")
        self._take_notes(names, found, counts)
        self._report.sources = [self._sources[name] for name in sorted(self._sources)]
        return self._report

    def _counts(self, entries: Sequence[Entry]) -> dict[str, Count]:
        """What the counts and the index of text say of the shards. What is wrong with them is a problem."""
        names = [entry.name for entry in entries]
        try:
            counts = all_counts(self._root, names)
        except FmsdataError as error:
            self._uncompared = True
            counts, errors = {}, {str(error): None}
            for folder in sorted({name.partition("/")[0] for name in names if "/" in name}):  # the others still count
                try:
                    counts |= all_counts(self._root, [name for name in names if name.startswith(f"{folder}/")])
                except FmsdataError as other:
                    errors[str(other)] = None
            for problem in errors:
                self._wrong("", None, problem)
        try:
            index = read_index(self._root).entries
        except FmsdataError as error:
            self._uncompared, index = True, {}
            self._wrong("", None, str(error))
        self._read_manifest(entries)
        for entry in entries:
            if (listed := index.get(entry.name)) is not None:
                counts[entry.name] = listed.documents, listed.nbytes
                if listed.size != entry.size:
                    self._wrong(
                        entry.name,
                        None,
                        f"the index of text lists {counted(listed.size, 'byte')}, but the file has {entry.size:,}; "
                        "run `fmsdata index`",
                    )
        return counts

    def _read_manifest(self, entries: Sequence[Entry]) -> None:
        """What the manifest says of the shards. Which shards it lacks, and which it has too many."""
        try:
            rows = None if (manifest := manifest_of(self._root)) is None else manifest.rows("")
        except FmsdataError as error:
            self._wrong("", None, str(error))
            return
        if rows is None:
            return
        counts = zip(rows.sizes.tolist(), rows.documents.tolist(), rows.tokens.tolist(), strict=True)
        self._listed = dict(zip(rows.names, counts, strict=True))
        names = {entry.name for entry in entries if entry.name.endswith(ARROW)}
        for name in sorted(self._listed.keys() - names) if not self._uncompared else ():
            self._wrong(name, None, "is in the manifest, but there is no such file; run `fmsdata index`")
        if missing := sorted(names - self._listed.keys()):
            self._report.notes.append(
                f"the manifest lacks {counted(len(missing), 'shard')}, such as {missing[0]}; "
                f"run `fmsdata index {self._root}`"
            )

    def _compare_with_manifest(self, entry: Entry, found: Count) -> None:
        listed = self._listed.get(entry.name)
        if listed is not None and listed != (entry.size, *found):
            self._wrong(
                entry.name,
                None,
                f"the manifest lists {_facts(*listed)}, but the file has {_facts(entry.size, *found)}; "
                "run `fmsdata index`",
            )

    def _wrong(self, shard: str, document: int | None, problem: str) -> None:
        self._report.problems.append(Problem(shard, document, problem.removeprefix(f"{self._root / shard}: ")))

    def _source(self, shard: str) -> SourceReport:
        folder, slash, _ = shard.partition("/")
        name = folder if slash else self._root.name
        return self._sources.setdefault(name, SourceReport(name))

    def _shard(self, entry: Entry) -> Count | None:
        """Read a shard. None if not all of it can be read."""
        source = self._source(entry.name)
        source.shards += 1
        documents = tokens = 0
        problems = _Few(self, entry.name)
        source.format = source.format or format_of(entry.name).kind
        if format_of(entry.name).kind != source.format:
            problems.once(f"is not {source.format}, like the shards before it in source {source.name!r}")
        try:
            for some in scan_file(self._root / entry.name, entry, self._column, skip_bad=True):
                documents += len(some.ends) - 1
                tokens += int(some.ends[-1])
                self._look_at(source, some, problems)
                self._hash(entry.name, some)
        except (FmsdataError, OSError) as error:
            self._wrong(entry.name, None, str(error))
            return None
        finally:
            source.documents += documents
            source.tokens += tokens
            problems.close()
        return documents, tokens

    def _look_at(self, source: SourceReport, some: Scanned, problems: "_Few") -> None:
        length = np.diff(some.ends)
        source.empty += int((length == 0).sum())
        source.longest = max(source.longest, int(length.max(initial=0)))
        kind, dtype = "text" if some.text else "tokens", str(some.tokens.dtype)
        source.kind = source.kind or kind
        if kind != source.kind:
            problems.once(f"holds {kind}, but shards before it in source {source.name!r} hold {source.kind}")
        for number, reason in some.bad:
            problems.add(number - 1, reason)
        if some.text:
            return
        if dtype not in source.dtypes:
            source.dtypes.append(dtype)
        if not len(some.tokens):
            return
        low, high = int(some.tokens.min()), int(some.tokens.max())
        source.smallest = low if source.smallest is None else min(source.smallest, low)
        source.largest = high if source.largest is None else max(source.largest, high)
        if low < 0 or (self._vocabulary is not None and high >= self._vocabulary):
            for document, token in _outside(some, self._vocabulary):
                which = "negative" if token < 0 else f"outside the vocabulary of {self._vocabulary:,}"
                problems.add(document, f"token {token} is {which}")

    def _compare(self, shard: str, expected: Count, found: Count) -> None:
        text = self._source(shard).kind == "text"
        for what, old, new in zip(("documents", "tokens"), expected, found, strict=True):
            if old != new and not (text and what == "tokens"):  # which are bytes, and may be estimated
                self._wrong(shard, None, f"counts say {old:,} {what}, but the file holds {new:,}; run `fmsdata index`")

    def _hash(self, shard: str, some: Scanned) -> None:
        if self._hashes is None:
            return
        numbers = np.flatnonzero(np.diff(some.ends))  # empty documents are no duplicates
        self._hashed.append((self._count, shard, numbers + some.first))
        tokens = some.tokens if some.text else some.tokens.astype(np.int64)  # whatever type the shard has
        self._hashes.append(document_hashes(tokens, some.ends)[numbers])
        self._count += len(numbers)

    def _look_for_duplicates(self) -> None:
        if self._hashes is None:
            return
        later, first = repeated(joined(self._hashes))
        self._report.duplicates = len(later)
        starts = [start for start, _, _ in self._hashed]

        def named(place: int) -> tuple[str, int]:
            start, shard, numbers = self._hashed[bisect_right(starts, place) - 1]
            return shard, int(numbers[place - start])

        for place, before in zip(later[:LISTED].tolist(), first[:LISTED].tolist(), strict=True):
            shard, document = named(before)
            self._report.problems.append(Problem(*named(place), f"is a duplicate of {shard}, document {document}"))
        if len(later) > LISTED:
            self._wrong("", None, f"{len(later) - LISTED:,} more duplicates")

    def _take_notes(self, names: Sequence[str], found: dict[str, Count], counts: dict[str, Count]) -> None:
        notes = self._report.notes
        everything = all_shards(self._root)
        if everything.skipped:
            notes.append(note_of_skipped(everything.skipped))
        others = sorted(set(everything.names) - set(names))
        if others:
            notes.append(
                f"{counted(len(others), 'file')} {'is' if len(others) == 1 else 'are'} not read, such as "
                f"{others[0]}: there are Arrow shards beside them"
            )
        if len(found) == len(names) and (copies := note_of_copies(self._root, names, found)):
            notes.append(copies)
        lacking = [name for name in names if name not in counts]
        if lacking and self._uncompared:
            notes.append(f"{counted(len(lacking), 'shard')} could not be compared with counts")
        elif lacking:
            what = (
                "there are no counts"
                if len(lacking) == len(names)
                else f"{counted(len(lacking), 'shard')} {'has' if len(lacking) == 1 else 'have'} no counts"
            )
            notes.append(f"{what}; run `fmsdata index {self._root}`")
        for source in self._sources.values():
            if len(source.dtypes) > 1:
                notes.append(f"source {source.name!r} has tokens of several types: {', '.join(source.dtypes)}")


def _facts(size: int, documents: int, tokens: int) -> str:
    return f"{counted(size, 'byte')}, {counted(documents, 'document')} and {counted(tokens, 'token')}"


class _Few:
    """The problems of a shard. Only the first are listed; the others are counted."""

    def __init__(self, verification: _Verification, shard: str) -> None:
        self._verification, self._shard, self._count = verification, shard, 0
        self._whole: set[str] = set()

    def add(self, document: int | None, problem: str) -> None:
        self._count += 1
        if self._count <= LISTED:
            self._verification._wrong(self._shard, document, problem)

    def once(self, problem: str) -> None:
        """Add a problem of the shard as a whole, unless it is there."""
        if problem not in self._whole:
            self._whole.add(problem)
            self.add(None, problem)

    def close(self) -> None:
        if self._count > LISTED:
            self._verification._wrong(self._shard, None, f"{self._count - LISTED:,} more problems of this kind")


def _outside(some: Scanned, vocabulary: int | None) -> Iterator[tuple[int, int]]:
    """The documents with a token outside the vocabulary, each with the first of these tokens."""
    outside = some.tokens < 0 if vocabulary is None else (some.tokens < 0) | (some.tokens >= vocabulary)
    places = np.flatnonzero(outside)
    documents, first = np.unique(np.searchsorted(some.ends, places, "right") - 1, return_index=True)
    for document, place in zip(documents.tolist(), places[first].tolist(), strict=True):
        yield some.first + document, int(some.tokens[place])
