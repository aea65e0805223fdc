"""The code of the page on rows runs when pasted."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "epochs.md"


def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4
    assert names["checkpoint"]["position"] <= 10 * 64
    assert set(names["batch"]) >= {"dataset_idx", "index", "epoch_id", "is_padding", "prompt"}
    assert names["mix"].names == ("code", "math")
