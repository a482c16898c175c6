"""Say how to split the work: from a workload and this machine, or from two files of JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from apportion.api.arguments import check_workload, launcher_of
from apportion.api.verb import Verb
from apportion.comm.group import broadcast_message, collective
from apportion.comm.world import World
from apportion.core.launcher import Launcher
from apportion.core.named_arguments import named_arguments
from apportion.core.place_names import check_place
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Cluster
from apportion.cost_model.profile import Profile
from apportion.planner.build import make
from apportion.planner.plan import Plan
from apportion.planner.search import no_place, places_of, search
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local

ROLLOUT_SECONDS = 5.0
"""The seconds for rollouts of other sizes than the workload's own, where its network makes its examples."""


@named_arguments("plan")
def plan(  # noqa: PLR0913 (the settings, all of them by name)
    workload: Workload | str | None = None,
    cluster: Cluster | str | Path | None = None,
    *,
    network: Profile | str | Path | None = None,
    against: Cluster | str | Path | None = None,
    workers: int | None = None,
    trial: bool = True,
    allow_approximate: bool = False,
    remeasure: bool = False,
    launcher: Launcher | str | None = None,
) -> Plan:
    """Find which way to split a workload, with the price of every alternative and when the answer would change.

    ``cluster``: the machines; a file of JSON, or a name of the catalogue (``"4-hosts-10gbit"``). None measures this
    machine, which is kept: ``remeasure`` does it again. ``network``: a profile, or a file of it; None times the
    workload's layers here. With ``network`` neither a model nor its machines are needed: a ``workload`` beside it is
    what the commands name. ``against``: another cluster, to say how many of its hosts match this one.

    ``workers``: only layouts with this number. ``trial``: the best few are tried, where the machines are those that
    this runs on; else all is predicted. ``allow_approximate``: an approximate strategy may be chosen, after a pilot.

    ``launcher``: plans for ranks of several hosts, on which it is measured and tried: ``env()`` for those that call
    this, each in the same way, ``ssh("a", "b:4")`` for ranks that are started for it. Only ``trial`` goes with it.

    Raises ValueError for what was asked wrongly, and where nothing can run.
    """
    if workload is not None and not isinstance(workload, str):
        check_workload(workload, "plan")
    if launcher is not None:
        where = launcher_of(launcher)
        if any(given is not None for given in (cluster, network, against, workers)) or allow_approximate or remeasure:
            raise ValueError(
                "launcher=env() plans for the ranks that run it: of these settings, trial=False alone goes with it"
            )
        return _of_ranks(workload, where, trial=trial)
    _must_go_together(workload, cluster, network, measures=remeasure or allow_approximate)
    machines = _here(remeasure) if cluster is None else cluster_of(cluster)
    here = cluster is None or (isinstance(cluster, Cluster) and _is_this_machine(cluster))
    if allow_approximate and not (trial and here):
        why = "without trials" if here else f"on {machines.name}, which is elsewhere,"
        raise ValueError(f"allow_approximate needs a pilot on these machines, and {why} there is none: leave it out")
    other = None if against is None else cluster_of(against)
    if network is not None:
        profile = profile_of(network)
    else:
        assert workload is not None
        if here:
            profile = _profiled(workload, machines, workers, rollouts=ROLLOUT_SECONDS)
        else:
            profile = _profiled(workload, _here(remeasure), None)
    found = search(profile, machines, workers=workers)
    name = workload if isinstance(workload, str) else None
    given = network is not None
    planned = make(found, profile, machines, workload=None if given else name, against=other, workers=workers)
    if given:  # the numbers are the profile's, whatever the commands name
        planned = replace(planned, address=name)
    if not (trial and here) or workload is None or network is not None:
        return planned
    from apportion.planner.trials.measured_plan import tried  # with it come processes

    return tried(planned, workload, allow_approximate=allow_approximate)


def _of_ranks(workload: Workload | str | None, launcher: Launcher, *, trial: bool) -> Plan:
    if workload is None:
        raise ValueError(f"launcher={launcher} needs a workload (FILE:NAME): the ranks measure it; give one")
    if isinstance(workload, str):
        check_place(workload)
    name = workload if isinstance(workload, str) else None
    plan: Plan = launcher.dispatch(PlanOfRanks(workload=workload, trial=trial, name=name))
    return plan


