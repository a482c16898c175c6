"""Prove a strategy: its state after every step against its reference's, tensor by tensor, in processes of their own.

Three sets of processes make the same steps: the strategy's, its reference's, and those of a reference that is led
astray by rounding alone, which shows how far rounding goes. A round compares them in one precision; between rounds the
same processes build anew.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from apportion.comm.channel import Message
from apportion.core.workload import Workload
from apportion.errors import ApportionError, WorkerFailed
from apportion.planner.trials.trial import Candidate
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.budget import ProofSteps, comparing
from apportion.runtime.proof.coarse_rounding import eps_of
from apportion.runtime.proof.proof import FLOOR, Comparison, Proof, Round, largest
from apportion.runtime.proof.tap_differences import first_difference
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job

STEP_SECONDS = 600.0
HALF = ("bfloat16", "float16")
"""The precisions that a run computes in under autocast, its weights in float32."""
WARMING = 2.0
"""The first step of a process takes up to this many times as long as those after it."""
GRADIENT_STEPS = 2
"""The number of steps of rate 1, which are few, since a network would not stand many."""

SEEN = ("dropout", "draws", "narrow", "plain_draws")
"""The kinds of operations that are looked for in the steps of a proof."""
Seen = dict[str, list[str]]


COPIES = 5
"""A process of a proof holds this many times the bytes of the weights: weights, gradients, two slots, and the state
that it gives."""
SLOTS = 3
"""A state has this many elements for each weight: the weight itself, and two slots of Adam's."""
COMPARED = 12
"""The comparison holds this many times the bytes of the weights: four states of weights and two slots."""


class OutOfTimeError(Exception):
    """The time that a proof was given is over; says how much it needs."""


class OutOfMemoryError(Exception):
    """The memory that a proof needs is not there; says how much that is."""


@dataclass(frozen=True, kw_only=True)
class ProofRequest:
    """A request to prove a strategy, and how thoroughly."""

    workload: Workload | str
    chosen: Candidate
    steps: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the workload that the run replaces."""
    rows: int = 0
    """The examples in a batch; 0: the workload's own number."""
    short: bool = False
    """True where the proof is made on the beginnings of the sequences."""
    seconds: float | None = None
    """The seconds that the proof may take; None: as long as it does."""
    parameters: int = 0
    """The number of parameters of the network, where that is known before it is built; else 0."""
    brief: bool = False
    """True where a first difference is enough."""
    plain: tuple[str, ...] = ()
    """The fast paths that are switched off."""
    run_steps: int = 0
    """The number of steps of the run that waits for the proof."""
    share: float = 0.0
    """The share of the run that the proof may take, where that is more than ``seconds``."""


def prove(asked: ProofRequest) -> Proof:
    """Compare the states in float64, then the gradients, then the states in the run's own precision. Raises
    OutOfTimeError, OutOfMemoryError, and what a worker fails with."""
    return _Proving(asked).proof()


