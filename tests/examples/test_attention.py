"""The attention example: each way to stay within documents gives what a dense mask gives."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from fmsdata.cli.demo import write_corpus
from tests.helpers import maker

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
EXACT = ["flex_attention", "varlen", "hugging face"]
NOT = ["no mask", "hugging face, with a cache"]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("attention_example", ROOT / "examples" / "attention.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "pack", [{"mode": "split"}, {"mode": "pad", "pad": 0}, {"mode": "bestfit", "bol": 1, "pad": 0}]
)
def test_each_way_equals_a_dense_mask_and_no_mask_does_not(shared_corpus: Path, example: Any, pack: Any) -> None:
    overrides = {f"pack__{name}": value for name, value in pack.items()}
    loader = maker(shared_corpus, loader__batch_size=3, loader__outputs=example.OUTPUTS, pack__seq_len=48, **overrides)
    batch = next(loader(0, 1))
    ids = batch["document_ids"]
    assert ids.max() > 0, "some row has several documents"
    assert (ids.min() < 0) == (pack["mode"] != "split"), "padding, where there may be some"
    found = example.differences(batch, 256)
    if Version(transformers.__version__) < Version("4.53"):  # positions that start again mean nothing to it
        del found["hugging face"]
    assert {name for name, difference in found.items() if difference < TOLERANCE} == found.keys() - set(NOT)
    assert min(found[name] for name in NOT) > 1e-3
    assert set(EXACT + NOT) >= found.keys()


def test_the_dense_mask_is_what_the_page_says(example: Any) -> None:
    mask = example.dense_mask(torch.tensor([[0, 0, 1, 1, -1]]))
    assert mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]]
    ]


def test_the_example_prints_the_differences(
    tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attention.py", "--config", f"{ROOT}/configs/demo.yaml", "--data", str(tmp_path)])
    example.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        *EXACT[:2],
        NOT[0],
        EXACT[2],
        NOT[1],
    ]
