"""The code of the pages on rows runs when pasted."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import fmsdata
from fmsdata.loader.line_reader import ON_REQUEST
from tests.epochs.test_chat import tokenizer

DOCS = Path(__file__).parents[2] / "docs"


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(page: str, names: dict[str, Any]) -> int:
    """Run the code of a page in order, and return how many blocks it has."""
    blocks = code_blocks(page)
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


def test_the_code_of_the_page_on_fine_tuning_runs() -> None:
    first, chats, loss, tokens, mixture = code_blocks("fine-tuning.md")
    names: dict[str, Any] = {"tokenizer": tokenizer()}
    exec(first, names)
    exec(chats, names)
    names["model"] = torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Linear(4, 256))
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    before = names["model"][1].weight.clone()
    exec(loss, names)
    assert names["done"] == names["sampler"].step > 10
    assert not torch.equal(names["model"][1].weight, before)
    exec(tokens, names)
    assert names["batch"]["input_ids"].numel() <= 1024
    exec(mixture, names)
    assert names["sampler"].excluded == [3, 17]


def test_the_page_on_fine_tuning_names_every_field_and_argument() -> None:
    page = (DOCS / "fine-tuning.md").read_text()
    rows = fmsdata.FineTuningRows([{"prompt": "a", "response": "b"}], "bytes", seq_len=8, eos=0)
    sampler = fmsdata.EpochSampler(rows, global_batch=1, rank=0, world_size=1)
    batch = next(fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=1))
    arguments = list(inspect.signature(fmsdata.FineTuningRows.__init__).parameters)[3:]
    for name in (*batch, *arguments, *ON_REQUEST):
        assert re.search(rf"[`\"]{name}\b", page), name
