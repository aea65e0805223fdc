"""A script of Ray Train, run several times on one Ray cluster on this machine. The argument is a folder.

`jobs.json` there lists jobs as `runner.py` takes them. Their ranks are workers of the cluster, which record
what they train on, and are killed, as the ranks of `runner.py` are.
"""

import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import torch
from ray.train.torch import TorchTrainer
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.integrations.runner import Recorder

ASK_EVERY, PATIENCE = 0.2, 3.0  # seconds


class PatientRecorder(Recorder):
    """Waits before it kills the process, until Ray knows of the last checkpoint: it asks workers now and then."""

    def kill(self) -> None:
        time.sleep(PATIENCE)
        super().kill()


def recorded(train: Callable[[Any], None], folder: Path, job: dict[str, Any]) -> Callable[[Any], None]:
    """The function that each worker runs, with a record of what it trains on."""

    def run(config: Any) -> None:
        torch.set_num_threads(1)
        path = folder / f"{job['name']}-{torch.distributed.get_rank()}.jsonl"
        register_module_forward_pre_hook(PatientRecorder(path, job["kill_after"]))
        train(config)

    return run


def start(folder: Path, job: dict[str, Any], train: Callable[[Any], None], **options: Any) -> Any:
    return TorchTrainer(recorded(train, folder, job), **options)


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = str(ASK_EVERY)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    codes = {}
    for job in json.loads((folder / "jobs.json").read_text())["jobs"]:
        sys.argv = [job["script"], *job["arguments"]]
        code, log = 0, ""
        try:
            with patch("ray.train.torch.TorchTrainer", partial(start, folder, job)):
                runpy.run_path(job["script"], run_name="__main__")
        except BaseException:
            code, log = 1, traceback.format_exc()
        codes[job["name"]] = [code] * job["world_size"]
        for rank in range(job["world_size"]):
            (folder / f"{job['name']}-{rank}.log").write_text(log)
    (folder / "codes.json").write_text(json.dumps(codes))
    shut_down: Any = ray.shutdown
    shut_down()


if __name__ == "__main__":
    main()
