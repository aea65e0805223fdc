"""Text files: counts, and YAML configurations."""

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import fmsdata
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from tests.fuzz.mutations import Rng, damage_bytes, damage_data, edge
from tests.helpers import CONFIG, documents, write_source

ODD_WORDS = ["", " ", "-1", "0", "1e3", "1_0", "٣", "nan", "9" * 400, "9" * 5000, '"', '"a', "a,b", "\0", "é", "../web"]
# Text that YAML readers of other projects have failed on.
ODD_YAML = ["&a [*a]", "*nowhere", "!!python/object:os.system x", "!!binary '!'", "<<: 1", "? [a]", "- - -", "[" * 2000]
ODD_YAML += [
    "{" * 2000,
    "%YAML 9.9",
    "--- a\n--- b",
    "2024-13-01",
    "1:99:99",
    "0o9",
    "${env:",
    "\t",
    "\ufeff",
    "'",
    "|9",
]
ODD_YAML += ["!<", "&", "${env:HOME}", "include: self.yaml", ".inf", "-.nan", "~", "yes", "9" * 5000]
LAUGHS = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"x-{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


class CountsFiles:
    """Counts beside shards. Where they are believed, reading an epoch must give every document."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "web"
        self._stored = documents(np.random.default_rng(1), 40, shortest=1)
        write_source(self._folder, self._stored, shards=3)
        fmsdata.ShardReader(self._folder)
        rows = [f"/web/part-{i}.arrow,{len(self._stored[i::3])},{sum(map(len, self._stored[i::3]))}" for i in range(3)]
        self._lines = ["dataset/filename,documents,tokens", *rows]
        self._file = folder / "web" / "meta" / "counts.csv"
        self._file.parent.mkdir()

    def attempt(self, rng: Rng) -> None:
        lines = list(self._lines)
        for _ in range(int(rng.integers(1, 3))):
            i = int(rng.integers(len(lines)))
            cells = lines[i].split(",")
            match int(rng.integers(7)):
                case 0:
                    lines[i] = damage_bytes(rng, lines[i].encode(errors="surrogateescape")).decode(
                        errors="surrogateescape"
                    )
                case 1:
                    del lines[i]
                case 2:
                    lines.append(lines[i])
                case 3 | 4:
                    cells[rng.integers(len(cells))] = str(edge(rng) if rng.random() < 0.5 else int(rng.integers(900)))
                    lines[i] = ",".join(cells)
                case 5:
                    cells[rng.integers(len(cells))] = ODD_WORDS[rng.integers(len(ODD_WORDS))]
                    lines[i] = ",".join(cells)
                case 6:
                    rng.shuffle(lines)
            if not lines:
                break
        end = ["\n", "\r\n", "\r", "\u2028"][rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])]
        self._file.write_bytes(end.join(lines).encode(errors="surrogateescape"))
        reader = fmsdata.ShardReader(self._folder)
        found = sorted(item.tokens.tolist() for item in islice(reader, len(self._stored)))
        assert found == sorted(document.tolist() for document in self._stored), "counts that are wrong were believed"


class Configurations:
    """YAML files, alone and with a file that they include."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(1)
        write_source(folder / "web", documents(rng, 20))
        write_source(folder / "wiki", documents(rng, 10))
        self._config = {**CONFIG, "path": str(folder), "task": {"name": "masked_lm", "mask": 3, "vocab_size": 300}}
        self._config["phases"] = [{"until_tokens": 100, "weights": {"web": 1}}]
        self._config["storage"] = {"cache": {"path": str(folder / "cache"), "limit": "1GB"}, "timeout": 1.5}
        self._file = folder / "run.yaml"
        self._other = folder / "self.yaml"

    def attempt(self, rng: Rng) -> None:
        config: Any = self._config
        if rng.random() < 0.7:
            config = damage_data(rng, copy.deepcopy(config))
        text = yaml.safe_dump(config) if rng.random() < 0.98 else LAUGHS + yaml.safe_dump(config)
        if rng.random() < 0.3:
            lines = text.splitlines()
            i = int(rng.integers(len(lines)))
            odd = ODD_YAML[rng.integers(len(ODD_YAML))]
            key = lines[i].partition(":")[0]
            lines[i] = odd if rng.random() < 0.3 else f"{key}: {odd}"
            text = "\n".join(lines)
        data = text.encode(errors="surrogatepass")
        if rng.random() < 0.3:
            data = damage_bytes(rng, data)
        if rng.random() < 0.1:
            self._other.write_bytes(data)
            data = b"include: self.yaml\n" + data
        self._file.write_bytes(data)
        checked = read_config(self._file)
        own = str(checked.path) == self._config["path"] and set(checked.sources or {}) <= {"web", "wiki"}
        if own and all(source.path is None for source in (checked.sources or {}).values()):
            build_data(checked)
