"""Run the fuzzers.

python -m tests.fuzz                                     all of them, for a minute, with a random seed
python -m tests.fuzz shards states --seconds 600         some of them, for this long together
python -m tests.fuzz shards:1000 --seed 7                the first 1000 cases of a seed
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
    "text": "tests.fuzz.text_formats:TextFiles",
    "text-index": "tests.fuzz.text_formats:TextIndexes",
    "counts": "tests.fuzz.texts:CountsFiles",
    "yaml": "tests.fuzz.texts:Configurations",
    "states": "tests.fuzz.states:States",
    "train": "tests.fuzz.states:TrainStates",
    "checkpoints": "tests.fuzz.states:CheckpointFolders",
}


def target(name: str, folder: Path) -> Target:
    module, _, kind = TARGETS[name].partition(":")
    folder.mkdir()
    made: Target = getattr(importlib.import_module(module), kind)(folder)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--case", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # what a damaged file makes a reader warn of is no failure
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        plan = []
        for name, _, cases in (text.partition(":") for text in given.targets):
            numbers = range(int(cases) if cases else 1 << 62)
            if given.case is not None:
                numbers = range(given.case, given.case + 1)
            seconds = float("inf") if cases else given.seconds / len(given.targets)
            plan.append((name, target(name, Path(folder) / name), given.seed, numbers, seconds))
        limit_memory()
        results = [run(*each) for each in plan]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
