"""Tokenizers of the libraries `tokenizers`, `transformers` and `tiktoken`.

Each is used through its fastest call for many texts. A tokenizer that was given as an object is
copied, so that nothing that happens to the object later changes the ids of a run.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from typing import Any

from fmsdata.core.keys import Ints
from fmsdata.core.tokens import Tokens
from fmsdata.corpus.tokenizer import TIKTOKEN, Tokenizer, digest, join_ids
from fmsdata.corpus.tokenizer_threads import THREADS
from fmsdata.errors import ConfigError, DataError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # the text of an id that no token has


class LibraryTokenizer:
    """A `tokenizers.Tokenizer`, from its JSON text.

    Truncation and padding that were saved with it are switched off.
    """

    def __init__(self, text: str, identity: str) -> None:
        tokenizers = _import("tokenizers", "tokenizers")
        self.identity, self._text = identity, text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{self} is not a tokenizer that the library `tokenizers` can read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token is text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(vocabulary.values(), default=0) + 1
        # Without offsets, which takes less time; versions before 0.20.1 have only the other.
        self._encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    def __str__(self) -> str:
        return "the tokenizer"

    def __reduce__(self) -> tuple[Any, ...]:
        return LibraryTokenizer, (self._text, self.identity)

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        THREADS.used()
        return join_ids(self._encode(texts, add_special_tokens=False), len(texts), self.vocabulary)

    def decode(self, ids: Iterable[int]) -> str:
        text = ""
        for known, group in groupby(map(int, ids), key=lambda token: self._tokenizer.id_to_token(token) is not None):
            some = list(group)
            text += self._tokenizer.decode(some, skip_special_tokens=False) if known else UNKNOWN * len(some)
        return text


class FileTokenizer(LibraryTokenizer):
    """A `tokenizer.json`. Its identity is a hash of the content of the file."""

    def __init__(self, path: str, identity: str | None = None) -> None:
        self._path = path
        try:
            with open(path, "rb") as file:
                content = file.read()
            text = content.decode()
        except OSError as error:
            raise ConfigError(f"tokenizer {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"tokenizer {path} is not a tokenizer that the library `tokenizers` can read") from None
        found = f"tokenizer.json:{digest(content)}"
        if identity is not None and found != identity:
            raise DataError(f"tokenizer {path} has changed since this run was started; restore the file")
        super().__init__(text, found)
        self._text = ""

    def __str__(self) -> str:
        return f"tokenizer {self._path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return FileTokenizer, (self._path, self.identity)


class TransformersTokenizer:
    """A tokenizer of transformers that is written in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.vocabulary = max(vocabulary.values(), default=0) + 1
        pairs = repr(sorted(vocabulary.items()))
        kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
        self.identity = f"{kind}:{digest(pairs)}"

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return join_ids(encoded["input_ids"], len(texts), self.vocabulary)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


