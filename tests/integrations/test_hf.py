"""The real Trainer of transformers, on 1 and 2 processes: exact, or an error that shows the line to write."""

import re
from pathlib import Path

import pytest
import yaml

import fmsdata
from fmsdata.config.build import make_task
from fmsdata.config.read import read_config
from tests.integrations.environment import ROOT
from tests.integrations.helpers import (
    Job,
    Result,
    check_chain,
    check_evaluations,
    check_resumed,
    resumed_jobs,
    run_jobs,
    script_of,
)

PROGRAM = (Path(__file__).parent / "programs" / "hf.py").read_text()


SHIFT = False  # models of Hugging Face shift labels themselves


@pytest.fixture(scope="module")
def results(folder: Path, stream: list[int]) -> dict[str, Result]:
    jobs = [
        *resumed_jobs(script_of("huggingface.md"), kill_after=10),
        Job("epochs, killed", PROGRAM, 1, 9, ["epochs"], folder="epochs"),
        Job("epochs", PROGRAM, 1, None, ["epochs"], folder="epochs"),
        Job("rows, killed", PROGRAM, 1, 5, ["rows"], folder="rows"),
        Job("rows", PROGRAM, 1, None, ["rows"], folder="rows"),
        *(Job(name, PROGRAM, 1, None, [name], folder=name) for name in ("naive", "refused", "evaluated", "counting")),
        Job("evaluated by 2", PROGRAM, 2, None, ["evaluated"], folder="evaluated by 2"),
    ]
    return run_jobs(
        folder,
        jobs,
        ["transformers", "transformers.trainer", "transformers.models.llama.modeling_llama"],
    )


def test_the_page_resumes_exactly_on_another_number_of_processes(results: dict[str, Result], stream: list[int]) -> None:
    """Saved after step 3 of the optimizer, with 2 batches each, and killed after 10 batches."""
    check_resumed(results, stream, saved_after=6)


def test_the_configuration_of_the_page_is_valid_and_leaves_labels_as_they_are() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/trainers/huggingface.md").read_text(), re.DOTALL)
    config = read_config(yaml.safe_load(block), {"evaluation": {"samples": 1024}})
    assert make_task(config) == fmsdata.CausalLM(shift=False)


def test_evaluation_in_between_reads_the_same_set_each_time(results: dict[str, Result]) -> None:
    check_evaluations(results, samples=8)


def test_a_run_in_epochs_resumes_within_one(results: dict[str, Result], stream: list[int]) -> None:
    """Epochs of 3 steps with 2 batches each. Saved after step 4."""
    check_chain(stream, (results["epochs, killed"].check_killed(), 8), (results["epochs"].check(), None))
    assert sum(map(len, results["epochs"].trained[0])) == 2 * (3 * 6 - 8)
    assert results["epochs"].found[0] == pytest.approx([step / 3 for step in range(1, 10)])


def test_rows_resume_within_an_epoch(results: dict[str, Result]) -> None:
    """Epochs of 6 steps. Saved after step 4, killed after 5."""
    killed, resumed = (results[name].trained[0] for name in ("rows, killed", "rows"))
    results["rows, killed"].check_killed()
    (second,) = results["rows"].check().found
    assert sorted(row for batch in results["rows"].evaluated[0] for row in batch) == list(range(8))
    assert killed[4] == resumed[0]
    assert sorted(row for batch in [*killed[:4], *resumed[:2]] for row in batch) == list(range(12))
    assert [row for batch in resumed[2:] for row in batch] == second


def test_the_loss_of_an_evaluation_is_the_same_on_any_number_of_processes(results: dict[str, Result]) -> None:
    losses = [*results["evaluated"].check().found, *results["evaluated by 2"].check().found]
    assert len(losses) == 3
    for repeated in losses:
        assert repeated == pytest.approx(losses[0], rel=1e-5)


def test_a_trained_model_counts_on(results: dict[str, Result]) -> None:
    """If labels were shifted twice, it would continue with 61."""
    assert results["counting"].check().found[0] == [60, 61, 62]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("no position", "its checkpoints do not hold the position of this loader"),
        ("skips", "a loader has no 'dataset'"),
        ("restarts", "the Trainer resumes from naive/checkpoint-2 at step 2, but the loader is at the start"),
        ("plain trainer", "the stream has no end"),
        ("default collator", "the collator of transformers can't join the samples"),
    ],
)
def test_the_naive_ways_show_the_right_line(results: dict[str, Result], way: str, message: str) -> None:
    error = results["naive"].check().found[0][way]
    assert message in error
    assert "    trainer = Trainer(model, args, train_dataset=loader)\n" in error


def test_labels_that_would_be_shifted_twice_are_refused(results: dict[str, Result]) -> None:
    for program, way in (("naive", "shifted"), ("refused", "shifted"), ("refused", "shifted, wrapped")):
        error = results[program].check().found[0][way]
        assert "LlamaForCausalLM shifts them once more" in error
        assert "task: {name: causal_lm, shift: false}" in error


def test_attributes_of_torchs_loaders_are_errors_that_show_what_to_save(results: dict[str, Result]) -> None:
    for name in ("dataset", "sampler", "batch_sampler"):
        error = results["naive"].found[0][name]
        assert f"NoSuchAttributeError: a loader has no {name!r}" in error
        assert "    state = loader.state_dict(gather=True)\n" in error


def test_a_trainer_that_reads_further_ahead_does_not_save(results: dict[str, Result]) -> None:
    assert "while it holds 1 batch that it has not trained on" in results["naive"].found[0]["ahead"]


def test_a_search_of_hyperparameters_is_refused(results: dict[str, Result]) -> None:
    assert "each trial would get other samples" in results["naive"].found[0]["search"]


def test_a_checkpoint_without_a_position_is_refused(results: dict[str, Result]) -> None:
    assert "naive/checkpoint-2 has no fmsdata.json" in results["naive"].found[0]["foreign"]
    assert "there is no checkpoint nowhere/checkpoint-2" in results["naive"].found[0]["nowhere"]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("batch size", "TrainingArguments(..., per_device_train_batch_size=loader.batch_size)"),
        ("search", "auto_find_batch_size begins again with other batches"),
        ("own folder", "remove `checkpoint` from the loader"),
        ("length", "TrainingArguments(..., max_steps=2)"),
        ("length, max_steps", "no error"),
        ("evaluation", "pass it as eval_dataset"),
        ("evaluation of a stream", "StatefulDataLoader(data, batch_size=..., evaluation=True)"),
        ("evaluation that is filled up", "evaluation: {samples: 6}"),
        ("evaluation that is too small", "the evaluation has 1 sample, "),
        ("evaluation that is too small", "Use smaller batches, or a set of at least 2 samples"),
        ("path", "Trainer(..., train_dataset=fmsdata.build_loader('run.yaml'))"),
        ("ranks", "the loader reads as rank 0 of 3, but the Trainer has 1 data-parallel rank"),
    ],
)
def test_arguments_under_which_a_run_is_not_exact_are_refused(
    results: dict[str, Result], way: str, message: str
) -> None:
    assert message in results["refused"].check().found[0][way]
