"""FineTuningRows: rows of prompts and responses, or of chats, as lines of tokens for a model.

It is a recipe: which fields, which tokenizer, how long a line is and how it is packed. Rows are
tokenized when they are first needed, once. An `EpochSampler` plans lines of them, and a
`StatefulDataLoader` makes batches of the lines.
"""

import logging
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from fmsdata.core.checks import flag, suggestion, token, whole
from fmsdata.core.keys import Ints
from fmsdata.core.options import IGNORED, Mode
from fmsdata.core.state import State
from fmsdata.core.wording import counted, few
from fmsdata.corpus.tokenizer import open_tokenizer
from fmsdata.epochs.chat import Chat
from fmsdata.epochs.encoded import LARGEST, Encoder, PromptResponse
from fmsdata.epochs.mixture import RowMixture
from fmsdata.epochs.rows import length
from fmsdata.epochs.token_table import TokenTable
from fmsdata.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fmsdata.epochs.tokenize_once import Tokenized

Oversized = Literal["truncate", "drop", "error"]
LEAST = 2  # tokens of a line: one to read and one to predict
log = logging.getLogger("fmsdata")


class FineTuningRows:
    """Rows of a dataset as packed lines of tokens, with labels for what is to be trained.

    Rows have a `prompt` and a `response`, of which the response is trained, or `messages`: a chat,
    through the template of the tokenizer, of which the assistant's turns are trained. With
    `prompt=None` all of the response is trained. `eos` ends a response; by default it is that of
    the tokenizer.

    `mode` says how lines of `seq_len` tokens are filled: `"bestfit"` with several whole rows,
    `"pad"` with one row each, `"split"` with rows that continue on the next line. Without `"split"`,
    `oversized` rows are cut (`"truncate"`), left out (`"drop"`) or an `"error"`. No label is
    predicted across rows. With `shift=False`, labels are those of Hugging Face models, which shift
    them themselves.

    All rows are tokenized once, into a file in `cache` or in the user's cache folder, which all
    ranks and workers of a node map.

    >>> data = [{"prompt": "2 + 2 =", "response": " 4"}, {"prompt": "1 + 2 =", "response": " 3"}]
    >>> rows = FineTuningRows(data, "bytes", seq_len=32, eos=0)
    >>> rows[0]["labels"].tolist()
    [-100, -100, -100, -100, -100, -100, 32, 52, 0, -100]
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        *,
        seq_len: int,
        prompt: str | None = "prompt",
        response: str = "response",
        messages: str | None = None,
        chat_template: str | None = None,
        bos: int | None = None,
        eos: int | Literal["auto"] | None = "auto",
        mode: Mode = "bestfit",
        oversized: Oversized | None = None,
        pad: int = 0,
        shift: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.dataset = dataset
        self._size = length(dataset, "dataset")
        self.seq_len = whole("seq_len", seq_len)
        if self.seq_len < LEAST:
            raise ConfigError(
                f"seq_len is {seq_len}; a line needs at least {LEAST} tokens: one to read, one to predict"
            )
        self.mode: Mode = _one_of("mode", mode, get_args(Mode))
        if self.mode == "split" and oversized is not None:
            raise ConfigError(
                f"oversized is {oversized!r}, but with mode 'split' a row continues on the next line, so none is too "
                "long; leave `oversized` out, or use mode 'bestfit' or 'pad'"
            )
        self.oversized: Oversized = _one_of(
            "oversized", "truncate" if oversized is None else oversized, get_args(Oversized)
        )
        self.pad, self.shift = whole("pad", pad), flag("shift", shift)
        self._cache = cache
        self._encoder: Encoder
        if messages is not None:
            _refuse_for_chats(
                prompt=prompt != "prompt", response=response != "response", bos=bos is not None, eos=eos != "auto"
            )
            self._encoder = Chat(tokenizer, _name("messages", messages), chat_template)
            return
        if chat_template is not None:
            raise ConfigError("chat_template is for chats: name the field that holds them with messages=")
        self._encoder = PromptResponse(
            open_tokenizer(tokenizer),
            None if prompt is None else _name("prompt", prompt),
            _name("response", response),
            bos=_checked_token("bos", bos),
            eos=_eos(eos, tokenizer),
        )

    def __repr__(self) -> str:
        return f"FineTuningRows({counted(self._size, 'row')}, seq_len={self.seq_len}, mode={self.mode!r})"

    def __len__(self) -> int:
        """The number of rows of the dataset."""
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """The tokens of a row and their labels, without padding: what the model gets of it."""
        row = whole("index", index, least=None)
        if not 0 <= row < self._size:
            raise IndexError(f"row {index} of {self._size}")
        tokens = self.table.tokens(row)[: self.lengths[row]].astype(np.int64)
        labels = np.full(len(tokens), IGNORED)
        fill_labels(labels, tokens, self.table.runs(row), shift=self.shift)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    @cached_property
    def _tokenized(self) -> "Tokenized":
        from fmsdata.epochs.tokenize_once import RowCache, tokenize_once  # with Arrow, which other rows do not need

        if len(self.dataset) != self._size:
            raise ConfigError(
                f"the dataset had {self._size} rows, and has {len(self.dataset)} now; create new rows of it"
            )
        return tokenize_once(self.dataset, self._size, self._encoder, RowCache(self._cache))

    @property
    def table(self) -> TokenTable:
        """The tokens of all rows."""
        return self._tokenized.table

    @cached_property
    def _too_long(self) -> Ints:
        """The rows with more tokens than a line, which is an error or is logged once."""
        lengths = self.table.lengths
        rows = np.flatnonzero(lengths > self.seq_len) if self.mode != "split" else np.empty(0, np.int64)
        if len(rows) and self.oversized == "error":
            raise DataError(
                f"row {rows[0]} has {counted(int(lengths[rows[0]]), 'token')}, but seq_len is {self.seq_len:,} "
                f"({len(rows):,} of {counted(self._size, 'row')} too long); use a larger seq_len, "
                "oversized='truncate' or 'drop', or mode='split'"
            )
        if len(rows):
            done = "cut to it" if self.oversized == "truncate" else "left out"
            log.warning(
                "%d of %d rows have more tokens than seq_len (%d), and are %s: rows %s",
                *(len(rows), self._size, self.seq_len, done, few(rows.tolist(), 5)),
            )
        return rows

    @cached_property
    def lengths(self) -> Ints:
        """The tokens of each row that are read."""
        lengths = self.table.lengths
        return lengths if self.mode == "split" else np.minimum(lengths, self.seq_len)

    @cached_property
    def kept(self) -> npt.NDArray[np.bool_]:
        """The rows that are read: those that are not dropped, and that have a label."""
        _ = self._too_long  # which may be an error
        kept = np.ones(self._size, bool)
        if self.oversized == "drop":
            kept[self._too_long] = False
        labels = self.trained(np.arange(self._size), np.zeros(self._size, np.int64), self.lengths)
        untrained = np.flatnonzero(kept & (labels == 0))
        kept[untrained] = False
        if not kept.any():
            raise DataError(
                f"none of the {counted(self._size, 'row')} is left: {self.dropped:,} have more tokens than seq_len "
                f"({self.seq_len:,}) and are dropped, and {len(untrained):,} have no token to train on; use a larger "
                "seq_len" + (", or oversized='truncate'" if self.dropped else "")
            )
        if len(untrained):
            log.warning(
                "%d of %d rows have no token to train on, and are left out: rows %s",
                *(len(untrained), self._size, few(untrained.tolist(), 5)),
            )
        return kept

    def trained(self, rows: Ints, start: Ints, stop: Ints) -> Ints:
        """How many labels the parts of rows from `start` to `stop - 1` have.

        The first token of a part has no label; with shifted labels, the last one predicts the token
        after it, if the row has one.
        """
        stop = np.minimum(stop + 1, self.lengths[rows]) if self.shift else stop
        return self.table.trained(rows, start + 1, stop)

    @property
    def dropped(self) -> int:
        """How many rows are left out because they are too long."""
        return len(self._too_long) if self.oversized == "drop" else 0

    @property
    def truncated(self) -> int:
        """How many rows are cut because they are too long."""
        return len(self._too_long) if self.oversized == "truncate" else 0

    @property
    def untrained(self) -> int:
        """How many other rows are left out because no token of them is left to train on."""
        return self._size - int(np.count_nonzero(self.kept)) - self.dropped

    @property
    def mixture(self) -> RowMixture | None:
        """The mixture that the rows come from."""
        return self.dataset if isinstance(self.dataset, RowMixture) else None

    @property
    def content(self) -> str:
        """A digest of the texts of all rows."""
        return self._tokenized.content

    @property
    def settings(self) -> State:
        """What the lines depend on, besides the rows."""
        oversized = None if self.mode == "split" else self.oversized
        sources = None if self.mixture is None else list(self.mixture.names)
        lines = {"seq_len": self.seq_len, "mode": self.mode, "oversized": oversized, "sources": sources}
        return {**lines, **self._encoder.settings}


def fill_labels(
    labels: Ints,
    tokens: npt.NDArray[Any],
    runs: list[list[int]],
    *,
    shift: bool,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Write the labels of the part from `start` to `stop - 1` of a row with these tokens."""
    stop = len(tokens) if stop is None else stop
    last = min(stop + shift, len(tokens))
    for begin, end in runs:
        low, high = max(begin, start + 1), min(end, last)
        if low < high:
            labels[low - shift - start : high - shift - start] = tokens[low:high]


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; {suggestion(str(value), known)}")
    return value


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} is {value!r}; it must be the name of a field of the rows")
    return value


def _refuse_for_chats(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} is given with messages: the chat template decides; leave it out")


def _eos(eos: Any, tokenizer: Any) -> int | None:
    if eos != "auto":
        return _checked_token("eos", eos)
    found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        raise ConfigError(
            "eos is missing: give the id of the token that ends a response, so that the model learns to stop, or "
            "eos=None for none (only a tokenizer of transformers says which it is)"
        )
    return _checked_token("eos", found)


def _checked_token(name: str, value: Any) -> int | None:
    checked = token(name, value)
    if checked is not None and checked > LARGEST:
        raise ConfigError(f"{name} is {value}; token ids go up to {LARGEST}")
    return checked
