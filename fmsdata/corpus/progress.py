"""A progress bar on a terminal, for work that takes a while."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if that is a terminal. Yields what to call for each finished shard."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # only where a bar is shown
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
