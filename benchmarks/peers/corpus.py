"""One corpus for all loaders, in which every token has a value of its own.

A token's value is its position in the corpus, plus 1. So whatever a loader yields says which tokens
of which documents it was made of, however it packs and shuffles: what is lost and what comes twice
can be counted. 0 is the end of a document, and padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]
SHARDS = 12  # of each source: a multiple of 2, 3 and 4 ranks
EOS = 0


@dataclass(frozen=True)
class Corpus:
    """The documents of the sources. Document `i` of the corpus is the values `ends[i] + 1` to `ends[i + 1]`."""

    ends: Ints
    firsts: dict[str, tuple[int, int]]  # source: first document, and the one after its last

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    def shard(self, source: str, number: int) -> range:
        """The documents of a shard."""
        first, stop = self.firsts[source]
        count = stop - first
        return range(first + count * number // SHARDS, first + count * (number + 1) // SHARDS)

    def document(self, number: int) -> Ints:
        return np.arange(self.ends[number] + 1, self.ends[number + 1] + 1, dtype=np.int32)

    def shares(self) -> dict[str, float]:
        """The part of the tokens that each source has."""
        sizes = {name: self.ends[stop] - self.ends[first] for name, (first, stop) in self.firsts.items()}
        return {name: float(size) / self.tokens for name, size in sizes.items()}

    def rows(self, documents: "Ints | range", size: int) -> Ints:
        """Documents with an EOS behind each, cut into rows before the run. The last row is filled up."""
        parts = []
        for number in documents:
            parts += [self.document(int(number)), np.zeros(1, np.int32)]
        stream = np.concatenate(parts)
        return np.pad(stream, (0, -len(stream) % size)).reshape(-1, size)


def make(tokens: int, mean: int, sizes: dict[str, float]) -> Corpus:
    """Documents of lognormal lengths, `mean` on average, in sources of these relative sizes."""
    rng = np.random.default_rng(0)
    lengths, firsts, first = [], {}, 0
    for source, size in sizes.items():
        count = max(SHARDS, round(tokens * size / sum(sizes.values()) / mean))
        lengths.append((rng.lognormal(-0.32, 0.8, count) * mean).astype(np.int64) + 1)
        firsts[source] = (first, first + count)
        first += count
    return Corpus(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]), firsts)


def shards(corpus: Corpus, folder: Path, ending: str) -> Iterator[tuple[Path, range]]:
    """The path of each shard of each source, and its documents."""
    for source in corpus.firsts:
        (folder / source).mkdir(parents=True, exist_ok=True)
        for number in range(SHARDS):
            yield folder / source / f"{number:02}.{ending}", corpus.shard(source, number)


def pack(size: int) -> Any:
    """The simplest packing, for loaders without one: concatenate documents, cut, and fill up the last row."""

    def packed(documents: Any) -> Iterator[Ints]:
        rest = np.empty(0, np.int64)
        for document in documents:
            rest = np.concatenate([rest, document, [EOS]])
            while len(rest) >= size:
                yield rest[:size]
                rest = rest[size:]
        if len(rest):
            yield np.pad(rest, (0, size - len(rest)))

    return packed
