"""Ranks that read fine-tuning rows, simulated in one process, and what a plain, slow reading expects of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import fmsdata
from tests.epochs.helpers import RankLoaders

EOS = 0
PAD = 255
IGNORED = -100


class Line(NamedTuple):
    """A line as it was handed out."""

    epoch_id: int
    padding: bool
    pieces: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]  # row, tokens, labels
    rest: tuple[tuple[int, ...], tuple[int, ...]]  # tokens and labels of its padding


class Step(NamedTuple):
    """What all ranks got in a step, in the order of the global samples."""

    lines: list[Line]
    global_tokens: list[int]  # of each rank
    labels: int  # that are not ignored, of all ranks

    @property
    def rows(self) -> list[int]:
        return [row for line in self.lines for row, _, _ in line.pieces]


def data(lengths: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
    """Rows with prompts and responses of these lengths, in which all tokens differ from their neighbours."""
    rows = []
    for row, (prompt, response) in enumerate(lengths):
        letters = [chr(97 + (row * 7 + place) % 26) for place in range(prompt + response)]
        rows.append({"prompt": "".join(letters[:prompt]), "response": "".join(letters[prompt:])})
    return rows


def expected_tokens(row: dict[str, str], bos: int | None = None) -> tuple[list[int], list[bool]]:
    """The tokens of a row, and which are trained."""
    prompt, response = row["prompt"].encode(), row["response"].encode()
    head = [] if bos is None else [bos]
    return [*head, *prompt, *response, EOS], [False] * (len(head) + len(prompt)) + [True] * (len(response) + 1)


class FineTuners(RankLoaders[Step]):
    """The lines of each step."""

    def dealt(self, batches: list[Any]) -> Step:
        """What the ranks got: line p of a step belongs to rank p mod world size."""
        parts = [lines_of(batch) for batch in batches]
        if len({len(part) for part in parts}) == 1:
            lines = [parts[at % len(parts)][at // len(parts)] for at in range(sum(map(len, parts)))]
        else:  # max_tokens with padding: ranks have different numbers of rows
            lines = [line for part in parts for line in part]
        tokens = [int(batch["global_tokens"]) for batch in batches]
        return Step(lines, tokens, sum(int((batch["labels"] != IGNORED).sum()) for batch in batches))


def lines_of(batch: Any) -> list[Line]:
    """The lines of a batch, cut into rows by `document_ids`."""
    names = ("input_ids", "labels", "document_ids", "position_ids")
    found, index = [], iter(batch["index"].tolist())
    columns = [batch[name].tolist() for name in (*names, "epoch_id", "is_padding", "rows_per_line")]
    for tokens, labels, documents, positions, epoch_id, padding, count in zip(*columns, strict=True):
        cut: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for document, *rest in zip(documents, tokens, labels, positions, strict=True):
            cut[document].append(tuple(rest))
        pieces = []
        for document in range(count):
            own = cut.pop(document)
            assert [position for _, _, position in own] == list(range(len(own)))
            pieces.append((next(index), tuple(token for token, _, _ in own), tuple(label for _, label, _ in own)))
        rest = cut.pop(-1, [])
        assert not cut
        padded = tuple(token for token, _, _ in rest), tuple(label for _, label, _ in rest)
        found.append(Line(epoch_id, padding, tuple(pieces), padded))
    assert next(index, None) is None
    return found


def check_epoch(rows: fmsdata.FineTuningRows, steps: list[Step], ids: set[int]) -> None:
    """Each of these rows came exactly once: its tokens in order, and labels on all that is trained and nothing else."""
    pieces: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for step in steps:
        for line in step.lines:
            assert set(line.rest[0]) <= {PAD}
            assert set(line.rest[1]) <= {IGNORED}
            assert not (line.padding and line.pieces)
            for row, tokens, labels in line.pieces:
                pieces[row].append((tokens, labels))
    assert set(pieces) == ids
    for row, parts in pieces.items():
        whole, trained = expected_tokens(rows.dataset[row])
        if rows.mode != "split":
            assert len(parts) == 1
            whole, trained = whole[: rows.seq_len], trained[: rows.seq_len]
        assert [token for part, _ in parts for token in part] == whole
        place = 0
        for part, labels in parts:
            for at, label in enumerate(labels):
                target = place + at + rows.shift
                inside = target < len(whole) and (rows.shift or at)
                assert label == (whole[target] if inside and trained[target] else IGNORED)
            place += len(part)
