"""The code of the pages on rows runs when pasted."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch

import fmsdata
from fmsdata.loader.line_reader import ON_REQUEST
from tests.epochs.test_chat import tokenizer

DOCS = Path(__file__).parents[2] / "docs"


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_code_of_the_page_on_epochs_runs() -> None:
    blocks = code_blocks("epochs.md")
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4
    assert names["checkpoint"]["position"] <= 10 * 64
    assert set(names["batch"]) >= {"dataset_idx", "index", "epoch_id", "is_padding", "prompt"}
    assert names["mix"].names == ("code", "math")


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
