"""Loans: memory of fetched blocks that the pipeline holds.

Tokens count as long as the pipeline holds them. When they take more than their part of the budget,
those that were not used for the longest time are moved to the spool, a file on the node's disk
(`fmsdata/storage/spool.py`), and lines take them from there. Without a spool, or if it is full, they
are dropped, and fetched again, as a range, if a line needs them.
"""

import warnings
from collections.abc import Sequence

import numpy as np

from fmsdata.core.blocks import Address, Block
from fmsdata.core.keys import Ints
from fmsdata.core.tokens import StoredTokens, Tokens
from fmsdata.errors import FmsdataWarning
from fmsdata.formats.base import Data
from fmsdata.prefetch.budget import Budget
from fmsdata.prefetch.fetch_ahead import FetchAhead
from fmsdata.prefetch.held_tokens import HeldTokens
from fmsdata.prefetch.range_queue import NOW, Urgency
from fmsdata.prefetch.remote_source import RemoteSource
from fmsdata.prefetch.waiter import Waiter
from fmsdata.storage.spool import Spool, SpooledTokens, SpoolLost

WARN_BYTES = 16 << 20  # fetched again


class LentTokens:
    """The tokens of a remote block: in memory, in the spool, or fetched again when they are needed."""

    def __init__(
        self, loans: "Loans", source: RemoteSource, address: Address, which: int, block: Block[Tokens]
    ) -> None:
        self._loans, self._source, self._address, self._which = loans, source, address, which
        self._offset = block.offsets[which]
        self._array: Tokens | None = block.arrays[which]
        self._spooled: SpooledTokens | None = None
        self.dtype = block.arrays[which].dtype
        self.number = loans.record(self, block.arrays[which].nbytes)

    def __getitem__(self, where: slice) -> Tokens:
        array = self._array
        if array is not None:
            self._loans.touch(self.number)
            return array[where]
        if self._spooled is not None:
            try:
                return self._spooled[where]
            except SpoolLost:
                self._spooled = None
        if self._offset is None:
            return self._fetch_again()[where]
        begin, end = (self._offset + place * self.dtype.itemsize for place in (where.start, where.stop))
        return np.frombuffer(self._loans.fetch_range(self._source, self._address.shard, begin, end), self.dtype)

    def take(self, places: Ints) -> Tokens:
        if self._spooled is not None:
            try:
                return self._spooled.take(places)
            except SpoolLost:
                self._spooled = None
        array = self._array
        return (self._fetch_again() if array is None else array).take(places)

    def revoke(self) -> None:
        array, self._array = self._array, None
        if array is not None and self._spooled is None:
            self._spooled = self._loans.spool(array)

    def _fetch_again(self) -> Tokens:
        block = self._loans.fetch_block(self._source, self._address)
        self._array = array = block.arrays[self._which]
        self.number = self._loans.record(self, array.nbytes)
        return array


class Loans:
    """Who holds how much, the least recently used first."""

    def __init__(self, budget: Budget, ahead: FetchAhead, waiter: Waiter, spool: Spool | None) -> None:
        self.fetched_again = 0  # bytes
        self._budget, self._ahead, self._waiter, self._spool = budget, ahead, waiter, spool
        self._lent = HeldTokens()
        self._warned = False

    def lend(self, source: RemoteSource, address: Address, block: Block[Tokens]) -> Block[StoredTokens]:
        """The block, with tokens that can be revoked."""
        lent: Sequence[StoredTokens] = [
            LentTokens(self, source, address, which, block) for which in range(len(block.arrays))
        ]
        return Block(lent, block.array, block.start, block.length)

    def record(self, tokens: LentTokens, size: int) -> int:
        """Count tokens until the pipeline drops them.

        If it holds too many now, the oldest are revoked.
        """
        number = self._lent.add(tokens, size)
        budget = self._budget
        budget.lent = self._lent.bytes
        if budget.total and budget.used > budget.total:
            self.sweep()
            self._ahead.sweep()
            if not self._has_no_room():  # nothing that was fetched ahead is given up
                self._lent.revoke_down_to(budget.total - budget.ahead)
                budget.lent = self._lent.bytes
            while budget.used > budget.total and self._has_no_room() and self._ahead.drop_farthest():
                pass
        self._lent.revoke_down_to(budget.most_lent)
        budget.lent = self._lent.bytes
        return number

    def _has_no_room(self) -> bool:
        """Whether nothing can be moved to the disk. (Else too much is held by less than a block, for a moment.)"""
        return self._spool is None or bool(self._spool.problem)

    def spool(self, tokens: Tokens) -> SpooledTokens | None:
        """The tokens on the disk, if they can be there."""
        if self._spool is None:
            return None
        stored = self._spool.store(tokens)
        if stored is None:
            self._warn(self._spool.problem)
        return stored

    def touch(self, number: int) -> None:
        """These tokens are used now."""
        self._lent.touch(number)

    def sweep(self) -> None:
        """Settle the accounts of tokens that the pipeline dropped."""
        self._lent.sweep()
        self._budget.lent = self._lent.bytes

    def fetch_range(self, source: RemoteSource, shard: int, start: int, stop: int) -> Data:
        """Bytes of tokens that were revoked."""
        self._count_again(stop - start)
        return self._waiter.wait(source.fetch_range(shard, start, stop))

    def fetch_block(self, source: RemoteSource, address: Address) -> Block[Tokens]:
        """A block whose tokens were revoked."""
        self._count_again(source.size(address))
        return self._waiter.wait(source.fetch(address, Urgency(NOW)))

    def _count_again(self, size: int) -> None:
        self.fetched_again += size
        if self.fetched_again > WARN_BYTES:
            self._warn("there is no storage.spool")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"storage.prefetch_bytes is {self._budget.bytes:,}, too little for the "
                f"{self._ahead.look_aheads:,} look-aheads (lanes x sources) of this process, and blocks can't be kept "
                f"on the disk ({why}): documents are fetched again one by one, which is slow; raise it, give "
                "storage.spool room on a disk, use more processes, or smaller shuffle windows",
                FmsdataWarning,
                stacklevel=2,
            )
