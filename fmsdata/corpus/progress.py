"""Progress of long work, on stderr: a bar in a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 30.0  # between two lines, where there is no terminal


class Progress:
    """What was done of some total. `note` is shown beside it."""

    def __init__(self, title: str, total: float, show: "Callable[[Progress], None]") -> None:
        self.title, self.total, self.done, self.note = title, total, 0.0, ""
        self._show = show

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note
        self._show(self)


@contextmanager
def showing_progress(title: str, total: float, *, lines: bool = False) -> Iterator[Progress]:
    """Show progress until the context ends. `lines`: also where there is no terminal, a line now and then.

    >>> with showing_progress("counting web", total=3) as progress:
    ...     progress.advance(1)
    """
    if not sys.stderr.isatty():
        yield Progress(title, total, _lines() if lines else lambda _: None)
        return
    from rich.console import Console  # only where a bar is shown
    from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = "{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[note]}", TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield Progress(title, total, lambda now: bar.update(task, completed=now.done, note=now.note))


def _lines() -> Callable[[Progress], None]:
    began = last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_SECONDS or progress.done <= 0:
            return
        last = now
        share = min(1.0, progress.done / max(progress.total, 1e-9))
        left = (now - began) / share - (now - began)
        note = f", {progress.note}" if progress.note else ""
        print(f"{progress.title}: {share:.0%}{note}, about {duration(left)} left", file=sys.stderr, flush=True)

    return show


def duration(seconds: float) -> str:
    """A time in few characters.

    >>> duration(42), duration(125), duration(7_500)
    ('42 s', '2 min', '2.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal. Yields what to call for each finished shard."""
    with showing_progress(title, total) as shown:
        yield lambda: shown.advance(1)
