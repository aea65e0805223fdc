"""The note of a worker: what it is doing, for a trainer that waits for it or finds it dead.

It is shared memory. The worker writes what it reads next. On a signal it also writes its Python
stack, even while it is inside a function that does not return: `faulthandler` does that.
"""

import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from fmsdata.loader.shared_memory import SharedMemory

TEXT_BYTES = 1024
LISTENS = b"\n"  # follows the text as soon as the worker answers the signal, which would end it before
STACK_START = TEXT_BYTES + len(LISTENS)
STACK_BYTES = 1 << 14
STACK_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 1.0  # how long a worker may take to write its stack
STATES = {
    "T": "the process is stopped, by SIGSTOP for example; `kill -CONT {pid}` lets it continue",
    "t": "the process is stopped by a debugger",
    "D": "the process waits for a disk or for a network filesystem",
    "Z": "the process has ended",
}


class WorkerNote:
    """Shared by a worker, which writes, and the trainer, which reads.

    >>> note = WorkerNote()
    >>> note.write("source 'web', part-0.arrow")
    >>> note.read()
    "source 'web', part-0.arrow"
    """

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self.memory = memory or SharedMemory()
        self._lock = threading.Lock()  # the memory is not closed while a stack is awaited

    def close(self) -> None:
        """Release the memory. A thread that waits for a stack gets it before."""
        with self._lock:
            self.memory.close()

    def write(self, text: str) -> None:
        """Say what is read next."""
        self.memory.write(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES))

    def read(self) -> str:
        """What the worker said last; empty if it has said nothing."""
        return bytes(self.memory.read(TEXT_BYTES)).decode(errors="replace").strip(" \0")

    def answer_signals(self) -> None:
        """In the worker: write the stack whenever the trainer asks for it."""
        faulthandler.register(STACK_SIGNAL, file=self.memory.fileno(), all_threads=True)
        os.pwrite(self.memory.fileno(), LISTENS, TEXT_BYTES)

    def stack(self, pid: int) -> str:
        """In the trainer: the Python stack of the worker, or why there is none."""
        if state := describe_state(pid):
            return state
        with self._lock:
            fd = self.memory.fileno()
            return STATES["Z"] if fd < 0 else _stack_written_to(fd, pid)


def _stack_written_to(fd: int, pid: int) -> str:
    if os.pread(fd, len(LISTENS), TEXT_BYTES) != LISTENS:
        return "the process was started a moment ago"
    os.lseek(fd, STACK_START, os.SEEK_SET)  # both processes share the position at which `faulthandler` writes
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    written, deadline = 0, time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(STACK_SECONDS / 20)
        before, written = written, os.lseek(fd, 0, os.SEEK_CUR) - STACK_START
        if written and written == before:
            break
    if not written:
        return "the process does not answer"
    return "its Python stack:\n" + os.pread(fd, min(written, STACK_BYTES), STACK_START).decode(errors="replace")


def describe_state(pid: int) -> str:
    """Why a process does nothing, if the system knows; otherwise empty."""
    with suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return STATES.get(letter, "").format(pid=pid)
    return ""
