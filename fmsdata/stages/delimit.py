"""Delimit: a BOS token before each document and an EOS token after it, unless it already has them.

A document that comes in parts (see `fmsdata.stages.mixture.leftovers`) gets them only at its own
start and end.
"""

from fmsdata.core.checks import token
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.spans import BEGINS, CONTINUED, UNFINISHED
from fmsdata.core.stage import Stage, tokens_only
from fmsdata.core.state import State


class Delimit(Stage):
    """Documents that begin with `bos` and end with `eos`; None leaves that end unchanged.

    >>> docs = Delimit(mix, bos=1, eos=2)     # doctest: +SKIP
    """

    def __init__(self, below: Stage, *, bos: int | None = None, eos: int | None = None) -> None:
        super().__init__(tokens_only(below, "Delimit"))
        self.bos = token("bos", bos)
        self.eos = token("eos", eos)

    def only_plans(self) -> bool:
        return self.below.only_plans()

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _DelimitIterator(self, lane, state)


class _DelimitIterator(StageIterator):
    """One document in, one document out: the state is that of the stage below."""

    def __init__(self, stage: Delimit, lane: Lane, state: State | None) -> None:
        self._below = stage.below.open(lane, state)
        self._bos, self._eos = stage.bos, stage.eos

    def read(self) -> Chunk:
        chunk = self._below.read()
        begins, ends = chunk.spans[chunk.first[:-1], BEGINS], chunk.spans[chunk.first[1:] - 1, BEGINS]
        if self._bos is not None:
            where = (chunk.first_tokens() != self._bos) & (begins & CONTINUED == 0)
            chunk = chunk.with_heads(where, self._bos)
        if self._eos is not None:
            where = (chunk.last_tokens() != self._eos) & (ends & UNFINISHED == 0)
            chunk = chunk.with_tails(where, self._eos)
        return chunk

    def state(self, taken: int) -> State:
        return self._below.state(taken)
