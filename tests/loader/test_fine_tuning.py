"""Batches of fine-tuning rows: from workers, with the outputs of streams, and in real ranks that train."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import fmsdata
from tests.epochs.fine_tuners import EOS, PAD, FineTuners, data

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "fine_tuning.py"
LENGTHS = [(n % 5, 1 + n * n % 23) for n in range(90)]


def made(**options: Any) -> fmsdata.FineTuningRows:
    return fmsdata.FineTuningRows(data(LENGTHS), "bytes", **{"seq_len": 24, "eos": EOS, "pad": PAD, **options})


@pytest.mark.parametrize("options", [{"global_batch": 4}, {"max_tokens": 60, "global_batch": 2}])
def test_workers_make_the_same_batches_and_states(options: dict[str, Any]) -> None:
    rows = made()
    here = FineTuners(rows, world_size=1, drop_last=False, **options)
    expected = [here.step() for _ in range(20)]
    there = FineTuners(rows, world_size=1, drop_last=False, num_workers=2, **options)
    found = [there.step() for _ in range(7)]
    state = json.loads(json.dumps(there.states()))
    found += [there.step() for _ in range(5)]
    there.loaders[0].load_state_dict(state)
    assert [there.step() for _ in range(13)] == expected[7:]
    assert found == expected[:12]
    there.close()


def test_all_fields_of_a_batch() -> None:
    rows = fmsdata.FineTuningRows(
        [{"prompt": "ab", "response": "c"}, {"prompt": "d", "response": "efg"}], "bytes", seq_len=12, eos=EOS, pad=PAD
    )
    sampler = fmsdata.EpochSampler(rows, global_batch=2, rank=0, world_size=1, shuffle=False, drop_last=False)
    loader = fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=2, outputs=["cu_seqlens", "max_seqlen"])
    (batch,) = loader
    empty = [PAD] * 12
    assert {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()} == {
        "input_ids": [[97, 98, 99, 0, 100, 101, 102, 103, 0, PAD, PAD, PAD], empty],
        "labels": [[-100, 99, 0, -100, 101, 102, 103, 0, *[-100] * 4], [-100] * 12],
        "document_ids": [[0, 0, 0, 0, 1, 1, 1, 1, 1, -1, -1, -1], [-1] * 12],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], list(range(12))],
        "cu_seqlens": [0, 4, 12, 24],
        "max_seqlen": 12,
        "index": [0, 1],
        "rows_per_line": [2, 0],
        "epoch_id": [0, 1],
        "is_padding": [False, True],
        "global_tokens": 6,
    }
    assert loader.last_rows.index.tolist() == [0, 1]  # type: ignore[attr-defined]
    again = fmsdata.EpochSampler(rows, global_batch=2, rank=0, world_size=1, shuffle=False, drop_last=False)
    plain = fmsdata.StatefulDataLoader(rows, sampler=again, batch_size=2, row_ids=False, padding_segment=True)
    (other,) = plain
    assert set(other) == {"input_ids", "labels", "document_ids", "position_ids", "is_padding", "global_tokens"}
    assert other["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]


def test_rows_of_hugging_face_datasets_become_the_same_tokens() -> None:
    rows = data(LENGTHS)
    table = datasets.Dataset.from_list(rows)
    own, theirs = (fmsdata.FineTuningRows(of, "bytes", seq_len=24, eos=EOS) for of in (rows, table))
    assert own.table.path == theirs.table.path
    assert own.content == theirs.content


def test_gradients_are_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    """And of two ranks that start at the same time, one tokenizes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for ranks in (2, 1):
        done = subprocess.run(
            [*launch, str(ranks), PROGRAM, tmp_path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert alone["counts"] == first["counts"] == second["counts"]
    assert len(set(alone["counts"])) > 1, "ranks would have equal parts of the labels by chance"
    for name, value in alone["model"].items():
        torch.testing.assert_close(first["model"][name], value, rtol=1e-12, atol=1e-12)
        assert torch.equal(first["model"][name], second["model"][name])
    assert sorted([first["calls"], second["calls"]]) == [0, 1]
    assert alone["calls"] == 0
