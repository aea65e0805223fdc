"""Trace: what was in a step of a run, and in which steps a document was seen."""

from collections import defaultdict
from collections.abc import Iterable

from fmsdata.core.checks import whole
from fmsdata.core.chunk import Item
from fmsdata.core.pieces import pieces_of
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.run.document_search import Found, find_documents, read_document
from fmsdata.run.replay import Replay, Seen

__all__ = ["Found", "Seen", "Trace"]


class Trace(Replay):
    """A past run: what was in a step, and when a document was seen. Nothing is written.

    The newest complete checkpoint holds the world and batch sizes of the run. Reading starts at the
    nearest checkpoint before a step, or, with `from_start`, at the start of the run. `world_size`
    and `batch_size` are those of the steps after the newest checkpoint, or of all steps if there is
    none.

    `newest` is the step of the newest complete checkpoint, or 0, and `schedule` says which samples
    were in which step.

    >>> run = Trace(data, checkpoints=Checkpoints("s3://bucket/run/loader"))     # doctest: +SKIP
    >>> run.step(12345, rank=3)     # doctest: +SKIP
    >>> run.documents(["web/part-0.arrow#17"])     # doctest: +SKIP
    """

    def step(self, step: int, rank: int | None = None) -> list[Seen]:
        """Everything that was in a step, or in the batch of one rank, row by row."""
        return [seen for seen, _ in self._step(step, rank, with_tokens=False)]

    def step_with_tokens(self, step: int, rank: int | None = None) -> list[tuple[Seen, list[int]]]:
        """The same as `step`, each span with its tokens, which are read for that.

        >>> run.step_with_tokens(12345, rank=3)[0]     # doctest: +SKIP
        """
        return self._step(step, rank, with_tokens=True)

    def _step(self, step: int, rank: int | None, *, with_tokens: bool) -> list[tuple[Seen, list[int]]]:
        self.require_step(whole("step", step))
        world_size = self.schedule.segment(step).world_size
        if rank is not None and not 0 <= rank < world_size:
            raise ConfigError(
                f"rank is {rank}; step {step} was read by {counted(world_size, 'rank')}, 0 to {world_size - 1}"
            )
        lines: dict[int, list[int]] = defaultdict(list)  # by lane
        for reading_rank, samples in enumerate(self.schedule.samples(step)):
            for sample in samples if rank in (None, reading_rank) else ():
                lines[sample % self.data.lanes].append(sample // self.data.lanes)
        seen: list[tuple[Seen, list[int]]] = []
        states = self.states(self.start(step), sorted(lines))
        for done, (lane, state) in enumerate(states.items()):
            opened = self.open(lane, state)
            for first, chunk in self.read(opened, max(lines[lane]) + 1, done, len(states)):
                rows = [line - first for line in lines[lane] if first <= line < first + len(chunk)]
                spans = list(self.seen(lane, first, chunk, rows))
                tokens = [tokens for row in rows for tokens in _stored_tokens(chunk[row])] if with_tokens else []
                seen += zip(spans, tokens or [[]] * len(spans), strict=True)
        return sorted(seen, key=lambda pair: (pair[0].rank, pair[0].row))

    def documents(self, names: Iterable[str], until: int | None = None) -> list[Found]:
        """When documents, written `source/shard#number`, were seen.

        Searches the steps before `until`, or before the newest checkpoint.
        """
        if until is None and not self.newest:
            raise ConfigError("there is no checkpoint, so the length of the run is unknown: give a step (--until)")
        until = self.newest if until is None else whole("until", until, least=1)
        self.require_step(until - 1)
        return find_documents(self, names, until)

    def document_tokens(self, name: str) -> list[int]:
        """The tokens of a document, written `source/shard#number`, as an epoch holds them; empty if it is skipped.

        >>> run.document_tokens("web/part-0.arrow#17")     # doctest: +SKIP
        """
        return read_document(self, name)


def _stored_tokens(line: Item) -> list[list[int]]:
    """The tokens of each stored span of a line."""
    pieces = pieces_of(line.chunk, 0, line.tokens.tolist())
    return [piece.tokens for piece in pieces if piece.origin is not None]
