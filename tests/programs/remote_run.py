"""A run that reads remote shards and keeps checkpoints, one row of numbers a step. Killed by the test."""

import json
import sys
from pathlib import Path

import fmsdata


def main() -> None:
    config, rank, world_size, out, steps = sys.argv[1:]
    loader = fmsdata.build_loader(json.loads(config), rank=int(rank), world_size=int(world_size))
    with Path(out).open("a") as file:
        for batch in loader:
            step = loader.stats().step
            file.write(json.dumps([step, batch["input_ids"].tolist()]) + "\n")
            file.flush()
            if step >= int(steps):
                return


if __name__ == "__main__":
    main()
