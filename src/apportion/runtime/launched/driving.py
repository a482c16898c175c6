"""One function that rank 0 runs for all ranks, while each of them, rank 0 among them, makes steps when it says so.

::

    rank 0   a thread: drive(ranks)  -- orders -->  rank 0's main thread   makes steps
                                     -- orders -->  rank 1                 makes steps
             its value, or its error -- to all ->   every rank returns it, or raises it
"""

from __future__ import annotations

import base64
import queue
import shutil
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final

from apportion.comm.channel import Channel, Message
from apportion.comm.group import collective, gather_messages
from apportion.comm.network.network_group import NetworkGroup
from apportion.comm.world import World
from apportion.core import fast_paths
from apportion.core.rng import fork_host_rng
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.errors import ApportionError, PeerLost
from apportion.runtime.launched.outcome import FAILED, RESULT, failed, result, value_of
from apportion.runtime.launched.ranks import RunningRanks
from apportion.runtime.worker.agreement import RunAgreement
from apportion.runtime.worker.entry import described
from apportion.runtime.worker.job import Job
from apportion.runtime.worker.step_server import serve_steps

Made = TypeVar("Made")
Drive = Callable[[RunningRanks], Any]
"""A function that drives the ranks, in rank 0 alone; it returns plain JSON."""


@collective
def connections(world: World) -> NetworkGroup | None:
    """Returns the connections over which ranks have met; None where they have met over torch.distributed: GPUs, or a
    group that the user's own script has made. Called by all ranks."""
    group = world.group()
    flat = getattr(group, "flat", None) or group
    return flat if isinstance(flat, NetworkGroup) else None


@collective
def ranks_by_host(world: World) -> list[int]:
    """Returns the number of ranks on each of their hosts, in the order of the hosts. Called by all ranks."""
    return list(Counter(world.hosts()).values())


@collective
def must_have_met(world: World) -> None:
    """Raises ValueError, on all ranks, where they have met over another group than apportion's."""
    if world.size > 1 and connections(world) is None:
        raise ValueError(
            "the ranks have met over a process group of torch.distributed, which the script has made: check and "
            "compare need the connections of apportion, so call them before init_process_group"
        )


@collective
def must_agree(job: Job, world: World) -> Workload:
    """Returns the workload. Raises ValueError, on all ranks alike, where one of them cannot open its workload, or was
    given another one."""
    workload = all_or_none(job.open, world)
    RunAgreement(job, world).on_workload(workload)
    return workload


@collective
def all_or_none(make: Callable[[], Made], world: World) -> Made:
    """Returns what ``make`` makes in this rank. Raises ValueError or ApportionError, on all ranks alike, where one of
    them cannot make it."""
    made: list[Made] = []
    refusal = None
    try:
        made.append(make())
    except (ValueError, ApportionError) as error:
        refusal = [isinstance(error, ValueError), str(error)]
    refusals = [answer for answer in gather_messages(refusal, world.group(), device=world.device) if answer]
    if refusals:
        wrong, text = refusals[0]
        raise ValueError(text) if wrong else ApportionError(text)
    return made[0]


@collective
def driven(jobs: Sequence[Job], world: World, drive: Drive, cut: Cut) -> Any:
    """Runs ``drive`` in rank 0, and returns what it returns, or raises what it raises, on every rank. Called by all
    ranks, each with its own jobs, which have the workload and the strategies of the steps; their world has
    ``connections``.

    ``cut``: has the strategy cut the network where rank 0 says.
    """
    flat = connections(world)
    assert flat is not None, "the caller has looked"
    links, hosts = flat.links(), len(ranks_by_host(world))
    if world.rank:
        return value_of(StepFollower(jobs, world, links[0], cut).follow())
    ours, theirs = socket.socketpair()
    names = ["rank 0", *(flat.describe(rank) for rank in range(1, world.size))]
    ranks = RunningRanks([ours, *links], names, here=world.local_size, hosts=hosts)
    raised: list[BaseException] = []
    driver = threading.Thread(target=_drive, args=(drive, ranks, raised), name="driver")
    driver.start()
    try:
        outcome = StepFollower(jobs, world, theirs, cut).follow()
    except BaseException as error:
        ranks.abort(failed(error))
        raise
    finally:
        driver.join()
    if raised:
        raise raised[0]
    return value_of(outcome)


def _drive(drive: Drive, ranks: RunningRanks, raised: list[BaseException]) -> None:
    try:
        outcome = result(drive(ranks))
    except BaseException as error:
        raised.append(error)
        outcome = failed(error)
    ranks.finish(outcome)


# Every rank's side: makes steps when rank 0 says so, in this very process, in a world of its own each time.


