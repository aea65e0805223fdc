"""Tokenizers of every kind: the same promises whatever library encodes."""

import base64
import hashlib
import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiktoken import load, registry
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fmsdata.corpus.tokenizer import Tokenizer, join_ids, open_tokenizer, texts_of, token_type
from fmsdata.errors import ConfigError, DataError, FmsdataError, StageError

SPECIAL = "<|endoftext|>"
TEXTS = ["the cat sat on the mat", "", f"a {SPECIAL} b", "naïve café ☕ \x00\x0b\u2028 end", "the the the"]


def bpe(size: int = 300) -> tokenizers.Tokenizer:
    """A small tokenizer that adds special tokens, truncates and pads, unless it is told not to."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the naïve cat"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    return tokenizer


def encoding(name: str = "tiny") -> tiktoken.Encoding:
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    return tiktoken.Encoding(name=name, pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={SPECIAL: 300})


class Words:
    """A tokenizer of a user."""

    fingerprint = "words-1"

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


class Batches:
    """Another one, which encodes many texts at once."""

    def fingerprint(self) -> str:
        return "batches-1"

    def encode_batch(self, texts: list[str]) -> list[Any]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def every_kind(folder: Path) -> list[Any]:
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.json"
    bpe().save(str(path))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token=SPECIAL)
    return [path, str(folder), bpe(), fast, encoding(), "bytes", Words(), Batches()]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode([text])[0].tolist()
    return found


def test_many_texts_give_what_each_of_them_gives_alone(tmp_path: Path) -> None:
    for spec in every_kind(tmp_path):
        tokenizer = open_tokenizer(spec)
        tokens, ends = tokenizer.encode(TEXTS)
        assert len(ends) == len(TEXTS) + 1
        assert ends[0] == 0
        assert ends[-1] == len(tokens)
        assert [tokens[a:b].tolist() for a, b in pairwise(ends.tolist())] == [ids(tokenizer, t) for t in TEXTS]
        empty, none = tokenizer.encode([])
        assert (len(empty), none.tolist()) == (0, [0])


def test_special_tokens_are_never_added_and_text_that_spells_one_stays_text(tmp_path: Path) -> None:
    for spec in every_kind(tmp_path)[:6]:
        tokenizer = open_tokenizer(spec)
        assert ids(tokenizer, "") == []
        tokens = ids(tokenizer, f"a {SPECIAL} b")
        assert not {0, 300} & set(tokens)
        assert len(tokens) > len("a  b")  # neither dropped nor truncated
        assert tokenizer.decode(tokens) == f"a {SPECIAL} b"


def test_a_slow_tokenizer_of_transformers_keeps_the_promises(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = open_tokenizer(ByT5Tokenizer())
    assert ids(tokenizer, "") == []
    assert 1 not in ids(tokenizer, "a</s>b")  # 1 is </s>
    assert len(ids(tokenizer, "a</s>b")) == 6
    assert tokenizer.vocabulary == 384
    assert "ByT5" in tokenizer.identity


@given(st.lists(st.text()))
def test_bytes_decode_to_what_they_were(texts: list[str]) -> None:
    texts = [text.encode(errors="ignore").decode() for text in texts]
    tokens, ends = open_tokenizer("bytes").encode(texts)
    assert texts_of(tokens, ends) == texts


def test_every_kind_reaches_a_worker_as_it_is(tmp_path: Path) -> None:
    for spec in every_kind(tmp_path):
        tokenizer = open_tokenizer(spec)
        copied: Tokenizer = pickle.loads(cloudpickle.dumps(tokenizer))
        assert copied.identity == tokenizer.identity
        assert copied.vocabulary == tokenizer.vocabulary
        assert copied.encode(TEXTS)[0].tolist() == tokenizer.encode(TEXTS)[0].tolist()


def test_a_file_is_sent_to_workers_by_its_path_and_must_not_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    bpe(size=300).save(str(path))
    sent = cloudpickle.dumps(open_tokenizer(path))
    assert len(sent) < 1000
    bpe(size=265).save(str(path))
    with pytest.raises(DataError, match="has changed since this run was started"):
        pickle.loads(sent)


def test_the_identity_is_that_of_the_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "tokenizer.json", tmp_path / "b.json"
    first.parent.mkdir()
    bpe().save(str(first))
    second.write_bytes(first.read_bytes())
    identity = open_tokenizer(first).identity
    assert identity == open_tokenizer(first.parent).identity == open_tokenizer(second).identity
    bpe(size=265).save(str(second))
    assert open_tokenizer(second).identity != identity  # a file that was replaced is opened again
    assert open_tokenizer(bpe()).identity == open_tokenizer(bpe()).identity != open_tokenizer(bpe(265)).identity
    assert open_tokenizer(encoding()).identity == open_tokenizer(encoding()).identity
    other = tiktoken.Encoding(
        name="tiny", pat_str=r"\w|\W", mergeable_ranks=encoding()._mergeable_ranks, special_tokens={SPECIAL: 300}
    )
    assert open_tokenizer(encoding()).identity != open_tokenizer(other).identity
    # Truncation and padding are switched off, so they make no difference.
    plain = bpe()
    plain.no_truncation()
    plain.no_padding()
    assert open_tokenizer(plain).identity == open_tokenizer(bpe()).identity


def test_an_object_is_copied_so_that_later_changes_do_not_matter() -> None:
    given_one = bpe()
    tokenizer = open_tokenizer(given_one)
    before = ids(tokenizer, "the cat")
    given_one.add_tokens(["the cat"])
    assert ids(tokenizer, "the cat") == before
    assert len(given_one.encode("the cat sat on the mat").ids) == 8  # still truncates and pads


def test_sources_share_one_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    bpe().save(str(path))
    shared = bpe()
    assert open_tokenizer(path) is open_tokenizer(str(path))
    assert open_tokenizer(shared) is open_tokenizer(shared)
    assert open_tokenizer(open_tokenizer(path)) is open_tokenizer(path)


def test_the_type_of_tokens_follows_the_vocabulary() -> None:
    assert open_tokenizer(bpe()).encode(["the"])[0].dtype == np.uint16
    assert open_tokenizer(encoding()).vocabulary == 301
    assert open_tokenizer("bytes").encode(["the"])[0].dtype == np.uint8
    assert [str(token_type(n)) for n in (1 << 16, (1 << 16) + 1, 1 << 32, (1 << 32) + 1, None)] == [
        "uint16",
        "uint32",
        "uint32",
        "int64",
        "uint32",
    ]
    assert join_ids([[1 << 40]], 1, None)[0].dtype == np.int64


def test_added_tokens_beyond_the_vocabulary_count() -> None:
    tokenizer = bpe()
    tokenizer.add_tokens([f"<{i}>" for i in range(10)])
    opened = open_tokenizer(tokenizer)
    assert opened.vocabulary == tokenizer.get_vocab_size()
    assert ids(opened, "<9>") == [tokenizer.get_vocab_size() - 1]


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ([[1], [2]], "the ids of 2 texts, expected those of 3"),
        ([[1], [2.5], [3]], "ids must be a list of integers"),
        ([[1], [-2], [3]], "returned the id -2"),
        ([[1], [1 << 70], [3]], "ids must be a list of integers below"),
        ([[1], [(1 << 64) - 1], [3]], "returned the id 18446744073709551615"),
        ([[1], [100], [3]], "returned the id 100, but its vocabulary ends at 99"),
        ([[1], "abc", [3]], "returned 'abc' for a text"),
        ([[1], None, [3]], "returned None for a text"),
        ([[1], [[1, 2], [3, 4]], [3]], "ids must be a list of integers"),
        (None, "returned a NoneType for 3 texts"),
        (7, "returned a int for 3 texts"),
    ],
)
def test_what_is_no_list_of_ids_is_an_error(encoded: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        join_ids(encoded, 3, 100)


@pytest.mark.parametrize(
    "spec", [lambda text: text, 7, None, object(), "no/such/file.json", "s3://bucket/tokenizer.json"]
)
def test_what_is_no_tokenizer_is_refused_with_what_would_be(spec: object) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer is .*(it must be|tokenizer.json)"):
        open_tokenizer(spec)


def test_a_folder_or_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder holds no tokenizer\.json"):
        open_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"\xff\xfe", json.dumps([1]).encode(), b""):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="tokenizer"):
            open_tokenizer(path)


def test_an_object_without_a_fingerprint_is_known_by_its_vocabulary_or_refused() -> None:
    class Anonymous:
        def encode(self, text: str) -> list[int]:
            return [len(text)]

    class Listed(Anonymous):
        def __init__(self, words: list[str]) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    with pytest.raises(ConfigError, match="give it an attribute `fingerprint`"):
        open_tokenizer(Anonymous())
    assert open_tokenizer(Listed(["a", "b"])).identity == open_tokenizer(Listed(["a", "b"])).identity
    assert open_tokenizer(Listed(["a", "b"])).identity != open_tokenizer(Listed(["b", "a"])).identity
    assert open_tokenizer(Listed(["a", "b"])).vocabulary == 2

    class Numbered(Anonymous):
        fingerprint = 7

    with pytest.raises(ConfigError, match=r"fingerprint of .* is 7; it must be a text"):
        open_tokenizer(Numbered())


# The encodings of tiktoken: their files are downloaded by tiktoken, never by us.


@pytest.fixture
def known_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An encoding `tiny` that tiktoken would download from a server, and the content of its file."""
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in encoding()._mergeable_ranks.items()]
    content, url = b"".join(lines), "https://example.invalid/files/tiny.tiktoken"
    path = tmp_path / "tiny.tiktoken"
    path.write_bytes(content)

    def construct() -> dict[str, Any]:
        ranks = load.load_tiktoken_bpe(url, expected_hash=hashlib.sha256(content).hexdigest())
        return {"name": "tiny", "pat_str": r"\w+|\W+", "mergeable_ranks": ranks, "special_tokens": {SPECIAL: 300}}

    registry.list_encoding_names()
    monkeypatch.setitem(registry.ENCODING_CONSTRUCTORS or {}, "tiny", construct)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("requests.get", lambda *_: pytest.fail("downloaded"))
    return path


