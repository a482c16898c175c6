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

import torch
from safetensors.torch import load_file

from apportion.comm.channel import Message
from apportion.crew import Crew
from apportion.errors import ApportionError, WorkerFailed
from apportion.job import Job
from apportion.launch.local import Local
from apportion.proof import FLOOR, Comparison, Proof, Round, largest
from apportion.tap_differences import first_difference
from apportion.trial import Candidate
from apportion.workload import Workload

STEP_SECONDS = 600.0
GRADIENT_STEPS = 2
"""Of rate 1: a network would not stand many."""

SEEN = ("dropout", "draws", "narrow", "plain_draws")
"""What is looked for in the steps of a proof."""
Seen = dict[str, list[str]]


COPIES = 5
"""Of its weights that a process of a proof holds: these, gradients, two slots, and the state that it gives."""
COMPARED = 12
"""Copies that comparing holds: four states of weights and two slots."""


class OutOfTimeError(Exception):
    """The time that a proof was given is over; says how much it needs."""


class OutOfMemoryError(Exception):
    """The memory that a proof needs is not there; says how much that is."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be proved, and how thoroughly."""

    workload: Workload | str
    chosen: Candidate
    steps: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workload that the run replaces."""
    rows: int = 0
    """Examples in a batch; 0: the workload's own."""
    seconds: float | None = None
    """That it may take; None: as long as it does."""
    parameters: int = 0
    """Of the network, where that is known before it is built."""
    brief: bool = False
    """Is a first difference enough?"""
    plain: tuple[str, ...] = ()
    """Fast paths that are switched off."""


def prove(asked: Asked) -> Proof:
    """In float64, then the gradients, then in the run's own precision. Raises OutOfTimeError, and what a worker fails
    with."""
    return _Proving(asked).proof()


