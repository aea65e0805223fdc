"""Mode `pad`: a line ends at the last end of a document that fits, and padding fills it up.

Only a document that is longer than a line is split.
"""

import numpy as np

from fmsdata.stages.pack.token_run import TokenRun


def line_end(run: TokenRun, start: int, room: int) -> int | None:
    """Where a line ends that starts at `start` and has room for this many tokens.

    None if the run is too short to decide.
    """
    ends = run.document_ends
    full = start + room
    fitting = int(np.searchsorted(ends, full, side="right"))
    if fitting == len(ends) and ends[-1] < full:
        return None
    end = int(ends[fitting - 1]) if fitting else 0
    return end if end > start else full
