"""One rank of a run that keeps model and loader with torch.distributed.checkpoint. Started by torchrun."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

import fmsdata

dcp: Any = torch.distributed.checkpoint  # its functions are not declared as public


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--load", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(3, 3)
    loader = fmsdata.build_loader(args.config)
    if args.load:
        dcp.load({"model": model, "loader": loader}, checkpoint_id=args.load)
    batches = iter(loader)
    rows = [next(batches)["input_ids"].tolist() for _ in range(args.steps)]
    saving = None
    if args.save and args.asynchronous:
        saving = dcp.async_save({"model": model, "loader": loader}, checkpoint_id=args.save)
        next(batches)  # the state that is saved is not this one
    elif args.save:
        dcp.save({"model": model, "loader": loader}, checkpoint_id=args.save)
    if saving is not None:
        saving.result()
    Path(f"{args.rows}-{dist.get_rank()}.json").write_text(json.dumps(rows))
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
