"""Limits of the system that workers meet, as errors that name the limit."""

from fmsdata.core.limits import PROCESS_LIMITS, describe_os_error
from fmsdata.errors import WorkerError


def limit_error(error: OSError, what: str) -> WorkerError:
    """The error for something that failed because the system has a limit.

    >>> import errno
    >>> print(limit_error(OSError(errno.ENFILE, "Too many open files in system"), "worker 0 could not be started"))
    worker 0 could not be started: Too many open files in system: the limit on open files of the system \
(/proc/sys/fs/file-max) is reached; raise it, or use fewer workers (num_workers=0 reads in the trainer's process)
    """
    return WorkerError(
        f"{what}: {describe_os_error(error, PROCESS_LIMITS)}, or use fewer workers "
        "(num_workers=0 reads in the trainer's process)"
    )
