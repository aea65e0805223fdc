"""torch.distributed.checkpoint, with FSDP2 and with DDP: killed and resumed on another number of processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integrations.helpers import (
    Result,
    check_evaluations,
    check_resumed,
    resumed_jobs,
    run_jobs,
    script_of,
)

WRAPPERS = {"FSDP2": "fully_shard(model)", "DDP": "torch.nn.parallel.DistributedDataParallel(model)"}
IMPORTS = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]


@pytest.fixture(scope="module")
def all_results(folder: Path, stream: list[int]) -> dict[str, Result]:
    script = script_of("torch.md")
    assert f"model = {WRAPPERS['FSDP2']}  # or {WRAPPERS['DDP']}\n" in script
    jobs = []
    for name, line in WRAPPERS.items():
        wrapped = resumed_jobs(script.replace(WRAPPERS["FSDP2"], line), kill_after=10)
        jobs += [replace(job, name=f"{name} {job.name}", folder=f"{name} {job.folder}") for job in wrapped]
    return run_jobs(folder, jobs, IMPORTS)


@pytest.fixture(params=WRAPPERS)
def results(request: pytest.FixtureRequest, all_results: dict[str, Result]) -> dict[str, Result]:
    names = [(name, name.removeprefix(f"{request.param} ")) for name in all_results]
    return {short: all_results[name] for name, short in names if name != short}


def test_the_page_resumes_exactly_on_another_number_of_processes(results: dict[str, Result], stream: list[int]) -> None:
    """Saved after 6 batches, which are 3 steps of the optimizer, and killed after 10."""
    check_resumed(results, stream, saved_after=6)


def test_evaluation_in_between_reads_the_same_set_each_time(results: dict[str, Result]) -> None:
    check_evaluations(results, samples=8)
