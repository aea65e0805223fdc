"""Garbage collection, paused while many objects are made that all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """A context without garbage collection.

    The collector runs each time that a number of objects was created, and visits all that exist. Opening a
    thousand lanes makes hundreds of thousands, none of them garbage: it took two thirds of the time.

    >>> with no_collection():
    ...     gc.isenabled()
    False
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
