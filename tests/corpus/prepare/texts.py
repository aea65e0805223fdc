"""Small folders of text, and what a prepared corpus holds."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

from fmsdata.corpus.scan import scan_file
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location
from tests.text_files import encode

WORDS = ["alpha", "beta", "gamma", "délta", "\u2028", "ε"]
SMALL: dict[str, Any] = {"unit_bytes": 2_000, "piece_tokens": 1_500, "shard_tokens": 3_000}


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts, of which some are empty, and some occur twice."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 25))) for _ in range(count)]
    return [rng.choice(texts) if rng.random() < 0.05 else text for text in texts]


def write_texts(root: Path) -> dict[str, list[str]]:
    """Two sources in all formats; the texts of each file."""
    files: dict[str, list[str]] = {}
    suffixes = ["jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "zst", "parquet"]
    names = [f"web/part {i}.{suffix}" for i, suffix in enumerate(suffixes)] + ["wikí/2024/a.jsonl", "wikí/b.txt"]
    for seed, name in enumerate(names):
        files[name] = documents(40 + seed, seed)
        write_file(root / name, files[name])
    return files


def write_file(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(texts, path.name.partition(".")[2], frame=100))


def tree(root: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones too."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def read_shard(path: Path) -> list[bytes]:
    """The documents of a shard of byte tokens."""
    found: list[bytes] = []
    for some in scan_file(Location(path), file_entry(path.parent, path.name)):
        ends = some.ends.tolist()
        found += [bytes(some.tokens[ends[i] : ends[i + 1]].tolist()) for i in range(len(ends) - 1)]
    return found


def read_corpus(root: Path, source: str = "*") -> Counter[bytes]:
    """The multiset of documents of all shards below a folder."""
    found: Counter[bytes] = Counter()
    for path in sorted(root.glob(f"{source}/**/*.arrow")):
        found.update(read_shard(path))
    return found


def expected(files: dict[str, list[str]], source: str = "") -> Counter[bytes]:
    """The multiset of documents that are not empty."""
    return Counter(text.encode() for name, texts in files.items() if name.startswith(source) for text in texts if text)
