"""Loaders that are built for a trainer: from a configuration, or by a function that takes the ranks."""

from pathlib import Path
from typing import Any

import pytest

import fmsdata
from fmsdata.errors import ConfigError
from fmsdata.integrations.building import build
from tests.helpers import write_corpus

RANKS: dict[str, Any] = {"rank": 1, "world_size": 2}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(write_corpus(tmp_path)), "pack": {"seq_len": 8}, "documents": {"eos": 0}, "lanes": 4}


def test_a_function_gets_the_ranks(config: dict[str, Any]) -> None:
    loader = build(lambda **ranks: fmsdata.build_loader(config, **ranks), "Lightning", **RANKS)
    assert (loader.rank, loader.world_size) == (1, 2)


def test_what_is_no_such_function_is_refused(config: dict[str, Any]) -> None:
    for function, message in (
        (lambda: fmsdata.build_loader(config), "let it take rank= and world_size= and pass them on to the loader"),
        (lambda **_: None, "returned None; it must return a StatefulDataLoader"),
        (lambda **_: fmsdata.build_loader(config, rank=0, world_size=1), "Lightning says rank 1 of 2"),
        (fmsdata.build_loader(config, rank=0, world_size=1), "was built before Lightning knew its ranks"),
    ):
        source: Any = function
        with pytest.raises(ConfigError) as caught:
            build(source, "Lightning", **RANKS)
        assert message in str(caught.value)
        assert " at 0x" not in str(caught.value)
