"""Tokenizers: text becomes token ids, whatever library does it.

`open_tokenizer` takes a path, a name or an object and returns a `Tokenizer`. All of them keep two
promises: no special token is ever added, and text that spells a special token stays text. Nothing
is downloaded. A tokenizer can be pickled: a worker process opens the same file, and checks that it
is the same.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.tokens import Tokens
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, StageError

FILE = "tokenizer.json"
TIKTOKEN = "tiktoken:"
WAYS = (
    f"a path to a {FILE}, a folder that holds one, 'tiktoken:NAME', 'bytes', "
    "or an object with encode_batch() or encode()"
)
MOST_OPEN = 8  # tokenizers that are kept, so that all sources share one
LARGEST = np.iinfo(np.int64).max


@runtime_checkable
class Tokenizer(Protocol):
    """What turns text into token ids."""

    @property
    def identity(self) -> str:
        """Names the tokenizer in saved states: the same text gives the same ids if it is the same."""

    @property
    def vocabulary(self) -> int | None:
        """The largest id plus one, if it is known."""

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        """The ids of all texts in one array, and where each text starts in it, with the end behind them."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens included."""


def open_tokenizer(spec: object) -> Tokenizer:
    """A tokenizer from a path, a name or an object.

    A path is that of a `tokenizer.json` or of a folder that holds one. `tiktoken:NAME` is an encoding of
    tiktoken whose file is in the cache of tiktoken, `tiktoken:FILE` reads that file instead. `bytes`
    are the 256 bytes of UTF-8. An object has `encode_batch` or `encode`: a `tokenizers.Tokenizer`, a
    tokenizer of transformers, an `Encoding` of tiktoken, or your own with a `fingerprint`.

    >>> open_tokenizer("bytes").encode(["ab", "", "c"])
    (array([97, 98, 99], dtype=uint8), array([0, 2, 2, 3]))
    """
    key = os.fspath(spec) if isinstance(spec, str | os.PathLike) else id(spec)
    kept = _OPEN.get(key)
    version = None if isinstance(key, int) else _version(os.fsdecode(key))
    if kept is not None and (not isinstance(key, int) or kept[0] is spec) and kept[1] == version:
        _OPEN.move_to_end(key)
        return kept[2]
    tokenizer = _open(spec)
    _OPEN[key] = spec, version, tokenizer
    _OPEN.move_to_end(key)
    while len(_OPEN) > MOST_OPEN:
        _OPEN.popitem(last=False)
    return tokenizer


_OPEN: OrderedDict[Any, tuple[object, object, Tokenizer]] = OrderedDict()


def _version(name: str) -> object:
    """What changes when a file is replaced."""
    path = os.path.expanduser(name.removeprefix(TIKTOKEN))
    try:
        found = os.stat(os.path.join(path, FILE) if os.path.isdir(path) else path)
    except (OSError, ValueError):
        return None
    return os.path.abspath(path), found.st_ino, found.st_size, found.st_mtime_ns


def _open(spec: object) -> Tokenizer:
    from fmsdata.corpus import tokenizer_libraries as libraries

    if isinstance(spec, str | os.PathLike):
        name = os.fspath(spec)
        if isinstance(name, bytes):
            name = os.fsdecode(name)
        if name == BytesTokenizer.identity:
            return BytesTokenizer()
        if name.startswith(TIKTOKEN):
            return libraries.NamedTiktoken(name.removeprefix(TIKTOKEN))
        return libraries.FileTokenizer(_file_of(name))
    if isinstance(spec, (BytesTokenizer, ObjectTokenizer, *libraries.OPENED)):
        return spec
    found = libraries.open_object(spec)
    return ObjectTokenizer(spec) if found is None else found


def _file_of(name: str) -> str:
    """The path of the file of a tokenizer."""
    if "://" in name:
        raise ConfigError(f"tokenizer is {name!r}; it must be on a local disk: nothing is downloaded; copy the file")
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        inside = os.path.join(path, FILE)
        if not os.path.isfile(inside):
            raise ConfigError(f"tokenizer is {name!r}; the folder holds no {FILE}; it must be {WAYS}")
        path = inside
    if not os.path.isfile(path):
        raise ConfigError(f"tokenizer is {name!r}; there is no such file; it must be {WAYS}")
    return os.path.abspath(path)


class BytesTokenizer:
    """The 256 bytes of UTF-8 as ids. Needs no library.

    >>> BytesTokenizer().decode([104, 105])
    'hi'
    """

    identity = "bytes"
    vocabulary = 256

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        encoded = [text.encode() for text in texts]
        ends = offsets(np.array([len(text) for text in encoded], np.int64))
        return np.frombuffer(b"".join(encoded), np.uint8), ends

    def decode(self, ids: Iterable[int]) -> str:
        known = b"".join(bytes([token]) if 0 <= token < 256 else b"\xff" for token in map(int, ids))
        return known.decode(errors="replace")


