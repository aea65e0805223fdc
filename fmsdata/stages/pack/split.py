"""Mode `split`: documents continue over lines. A line ends when it is full."""

from fmsdata.stages.pack.token_run import TokenRun


def line_end(run: TokenRun, start: int, room: int) -> int | None:
    """Where a line ends that starts at `start` and has room for this many tokens.

    None if the run is too short to decide.
    """
    end = start + room
    return end if end <= len(run) else None
