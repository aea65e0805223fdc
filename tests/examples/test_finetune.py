"""The fine-tuning example: the same losses alone, and when it is killed and rescaled under torchrun."""

from pathlib import Path
from typing import Any

import pytest

import fmsdata
from tests.examples.helpers import imported, run_alone

EPOCHS = 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The steps of a run on 1 rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    run_alone("finetune", {"--out": folder, "--epochs": EPOCHS})
    entries: list[Any] = imported("processes").entries(folder)
    return entries


def test_an_epoch_is_all_rows_and_an_evaluation_ends_it(alone: list[Any], tmp_path: Path) -> None:
    example = imported("finetune")
    data = [row for number, row in enumerate(example.ROWS) if number % 10]
    rows = fmsdata.FineTuningRows(data, "bytes", seq_len=example.SIZES["seq_len"], eos=0, cache=tmp_path)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": example.SEED, "drop_last": False}
    sampler = fmsdata.EpochSampler(rows, global_batch=example.GLOBAL_BATCH, **options)
    steps = len(fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=example.GLOBAL_BATCH))
    assert [(entry["step"], entry["epoch"]) for entry in alone] == [
        (step, step // steps) for step in range(EPOCHS * steps)
    ]
    evaluations = [entry["evaluation"] for entry in alone if "evaluation" in entry]
    assert [entry["step"] for entry in alone if "evaluation" in entry] == [steps - 1, 2 * steps - 1]
    assert evaluations[1] < evaluations[0] < alone[0]["loss"]


def test_a_run_that_is_killed_in_an_epoch_has_the_same_losses_on_other_ranks(alone: list[Any], tmp_path: Path) -> None:
    processes, run = imported("processes"), tmp_path / "run"
    options = "--epochs", str(EPOCHS), "--every", "3"
    done = processes.has_done
    processes.torchrun(2, "finetune.py", run, *options, kill_when=lambda: done(run, 4))
    killed_after = len(processes.entries(run))
    assert 4 < killed_after < len(alone)
    processes.torchrun(3, "finetune.py", run, *options)
    entries = processes.entries(run)
    assert entries[killed_after]["step"] > 0, "it began at a checkpoint"
    assert {entry["step"] for entry in entries} == {entry["step"] for entry in alone}
    for entry in entries:
        expected = alone[entry["step"]]
        assert (entry["sha256"], entry["epoch"]) == (expected["sha256"], expected["epoch"])
        for loss in ("loss", "evaluation"):
            assert entry.get(loss) == pytest.approx(expected.get(loss), abs=1e-4)


def test_packed_rows_do_not_see_each_other(tmp_path: Path) -> None:
    """The loss of a line of several rows is that of its rows alone."""
    train = imported("train")
    train.torch.manual_seed(0)
    model = train.GPT(vocab=256, width=16, heads=2, depth=2, seq_len=48)
    data = imported("finetune").ROWS[:3]
    rows = fmsdata.FineTuningRows(data, "bytes", seq_len=48, eos=0, cache=tmp_path)
    sampler = fmsdata.EpochSampler(rows, global_batch=1, rank=0, world_size=1)
    batch = next(fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=1))
    assert batch["rows_per_line"].tolist() == [3]
    alone = [{name: values[None] for name, values in rows[number].items()} for number in range(3)]
    expected = sum(train.losses_of(model, row).sum().item() for row in alone)
    assert train.losses_of(model, batch).sum().item() == pytest.approx(expected, rel=1e-5)