class ObjectTokenizer:
    """An object of the user's with `encode_batch` or `encode`.

    The ids of a text are a list or an array of integers, or an object with those in `ids`. The
    identity is the object's `fingerprint`, a text or a method that returns one; else a hash of its
    `to_str()` or `get_vocab()`. An object with none of them is refused: a run could not tell whether
    it resumes with the same.
    """

    def __init__(self, tokenizer: Any) -> None:
        kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
        batch = getattr(tokenizer, "encode_batch", None)
        if not callable(batch) and not callable(getattr(tokenizer, "encode", None)):
            raise ConfigError(f"tokenizer is {_short(tokenizer)}; it must be {WAYS}")
        self._tokenizer, self._batched = tokenizer, callable(batch)
        vocabulary = _result(tokenizer, "get_vocab")
        ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else []
        self.vocabulary = max(ids) + 1 if ids and all(isinstance(i, int) and i >= 0 for i in ids) else None
        fingerprint = _result(tokenizer, "fingerprint")
        if fingerprint is not None:
            if not isinstance(fingerprint, str) or not fingerprint:
                raise ConfigError(f"the fingerprint of {_short(tokenizer)} is {shown(fingerprint)}; it must be a text")
            self.identity = f"{kind}:{fingerprint}"
            return
        serialised = _result(tokenizer, "to_str")
        if isinstance(serialised, str):
            self.identity = f"{kind}:{digest(serialised)}"
        elif ids:
            pairs = sorted((str(token), token_id) for token, token_id in vocabulary.items())
            self.identity = f"{kind}:{digest(repr(pairs))}"
        else:
            raise ConfigError(
                f"tokenizer {_short(tokenizer)} has no fingerprint, so a run that resumes could not tell whether it is "
                "the same one; give it an attribute `fingerprint`, a text that changes whenever its ids change"
            )

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        encode = self._tokenizer
        encoded = encode.encode_batch(list(texts)) if self._batched else [encode.encode(text) for text in texts]
        return join_ids(encoded, len(texts), self.vocabulary)

    def decode(self, ids: Iterable[int]) -> str:
        if not callable(getattr(self._tokenizer, "decode", None)):
            raise ConfigError(f"tokenizer {_short(self._tokenizer)} has no decode()")
        return str(self._tokenizer.decode([int(token) for token in ids]))


def _result(thing: Any, name: str) -> Any:
    """An attribute of an object, or what it returns if it is a method; None if there is none."""
    value = getattr(thing, name, None)
    return value() if callable(value) else value


def _short(thing: object) -> str:
    text = shown(thing)
    return text if len(text) < 100 else f"a {type(thing).__qualname__}"


def digest(content: bytes | str) -> str:
    """A hash of what makes a tokenizer."""
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=16).hexdigest()


def token_type(vocabulary: int | None) -> np.dtype[Any]:
    """The narrowest unsigned type for the ids of a vocabulary; without one, 32 bits.

    >>> token_type(50_257), token_type(65_537), token_type(None)
    (dtype('uint16'), dtype('uint32'), dtype('uint32'))
    """
    if vocabulary is None:
        return np.dtype(np.uint32)
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32 if vocabulary <= 1 << 32 else np.int64)


def join_ids(encoded: Any, count: int, vocabulary: int | None) -> tuple[Tokens, Ints]:
    """The ids of texts, as a library returned them, in one array of the type of the vocabulary.

    >>> join_ids([[1, 2], [], [70_000]], count=3, vocabulary=None)
    (array([    1,     2, 70000], dtype=uint32), array([0, 2, 2, 3]))
    """
    if not isinstance(encoded, Sequence | np.ndarray):
        raise StageError(f"the tokenizer returned a {type(encoded).__name__} for {count} texts; expected a list of ids")
    if len(encoded) != count:
        raise StageError(f"the tokenizer returned the ids of {len(encoded)} texts, expected those of {count}")
    arrays = [_as_ids(getattr(ids, "ids", ids)) for ids in encoded]
    ends = offsets(np.array([len(ids) for ids in arrays], np.int64))
    joined: npt.NDArray[Any] = np.concatenate(arrays) if arrays else np.empty(0, np.uint8)
    dtype = token_type(vocabulary)
    if len(joined):
        low, high = int(joined.min()), int(joined.max())
        if low < 0 or high > LARGEST:
            raise StageError(
                f"the tokenizer returned the id {low if low < 0 else high}; ids must be from 0 to 2^63 - 1"
            )
        if vocabulary is not None and high >= vocabulary:
            raise StageError(f"the tokenizer returned the id {high}, but its vocabulary ends at {vocabulary - 1}")
        if high > np.iinfo(dtype).max:
            dtype = np.dtype(np.int64)
    return joined.astype(dtype, copy=False), ends


def _as_ids(ids: Any) -> npt.NDArray[Any]:
    """The ids of one text as an array of integers."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):
        array = np.empty((), object)
    if array.ndim == 1 and array.dtype.kind in "iu":
        if array.dtype == np.uint64 and len(array) and array.max() > LARGEST:  # joined with others, it would be rounded
            raise StageError(f"the tokenizer returned the id {array.max()}; ids must be from 0 to 2^63 - 1")
        return array.astype(np.int64) if array.dtype == np.uint64 else array
    if array.ndim == 1 and not len(array):
        return np.empty(0, np.uint8)
    raise StageError(f"the tokenizer returned {_short(ids)} for a text; ids must be a list of integers below 2^63")


def texts_of(tokens: Tokens, ends: Ints) -> list[str]:
    """The texts of documents that are UTF-8 bytes: `i` is `tokens[ends[i] : ends[i + 1]]`.

    Raises UnicodeDecodeError if one is not.

    >>> texts_of(np.frombuffer(b"abc", np.uint8), np.array([0, 2, 3]))
    ['ab', 'c']
    """
    data = tokens.tobytes()
    return [str(data[start:stop], "utf-8") for start, stop in pairwise(ends.tolist())]
