"""Who holds a lease: a process on a machine, and whether it has ended.

The system is asked for the start time of a process, because numbers of processes are reused, and
for the identity of the machine since its last start, because names of machines are too.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch.distributed

from fmsdata.storage.local import boot_id

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, as its file says."""

    host: str
    boot: str  # the machine since its last start, and the processes that can see each other there
    pid: int
    started: str  # when the process started; empty if the system does not say
    token: str  # of the loader
    launch: str  # the process group of the run; empty if unknown
    beat: int
    time: float

    @classmethod
    def here(cls, token: str) -> "Holder":
        """This process."""
        pid = os.getpid()
        started = _status(pid)[1]
        return cls(socket.gethostname(), _boot(), pid, started, token, launch(), beat=0, time=time.time())

    @classmethod
    def parse(cls, data: bytes) -> "Holder | None":
        """The holder in the content of a file; None if that is something else."""
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            found: dict[str, Any] = json.loads(data)
            values = {name: kind(found[name]) for name, kind in get_type_hints(cls).items()}
            return cls(**values) if values["pid"] > 0 else None
        return None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    def __str__(self) -> str:
        age = max(0.0, time.time() - self.time)
        return f"process {self.pid} on {self.host}, last sign of life {age:,.0f} s ago"

    def is_here(self) -> bool:
        """Whether it is on this machine, where its process can be looked up."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    def is_this_process(self) -> bool:
        return self.is_here() and (self.pid, self.started) == (os.getpid(), _status(os.getpid())[1])

    def is_alive(self) -> bool:
        """Whether its process, on this machine, has not ended."""
        alive, started = _status(self.pid)
        return alive and started in ("", self.started)


def _status(pid: int) -> tuple[bool, str]:
    """Whether a process of this machine is alive, and when it started, if the system says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0] not in ("Z", "X"), fields[19]
    except (OSError, IndexError):
        pass  # it has ended, or is hidden, or the system has no such files
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False, ""
    except PermissionError:  # it belongs to another user
        pass
    return True, ""


def _boot() -> str:
    """Which processes can see each other: those with this value.

    Empty if the system does not say.
    """
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def launch() -> str:
    """The process group of this run, which no other live run can have; empty if unknown."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port:
        return ""
    where = f"{socket.gethostname()} {_boot()}" if address in LOOPBACK else address
    return f"{where} {port} {os.environ.get('TORCHELASTIC_RUN_ID', '')}".strip()


def is_first_process() -> bool:
    """Whether this is the first process of its run, or the only one, as far as torch knows."""
    group = torch.distributed
    return not (group.is_available() and group.is_initialized()) or group.get_rank() == 0
