"""Converting token shards: other layout, other token type, other size. Scanned and their order stay.

Without a shard size, every shard becomes one shard of the same name. With one, the shards of a
folder are cut anew: `part-00000.arrow`, `part-00001.arrow` and so on.
"""

import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.core.checks import whole
from fmsdata.core.keys import Ints
from fmsdata.core.tokens import Tokens
from fmsdata.core.wording import counted
from fmsdata.corpus.counts_csv import Count, all_counts
from fmsdata.corpus.index import write_counts
from fmsdata.corpus.listing import MANIFEST, VALIDATION, held_out, shard_entries
from fmsdata.corpus.output import require_apart, require_empty
from fmsdata.corpus.progress import showing_progress
from fmsdata.corpus.scan import Scanned, scan_file
from fmsdata.corpus.shard_writer import LAYOUTS, Layout, ShardWriter, writing_shard
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location


class Converted(NamedTuple):
    """What `convert_corpus` wrote."""

    output: Location
    shards: int
    documents: int
    tokens: int


def convert_corpus(
    source: str | os.PathLike[str] | Location,
    output: str | os.PathLike[str] | Location,
    *,
    layout: Layout = "list",
    dtype: npt.DTypeLike | None = None,
    shard_tokens: int | None = None,
    column: str | None = None,
) -> Converted:
    """Write the token shards below a folder again, into an empty folder, with counts.

    By default tokens keep their type.

    >>> convert_corpus("corpus", "corpus-lists", dtype="uint16")     # doctest: +SKIP
    Converted(output=Location('corpus-lists'), shards=812, documents=48211, tokens=98110224)
    """
    kind = None if dtype is None else _token_type(dtype)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    most = None if shard_tokens is None else whole("shard_tokens", shard_tokens, least=1)
    root, target = Location(source, error=DataError).listed(), Location(output, error=DataError)
    require_apart(root, target)
    require_empty(target)
    entries = shard_entries(root)
    counts = all_counts(root, [entry.name for entry in entries])
    written: dict[str, Count] = {}
    with showing_progress(f"converting {root.name}", sum(entry.size for entry in entries)) as progress:
        for group, named in _groups(entries, most):
            with ShardSeries(target, layout, named, most) as series:
                for entry in group:
                    for some in _checked_documents(root, entry, column, counts.get(entry.name)):
                        series.write(_as_type(some, kind, root / entry.name), some.ends)
                    progress.advance(entry.size)
                if most is None:
                    series.require_one()
            written |= series.written
    _write_counts(root, target, written)
    documents, tokens = (sum(count[i] for count in written.values()) for i in (0, 1))
    return Converted(target, len(written), documents, tokens)


def _write_counts(root: Location, target: Location, written: Mapping[str, Count]) -> None:
    """Write the counts; those of documents that `fmsdata prepare` held out beside them, as it does."""
    inside = f"{VALIDATION}/"
    if not (any(name.startswith(inside) for name in written) and held_out(root)):
        write_counts(target, written)
        return
    away = {name.removeprefix(inside): count for name, count in written.items() if name.startswith(inside)}
    write_counts(target, {name: count for name, count in written.items() if not name.startswith(inside)})
    write_counts(target / VALIDATION, away)
    (target / "meta" / MANIFEST).write_bytes(json.dumps({"held_out": [VALIDATION]}).encode() + b"\n")


def shard_name(name: str) -> str:
    """The name of the Arrow shard made of a file.

    >>> shard_name("web/a.arrow"), shard_name("web/b.parquet")
    ('web/a.arrow', 'web/b.parquet.arrow')
    """
    return name if name.endswith(".arrow") else f"{name}.arrow"


def _token_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise ConfigError(f"dtype is {dtype!r}; it must be an integer type, such as uint16 or uint32")
    return kind


def _groups(entries: Sequence[Entry], most: int | None) -> Iterator[tuple[list[Entry], Callable[[int], str]]]:
    """Files that become shards together, and the names of these shards by number."""
    if most is None:
        for entry in entries:
            yield [entry], partial(_only, shard_name(entry.name))
        return
    for folder in sorted({posixpath.dirname(entry.name) for entry in entries}):
        inside = [entry for entry in entries if posixpath.dirname(entry.name) == folder]
        yield inside, partial("{}part-{:05}.arrow".format, f"{folder}/" if folder else "")


def _only(name: str, number: int) -> str:
    if number:
        raise DataError(f"{name}: the type of its tokens changes inside the file; write it again with one type")
    return name


def _as_type(some: Scanned, dtype: np.dtype[Any] | None, file: Location) -> Tokens:
    tokens = some.tokens
    if dtype is None or dtype == tokens.dtype:
        return tokens
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    outside = (tokens < low) | (tokens > high)
    if outside.any():
        place = int(outside.argmax())
        document = some.first + int(np.searchsorted(some.ends, place, "right")) - 1
        raise DataError(
            f"{file}, document {document}: token {tokens[place]} does not fit {dtype}, which holds {low} to {high}; "
            "choose a wider type"
        )
    return tokens.astype(dtype)


def _checked_documents(root: Location, entry: Entry, column: str | None, expected: Count | None) -> Iterator[Scanned]:
    """The documents of a file, compared with its counts, if there are any."""
    documents = tokens = 0
    file = root / entry.name
    for some in scan_file(file, entry, column):
        if some.text:
            raise DataError(f"{file} holds text; run `fmsdata prepare` to make tokens of it, `convert` is for tokens")
        documents += len(some.ends) - 1
        tokens += int(some.ends[-1])
        yield some
    if expected is not None and expected != (documents, tokens):
        raise CountsError(
            f"{file}: counts say {counted(expected[0], 'document')} and {counted(expected[1], 'token')} but the "
            f"file holds {documents} "
            f"and {tokens}; run `fmsdata index {root}` to rebuild the counts, or restore the file"
        )


class ShardSeries:
    """Writes documents in order into shards of at most `most` tokens, and at least one document.

    A new shard begins also where the type of the tokens changes.
    """

    def __init__(self, root: Location, layout: Layout, named: Callable[[int], str], most: int | None) -> None:
        self._root, self._layout, self._named, self._most = root, layout, named, most
        self._stack = ExitStack()
        self._writer: ShardWriter | None = None
        self._dtype: np.dtype[Any] | None = None
        self.written: dict[str, Count] = {}

    def __enter__(self) -> "ShardSeries":
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._close()
        else:
            self._stack.__exit__(*error)  # the unfinished shard is removed

    def write(self, tokens: Tokens, ends: Ints) -> None:
        first, count = 0, len(ends) - 1
        while first < count:
            writer, stop = self._writer, count
            if writer is None or self._dtype != tokens.dtype:
                writer = self._open(tokens.dtype)
            if self._most is not None:
                stop = int(np.searchsorted(ends, ends[first] + self._most - writer.tokens, "right")) - 1
                if stop <= first and writer.documents:
                    self._close()
                    continue
                stop = min(count, max(stop, first + 1))
            writer.write(tokens, ends[first : stop + 1])
            first = stop

    def require_one(self) -> None:
        """Write an empty shard if there were no documents."""
        if self._writer is None and not self.written:
            self._open(np.dtype(np.uint32))

    def _open(self, dtype: np.dtype[Any]) -> ShardWriter:
        self._close()
        file = self._root / self._named(len(self.written))
        self._dtype = dtype
        self._writer = self._stack.enter_context(writing_shard(file, dtype=dtype, layout=self._layout))
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._stack.close()
            self.written[self._named(len(self.written))] = writer.documents, writer.tokens
