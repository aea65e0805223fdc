"""Reads a corpus while its shards change. Run by `tests/storage/test_mapped.py`.

    python changing_shard.py once FOLDER WORKERS STAGE

prints "started", waits for a line on its input, and reads until there is an error, which it prints.

    python changing_shard.py rounds FOLDER ROUNDS

truncates or overwrites a shard in another thread at any moment while it reads, again and again, and
prints how many rounds ended because a shard changed, and because one was damaged when it was opened.
"""

import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import fmsdata
from fmsdata.core.chunk import Item
from fmsdata.core.stage import Stage
from fmsdata.errors import DataError

TOKENS = {1, 2, *range(10, 60)}
LONGEST = 60.0  # seconds of a round


class Look(Stage):
    """A stage of a user that looks at tokens."""

    def transform(self, item: Item, key: int) -> Iterable[Item]:  # noqa: ARG002
        return [item] if int(item.tokens.max()) < 1000 else []


def make_loader(folder: Path, workers: int, stage: bool, prefetch: int = 0) -> fmsdata.StatefulDataLoader:
    documents: Stage = fmsdata.ShardReader(folder / "web", strip=[3])
    documents = fmsdata.Delimit(Look(documents) if stage else documents, bos=1, eos=2)
    lines = fmsdata.Shuffle(fmsdata.Pack(documents, seq_len=256, bol=1), window=16)
    data = fmsdata.Rescalable(lines, lanes=6, seed=1)
    return fmsdata.StatefulDataLoader(data, batch_size=3, rank=0, world_size=1, num_workers=workers, prefetch=prefetch)


def check(batch: dict[str, object]) -> None:
    tokens = set(batch["input_ids"].unique().tolist())  # type: ignore[attr-defined]
    if not tokens <= TOKENS:
        print(f"wrong tokens: {sorted(tokens - TOKENS)[:5]}", flush=True)
        sys.exit(3)


def once(folder: Path, workers: int, stage: bool) -> None:
    end = 0.0
    for step, batch in enumerate(make_loader(folder, workers, stage, prefetch=min(1, workers))):
        check(batch)
        if step == 3:
            print("started", flush=True)
            sys.stdin.readline()
            end = time.monotonic() + LONGEST
        if end and time.monotonic() > end:
            sys.exit(4)


def rounds(folder: Path, count: int) -> None:
    rng, errors = random.Random(1), Counter[str]()
    shards = sorted((folder / "web").glob("*.arrow"))
    for number in range(count):
        used = folder / f"round-{number}"
        (used / "web").mkdir(parents=True)
        for shard in shards:
            shutil.copy(shard, used / "web")
        shard = used / "web" / shards[number % len(shards)].name
        threading.Timer(rng.random() * 0.03, damage, [shard, number]).start()
        end = time.monotonic() + LONGEST
        try:
            for batch in make_loader(used, 0, stage=number % 3 == 0, prefetch=number % 2):
                check(batch)
                if time.monotonic() > end:
                    sys.exit(4)
        except DataError as error:
            errors["changed" if "during the run" in str(error) else "damaged before"] += 1
        shutil.rmtree(used)
    print(errors["changed"], errors["damaged before"], flush=True)


def damage(shard: Path, number: int) -> None:
    size = shard.stat().st_size
    with open(shard, "r+b", buffering=0) as file:
        if number % 4:
            file.truncate(size // 50 * (number % 50))
        else:
            file.write(b"\xff" * size)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "once":
            once(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "own")
        else:
            rounds(Path(sys.argv[2]), int(sys.argv[3]))
    except DataError as error:
        print(f"DataError: {error}", flush=True)
