"""A verb that returns a value: what its ranks do is written once, and its launcher says where they are.

::

    local()               processes that this one starts      verb.answer(LocalRanks)
    env()                 every rank calls the verb           rank 0: verb.answer(RunningRanks), the others follow
    ssh(), slurm(), ray() the verb is sent to every host      ... where each rank does what it does under env()

The driver is rank 0's host in each case, so that what is timed, written and read there has not crossed a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, final

import torch

from apportion.comm.group import collective
from apportion.comm.world import World
from apportion.core.launcher import Launcher
from apportion.core.strategy import cut_at
from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.runtime.launched.driving import driven, must_agree, must_have_met
from apportion.runtime.launched.ranks import LocalRanks, Ranks
from apportion.runtime.worker.job import Job

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Verb(ABC, Generic[Value]):
    """One call of a verb, which goes to other hosts as it is: everything that it needs is in its fields."""

    workload: Workload | str

    @abstractmethod
    def on_processes(self, launcher: Local) -> Value:
        """Carries the verb out on processes of this machine."""

    @abstractmethod
    def answer_of_ranks(self, launcher: Env | HostsLauncher) -> tuple[Any, int]:
        """Carries the verb out on the ranks that call this. Returns its answer, which is plain JSON, the same on all of
        them, and the number of this rank; or raises the same error on all."""

    @abstractmethod
    def value(self, answer: Any, launcher: Launcher) -> Value:
        """Returns what the user is given for an answer."""

    def announce(self, value: Value, answer: Any) -> None:
        """Says or writes what goes with the value, once: in the driver, or in rank 0."""

    @final
    @collective
    def on_running_ranks(self, launcher: Env) -> Value:
        """Carries the verb out on the ranks that call this. Returns the same value on all of them, or raises the same
        error."""
        answer, rank = self.answer_of_ranks(launcher)
        value = self.value(answer, launcher)
        if rank == 0:
            self.announce(value, answer)
        return value

    @final
    def on_hosts(self, launcher: HostsLauncher) -> Value:
        """Carries the verb out on ranks that are started on the launcher's hosts for it. Raises ApportionError where
        the first host's JSON is not an answer of this verb."""
        from apportion.api.shipment import (  # what goes to other hosts needs more
            HostVerb,
            shipment_of,
            shipped_workload,
        )
        from apportion.runtime.hosts.hosts_verb import HostsVerb

        shipped = HostVerb(verb=replace(self, workload=shipped_workload(self.workload)), launcher=launcher)
        answer = HostsVerb(launcher, shipment_of(self.workload, shipped)).value()
        try:
            value = self.value(answer, launcher)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ApportionError(f"what the first host has sent as the result is none: {error}") from error
        self.announce(value, answer)
        return value


@dataclass(frozen=True, kw_only=True)
class DrivenVerb(Verb[Value]):
    """A verb that one process drives, by orders to ranks that make steps."""

    @abstractmethod
    def jobs(self, launcher: str, ranks: int) -> Sequence[Job]:
        """Returns the jobs whose steps running ranks make, on exactly ``ranks`` ranks. ``launcher``: what has started
        them, as it is written. Raises ValueError where they cannot be."""

    @abstractmethod
    def answer(self, ranks: Ranks) -> Any:
        """Carries the verb out with these ranks, in their driver; returns plain JSON."""

    @collective
    def opened(self, workload: Workload, world: World) -> DrivenVerb[Value]:
        """Returns the verb once running ranks have opened its workload, and agree on it. Called by all ranks."""
        return self

    @final
    def on_processes(self, launcher: Local) -> Value:
        answer = self.answer(LocalRanks(launcher))
        value = self.value(answer, launcher)
        self.announce(value, answer)
        return value

    @final
    @collective
    def answer_of_ranks(self, launcher: Env | HostsLauncher) -> tuple[Any, int]:
        world = World.from_env(device="cpu", insecure=launcher.insecure)
        try:
            must_have_met(world)
            jobs = self.jobs(str(launcher), world.size)
            verb = self.opened(must_agree(jobs[0], world), world)
            if world.size == 1:
                alone = Local(workers=1, threads=torch.get_num_threads(), device="cpu")
                return verb.answer(LocalRanks(alone)), 0
            return driven(verb.jobs(str(launcher), world.size), world, verb.answer, cut_at), world.rank
        finally:
            world.close()
