"""The attention example: each way to stay within documents gives what a dense mask gives."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import scaled_dot_product_attention

from fmsdata.cli.demo import write_corpus
from tests.helpers import maker

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
PACKS = Version("4.53.1")  # the first that looks for positions that start again
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
    if Version(transformers.__version__) < PACKS:
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


@pytest.fixture(scope="module")
def batch(shared_corpus: Path, example: Any) -> dict[str, Any]:
    return next(maker(shared_corpus, loader__batch_size=2, loader__outputs=example.OUTPUTS, pack__seq_len=48)(0, 1))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hugging_face_stays_within_documents_as_the_page_says(
    example: Any, batch: dict[str, Any], implementation: str
) -> None:
    model = example.small_llama(256)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    calls: dict[str, dict[str, Any]] = {
        "no cache": {"use_cache": False},
        "default": {},
        "ones": {"use_cache": False, "attention_mask": torch.ones_like(batch["input_ids"])},
    }
    with torch.no_grad():
        dense = model(**inputs, attention_mask=example.dense_mask(batch["document_ids"])).logits
        model.config._attn_implementation = implementation
        found = {name: float((model(**inputs, **call).logits - dense).abs().max()) for name, call in calls.items()}
    packs = Version(transformers.__version__) >= PACKS
    assert {name for name, difference in found.items() if difference < TOLERANCE} == ({"no cache"} if packs else set())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_mask_of_the_page_is_that_of_the_example(example: Any, batch: dict[str, Any]) -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "attention.md").read_text(), re.DOTALL)[0]
    query, key, value = torch.randn(3, 2, 2, 48, 8, generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"batch": batch, "query": query, "key": key, "value": value}
    exec(block, names)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=example.dense_mask(batch["document_ids"]))
    assert float((names["attended"] - dense).abs().max()) < TOLERANCE
