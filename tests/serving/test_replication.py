"""Which replication is taken: measured with nothing else going on, and nothing is left of what is not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proc_files import told_of
from served import children, eventually, save_net

from apportion.serving.config import Serving
from apportion.serving.log import log
from apportion.serving.pool.frames import Arena
from apportion.serving.replication.choose import Means, replicated
from apportion.serving.runtimes.source import Source

pytestmark = [pytest.mark.usefixtures("cold_programs"), pytest.mark.serial, pytest.mark.processes]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("nets")
    for n in (1, 2):
        save_net(folder / f"{n}.onnx", n)
    return [Source(name=f"m{n}", runtime="onnx", path=str(folder / f"{n}.onnx")) for n in (1, 2)]


@pytest.fixture
def inbox() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


def programs() -> list[int]:
    """Processes that run nets for this one."""
    command = b"apportion.serving.pool.worker_main"
    return [pid for pid in children(os.getpid()) if command in told_of(pid, "cmdline")]


def test_no_spare_disturbs_the_measuring_and_all_end_where_that_does(
    sources: list[Source], tmp_path: Path, inbox: Arena
) -> None:
    seen: list[list[int]] = []

    async def cancelled() -> None:
        loop = asyncio.get_running_loop()

        def told(event: str, **about: Any) -> None:
            log(event, **about)
            if event.startswith("member m1+m2 pid"):  # both are there: they are measured for seconds now
                loop.call_later(0.5, cancel)

        def cancel() -> None:
            seen.append(programs())
            task.cancel()

        task = asyncio.ensure_future(replicated(sources, Serving(), Means(tmp_path, inbox, told, lambda member: None)))
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert [len(pids) for pids in seen] == [3], "m1, m2, m1+m2, and no spare"
    assert not programs()


@pytest.mark.thorough
def test_what_is_taken_has_a_spare_and_what_is_not_has_ended(
    sources: list[Source], tmp_path: Path, inbox: Arena
) -> None:
    events: list[str] = []

    async def start() -> None:
        ready = asyncio.Event()

        def told(event: str, **about: Any) -> None:
            events.append(event)
            if event == "spare ready":
                ready.set()

        staffed = await replicated(sources, Serving(), Means(tmp_path, inbox, told, lambda member: None))
        try:
            await asyncio.wait_for(ready.wait(), 60)
            wanted = {"between_graph": 3, "in_graph": 2}[staffed.replication]
            eventually("only these are there", lambda: len(programs()) == wanted)
        finally:
            await staffed.pool.close()

    asyncio.run(start())
    assert events.index("spare ready") > next(n for n, event in enumerate(events) if event.startswith("replication"))


def test_members_that_cannot_be_merged_for_want_of_room_stay_apart(
    sources: list[Source], small_disk: Path, inbox: Arena
) -> None:
    (small_disk / "filling").write_bytes(bytes((1 << 20) - 4096))  # a page is left
    nets = [replace(source, path=str(small_disk.parent / f"{source.name}.onnx")) for source in sources]
    for n, source in enumerate(nets):
        save_net(Path(source.path), n, width=512)
    events: list[str] = []

    async def start() -> str:
        told = Means(small_disk, inbox, lambda e, **_: events.append(e), lambda member: None)
        staffed = await replicated(nets, Serving(), told)
        await staffed.pool.close()
        return staffed.replication

    assert asyncio.run(start()) == "between_graph"
    (said,) = [event for event in events if event.startswith("replication")]
    assert "ensemble.onnx could not be written: No space left on device" in said
    assert not programs()


def test_who_is_being_replaced_when_all_is_closed_has_ended_too(
    sources: list[Source], tmp_path: Path, inbox: Arena
) -> None:
    before = {*children(os.getpid())}

    async def start() -> None:
        ready = asyncio.Event()

        def told(event: str, **about: Any) -> None:
            if event == "spare ready":
                ready.set()

        staffed = await replicated(sources[:1], Serving(), Means(tmp_path, inbox, told, lambda member: None))
        try:
            await asyncio.wait_for(ready.wait(), 60)
            killed = {*programs()}
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                while not {*programs()} - killed:  # the member's next one
                    await asyncio.sleep(0.005)
        finally:
            await staffed.pool.close()
        assert {*children(os.getpid())} <= before, "neither alive nor waiting to be collected"

    asyncio.run(start())
