"""Tokens per second and core of `fmsdata prepare`, beside the tokenizer library's own batch speed.

Both encode the same documents in the same run, on one core, in turns. The library gets texts that are
in memory already; `prepare` reads JSON lines, tokenizes, shuffles, and writes shards.

    python benchmarks/prepare.py --megabytes 16
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from fmsdata.corpus.prepare import prepare_corpus

WORDS, MERGES = 20_000, 16_000


def make_texts(megabytes: float, seed: int = 0) -> list[str]:
    """Documents of lognormal length, of made-up words with frequencies as in natural text."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    share = 1 / np.arange(2, len(letters) + 2)
    lengths = rng.integers(2, 11, WORDS)
    words = ["".join(rng.choice(letters, length, p=share / share.sum())) for length in lengths]
    texts, size = [], 0
    while size < megabytes * 1e6:
        count = int(np.clip(rng.lognormal(5.5, 1), 5, 20_000))
        chosen = np.minimum(rng.zipf(1.2, count), WORDS) - 1
        texts.append(" ".join(words[word] for word in chosen) + ".")
        size += len(texts[-1])
    return texts


def train_tokenizer(texts: list[str], path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:500], vocab_size=MERGES, show_progress=False)
    tokenizer.save(str(path))


def measure(megabytes: float, rounds: int) -> None:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        texts = make_texts(megabytes)
        train_tokenizer(texts, root / "tokenizer.json")
        (root / "texts").mkdir()
        lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
        (root / "texts" / "part-0.jsonl").write_text(lines)
        library = Tokenizer.from_file(str(root / "tokenizer.json"))
        speeds: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": [], "prepare": []}
        tokens = 0
        (root / "few").mkdir()
        (root / "few" / "part-0.jsonl").write_text(lines[: lines.index("\n")])
        prepare_corpus(root / "few", root / "warm-up", root / "tokenizer.json", processes=1)  # with all imports
        for number in range(rounds):
            for name in ("encode_batch", "encode_batch_fast"):
                began = time.process_time()
                encode = getattr(library, name)
                tokens = sum(len(each.ids) for i in range(0, len(texts), 1000) for each in encode(texts[i : i + 1000]))
                speeds[name].append(tokens / (time.process_time() - began))
            began = time.process_time()
            done = prepare_corpus(root / "texts", root / f"corpus-{number}", root / "tokenizer.json", processes=1)
            speeds["prepare"].append(done.tokens / (time.process_time() - began))
            if done.tokens != tokens:
                raise SystemExit(f"prepare wrote {done.tokens} tokens, the library {tokens}")
    print(f"{len(texts):,} documents, {megabytes:g} MB, {tokens:,} tokens; tokens per second of CPU time:")
    for name, found in speeds.items():
        if name == "prepare":
            print(f"  {name:18} {statistics.median(found):>12,.0f} ({min(found):,.0f}-{max(found):,.0f})")
            continue
        ratios = [ours / theirs for ours, theirs in zip(speeds["prepare"], found, strict=True)]
        print(
            f"  {name:18} {statistics.median(found):>12,.0f} ({min(found):,.0f}-{max(found):,.0f})"
            f"   prepare / {name}: {statistics.median(ratios):.0%} ({min(ratios):.0%}-{max(ratios):.0%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    measure(arguments.megabytes, arguments.rounds)


if __name__ == "__main__":
    main()
