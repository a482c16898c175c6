"""Prove that a strategy computes what it must, when somebody asks."""

from __future__ import annotations

from dataclasses import replace

from apportion.api.arguments import check_steps, check_workload, launcher_of, strategy_of
from apportion.api.proof_workers import ProofRequest
from apportion.api.surveyed_proof import prove_with_survey
from apportion.core.named_arguments import named_arguments
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.planner.trials.trial import candidate
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.proof import Proof


@named_arguments("check")
def check(
    workload: Workload | str,
    strategy: Strategy | str,
    *,
    workers: int | None = None,
    steps: int = 8,
    launcher: Local | Env | HostsLauncher | str | None = None,
) -> Proof:
    """Run a strategy and its reference side by side, and compare what both have changed after every step.

    First in float64 (floating inputs, weights and buffers), where nothing but rounding may differ: at most 1e-10 of
    the largest change, or 100 times the rounding noise measured; then the gradients, by plain SGD of rate 1 in the
    place of each optimizer; then in the run's own precision, against its noise. A model that fixes float32 is
    reported, and checked in float32. Dropout is turned off for it, and named. A schedule that begins at next to
    nothing is begun where weights move. Where a network amplifies rounding so much that its bound would be above 1e-3
    of the change, nothing above that is called equal; where too little moves to tell, the answer is undecided.

    Where workers go their own ways, and the strategy writes down which (``Strategy.replays``), all make so many steps
    with nobody waiting, and one process makes the same updates again: to the last bit, in both precisions.

    Meanwhile the loss is tried by itself on made-up outputs, where the strategy divides batches, and the targets of the
    data are read. A loss that is wrong where a batch is divided makes the answer "different". Then steps are made on
    rows that have the rare ones among them, unless the steps before have had all rows (``Proof.survey``,
    ``Proof.rare``).

    Under ``launcher=env()`` every rank calls it, in the same way: the strategy runs on the CPUs of these very ranks,
    over the connections that they have, the reference in processes of rank 0, and all ranks return the same proof or
    raise the same error. With ``launcher=ssh("a", "b:4")`` the ranks are started on these hosts for it, and do the
    same.
    """
    check_workload(workload, "check")
    value = strategy_of(strategy)
    check_steps(steps)
    where: Local | Env | HostsLauncher = launcher_of(launcher)
    if isinstance(where, HostsLauncher):
        from apportion.api.on_hosts import proof_on_hosts  # what goes to other hosts needs more

        hosts = where if workers is None else replace(where, workers=workers)
        return proof_on_hosts(workload, value, hosts, steps=steps)
    if isinstance(where, Env):
        if workers is not None:
            raise ValueError(f"workers={workers} goes with local(): {where} finds its ranks running already")
        from apportion.api.launched.proof import check_launched  # what runs in ranks needs more than what starts them

        return check_launched(workload, value, where, steps=steps)
    chosen = candidate(value, where if workers is None else replace(where, workers=workers))
    return prove_with_survey(ProofRequest(workload=workload, chosen=chosen, steps=steps))
