"""The account of a run: which tokens of which documents came, compared with the stored ones."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fmsdata.core.spans import Span
from fmsdata.core.wording import counted
from fmsdata.testing.stored import Document, Stored

INSERTED_BETWEEN = 4  # EOS, EOL, BOL and BOS can stand between two documents


class LawBroken(AssertionError):
    """A law does not hold."""


class Incomplete(LawBroken):
    """Documents did not come within the allowed samples: they are lost, or would come later."""


def named(span: Span) -> str:
    """A span, for a message."""
    return f"{span.source}/{span.shard}#{span.document}[{span.start}:{span.stop}]"


class Account:
    """Records which tokens of which documents came, epoch by epoch.

    Raises as soon as a token comes twice in an epoch, or differs from the stored token. A document
    that came whole takes one byte, so that a corpus of any size can be recorded. Without `stored`,
    samples and tokens are only counted.
    """

    def __init__(self, stored: Stored | None, epochs: int = 0, *, later: bool = True) -> None:
        self._compares, self.stored = stored is not None, {} if stored is None else stored
        self.epochs = epochs  # the number of epochs that must be complete
        self._later = later  # compare the tokens of later epochs with the stored tokens too
        self.samples = self.tokens = self.stops = 0
        self.whole: Counter[int] = Counter()  # documents, by epoch
        self.latest: dict[str, int] = {}  # the latest epoch of each source
        self._whole: dict[tuple[str, str, int], bytearray] = defaultdict(bytearray)  # source, shard, epoch
        self._parts: dict[tuple[Document, int], list[int]] = defaultdict(
            list
        )  # the start and stop of each span, sorted

    def add(self, batch: Mapping[str, Any], where: str = "") -> None:
        """Record the documents of a batch."""
        for row in range(len(batch["input_ids"])):
            self.samples += 1
            tokens = torch.cat([batch["input_ids"][row], batch["labels"][row, -1:]]).cpu().numpy()
            try:
                self._add_line(tokens, batch["provenance"][row], batch["epochs"][row])
            except LawBroken as error:
                raise LawBroken(
                    f"{where}{', ' if where else ''}sample number {self.samples - 1} in the order of arrival: {error}"
                ) from None

    def __repr__(self) -> str:
        return f"Account of {counted(self.samples, 'sample')} with {counted(self.tokens, 'token')}"

    @property
    def begun(self) -> int:
        """The number of documents that came in part, so far."""
        return len(self._parts)

    def is_complete(self) -> bool:
        """Whether each stored document came in each epoch."""
        return all(self.whole[epoch] == len(self.stored) for epoch in range(self.epochs))

    def missing(self, most: int = 3) -> list[tuple[int, Document]]:
        """The first documents that did not come whole, each with the epoch."""
        expected = ((epoch, document) for epoch in range(self.epochs) for document in self.stored)
        return list(
            islice(((epoch, document) for epoch, document in expected if not self._is_whole(document, epoch)), most)
        )

    def _add_line(self, tokens: npt.NDArray[np.int64], spans: Sequence[Span], epochs: Sequence[int]) -> None:
        known = len(tokens) - (int(tokens[-1]) == -100)
        place, slack = 0, INSERTED_BETWEEN
        for span, epoch in zip(spans, epochs, strict=True):
            document = (span.source, span.shard, span.document)
            self.tokens += span.stop - span.start
            self.latest[span.source] = max(epoch, self.latest.get(span.source, 0))
            if not self._compares:
                continue
            if epoch >= self.epochs and not self._later:
                self._record(document, epoch, span, None)
                place, slack = place + span.stop - span.start, slack + INSERTED_BETWEEN
                continue
            try:
                stored = self.stored[document]
            except KeyError:
                raise LawBroken(f"{named(span)} of epoch {epoch} should not have come") from None
            self._record(document, epoch, span, stored)
            expected = stored[span.start : span.stop]
            for begin in range(place, place + slack + 1):
                end = min(begin + len(expected), known)
                if np.array_equal(tokens[begin:end], expected[: end - begin]):
                    place, slack = begin + len(expected), INSERTED_BETWEEN
                    break
            else:
                raise LawBroken(f"the tokens of {named(span)} are not the stored tokens")

    def _record(self, document: Document, epoch: int, span: Span, stored: npt.NDArray[np.int64] | None) -> None:
        edges = self._parts[document, epoch]
        before = bisect_right(edges, span.start)
        if self._is_whole(document, epoch) or before % 2 or bisect_left(edges, span.stop) != before:
            raise LawBroken(f"{named(span)} came twice in epoch {epoch}")
        edges[before:before] = [span.start, span.stop]
        if stored is None:
            return
        kept = np.flatnonzero(stored >= 0)
        if edges[0] < kept[0] or edges[-1] > kept[-1] + 1:
            raise LawBroken(
                f"{named(span)} exceeds the tokens of the document that should come, {kept[0]}:{kept[-1] + 1}"
            )
        if sum(edges[1::2]) - sum(edges[::2]) == kept[-1] + 1 - kept[0]:
            del self._parts[document, epoch]
            flags = self._whole[document[0], document[1], epoch]
            flags.extend(bytes(max(0, document[2] + 1 - len(flags))))
            flags[document[2]] = True
            self.whole[epoch] += 1

    def _is_whole(self, document: Document, epoch: int) -> bool:
        flags = self._whole.get((document[0], document[1], epoch), b"")
        return document[2] < len(flags) and bool(flags[document[2]])
