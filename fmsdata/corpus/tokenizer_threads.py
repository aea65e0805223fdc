"""How many threads tokenizers use, and what happens to them at a fork.

`tokenizers` encodes texts in a pool of threads that all its objects share, as many as the process has
cores. After a fork the child has none of these threads, and would wait for them forever. So a forked
child encodes in its own thread. Worker processes share the cores: each gets its part of them. The
environment of the trainer stays as it is.
"""

import os
import threading

SWITCH, LIMIT = "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"  # that `tokenizers` reads


class Threads:
    """The threads for tokenizing in this process."""

    def __init__(self) -> None:
        self.count = _cores()
        self._used = False  # whether `tokenizers` may have started its pool
        self._switched = False  # whether the switch was set for a fork in progress
        self._forking = threading.RLock()

    def used(self) -> None:
        """Called before a tokenizer encodes."""
        self._used = True

    def share(self, processes: int) -> None:
        """Use the part of this process of the cores. Called in worker processes only."""
        self.count = max(1, _cores() // (processes * _local_ranks()))
        if self.count == 1:
            os.environ.setdefault(SWITCH, "false")
        else:
            os.environ.setdefault(LIMIT, str(self.count))

    def before_fork(self) -> None:
        """Older versions print a warning in the child, unless the switch is set."""
        self._forking.acquire()
        if self._used and SWITCH not in os.environ:
            os.environ[SWITCH] = "false"
            self._switched = True

    def in_parent(self) -> None:
        if self._switched:
            os.environ.pop(SWITCH, None)
            self._switched = False
        self._forking.release()

    def in_child(self) -> None:
        self._forking = threading.RLock()
        self._switched = False
        if self._used:
            os.environ[SWITCH] = "false"
            self.count = 1


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _local_ranks() -> int:
    """The ranks on this machine, as launchers say."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


THREADS = Threads()
os.register_at_fork(before=THREADS.before_fork, after_in_parent=THREADS.in_parent, after_in_child=THREADS.in_child)