Cut = Callable[[Strategy, Sequence[str]], Strategy]
"""A function that has a strategy cut the network at these layers."""
_WRITTEN = "written"
"""The beginning of the names of what a rank writes for rank 0."""
_GONE = "rank 0 is gone: the connection to it has ended before it said what it all came to"
ENDINGS = (RESULT, FAILED)
"""The kinds of the last message."""


@final
class StepFollower:
    """One rank, as rank 0 drives it. It is the channel of ``serve_steps`` while it makes steps: orders come in
    ``commands``, answers go by ``send``. What a rank other than rank 0 writes travels with its answer."""

    def __init__(self, jobs: Sequence[Job], world: World, link: socket.socket, cut: Cut) -> None:
        self._jobs, self._whole, self._cut = jobs, world, cut
        self._link = Channel(link)
        self.commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._folder: str | None = None
        """The folder in which a rank other than rank 0 writes what rank 0 has asked for, until it is sent."""
        self._world: World | None = None
        """The world of the steps under way."""
        self._failed = self._ending = False
        self._listener = threading.Thread(target=self._listen, name="orders", daemon=True)

    def follow(self) -> Message:
        """Does what rank 0 says until it says what it all came to, and returns that. Raises PeerLost where rank 0 is
        gone."""
        with ExitStack() as stack:
            stack.callback(self._listener.join)
            stack.callback(self._link.close)
            self._listener.start()
            while (order := self.commands.get()) is not None:
                if order["kind"] in ENDINGS:
                    return order
                if order["kind"] == "begin":
                    self._make_steps(order)
            raise PeerLost(_GONE)

    def _listen(self) -> None:
        while (order := self._link.commands.get()) is not None:
            self._ending = order["kind"] in ("end", *ENDINGS)
            if self._ending:  # a rank that waits for one that has failed would wait for ever
                self._abandon()
                self.commands.put({"kind": "close"})
                if order["kind"] == "end":
                    continue
            self.commands.put(self._with_own_path(order))
        self._ending = True
        self._abandon()
        self.commands.put(None)

    def _with_own_path(self, order: Message) -> Message:
        """Returns the order with a path on this host, where this rank is to write something and is not rank 0."""
        rank = self._whole.rank
        if rank == 0 or "path" not in order or rank not in order.get("ranks", [rank]):
            return order
        try:
            self._folder = tempfile.mkdtemp(prefix="apportion-check-")
        except OSError:  # writing to the original path then fails, and reports it
            return order
        return {**order, "path": str(Path(self._folder, _WRITTEN))}

    def _abandon(self) -> None:
        world = self._world
        if world is not None:
            world.abandon()

    def _make_steps(self, order: Message) -> None:
        """Serves one strategy from its building to its end."""
        given = {**order["job"], "plain": tuple(order["job"]["plain"])}
        own = self._jobs[order["which"]]
        job = replace(own, strategy=self._cut(own.strategy, order["cuts"]), **given)
        self._failed = False
        world = self._whole.renew()
        self._world = world
        if self._ending:  # meanwhile
            world.abandon()
        try:
            with fork_host_rng(), fast_paths.switched_off(), _same_process_group():
                serve_steps(job, world, self, failed=self._tell)
        except Exception as error:
            self._tell(error)
            while (left := self.commands.get()) is not None and left["kind"] != "close":
                pass
            if left is None:
                self.commands.put(None)
        except BaseException as error:  # such as Ctrl-C: the others learn why, and this rank ends
            self._tell(error)
            raise
        finally:
            self._world = None
            world.close()
            self._files()  # of an answer that was not given
        with suppress(OSError):
            self._link.send({"kind": "ended"})

    def _tell(self, error: BaseException) -> None:
        """Reports to rank 0 what went wrong, once; no rank waits for this one from then on."""
        if not self._failed:
            self._failed = True
            with suppress(OSError):  # rank 0 is gone, which ends this rank too
                self._link.send(described(error))
            self._abandon()

    # The channel of the steps

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends an answer to rank 0, with what was written for it. Raises PeerLost where rank 0 is gone."""
        files = self._files()
        try:
            self._link.send({**message, "files": files} if files else message)
        except OSError as error:
            raise PeerLost(_GONE) from error

    def _files(self) -> dict[str, str]:
        """Returns what this rank has written for rank 0, by the ends of the paths, and removes it."""
        folder, self._folder = self._folder, None
        if folder is None:
            return {}
        try:
            paths = list(Path(folder).iterdir())
            return {p.name.removeprefix(_WRITTEN): base64.b64encode(p.read_bytes()).decode() for p in paths}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _same_process_group() -> Iterator[None]:
    """Lets the process group of torch.distributed that this process has, where it is over one of our groups, be over
    the same afterwards: a process has one alone, and a step that stands still may need it."""
    module: Any = sys.modules.get("apportion.comm.network.c10d_backend")
    before = None if module is None else module.given()
    try:
        yield
    finally:
        if before is not None:
            module.init_process_group(before)
