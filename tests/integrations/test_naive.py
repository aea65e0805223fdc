"""The obvious way to use a loader in each trainer is exact, or an error of ours: never silently wrong.

The program uses public names only, so it also runs with earlier versions. With commit 59e46ed, the last one that
knew no trainers, all of these tests fail: what trains and saves there ends without an error, except for the
collator, whose error is that of torch, and what resumes is lost or reads other samples.
"""

from pathlib import Path

import pytest

from tests.integrations.helpers import Job, Result, in_order, run_jobs

PROGRAM = (Path(__file__).parent / "programs" / "naive.py").read_text()
IMPORTS = [
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "lightning",
    "ray.train.torch",
    "tests.integrations.programs.deepspeed_on_cpu",
    "tests.integrations.programs.megatron_on_cpu",
]
# way: its number of ranks, and a part of the error
SAVED = {
    "accelerate, prepared": (2, "fmsdata.integrations.accelerate.register(accelerator, loader)"),
    "accelerate, registered": (2, "fmsdata.integrations.accelerate.register(accelerator, loader)"),
    "lightning": (1, 'data = fmsdata.integrations.lightning.DataModule("run.yaml")'),
    "lightning, 2 ranks": (2, 'data = fmsdata.integrations.lightning.DataModule("run.yaml")'),
    "deepspeed": (2, "fmsdata.integrations.deepspeed.save_checkpoint(engine, folder, loader)"),
    "ray": (1, "checkpoint = fmsdata.integrations.ray.restore(loader)"),
    "hf, resumed": (1, "trainer = Trainer(model, args, train_dataset=loader)"),
    "hf, ignore_data_skip": (1, "trainer = Trainer(model, args, train_dataset=loader)"),
}
OTHERS = {
    "lightning, launched": (1, 'data = fmsdata.integrations.lightning.DataModule("run.yaml")'),
    "megatron": (2, "pass mesh= (the device mesh), or the data-parallel rank= and world_size="),
    "hf, labels": (1, "task: {name: causal_lm, shift: false}"),
    "hf, collator": (1, "trainer = Trainer(model, args, train_dataset=loader)"),
}


@pytest.fixture(scope="module")
def results(folder: Path, stream: list[int]) -> dict[str, Result]:
    jobs = []
    for way, (ranks, _) in {**SAVED, **OTHERS}.items():
        phases = ("train", "resume") if way in SAVED else ("train",)
        jobs += [Job(f"{way}, {phase}", PROGRAM, ranks, arguments=[way, phase], folder=way) for phase in phases]
    return run_jobs(folder, jobs, IMPORTS)


def refused(result: Result, line: str) -> bool:
    """All ranks ended, one of them with an error of ours that shows what to write."""
    return all(result.codes) and any("fmsdata.errors." in log and line in log for log in result.logs)


@pytest.mark.parametrize("way", SAVED)
def test_a_run_that_resumes_is_exact_or_refused(results: dict[str, Result], stream: list[int], way: str) -> None:
    """What was trained on, in both runs, is the stream, if nothing is refused."""
    trained, resumed = results[f"{way}, train"], results[f"{way}, resume"]
    if refused(trained, SAVED[way][1]) or refused(resumed, SAVED[way][1]):
        return
    trained.check()
    resumed.check()
    rows = in_order(trained.trained) + in_order(resumed.trained)
    assert rows == stream[: len(rows)]


def test_processes_that_a_trainer_starts_itself_read_the_stream(results: dict[str, Result], stream: list[int]) -> None:
    launched = results["lightning, launched, train"]
    if not refused(launched, OTHERS["lightning, launched"][1]):
        first, second = launched.check().found[0]
        assert sorted(first + second) == sorted(stream[: len(first + second)])


def test_processes_of_one_data_parallel_rank_read_the_same(results: dict[str, Result]) -> None:
    parallel = results["megatron, train"]
    if not refused(parallel, OTHERS["megatron"][1]):
        first, second = parallel.check().trained
        assert first == second


def test_labels_are_shifted_once(results: dict[str, Result]) -> None:
    shifted = results["hf, labels, train"]
    if not refused(shifted, OTHERS["hf, labels"][1]):
        assert shifted.check().found == [60]


def test_the_samples_of_a_stream_are_not_left_to_the_collator_of_a_trainer(results: dict[str, Result]) -> None:
    assert refused(results["hf, collator, train"], OTHERS["hf, collator"][1])
