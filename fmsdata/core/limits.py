"""Limits of the system, as errors that name the limit.

A process that has reached a limit fails wherever it needs the next descriptor, process or thread,
with an error of the system that does not say which limit that is, or how to raise it.
"""

import errno
import os
import resource
import threading
from collections.abc import Mapping

from fmsdata.errors import WorkerError

Limits = Mapping[int, tuple[str, str]]
FILE_LIMITS: Limits = {  # failures of the system that have a limit: on what, and where it is set
    errno.EMFILE: ("open files of a process", "ulimit -n"),
    errno.ENFILE: ("open files of the system", "/proc/sys/fs/file-max"),
    errno.ENOMEM: ("memory", "free -h, ulimit -v, /proc/sys/vm/max_map_count"),
}
PROCESS_LIMITS: Limits = {
    **FILE_LIMITS,
    errno.EAGAIN: ("processes and threads", "ulimit -u, or pids.max of the container"),
}


def describe_os_error(error: OSError, limits: Limits = FILE_LIMITS) -> str:
    """What went wrong, with the limit if that is the cause.

    >>> describe_os_error(OSError(errno.EAGAIN, "Resource temporarily unavailable"), PROCESS_LIMITS)
    'Resource temporarily unavailable: the limit on processes and threads (ulimit -u, or pids.max of the container) \
is reached; raise it'
    >>> describe_os_error(OSError(errno.ENOENT, "No such file or directory"))
    'No such file or directory'
    """
    if error.errno is None or error.errno not in limits:
        return error.strerror or str(error)
    limited, where = limits[error.errno]
    number = f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}" if error.errno == errno.EMFILE else ""
    return f"{os.strerror(error.errno)}: the limit{number} on {limited} ({where}) is reached; raise it"


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises `WorkerError` if the system has none left."""
    try:
        thread.start()
    except RuntimeError:  # Python does not keep the cause
        error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        raise WorkerError(
            f"the thread {thread.name} could not be started: {describe_os_error(error, PROCESS_LIMITS)}"
        ) from None
