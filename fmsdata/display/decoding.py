"""Tokens as text, for people."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from fmsdata.core.wording import counted
from fmsdata.corpus.tokenizer import open_tokenizer
from fmsdata.errors import ConfigError

Decode: TypeAlias = Callable[[Sequence[int]], str]
HEAD, TAIL = 32, 16  # tokens of a long piece that are shown


def show_ids(tokens: Sequence[int]) -> str:
    """The tokens as numbers."""
    return " ".join(map(str, tokens))


def decoder(spec: Any) -> Decode:
    """Decode with a tokenizer: a path, a name, or an object, which needs nothing but decode() here.

    Control characters are escaped, to protect the terminal.
    """
    size, decoded = _opened(spec)

    def decode(tokens: Sequence[int]) -> str:
        text = ""
        for known, group in groupby(tokens, key=lambda token: 0 <= token < (size or token + 1)):
            ids = list(group)
            text += decoded(ids) if known else f"⟨{show_ids(ids)}⟩"
        return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)

    return decode


def _opened(spec: Any) -> tuple[int | None, Callable[[list[int]], str]]:
    """The number of tokens of a tokenizer, if it is known, and its decode()."""
    try:
        tokenizer = open_tokenizer(spec)
    except ConfigError:
        if isinstance(spec, type) or not callable(getattr(spec, "decode", None)):
            raise
        return None, lambda ids: str(spec.decode(ids))
    return tokenizer.vocabulary, tokenizer.decode


def shortened(tokens: Sequence[int], decode: Decode, full: bool = False) -> str:
    """The tokens as text; of long ones, the beginning and the end."""
    left_out = len(tokens) - HEAD - TAIL
    if full or left_out <= HEAD:
        return decode(tokens)
    return f"{decode(tokens[:HEAD])} ... {counted(left_out, 'token')} ... {decode(tokens[-TAIL:])}"
