"""Law 5: the mix holds at every prefix of the stream, from the first samples on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Cursor
from fmsdata.core.lane import Lane
from fmsdata.core.spans import BUFFER, DOCUMENT, LENGTH, TAIL
from fmsdata.stages.mixture.weights import as_shares, weights_for
from tests.helpers import write_source

WEIGHTS = {f"s{i:02}": w for i, w in enumerate([7700, 520, 400, 300, 250, 200, 150, 130, 120, 100, 70, 50, 10])}
LONGEST, LINE, WINDOW, LANES = 180, 2049, 16, 24
Shares = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> fmsdata.Rescalable:
    root = tmp_path_factory.mktemp("mix")
    rng = np.random.default_rng(0)
    for name in WEIGHTS:
        lengths = rng.integers(20, LONGEST + 1, 4000)
        tokens = rng.integers(10, 60_000, int(lengths.sum())).astype(np.uint16)
        write_source(root / name, np.split(tokens, np.cumsum(lengths)[:-1]), shards=2, rows=1000)
    mixture = fmsdata.Mixture({name: fmsdata.ShardReader(root / name) for name in WEIGHTS}, WEIGHTS)
    lines = fmsdata.Shuffle(fmsdata.Pack(mixture, seq_len=LINE), window=WINDOW)
    return fmsdata.Rescalable(lines, lanes=LANES, seed=7)


def tokens_by_source(data: fmsdata.Rescalable, samples: int) -> Iterator[npt.NDArray[np.int64]]:
    """After each sample, the tokens that each source has given."""
    names = sorted(WEIGHTS)
    lanes = data.start(range(LANES))
    total = np.zeros(len(names), np.int64)
    numbers: dict[int, tuple[Chunk, npt.NDArray[np.int64]]] = {}
    for g in range(samples):
        ((chunk, row),), _ = lanes.take([g])
        if g % LANES not in numbers or numbers[g % LANES][0] is not chunk:
            numbers[g % LANES] = chunk, np.array([names.index(buffer.source) for buffer in chunk.buffers])
        spans = chunk.spans[chunk.first[row] : chunk.first[row + 1]]
        stored = (spans[:, LENGTH] - (spans[:, TAIL] > 0)) * (spans[:, DOCUMENT] >= 0)
        np.add.at(total, numbers[g % LANES][1][spans[:, BUFFER]], stored)
        yield total.copy()


@pytest.fixture(scope="module")
def prefixes(data: fmsdata.Rescalable) -> npt.NDArray[np.int64]:
    return np.array(list(tokens_by_source(data, 50_000_000 // LINE + 1)))


def shares() -> Shares:
    weights = np.array([WEIGHTS[name] for name in sorted(WEIGHTS)], np.float64)
    normal: Shares = weights / weights.sum()
    return normal


def test_after_fifty_million_tokens_every_share_is_within_one_percent(prefixes: npt.NDArray[np.int64]) -> None:
    assert prefixes[-1].sum() >= 50_000_000
    realised = prefixes[-1] / prefixes[-1].sum()
    assert np.abs(realised / shares() - 1).max() < 0.01


def test_no_prefix_is_further_off_than_documented(prefixes: npt.NDArray[np.int64]) -> None:
    """The bound of docs/lanes-and-state.md, of all lanes together; and, as chance has it, far less."""
    share = shares()
    off = np.abs(prefixes - share * prefixes.sum(axis=1, keepdims=True))
    bound = LANES * ((1 + len(share) * share) * LONGEST + share * (1 - share) * WINDOW * LINE + LINE)
    assert (off.max(axis=0) <= bound).all()
    assert (off.max(axis=0) <= 0.1 * bound).all(), "what it is in practice"


def test_the_first_thousand_samples_are_already_close(prefixes: npt.NDArray[np.int64]) -> None:
    share = shares()
    for samples, most in ((100, 0.03), (300, 0.01), (1000, 0.004)):
        realised = prefixes[samples - 1] / prefixes[samples - 1].sum()
        assert np.abs(realised - share).sum() / 2 < most, f"after {samples} samples"
    early = prefixes[999] / prefixes[999].sum()
    assert (np.abs(early / share - 1)[share > 0.005] < 0.1).all()
    assert (early > 0).all(), "the rarest is there too"


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_uneven_documents_give_no_source_more_than_its_share(tmp_path: Path, sigma: float) -> None:
    """Over many lanes the shares are right on average, long before a lane has had a second document of a source."""
    rng = np.random.default_rng(2)
    for name in ("often", "rare"):
        lengths = np.maximum(1, rng.lognormal(np.log(60) - sigma**2 / 2, sigma, 6000)).astype(int)
        write_source(tmp_path / name, [rng.integers(10, 250, n) for n in lengths], shards=1, rows=2000)
    mixture = fmsdata.Mixture(
        {name: fmsdata.ShardReader(tmp_path / name) for name in ("often", "rare")}, {"often": 99, "rare": 1}
    )
    got = {"often": 0, "rare": 0}
    lanes = 400
    for index in range(lanes):
        iterator = mixture.open(fmsdata.Lane(index=index, count=lanes, seed=1))
        taken = 0
        while taken < 4000:
            for item in iterator.read():
                if taken < 4000:
                    got[item.source] += len(item)
                    taken += len(item)
    assert got["rare"] / sum(got.values()) == pytest.approx(0.01, rel=0.12)


def test_documents_read_together_are_those_read_apart_from_every_state(tmp_path: Path) -> None:
    """Sources of what is only planned read ahead of their turn, when another one reads."""
    rng = np.random.default_rng(3)
    for name in ("a", "b", "c"):
        documents = [rng.integers(1, 99, length).astype(np.uint16) for length in rng.integers(1, 90, 400)]
        write_source(tmp_path / name, documents, shards=3)
    weights = {"a": 60.0, "b": 30.0, "c": 10.0}
    mixture = fmsdata.Mixture({name: fmsdata.ShardReader(tmp_path / name, min_length=9) for name in weights}, weights)

    def lane(*, only_plans: bool) -> Lane:
        return Lane(index=1, count=3, seed=5, only_plans=only_plans)

    def read(iterator: Cursor, count: int) -> list[list[int]]:
        return [item.tokens.tolist() for item in iterator.take(count)]

    apart = Cursor(mixture.open(lane(only_plans=False)))
    expected = read(apart, 1500)
    together = Cursor(mixture.open(lane(only_plans=True)))
    taken = 0
    for count in rng.integers(1, 60, 30).tolist():
        assert read(together, count) == expected[taken : taken + count]
        taken += count
        resumed = Cursor(mixture.open(lane(only_plans=True), together.state()))
        assert read(resumed, 300) == expected[taken : taken + 300]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=40))
def test_weights_that_are_named_give_the_shares_to_the_last_bit(weights: list[float]) -> None:
    sources = {str(number): weight for number, weight in enumerate(weights)}
    shares = as_shares(sources, sources)
    assert as_shares(sources, weights_for(shares, dict.fromkeys(sources, 7))) == shares
    tokens = {name: int(weight) + 1 for name, weight in sources.items()}
    assert weights_for(as_shares(tokens, tokens), tokens) == tokens
