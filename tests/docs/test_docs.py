"""The code in the README and the docs runs when pasted, and what the pages say is true."""

import dataclasses
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
import yaml

import fmsdata
from fmsdata import testing
from fmsdata.config.read import read_config
from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.counts import Counts
from fmsdata.stages.shard_reader import BLOCK_TOKENS
from fmsdata.storage.stats import StorageStats
from tests.helpers import documents, write_source

ROOT = Path(__file__).parents[2]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_quick_start_in_the_readme_runs_when_pasted(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    start = readme[readme.index("## Start with text") : readme.index("## The same in Python")]
    prepared, unprepared, _ = re.findall(r"```yaml\n(.*?)```", start, re.DOTALL)
    command = re.findall(r"^fmsdata prepare .*", start, re.MULTILINE)[0]
    rng = np.random.default_rng(0)
    for name in ("web", "wiki"):
        (tmp_path / "my-texts" / name).mkdir(parents=True)
        texts = [" ".join(f"{word:x}" for word in rng.integers(0, 4000, 60)) for _ in range(100)]
        (tmp_path / "my-texts" / name / "part-0.txt").write_text("\n".join(texts))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer: Any = tokenizers.trainers.BpeTrainer(special_tokens=special, vocab_size=400, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    done = run([str(Path(sys.executable).with_name("fmsdata")), *command.split()[1:]])
    assert done.returncode == 0, done.stderr
    in_python = "\n".join(code_blocks("README.md")[1:])
    loop = code_blocks("README.md")[0]
    for yaml_text, program in ((prepared, f"{loop}\n{in_python}\nnext(loader)"), (unprepared, loop)):
        (tmp_path / "run.yaml").write_text(yaml_text)
        (tmp_path / "pasted.py").write_text(program)
        done = run([sys.executable, "pasted.py"])
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"{step} torch.Size([8, 32]) torch.Size([8, 32])" for step in range(3)]
        done = run([str(Path(sys.executable).with_name("fmsdata")), "preview", "run.yaml"])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" epoch ") == done.stdout.count(" epoch 0: ") >= 8, "it starts in the first epoch"


@pytest.fixture
def fill_in_the_middle() -> Any:
    names: dict[str, Any] = {}
    exec(code_blocks("docs/stages.md")[1], names)
    return names["FillInTheMiddle"]


def test_the_custom_stage_of_the_docs_keeps_the_laws(tmp_path: Path, fill_in_the_middle: Any) -> None:
    rng = np.random.default_rng(0)
    corpus = {"web": documents(rng, 40, shortest=1), "wiki": documents(rng, 15, shortest=1)}
    readers: dict[str, fmsdata.Stage] = {
        name: fmsdata.ShardReader(write_source(tmp_path / name, docs)) for name, docs in corpus.items()
    }
    once = fill_in_the_middle(fmsdata.Mixture(readers, {"web": 3, "wiki": 1}), rate=0.5, prefix=3, suffix=4, middle=5)
    twice = fill_in_the_middle(once, rate=0.5, prefix=6, suffix=7, middle=8)
    for stage in (once, twice):
        testing.check_stage(stage, items=60)
    lines = fmsdata.Shuffle(fmsdata.Pack(fmsdata.Delimit(twice, eos=0), seq_len=17), window=5)
    data = fmsdata.Rescalable(lines, lanes=12, seed=7)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        outputs = ["provenance", "epochs"]
        return fmsdata.StatefulDataLoader(data, batch_size=2, rank=rank, world_size=world_size, outputs=outputs)

    testing.check_same_stream(make, world_sizes=[2, 3, 4, 6, 12], samples=120)
    testing.check_restore_anywhere(make, steps=20)
    transformed = {}
    for lane in range(12):
        iterator = twice.open(fmsdata.Lane(index=lane, count=12, seed=7))
        for _ in range(4):
            for item in iterator.read():
                if item.epochs[0] == 0:
                    name = item.source, item.shard, item.document
                    assert name not in transformed
                    transformed[name] = item.tokens.astype(np.int64)
    assert len(transformed) == 55
    changed = [tokens for tokens in transformed.values() if {3, 6} & set(tokens.tolist())]
    assert 30 < len(changed) < 50, "three quarters of them, but not all, are changed by one stage or the other"
    testing.check_exactly_once(make, stored=transformed, world_sizes=[1, 5, 12, 7, 2, 9], steps=3, most_samples=5_000)


