"""A rank of a run that saves itself, and writes down what it sees: `growing.py CONFIG RANK RANKS LOG STEPS`."""

import json
import sys
from itertools import islice

import fmsdata


def main(config: str, rank: str, world_size: str, log: str, steps: str) -> None:
    loader = fmsdata.build_loader(config, rank=int(rank), world_size=int(world_size))
    step = int(loader.state_dict()["step"])
    with open(log, "w") as file:
        for batch in islice(loader, max(0, int(steps) - step)):
            entry = {"step": step, "spans": batch["provenance"][0], "epochs": batch["epochs"][0]}
            file.write(json.dumps(entry) + "\n")
            file.flush()
            step += 1
    loader.save()
    loader.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
