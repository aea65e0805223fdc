"""Each task gives exactly the fields that a plain, slow implementation gives, wherever it runs."""

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fmsdata
from fmsdata import CausalLM, Collate, ConfigError, FillInTheMiddle, MaskedLM, OwnTask, StageError, task_from, testing
from fmsdata.core.chunk import Chunk, Item
from fmsdata.core.keys import key_of, mix
from fmsdata.core.spans import INSERTED, PADDING, Buffer
from fmsdata.core.tokens import constant
from fmsdata.tasks.base import Task
from fmsdata.tasks.batch import Batch, collect
from fmsdata.testing import MakeLoader
from tests.helpers import documents, maker, write_source

PRE, SUF, MID = 300, 301, 302  # more than the tokens' own type holds
FIM = FillInTheMiddle(prefix=PRE, suffix=SUF, middle=MID)
MLM = MaskedLM(mask=303, vocab_size=250, special=[0])
ROOT = Path(__file__).parents[2]
SHAPES: list[dict[str, Any]] = [
    {},
    {"documents__bos": 4, "pack__seq_len": 40},
    {"pack__mode": "pad", "pack__pad": 1, "pack__seq_len": 50},
    {"pack__bol": 2, "pack__eol": 3, "documents__bos": 4},
    {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3, "pack__seq_len": 30},
    {"pack__seq_len": 1},
]


def lines(root: Path, count: int, **overrides: Any) -> list[Item]:
    return list(islice(maker(root, **overrides)(0, 1).data, count))


def batch_of(items: list[Item], task: Task) -> Batch:
    return collect([(item.chunk, 0) for item in items], task.extra_tokens)


def loaders(
    root: Path, task: Task, *, batch_size: int = 1, workers: int = 0, outputs: Sequence[str] = (), **overrides: Any
) -> MakeLoader:
    data = maker(root, **overrides)(0, 1).data

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        return fmsdata.StatefulDataLoader(
            data,
            batch_size=batch_size,
            num_workers=workers,
            task=task,
            outputs=outputs,
            rank=rank,
            world_size=world_size,
            prefetch=1,
        )

    return make


def draw(key: int, number: int) -> float:
    return float((mix(key ^ mix(number)) >> 11) / 2**53)


def rearranged(item: Item, task: FillInTheMiddle) -> list[int]:
    """The tokens of a line, token by token."""
    stretches: list[tuple[int, list[int]]] = []  # number and token positions of documents
    place = 0
    for row, (_, _, length, document, _, begins, tail) in enumerate(item.chunk.spans.tolist()):
        if begins or not row:
            stretches.append((len(stretches), []))
        if document >= 0:
            stretches[-1][1].extend(range(place, place + length - (tail > 0)))
        place += length
    tokens: list[int] = item.tokens.tolist()
    for number, places in stretches:
        if places and tokens[places[0]] == task.bos:
            del places[0]
        if places and tokens[places[-1]] == task.eos:
            del places[-1]
        key = mix(mix(item.key ^ key_of("fill_in_the_middle")) ^ number)
        if len(places) < 6 or draw(key, 0) >= task.rate:
            continue
        kept = [tokens[place] for place in places[:-3]]
        low, high = sorted(int(draw(key, cut) * (len(kept) + 1)) for cut in (2, 3))
        prefix, middle, suffix = kept[:low], kept[low:high], kept[high:]
        if draw(key, 1) < task.spm_rate:
            new = [PRE, SUF, *suffix, MID, *prefix, *middle]
        else:
            new = [PRE, *prefix, SUF, *suffix, MID, *middle]
        for place, token in zip(places, new, strict=True):
            tokens[place] = token
    return tokens


def masked(item: Item, task: MaskedLM, padding: int) -> tuple[list[int], list[int]]:
    ids: list[int] = item.tokens.tolist()
    labels = [-100] * len(ids)
    start = mix(item.key ^ key_of("masked_lm"))
    for place, token in enumerate(ids[: len(ids) - padding]):
        key = (start + place) % 2**64
        if token in task.special or draw(key, 0) >= task.rate:
            continue
        labels[place] = token
        if draw(key, 1) < task.mask_rate:
            ids[place] = task.mask
        elif draw(key, 1) < task.mask_rate + task.random_rate:
            ids[place] = int(draw(key, 2) * task.vocab_size)
    return ids, labels