def test_the_stage_in_yaml_of_the_docs_and_the_notebook_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/stages.md").read_text()
    (tmp_path / "my_stages.py").write_text(page.split("```python\n# my_stages.py\n")[1].split("```")[0])
    (section,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "DropRepetitive" in block)
    written, _ = section.splitlines()
    rng = np.random.default_rng(0)
    some = [*documents(rng, 40, shortest=8), *(np.full(50, 7) for _ in range(10))]
    write_source(tmp_path / "web", some)
    (tmp_path / "run.yaml").write_text(f"path: {tmp_path}\n{written}\npack: {{seq_len: 32}}\nlanes: 6\n")
    loader = fmsdata.build_loader(tmp_path / "run.yaml")
    tokens = np.concatenate([batch["input_ids"].flatten().numpy() for batch, _ in zip(loader, range(40), strict=False)])
    assert 7 not in tokens
    monkeypatch.chdir(tmp_path)
    exec(next(block for block in code_blocks("docs/loader.md") if "fmsdata.show" in block), {})


def test_the_packing_page_packs(tmp_path: Path) -> None:
    page = (ROOT / "docs/packing.md").read_text()
    some = documents(np.random.default_rng(0), 40, shortest=1)
    reader = fmsdata.ShardReader(write_source(tmp_path / "web", some))
    names: dict[str, Any] = {"fmsdata": fmsdata, "docs": fmsdata.Delimit(reader, eos=2)}
    exec(code_blocks("docs/packing.md")[0], names)
    pack = names["lines"]
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "run.yaml").write_text(f"path: {tmp_path}\n{block}")
    built = fmsdata.build_loader(tmp_path / "run.yaml", rank=0, world_size=1).data.lines.below
    assert pack.parameters() == built.parameters()
    assert f"windows of {pack.window} lines" in page
    for name in read_config(tmp_path / "run.yaml").pack.model_dump():
        assert name in page


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    for name in fmsdata.__all__:
        assert f"`{name}`" in page or re.search(rf"fmsdata\.{name}\b", page), name


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`((?:fmsdata|tests|docs|configs|examples)/[\w./-]*\w/?)`", (ROOT / page).read_text())
    assert len(named) > 10
    to_write = {"fmsdata/formats/orc.py"}
    assert [path for path in named if path not in to_write and not (ROOT / path).exists()] == []


def test_the_tree_of_the_architecture_page_is_the_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    folders = set(re.findall(r"^  (\w+)/ ", page, re.MULTILINE))
    assert folders == {path.parent.name for path in (ROOT / "fmsdata").glob("*/__init__.py")}


def test_the_settings_of_the_cloud_page_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/cloud.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        (tmp_path / "run.yaml").write_text(block)
        config = read_config(tmp_path / "run.yaml", {"path": "s3://bucket/corpus", "pack.seq_len": 4})
        assert config.storage == fmsdata.Storage(cache=config.storage.cache, spool=config.storage.spool)
    page = (ROOT / "docs/configuration.md").read_text() + (ROOT / "docs/cloud.md").read_text()
    for field in (*dataclasses.fields(fmsdata.Storage), *dataclasses.fields(StorageStats)):
        assert f"`{field.name}`" in page, field.name


@pytest.mark.parametrize(("dtype", "blocks"), [(np.uint32, 9_848_070), (np.uint16, 19_292_440)])
def test_the_worked_example_of_the_cloud_page_is_what_is_planned(dtype: Any, blocks: int) -> None:
    """10 TB in shards of 500 MB, 13 sources in proportion to their weights, 3,072 lanes."""
    page = (ROOT / "docs/cloud.md").read_text()
    sources = yaml.safe_load((ROOT / "configs/sources/multilingual.yaml").read_text())["sources"]
    lanes = read_config(ROOT / "configs/s3-128-nodes.yaml", {"storage_options": {}}).lanes
    documents_per_shard = 500_000 // np.dtype(dtype).itemsize
    planned = sizes = 0
    for source in sources.values():
        shards = 2 * source["weight"]
        documents = np.full(shards, documents_per_shard)
        counts = Counts(tuple(f"{i}.arrow" for i in range(shards)), documents, documents * 1000)
        plan = cut_blocks(counts, lanes, BLOCK_TOKENS)
        assert plan.blocks >= 32 * lanes
        planned, sizes = planned + plan.blocks, sizes + shards
    assert (sizes, planned) == (20_000, blocks)
    assert f" {blocks:,} |" in page


def test_the_comparison_links_what_it_says_of_this_project_and_the_figure_is_that_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Beside other loaders") : readme.index("## In your trainer")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    header, _, *rows = rows
    assert header[1] == "fmsdata"
    assert len(rows) == 6
    assert {len(row) for row in rows} == {len(header)}
    for row in rows:
        for cell in row:
            assert re.match(r"\[.+\]\((docs|tests)/", cell), f"no link: {cell}"
    measured = re.search(r"\d+ to \d+", rows[-1][1])
    assert measured
    assert f"{measured[0]} million tokens per second" in readme


def test_every_link_between_the_pages_leads_somewhere() -> None:
    def anchors(page: Path) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"]
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            to = (page.parent / target).resolve() if target else page
            assert to.exists(), (page.name, target)
            assert not anchor or anchor in anchors(to), (page.name, target, anchor)
