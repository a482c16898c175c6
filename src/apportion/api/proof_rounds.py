"""The rounds of a proof: each compares a strategy's states with its reference's in one precision, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from safetensors.torch import load_file

from apportion.api.contract_checks import ContractChecks, not_the_same
from apportion.api.proof_workers import GRADIENT_STEPS, ProofRequest, ProofWorkers
from apportion.comm.channel import Message
from apportion.runtime.proof.coarse_rounding import eps_of
from apportion.runtime.proof.comparison import Comparison, largest
from apportion.runtime.proof.limits import ProofLimits
from apportion.runtime.proof.proof import Round

HALF = ("bfloat16", "float16")
"""The precisions that a run computes in under autocast, its weights in float32."""
SEEN = ("dropout", "row_draws", "accepted_draws", "draws", "narrow", "plain_draws")
"""The kinds of operations that are looked for in the steps of a proof."""
Seen = dict[str, list[str]]


@final
class ProofRounds:
    """Makes the rounds of one proof, whichever these are."""

    def __init__(self, asked: ProofRequest, limits: ProofLimits) -> None:
        self._asked, self._limits, self._strategy = asked, limits, asked.chosen.strategy
        self._contract = asked.contract
        """True until the first round has compared what ranks predict, and the step after a state that was loaded."""
        self.replays = self._strategy.replays(asked.chosen.launcher.workers or 1)
        """True where the workers each go their own way, and one process makes the same updates again."""
        self.own = "float32"
        """The run's own precision, once the workload is built."""
        self.compared_beside: set[str] = set()
        """What of a step was compared besides its states."""
        self.hindered: dict[str, str] = {}
        """Why the rest of it could not be."""
        self.unrepeatable: str | None = None
        """What of one device's state is another when its step is repeated, in words."""
        self.cuts: list[str] = []
        """The steps that there was no time for, as clauses."""

    def round(self, pools: ProofWorkers, steps: int, precision: str, *, gradients: bool = False) -> tuple[Round, Seen]:
        """Compares strategy, reference and the reference that is led astray step by step; or the strategy with its
        replay. Returns the round with what was seen in its steps. ``gradients``: the optimizers are plain SGD."""
        if self.replays:
            return self._replayed(pools, steps, precision)
        found, seen, coarse = self._step_by_step(pools, steps, precision)
        # In float64 what computes in less is named, and left to the run's own precision, unless that is float64 too.
        # Under autocast every operation rounds, and not the gradients alone: an optimizer that looks at the signs of
        # small ones shows it.
        if precision in HALF:
            coarse = coarse | {precision}
        if precision == "float64" and not (self.own == "float64" and seen["narrow"]):
            coarse = set()
        if found.verdict == "equal" or found.disagreement is not None or not coarse:
            return found, seen
        pools.again(precision, gradients=gradients, coarse=True)
        found, seen, _ = self._step_by_step(pools, steps, precision, max(coarse, key=eps_of))
        return found, seen

    def first_step(self, pools: ProofWorkers) -> Round:
        """Compares one step in float64, for which the processes have been built."""
        return self._step_by_step(pools, 1, "float64")[0]

    def _replayed(self, pools: ProofWorkers, steps: int, precision: str) -> tuple[Round, Seen]:
        folder = pools.folder
        seen = seen_in(pools.ask(pools.tried, {"kind": "go", "steps": steps}, "went"))
        _, disagreement = _write_state(pools, steps)
        pools.ask(pools.tried, {"kind": "log", "path": str(folder / "log")}, "log")
        order = {"kind": "next", "path": str(folder / "reference"), "log": str(folder / "log")}
        pools.ask(pools.reference, order, "state")
        expected = load_file(folder / "reference")
        worst = largest(load_file(folder / "rank0"), expected, steps)
        if worst.absolute:
            pools.ask(pools.reference, {**order, "path": str(folder / "again")}, "state")
            again = largest(load_file(folder / "again"), expected, steps)
            if again.absolute:
                self.unrepeatable = not_the_same("the replay", again.name, again.absolute)
        found = Round(
            precision=precision,
            steps=steps,
            tensors=len(expected),
            worst=worst,
            noise=0.0,
            bound=0.0,
            disagreement=disagreement,
            verdict="equal" if disagreement is None and worst.absolute == 0.0 else "different",
        )
        return found, seen

    def _step_by_step(
        self, pools: ProofWorkers, steps: int, precision: str, coarsest: str | None = None
    ) -> tuple[Round, Seen, set[str]]:
        """Compares the states step by step; returns also the types in which the reference computes that are coarser
        than the precision. ``coarsest``: the type whose rounding is allowed for."""
        contract, self._contract = self._contract and precision == "float64", False
        steps_of = _Steps(pools, self._asked, self._limits, precision, coarsest, contract=contract)
        steps_of.make(steps)
        if steps_of.made < steps:
            self.cuts.append(f"{steps_of.made} of {steps} steps were compared, for want of time")
        found, unrepeatable = steps_of.compared()
        self.compared_beside |= steps_of.checks.compared
        self.hindered |= steps_of.checks.hindered
        self.unrepeatable = self.unrepeatable or unrepeatable
        return replace(found, coarsest=coarsest), steps_of.seen, steps_of.coarse


