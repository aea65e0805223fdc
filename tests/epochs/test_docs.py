"""The code of the pages on rows runs when pasted."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

DOCS = Path(__file__).parents[2] / "docs"


def run(page: str, names: dict[str, Any]) -> int:
    """Run the code of a page in order, and return how many blocks it has."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    for block in blocks:
        exec(block, names)
    return len(blocks)


def test_the_code_of_the_page_on_epochs_runs() -> None:
    names: dict[str, Any] = {}
    assert run("epochs.md", names) == 3
    assert set(names["batch"]) >= {"dataset_idx", "index", "epoch_id", "is_padding", "prompt"}
    assert names["mix"].names == ("code", "math")


def test_the_code_of_the_page_on_rl_prompts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert run("rl-prompts.md", names) == 5
    assert names["sampler"].position == names["checkpoint"]["position"] == 10 * 64, "what was in flight comes again"
    excluded = names["sampler"].excluded
    assert len(excluded) > 40
    assert 17 not in excluded


def test_the_code_of_the_page_on_moving_runs() -> None:
    names: dict[str, Any] = {}
    assert run("moving-from-distributed-sampler.md", names) == 2
    assert names["sampler"].epoch == 1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_the_page_says_of_the_other_loader_is_true() -> None:
    """What it does on resume with other settings. (Where fmsdata continues has its laws in tests/epochs.)"""

    def loader(world_size: int, workers: int = 0, rows: range = range(40)) -> Any:
        sampler: Any = DistributedSampler(rows, num_replicas=world_size, rank=0, seed=0)  # type: ignore[arg-type]
        return StatefulDataLoader(rows, batch_size=2, sampler=sampler, num_workers=workers)

    def rest(state: Any, *settings: Any) -> list[int]:
        resumed = loader(*settings)
        resumed.load_state_dict(state)
        return [row for batch in resumed for row in batch.tolist()]

    run = loader(2)
    epoch = iter(run)
    before = [row for _ in range(3) for row in next(epoch).tolist()]  # and as many on the other rank
    state = run.state_dict()
    after = [row for batch in epoch for row in batch.tolist()]
    assert rest(state, 2) == after
    assert set(rest(state, 1)) & set(before)
    assert len(rest(state, 4)) * 4 < 40 - 2 * len(before)
    assert max(rest(state, 2, 0, range(50, 90))) > 50
    assert rest(run.state_dict(), 2) == before + after
    with pytest.raises(AssertionError):
        rest(state, 2, 1)
