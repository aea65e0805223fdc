"""Labels and the ids beside them: each is what a plain, slow reading of the lines gives, wherever it runs."""

import re
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import fmsdata
from fmsdata import CausalLM, Collate, ConfigError, FillInTheMiddle, MaskedLM, StageError, testing
from fmsdata.core.chunk import Chunk, Item
from fmsdata.core.spans import BEGINS, BUFFER, DOCUMENT, LENGTH, PADDING, Buffer
from fmsdata.tasks.base import Task
from tests.helpers import maker, opened, write_source

SOURCES = ["web", "wiki"]
IDS = ["document_ids", "source_ids", "label_document_ids", "label_source_ids"]
SEGMENTS = ["cu_seqlens", "max_seqlen", "position_ids"]
SHAPES: list[dict[str, Any]] = [
    {},
    {"documents__bos": 4, "documents__eos": None, "pack__seq_len": 5},
    {"documents__bos": 4, "pack__seq_len": 40},
    {"pack__mode": "pad", "pack__pad": 0, "pack__seq_len": 50},
    {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3, "pack__seq_len": 30},
    {"pack__bol": 2, "pack__eol": 3, "documents__bos": 4},
]
EVERY_SHAPE = pytest.mark.parametrize("overrides", SHAPES, ids=str)
FIM: dict[str, Any] = {"prefix": 300, "suffix": 301, "middle": 302}


def lines(root: Path, count: int, **overrides: Any) -> tuple[list[Item], fmsdata.Rescalable]:
    data = maker(root, **overrides)(0, 1).data
    return list(islice(data, count)), data


def documents_of(item: Item) -> list[int]:
    """For each token of a line, the number of its document; -1 for padding."""
    numbers: list[int] = []
    number = -1
    for span in item.chunk.spans.tolist():
        number += bool(span[BEGINS]) or not numbers
        numbers += [-1 if span[DOCUMENT] == PADDING else number] * span[LENGTH]
    return numbers


def causal(item: Item, task: CausalLM) -> tuple[list[int], list[int]]:
    tokens, documents = item.tokens.tolist(), documents_of(item)
    labels = []
    for place in range(len(tokens) - task.shift):
        target = place + task.shift
        border = documents[target] != documents[target - 1] if target else True
        ignored = documents[target] < 0 or place < task.prompt_len or (border and not task.cross_documents)
        labels.append(-100 if ignored else tokens[target])
    return tokens[: len(labels)], labels


# Labels


@EVERY_SHAPE
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("cross_documents", [True, False])
@pytest.mark.parametrize("prompt_len", [0, 3])
def test_labels_are_what_the_parameters_say(
    corpus: Path, overrides: dict[str, Any], shift: bool, cross_documents: bool, prompt_len: int
) -> None:
    task = CausalLM(prompt_len, shift, cross_documents)
    items, _ = lines(corpus, 200, **overrides)
    fields = Collate(task)(items)
    got = list(zip(fields["input_ids"].tolist(), fields["labels"].tolist(), strict=True))
    assert got == [causal(item, task) for item in items]
    assert fields["input_ids"].is_contiguous()
    assert fields["labels"].is_contiguous()
    fields["labels"].fill_(0)
    assert fields["input_ids"].tolist() == [ids for ids, _ in got], "they share no memory"


def test_a_model_that_shifts_sees_the_same_targets_as_one_that_does_not(corpus: Path) -> None:
    """For the same lines, apart from the token that only `shift=True` predicts: there is none."""
    items, _ = lines(corpus, 100, pack__mode="pad", pack__pad=1, pack__seq_len=40)
    for cross_documents in (True, False):
        shifted = Collate(CausalLM(cross_documents=cross_documents))(items)
        own = Collate(CausalLM(shift=False, cross_documents=cross_documents))(items)
        assert torch.equal(own["labels"][:, 1:], shifted["labels"])
        assert torch.equal(own["input_ids"][:, :-1], shifted["input_ids"])


