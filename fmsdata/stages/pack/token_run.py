"""TokenRun: consecutive documents, seen as one long run of tokens.

Positions count tokens from the start of the run. Finding the document at a position and cutting the
run at positions are searches in running sums of lengths: no token is copied.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fmsdata.core import native
from fmsdata.core.chunk import Chunk
from fmsdata.core.keys import Ints
from fmsdata.core.spans import BEGINS, BUFFER, COLUMNS, LENGTH, POSITION, START, TAIL


@dataclass(frozen=True)
class TokenRun:
    """The documents of a chunk, one after the other, as one run of tokens."""

    documents: Chunk

    def __len__(self) -> int:
        return int(self.span_ends[-1])

    @cached_property
    def span_ends(self) -> Ints:
        return np.cumsum(self.documents.spans[:, LENGTH])

    @cached_property
    def document_ends(self) -> Ints:
        return self.span_ends[self.documents.first[1:] - 1]

    def token(self, position: int) -> int:
        """The token at a position."""
        span = int(np.searchsorted(self.span_ends, position, side="right"))
        end = int(self.span_ends[span])
        row = self.documents.spans[span].tolist()
        if row[TAIL] and position == end - 1:
            return int(row[TAIL]) - 1
        place = np.array([row[START] + position - (end - row[LENGTH])])
        return int(self.documents.buffers[row[BUFFER]].tokens.take(place)[0])

    def document_at(self, position: int) -> tuple[int, int]:
        """The document that holds the token at a position, and its tokens before it."""
        document = int(np.searchsorted(self.document_ends, position, side="right"))
        return document, position - (int(self.document_ends[document - 1]) if document else 0)

    def cut(self, positions: Ints) -> Chunk:
        """One item for the tokens between each two neighbouring positions."""
        if native.kernel is not None:
            out = np.empty((len(self.documents.spans) + len(positions), COLUMNS), np.int64)
            first = np.empty(len(positions), np.int64)
            made = native.kernel.cut(self.documents.spans, positions, out, first)
            return Chunk(self.documents.buffers, out[:made], first)
        ends = self.span_ends
        inner = ends[np.searchsorted(ends, positions[0], "right") : np.searchsorted(ends, positions[-1])]
        edges = np.sort(np.concatenate([positions, inner]), kind="stable")
        edges = edges[np.append(True, edges[1:] != edges[:-1])]
        begin = edges[:-1]
        parent = np.searchsorted(ends, begin, side="right")
        spans = self.documents.spans.take(parent, axis=0)
        into = begin - (ends.take(parent) - spans[:, LENGTH])
        spans[:, START] += into
        spans[:, POSITION] += into
        spans[:, LENGTH] = edges[1:] - begin
        spans[:, BEGINS] &= into == 0
        spans[:, TAIL] *= edges[1:] == ends.take(parent)
        return Chunk(self.documents.buffers, spans, np.searchsorted(edges, positions))