class TiktokenTokenizer:
    """An `Encoding` of tiktoken."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.vocabulary: int = encoding.max_token_value + 1
        values: list[bytes] = encoding.token_byte_values()
        special = {token: encoding.encode_single_token(token) for token in sorted(encoding.special_tokens_set)}
        content = repr((self.vocabulary, sorted(special.items()), getattr(encoding, "_pat_str", "")))
        ranks = ",".join(str(encoding.encode_single_token(value)) for value in values)
        self.identity = f"{TIKTOKEN}{encoding.name}:{digest(content.encode() + bytes(1).join(values) + ranks.encode())}"

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        threads = min(THREADS.count, len(texts))
        if threads > 1:
            encoded = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        else:
            encoded = [self._encoding.encode_ordinary(text) for text in texts]
        return join_ids(encoded, len(texts), self.vocabulary)

    def decode(self, ids: Iterable[int]) -> str:
        parts = []
        for token in map(int, ids):
            try:
                parts.append(self._encoding.decode_single_token_bytes(token))
            except KeyError:  # an id that no token has
                parts.append(UNKNOWN.encode())
        return b"".join(parts).decode(errors="replace")


class NamedTiktoken(TiktokenTokenizer):
    """An encoding that tiktoken knows. A worker process opens it again, rather than get all of it sent."""

    def __init__(self, name: str, identity: str | None = None) -> None:
        self._name = name
        super().__init__(_open_encoding(name))
        if identity not in (None, self.identity):
            raise DataError(f"tokenizer {TIKTOKEN + name!r} has changed since this run was started; restore its file")

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedTiktoken, (self._name, self.identity)


OPENED = (LibraryTokenizer, TransformersTokenizer, TiktokenTokenizer)


def open_object(spec: Any) -> Tokenizer | None:
    """A tokenizer of one of these libraries; None for any other object."""
    kinds = [kind for kind in type(spec).__mro__ if kind is not object]
    homes = {kind.__module__.partition(".")[0] for kind in kinds}
    if "tiktoken" in homes and hasattr(spec, "encode_ordinary"):
        return TiktokenTokenizer(spec)
    if "transformers" in homes:
        backend = getattr(spec, "backend_tokenizer", None)
        if backend is None:
            return TransformersTokenizer(spec)
        spec, homes = backend, {"tokenizers"}
    if "tokenizers" in homes and hasattr(spec, "to_str"):
        try:
            text = spec.to_str()
        except Exception as error:  # a part of it is written in Python
            raise ConfigError(
                f"the tokenizer can't be saved as JSON ({error}), so worker processes could not open it and a run "
                "could not recognise it; wrap it in an object with encode_batch() and a `fingerprint`"
            ) from None
        content = {**json.loads(text), "truncation": None, "padding": None}
        return LibraryTokenizer(text, f"tokenizers:{digest(json.dumps(content, sort_keys=True))}")
    return None


def _open_encoding(name: str) -> Any:
    """An encoding of tiktoken by its name, or by the path of the file of a known one. Downloads nothing."""
    tiktoken = _import("tiktoken", "tiktoken")
    known = tiktoken.list_encoding_names()
    path = os.path.abspath(os.path.expanduser(name)) if os.path.isfile(os.path.expanduser(name)) else None
    encoding = os.path.basename(name).removesuffix(".tiktoken") if path else name
    if encoding not in known:
        what = f"the file is not named after a known encoding ({', '.join(known)})" if path else "it is not known"
        raise ConfigError(
            f"tokenizer is {TIKTOKEN + name!r}: {what}; name the file NAME.tiktoken, or give the tiktoken.Encoding "
            "itself to fmsdata.Tokenize"
        )
    with _only_local_files(name, path) as construct:
        return tiktoken.Encoding(**construct(encoding))


@contextmanager
def _only_local_files(name: str, path: str | None) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Have tiktoken read its files from its cache, or from a given file, but not from the network.

    It has no switch for that: its function that opens a file is replaced for the time, for this thread.
    """
    load: Any = import_module("tiktoken.load")
    registry: Any = import_module("tiktoken.registry")
    thread, original, cached = threading.get_ident(), load.read_file, load.read_file_cached

    def read_file(blob: str) -> Any:
        if threading.get_ident() != thread or "://" not in blob:
            return original(blob)
        raise ConfigError(
            f"tokenizer is {TIKTOKEN + name!r}, but {blob} is not in the cache of tiktoken, and nothing is "
            f"downloaded; run `python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"` once where there is a "
            "network, and set TIKTOKEN_CACHE_DIR to that folder, or give the path of the file: tiktoken:PATH"
        )

    def read_given(blob: str, expected_hash: str | None = None) -> Any:
        if threading.get_ident() != thread or path is None:
            return cached(blob, expected_hash)
        content = original(path)
        if os.path.basename(blob) != os.path.basename(path):
            raise ConfigError(f"tokenizer is {TIKTOKEN + name!r}: expected the file {os.path.basename(blob)}")
        if expected_hash and not load.check_hash(content, expected_hash):
            raise ConfigError(f"tokenizer is {TIKTOKEN + name!r}: the file is damaged, or is not that of {blob}")
        return content

    with _PATCHING:
        load.read_file, load.read_file_cached = read_file, read_given
        try:
            yield lambda encoding: (registry.ENCODING_CONSTRUCTORS or {})[encoding]()
        finally:
            load.read_file, load.read_file_cached = original, cached


_PATCHING = threading.Lock()


def _import(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"tokenizing needs the package {module}: pip install 'fmsdata[{extra}]'") from None
