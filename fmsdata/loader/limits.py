"""Limits of the system that workers meet, as errors that name the limit."""

import errno
import resource

from fmsdata.errors import WorkerError

LIMITS = {  # failures of the system that have a limit, and the limit's name
    errno.EMFILE: ("open files of a process", "ulimit -n"),
    errno.ENFILE: ("open files of the system", "/proc/sys/fs/file-max"),
    errno.EAGAIN: ("processes of a user", "ulimit -u"),
    errno.ENOMEM: ("memory", "free -h"),
}


def limit_error(error: OSError, what: str) -> WorkerError:
    """The error for something that failed because the system has a limit.

    >>> print(limit_error(OSError(errno.ENOMEM, "Cannot allocate memory"), "worker 0 could not be started"))
    worker 0 could not be started: Cannot allocate memory: the limit on memory (free -h) is reached; raise it, or use \
fewer workers (num_workers=0 reads in the trainer's process)
    """
    limited, where = LIMITS.get(error.errno or 0, ("", ""))
    limit = f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}" if error.errno == errno.EMFILE else ""
    reason = f"the limit{limit} on {limited} ({where}) is reached; raise it" if limited else "see the error"
    return WorkerError(
        f"{what}: {error.strerror or error}: {reason}, or use fewer workers "
        "(num_workers=0 reads in the trainer's process)"
    )
