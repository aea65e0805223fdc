"""What the tests of each trainer have: a folder with a corpus, and its stream."""

from pathlib import Path

import pytest

from tests.integrations.helpers import read_stream, shared_folder, write_numbered


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trainer, which all its tests share. A module sets SHIFT if its labels are not shifted."""
    folder = shared_folder(tmp_path_factory, request.module.__name__.rpartition("test_")[2])
    write_numbered(folder, shift=getattr(request.module, "SHIFT", True))
    return folder


@pytest.fixture(scope="module")
def stream(folder: Path) -> list[int]:
    """The first token of each sample."""
    return read_stream(folder / "run.yaml")