class _Proving:
    """One proof under way."""

    def __init__(self, asked: ProofRequest) -> None:
        self._asked, self._chosen = asked, asked.chosen
        self._replays = asked.chosen.strategy.replays(asked.chosen.launcher.workers or 1)
        self._deadline = None if asked.seconds is None else time.monotonic() + asked.seconds
        self._own = "float32"
        self._named: list[str] = []
        self._gradients: Round | None = None
        self._drawn: list[str] = []
        self._first: str | None = None
        """The first module that computes something else."""
        self._linear = False
        self._began = time.monotonic()
        self._bytes = 0
        self._progress = 0.0
        """The share of the proof that is done."""
        self._proof_steps = ProofSteps()
        self._batch_size = 0

    def proof(self) -> Proof:
        self._must_fit(self._asked.parameters)
        rounds = self._rounds()
        strategy = self._chosen.strategy
        return Proof(
            strategy=str(strategy),
            workers=self._chosen.launcher.workers or 1,
            exact=strategy.exact,
            rounds=tuple(rounds),
            gradients=self._gradients,
            causes=tuple(
                likely_causes(
                    [*rounds, *filter(None, [self._gradients])], self._chosen.launcher.workers or 1, self._drawn
                )
            ),
            first=self._first,
            by_design=(*self._named, *(_open_question(r) for r in rounds if r.verdict == "undecided")),
        )

    def _rounds(self) -> list[Round]:
        known = False
        try:
            with self._crews("float64") as crews:
                built = self._built(crews)
                self._own, known = built["precision"], True
                return self._wide_then_own(crews, built)
        except (WorkerFailed, ValueError) as error:
            if not _fixes_dtype(error) or (known and self._own == "float64"):
                raise
            why = error
        with self._crews(self._own) as crews:
            built = self._built(crews)
            if built["precision"] == "float64":
                raise why
            begun, self._own = self._own, built["precision"]
            steps = _many(self._chosen, self._asked.steps, built["steps"])
            return self._without_float64(crews, steps, begun, str(why))

    def _without_float64(self, crews: Sequence[WorkerPool], steps: int, begun: str, why: str) -> list[Round]:
        """Returns the rounds of a model that does not compute in float64, in worker pools that are built in the
        precision ``begun``: in float32, and in the run's own precision where that is shorter, which may leave the
        answer open."""
        precisions = ("float32", self._own) if self._own in HALF else (self._own,)
        named = f"the model does not compute in float64 ({why}): checked in {' and '.join(precisions)} alone"
        rounds: list[Round] = []
        for precision in precisions:
            if precision != begun or rounds:
                self._again(crews, precision)
            found, seen = self._round(crews, steps, precision)
            rounds.append(found)
            if precision == precisions[0]:
                self._named, self._drawn = [*_by_design(seen), named], seen["plain_draws"]
                self._gradients = self._gradient_round(crews, found, precision)
        return rounds

    def _wide_then_own(self, crews: Sequence[WorkerPool], built: Message) -> list[Round]:
        wide, seen = self._round(crews, _many(self._chosen, self._asked.steps, built["steps"]), "float64")
        self._named, self._drawn = _by_design(seen), seen["plain_draws"]
        if self._asked.brief and wide.verdict == "different":
            self._gradients = self._gradient_round(crews, wide, "float64")  # they show what a difference comes from
            self._first = self._first_difference(crews, wide)
            return [wide]
        rounds = [wide]
        if seen["narrow"] and self._own != "float64":
            where = f"the model computes in float32 in places ({', '.join(seen['narrow'])})"
            kept = wide.verdict == "equal" and wide.worst.relative <= FLOOR
            self._named.append(
                f"{where}: equal in float64 all the same" if kept else f"{where}: checked in {self._own} alone"
            )
            rounds = [wide] if kept else []
        if not rounds and self._own in HALF:  # which may leave the answer open, where float32 does not
            self._again(crews, "float32")
            rounds = [self._round(crews, wide.steps, "float32")[0]]
            self._named[-1] = f"{where}: checked in float32 and {self._own}"
        self._gradients = self._gradient_round(crews, wide, rounds[0].precision if rounds else self._own)
        if rounds and any(r.verdict == "different" for r in (rounds[0], self._gradients) if r is not None):
            self._first = self._first_difference(crews, rounds[0])
        if self._own == "float64" or (self._asked.brief and not self._proved()):
            return rounds or [wide]
        self._again(crews, self._own)
        return [*rounds, self._round(crews, wide.steps, self._own)[0]]

    def _proved(self) -> bool:
        return self._gradients is None or self._gradients.holds

    def _gradient_round(self, crews: Sequence[WorkerPool], states: Round, precision: str) -> Round | None:
        """Compares the change under plain SGD; where every optimizer is that already, the states have shown it."""
        if self._replays or not self._chosen.strategy.exact or (self._linear and states.holds):
            return None
        self._again(crews, precision, gradients=True)
        return self._round(crews, min(GRADIENT_STEPS, states.steps), precision, gradients=True)[0]

    def _first_difference(self, crews: Sequence[WorkerPool], wide: Round) -> str | None:
        """Makes the step at which something differed once more, with taps on both sides; returns None where they show
        nothing."""
        if self._replays or not self._chosen.strategy.exact:
            return None
        gradients = wide.verdict != "different"
        wrong = self._gradients if gradients else wide
        assert wrong is not None
        tried, reference, before = crews[0], crews[1], wrong.worst.step - 1
        try:
            self._again(crews, "float64", gradients=gradients)
            with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
                reference.send({"kind": "taps", "steps": before, "path": f"{folder}/whole"})
                if before:
                    self._ask(tried, {"kind": "go", "steps": before}, "went")
                told = self._ask(tried, {"kind": "taps", "path": f"{folder}/part"}, "tapped")
                self._answers(reference, "tapped")
                whole, *parts = (
                    pickle.loads(Path(folder, name).read_bytes())
                    for name in ("whole0", *(f"part{rank}" for rank in range(len(told))))
                )
            rows = [answer["rows"] for answer in told]
            found = first_difference(whole, parts, rows=rows if len(set(rows)) > 1 or rows[0] < sum(rows) else None)
        except (OutOfTimeError, ApportionError, ValueError, OSError):  # the answer stands without it
            return None
        return None if found is None else str(found)

    # The processes

    @contextmanager
    def _crews(self, precision: str) -> Iterator[list[WorkerPool]]:
        """Starts the strategy's processes, the reference's, and those of a reference that is led astray by rounding,
        where rounding is allowed for."""
        jobs = self._jobs(precision)
        alone = Local(workers=1, threads=jobs[1].threads, device="cpu")
        launched = [
            ("steps", self._chosen.launcher, self._chosen.ranks),
            ("reference", alone, 1),
            ("reference", alone, 1),
        ]
        with ExitStack() as stack:
            crews = []
            for (target, where, ranks), job in zip(launched[: 2 if self._replays else 3], jobs, strict=False):
                crews.append(WorkerPool(where, f"apportion.runtime.worker.entry:{target}", job, ranks))
                stack.callback(crews[-1].close)
            yield crews

    def _jobs(self, precision: str, *, gradients: bool = False, coarse: bool = False) -> tuple[Job, Job, Job]:
        asked, launcher, ranks = self._asked, self._chosen.launcher, self._chosen.ranks
        steps = min(asked.steps, GRADIENT_STEPS) if gradients else asked.steps
        tried = Job(
            workload=asked.workload,
            strategy=self._chosen.strategy,
            launcher=str(launcher),
            threads=launcher.threads_each(ranks),
            device=launcher.device,
            changes={
                **asked.changes,
                "precision": precision,
                **({"compile": False} if precision == "float64" or asked.rows else {}),
            },
            workers=launcher.workers or 1,
            proof=True,
            rows=asked.rows,
            short=asked.short,
            cut=steps if steps > 1 and self._chosen.strategy.exact else 0,
            gradients=gradients,
            plain=asked.plain,
        )
        # A sum by other threads is another sum: what is to have the same bits has as many.
        single = replace(tried, threads=tried.threads if self._replays else 1, device="cpu")
        # Weights stay float32 under autocast; it is the gradients that come in the shorter type.
        weights = "float64" if precision == "float64" else "float32"
        return tried, single, replace(single, nudge=eps_of(weights), jitter=eps_of(precision) / 2, coarse=coarse)

    def _again(
        self, crews: Sequence[WorkerPool], precision: str, *, gradients: bool = False, coarse: bool = False
    ) -> None:
        """Lets all of them build anew, in another precision or with other optimizers; ``coarse``: the reference that is
        led astray rounds as the coarsest types of the model do."""
        for crew, job in zip(crews, self._jobs(precision, gradients=gradients, coarse=coarse), strict=False):
            changed = {
                name: getattr(job, name) for name in ("changes", "nudge", "jitter", "coarse", "gradients", "cut")
            }
            crew.send({"kind": "again", "job": changed})
        self._built(crews)

    def _built(self, crews: Sequence[WorkerPool]) -> Message:
        """Returns what the strategy's first rank tells once everything is built."""
        told = [self._answers(crew, "built") for crew in crews]
        self._linear, self._batch_size = told[0][0]["linear"], told[0][0]["batch_size"]
        self._must_fit(told[0][0]["parameters"])
        return told[0][0]

    def _must_fit(self, parameters: int) -> None:
        """Raises OutOfMemoryError where all the processes together would not fit what is free."""
        processes = self._chosen.ranks + 2
        self._bytes = parameters * 8 * (COPIES * processes + COMPARED)
        free = _free_bytes()
        if self._deadline is not None and self._bytes > free:
            seconds = comparing(SLOTS * parameters, 2 * self._asked.steps + GRADIENT_STEPS)
            raise OutOfMemoryError(
                f"it needs {self._bytes / 1e9:.3g} GB of memory, of which {free / 1e9:.3g} GB are free, and at least "
                f"{seconds:.0f} s"
            )

    def _lengthen(self, went: Sequence[Message]) -> None:
        """Gives the proof its share of the run, as far as its own steps tell how long the run will be."""
        self._proof_steps.take(went[0]["examples"], max(s for answer in went for s in answer["seconds"][:1]))
        if self._deadline is not None:
            times = self._batch_size / self._asked.rows if self._asked.rows else 1.0
            run = self._asked.run_steps * self._proof_steps.run_step(times)
            self._deadline = max(self._deadline, self._began + self._asked.share * run)

    def _must_end_in_time(self, took: float) -> None:
        """Raises OutOfTimeError where the first step took so long that the others cannot end in time; those in a
        shorter precision are not counted."""
        if self._deadline is None:
            return
        steps = self._asked.steps + GRADIENT_STEPS * (not self._linear)
        if time.monotonic() + took / WARMING * (steps - 1) > self._deadline:
            self._progress = 1 / (steps + self._asked.steps)
            raise self._out_of_time()

    def _out_of_time(self) -> OutOfTimeError:
        spent = time.monotonic() - self._began
        about = f"about {spent / self._progress:.0f} s" if self._progress else f"more than {spent:.0f} s"
        return OutOfTimeError(f"it needs {about} and {self._bytes / 1e9:.2g} GB of memory")

    def _ask(self, crew: WorkerPool, order: Mapping[str, Any], kind: str) -> list[Message]:
        crew.send(order)
        return self._answers(crew, kind)

    def _answers(self, crew: WorkerPool, kind: str) -> list[Message]:
        left = STEP_SECONDS if self._deadline is None else min(STEP_SECONDS, self._deadline - time.monotonic())
        if left <= 0:
            raise self._out_of_time()
        try:
            return crew.answers(kind, left)
        except WorkerFailed:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise self._out_of_time() from None
            raise

    # A round

    def _round(
        self, crews: Sequence[WorkerPool], steps: int, precision: str, *, gradients: bool = False
    ) -> tuple[Round, Seen]:
        """Compares strategy, reference and the reference that is led astray step by step; or the strategy with its
        replay."""
        if self._replays:
            with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
                return self._compare_replay(crews, steps, precision, Path(folder))
        found, seen, coarse = self._compare_steps(crews, steps, precision)
        # In float64 what computes in less is named, and left to the run's own precision. Under autocast every operation
        # rounds, and not the gradients alone: an optimizer that looks at the signs of small ones shows it.
        if precision in HALF:
            coarse = coarse | {precision}
        if found.verdict == "equal" or found.disagreement is not None or precision == "float64" or not coarse:
            return found, seen
        self._again(crews, precision, gradients=gradients, coarse=True)
        found, seen, _ = self._compare_steps(crews, steps, precision, max(coarse, key=eps_of))
        return found, seen

    def _compare_replay(
        self, crews: Sequence[WorkerPool], steps: int, precision: str, folder: Path
    ) -> tuple[Round, Seen]:
        tried, reference = crews
        seen = _seen(self._ask(tried, {"kind": "go", "steps": steps}, "went"))
        disagreement = self._disagreement(tried, steps, folder)
        self._ask(tried, {"kind": "log", "path": str(folder / "log")}, "log")
        self._ask(reference, {"kind": "next", "path": str(folder / "reference"), "log": str(folder / "log")}, "state")
        expected = load_file(folder / "reference")
        worst = largest(load_file(folder / "rank0"), expected, steps)
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
        self, crews: Sequence[WorkerPool], steps: int, precision: str, coarsest: str | None = None
    ) -> tuple[Round, Seen, set[str]]:
        """Compares the states step by step; returns also the types in which the reference computes that are coarser
        than the precision. ``coarsest``: the type whose rounding is allowed for."""
        with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
            return self._compared(crews, steps, precision, coarsest, Path(folder))

    def _compared(
        self, crews: Sequence[WorkerPool], steps: int, precision: str, coarsest: str | None, folder: Path
    ) -> tuple[Round, Seen, set[str]]:
        tried, reference, nudged = crews
        began_step = time.monotonic()
        # All of them build and make the first step at once: what a model imports as it is built may take long.
        nudged.send({"kind": "next", "path": str(folder / "nudged")})
        tried.send({"kind": "go", "steps": 1})
        (began,) = self._ask(reference, {"kind": "start", "path": str(folder / "start")}, "started")
        eps = eps_of(coarsest or precision)
        comparison = Comparison(load_file(folder / "start"), began["weights"], eps=eps)
        disagreement, seen, coarse = None, _seen(()), set[str]()
        for number in range(1, steps + 1):
            reference.send({"kind": "next", "path": str(folder / "reference")})
            if number > 1:
                nudged.send({"kind": "next", "path": str(folder / "nudged")})
                tried.send({"kind": "go", "steps": 1})
            went = self._answers(tried, "went")
            if precision == "float64":
                self._lengthen(went)
            seen = _seen([seen, *went])
            found = self._disagreement(tried, number, folder)
            disagreement = disagreement or found
            for crew in (reference, nudged):
                coarse |= {name for answer in self._answers(crew, "state") for name in answer["coarse"]}
            if self._progress == 0.0:
                self._must_end_in_time(time.monotonic() - began_step)
            self._progress += 1 / (2 * self._asked.steps + GRADIENT_STEPS)
            comparison.take(number, *(load_file(folder / name) for name in ("rank0", "reference", "nudged")))
        return replace(comparison.round(precision, steps, disagreement), coarsest=coarsest), seen, coarse

    def _disagreement(self, tried: WorkerPool, number: int, folder: Path) -> str | None:
        """Checks that every rank's state is rank 0's, to the bit; returns which one is not, where, and by how much.
        Rank 0's is written in any case: what comes after compares it."""
        answers = self._ask(tried, {"kind": "state", "path": str(folder / "rank0"), "ranks": [0]}, "state")
        for rank, answer in enumerate(answers):
            if answer["digest"] != answers[0]["digest"]:
                self._ask(tried, {"kind": "state", "path": str(folder / "other"), "ranks": [rank]}, "state")
                found = largest(load_file(folder / "other"), load_file(folder / "rank0"), number)
                where = f"{found.name} differs by {found.absolute:.3g}"
                return f"rank {rank} is not at rank 0's state after step {number}: {where}"
        return None


