"""TODO."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fmsdata.core.chunk import BEGINS, BUFFER, LENGTH, POSITION, START, TAIL, Chunk
from fmsdata.core.keys import Ints


@dataclass(frozen=True)
class Run:
    """Documents one behind the other, as one run of tokens."""

    documents: Chunk

    @cached_property
    def span_ends(self) -> Ints:
        return np.cumsum(self.documents.spans[:, LENGTH])

    @cached_property
    def document_ends(self) -> Ints:
        return self.span_ends[self.documents.first[1:] - 1]

    def token(self, place: int) -> int:
        span = int(np.searchsorted(self.span_ends, place, side="right"))
        end = int(self.span_ends[span])
        row = self.documents.spans[span].tolist()
        if row[TAIL] and place == end - 1:
            return int(row[TAIL]) - 1
        return int(self.documents.buffers[row[BUFFER]].tokens[row[START] + place - (end - row[LENGTH])])

    def document_at(self, place: int) -> tuple[int, int]:
        """The document that the token at a place belongs to, and how much of it lies before."""
        document = int(np.searchsorted(self.document_ends, place, side="right"))
        return document, place - (int(self.document_ends[document - 1]) if document else 0)

    def cut(self, places: Ints) -> Chunk:
        """The tokens between neighbouring places, as one item each."""
        ends = self.span_ends
        inner = ends[np.searchsorted(ends, places[0], "right") : np.searchsorted(ends, places[-1])]
        edges = np.sort(np.concatenate([places, inner]), kind="stable")
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
        return Chunk(self.documents.buffers, spans, np.searchsorted(edges, places))
