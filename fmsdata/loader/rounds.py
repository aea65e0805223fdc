"""How many batches a round has.

Workers are asked for rounds of batches, not for single ones, so that a request costs little per
batch. The first rounds have one batch, so that the first batch comes soon. Then they double.
"""

import time

# A round grows to this many tokens of all workers together. It stops growing earlier if it lasts
# this long, with a slow stage or a slow trainer: requests cost little then anyway.
ROUND_TOKENS, ROUND_SECONDS = 1 << 21, 0.25


class RoundSizes:
    """Decides the size of each round from how long the finished ones took."""

    def __init__(self) -> None:
        self._size = 1  # of the newest round
        self._began = time.monotonic()  # when the round in progress began

    def next(self, finished: int, batch_tokens: int) -> int:
        """The size of another round, when one has ended.

        That round had `finished` batches of `batch_tokens` tokens each.
        """
        now = time.monotonic()
        seconds, self._began = (now - self._began) / finished, now
        doubled = 2 * self._size
        if doubled * batch_tokens <= ROUND_TOKENS and doubled * seconds <= ROUND_SECONDS:
            self._size = doubled
        return self._size
