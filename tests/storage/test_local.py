"""Local folders and files: what is kept open."""

from fmsdata.storage.local import Recent


def kept(recent: Recent[int], keys: range) -> set[int]:
    """Which of these are kept. Looking changes nothing that is kept."""
    return {key for key in keys if key in recent._kept}


def test_the_least_recently_used_is_evicted() -> None:
    recent: Recent[int] = Recent(3)
    for key in (0, 1, 2, 0, 3):
        assert recent.get(key, lambda key=key: key) == key  # type: ignore[misc]
    assert kept(recent, range(4)) == {0, 2, 3}


def test_more_than_the_least_are_kept_within_a_number_of_bytes() -> None:
    recent: Recent[int] = Recent(10, 2, 100, lambda size: size)
    for key, size in enumerate([10, 20, 30, 40]):
        recent.get(key, lambda size=size: size)  # type: ignore[misc]
    assert kept(recent, range(4)) == {0, 1, 2, 3}
    recent.get(4, lambda: 25)
    assert kept(recent, range(5)) == {2, 3, 4}
    recent.get(5, lambda: 1000)
    assert kept(recent, range(6)) == {4, 5}
