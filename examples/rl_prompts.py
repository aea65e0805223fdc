"""Reinforcement learning on prompts, with answers in flight: it can be killed, and resumes on other ranks.

    torchrun --standalone --nproc-per-node 2 examples/rl_prompts.py --out runs/rl

Prompts go out for answers some batches ahead of training. A prompt that is mastered is excluded from
the next epoch on, until none is left. A checkpoint has the policy and the position of the last batch
that was *trained*, not of the last one that went out: what was in flight goes out again.

The policy is a toy whose answers come from keyed numbers: the more often it trained on a prompt, the
more of them are right. Only `Policy` would differ in a real run.
"""

import argparse
import json
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from run_folder import RunFolder, end_at_once, end_with_torchrun

import fmsdata

PROMPTS = [{"prompt": f"What is {a} times {b}?"} for a in range(3, 13) for b in range(3, 15)]
GLOBAL_BATCH, IN_FLIGHT, ANSWERS = 12, 3, 4  # prompts in a batch, batches out for answers, answers to a prompt
EVERY, SEED = 5, 42  # steps between checkpoints


class Policy:
    """How often each prompt was trained. It is the same on all ranks."""

    def __init__(self, trained: list[int]) -> None:
        self.trained = trained

    def answer(self, batch: dict[str, Any], seconds: float) -> list[int]:
        """The number of right answers to each prompt of a batch."""
        time.sleep(seconds)
        return [sum(self._is_right(index, answer) for answer in range(ANSWERS)) for index in batch["index"].tolist()]

    def _is_right(self, index: int, answer: int) -> bool:
        times = self.trained[index]
        return fmsdata.keys.key_of(SEED, "answer", index, times, answer) / 2**64 > 0.7 ** (times + 1)


def of_all_ranks(rows: list[Any]) -> list[Any]:
    """The rows of the global batch in order: row i of rank r is its row i * ranks + r."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, rows)
    return list(chain.from_iterable(zip(*ranks, strict=True)))


def train(folder: RunFolder, log: TextIO, seconds: float) -> None:
    """Train until all prompts are mastered."""
    sampler = fmsdata.EpochSampler(PROMPTS, global_batch=GLOBAL_BATCH, seed=SEED, drop_last=False)
    loader = fmsdata.StatefulDataLoader(PROMPTS, sampler=sampler, batch_size=GLOBAL_BATCH // dist.get_world_size())
    step, policy = 0, Policy([0] * len(PROMPTS))
    newest = folder.newest()
    if newest is not None:
        saved = json.loads((newest / "state.json").read_text())
        step, policy = saved["step"], Policy(saved["policy"])
        sampler.load_state_dict(saved["data"])

    in_flight: deque[Any] = deque()
    pool = ThreadPoolExecutor(1)
    while True:
        # The next epoch begins when all of this one is trained, and has none of the prompts mastered in it.
        while len(in_flight) < IN_FLIGHT and not (in_flight and sampler.finished):
            batch = next(loader)
            in_flight.append((batch, sampler.state_dict(), pool.submit(policy.answer, batch, seconds)))
        batch, position, answers = in_flight.popleft()
        rows = zip(batch["index"].tolist(), batch["is_padding"].tolist(), answers.result(), strict=True)
        trained = [(index, right) for index, padding, right in of_all_ranks(list(rows)) if not padding]
        for index, _ in trained:
            policy.trained[index] += 1
        mastered = [index for index, right in trained if right == ANSWERS]
        if folder.rank == 0:
            prompts = {"prompts": [index for index, _ in trained], "mastered": mastered, "in_flight": len(in_flight)}
            epoch = int(batch["epoch_id"][0]) // 2**40
            log.write(json.dumps({"step": step, "epoch": epoch, **prompts, "ranks": dist.get_world_size()}) + "\n")
        step += 1
        if len(sampler.excluded) + len(mastered) == len(PROMPTS):
            return
        sampler.exclude(mastered)  # the same ids on all ranks
        if step % EVERY == 0:
            state = {"step": step, "policy": policy.trained, "data": sampler.state_dict(at=position)}
            with folder.checkpoint(step) as path:
                if folder.rank == 0:  # it is the same on all ranks
                    (path / "state.json").write_text(json.dumps(state))


def main() -> None:
    options = argparse.ArgumentParser(description="Train on prompts until all are mastered; resume in --out.")
    options.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log.jsonl")
    options.add_argument("--seconds", type=float, default=0.1, help="how long the answers to a batch take")
    arguments = options.parse_args()
    end_with_torchrun()
    dist.init_process_group("gloo")
    folder = RunFolder(arguments.out)
    with (arguments.out / "log.jsonl").open("a", buffering=1) as log:  # line buffered
        train(folder, log, arguments.seconds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_at_once()