class _Proving:
    """One proof under way."""

    def __init__(self, asked: Asked) -> None:
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
        except WorkerFailed as error:
            if not _fixes_dtype(str(error)) or not known or self._own == "float64":
                raise
            self._named = [f"the model fixes a precision ({error}): checked in {self._own} alone"]
        with self._crews(self._own) as crews:
            steps = _many(self._chosen, self._asked.steps, self._built(crews)["steps"])
            narrow, seen = self._round(crews, steps, self._own)
            self._named[:0], self._drawn = _by_design(seen), seen["plain_draws"]
            self._gradients = self._gradient_round(crews, narrow, self._own)
            return [narrow]

    def _wide_then_own(self, crews: Sequence[Crew], built: Message) -> list[Round]:
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
        self._gradients = self._gradient_round(crews, wide, "float64" if rounds else self._own)
        if rounds and any(r.verdict == "different" for r in (wide, self._gradients) if r is not None):
            self._first = self._first_difference(crews, wide)
        if self._own == "float64" or (self._asked.brief and not self._proved()):
            return rounds or [wide]
        self._again(crews, self._own)
        return [*rounds, self._round(crews, wide.steps, self._own)[0]]

    def _proved(self) -> bool:
        return self._gradients is None or self._gradients.holds

    def _gradient_round(self, crews: Sequence[Crew], states: Round, precision: str) -> Round | None:
        """The change under plain SGD; where every optimizer is that already, the states have shown it."""
        if self._replays or not self._chosen.strategy.exact or (self._linear and states.holds):
            return None
        self._again(crews, precision, gradients=True)
        return self._round(crews, min(GRADIENT_STEPS, states.steps), precision)[0]

    def _first_difference(self, crews: Sequence[Crew], wide: Round) -> str | None:
        """The step at which something differed, once more, with taps on both sides; None where they show nothing."""
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
    def _crews(self, precision: str) -> Iterator[list[Crew]]:
        """The strategy's processes, the reference's, and those of a reference that is led astray by rounding, where
        rounding is allowed for."""
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
                crews.append(Crew(where, f"apportion.entry:{target}", job, ranks))
                stack.callback(crews[-1].close)
            yield crews

    def _jobs(self, precision: str, *, gradients: bool = False) -> tuple[Job, Job, Job]:
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
            cut=steps if steps > 1 and self._chosen.strategy.exact else 0,
            gradients=gradients,
            plain=asked.plain,
        )
        # A sum by other threads is another sum: what is to have the same bits has as many.
        single = replace(tried, threads=tried.threads if self._replays else 1, device="cpu")
        # Weights stay float32 under autocast; it is the gradients that come in the shorter type.
        weights = "float64" if precision == "float64" else "float32"
        return tried, single, replace(single, nudge=_eps(weights), jitter=_eps(precision) / 2)

    def _again(self, crews: Sequence[Crew], precision: str, *, gradients: bool = False) -> None:
        """All of them from the beginning, in another precision or with other optimizers."""
        for crew, job in zip(crews, self._jobs(precision, gradients=gradients), strict=False):
            changed = {name: getattr(job, name) for name in ("changes", "nudge", "jitter", "gradients", "cut")}
            crew.send({"kind": "again", "job": changed})
        self._built(crews)

    def _built(self, crews: Sequence[Crew]) -> Message:
        """What the strategy's first rank tells once everything is built."""
        told = [self._answers(crew, "built") for crew in crews]
        self._linear = told[0][0]["linear"]
        self._must_fit(told[0][0]["parameters"])
        return told[0][0]

    def _must_fit(self, parameters: int) -> None:
        """OutOfMemoryError where all the processes together would not fit what is free."""
        processes = self._chosen.ranks + 2
        self._bytes = parameters * 8 * (COPIES * processes + COMPARED)
        free = _free_bytes()
        if self._deadline is not None and self._bytes > free:
            raise OutOfMemoryError(f"it needs {self._bytes / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free")

    def _out_of_time(self) -> OutOfTimeError:
        spent = time.monotonic() - self._began
        about = f"about {spent / self._progress:.0f} s" if self._progress else f"more than {spent:.0f} s"
        return OutOfTimeError(f"it needs {about} and {self._bytes / 1e9:.2g} GB of memory")

    def _ask(self, crew: Crew, order: Mapping[str, Any], kind: str) -> list[Message]:
        crew.send(order)
        return self._answers(crew, kind)

    def _answers(self, crew: Crew, kind: str) -> list[Message]:
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

    def _round(self, crews: Sequence[Crew], steps: int, precision: str) -> tuple[Round, Seen]:
        """Strategy, reference, and the one led astray, step by step; or the strategy, and the same once more."""
        with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
            compare = self._compare_replay if self._replays else self._compare_steps
            return compare(crews, steps, precision, Path(folder))

    def _compare_replay(self, crews: Sequence[Crew], steps: int, precision: str, folder: Path) -> tuple[Round, Seen]:
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

    def _compare_steps(self, crews: Sequence[Crew], steps: int, precision: str, folder: Path) -> tuple[Round, Seen]:
        tried, reference, nudged = crews
        (began,) = self._ask(reference, {"kind": "start", "path": str(folder / "start")}, "started")
        comparison = Comparison(load_file(folder / "start"), began["weights"], eps=_eps(precision))
        disagreement, seen = None, _seen(())
        for number in range(1, steps + 1):
            for crew, name in ((reference, "reference"), (nudged, "nudged")):
                crew.send({"kind": "next", "path": str(folder / name)})
            went = self._ask(tried, {"kind": "go", "steps": 1}, "went")
            seen = _seen([seen, *went])
            found = self._disagreement(tried, number, folder)
            disagreement = disagreement or found
            for crew in (reference, nudged):
                self._answers(crew, "state")
            self._progress += 1 / (2 * self._asked.steps + GRADIENT_STEPS)
            comparison.take(number, *(load_file(folder / name) for name in ("rank0", "reference", "nudged")))
        return comparison.round(precision, steps, disagreement), seen

    def _disagreement(self, tried: Crew, number: int, folder: Path) -> str | None:
        """Every rank's state must be rank 0's, to the bit; which one is not, where, and by how much. Rank 0's is
        written in any case: what comes after compares it."""
        answers = self._ask(tried, {"kind": "state", "path": str(folder / "rank0"), "ranks": [0]}, "state")
        for rank, answer in enumerate(answers):
            if answer["digest"] != answers[0]["digest"]:
                self._ask(tried, {"kind": "state", "path": str(folder / "other"), "ranks": [rank]}, "state")
                found = largest(load_file(folder / "other"), load_file(folder / "rank0"), number)
                where = f"{found.name} differs by {found.absolute:.3g}"
                return f"rank {rank} is not at rank 0's state after step {number}: {where}"
        return None


def likely_causes(rounds: Sequence[Round], workers: int, drawn: Sequence[str]) -> Iterator[str]:
    """What a difference is likely to come from, where it can be told. ``drawn``: generators that the model uses."""
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
    """Steps: as many as asked for, or as every worker can make."""
    workers = chosen.launcher.workers or 1
    if not chosen.strategy.replays(workers):
        return min(asked, there)
    if there < workers:
        raise ValueError(f"{there} batches are too few for {workers} workers: use fewer workers, or more steps or data")
    return min(asked, there // workers)


def _open_question(found: Round) -> str:
    if found.noise == float("inf"):
        return f"{found.precision}: one device's own weights are no numbers after {found.steps} steps: nothing is shown"
    return (
        f"{found.precision}: in {found.steps} steps this network makes {found.noise:.2g} of its change by rounding "
        "alone, too much to tell a mistake from it: nothing is shown; use fewer steps, or another learning rate"
    )


def _fixes_dtype(text: str) -> bool:
    return any(sign in text for sign in ("dtype", "scalar type", "Double", "same type"))


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
    """What ranks have to name of a step, together."""
    return {key: sorted({name for answer in went for name in answer[key]}) for key in SEEN}


def _eps(precision: str) -> float:
    return torch.finfo(getattr(torch, precision)).eps


def _free_bytes() -> float:
    """Of memory; without bound where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        return float("inf")
