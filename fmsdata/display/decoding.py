"""Tokens as text, for people."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeAlias

from fmsdata.core.wording import counted
from fmsdata.corpus.tokenizer import open_tokenizer

Decode: TypeAlias = Callable[[Sequence[int]], str]
HEAD, TAIL = 32, 16  # tokens of a long piece that are shown


def show_ids(tokens: Sequence[int]) -> str:
    """The tokens as numbers."""
    return " ".join(map(str, tokens))


def decoder(spec: object) -> Decode:
    """Decode with a tokenizer: a path, a name or an object. Control characters are escaped, to protect the terminal."""
    tokenizer = open_tokenizer(spec)

    def decode(tokens: Sequence[int]) -> str:
        text = ""
        for known, group in groupby(tokens, key=lambda token: token < (tokenizer.vocabulary or token + 1)):
            ids = list(group)
            text += tokenizer.decode(ids) if known else f"⟨{show_ids(ids)}⟩"
        return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)

    return decode


def shortened(tokens: Sequence[int], decode: Decode, full: bool = False) -> str:
    """The tokens as text; of long ones, the beginning and the end."""
    left_out = len(tokens) - HEAD - TAIL
    if full or left_out <= HEAD:
        return decode(tokens)
    return f"{decode(tokens[:HEAD])} ... {counted(left_out, 'token')} ... {decode(tokens[-TAIL:])}"
