"""Tokenizers in the shape of nanochat's: `encode(text)`, `decode(ids)`, `get_bos_token_id()`.

Its two classes wrap a tokenizer of a library, which is used directly: it is faster, has an
identity, and text that spells a special token stays text. Any other object of that shape is known
by what its ids decode to.
"""

from typing import Any

from fmsdata.core.checks import whole
from fmsdata.corpus.tokenizer import Tokenizer, digest, open_tokenizer
from fmsdata.errors import ConfigError

WRAPPED = ("enc", "tokenizer")  # where the classes of nanochat keep the tokenizer of the library
LIBRARIES = ("tiktoken", "tokenizers", "transformers")
KNOWN = ("fingerprint", "to_str", "get_vocab")  # what says whether a tokenizer is the same


def opened_tokenizer(tokenizer: Any) -> Tokenizer:
    """A tokenizer of nanochat, or anything that `Tokenize` takes."""
    for name in WRAPPED:
        inner = getattr(tokenizer, name, None)
        if type(inner).__module__.partition(".")[0] in LIBRARIES:
            return open_tokenizer(inner)
    is_listed = hasattr(tokenizer, "get_vocab_size") and not any(hasattr(tokenizer, name) for name in KNOWN)
    return open_tokenizer(Listed(tokenizer) if is_listed else tokenizer)


def bos_of(tokenizer: Any) -> int:
    """The id of the BOS of a tokenizer."""
    method = getattr(tokenizer, "get_bos_token_id", None)
    bos = method() if callable(method) else getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        raise ConfigError("the tokenizer does not name its BOS by get_bos_token_id(); give its id with bos=")
    return whole("the BOS of the tokenizer", bos)


class Listed:
    """An object with `encode` and `decode`, known by the text of each of its ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
        texts = [self._text(token) for token in range(tokenizer.get_vocab_size())]
        self.fingerprint = f"{kind}:{digest(repr(texts))}"

    def _text(self, token: int) -> Any:
        try:
            return self._tokenizer.decode([token])
        except Exception:  # an id that no token has
            return None

    def encode(self, text: str) -> Any:
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))
