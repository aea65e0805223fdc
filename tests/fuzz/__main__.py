"""Run the fuzzers.

python -m tests.fuzz                                     all of them, for a minute, with a random seed
python -m tests.fuzz shards states --seconds 600         some of them, for this long together
python -m tests.fuzz shards --seed 7 --cases 1000        the first cases of a seed
python -m tests.fuzz shards --seed 7 --case 123          one case, to repeat a failure
"""

import argparse
import importlib
import logging
import secrets
import sys
import tempfile
import warnings
from pathlib import Path

from tests.fuzz.harness import Target, limit_memory, run

TARGETS = {
    "shards": "tests.fuzz.arrow:Shards",
    "counts": "tests.fuzz.texts:CountsFiles",
    "yaml": "tests.fuzz.texts:Configurations",
    "states": "tests.fuzz.states:States",
    "checkpoints": "tests.fuzz.states:CheckpointFolders",
}


def target(name: str, folder: Path) -> Target:
    module, _, kind = TARGETS[name].partition(":")
    folder.mkdir()
    made: Target = getattr(importlib.import_module(module), kind)(folder)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--cases", type=int)
    parser.add_argument("--case", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
    cases = range(1 << 62) if given.cases is None else range(given.cases)
    cases = cases if given.case is None else range(given.case, given.case + 1)
    seconds = given.seconds / len(names) if given.cases is None else float("inf")
    warnings.simplefilter("ignore")  # what a damaged file makes a reader warn of is no failure
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        made = {name: target(name, Path(folder) / name) for name in names}
        limit_memory()
        results = [run(name, each, given.seed, cases, seconds) for name, each in made.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