def _must_go_together(workload: object, cluster: object, network: object, *, measures: bool) -> None:
    """Raises ValueError where what a plan is to be made of is missing or contradicts itself. ``measures``: something is
    to be measured anew, or tried."""
    if workload is None and network is None:
        raise ValueError("plan needs a workload (FILE:NAME), or network=: a profile of one; give either")
    if network is not None and cluster is None:
        raise ValueError("network= is a profile from elsewhere: say which machines with cluster=, a file or a name")
    if network is not None and measures:
        raise ValueError(
            "network= is a profile from elsewhere: nothing is measured or tried with it; leave remeasure and "
            "allow_approximate out"
        )
    if isinstance(workload, str) and (network is None or cluster is None):
        check_place(workload)


@final
@dataclass(frozen=True, kw_only=True)
class PlanOfRanks(Verb[Plan]):
    """A plan of ranks that are running already, for themselves."""

    trial: bool
    name: str | None
    """The address of the workload as the user has given it."""

    def on_processes(self, launcher: Local) -> Plan:
        raise ValueError(
            f"launcher={launcher}: plan looks at every layout of this machine by itself; "
            "launcher=env(), with a workload, is for ranks that torchrun or Slurm have started, and "
            "launcher=ssh('a', 'b') for those of several hosts"
        )

    @collective
    def answer_of_ranks(self, launcher: Env | HostsLauncher) -> tuple[Any, int]:
        """Returns the plan's data on all ranks. Raises ValueError, on all of them, where nothing can run, or there is
        one rank alone."""
        from apportion.planner.launched_choice import plan_launched  # with it come trials
        from apportion.planner.plan_data import plan_data

        world = World.from_env(device=launcher.device, insecure=launcher.insecure)
        try:
            if world.size == 1:
                name = self.workload if isinstance(self.workload, str) else "FILE:NAME"
                raise ValueError(
                    f"--launcher {launcher} plans for ranks that torchrun or Slurm have started, and here is one "
                    f"alone: start torchrun --nproc-per-node=2 --no-python apportion plan {name} --launcher env, or "
                    "leave --launcher out, and it is planned for this machine"
                )
            found = plan_launched(self.workload, world, trial=self.trial, name=self.name)
            data = None if found is None else plan_data(found)
            return broadcast_message(data, world.group(), device=world.device), world.rank
        finally:
            world.close()

    def value(self, answer: Any, launcher: Launcher) -> Plan:
        from apportion.planner.plan_data import plan_of

        plan = plan_of(answer)
        name = (
            self.workload if isinstance(self.workload, str) else plan.workload
        )  # on other hosts its file lies elsewhere
        return replace(plan, workload=name, started_by=None if launcher.launched else str(launcher))


def cluster_of(given: Cluster | str | Path) -> Cluster:
    """Returns a cluster: itself, from its file, or from the catalogue by its name. Raises ValueError where no such
    cluster exists."""
    if isinstance(given, Cluster):
        return given
    if isinstance(given, Path) or given.endswith(".json"):
        return Cluster.load(_file(given, "cluster"))
    from apportion.cost_model.catalogue import named

    return named(given)


def profile_of(given: Profile | str | Path) -> Profile:
    """Returns a profile: itself, or from its file. Raises ValueError where the file holds none."""
    return given if isinstance(given, Profile) else Profile.load(_file(given, "profile"))


def _file(given: str | Path, what: str) -> Path:
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"there is no file {given} (in {Path.cwd()}): a {what} is a file of JSON, see docs/planner.md")
    return path


def _is_this_machine(cluster: Cluster) -> bool:
    """Tells whether a cluster was measured, and has the devices that are found here: one that was measured elsewhere
    has others."""
    if not cluster.measured:
        return False
    from apportion.profiler.discover import discover

    own, found = ([(d.kind, d.model, d.cores) for d in some.devices] for some in (cluster, discover()))
    return own == found


def _here(remeasure: bool) -> Cluster:
    from apportion.profiler.measure_cluster import measure

    return measure(remeasure=remeasure)


def _profiled(workload: Workload | str, here: Cluster, workers: int | None, *, rollouts: float = 0.0) -> Profile:
    """Profiles the workload on this machine, whichever the plan is for: elsewhere the times are worked out from its
    rates. ``rollouts``: the seconds for rollouts of other sizes."""
    from apportion.profiler.measure_workload import profile

    # The GPUs may have no place for this number of workers: a network that acts has one on the cores beside them.
    places = places_of(here, workers) or places_of(here, workers, on_cores=True)
    if not places:
        raise ValueError(no_place(here, workers, None, on_cores=True))
    return profile(workload, here, places, rollouts=rollouts)
