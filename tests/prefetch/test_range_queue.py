"""The queue of ranges: what is asked for twice is read once."""

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import fsspec
import pytest

from fmsdata.core.pages import Data
from fmsdata.core.ranges import Range
from fmsdata.errors import MissingError
from fmsdata.prefetch.range_queue import NOW, RangeQueue, RemoteFile, Urgency
from fmsdata.storage.connection import Connection
from fmsdata.storage.settings import Storage

T = TypeVar("T")
DATA = bytes(range(256)) * 40


class Setting:
    """A file in memory, and a queue that reads it."""

    def __init__(self, folder: str, connections: int) -> None:
        fsspec.filesystem("memory").pipe(f"{folder}/a", DATA)
        self.connection = Connection.to(folder, {}, Storage(connections=connections))
        self.queue = RangeQueue(self.connection, None)
        self.file = RemoteFile(self.connection.path(f"{folder}/a"), len(DATA), None, "source 'a'")

    def read(self, start: int, stop: int, due: float = 0.0) -> Coroutine[Any, Any, Data]:
        return self.queue.read(self.file, Range(start, stop), Urgency((due, 0, 0.0)))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.connection.run(coroutine)


@pytest.fixture
def setting() -> Iterator[Setting]:
    yield Setting("memory://ranges", connections=1)
    fsspec.filesystem("memory").rm("/ranges", recursive=True)


def test_the_same_range_is_read_once(setting: Setting) -> None:
    async def many() -> list[Data]:
        return list(await asyncio.gather(*(setting.read(start, start + 100) for start in [0, 5000] * 20)))

    assert setting.run(many()) == [DATA[start : start + 100] for start in [0, 5000] * 20]
    assert setting.queue.traffic().requests == 2
    assert not setting.queue._requested
    assert setting.run(setting.read(0, 100)) == DATA[:100]
    assert setting.queue.traffic().requests == 3, "what was read before is not kept"


def test_who_does_not_want_it_any_more_does_not_keep_others_from_it(setting: Setting) -> None:
    async def some_go() -> list[Any]:
        tasks = [asyncio.ensure_future(setting.read(start, start + 100)) for start in [0, 5000, 0, 5000, 9000]]
        await asyncio.sleep(0)
        for index in (0, 3, 4):
            tasks[index].cancel()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    got = setting.run(some_go())
    assert got[1:3] == [DATA[5000:5100], DATA[:100]]
    assert [type(got[index]) for index in (0, 3, 4)] == [asyncio.CancelledError] * 3
    assert setting.queue.traffic().requests == 2, "what nobody wants is not read"
    assert not setting.queue._requested
    assert not setting.queue._waiting


def test_all_who_wait_are_told_of_an_error(setting: Setting) -> None:
    fsspec.filesystem("memory").mv(setting.file.path, "/ranges/b")

    async def many() -> list[Any]:
        return list(await asyncio.gather(*(setting.read(0, 100) for _ in range(3)), return_exceptions=True))

    assert [type(one) for one in setting.run(many())] == [MissingError] * 3
    assert not setting.queue._requested


def test_what_somebody_needs_sooner_comes_sooner(setting: Setting) -> None:
    order: list[int] = []

    async def read(start: int, due: float) -> None:
        await setting.read(start, start + 100, due)
        order.append(start)

    async def many() -> None:
        urgency = Urgency((9.0, 0, 0.0))
        hurried = asyncio.ensure_future(setting.queue.read(setting.file, Range(7000, 7100), urgency))
        tasks = [asyncio.ensure_future(read(start, due)) for start, due in [(0, 1.0), (2000, 2.0), (4000, 3.0)]]
        tasks += [asyncio.ensure_future(read(4000, 0.5)), asyncio.ensure_future(read(9000, 4.0))]
        await asyncio.sleep(0)
        setting.queue.hurry(urgency)
        assert urgency.due == NOW
        await hurried
        assert len(order) <= 1  # what had begun
        await asyncio.gather(*tasks)

    setting.run(many())
    assert order.index(4000) < order.index(2000) < order.index(9000)


def test_a_queue_that_is_closed_answers_all_who_wait(setting: Setting) -> None:
    async def close_early() -> list[Any]:
        tasks = [asyncio.ensure_future(setting.read(start, start + 100)) for start in [0, 0, 2000, 5000]]
        await asyncio.sleep(0)
        setting.queue.close()  # what is to read the first has not begun
        return list(await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5))

    assert [type(one) for one in setting.run(close_early())] == [asyncio.CancelledError] * 4


def test_an_error_that_nobody_waits_for_any_more_makes_no_noise(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec.filesystem("memory").mv(setting.file.path, "/ranges/b")

    async def leave() -> None:
        task = asyncio.ensure_future(setting.read(0, 100))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while setting.queue._running:
            await asyncio.sleep(0.01)

    setting.run(leave())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_is_read_next_is_decided_when_there_is_a_free_slot(setting: Setting) -> None:
    order: list[int] = []

    async def read(start: int, urgency: Urgency) -> None:
        await setting.queue.read(setting.file, Range(start, start + 100), urgency)
        order.append(start)

    async def many() -> None:
        late, later = Urgency((5.0, 0, 0.0)), Urgency((9.0, 0, 0.0))
        async with setting.connection.slot():  # as a version check has it
            tasks = [asyncio.ensure_future(read(0, late)), asyncio.ensure_future(read(4000, later))]
            await asyncio.sleep(0.01)
            tasks.append(asyncio.ensure_future(read(8000, Urgency((1.0, 0, 0.0)))))
            await asyncio.sleep(0.01)
            setting.queue.hurry(later)
            assert setting.queue.traffic().requests == 0
        await asyncio.gather(*tasks)

    setting.run(many())
    assert order == [4000, 8000, 0]


def test_all_queues_and_other_requests_share_the_limit(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    other = RangeQueue(setting.connection, None)
    running = most = 0
    attempt = Connection._attempt

    async def counted(*args: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        try:
            return await attempt(*args)
        finally:
            running -= 1

    monkeypatch.setattr(Connection, "_attempt", counted)

    async def many() -> None:
        reads = [
            queue.read(setting.file, Range(start, start + 100), Urgency((0.0, 0, 0.0)))
            for queue in (setting.queue, other)
            for start in range(0, 10_000, 2000)
        ]
        await asyncio.gather(*reads, *(setting.connection.info(setting.file.path) for _ in range(10)))

    setting.run(many())
    assert most == 1
    assert not setting.queue._running


def test_a_closed_queue_gives_its_slots_back(setting: Setting) -> None:
    async def close_early() -> None:
        for steps in range(6):  # at every moment of a request
            queue = RangeQueue(setting.connection, None)
            tasks = [
                asyncio.ensure_future(queue.read(setting.file, Range(start, start + 100), Urgency(NOW)))
                for start in (0, 5000)
            ]
            for _ in range(steps):
                await asyncio.sleep(0)
            queue.close()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(5), setting.connection.slot():
            pass

    setting.run(close_early())
