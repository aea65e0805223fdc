"""Runs a target on many damaged inputs, in this process, and reports each outcome that breaks the law.

The law: whatever is in a file, the outcome is the right result or an error of `fmsdata.errors`, within
seconds and within bounded memory. The input of a case depends on the seed and the number of the case
alone, so that every failure can be repeated. A case that ends the process, or does not end, is named by
the last line that was printed.
"""

import faulthandler
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Protocol

import numpy as np

from fmsdata.errors import FmsdataError

LONGEST = 30.0  # seconds for one case, on a busy machine
MEMORY = 3 << 30  # bytes beyond what the process has before the first case
REPORTED = 20  # kinds of failures


class Target(Protocol):
    """Something that reads files."""

    def attempt(self, rng: np.random.Generator) -> None:
        """Read one damaged input. Raises if the outcome is wrong."""


def limit_memory() -> None:
    """Let every allocation fail that goes far beyond what is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(name: str, target: Target, seed: int, cases: range, seconds: float = float("inf")) -> bool:
    """Run the cases until the time is up. Returns whether all of them kept the law."""
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    end = time.monotonic() + seconds
    slowest = (0.0, 0)
    for case in cases:
        begun = time.monotonic()
        if begun > end:
            break
        print(f"\r{name}: seed {seed}, case {case} ", end="", flush=True)
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            target.attempt(np.random.default_rng([seed, case]))
            outcomes["read"] += 1
        except FmsdataError:
            outcomes["refused"] += 1
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {where.filename}:{where.lineno}"
            failures[kind] += 1
            if failures[kind] == 1 and len(failures) <= REPORTED:
                print(f"\n--- python -m tests.fuzz {name} --seed {seed} --case {case}")
                traceback.print_exc(file=sys.stdout)
        faulthandler.cancel_dump_traceback_later()
        slowest = max(slowest, (time.monotonic() - begun, case))
    counted = f"{outcomes['read']} read, {outcomes['refused']} refused, {failures.total()} wrong"
    print(f"\r{name}: seed {seed}, {counted}; case {slowest[1]} took {slowest[0]:.1f} s")
    for kind, count in failures.most_common():
        print(f"  {count} x {kind}")
    return not failures
