"""A run of prepare with a tokenizer that takes its time, for tests that stop it. Arguments are JSON."""

import json
import os
import sys
import time
from typing import Any

from fmsdata.errors import FmsdataError
from fmsdata.prepare import prepare_corpus


class Slow:
    """Bytes as ids. Says that a document is being encoded, in a file, and waits."""

    fingerprint = "slow bytes"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def get_vocab(self) -> dict[str, int]:
        return {"last": 255}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        time.sleep(self._seconds)
        return [list(text.encode()) for text in texts]


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    tokenizer = Slow(options.pop("seconds", 0.0))
    try:
        done = prepare_corpus(options.pop("source"), options.pop("output"), tokenizer, **options)
    except (FmsdataError, OSError) as error:
        print(f"error: {error}", flush=True)
        os._exit(1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
    print(json.dumps({"tokens": done.tokens, "continued": done.continued}), flush=True)


if __name__ == "__main__":
    main()
