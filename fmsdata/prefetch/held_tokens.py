"""Held tokens: which arrays of tokens the pipeline holds, and how many bytes they take.

An array counts as long as the pipeline holds it. When all of them take too much, those that were
not used for the longest time are revoked, and read again if a line needs them.
"""

import weakref
from collections import OrderedDict, deque
from itertools import count
from typing import Protocol


class Revocable(Protocol):
    """Tokens that can be dropped, and are then read again when they are needed."""

    def revoke(self) -> None:
        """Drop them."""


class HeldTokens:
    """The arrays that the pipeline holds, the least recently used first."""

    def __init__(self) -> None:
        self.bytes = 0
        self._numbers = count()
        self._held: OrderedDict[int, tuple[weakref.ref[Revocable], int]] = OrderedDict()
        self._dropped: deque[int] = deque()  # any thread may find that tokens are gone: settled later

    def add(self, tokens: Revocable, size: int) -> int:
        """Count tokens until the pipeline drops them. Returns their number."""
        number = next(self._numbers)
        self._held[number] = weakref.ref(tokens, lambda _: self._dropped.append(number)), size
        self.bytes += size
        return number

    def touch(self, number: int) -> None:
        """These tokens are used now."""
        self._held.move_to_end(number)

    def sweep(self) -> None:
        """Settle the accounts of tokens that the pipeline dropped."""
        while self._dropped:
            self.bytes -= self._held.pop(self._dropped.popleft(), (None, 0))[1]

    def revoke_down_to(self, most: float) -> None:
        """Revoke the least recently used tokens until they take at most this many bytes.

        The last ones are kept in any case.
        """
        while self.bytes > most and len(self._held) > 1:
            _, (reference, size) = self._held.popitem(last=False)
            self.bytes -= size
            if (oldest := reference()) is not None:
                oldest.revoke()