def likely_causes(rounds: Sequence[Round], workers: int, drawn: Sequence[str]) -> Iterator[str]:
    """Yields what a difference is likely to come from, where it can be told. ``drawn``: generators that the model
    uses."""
    wrong = [r for r in rounds if r.verdict == "different"]
    factors = {round(r.worst.factor, 3) for r in wrong if r.worst.factor is not None}
    if workers > 1 and factors & {float(workers), round(1 / workers, 3)}:
        yield (
            f"what changes is off by the number of workers, {workers}: the loss is a sum where a mean is expected "
            '(reduction="mean"), or count= does not say how many terms it has'
        )
    if wrong and drawn:
        yield (
            f"the model draws from {' and '.join(drawn)} as it computes: draw in augment, keyed by example, "
            "to have the same numbers on any number of workers"
        )


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
        return f"{found.precision}: one device's own weights are no numbers after {found.steps} steps: nothing is shown"
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
    if seen["draws"]:
        named.append(
            f"the model draws random numbers as it computes ({', '.join(seen['draws'])}), each rank its own: "
            "this difference is no rounding; draw them in augment, keyed by example, to have them equal"
        )
    return named


def _seen(went: Sequence[Message]) -> Seen:
    """Collects what ranks have to name of a step."""
    return {key: sorted({name for answer in went for name in answer[key]}) for key in SEEN}


def _free_bytes() -> float:
    """Returns the bytes of memory that are free; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        return float("inf")
