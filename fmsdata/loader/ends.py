"""Where iterations over a loader end, and what a run that ends has not saved.

The stream has no end. With `steps=N` an iteration ends where the count of steps reaches a multiple
of N, so a run that resumes in between hands out the rest. The next iteration continues from there.
"""

import atexit
import logging
import os
import warnings
from types import FrameType

from fmsdata.errors import FmsdataWarning

log = logging.getLogger("fmsdata")


class Ends:
    """The next end of an iteration, and whether the trainer seems to count on one."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._next = 0
        self._place: tuple[object, int] | None = None  # in the code, where the last iteration began
        self._warned = False

    def move_to(self, step: int) -> None:
        """The loader was moved to this step."""
        self._next = 0 if self._steps is None else (step // self._steps + 1) * self._steps
        self.interrupt()

    def interrupt(self) -> None:
        """The loader was closed, or failed: iterating again is the way to continue."""
        self._place = None

    def begin(self, step: int, frame: FrameType | None) -> None:
        """An iteration begins at this step. The frame is that of the function which calls this."""
        if self.reached(step):
            self.move_to(step)
        if self._steps is None and frame is not None and frame.f_back is not None:
            place = frame.f_back.f_code, frame.f_back.f_lineno
            if place == self._place and not self._warned:
                self._warned = True
                warnings.warn(
                    f"the same line iterates over an endless loader again: it continues at step {step}, and never "
                    "ends by itself. For epochs of N steps give the loader steps=N; to continue on purpose, keep one "
                    "iterator (batches = iter(loader)), or call next(loader)",
                    FmsdataWarning,
                    stacklevel=3,
                )
            self._place = place

    def reached(self, step: int) -> bool:
        """Whether an iteration that is at this step ends here."""
        return self._steps is not None and step >= self._next


class Unsaved:
    """The steps of a loader that are in no checkpoint, reported when the run ends.

    The loader can't save them by itself: only the trainer knows whether it has finished the last
    batch that it got.
    """

    def __init__(self, folder: str, step: int) -> None:
        self._folder = folder
        self.step = self.saved = step
        self._process = os.getpid()
        _RUNS[folder] = self

    def report(self) -> None:
        """Log the steps since the last checkpoint, once."""
        if self.step > self.saved and self._process == os.getpid():
            log.warning(
                "the loader stopped at step %d, and what it handed out since step %d is not saved in %s; "
                "call loader.save() after the loop if the last step is finished, or give the loader an end with steps=",
                self.step,
                self.saved,
                self._folder,
            )
            self.saved = self.step


_RUNS: dict[str, Unsaved] = {}  # the last loader of each folder


@atexit.register
def _report_all() -> None:
    for run in _RUNS.values():
        run.report()
