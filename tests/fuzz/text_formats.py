"""Text files: in memory, read by ranges, and streamed, which must all give the same documents or an error.

A damaged file may still be a file, with other documents. So the ways of reading are compared with each
other, and the index of a file that is not damaged with the documents that were written.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from fmsdata.corpus.text_index import TextIndex, line_entry, read_table, write_table
from fmsdata.errors import DataError
from fmsdata.formats import open_shard, open_stream, read_layout
from fmsdata.formats.base import read_from
from fmsdata.formats.line_index import index_lines
from tests.fuzz.arrow import by_ranges, documents_of, pieces
from tests.fuzz.mutations import Rng, damage_bytes
from tests.text_files import SUFFIXES, encode, of_stream

MOST = 5000  # documents to read of a file that says that it has more
TEXTS = [None if i % 9 == 4 else f"é{i}\u2028" + "x" * (i * 7 % 31) for i in range(60)]


class Sample(NamedTuple):
    """A valid file."""

    name: str
    data: bytes


def samples() -> list[Sample]:
    """Valid files of every kind, small."""
    made = [Sample(f"part-0.{suffix}", encode(TEXTS, suffix, frame=200, rows=9)) for suffix in SUFFIXES]
    kinds = [pa.large_string(), "dictionary", pa.binary()]
    made += [Sample("part-0.parquet", encode(TEXTS, "parquet", kind=kind, rows=70)) for kind in kinds]
    return made


class TextFiles:
    """Files of every format, damaged in any way."""

    def __init__(self, folder: Path) -> None:  # noqa: ARG002
        self._samples = samples()

    def attempt(self, rng: Rng) -> None:
        name, data = self._samples[rng.integers(len(self._samples))]
        damaged = damage_bytes(rng, data, self._samples[rng.integers(len(self._samples))].data)
        bounds: list[int] = []
        outcomes: list[list[list[int]] | None] = []
        for read in (self._in_memory, self._by_ranges):
            try:
                outcomes.append(read(name, damaged, rng, bounds))
            except DataError as error:
                if name not in str(error):
                    raise AssertionError("an error that does not name the file") from error
                outcomes.append(None)
        assert outcomes[0] == outcomes[1], "two ways of reading give different documents"
        if not name.endswith("parquet"):
            assert self._streamed(name, damaged) == outcomes[0], "a stream gives other documents"
        if outcomes[0] is None:
            raise DataError("refused")

    def _in_memory(self, name: str, data: bytes, rng: Rng, bounds: list[int]) -> list[list[int]]:
        shard: Any = open_shard(pa.py_buffer(data), name)
        bounds += pieces(rng, min(shard.documents, MOST))
        found: list[list[int]] = []
        for first, stop in pairwise(bounds):
            found += documents_of(shard.read(first, stop), stop - first)
        return found

    def _by_ranges(self, name: str, data: bytes, rng: Rng, bounds: list[int]) -> list[list[int]]:
        layout = by_ranges(data, read_layout(name, len(data)))
        found: list[list[int]] = []
        for first, stop in pairwise(bounds or pieces(rng, min(layout.documents, MOST))):
            found += documents_of(by_ranges(data, layout.block(first, stop)), stop - first)
        return found

    def _streamed(self, name: str, data: bytes) -> list[list[int]] | None:
        try:
            stream = open_stream(name)
            parts = [stream.feed(data[i : i + 77]) for i in range(0, len(data), 77)]
            return [list(each) for each in of_stream([*parts, stream.finish()])]
        except DataError:
            return None


class TextIndexes:
    """Damaged indexes of files that are whole."""

    def __init__(self, folder: Path) -> None:  # noqa: ARG002
        self._files = [sample for sample in samples() if not sample.name.endswith("parquet")]
        entries = {}
        for i, (name, data) in enumerate(self._files):
            entries[f"{i}/{name}"] = line_entry(len(data), "1", read_from(data, index_lines(name, len(data))))
        self._index = write_table(TextIndex(entries, "bytes"))

    def attempt(self, rng: Rng) -> None:
        index = read_table(damage_bytes(rng, self._index), "the index")
        which = int(rng.integers(len(self._files)))
        name, data = self._files[which]
        entry = index.entries.get(f"{which}/{name}")
        if entry is None or entry.lines is None:
            raise DataError("refused")
        shard: Any = open_shard(pa.py_buffer(data), name, index=entry.lines)
        assert shard.documents == len(TEXTS) == entry.documents, "another number of documents"
        found = documents_of(shard.read(0, shard.documents), shard.documents)
        assert [bytes(each).decode() for each in found] == [text or "" for text in TEXTS]
