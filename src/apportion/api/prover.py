"""Prove a strategy: its state after every step against its reference's, tensor by tensor, in processes of their own.

Three sets of processes make the same steps: the strategy's, its reference's, and those of a reference that is led
astray by rounding alone, which shows how far rounding goes. A round compares them in one precision; between rounds the
same processes build anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from apportion.api.contract_checks import uncompared
from apportion.api.proof_rounds import HALF, ProofRounds
from apportion.api.proof_workers import GRADIENT_STEPS, ProofRequest, ProofWorkers, must_fit
from apportion.comm.channel import Message
from apportion.errors import ApportionError, WorkerFailed
from apportion.planner.trials.trial import Candidate
from apportion.runtime.launched.ranks import Ranks
from apportion.runtime.proof.comparison import FLOOR
from apportion.runtime.proof.limits import OutOfTimeError, ProofLimits
from apportion.runtime.proof.module_taps import TapDifference, Taps, first_difference
from apportion.runtime.proof.proof import Proof, Round

MANY_SHARE = 0.5
"""The share of the time that is left which a step on many rows may take."""


def prove(asked: ProofRequest, ranks: Ranks) -> Proof:
    """Compare the states in float64, then the gradients, then the states in the run's own precision. Raises
    OutOfTimeError, OutOfMemoryError, and what a worker fails with.

    ``ranks``: those that make the strategy's steps.
    """
    return _Proving(asked, ranks).proof()


class _Proving:
    """One proof under way."""

    def __init__(self, asked: ProofRequest, ranks: Ranks) -> None:
        self._asked, self._chosen, self._ranks = asked, asked.chosen, ranks
        self._limits = ProofLimits(asked.seconds, share=asked.share, run_steps=asked.run_steps, least=asked.least)
        self._compare = ProofRounds(asked, self._limits)
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

    def proof(self) -> Proof:
        must_fit(self._asked, self._limits, self._asked.parameters, self._ranks)
        rounds = self._rounds()
        return self._found(rounds) if self._further is None else self._further

    def proof_by(self, pools: ProofWorkers) -> Proof:
        """Makes the proof by processes that have made another one of the same workload."""
        built = pools.take(self._asked, self._limits)
        self._compare.own = built["precision"]
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
            cuts=(*self._compare.cuts, *self._cuts),
            rows=self._rows,
            causes=self._causes(rounds),
            first=None if self._first is None else str(self._first),
            unrepeatable=self._compare.unrepeatable,
            uncompared=uncompared(self._compare.compared_beside, self._compare.hindered, self._why_uncompared()),
            by_design=(*self._named, *self._left_open(rounds)),
        )

    def _why_uncompared(self) -> str | None:
        if self._compare.replays:
            return "its ranks go their own ways"
        return None if self._chosen.strategy.exact else "it is approximate"

    def _left_open(self, rounds: Sequence[Round]) -> list[str]:
        if self._compare.unrepeatable is not None:  # what was measured is not of rounding
            return [self._compare.unrepeatable]
        return [open_question(r) for r in rounds if r.verdict == "undecided"]

    def _causes(self, rounds: Sequence[Round]) -> tuple[str, ...]:
        shown, workers = [*rounds, *filter(None, [self._gradients, self._many])], self._chosen.launcher.workers or 1
        if self._compare.unrepeatable is not None:
            return (self._compare.unrepeatable,)
        return tuple(likely_causes(shown, workers, self._drawn, self._first))

    def _rounds(self) -> list[Round]:
        known = False
        try:
            with ProofWorkers.started(self._asked, self._limits, "float64", self._ranks) as pools:
                built = pools.built()
                self._compare.own, known = built["precision"], True
                rounds = self._wide_then_own(pools, built)
                self._step_on_many_rows(pools, rounds)
                self._further = self._then(pools, rounds)
                return rounds
        except (WorkerFailed, ValueError) as error:
            if not _fixes_dtype(error) or (known and self._compare.own == "float64"):
                raise
            why = error
        with ProofWorkers.started(self._asked, self._limits, self._compare.own, self._ranks) as pools:
            built = pools.built()
            if built["precision"] == "float64":
                raise why
            begun, self._compare.own = self._compare.own, built["precision"]
            steps = _many(self._chosen, self._asked.steps, built["steps"])
            return self._without_float64(pools, steps, begun, str(why))

    def _without_float64(self, pools: ProofWorkers, steps: int, begun: str, why: str) -> list[Round]:
        """Returns the rounds of a model that does not compute in float64, in worker pools that are built in the
        precision ``begun``: in float32, and in the run's own precision where that is shorter, which may leave the
        answer open."""
        precisions = ("float32", self._compare.own) if self._compare.own in HALF else (self._compare.own,)
        named = f"the model does not compute in float64 ({why}): checked in {' and '.join(precisions)} alone"
        rounds: list[Round] = []
        for precision in precisions:
            if precision != begun or rounds:
                pools.again(precision)
            found, seen = self._compare.round(pools, steps, precision)
            rounds.append(found)
            if precision == precisions[0]:
                self._limits.least_made()
                self._named, self._drawn = [*by_design(seen), named], [*seen["draws"], *seen["plain_draws"]]
                if self._asked.least:
                    self._left_out(pools, found, self._compare.own)
                    return rounds
                self._gradients = self._gradient_round(pools, found, precision)
        return rounds

    def _wide_then_own(self, pools: ProofWorkers, built: Message) -> list[Round]:
        wide, seen = self._compare.round(pools, _many(self._chosen, self._asked.steps, built["steps"]), "float64")
        self._limits.least_made()
        self._named, self._drawn = by_design(seen), [*seen["draws"], *seen["plain_draws"]]
        if self._asked.brief and wide.verdict == "different" and not seen["narrow"]:
            with suppress(OutOfTimeError):
                self._gradients = self._gradient_round(pools, wide, "float64")  # they show what it comes from
            self._first = self._first_difference(pools, wide)
            return [wide]
        rounds = [wide]
        if seen["narrow"] and self._compare.own != "float64":
            where = f"the model computes in float32 in places ({', '.join(seen['narrow'])})"
            kept = wide.verdict == "equal" and wide.share <= FLOOR
            self._named.append(
                f"{where}: equal in float64 all the same" if kept else f"{where}: checked in {self._compare.own} alone"
            )
            rounds = [wide] if kept else []
        if not rounds and self._compare.own in HALF:  # which may leave the answer open, where float32 does not
            pools.again("float32")
            rounds = [self._compare.round(pools, wide.steps, "float32")[0]]
            self._named[-1] = f"{where}: checked in float32 and {self._compare.own}"
        return self._rest(pools, wide, rounds)

    def _rest(self, pools: ProofWorkers, wide: Round, rounds: list[Round]) -> list[Round]:
        """Compares the gradients by themselves and the states in the run's own precision; what cannot be done in time
        is left out where float64 has shown its part."""
        if self._asked.least and rounds:
            self._left_out(pools, wide, self._compare.own)
            return rounds
        compared = False
        try:
            self._gradients = self._gradient_round(pools, wide, rounds[0].precision if rounds else self._compare.own)
            compared = True
            if rounds and any(r.verdict == "different" for r in (rounds[0], self._gradients) if r is not None):
                self._first = self._first_difference(pools, rounds[0])
            if self._compare.own == "float64" or (self._asked.brief and not self._proved()):
                return rounds or [wide]
            pools.again(self._compare.own)
            return [*rounds, self._compare.round(pools, wide.steps, self._compare.own)[0]]
        except OutOfTimeError:
            if not self._asked.brief or not rounds:
                raise
            self._left_out(pools, wide, self._compare.own, gradients=not compared)
            return rounds

    def _left_out(self, pools: ProofWorkers, states: Round, precision: str, *, gradients: bool = True) -> None:
        """Notes that there was no time for the precision, where it is not that of the states, nor for the gradients by
        themselves (``gradients``), where they show what the states do not."""
        left = []
        if gradients and self._gradients_show_more(pools, states):
            left.append("the gradients by themselves were not compared, for want of time")
        if precision != states.precision:
            left.append(f"{precision} was not compared, for want of time")
        self._named += left
        self._cuts += left

    def _proved(self) -> bool:
        return self._gradients is None or self._gradients.holds

    def _step_on_many_rows(self, pools: ProofWorkers, rounds: Sequence[Round]) -> None:
        """Compares one step on as many rows as the run has in a batch, or on the most that fit the time."""
        ranks = self._chosen.ranks if self._chosen.strategy.divides_batches else 1
        made = self._asked.rows or pools.batch_size
        self._rows = -(-made // ranks)
        equal = all(r.verdict == "equal" for r in rounds) and self._proved()
        if not self._asked.many or self._compare.replays or not equal:
            return
        rows = min(pools.batch_size, self._limits.rows_in_time(made, MANY_SHARE))
        if rows <= made or not self._chosen.strategy.exact or rounds[0].precision != "float64":
            return
        try:
            pools.again("float64", rows=rows)
            found = self._compare.first_step(pools)
        except OutOfTimeError:  # what was compared before stands
            return
        if found.verdict != "undecided":
            self._many, self._rows = found, -(-rows // ranks)

    def _gradients_show_more(self, pools: ProofWorkers, states: Round) -> bool:
        """Tells whether the gradients are compared by themselves: where every optimizer is plain SGD, the states have
        shown them."""
        return not self._compare.replays and self._chosen.strategy.exact and not (pools.linear and states.holds)

    def _gradient_round(self, pools: ProofWorkers, states: Round, precision: str) -> Round | None:
        """Compares the change under plain SGD; None where that shows nothing more."""
        if not self._gradients_show_more(pools, states):
            return None
        pools.again(precision, gradients=True)
        return self._compare.round(pools, min(GRADIENT_STEPS, states.steps), precision, gradients=True)[0]

    def _first_difference(self, pools: ProofWorkers, wide: Round) -> TapDifference | None:
        """Makes the step at which something differed once more, with taps on both sides; returns None where they show
        nothing."""
        if self._compare.replays or not self._chosen.strategy.exact:
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
            tapped = pools.ask(pools.tried, {"kind": "taps", "path": str(folder / "part")}, "tapped")
            pools.answers(pools.reference, "tapped")
            names = ("whole0", *(f"part{rank}" for rank in range(len(tapped))))
            whole, *parts = (Taps.load(folder / name) for name in names)
            rows = [answer["rows"] for answer in tapped]
            return first_difference(whole, parts, rows=rows if len(set(rows)) > 1 or rows[0] < sum(rows) else None)
        except (OutOfTimeError, ApportionError, ValueError, OSError):  # the answer stands without it
            return None


def _many(chosen: Candidate, asked: int, there: int) -> int:
    """Returns the steps to make: as many as asked for, or as every worker can make."""
    workers = chosen.launcher.workers or 1
    if not chosen.strategy.replays(workers):
        return min(asked, there)
    if there < workers:
        raise ValueError(f"{there} batches are too few for {workers} workers: use fewer workers, or more steps or data")
    return min(asked, there // workers)


def _fixes_dtype(error: WorkerFailed | ValueError) -> bool:
    """Tells whether the model, by what it says or by the line that failed, wants another type than float64."""
    text = f"{error} {getattr(error, 'where', None)}".lower()
    return any(sign in text for sign in ("dtype", "scalar type", "double", "same type", "float64"))


# The words of a proof: what a difference is likely to come from, what was left open, and what differs by design.


def likely_causes(
    rounds: Sequence[Round], workers: int, drawn: Sequence[str], first: TapDifference | None = None
) -> Iterator[str]:
    """Yields what a difference is likely to come from, as far as the rounds show it. ``drawn``: what draws random
    numbers that each rank has for itself; ``first``: the first module that computes something else."""
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


def open_question(found: Round) -> str:
    """Returns why a round leaves the answer open, and what would close it."""
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


def by_design(seen: Mapping[str, list[str]]) -> list[str]:
    """Returns what ranks do otherwise than one device by design, as it was seen in the steps of a proof."""
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
