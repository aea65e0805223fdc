"""Evaluation: the whole set from the top at each iteration, the same at any world size, without a state."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import fmsdata
from fmsdata import testing, train_state
from fmsdata.errors import ConfigError, StateError
from tests.helpers import CONFIG, maker

ROOT = Path(__file__).parents[2]


def spans(batches: Any) -> list[Any]:
    return [span for batch in batches for row in batch["provenance"] for span in row]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_iteration_is_the_whole_set_in_the_same_order(shared_corpus: Path, workers: int) -> None:
    loader = maker(shared_corpus, evaluation=True, loader__batch_size=9, loader__num_workers=workers)(1, 3)
    first = list(loader)
    assert len(first) == len(loader)
    assert str(list(loader)) == str(first)
    stopped = list(itertools.islice(loader, 2))
    assert str(stopped) == str(first[:2])
    assert str(list(loader)) == str(first), "an evaluation that was left in the middle begins again too"
    loader.close()


def test_the_set_is_the_same_at_any_world_size(shared_corpus: Path) -> None:
    testing.check_equal_ends(maker(shared_corpus, evaluation=True, loader__batch_size=5), world_sizes=[2, 7, 24])


@pytest.mark.parametrize("samples", [1, 30, 100, 10**6])
def test_the_first_samples_are_the_same_at_any_world_size(shared_corpus: Path, samples: int) -> None:
    """Of the order of the pass, which is that of world size 1."""
    whole = list(maker(shared_corpus, evaluation=True)(0, 1))
    make = maker(shared_corpus, evaluation={"samples": samples}, loader__batch_size=4)
    expected = Counter(spans(whole[:samples]))
    for world_size in (1, 2, 7, 24):
        got = Counter(span for rank in range(world_size) for span in spans(make(rank, world_size)))
        assert got == expected
    assert sum(make(0, 1).pass_lines) == min(samples, len(whole))


def test_the_whole_set_need_not_be_planned_for_a_few_samples(shared_corpus: Path) -> None:
    read: list[Any] = []

    class Counted(fmsdata.Stage):
        def transform(self, item: Any, key: int) -> list[Any]:  # noqa: ARG002
            read.append(item.document)
            return [item]

    lines = fmsdata.Pack(Counted(fmsdata.ShardReader(shared_corpus / "web")), seq_len=9)
    data = fmsdata.Rescalable(lines, lanes=2, epochs=1000)
    loader = fmsdata.StatefulDataLoader(data, batch_size=2, prefetch=0, evaluation={"samples": 10})
    assert len(list(loader)) == 5
    assert len(read) < 2000


def test_an_evaluation_has_no_state(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, evaluation=True)(0, 1)
    next(loader)
    assert loader.state_dict() == loader.state_dict(gather=True) == {}
    loader.load_state_dict({})
    loader.load_state_dict([{}, {}])
    with pytest.raises(StateError, match="an evaluation has no state"):
        loader.load_state_dict(maker(shared_corpus)(0, 1).state_dict())
    for call in (loader.save, loader.load):
        with pytest.raises(ConfigError, match=r"no state.*nothing to save or load"):
            call()
    with pytest.raises(ConfigError, match="no checkpoints"):
        loader.checkpoint = fmsdata.Checkpoints("anywhere")


def test_what_an_evaluation_cannot_have_is_refused(shared_corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an evaluation has no state, so it has no checkpoints"):
        maker(shared_corpus, evaluation=True, checkpoint={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="no phases"):
        maker(shared_corpus, evaluation=True, phases=[{"until_tokens": 9, "weights": {"web": 1, "wiki": 1}}])
    for wrong, message in (
        (3, "evaluation: it must be true, false, or a part of the set"),
        ("yes", "evaluation: it must be true, false, or a part of the set"),
        ({"sample": 3}, "evaluation.sample: unknown key; did you mean 'samples'"),
        ({"samples": 0}, "evaluation.samples is 0; it must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=f"^override 'evaluation.*: {message}"):  # and no other problem
            maker(shared_corpus, evaluation=wrong)
    assert maker(shared_corpus, evaluation=None)(0, 1).evaluation is False
    endless = fmsdata.Rescalable(fmsdata.Pack(fmsdata.ShardReader(shared_corpus / "web"), seq_len=9), lanes=2)
    with pytest.raises(ConfigError, match="epochs=1"):
        fmsdata.StatefulDataLoader(endless, batch_size=1, evaluation=True)


def test_two_evaluations_at_once_with_one_loader_are_refused(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, evaluation=True)(0, 1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(ConfigError, match="another evaluation with this loader has begun"):
        next(first)


def test_next_begins_again_after_the_end(shared_corpus: Path) -> None:
    loader = maker(shared_corpus, evaluation=True, loader__batch_size=50)(0, 1)
    rounds: list[list[Any]] = [[], []]
    for batches in rounds:
        with pytest.raises(StopIteration):
            while True:
                batches.append(next(loader))
    assert str(rounds[0]) == str(rounds[1]) == str(list(loader))


def test_evaluations_beside_a_run_do_not_change_it(shared_corpus: Path) -> None:
    """Both with workers, in one process; and the train state holds nothing of the evaluation."""
    alone = maker(shared_corpus, loader__batch_size=3)(0, 1)
    loader = maker(shared_corpus, loader__batch_size=3, loader__num_workers=2)(0, 1)
    evaluation = maker(shared_corpus, evaluation=True, loader__batch_size=9, loader__num_workers=1)(0, 1)
    expected = str(list(evaluation))
    for step in range(12):
        assert str(next(loader)) == str(next(alone))
        if step % 5 == 0:
            assert str(list(evaluation)) == expected
    assert loader.state_dict() == alone.state_dict()
    before = json.dumps(train_state.build(loader, step=12, tokens_seen=0)["loader"])
    list(evaluation)
    assert json.dumps(train_state.build(loader, step=12, tokens_seen=0)["loader"]) == before
    loader.close()
    evaluation.close()


def torchrun(world_size: int, *command: str | Path) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_rank_waits_for_another_at_the_end_of_a_pass(corpus: Path) -> None:
    config = corpus / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "lanes": 12, "loader": {"batch_size": 2}}))
    torchrun(3, "-m", "tests.programs.finite", config, corpus / "found.json")
    found = json.loads((corpus / "found.json").read_text())
    evaluations = found.pop("evaluations")
    for mode in found.values():
        assert [ranks for _, ranks in mode["steps"]] == [3] * mode["length"]
        assert sum(samples for samples, _ in mode["steps"]) == mode["samples"]
    assert evaluations[0] == evaluations[1] == found["split-0"]["steps"]
    assert found["split-0"] == found["split-2"]