def test_without_cross_documents_a_flattened_batch_predicts_nothing_across_a_border_either(corpus: Path) -> None:
    """Models with varlen attention flatten a batch and shift it as one row."""
    items, _ = lines(corpus, 50)
    fields = Collate(CausalLM(shift=False, cross_documents=False), ["cu_seqlens"])(items)
    labels = fields["labels"].flatten()
    assert (labels[fields["cu_seqlens"][:-1].long()] == -100).all()
    assert (labels == -100).sum() == len(fields["cu_seqlens"]) - 1


def test_a_line_is_as_long_as_the_model_sees_and_one_more_where_labels_are_shifted(corpus: Path) -> None:
    for shift, length in ((True, 17), (False, 16)):
        task = {"name": "causal_lm", "shift": shift, "cross_documents": False}
        loader = maker(corpus, task=task)(0, 1)
        assert loader.data.lines.describe()["children"]["below"]["seq_len"] == length
        batch = next(iter(loader))
        assert batch["input_ids"].shape == batch["labels"].shape == (1, 16)
        loader.close()


def test_a_run_may_change_who_shifts(corpus: Path) -> None:
    loader = maker(corpus)(0, 1)
    for _ in islice(loader, 30):
        pass
    again = maker(corpus, task={"name": "causal_lm", "shift": False})(0, 1)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again))["labels"].shape == (1, 16)
    assert opened(again.state_dict())["pipeline"]["edits"] == [30]
    again.close()


