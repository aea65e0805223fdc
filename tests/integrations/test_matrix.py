"""The matrix of trainers in the README and the docs is that of the tests."""

import pytest

from tests.integrations.environment import ROOT
from tests.integrations.matrix import BEGIN, PAGES, TRAINERS, table, written


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_have_the_matrix_of_the_tests(page: str) -> None:
    """If this fails, run `python -m tests.integrations.matrix`."""
    text = (ROOT / page).read_text()
    assert BEGIN in text
    assert written(page) == text


def test_every_trainer_has_a_page_and_resumes_exactly() -> None:
    lines = table(PAGES[1]).splitlines()[2:]
    assert len(lines) == len(TRAINERS)
    for line, (page, *_) in zip(lines, TRAINERS.values(), strict=True):
        assert (ROOT / "docs" / "trainers" / f"{page}.md").exists()
        assert "[exact]" in line
        assert "[the same set each time]" in line