def test_an_encoding_of_tiktoken_is_read_from_its_cache_or_a_file_and_never_downloaded(known_encoding: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing is downloaded; run `python -c .*get_encoding\('tiny'\)"):
        open_tokenizer("tiktoken:tiny")
    from_file = open_tokenizer(f"tiktoken:{known_encoding}")
    assert from_file.identity == open_tokenizer(encoding()).identity
    cache = known_encoding.parent / "cache"
    cache.mkdir()
    url = "https://example.invalid/files/tiny.tiktoken"
    (cache / hashlib.sha1(url.encode()).hexdigest()).write_bytes(known_encoding.read_bytes())
    from_cache = open_tokenizer("tiktoken:tiny")
    assert from_cache.identity == from_file.identity
    assert pickle.loads(cloudpickle.dumps(from_cache)).identity == from_file.identity
    known_encoding.write_bytes(b"dGhl 0\n")
    with pytest.raises(ConfigError, match="the file is damaged"):
        open_tokenizer(f"tiktoken:{known_encoding}")


def test_an_unknown_encoding_of_tiktoken_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not known"):
        open_tokenizer("tiktoken:no-such-encoding")
    (tmp_path / "mine.tiktoken").write_bytes(b"")
    with pytest.raises(ConfigError, match="not named after a known encoding"):
        open_tokenizer(f"tiktoken:{tmp_path}/mine.tiktoken")


FORKS = """
import os, sys, threading
from fmsdata.corpus.tokenizer import open_tokenizer
tokenizer = open_tokenizer(sys.argv[1])
texts = ["the cat sat on the mat"] * 2000
expected = tokenizer.encode(texts)[0].tolist()
stop = threading.Event()
def work():
    while not stop.is_set():
        tokenizer.encode(texts[:200])
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if tokenizer.encode(texts)[0].tolist() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads: thread.join()
print(os.environ.get("TOKENIZERS_PARALLELISM"))
"""


@pytest.mark.parametrize("setting", [None, "true"])
def test_a_forked_process_encodes_without_a_word_and_without_a_deadlock(tmp_path: Path, setting: str | None) -> None:
    bpe().save(str(tmp_path / "tokenizer.json"))
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {} if setting is None else {"TOKENIZERS_PARALLELISM": setting}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", str(setting))


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    bpe().save(str(path))
    for library, spec in (("tokenizers", path), ("tiktoken", "tiktoken:gpt2")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(FmsdataError, match=rf"pip install 'fmsdata\[{library}\]'"):
            open_tokenizer(spec)
