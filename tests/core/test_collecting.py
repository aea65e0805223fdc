"""Garbage collection is paused, and as it was afterwards."""

import gc
import weakref

import pytest

from fmsdata.core.collecting import no_collection


def test_collection_is_paused_and_goes_on_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="wrong"), no_collection():
        assert not gc.isenabled()
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("wrong")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_made_is_old_and_what_others_froze_stays_frozen() -> None:
    gc.collect()
    try:
        with no_collection():
            made: list[list[int]] = [[] for _ in range(1000)]
        assert len(gc.get_objects(generation=0)) < 1000
        assert gc.is_tracked(made)
        assert gc.get_freeze_count() == 0
        gc.freeze()
        frozen = gc.get_freeze_count()
        with no_collection():
            pass
        assert gc.get_freeze_count() >= frozen - 100  # less what has ended since
    finally:
        gc.unfreeze()


def test_what_was_garbage_before_is_freed() -> None:
    """It may hold files, or much memory: as one of the oldest objects it would stay for long."""

    class Held:
        itself: "Held"

    held = Held()
    held.itself = held
    reference = weakref.ref(held)
    del held
    with no_collection():
        pass
    assert reference() is None
