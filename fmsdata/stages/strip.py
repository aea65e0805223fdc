"""Strip: leave out given tokens at both ends of documents, for all documents of a block at once."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.core.keys import Ints
from fmsdata.core.tokens import StoredTokens
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError

SHORT_RUN = 8  # tokens to strip from all documents together, before long runs are handled one by one


def checked_strip(strip: Any) -> tuple[int, ...]:
    """The tokens to strip, sorted."""
    if isinstance(strip, str | bytes) or not isinstance(strip, Collection):
        raise ConfigError(f"strip is {shown(strip)}; it must be a list of tokens")
    return tuple(sorted({whole("a token to strip", token) for token in strip}))


def strip_ends(
    arrays: Sequence[StoredTokens], array: Ints, first: Ints, length: Ints, tokens: Ints
) -> tuple[Ints, Ints]:
    """For each document, the tokens to skip at its start, and the length left after both ends.

    Document `i` is `arrays[array[i]][first[i] : first[i] + length[i]]`.
    """
    start, stop = first.copy(), first + length
    for i, values in enumerate(arrays):
        _strip_array(values, np.flatnonzero(array == i), start, stop, tokens)
    return start - first, stop - start


def _strip_array(values: StoredTokens, documents: Ints, start: Ints, stop: Ints, tokens: Ints) -> None:
    for ends, step in ((start, 1), (stop, -1)):
        active = documents
        for _ in range(SHORT_RUN):
            active = active[start[active] < stop[active]]
            active = active[np.isin(values.take(ends[active] - (step < 0)), tokens)]
            if not len(active):
                break
            ends[active] += step
        for i in active.tolist():  # a long run: look at the whole document at once
            begin, end = int(start[i]), int(stop[i])
            kept = np.flatnonzero(~np.isin(values[begin:end], tokens))
            start[i], stop[i] = (begin + kept[0], begin + kept[-1] + 1) if len(kept) else (begin, begin)
