"""Counts: documents and tokens per shard, the only thing that planning reads."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.errors import CountsError

HASHED = 1 << 16  # shards whose rows are hashed at once


@dataclass(frozen=True, eq=False)
class Counts:
    """The shards of a source, sorted by path, with the documents and tokens in each.

    >>> import numpy as np
    >>> counts = Counts(("a.arrow", "b.arrow"), np.array([10, 20]), np.array([500, 900]))
    >>> counts.mean_length
    46.666666666666664
    """

    shards: Sequence[str]
    documents: Ints
    tokens: Ints
    csv_root: str | None = None  # the folder whose `meta` lists some of them
    notes: tuple[str, ...] = ()  # what a user should know of the files, in words
    text: bool = False  # whether the documents are text; `tokens` are then bytes
    text_tokens: int | None = None  # of text: the tokens of all shards, if an index says
    tokenizer: str | None = None  # the identity of the tokenizer that counted them
    rows: Callable[[Ints | None], Iterator[bytes | memoryview]] | None = (
        None  # a faster way to what `digest` is made of
    )
    blocks: Callable[[int], tuple[Ints, Ints] | None] | None = None  # documents and tokens of parts of a shard
    generations: Ints | None = None  # of each shard, in which `fmsdata index --append` it came; None: all at once
    appended: int = 0  # the last generation that running states may take up
    last: int | None = None  # the last generation that is counted; later shards have no documents here

    @cached_property
    def mean_length(self) -> float:
        return max(1.0, float(self.tokens.sum()) / max(1, int(self.documents.sum())))

    @cached_property
    def digest(self) -> str:
        """Changes with the name, the documents or the tokens of any shard."""
        digest = hashlib.blake2b(digest_size=8)
        for number, rows in enumerate((self.rows or self._rows)(self._known)):
            digest.update(rows if number else rows[1:])
        return digest.hexdigest()

    @property
    def number(self) -> int:
        """How many shards are counted."""
        return len(self.shards) if self._known is None else len(self._known)

    @cached_property
    def newest(self) -> int:
        """The newest generation of any shard."""
        return 0 if self.generations is None else int(self.generations.max(initial=0))

    def until(self, generation: int) -> "Counts":
        """The same shards, of which those of later generations have no documents.

        So the blocks are those of the source before these were appended, and shards keep their places.
        """
        if self.generations is None or generation >= self.newest:
            return self
        if generation not in self._earlier:
            counted = self.generations <= generation
            documents, tokens = (np.where(counted, column, 0) for column in (self.documents, self.tokens))
            self._earlier[generation] = replace(self, documents=documents, tokens=tokens, last=generation)
        return self._earlier[generation]

    def generation_of(self, number: int) -> int | None:
        """The generation with which there were this many shards."""
        if self.generations is None:
            return 0 if number == len(self.shards) else None
        generations, added = np.unique(self.generations, return_counts=True)
        found = generations[np.cumsum(added) == number].tolist()
        return found[0] if found else None

    @cached_property
    def _earlier(self) -> "dict[int, Counts]":
        return {}

    @cached_property
    def _known(self) -> Ints | None:
        """The shards that are counted; None for all."""
        if self.generations is None or self.last is None:
            return None
        return np.flatnonzero(self.generations <= self.last)

    def _rows(self, known: Ints | None) -> Iterator[bytes]:
        """The rows of these shards as text, each behind a line feed."""
        for first in range(0, self.number, HASHED):
            part = slice(first, first + HASHED)
            names: Sequence[str]
            if known is None:
                names, documents, tokens = self.shards[part], self.documents[part], self.tokens[part]
            else:
                rows = known[part]
                names, documents, tokens = [self.shards[row] for row in rows], self.documents[rows], self.tokens[rows]
            columns = names, documents.tolist(), tokens.tolist()
            yield "".join(
                f"\n{name},{documents},{tokens}" for name, documents, tokens in zip(*columns, strict=True)
            ).encode()

    def require(self, shard: int, *, documents: int, tokens: int | None, source: str) -> None:
        """Raise if a file does not hold what the counts say. `tokens` may be unknown."""
        for what, expected, found in (
            ("documents", int(self.documents[shard]), documents),
            ("tokens", int(self.tokens[shard]), tokens),
        ):
            if found is not None and found != expected:
                rebuild = f"run `fmsdata index` to rebuild the counts (they are in {self.csv_root}/meta)"
                raise CountsError(
                    f"source {source!r}: counts say {expected} {what} in {self.shards[shard]} but the file holds "
                    f"{found}; " + (rebuild if self.csv_root else "it changed since this reader counted it")
                )
