"""Problems of a configuration, each with the place where it was written.

Readers collect problems instead of raising at the first, so that one error names them all.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fmsdata.errors import ConfigError


class Place(NamedTuple):
    """Where a value was written: a file and a line, or something else, such as an override."""

    file: str
    line: int = 0  # from 1; 0 if there are no lines

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Problem(NamedTuple):
    """What is wrong at a place.

    >>> str(Problem(Place("run.yaml", 3), "lanes is 0; it must be at least 1"))
    'run.yaml:3: lanes is 0; it must be at least 1'
    """

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def config_error(problems: Iterable[Problem]) -> ConfigError:
    """One error for all problems: those without a line first, then in the order of each file."""

    def order(problem: Problem) -> tuple[str, int]:
        file, line = problem.place
        return (file, line) if line else ("", 0)

    lines = [str(problem) for problem in sorted(dict.fromkeys(problems), key=order)]
    return ConfigError(
        lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems in the configuration:", *lines])
    )
