"""The ranks that a verb has make its steps, wherever they run: processes that are started here for it (``LocalRanks``),
or ranks that are running already, on one host or several (``RunningRanks``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

from apportion.comm.channel import Message
from apportion.core.strategy import Strategy
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import Spare
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job

STEPS = "apportion.runtime.worker.entry:steps"
"""The program of a process that makes steps at its driver's orders."""


class StepPool(Protocol):
    """Ranks that have built a step, and make steps when their driver says so."""

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order to every rank."""

    def ask(self, order: Mapping[str, Any], kind: str, seconds: float) -> list[Message]:
        """Sends an order to every rank and returns their answers, as ``answers`` does."""

    def answers(self, kind: str, seconds: float) -> list[Message]:
        """Returns one message of this kind from every rank, by rank. Raises what a rank fails with, and WorkerFailed
        where one does not answer within ``seconds``."""

    def close(self) -> None:
        """Ends the steps, and the processes where they were started for them."""


class Ranks(ABC):
    """The ranks of a verb, as its driver sees them. The driver runs on rank 0's host."""

    hosts: int = 1
    """The number of hosts that the ranks run on."""
    side_by_side: bool = True
    """Whether several strategies can be built at the same time, and make steps in turns."""
    one_folder: bool = True
    """Whether every rank sees the files of the driver's host."""

    @abstractmethod
    def layout(self, strategy: Strategy) -> Local:
        """Returns how many workers a strategy has on these ranks, as a launcher of local processes. Raises ValueError
        where it does not run on them."""

    @abstractmethod
    def layout_alone(self) -> Local:
        """Returns the layout of a strategy of one process, which runs on the driver's host."""

    @abstractmethod
    def begin(
        self,
        job: Job,
        launcher: Local,
        ranks: int,
        *,
        cuts: Sequence[str] = (),
        which: int = 0,
        importer: Spare | None = None,
    ) -> StepPool:
        """Has ``ranks`` ranks build the step of a job, laid out as ``launcher`` says.

        ``cuts``: the layers before which the strategy cuts the network into stages. ``which``: the number of the job
        among those that the ranks have. ``importer``: the process that new ones are forked from.
        """

    @abstractmethod
    def ranks_here(self, ranks: int) -> int:
        """Returns how many of the ``ranks`` ranks of a strategy run on the driver's host."""

    @abstractmethod
    def start(self, target: str, job: Job, launcher: Local, importer: Spare | None = None) -> StepPool:
        """Starts one process on the driver's host, which calls ``target`` (``module:function``) with a job, and ends
        with the ranks. ``importer``: the process that it is forked from."""


@final
class LocalRanks(Ranks):
    """Processes on this machine, which are started for each strategy."""

    def __init__(self, launcher: Local | None = None) -> None:
        self._launcher = launcher or Local()

    def layout(self, strategy: Strategy) -> Local:
        return self._launcher

    def layout_alone(self) -> Local:
        return replace(self._launcher, workers=1)

    def begin(
        self,
        job: Job,
        launcher: Local,
        ranks: int,
        *,
        cuts: Sequence[str] = (),
        which: int = 0,
        importer: Spare | None = None,
    ) -> WorkerPool:
        return WorkerPool(launcher, STEPS, job, ranks, importer)

    def ranks_here(self, ranks: int) -> int:
        return ranks

    def start(self, target: str, job: Job, launcher: Local, importer: Spare | None = None) -> WorkerPool:
        return WorkerPool(launcher, target, job, 1, importer)
