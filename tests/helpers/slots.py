"""Workers that are killed and replaced while they train, by a supervisor of the test's own: processes that are forked,
real SIGKILLs, and the page, the channel and the memory that every run has."""

from __future__ import annotations

import base64
import os
import pickle
import random
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ranks
import torch

from apportion import Strategy, Workload, batches
from apportion.comm.channel import Channel, Lines, SharedMemoryOwner
from apportion.comm.membership import Membership
from apportion.comm.world import World
from apportion.core.strategy import State, Step
from apportion.errors import MembershipChanged
from apportion.process import die_with_parent

DEADLINE_SECONDS = 100.0
AHEAD = 8
"""The steps that workers may be past the step at which the next one is killed: a supervisor that comes late on a busy
machine would otherwise kill one when the others are done, who could not be asked back."""


@dataclass(frozen=True)
class Kill:
    """When the run has come to this step, and so many seconds have passed: that slot's process gets the signal."""

    step: int
    seconds: float
    slot: int
    signal: int = signal.SIGKILL


def kills(many: int, steps: int, slots: int, *, seed: int, seconds: float = 0.004) -> list[Kill]:
    """At random moments, in the order of the steps; none in the last tenth, where who is done could be asked back."""
    chosen = random.Random(seed)
    at = sorted(chosen.randrange(1, steps * 9 // 10) for _ in range(many))
    return [Kill(step, chosen.uniform(0, seconds), chosen.randrange(slots)) for step in at]


@dataclass
class Outcome:
    """What the slots gave, and what was done to them."""

    results: list[Any]
    kills: int = 0
    changes: int = 0


def on_slots(
    function: Callable[..., Any], slots: int, *arguments: Any, killed: Sequence[Kill] = (), replaced: bool = True
) -> Outcome:
    """``function(world, progress, *arguments)`` on so many slots; ``progress[slot]`` is how far it is, and the last
    word the step that none may pass yet. ``replaced``: the dead are; else the run goes on with those who are left."""
    (outcome,) = ranks.on_ranks(_supervise, 1, function, slots, arguments, list(killed), replaced)
    return Outcome(**outcome)


def _supervise(
    world: World,
    function: Callable[..., Any],
    slots: int,
    arguments: tuple[Any, ...],
    killed: list[Kill],
    replaced: bool,
) -> dict[str, Any]:
    supervisor = _Supervisor(function, slots, arguments, replaced)
    try:
        return vars(supervisor.run(killed))
    finally:
        supervisor.close()


class _Supervisor:
    def __init__(self, function: Callable[..., Any], slots: int, arguments: tuple[Any, ...], replaced: bool) -> None:
        self._function, self._arguments, self._slots, self._replaced = function, arguments, slots, replaced
        self._memory = SharedMemoryOwner()
        self._members = Membership(self._memory.map("members", Membership.nbytes(slots)), slots)  # type: ignore[arg-type]
        self._members.begin()
        words = np.frombuffer(self._memory.map("test/progress", 8 * (slots + 1)), dtype=np.int64)
        self._progress, self._limit = words[:-1], words[-1:]
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Lines] = {}
        self._pids: dict[int, int] = {}
        self._outcome = Outcome([None] * slots)
        self._results = 0
        for slot in range(slots):
            self._fork(slot)

    def _fork(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            for lines in self._lines.values():
                lines.socket.close()  # not shut down: the others go on
            ours.close()
            self._sit(theirs, slot)
        theirs.close()
        self._pids[slot], self._lines[slot] = pid, Lines(ours)
        self._selector.register(ours, selectors.EVENT_READ, slot)

    def _sit(self, sock: socket.socket, slot: int) -> None:
        status = 1
        try:
            channel = Channel(sock)
            n = self._slots
            place = {"rank": slot, "size": n, "local_rank": slot, "local_size": n, "slot": slot, "slots": n}
            world = World(**place, device=torch.device("cpu"), channel=channel).join()  # type: ignore[arg-type]
            progress = np.frombuffer(world.shared("test/progress", 8 * (n + 1)), dtype=np.int64)
            result = pickle.dumps(self._function(world, progress, *self._arguments))
            channel.send({"kind": "result", "data": base64.b64encode(result).decode()})
            while channel.commands.get() is not None:
                pass
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)

    def run(self, killed: list[Kill]) -> Outcome:
        deadline = time.monotonic() + DEADLINE_SECONDS
        waiting, due = list(killed), 0.0
        expected = self._slots
        while self._results < expected:
            assert time.monotonic() < deadline, f"it hangs at {self._progress.tolist()}, after {self._outcome}"
            self._limit[0] = waiting[0].step + AHEAD if waiting else np.iinfo(np.int64).max
            self._hear(0.001)
            now = time.monotonic()
            if waiting and self._progress.max() >= waiting[0].step:
                due = due or now + waiting[0].seconds
                if now >= due:
                    self._kill(waiting.pop(0))
                    due = 0.0
            if self._dead():
                self._change()
                expected = self._slots if self._replaced else len(self._pids)
        return self._outcome

    def _kill(self, kill: Kill) -> None:
        if kill.slot in self._pids:
            os.kill(self._pids[kill.slot], kill.signal)
            self._outcome.kills += 1

    def _hear(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            lines = self._lines[key.data]
            for message in lines.receive() or ():
                if message["kind"] == "shared":
                    fd = self._memory.fd(message["name"], message["nbytes"])
                    try:
                        lines.send({"kind": "shared", "name": message["name"]}, fd)
                    except OSError:  # it was killed as it asked
                        pass
                elif message["kind"] == "result":
                    self._outcome.results[key.data] = pickle.loads(base64.b64decode(message["data"]))
                    self._results += 1

    def _dead(self) -> list[int]:
        return [slot for slot, pid in self._pids.items() if os.waitid(os.P_PID, pid, _GONE) is not None]

    def _change(self) -> None:
        """The order that the membership page asks for."""
        self._bury()
        self._members.open_change()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            self._hear(0.0005)
            self._bury()
            if all(map(self._members.acknowledged, self._pids)):
                break
            assert time.monotonic() < deadline, f"a survivor does not leave its wait, after {self._outcome}"
        self._outcome.changes += 1
        self._members.close_change(sorted(self._pids))

    def _bury(self) -> None:
        for slot in self._dead():
            os.waitpid(self._pids.pop(slot), 0)
            lines = self._lines.pop(slot)
            self._selector.unregister(lines.socket)
            lines.close()
            if self._replaced:
                self._fork(slot)

    def close(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for lines in self._lines.values():
            lines.close()
        self._selector.close()
        self._memory.close()


_GONE = os.WEXITED | os.WNOHANG | os.WNOWAIT


def train(world: World, progress: Any, strategy: Strategy, workload: Workload) -> tuple[State, list[int]]:
    """The worker's loop: the last state, and how many ranks made each step that this process made."""
    step = strategy.build(workload, world)
    ready = world.generation == 0
    made: list[int] = []
    while True:
        try:
            if not ready:
                step.rejoin(world)
                ready = True
            _steps(step, world, progress, made)
            return step.state_dict(), made
        except MembershipChanged:
            world, ready = _rejoined(world), False


def _steps(step: Step, world: World, progress: Any, made: list[int]) -> None:
    for batch in batches(step):
        world.check()
        step(batch)
        made.append(world.size)
        progress[world.slot] = step.done
        while step.done >= progress[-1]:  # until the next kill
            world.check()
            time.sleep(0.0005)
    world.group().barrier()


def _rejoined(world: World) -> World:
    while True:
        try:
            return world.rejoin()
        except MembershipChanged:
            pass
