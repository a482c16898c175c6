"""Prove a strategy: its state after every step against its reference's, tensor by tensor, in processes of their own.

Three sets of processes make the same steps: the strategy's, its reference's, and those of a reference that is led
astray by rounding alone, which shows how far rounding goes. A round compares them in one precision; between rounds the
same processes build anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from safetensors.torch import load_file

from apportion.api.contract_checks import ContractChecks, not_the_same, uncompared
from apportion.api.proof_workers import GRADIENT_STEPS, ProofRequest, ProofWorkers, must_fit
from apportion.comm.channel import Message
from apportion.errors import ApportionError, WorkerFailed
from apportion.planner.trials.trial import Candidate
from apportion.runtime.launched.running_ranks import RunningRanks
from apportion.runtime.proof.coarse_rounding import eps_of
from apportion.runtime.proof.comparison import FLOOR, Comparison, largest
from apportion.runtime.proof.limits import OutOfTimeError, ProofLimits
from apportion.runtime.proof.module_taps import Taps
from apportion.runtime.proof.proof import Proof, Round
from apportion.runtime.proof.tap_differences import TapDifference, first_difference

HALF = ("bfloat16", "float16")
"""The precisions that a run computes in under autocast, its weights in float32."""

MANY_SHARE = 0.5
"""The share of the time that is left which a step on many rows may take."""
SEEN = ("dropout", "row_draws", "accepted_draws", "draws", "narrow", "plain_draws")
"""The kinds of operations that are looked for in the steps of a proof."""
Seen = dict[str, list[str]]


def prove(asked: ProofRequest, ranks: RunningRanks | None = None) -> Proof:
    """Compare the states in float64, then the gradients, then the states in the run's own precision. Raises
    OutOfTimeError, OutOfMemoryError, and what a worker fails with.

    ``ranks``: those that make the strategy's steps; None starts processes here.
    """
    return _Proving(asked, ranks).proof()


class _Proving:
    """One proof under way."""

    def __init__(self, asked: ProofRequest, ranks: RunningRanks | None) -> None:
        self._asked, self._chosen, self._ranks = asked, asked.chosen, ranks
        self._replays = asked.chosen.strategy.replays(asked.chosen.launcher.workers or 1)
        self._limits = ProofLimits(asked.seconds, share=asked.share, run_steps=asked.run_steps, least=asked.least)
        self._own = "float32"
        self._named: list[str] = []
        self._cuts: list[str] = []
        """The parts of the proof that there was no time for."""
        self._gradients: Round | None = None
        self._drawn: list[str] = []
        self._further: Proof | None = None
        """The proof that followed, which has shown more."""
        self._many: Round | None = None
        self._rows = 0
        self._first: TapDifference | None = None
        """The first module that computes something else."""
        self._contract = self._asked.contract
        """True until the first round has compared what ranks predict, and the step after a state that was loaded."""
        self._unrepeatable: str | None = None
        self._compared: set[str] = set()
        """What of a step was compared besides its states."""
        self._hindered: dict[str, str] = {}
        """Why the rest of it could not be."""
        self._digests: list[str] = []
        """The digests of the ranks' states after the last step."""

    def proof(self) -> Proof:
        must_fit(self._asked, self._limits, self._asked.parameters, self._ranks)
        rounds = self._rounds()
        return self._found(rounds) if self._further is None else self._further

    def proof_by(self, pools: ProofWorkers) -> Proof:
        """Makes the proof by processes that have made another one of the same workload."""
        built = pools.take(self._asked, self._limits)
        self._own = built["precision"]
        rounds = self._wide_then_own(pools, built)
        self._step_on_many_rows(pools, rounds)
        return self._found(rounds)

    def _then(self, pools: ProofWorkers, rounds: Sequence[Round]) -> Proof | None:
        """Makes the proof that follows this one, by the same processes; None where none does, or for want of time."""
        if self._asked.then is None:
            return None
        found = self._found(rounds)
        asked = self._asked.then(found)
        if asked is None:
            return None
        try:
            further = _Proving(replace(asked, contract=False), self._ranks).proof_by(pools)
        except OutOfTimeError:
            return None
        except ValueError as error:
            if not asked.added:
                raise
            return replace(found, cuts=(*found.cuts, f"no steps were made on rare rows: {error}"))
        if asked.added:
            return found.with_rare_rows(further)
        return replace(further, uncompared=found.uncompared)

    def _found(self, rounds: Sequence[Round]) -> Proof:
        strategy = self._chosen.strategy
        return Proof(
            strategy=str(strategy),
            workers=self._chosen.launcher.workers or 1,
            hosts=self._asked.hosts,
            exact=strategy.exact,
            rounds=tuple(rounds),
            gradients=self._gradients,
            many=self._many,
            cuts=tuple(self._cuts),
            rows=self._rows,
            causes=self._causes(rounds),
            first=None if self._first is None else str(self._first),
            unrepeatable=self._unrepeatable,
            uncompared=uncompared(self._compared, self._hindered, self._why_uncompared()),
            by_design=(*self._named, *self._left_open(rounds)),
        )

    def _why_uncompared(self) -> str | None:
        if self._replays:
            return "its ranks go their own ways"
        return None if self._chosen.strategy.exact else "it is approximate"

    def _left_open(self, rounds: Sequence[Round]) -> list[str]:
        if self._unrepeatable is not None:  # what was measured is not of rounding
            return [self._unrepeatable]
        return [_open_question(r) for r in rounds if r.verdict == "undecided"]

    def _causes(self, rounds: Sequence[Round]) -> tuple[str, ...]:
        shown, workers = [*rounds, *filter(None, [self._gradients])], self._chosen.launcher.workers or 1
        if self._unrepeatable is not None:
            return (self._unrepeatable,)
        return tuple(likely_causes(shown, workers, self._drawn, self._first))

    def _rounds(self) -> list[Round]:
        known = False
        try:
            with ProofWorkers.started(self._asked, self._limits, "float64", self._ranks) as pools:
                built = pools.built()
                self._own, known = built["precision"], True
                rounds = self._wide_then_own(pools, built)
                self._step_on_many_rows(pools, rounds)
                self._further = self._then(pools, rounds)
                return rounds
        except (WorkerFailed, ValueError) as error:
            if not _fixes_dtype(error) or (known and self._own == "float64"):
                raise
            why = error
        with ProofWorkers.started(self._asked, self._limits, self._own, self._ranks) as pools:
            built = pools.built()
            if built["precision"] == "float64":
                raise why
            begun, self._own = self._own, built["precision"]
            steps = _many(self._chosen, self._asked.steps, built["steps"])
            return self._without_float64(pools, steps, begun, str(why))

    def _without_float64(self, pools: ProofWorkers, steps: int, begun: str, why: str) -> list[Round]:
        """Returns the rounds of a model that does not compute in float64, in worker pools that are built in the
        precision ``begun``: in float32, and in the run's own precision where that is shorter, which may leave the
        answer open."""
        precisions = ("float32", self._own) if self._own in HALF else (self._own,)
        named = f"the model does not compute in float64 ({why}): checked in {' and '.join(precisions)} alone"
        rounds: list[Round] = []
        for precision in precisions:
            if precision != begun or rounds:
                pools.again(precision)
            found, seen = self._round(pools, steps, precision)
            rounds.append(found)
            if precision == precisions[0]:
                self._limits.least_made()
                self._named, self._drawn = [*_by_design(seen), named], [*seen["draws"], *seen["plain_draws"]]
                if self._asked.least:
                    self._left_out("the gradients by themselves were not compared, for want of time")
                    return rounds
                self._gradients = self._gradient_round(pools, found, precision)
        return rounds

    def _wide_then_own(self, pools: ProofWorkers, built: Message) -> list[Round]:
        wide, seen = self._round(pools, _many(self._chosen, self._asked.steps, built["steps"]), "float64")
        self._limits.least_made()
        self._named, self._drawn = _by_design(seen), [*seen["draws"], *seen["plain_draws"]]
        if self._asked.brief and wide.verdict == "different" and not seen["narrow"]:
            with suppress(OutOfTimeError):
                self._gradients = self._gradient_round(pools, wide, "float64")  # they show what it comes from
            self._first = self._first_difference(pools, wide)
            return [wide]
        rounds = [wide]
        if seen["narrow"] and self._own != "float64":
            where = f"the model computes in float32 in places ({', '.join(seen['narrow'])})"
            kept = wide.verdict == "equal" and wide.share <= FLOOR
            self._named.append(
                f"{where}: equal in float64 all the same" if kept else f"{where}: checked in {self._own} alone"
            )
            rounds = [wide] if kept else []
        if not rounds and self._own in HALF:  # which may leave the answer open, where float32 does not
            pools.again("float32")
            rounds = [self._round(pools, wide.steps, "float32")[0]]
            self._named[-1] = f"{where}: checked in float32 and {self._own}"
        return self._rest(pools, wide, rounds)

    def _rest(self, pools: ProofWorkers, wide: Round, rounds: list[Round]) -> list[Round]:
        """Compares the gradients by themselves and the states in the run's own precision; what there is no time for is
        left out where float64 has shown its part."""
        left = "the gradients by themselves were not compared, for want of time"
        if self._asked.least and rounds:
            self._left_out(left)
            return rounds
        try:
            self._gradients = self._gradient_round(pools, wide, rounds[0].precision if rounds else self._own)
            if rounds and any(r.verdict == "different" for r in (rounds[0], self._gradients) if r is not None):
                self._first = self._first_difference(pools, rounds[0])
            if self._own == "float64" or (self._asked.brief and not self._proved()):
                return rounds or [wide]
            left = f"{self._own} was not compared, for want of time"
            pools.again(self._own)
            return [*rounds, self._round(pools, wide.steps, self._own)[0]]
        except OutOfTimeError:
            if not self._asked.brief or not rounds:
                raise
            self._left_out(left)
            return rounds

    def _left_out(self, what: str) -> None:
        self._named.append(what)
        self._cuts.append(what)

    def _proved(self) -> bool:
        return self._gradients is None or self._gradients.holds

    def _step_on_many_rows(self, pools: ProofWorkers, rounds: Sequence[Round]) -> None:
        """Compares one step on as many rows as the run has in a batch, or on the most that fit the time."""
        ranks = self._chosen.ranks if self._chosen.strategy.divides_batches else 1
        made = self._asked.rows or pools.batch_size
        self._rows = -(-made // ranks)
        if not self._asked.many or self._replays or not all(r.verdict == "equal" for r in rounds) or not self._proved():
            return
        rows = min(pools.batch_size, self._limits.rows_in_time(made, MANY_SHARE))
        if rows <= made or not self._chosen.strategy.exact or rounds[0].precision != "float64":
            return
        try:
            pools.again("float64", rows=rows)
            found = self._compare_steps(pools, 1, "float64")[0]
        except OutOfTimeError:  # what was compared before stands
            return
        if found.verdict != "undecided":
            self._many, self._rows = found, -(-rows // ranks)

    def _gradient_round(self, pools: ProofWorkers, states: Round, precision: str) -> Round | None:
        """Compares the change under plain SGD; where every optimizer is that already, the states have shown it."""
        if self._replays or not self._chosen.strategy.exact or (pools.linear and states.holds):
            return None
        pools.again(precision, gradients=True)
        return self._round(pools, min(GRADIENT_STEPS, states.steps), precision, gradients=True)[0]

    def _first_difference(self, pools: ProofWorkers, wide: Round) -> TapDifference | None:
        """Makes the step at which something differed once more, with taps on both sides; returns None where they show
        nothing."""
        if self._replays or not self._chosen.strategy.exact:
            return None
        gradients = wide.verdict != "different"
        wrong = self._gradients if gradients else wide
        assert wrong is not None
        if wrong.worst.relative <= wrong.bound and wrong.disagreement is not None:
            return None  # the states are the same, and so is all that leads to them
        before, folder = wrong.worst.step - 1, pools.folder
        try:
            pools.again("float64", gradients=gradients)
            pools.reference.send({"kind": "taps", "steps": before, "path": str(folder / "whole")})
            if before:
                pools.ask(pools.tried, {"kind": "go", "steps": before}, "went")
            told = pools.ask(pools.tried, {"kind": "taps", "path": str(folder / "part")}, "tapped")
            pools.answers(pools.reference, "tapped")
            names = ("whole0", *(f"part{rank}" for rank in range(len(told))))
            whole, *parts = (Taps.load(folder / name) for name in names)
            rows = [answer["rows"] for answer in told]
            return first_difference(whole, parts, rows=rows if len(set(rows)) > 1 or rows[0] < sum(rows) else None)
        except (OutOfTimeError, ApportionError, ValueError, OSError):  # the answer stands without it
            return None

    def _round(self, pools: ProofWorkers, steps: int, precision: str, *, gradients: bool = False) -> tuple[Round, Seen]:
        """Compares strategy, reference and the reference that is led astray step by step; or the strategy with its
        replay."""
        if self._replays:
            return self._compare_replay(pools, steps, precision)
        found, seen, coarse = self._compare_steps(pools, steps, precision)
        # In float64 what computes in less is named, and left to the run's own precision, unless that is float64 too.
        # Under autocast every operation rounds, and not the gradients alone: an optimizer that looks at the signs of
        # small ones shows it.
        if precision in HALF:
            coarse = coarse | {precision}
        if precision == "float64" and not (self._own == "float64" and seen["narrow"]):
            coarse = set()
        if found.verdict == "equal" or found.disagreement is not None or not coarse:
            return found, seen
        pools.again(precision, gradients=gradients, coarse=True)
        found, seen, _ = self._compare_steps(pools, steps, precision, max(coarse, key=eps_of))
        return found, seen

    def _compare_replay(self, pools: ProofWorkers, steps: int, precision: str) -> tuple[Round, Seen]:
        folder = pools.folder
        seen = _seen(pools.ask(pools.tried, {"kind": "go", "steps": steps}, "went"))
        disagreement = self._disagreement(pools, steps)
        pools.ask(pools.tried, {"kind": "log", "path": str(folder / "log")}, "log")
        order = {"kind": "next", "path": str(folder / "reference"), "log": str(folder / "log")}
        pools.ask(pools.reference, order, "state")
        expected = load_file(folder / "reference")
        worst = largest(load_file(folder / "rank0"), expected, steps)
        if worst.absolute:
            pools.ask(pools.reference, {**order, "path": str(folder / "again")}, "state")
            again = largest(load_file(folder / "again"), expected, steps)
            if again.absolute:
                self._unrepeatable = not_the_same("the replay", again.name, again.absolute)
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

    def _compare_steps(
        self, pools: ProofWorkers, steps: int, precision: str, coarsest: str | None = None
    ) -> tuple[Round, Seen, set[str]]:
        """Compares the states step by step; returns also the types in which the reference computes that are coarser
        than the precision. ``coarsest``: the type whose rounding is allowed for."""
        tried, reference, nudged, folder = pools.tried, pools.reference, pools.nudged, pools.folder
        began_step = time.monotonic()
        # All of them build and make the first step at once: what a model imports as it is built may take long.
        nudged.send({"kind": "next", "path": str(folder / "nudged")})
        tried.send({"kind": "go", "steps": 1})
        (began,) = pools.ask(pools.reference, {"kind": "start", "path": str(folder / "start")}, "started")
        eps = eps_of(coarsest or precision)
        comparison = Comparison(load_file(folder / "start"), began["weights"], eps=eps)
        checks = ContractChecks(pools, exact=self._chosen.strategy.exact, precision=precision, eps=eps)
        contract, self._contract = self._contract and precision == "float64", False
        disagreement, claimed, seen, coarse, made, keep = None, None, _seen(()), set[str](), 0, False
        for number in range(1, steps + 1):
            keep = number == steps and steps > 1 and contract and checks.repeats
            reference.send({"kind": "next", "path": str(folder / "reference"), "keep": keep})
            if number > 1:
                nudged.send({"kind": "next", "path": str(folder / "nudged")})
                tried.send({"kind": "go", "steps": 1, "keep": keep})
            went = pools.answers(tried, "went")
            if precision == "float64":
                seconds = max(s for answer in went for s in answer["seconds"][:1])
                times = pools.batch_size / self._asked.rows if self._asked.rows else 1.0
                self._limits.lengthen(went[0]["examples"], seconds, times)
            seen = _seen([seen, *went])
            found = self._disagreement(pools, number)
            one, other = (pools.answers(pool, "state")[0] for pool in (reference, nudged))
            coarse |= {*one["coarse"], *other["coarse"]}
            seen = _seen([seen, _of_one_side(seen, one)])
            disagreement = disagreement or found or self._other_rates(pools, went, one)
            if not (precision == "float64" and seen["narrow"]):
                claimed = claimed or checks.values(number, went, one, other)
                claimed = claimed or (checks.predictions() if number == 1 and contract else None)
            share = 1 / (2 * self._asked.steps + GRADIENT_STEPS * (not pools.linear))
            # Those in a shorter precision are not counted among the steps ahead.
            ahead = self._asked.steps + GRADIENT_STEPS * (not pools.linear) - 1
            self._limits.step(time.monotonic() - began_step, share, ahead)
            comparison.take(number, *(load_file(folder / name) for name in ("rank0", "reference", "nudged")))
            made = number
            if (
                self._asked.least
                and number < steps
                and (time.monotonic() - began_step) / number > self._limits.remaining
            ):
                self._left_out(f"{number} of {steps} steps were compared, for want of time")
                break
        self._compared |= checks.compared
        self._hindered |= checks.hindered
        compared = comparison.round(precision, made, disagreement)
        if precision == "float64" and (keep or comparison.widened or claimed or compared.verdict == "different"):
            why = checks.unrepeatable()
            keep = keep and why is None
            if why is not None and comparison.noisy:
                self._unrepeatable = self._unrepeatable or why
                compared, claimed = comparison.not_widened(compared), None
        claimed = claimed or (checks.reloaded(self._digests, made) if keep else None)
        self._compared |= checks.compared
        if claimed is not None and compared.verdict != "different":  # of what the states do not show already
            compared = replace(compared, disagreement=claimed, verdict="different")
        return replace(compared, coarsest=coarsest), seen, coarse

    def _other_rates(self, pools: ProofWorkers, went: Sequence[Message], whole: Message) -> str | None:
        """Returns which rank would drop by another rate than one device, and which; None: none would. A rank that
        computes a part of the network has a part of its dropout."""
        if not self._chosen.strategy.exact:
            return None
        one = set(whole["dropout"])
        for rank, answer in enumerate(went):
            own = set(answer["dropout"])
            if own - one or (one - own and not pools.whole):
                said = " and ".join(sorted(own)) or "nothing"
                return (
                    f"rank {rank} would drop by {said} where one device drops by {' and '.join(sorted(one)) or 'none'}"
                )
        return None

    def _disagreement(self, pools: ProofWorkers, number: int) -> str | None:
        """Checks that every rank's state is rank 0's, to the bit; returns which one is not, where, and by how much.
        Rank 0's is written in any case: what comes after compares it."""
        folder = pools.folder
        answers = pools.ask(pools.tried, {"kind": "state", "path": str(folder / "rank0"), "ranks": [0]}, "state")
        self._digests = [answer["digest"] for answer in answers]
        for rank, answer in enumerate(answers):
            if answer["digest"] != answers[0]["digest"]:
                pools.ask(pools.tried, {"kind": "state", "path": str(folder / "other"), "ranks": [rank]}, "state")
                found = largest(load_file(folder / "other"), load_file(folder / "rank0"), number)
                where = f"{found.name} differs by {found.absolute:.3g}"
                return f"rank {rank} is not at rank 0's state after step {number}: {where}"
        return None


def likely_causes(
    rounds: Sequence[Round], workers: int, drawn: Sequence[str], first: TapDifference | None = None
) -> Iterator[str]:
    """Yields what a difference is likely to come from, where it can be told. ``drawn``: what draws random numbers that
    each rank has for itself; ``first``: the first module that computes something else."""
    wrong = [r for r in rounds if r.verdict == "different"]
    factors = {round(r.worst.factor, 3) for r in wrong if r.worst.factor is not None}
    if workers > 1 and factors & {float(workers), round(1 / workers, 3)}:
        yield (
            f"what changes is off by the number of workers, {workers}: the loss is a sum where a mean is expected "
            '(reduction="mean"), or count= does not say how many terms it has'
        )
    if wrong and drawn:
        accepted = dict.fromkeys(place.rpartition("(")[2].rstrip(")") for _, _, place in map(_split, drawn))
        yield (
            f"it draws random numbers as it computes ({', '.join(drawn)}), and each rank draws its own: draw them in "
            "augment, keyed by example, which gives the same numbers on any number of workers; or accept it, which "
            "trains another network than one device does, with per_rank_draws="
            f"({', '.join(map(_quoted, accepted))},) in the Workload"
        )
    elif wrong and first is not None and not first.relation.same:
        yield from _of_first(first)


def _of_first(first: TapDifference) -> Iterator[str]:
    name = first.module or "the network"
    if first.what == "output":
        yield (
            f"{name} gives for the same rows what one device does not: it looks at the other rows of the batch "
            "(statistics of a batch, rows that depend on each other), or at its rank"
        )
    elif first.what == "gradient of the output":
        yield (
            "the outputs are one device's and their gradients are not: the loss is not the mean of as many terms as "
            "count= says (labels left out, class weights), it couples the rows, or collate gave other rows than it was "
            "given"
        )


def _split(drawn: str) -> tuple[str, str, str]:
    return drawn.partition(" in ")


def _quoted(name: str) -> str:
    return f'"{name}"'


def _many(chosen: Candidate, asked: int, there: int) -> int:
    """Returns the steps to make: as many as asked for, or as every worker can make."""
    workers = chosen.launcher.workers or 1
    if not chosen.strategy.replays(workers):
        return min(asked, there)
    if there < workers:
        raise ValueError(f"{there} batches are too few for {workers} workers: use fewer workers, or more steps or data")
    return min(asked, there // workers)


def _open_question(found: Round) -> str:
    if found.noise == float("inf"):
        return f"{found.precision}: one device's own weights are not finite after {found.steps} steps: nothing is shown"
    if found.coarsest is not None:
        return (
            f"{found.precision}: the model computes in {found.coarsest} in places, whose rounding makes up to "
            f"{found.noise:.2g} of its change in {found.steps} steps: too much to tell a small mistake from it"
        )
    return (
        f"{found.precision}: in {found.steps} steps this network makes {found.noise:.2g} of its change by rounding "
        "alone, too much to tell a mistake from it: nothing is shown; use fewer steps, or another learning rate"
    )


def _fixes_dtype(error: WorkerFailed | ValueError) -> bool:
    """Tells whether the model, by what it says or by the line that failed, wants another type than float64."""
    text = f"{error} {getattr(error, 'where', None)}".lower()
    return any(sign in text for sign in ("dtype", "scalar type", "double", "same type", "float64"))


def _by_design(seen: Mapping[str, list[str]]) -> list[str]:
    named = []
    if seen["dropout"]:
        named.append(f"dropout draws differ between ranks by design: checked without ({', '.join(seen['dropout'])})")
    if seen["row_draws"]:
        named.append(
            f"random numbers for each row ({', '.join(seen['row_draws'])}) are drawn by each rank for its own rows, as "
            "those of dropout are: checked with the same numbers for the same row"
        )
    if seen["accepted_draws"]:
        named.append(
            f"each rank draws random numbers of its own ({', '.join(seen['accepted_draws'])}), which per_rank_draws= "
            "accepts: checked with one number for all"
        )
    if seen["draws"]:
        named.append(
            f"the model draws random numbers as it computes ({', '.join(seen['draws'])}), each rank its own: "
            "this difference is not rounding; draw them in augment, keyed by example, to have them equal"
        )
    return named


def _of_one_side(tried: Seen, reference: Message) -> Seen:
    """Returns the draws that were made row by row on the ranks and not on one device, or the other way round: their
    shapes do not tell which of their dimensions the rows are, and each side has its own numbers."""
    return {**_seen(()), "draws": sorted(set(tried["row_draws"]) ^ set(reference["row_draws"]))}


def _seen(went: Sequence[Message]) -> Seen:
    """Collects what ranks have to name of a step."""
    return {key: sorted({name for answer in went for name in answer[key]}) for key in SEEN}