@final
class _Steps:
    """The steps of one round, made at once by the strategy's ranks, the reference, and that which is led astray."""

    def __init__(
        self,
        pools: ProofWorkers,
        asked: ProofRequest,
        limits: ProofLimits,
        precision: str,
        coarsest: str | None,
        *,
        contract: bool,
    ) -> None:
        """Begins the first step. ``contract``: what ranks predict, and the step after a state that was loaded, are
        compared too."""
        self._pools, self._asked, self._limits, self._contract = pools, asked, limits, contract
        self._exact, self._wide = asked.chosen.strategy.exact, precision == "float64"
        self._precision, self._began = precision, time.monotonic()
        folder = pools.folder
        # All of them build and make the first step at once: what a model imports as it is built may take long.
        pools.nudged.send({"kind": "next", "path": str(folder / "nudged")})
        pools.tried.send({"kind": "go", "steps": 1})
        (start,) = pools.ask(pools.reference, {"kind": "start", "path": str(folder / "start")}, "started")
        eps = eps_of(coarsest or precision)
        self._comparison = Comparison(load_file(folder / "start"), start["weights"], eps=eps)
        self.checks = ContractChecks(pools, exact=self._exact, precision=precision, eps=eps)
        self._keeps = False
        """True where the state before the last step is kept, for it to be made again."""
        self._digests: list[str] = []
        """The digests of the ranks' states after the last step."""
        self._disagreement: str | None = None
        self._claimed: str | None = None
        """What the ranks report or predict otherwise than one device does."""
        self.seen: Seen = seen_in(())
        self.coarse = set[str]()
        """The types in which the references compute that are coarser than the precision."""
        self.made = 0

    def make(self, steps: int) -> None:
        """Makes these steps, or as many as there is time for where one is to be made whatever the time."""
        for number in range(1, steps + 1):
            self._keeps = number == steps and steps > 1 and self._contract and self.checks.repeats
            self._make_one(number)
            self.made = number
            each = (time.monotonic() - self._began) / number
            if self._asked.least and number < steps and each > self._limits.remaining:
                return

    def _make_one(self, number: int) -> None:
        pools, folder = self._pools, self._pools.folder
        pools.reference.send({"kind": "next", "path": str(folder / "reference"), "keep": self._keeps})
        if number > 1:
            pools.nudged.send({"kind": "next", "path": str(folder / "nudged")})
            pools.tried.send({"kind": "go", "steps": 1, "keep": self._keeps})
        went = pools.answers(pools.tried, "went")
        self._lengthen(went)
        self.seen = seen_in([self.seen, *went])
        self._digests, unlike = _write_state(pools, number)
        one, other = (pools.answers(pool, "state")[0] for pool in (pools.reference, pools.nudged))
        self.coarse |= {*one["coarse"], *other["coarse"]}
        self.seen = seen_in([self.seen, _of_one_side(self.seen, one)])
        self._disagreement = self._disagreement or unlike or self._other_rates(went, one)
        if not (self._wide and self.seen["narrow"]):
            self._claimed = self._claimed or self.checks.values(number, went, one, other)
            if number == 1 and self._contract:
                self._claimed = self._claimed or self.checks.predictions()
        self._note_time()
        self._comparison.compare(number, *(load_file(folder / name) for name in ("rank0", "reference", "nudged")))

    def compared(self) -> tuple[Round, str | None]:
        """Returns what the steps show, and what of one device's state is another when its step is repeated."""
        found = self._comparison.round(self._precision, self.made, self._disagreement)
        unrepeatable, again = None, self._keeps
        if self._wide and (again or self._comparison.widened or self._claimed or found.verdict == "different"):
            why = self.checks.unrepeatable()
            again = again and why is None
            if why is not None and self._comparison.noisy:
                unrepeatable, found, self._claimed = why, self._comparison.not_widened(found), None
        if again and self._claimed is None:
            self._claimed = self.checks.reloaded(self._digests, self.made)
        if self._claimed is not None and found.verdict != "different":  # of what the states do not show already
            found = replace(found, disagreement=self._claimed, verdict="different")
        return found, unrepeatable

    def _lengthen(self, went: Sequence[Message]) -> None:
        """Gives the proof its share of the run, as far as this step tells how long the run will be."""
        if self._wide:
            seconds = max(s for answer in went for s in answer["seconds"][:1])
            times = self._pools.batch_size / self._asked.rows if self._asked.rows else 1.0
            self._limits.lengthen(went[0]["examples"], seconds, times)

    def _note_time(self) -> None:
        gradient_steps = GRADIENT_STEPS * (not self._pools.linear)
        # Those in a shorter precision are not counted among the steps ahead.
        ahead = self._asked.steps + gradient_steps - 1
        self._limits.step(time.monotonic() - self._began, 1 / (2 * self._asked.steps + gradient_steps), ahead)

    def _other_rates(self, went: Sequence[Message], whole: Message) -> str | None:
        """Returns which rank would drop by another rate than one device, and which; None: none would. A rank that
        computes a part of the network has a part of its dropout."""
        if not self._exact:
            return None
        one = set(whole["dropout"])
        for rank, answer in enumerate(went):
            own = set(answer["dropout"])
            if own - one or (one - own and not self._pools.whole):
                said = " and ".join(sorted(own)) or "nothing"
                return (
                    f"rank {rank} would drop by {said} where one device drops by {' and '.join(sorted(one)) or 'none'}"
                )
        return None


