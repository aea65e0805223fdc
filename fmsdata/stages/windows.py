"""Windows that are left to choose, for the stages that have them: shuffle and best-fit packing.

Windows over text hold tokens in memory, and take time to fill. So those of all lanes together are
limited, and the first ones are small: a run starts fast.
"""

from collections.abc import Mapping

from fmsdata.core.state import State

TOKENIZED = 1 << 25  # tokens in the windows of all lanes; as many again are tokenized ahead
GROWTH = 4  # each window is larger than the one before by a part of it, until it has its full size


def window_sizes(window: int, first: int | None) -> list[int]:
    """The sizes of the first windows. All that follow have the size of the last of them.

    >>> window_sizes(12, 4), window_sizes(12, None)
    ([4, 5, 6, 7, 8, 10, 12], [12])
    """
    sizes = [min(window, first or window)]
    while sizes[-1] < window:
        sizes.append(min(window, sizes[-1] + max(1, sizes[-1] // GROWTH)))
    return sizes


def saved_windows(saved: State | None, stage: str) -> tuple[int, int | None] | None:
    """The size of a window, and of the first, in the saved description of a stage."""
    if not isinstance(saved, Mapping) or saved.get("stage") != stage:
        return None
    window, first = saved.get("window"), saved.get("first_window")
    if type(window) is not int or window < 1:
        return None
    return window, first if type(first) is int and first >= 1 else None
