"""FillInTheMiddle: some documents are rearranged, so that a causal model learns to fill in a gap.

The text before the gap and the text behind it come first, the text in the gap last. A document is
rearranged in place: lines keep their length.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from fmsdata.core.checks import rate, token, whole
from fmsdata.core.keys import key_of, mix_array, uniform
from fmsdata.errors import ConfigError
from fmsdata.tasks.batch import Batch
from fmsdata.tasks.causal_lm import CausalLM

SALT = np.uint64(key_of("fill_in_the_middle"))
SENTINELS = 3
SHORTEST = SENTINELS + 3  # tokens; shorter documents are not rearranged


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """`CausalLM` of lines in which some documents are cut into prefix, middle and suffix.

    A share `rate` of the documents is rearranged.

    `prefix`, `suffix` and `middle` are the sentinel tokens. They replace the last three tokens that
    the document has in the line, so that lines keep their length and documents their position:

        PREFIX prefix SUFFIX suffix MIDDLE middle     (PSM)
        PREFIX SUFFIX suffix MIDDLE prefix middle     (SPM, a share `spm_rate` of those)

    Tokens that were inserted at either end (BOS, EOS) stay there, and so do stored `bos` and `eos`
    tokens. `prompt_len`, `shift` and `cross_documents` are those of `CausalLM`.

    >>> task = FillInTheMiddle(prefix=50_001, suffix=50_002, middle=50_003, rate=0.5)
    """

    prefix: int
    suffix: int
    middle: int
    rate: float = 0.5
    spm_rate: float = 0.5
    bos: int | None = None
    eos: int | None = None
    prompt_len: int = 0
    shift: bool = True
    cross_documents: bool = True

    needs_lines: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sentinels = [whole(name, getattr(self, name)) for name in ("prefix", "suffix", "middle")]
        if len(set(sentinels)) < SENTINELS:
            raise ConfigError(f"prefix, suffix and middle are {sentinels}; they must be three different tokens")
        for name in ("rate", "spm_rate"):
            rate(name, getattr(self, name))
        for name in ("bos", "eos"):
            token(name, getattr(self, name))
        self._causal_lm()  # checks the parameters that it takes

    def _causal_lm(self) -> CausalLM:
        return CausalLM(self.prompt_len, self.shift, self.cross_documents)

    @property
    def extra_tokens(self) -> int:
        return self._causal_lm().extra_tokens

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        tokens = batch.tokens.astype(np.int64)
        line, number, start, stop = batch.parts
        if self.bos is not None:
            start = start + (tokens[line, start] == self.bos)
        if self.eos is not None:
            stop = stop - (tokens[line, stop - 1] == self.eos)
        keys = mix_array(mix_array(batch.keys ^ SALT)[line] ^ number.astype(np.uint64))
        chosen = (uniform(keys, 0) < self.rate) & (stop - start >= SHORTEST)
        suffix_first = uniform(keys, 1) < self.spm_rate
        positions = stop - start - SENTINELS + 1  # possible cuts, both ends included
        cuts = np.sort([(uniform(keys, draw) * positions).astype(np.int64) for draw in (2, 3)], axis=0)
        for i in np.flatnonzero(chosen).tolist():
            part = tokens[line[i], start[i] : stop[i]]
            prefix, middle, suffix = np.split(part[:-SENTINELS], cuts[:, i])
            before, behind = (prefix[:0], prefix) if suffix_first[i] else (prefix, prefix[:0])
            part[:] = np.concatenate(
                [[self.prefix], before, [self.suffix], suffix, [self.middle], behind, middle], dtype=np.int64
            )
        return self._causal_lm()(replace(batch, tokens=tokens, _make_lines=lambda: batch.lines))
