"""A plan of ranks that are running already, for themselves: all of them get the same."""

from __future__ import annotations

from typing import Any

from apportion.comm.group import collective
from apportion.comm.objects import broadcast_message
from apportion.comm.world import World
from apportion.core.workload import Workload
from apportion.planner.launched_plan import plan_launched
from apportion.planner.plan_data import plan_data
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env


@collective
def plan_by_ranks(workload: Workload | str, launcher: Env | HostsLauncher, *, trial: bool) -> dict[str, Any]:
    """Plans for the ranks that call this, and returns the plan's data on all of them. Raises ValueError, on all of
    them, where nothing can run, or there is one rank alone."""
    world = World.from_env(device=launcher.device, insecure=launcher.insecure)
    if world.size == 1:
        name = workload if isinstance(workload, str) else "FILE:NAME"
        raise ValueError(
            f"--launcher {launcher} plans for ranks that torchrun or Slurm have started, and here is one alone: start "
            f"torchrun --nproc-per-node=2 --no-python apportion plan {name} --launcher env, or leave --launcher "
            "out, and it is planned for this machine"
        )
    try:
        made = plan_launched(workload, world, trial=trial)
        told: dict[str, Any] = broadcast_message(
            None if made is None else plan_data(made), world.group(), device=world.device
        )
        return told
    finally:
        world.close()
