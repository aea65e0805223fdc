"""Counts: documents and tokens per shard, the only thing that planning reads."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    rows: Callable[[], Iterator[bytes | memoryview]] | None = None  # a faster way to what `digest` is made of

    @cached_property
    def mean_length(self) -> float:
        return max(1.0, float(self.tokens.sum()) / max(1, int(self.documents.sum())))

    @cached_property
    def digest(self) -> str:
        """Changes with the name, the documents or the tokens of any shard."""
        digest = hashlib.blake2b(digest_size=8)
        for number, rows in enumerate(self._rows() if self.rows is None else self.rows()):
            digest.update(rows if number else rows[1:])
        return digest.hexdigest()

    def _rows(self) -> Iterator[bytes]:
        """All rows as text, each behind a line feed."""
        for first in range(0, len(self.shards), HASHED):
            part = slice(first, first + HASHED)
            columns = self.shards[part], self.documents[part].tolist(), self.tokens[part].tolist()
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