def seen_in(went: Sequence[Message]) -> Seen:
    """Collects what ranks have to name of their steps."""
    return {key: sorted({name for answer in went for name in answer[key]}) for key in SEEN}


def _write_state(pools: ProofWorkers, number: int) -> tuple[list[str], str | None]:
    """Has rank 0 write its state after a step, and checks that every rank's is the same to the bit. Returns the digests
    of all, and which one is not, where, and by how much."""
    folder = pools.folder
    answers = pools.ask(pools.tried, {"kind": "state", "path": str(folder / "rank0"), "ranks": [0]}, "state")
    digests = [answer["digest"] for answer in answers]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            pools.ask(pools.tried, {"kind": "state", "path": str(folder / "other"), "ranks": [rank]}, "state")
            found = largest(load_file(folder / "other"), load_file(folder / "rank0"), number)
            where = f"{found.name} differs by {found.absolute:.3g}"
            return digests, f"rank {rank} is not at rank 0's state after step {number}: {where}"
    return digests, None


def _of_one_side(tried: Seen, reference: Message) -> Seen:
    """Returns the draws that were made row by row on the ranks and not on one device, or the other way round: their
    shapes do not tell which of their dimensions the rows are, and each side has its own numbers."""
    return {**seen_in(()), "draws": sorted(set(tried["row_draws"]) ^ set(reference["row_draws"]))}
