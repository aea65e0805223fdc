"""Rows as tokens: the token ids of each row, and which of them are trained.

An encoder reads the fields of a row (`content`), and turns the contents of many rows into tokens
(`encode`). What is trained is a few runs of tokens: one for a response, several for a chat.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints
from fmsdata.core.state import State
from fmsdata.core.wording import few
from fmsdata.corpus.tokenizer import Tokenizer
from fmsdata.errors import DataError

Int32s = npt.NDArray[np.int32]
LARGEST = np.iinfo(np.int32).max  # token id
MANY = 12  # names in a message


class Encoded(NamedTuple):
    """The tokens of some rows. Both parts are flat, with the number of entries of each row."""

    tokens: Int32s
    lengths: Ints
    runs: Int32s  # start and stop of each run of trained tokens, counted in its row
    run_lengths: Ints


class Encoder(Protocol):
    """Turns rows into tokens."""

    settings: State  # what the tokens depend on, by name

    def content(self, row: Any, index: int) -> tuple[str, ...]:
        """The texts of a row, or an error that names what is wrong with it."""

    def encode(self, contents: Sequence[tuple[str, ...]], first: int) -> Encoded:
        """The tokens of rows in a sequence, of which the first has this number."""


class PromptResponse:
    """Rows of a prompt and a response, which are tokenized apart, so that no token spans the border.

    >>> from fmsdata.corpus.tokenizer import open_tokenizer
    >>> encoder = PromptResponse(open_tokenizer("bytes"), "ask", "answer", bos=None, eos=0)
    >>> encoded = encoder.encode([encoder.content({"ask": "a", "answer": "bc"}, 0)], 0)
    >>> encoded.tokens.tolist(), encoded.runs.tolist()
    ([97, 98, 99, 0], [1, 4])
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: str | None, response: str, *, bos: int | None, eos: int | None
    ) -> None:
        self._tokenizer, self._prompt, self._response = tokenizer, prompt, response
        self._bos = np.array([] if bos is None else [bos], np.int32)
        self._eos = np.array([] if eos is None else [eos], np.int32)
        self.settings: State = {
            "tokenizer": tokenizer.identity, "prompt": prompt, "response": response, "bos": bos, "eos": eos
        }  # fmt: skip

    def content(self, row: Any, index: int) -> tuple[str, ...]:
        prompt = "" if self._prompt is None else _text(row, self._prompt, index)
        response = _text(row, self._response, index)
        if not response:
            raise DataError(
                f"row {index}: field {self._response!r} is empty, so there is nothing to train on; leave such rows out "
                "of the dataset"
            )
        return prompt, response

    def encode(self, contents: Sequence[tuple[str, ...]], first: int) -> Encoded:
        del first
        texts = [prompt for prompt, _ in contents] + [response for _, response in contents]
        tokens, ends = self._tokenizer.encode(texts)
        check_ids(tokens)
        count = len(contents)
        parts: list[npt.NDArray[Any]] = []
        for row in range(count):
            prompt, response = tokens[ends[row] : ends[row + 1]], tokens[ends[count + row] : ends[count + row + 1]]
            parts += (self._bos, prompt, response, self._eos)
        sizes = np.diff(ends)
        starts = sizes[:count] + len(self._bos)
        lengths = starts + sizes[count:] + len(self._eos)
        runs = np.stack([starts, lengths], axis=1).astype(np.int32).reshape(-1)
        return Encoded(np.concatenate(parts).astype(np.int32, copy=False), lengths, runs, np.full(count, 2))


def check_ids(tokens: npt.NDArray[Any]) -> None:
    """Raise if a token id does not fit what is stored."""
    if len(tokens) and int(tokens.max()) > LARGEST:
        raise DataError(f"the tokenizer returned the id {tokens.max()}; fine-tuning rows hold ids up to {LARGEST}")


def field_of(row: Any, name: str, index: int) -> Any:
    """A field of a row, or an error that lists the fields that are there."""
    if not isinstance(row, Mapping):
        raise DataError(f"row {index} is a {type(row).__name__}; it must be a dict with the field {name!r}")
    if name not in row:
        there = few([repr(field) for field in row], MANY) or "none"
        raise DataError(
            f"row {index} has no field {name!r}; its fields are {there}: name the fields with prompt=, response= or "
            "messages="
        )
    return row[name]


def _text(row: Any, name: str, index: int) -> str:
    value = field_of(row, name, index)
    if not isinstance(value, str):
        raise DataError(f"row {index}: field {name!r} is a {type(value).__name__}; it must be a string")
    check_text(value, name, index)
    return value


def check_text(text: str, name: str, index: int) -> None:
    """Raise if a text has half of a surrogate pair, which no tokenizer takes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"row {index}: field {name!r} has {text[error.start]!r}, half of a character, as text that was cut or "
            "decoded wrongly has; repair the row, or leave it out of the dataset"
        ) from None


def joined(tokens: Sequence[Sequence[int]], runs: Sequence[Sequence[int]]) -> Encoded:
    """Rows given as lists."""
    flat = [np.asarray(row, np.int64) for row in tokens]
    everything = np.concatenate(flat) if flat else np.empty(0, np.int64)
    check_ids(everything)
    return Encoded(
        everything.astype(np.int32),
        np.array([len(row) for row in flat], np.int64),
        np.array([edge for row in runs for edge in row], np.int32),
        np.array([len(row) for row in runs], np.int64),
    )


def batches_of(count: int, size: int) -> list[tuple[int, int]]:
    """The numbers from 0 to `count - 1` in parts.

    >>> batches_of(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(first, min(first + size, count)) for first in range(0, count, size)]