def causal(tokens: list[int], padding: int, prompt_len: int = 0) -> tuple[list[int], list[int]]:
    labels = tokens[1:]
    for place in range(len(labels)):
        if place < prompt_len or place >= len(labels) - padding:
            labels[place] = -100
    return tokens[:-1], labels


def rows(fields: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    return list(zip(fields["input_ids"].tolist(), fields["labels"].tolist(), strict=True))


# Keys


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
def test_the_keys_of_a_batch_are_those_of_its_lines(corpus: Path, overrides: dict[str, Any]) -> None:
    items = lines(corpus, 300, **overrides)
    keys = batch_of(items, MLM).keys
    assert keys.tolist() == [item.key for item in items]
    if overrides.get("pack__seq_len") != 1:
        assert len(set(keys.tolist())) == 300


def test_a_line_of_nothing_but_inserted_tokens_has_a_key_and_is_left_alone() -> None:
    spans = np.array([[0, 0, 9, INSERTED, 0, 1, 0], [0, 0, 9, PADDING, 0, 1, 0]], np.int64)
    item = Item(Chunk([Buffer(constant(5, 9))], spans, np.array([0, 2])))
    batch = batch_of([item, item], FIM)
    assert batch.keys.tolist() == [item.key] * 2
    assert len(batch.parts.line) == 0
    assert FIM(batch)["input_ids"].tolist() == [[5] * 17] * 2


def test_the_same_line_in_another_epoch_draws_differently(tmp_path: Path) -> None:
    write_source(tmp_path / "web", documents(np.random.default_rng(0), 8, longest=200, shortest=200), shards=1)
    overrides: dict[str, Any] = {
        "sources": {"web": {"weight": 1}},
        "documents__eos": None,
        "pack__seq_len": 199,
        "lanes": 2,
    }
    every_document = FillInTheMiddle(prefix=PRE, suffix=SUF, middle=MID, rate=1, spm_rate=0)
    for task in (every_document, MLM):
        seen: dict[Any, list[Any]] = {}
        for batch in islice(loaders(tmp_path, task, batch_size=2, outputs=["provenance"], **overrides)(0, 1), 20):
            for row, spans in zip(rows(batch), batch["provenance"], strict=True):
                assert [span[3:] for span in spans] == [(0, 200)]
                seen.setdefault(spans[0], []).append(row)
        assert len(seen) == 8
        for versions in seen.values():
            assert len(versions) >= 3, "one for each epoch"
            assert len({str(version) for version in versions}) == len(versions)


# What a line becomes


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
@pytest.mark.parametrize("prompt_len", [0, 1])
def test_causal_lm_predicts_the_next_token(corpus: Path, overrides: dict[str, Any], prompt_len: int) -> None:
    overrides = {**overrides, "pack__seq_len": max(2, overrides.get("pack__seq_len", 16))}
    items = lines(corpus, 100, **overrides)
    task = CausalLM(prompt_len)
    batch = batch_of(items, task)
    expected = [
        causal(item.tokens.tolist(), padding, prompt_len) for item, padding in zip(items, batch.padding, strict=True)
    ]
    assert rows(task(batch)) == expected


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
@pytest.mark.parametrize(
    "kept", [{}, {"bos": 4, "eos": 0}, {"bos": 17, "eos": 33, "rate": 1, "prompt_len": 0}], ids=str
)
def test_fill_in_the_middle_is_what_its_recipe_says(
    corpus: Path, overrides: dict[str, Any], kept: dict[str, Any]
) -> None:
    items = lines(corpus, 300, **overrides)
    task = FillInTheMiddle(prefix=PRE, suffix=SUF, middle=MID, **kept)
    batch = batch_of(items, task)
    expected = [causal(rearranged(item, task), padding) for item, padding in zip(items, batch.padding, strict=True)]
    assert rows(task(batch)) == expected
    if overrides.get("pack__seq_len") != 1:
        assert any(MID in ids for ids, _ in expected)
        assert task.rate == 1 or any(MID not in ids for ids, _ in expected)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    seq_len=st.integers(8, 40),
    ends=st.tuples(st.sampled_from([None, 4]), st.sampled_from([None, 0])),
    rate=st.sampled_from([0.3, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_fill_in_the_middle_keeps_the_line_but_for_three_tokens_a_document(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    ends: tuple[int | None, int | None],
    rate: float,
    spm_rate: float,
) -> None:
    """Seen from outside, with distinct tokens, and without knowledge of how choices are drawn."""
    root = tmp_path_factory.mktemp("corpus")
    starts = np.cumsum([10, *lengths])
    write_source(root / "web", [np.arange(a, b) for a, b in pairwise(starts)], shards=1)
    bos, eos = ends
    delimited = fmsdata.Delimit(fmsdata.ShardReader(root / "web"), bos=bos, eos=eos)
    items = list(islice(fmsdata.Pack(delimited, seq_len=seq_len), 12))
    task = FillInTheMiddle(prefix=PRE, suffix=SUF, middle=MID, rate=rate, spm_rate=spm_rate)
    fields = task(batch_of(items, task))
    whole = np.concatenate([fields["input_ids"].numpy(), fields["labels"].numpy()[:, -1:]], axis=1)
    assert (fields["input_ids"][:, 1:] == fields["labels"][:, :-1]).all()
    for item, row in zip(items, whole.tolist(), strict=True):
        place = 0
        before: list[int] = item.tokens.tolist()
        for span in item.spans:
            length = span.stop - span.start
            place = before.index(int(starts[span.document]) + span.start, place)
            old, new = before[place : place + length], row[place : place + length]
            before[place : place + length] = row[place : place + length] = [-1] * length
            if old == new:
                assert rate < 1 or length < 6
                continue
            assert Counter(new) == Counter([*old[:-3], PRE, SUF, MID])
            assert new[0] == PRE
            suffix_at, middle_at = new.index(SUF), new.index(MID)
            prefix, suffix, middle = new[1:suffix_at], new[suffix_at + 1 : middle_at], new[middle_at + 1 :]
            psm, spm = prefix + middle + suffix == old[:-3], middle + suffix == old[:-3] and not prefix
            assert (psm and spm_rate < 1) or (spm and spm_rate > 0)
        assert row == before, "what is inserted stays where it is"


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
def test_masked_lm_is_what_its_recipe_says(corpus: Path, overrides: dict[str, Any]) -> None:
    items = lines(corpus, 300, **overrides)
    batch = batch_of(items, MLM)
    assert batch.length == len(items[0])
    expected = [masked(item, MLM, padding) for item, padding in zip(items, batch.padding, strict=True)]
    assert rows(MLM(batch)) == expected


def test_masked_lm_takes_everything_or_nothing_at_the_ends_of_its_rates(corpus: Path) -> None:
    items = lines(corpus, 50, pack__mode="pad", pack__pad=1, pack__seq_len=60)
    tokens = np.stack([item.tokens for item in items])
    free = (tokens != 0) & (tokens != 1)
    for options, expected in [
        ({"rate": 0}, tokens),
        ({"rate": 1, "mask_rate": 1, "random_rate": 0}, np.where(free, 303, tokens)),
        ({"rate": 1, "mask_rate": 0, "random_rate": 0}, tokens),
    ]:
        task = MaskedLM(mask=303, vocab_size=250, special=[0], **options)
        fields = task(batch_of(items, task))
        assert (fields["input_ids"].numpy() == expected).all()
        assert (fields["labels"].numpy() == np.where(free & (options["rate"] == 1), tokens, -100)).all()


def test_the_rates_hold(tmp_path: Path) -> None:
    """Each count is within five standard deviations."""
    write_source(tmp_path / "web", documents(np.random.default_rng(0), 3000, shortest=20, longest=20), shards=1)
    items = lines(tmp_path, 1500, sources={"web": {"weight": 1}}, pack__seq_len=41)  # two per line

    def holds(count: int, of: int, share: float) -> bool:
        return bool(abs(count - of * share) < 5 * (of * share * (1 - share)) ** 0.5)

    task = FillInTheMiddle(prefix=PRE, suffix=SUF, middle=MID, rate=0.3, spm_rate=0.2)
    fields = task(batch_of(items, task))
    ids = fields["input_ids"].numpy()
    chosen, spm = (ids == PRE).sum(), ((ids[:, :-1] == PRE) & (ids[:, 1:] == SUF)).sum()
    assert holds(chosen, 3000, 0.3)
    assert holds(spm, chosen, 0.2 + 0.8 * (1 - (17 / 18) ** 2)), "an empty prefix looks the same either way"
    first, second = (ids[:, :21] == PRE).any(axis=1), (ids[:, 21:] == PRE).any(axis=1)
    assert holds((first & second).sum(), 1500, 0.09), "the documents of a line are drawn one by one"

    masked_task = MaskedLM(mask=303, vocab_size=10_000, rate=0.2, mask_rate=0.6, random_rate=0.3, special=[0])
    fields = masked_task(batch_of(items, masked_task))
    ids, labels = fields["input_ids"].numpy(), fields["labels"].numpy()
    tokens = np.stack([item.tokens for item in items])
    taken = labels != -100
    count = taken.sum()
    assert holds(count, (tokens != 0).sum(), 0.2)
    assert holds((ids[taken] == 303).sum(), count, 0.6)
    kept = ids[taken] == tokens[taken]
    assert holds(kept.sum(), count, 0.1)
    changed = ids[taken & (ids != 303) & (ids != tokens)]
    assert holds((changed < 5000).sum(), len(changed), 0.5)
    assert changed.min() < 100
    assert changed.max() > 9900
    neighbours = (taken[:, 1:19] & taken[:, :18]).sum()
    assert holds(neighbours, 1500 * 18, 0.04), "the places of a line are drawn one by one"


# The laws


OWN = OwnTask("tests.programs.own_task:shuffled", {"offset": 3})
EVERY_TASK = pytest.mark.parametrize("task", [CausalLM(1), FIM, MLM, OWN], ids=["causal", "fim", "masked", "own"])


@EVERY_TASK
def test_a_task_gives_the_same_stream_at_any_world_size_batch_size_and_number_of_workers(
    corpus: Path, task: Task
) -> None:
    testing.check_same_stream(
        loaders(corpus, task, lanes=6, pack__seq_len=40),
        world_sizes=[2, 3, 6],
        samples=120,
        variants=[loaders(corpus, task, lanes=6, pack__seq_len=40, batch_size=b) for b in (4, 7)],
    )
    with_workers = loaders(corpus, task, lanes=6, pack__seq_len=40, batch_size=5, workers=2)
    testing.check_same_stream(
        loaders(corpus, task, lanes=6, pack__seq_len=40), world_sizes=[], samples=120, variants=[with_workers]
    )


@EVERY_TASK
@pytest.mark.parametrize(("workers", "steps"), [(0, 12), (2, 2)])
def test_a_task_goes_on_the_same_after_any_restore(corpus: Path, task: Task, workers: int, steps: int) -> None:
    make = loaders(corpus, task, lanes=4, batch_size=3, workers=workers, pack__seq_len=40)
    testing.check_restore_anywhere(make, steps=steps)


@EVERY_TASK
def test_a_task_is_the_same_in_torchs_own_loader(corpus: Path, task: Task) -> None:
    expected = [
        row
        for batch in islice(loaders(corpus, task, lanes=6, batch_size=3, pack__seq_len=40)(0, 1), 20)
        for row in rows(batch)
    ]
    data = maker(corpus, lanes=6, pack__seq_len=40)(0, 1).data
    for size in (3, 5):
        batches: Any = DataLoader(data, batch_size=size, collate_fn=Collate(task=task))
        got = [row for batch in islice(batches, 60 // size) for row in rows(batch)]
        assert got == expected
    batches = DataLoader(data, batch_size=2, num_workers=2, collate_fn=Collate(task=task))
    got = [row for batch in islice(batches, 9) for row in rows(batch)]
    assert {str(row) for row in got} <= {str(row) for row in expected}, "each worker reads its own lanes"


@EVERY_TASK
def test_tasks_can_be_sent_compared_and_hashed(task: Task) -> None:
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert hash(again) == hash(task)


# A task of one's own


def run(program: str, folder: Path) -> str:
    """What a program prints.

    As in a command that is installed, Python does not look in the current directory.
    """
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_function_of_the_docs_works_from_the_current_directory(corpus: Path) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    (corpus / "my_tasks.py").write_text(page.split("```python\n# my_tasks.py\n")[1].split("```")[0])
    printed = run(
        """
import os, sys
from itertools import islice
from torch.utils.data import DataLoader
import fmsdata

if __name__ == "__main__":
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.ShardReader("web"), seq_len=33), lanes=6, seed=1)
    task = fmsdata.task_from({"name": "my_tasks:noisy_lm", "rate": 0.5, "vocab_size": 250})
    print(os.getcwd() in sys.path)
    loader = fmsdata.StatefulDataLoader(data, batch_size=4, num_workers=2, task=task)
    collate = fmsdata.Collate(task=task)
    theirs = DataLoader(data, batch_size=4, num_workers=1, collate_fn=collate, multiprocessing_context="spawn")
    ours, theirs = (
        [(x, y) for batch in islice(batches, 8) for x, y in zip(batch["input_ids"].tolist(), batch["labels"].tolist())]
        for batches in (loader, theirs)
    )
    print(ours == theirs, len(ours))
    print(sum(a != b for x, y in ours for a, b in zip(x[1:], y)))
""",
        corpus,
    )
    on_path, same, changed = printed.splitlines()
    assert (on_path, same) == ("False", "True 32")
    assert 0.4 < int(changed) / (32 * 31) < 0.6


BAD_FUNCTIONS = {
    "no_such_module:f": "task 'no_such_module:f': there is no module 'no_such_module' in ",
    "package.missing:f": "there is no module 'package.missing' in ",
    "good:no_such": "good.py has no 'no_such'; must be one of fine",
    "good:fin": "did you mean 'fine'?",
    "good:": "task 'good:': name a function of your own as package.module:function",
    ":fine": "task ':fine': name a function of your own as package.module:function",
    "good:fine rate": "good.py has no 'fine rate'; did you mean 'fine'?",
    "good:number": "task 'good:number': number is 3, which is not callable",
    "extra:fine": "extra_tokens of task 'extra:fine' is -1; it must be at least 0",
    "needs:fine": "importing needs failed: ModuleNotFoundError: No module named 'not_installed'",
    "broken:fine": "importing broken failed: ZeroDivisionError: division by zero",
    "syntax:fine": "importing syntax failed: SyntaxError: ",
    "script:fine": "importing script failed: SystemExit: 3",
    ".good:fine": "importing .good failed: TypeError: ",
}


def test_a_function_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name, text in {
        "package/__init__": "",
        "good": "number = 3\ndef fine(batch): ...",
        "extra": "def fine(batch): ...\nfine.extra_tokens = -1",
        "needs": "import not_installed",
        "broken": "1 / 0",
        "syntax": "def fine(batch",
        "script": "raise SystemExit(3)",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    printed = run(
        f"""
import fmsdata
for name in {list(BAD_FUNCTIONS)}:
    try:
        fmsdata.task_from(name)
    except fmsdata.ConfigError as error:
        print(error)
""",
        tmp_path,
    )
    for line, message in zip(printed.splitlines(), BAD_FUNCTIONS.values(), strict=True):
        assert message in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gives_a_list", "task 'tests.programs.own_task:gives_a_list' returned a list; expected a dict"),
        ("gives_numbers", r"a dict with the keys \[1\]"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_gives_something_else_is_named(corpus: Path, name: str, message: str, workers: int) -> None:
    loader = loaders(corpus, task_from(f"tests.programs.own_task:{name}"), workers=workers)(0, 1)
    with pytest.raises(StageError, match=message):
        next(iter(loader))


def test_a_function_that_needs_lines_and_denies_it_is_told_so(corpus: Path) -> None:
    loader = loaders(corpus, task_from("tests.programs.own_task:denies_it"), workers=2)(0, 1)
    with pytest.raises(StageError, match="needs_lines=False"):
        next(iter(loader))


# Tasks by name


def test_tasks_by_name() -> None:
    assert task_from(None) == task_from("causal_lm") == task_from({}) == CausalLM()
    assert task_from({"prompt_len": 2}) == task_from({"name": "causal_lm", "prompt_len": 2}) == CausalLM(2)
    sentinels = {"prefix": PRE, "suffix": SUF, "middle": MID}
    assert task_from({"name": "fill_in_the_middle", **sentinels}) == FIM
    assert task_from({"name": "masked_lm", "mask": 303, "vocab_size": 250, "special": [0]}) == MLM
    assert task_from({"name": "tests.programs.own_task:shuffled", "offset": 3}) == OWN


SENTINELS = {"name": "fill_in_the_middle", "prefix": 1, "suffix": 2, "middle": 3}
MASK = {"name": "masked_lm", "mask": 1, "vocab_size": 10}


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (3, "task is 3; it must be a name, or a dict"),
        (["causal_lm"], "it must be a name, or a dict"),
        ({"name": None}, "must be strings"),
        ({1: 2}, "must be strings"),
        ("", "unknown task ''; must be one of causal_lm, fill_in_the_middle, masked_lm, package.module:function"),
        ("causal", "unknown task 'causal'; did you mean 'causal_lm'?"),
        ("maskedlm", "did you mean 'masked_lm'?"),
        (
            {"name": "causal_lm", "promt_len": 1},
            "task 'causal_lm' has no parameter 'promt_len'; did you mean 'prompt_len'?",
        ),
        ({"name": "causal_lm", "extra_tokens": 2}, "no parameter 'extra_tokens'; must be one of prompt_len"),
        ({"name": "causal_lm", "prompt_len": "1"}, "prompt_len is '1'; it must be a whole number"),
        ("fill_in_the_middle", "task 'fill_in_the_middle' needs prefix, suffix, middle"),
        ({"name": "masked_lm", "mask": 3}, "task 'masked_lm' needs vocab_size"),
        ({**SENTINELS, "middle": 2}, r"prefix, suffix and middle are [1, 2, 2]; they must be three different tokens"),
        ({**SENTINELS, "prefix": -1}, "prefix is -1; it must be at least 0"),
        ({**SENTINELS, "suffix": None}, "suffix is None; it must be a whole number"),
        ({**SENTINELS, "rate": 1.5}, "rate is 1.5; it must be a number from 0 to 1"),
        ({**SENTINELS, "rate": True}, "rate is True; it must be a number from 0 to 1"),
        ({**SENTINELS, "rate": float("nan")}, "rate is nan; it must be a number from 0 to 1"),
        ({**SENTINELS, "spm_rate": "half"}, "spm_rate is 'half'; it must be a number from 0 to 1"),
        ({**SENTINELS, "bos": 1.0}, "bos is 1.0; it must be a whole number"),
        ({**SENTINELS, "prompt_len": -1}, "prompt_len is -1; it must be at least 0"),
        ({**MASK, "vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({**MASK, "mask": "[MASK]"}, "mask is '[MASK]'; it must be a whole number"),
        ({**MASK, "rate": -0.1}, "rate is -0.1; it must be a number from 0 to 1"),
        ({**MASK, "mask_rate": 0.95}, "mask_rate 0.95 and random_rate 0.1 add up to more than 1"),
        ({**MASK, "special": 3}, "special is 3; it must be a list of tokens"),
        ({**MASK, "special": "ab"}, "a token of special is 'a'; it must be a whole number"),
        ({"name": "tests.programs.own_task:shuffled", "ofset": 3}, "no parameter 'ofset'; did you mean 'offset'?"),
        ({"name": "tests.programs.own_task:shuffled"}, "missing a required argument: 'offset'"),
        ("gc:isenabled", "task 'gc:isenabled' can't be called with a batch and {}: too many positional arguments"),
        ("builtins:dict", "task 'builtins:dict' can't be called with a batch and {}: no signature found"),
    ],
    ids=str,
)
def test_what_cannot_be_a_task_is_an_error_that_says_why(described: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        task_from(described)
    assert message in str(error.value)


def test_a_task_of_ones_own_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "failing_task.py").write_text("def crash(batch):\n    return batch.tokens[99999]\n")
    monkeypatch.chdir(tmp_path)
    loader = maker(corpus, task="failing_task:crash")(0, 1)
    with pytest.raises(fmsdata.StageError, match="task 'failing_task:crash' failed: IndexError: index 99999"):
        next(iter(loader))