def test_every_token_of_the_corpus_is_an_input_without_a_shift(corpus: Path) -> None:
    stored = testing.stored_documents({name: corpus / name for name in SOURCES})
    make = maker(corpus, task={"name": "causal_lm", "shift": False, "cross_documents": False}, lanes=6)
    testing.check_exactly_once(make, stored=stored, world_sizes=[1, 5, 2], steps=5)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"shift": 0}, "shift is 0; it must be true or false"),
        ({"shift": "no"}, "shift is 'no'; it must be true or false"),
        ({"cross_documents": None}, "cross_documents is None; it must be true or false"),
        ({"name": "fill_in_the_middle", **FIM, "shift": 1}, "shift is 1; it must be true or false"),
    ],
)
def test_a_switch_is_true_or_false(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fmsdata.task_from(parameters)


def test_a_line_with_nothing_to_predict_is_refused(corpus: Path) -> None:
    loader = maker(corpus, task={"name": "causal_lm", "shift": False}, pack__seq_len=1)(0, 1)
    with pytest.raises(ConfigError, match="shift=False leaves nothing to predict in lines of 1 token"):
        next(iter(loader))


def test_fill_in_the_middle_makes_its_labels_in_the_same_way(corpus: Path) -> None:
    items, _ = lines(corpus, 100, pack__seq_len=40)
    plain = FillInTheMiddle(**FIM, rate=1)
    whole = Collate(plain)(items)
    tokens = torch.cat([whole["input_ids"], whole["labels"][:, -1:]], dim=1)
    own = FillInTheMiddle(**FIM, rate=1, shift=False, cross_documents=False, prompt_len=1)
    assert (own.extra_tokens, plain.extra_tokens) == (0, 1)
    fields = Collate(own)(items)
    assert torch.equal(fields["input_ids"], tokens)
    for row, item in enumerate(items):
        documents = documents_of(item)
        borders = [place for place in range(len(documents)) if not place or documents[place] != documents[place - 1]]
        expected = tokens[row].clone()
        expected[borders] = -100
        assert torch.equal(fields["labels"][row], expected)


# Who shifts: trained on 1, 2, 3, ..., what comes after 50, 51?


class Bigram(torch.nn.Module):
    """The smallest model that shifts labels itself, with the loss of Hugging Face's causal models."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Embedding(100, 100)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(input_ids)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def counting(root: Path, task: Task) -> fmsdata.StatefulDataLoader:
    """Batches of 1, 2, 3, ..., 96, 97, and again. Each number comes at each position of a line."""
    write_source(root / "numbers", [np.arange(1, 98)] * 30, shards=1)
    lines = fmsdata.Pack(fmsdata.ShardReader(root / "numbers"), seq_len=33)
    data = fmsdata.Rescalable(lines, lanes=4, seed=1)
    return fmsdata.StatefulDataLoader(data, batch_size=8, task=task, rank=0, world_size=1)


WHO_SHIFTS = pytest.mark.parametrize(
    ("shift", "following"), [(False, [52, 53, 54]), (True, [53, 55, 57])], ids=["once", "twice"]
)


@WHO_SHIFTS
def test_labels_that_are_shifted_twice_teach_a_model_to_skip_every_other_token(
    tmp_path: Path, shift: bool, following: list[int]
) -> None:
    model = Bigram()
    with torch.no_grad():
        model.logits.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    for batch in islice(counting(tmp_path, CausalLM(shift=shift)), 40):
        optimizer.zero_grad()
        model(batch["input_ids"], batch["labels"]).backward()
        optimizer.step()
    text = [50, 51]
    for _ in range(3):
        text.append(int(model.logits.weight[text[-1]].argmax()))
    assert text[2:] == following


@WHO_SHIFTS
def test_a_model_of_hugging_face_shifts_labels_itself(tmp_path: Path, shift: bool, following: list[int]) -> None:
    import transformers

    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=100, n_positions=64, n_embd=64, n_layer=1, n_head=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        model = transformers.GPT2LMHeadModel(config)
    finally:
        torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in islice(counting(tmp_path, CausalLM(shift=shift)), 80):
        optimizer.zero_grad()
        model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
        optimizer.step()
    text = [50, 51]
    with torch.no_grad():
        for _ in range(3):
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    assert text[2:] == following


# Ids


@EVERY_SHAPE
@pytest.mark.parametrize("shift", [True, False])
def test_ids_say_the_document_and_the_source_of_each_token_and_of_each_label(
    corpus: Path, overrides: dict[str, Any], shift: bool
) -> None:
    items, data = lines(corpus, 200, **overrides)
    fields = Collate(CausalLM(shift=shift), IDS, sources=data.source_sizes)(items)
    shape, borders = fields["input_ids"].shape, 0
    for row, item in enumerate(items):
        documents = documents_of(item)
        of_document: dict[int, str] = {}
        place = 0
        for span in item.chunk.spans.tolist():
            if span[DOCUMENT] >= 0:
                of_document[documents[place]] = item.chunk.buffers[span[BUFFER]].source
            place += span[LENGTH]
        for name, first in (("", 0), ("label_", int(shift))):
            here = documents[first : first + shape[1]]
            assert fields[f"{name}document_ids"][row].tolist() == here
            for number, source in zip(here, fields[f"{name}source_ids"][row].tolist(), strict=True):
                if number < 0:
                    assert source == -1
                elif number in of_document:
                    assert SOURCES[source] == of_document[number]
                else:
                    borders += 1
                    assert source in (0, 1), "a token that was inserted and is alone in its line has a source too"
    assert all(fields[name].shape == shape and fields[name].dtype == torch.int64 for name in IDS)
    if overrides.get("pack__seq_len") == 5:
        assert borders


def test_a_token_that_was_inserted_has_the_source_of_its_document(tmp_path: Path) -> None:
    """Every document of web starts with a 4 and ends with a 0 that are in no shard, and so do those of wiki."""
    for name, token in (("web", 11), ("wiki", 12)):
        write_source(tmp_path / name, [[token] * length for length in range(1, 8)], shards=1)
    ends: dict[str, Any] = {"documents__bos": 4, "documents__eos": 0}
    for more in ({}, {"pack__bol": 2, "pack__eol": 3}, {"pack__mode": "pad", "pack__pad": 0, "pack__eol": 3}):
        make = maker(
            tmp_path, **ends, **more, pack__seq_len=4, loader__outputs=["source_ids"], lanes=1, shuffle__window=1
        )
        before: int | None = None
        for batch in islice(make(0, 1), 200):
            tokens, sources = batch["input_ids"][0].tolist(), batch["source_ids"][0].tolist()
            for token, source in zip(tokens, sources, strict=True):
                if token in (11, 12):
                    assert source == token - 11
                    assert before in (None, source)
                if source >= 0 and token != 2:
                    before = None if token == 0 else source


def test_the_loss_of_each_source_adds_up_to_the_loss(corpus: Path) -> None:
    """The lines of the docs run when pasted."""
    page = (Path(__file__).parents[2] / "docs" / "dangers" / "labels.md").read_text()
    build, own_loss, per_source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {
        "data": maker(corpus)(0, 1).data,
        "torch": torch,
        "cross_entropy": functional.cross_entropy,
    }
    exec(build, names)
    loader = names["loader"]
    assert loader.sources == ("web", "wiki")
    batch = names["batch"] = next(iter(loader))
    assert torch.equal(batch["labels"][batch["labels"] != -100], batch["input_ids"][batch["labels"] != -100])
    logits = torch.rand((*batch["labels"].shape, 250), generator=torch.Generator().manual_seed(0))
    names["model"] = lambda _: SimpleNamespace(logits=logits)
    exec(own_loss, names)
    losses = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    names["losses"] = losses.view_as(batch["labels"])
    exec(per_source, names)
    total = sum(names["by_name"].values())
    assert total == pytest.approx(float(names["loss"] * (batch["labels"] != -100).sum()), rel=1e-4)
    assert (names["sums"] > 0).all()
    loader.close()


def test_torchs_own_loader_is_given_the_names_of_the_sources(corpus: Path) -> None:
    data = maker(corpus, lanes=6)(0, 1).data
    with pytest.raises(
        ConfigError, match=r"output 'source_ids' needs the names of the sources: Collate\(\.\.\., sources="
    ):
        Collate(outputs=["source_ids"])
    collate = Collate(outputs=IDS, sources=data.source_sizes)
    ours = fmsdata.StatefulDataLoader(data, batch_size=3, outputs=IDS, rank=0, world_size=1)
    theirs: Any = DataLoader(data, batch_size=3, collate_fn=collate)
    for mine, other in zip(islice(ours, 10), islice(theirs, 10), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in IDS)
    ours.close()


class _Nameless(fmsdata.Stage):
    """Forgets where its items come from."""

    def transform(self, item: Item, key: int) -> Any:  # noqa: ARG002
        span = [0, 0, len(item), item.document, 0, 1, 0]
        yield Item(Chunk([Buffer(item.tokens)], np.array([span], np.int64), np.array([0, 1], np.int64)))


def test_a_token_of_no_source_is_an_error_that_says_so(corpus: Path) -> None:
    lines = fmsdata.Pack(_Nameless(fmsdata.ShardReader(corpus / "web")), seq_len=9)
    data = fmsdata.Rescalable(lines, lanes=2)
    loader = fmsdata.StatefulDataLoader(data, batch_size=2, outputs=["source_ids"], rank=0, world_size=1)
    with pytest.raises(StageError, match="a token is of source '', which is not one of web"):
        next(iter(loader))


# Segments


def attended(values: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    weights = torch.zeros(allowed.shape, dtype=values.dtype).masked_fill(~allowed, float("-inf")).softmax(-1)
    return weights.nan_to_num() @ values


@pytest.mark.parametrize("task", [CausalLM(), MaskedLM(mask=303, vocab_size=250)], ids=["causal", "masked"])
def test_varlen_attention_over_the_segments_never_sees_padding_or_another_document(corpus: Path, task: Task) -> None:
    items, _ = lines(corpus, 24, pack__mode="pad", pack__pad=1, pack__seq_len=50)
    fields = Collate(task, [*SEGMENTS, "document_ids"])(items)
    ids, cu = fields["document_ids"], fields["cu_seqlens"].tolist()
    assert (ids < 0).any()
    rows, length = ids.shape
    flat = (ids + torch.arange(rows)[:, None] * length).masked_fill(ids < 0, -1).flatten()
    segment = torch.repeat_interleave(torch.arange(len(cu) - 1), fields["cu_seqlens"].diff())
    assert len(segment) == ids.numel(), "they cover every token, as varlen attention requires"
    ahead = torch.ones(len(flat), len(flat)).tril().bool() if isinstance(task, CausalLM) else torch.tensor(True)
    values = torch.rand(len(flat), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    varlen = attended(values, (segment[:, None] == segment) & ahead)
    masked = attended(values, (flat[:, None] == flat) & ahead)
    assert torch.equal(varlen[flat >= 0], masked[flat >= 0])
    assert type(fields["max_seqlen"]) is int
    assert fields["max_seqlen"] == max(int(n) for n in fields["cu_seqlens"].diff())


@EVERY_SHAPE
@pytest.mark.parametrize("apart", [None, False, True])
def test_padding_is_a_segment_of_its_own_only_if_wanted(
    corpus: Path, overrides: dict[str, Any], apart: bool | None
) -> None:
    make = maker(
        corpus, loader__outputs=[*SEGMENTS, *IDS], loader__padding_segment=apart, loader__batch_size=4, **overrides
    )
    loader = make(0, 1)
    for batch in islice(loader, 20):
        ids, cu = batch["document_ids"], batch["cu_seqlens"]
        flat = ids.flatten().tolist()
        starts = [
            place
            for place, number in enumerate(flat)
            if place % ids.shape[1] == 0 or (number != flat[place - 1] and (number >= 0 or apart))
        ]
        assert cu.tolist() == [*starts, len(flat)]
        assert batch["max_seqlen"] == int(cu.diff().max())
        expected = torch.cat([torch.arange(int(n)) for n in cu.diff()])
        assert torch.equal(batch["position_ids"].flatten(), expected)
    loader.close()


def test_a_task_of_ones_own_says_whether_it_is_causal(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "both_ways.py").write_text(
        "import torch\n"
        "def task(batch):\n"
        "    ids = torch.from_numpy(batch.tokens.astype('int64'))\n"
        "    return {'input_ids': ids, 'labels': ids.clone()}\n"
        "task.extra_tokens, task.causal = 0, False\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "both_ways", raising=False)
    items, data = lines(corpus, 20, pack__mode="pad", pack__pad=1, pack__seq_len=50)
    task = fmsdata.task_from("both_ways:task")
    fields = Collate(task, [*SEGMENTS, *IDS], sources=data.source_sizes)(items)
    assert (
        fields["cu_seqlens"].tolist() == Collate(MaskedLM(mask=1, vocab_size=9), SEGMENTS)(items)["cu_seqlens"].tolist()
    )
    assert torch.equal(fields["label_source_ids"], fields["source_ids"]), "its labels are the tokens themselves"
    with pytest.raises(ConfigError, match="padding_segment is 'yes'; it must be true or false"):
        Collate(task, padding_segment="yes")  # type: ignore[arg-type]


# The laws


TASKS: dict[str, Callable[[], Task]] = {
    "no shift": lambda: CausalLM(shift=False),
    "no border": lambda: CausalLM(cross_documents=False),
    "neither": lambda: CausalLM(1, shift=False, cross_documents=False),
    "fim": lambda: FillInTheMiddle(**FIM, shift=False, cross_documents=False),
    "masked": lambda: MaskedLM(mask=303, vocab_size=250),
}


@pytest.mark.parametrize("name", TASKS)
def test_labels_and_ids_are_the_same_at_any_scale_and_after_any_restore(corpus: Path, name: str) -> None:
    data = maker(corpus, lanes=6, pack__seq_len=40, pack__mode="pad", pack__pad=1)(0, 1).data

    def loaders(batch_size: int = 1, workers: int = 0) -> testing.MakeLoader:
        def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
            return fmsdata.StatefulDataLoader(
                data,
                batch_size=batch_size,
                num_workers=workers,
                task=TASKS[name](),
                outputs=[*SEGMENTS, *IDS],
                rank=rank,
                world_size=world_size,
                prefetch=1,
            )

        return make

    testing.check_same_stream(loaders(), world_sizes=[2, 3], samples=60, variants=[loaders(5), loaders(5, workers=2)])
    testing.check_restore_anywhere(loaders(3), steps=8)
