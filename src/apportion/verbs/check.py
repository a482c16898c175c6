"""Prove that a strategy computes what it must: its state after every step against its reference, tensor by tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from apportion.address import check_place
from apportion.comm.channel import Message
from apportion.crew import Crew
from apportion.errors import WorkerFailed
from apportion.job import Job
from apportion.launch.local import Local
from apportion.proof import CAP, FLOOR, NOISE_FACTOR, Difference, Proof, Round, largest, verdict_of
from apportion.strategy import Strategy
from apportion.trial import Candidate, candidate
from apportion.values import parse
from apportion.workload import Workload

STEP_SECONDS = 600.0


def check(
    workload: Workload | str,
    strategy: Strategy | str,
    *,
    workers: int | None = None,
    steps: int = 8,
    launcher: Local | None = None,
) -> Proof:
    """Run a strategy and its reference side by side, and compare the whole state after every step.

    First in float64 (floating inputs, weights and buffers), where nothing but rounding may differ: at most 1e-10, or
    100 times the rounding noise measured; then in the run's own precision, against its noise. A model that fixes
    float32 is reported, and checked in float32. Dropout is turned off for it, and named. Where a network amplifies
    rounding so much that its bound would be above 1e-3, nothing above 1e-3 is called equal.

    Where workers go their own ways, and the strategy writes down which (``Strategy.replays``), all make so many steps
    with nobody waiting, and one process makes the same updates again: to the last bit, in both precisions.
    """
    if isinstance(workload, str):
        check_place(workload)
    value: Strategy = parse(strategy, "apportion.strategies") if isinstance(strategy, str) else strategy
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    launcher = launcher or Local()
    chosen = candidate(value, replace(launcher, workers=workers) if workers is not None else launcher)
    assert chosen.launcher.workers is not None
    rounds, named = _prove(workload, chosen, steps)
    return Proof(
        strategy=str(value),
        workers=chosen.launcher.workers,
        exact=value.exact,
        rounds=tuple(rounds),
        by_design=(*named, *(_open_question(r) for r in rounds if r.verdict == "undecided")),
    )


def _prove(workload: Workload | str, chosen: Candidate, steps: int) -> tuple[list[Round], list[str]]:
    """In float64 and in the run's own precision, by the same processes."""
    own = None
    try:
        with _crews(workload, chosen, "float64") as crews:
            built = _built(crews)
            own = built["precision"]
            wide, seen = _round(crews, _many(chosen, steps, built["steps"]), "float64")
            named = _by_design(seen)
            if own == "float64":
                return [wide], named
            rounds = [wide]
            if seen["narrow"]:
                where = f"the model computes in float32 in places ({', '.join(seen['narrow'])})"
                kept = wide.worst.relative <= FLOOR
                named.append(f"{where}: equal in float64 all the same" if kept else f"{where}: checked in {own} alone")
                rounds = [wide] if kept else []
            for crew, job in zip(crews, _jobs(workload, chosen, own), strict=False):
                crew.send({"kind": "again", "job": {n: getattr(job, n) for n in ("changes", "nudge", "jitter")}})
            _built(crews)
            return [*rounds, _round(crews, wide.steps, own)[0]], named
    except WorkerFailed as error:
        if not _fixes_dtype(str(error)) or own in (None, "float64"):
            raise
        fixed = f"the model fixes a precision ({error}): checked in {own} alone"
    with _crews(workload, chosen, own) as crews:
        narrow, seen = _round(crews, _many(chosen, steps, _built(crews)["steps"]), own)
        return [narrow], [*_by_design(seen), fixed]


def _many(chosen: Candidate, asked: int, there: int) -> int:
    """Steps: as many as asked for, or as every worker can make."""
    workers = chosen.launcher.workers or 1
    if not chosen.strategy.replays(workers):
        return min(asked, there)
    if there < workers:
        raise ValueError(f"{there} batches are too few for {workers} workers: use fewer workers, or more steps or data")
    return min(asked, there // workers)


def _built(crews: Sequence[Crew]) -> Message:
    """What the strategy's first rank tells once everything is built."""
    told = [crew.answers("built", STEP_SECONDS) for crew in crews]
    return told[0][0]


def _open_question(found: Round) -> str:
    if found.noise == float("inf"):
        return f"{found.precision}: one device's own weights are no numbers after {found.steps} steps: nothing is shown"
    return (
        f"{found.precision}: in {found.steps} steps this network makes {found.noise:.2g} of rounding alone, too much "
        "to tell a mistake from it: nothing is shown; use fewer steps, or a learning rate that begins smaller"
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


@contextmanager
def _crews(workload: Workload | str, chosen: Candidate, precision: str) -> Iterator[list[Crew]]:
    """The strategy's processes, the reference's, and those of a reference that is led astray by rounding, where
    rounding is allowed for."""
    jobs = _jobs(workload, chosen, precision)
    alone = Local(workers=1, threads=jobs[1].threads, device="cpu")
    crews: list[Crew] = []
    try:
        for target, where, ranks, job in zip(
            ("steps", "reference", "reference"),
            (chosen.launcher, alone, alone),
            (chosen.ranks, 1, 1),
            jobs,
            strict=True,
        ):
            if len(crews) == 2 and chosen.strategy.replays(job.workers):
                break
            crews.append(Crew(where, f"apportion.entry:{target}", job, ranks))
        yield crews
    finally:
        for crew in crews:
            crew.close()


def _jobs(workload: Workload | str, chosen: Candidate, precision: str) -> tuple[Job, Job, Job]:
    launcher = chosen.launcher
    tried = Job(
        workload=workload,
        strategy=chosen.strategy,
        launcher=str(launcher),
        threads=launcher.threads_each(chosen.ranks),
        device=launcher.device,
        changes={"precision": precision, **({"compile": False} if precision == "float64" else {})},
        workers=launcher.workers or 1,
        proof=True,
    )
    # A sum by other threads is another sum: what is to have the same bits has as many.
    threads = tried.threads if chosen.strategy.replays(tried.workers) else 1
    single = replace(tried, threads=threads, device="cpu")
    # Weights stay float32 under autocast; it is the gradients that come in the shorter type.
    weights = "float64" if precision == "float64" else "float32"
    return tried, single, replace(single, nudge=_eps(weights), jitter=_eps(precision) / 2)


def _eps(precision: str) -> float:
    return torch.finfo(getattr(torch, precision)).eps


def _round(crews: Sequence[Crew], steps: int, precision: str) -> tuple[Round, dict[str, list[str]]]:
    """Strategy, reference, and the one led astray, step by step; or the strategy, and the same once more."""
    with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
        compare = _compare_steps if len(crews) == 3 else _compare_replay
        return compare(crews, steps, precision, Path(folder))


def _compare_replay(
    crews: Sequence[Crew], steps: int, precision: str, folder: Path
) -> tuple[Round, dict[str, list[str]]]:
    tried, reference = crews
    seen = _seen(tried.ask({"kind": "go", "steps": steps}, "went", STEP_SECONDS))
    disagreement = _disagreement(tried, steps, folder)
    tried.ask({"kind": "log", "path": str(folder / "log")}, "log", STEP_SECONDS)
    reference.ask(
        {"kind": "next", "path": str(folder / "reference"), "log": str(folder / "log")}, "state", STEP_SECONDS
    )
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


def _seen(went: Sequence[Message]) -> dict[str, list[str]]:
    """What ranks have to name of a step, together."""
    return {key: sorted({name for answer in went for name in answer[key]}) for key in ("dropout", "draws", "narrow")}


def _compare_steps(
    crews: Sequence[Crew], steps: int, precision: str, folder: Path
) -> tuple[Round, dict[str, list[str]]]:
    tried, reference, nudged = crews
    worst: Difference | None = None
    noise, tensors, disagreement = 0.0, 0, None
    seen = _seen(())
    for number in range(1, steps + 1):
        for crew, name in ((reference, "reference"), (nudged, "nudged")):
            crew.send({"kind": "next", "path": str(folder / name)})
        went = tried.ask({"kind": "go", "steps": 1}, "went", STEP_SECONDS)
        seen = _seen([seen, *went])
        disagreement = disagreement or _disagreement(tried, number, folder)
        for crew in (reference, nudged):
            crew.answers("state", STEP_SECONDS)
        expected = load_file(folder / "reference")
        difference = largest(load_file(folder / "rank0"), expected, number)
        lost = any(bool(t.isnan().any()) for t in expected.values())
        noise = max(noise, float("inf") if lost else largest(load_file(folder / "nudged"), expected, number).relative)
        tensors = len(expected)
        if worst is None or difference.relative > worst.relative:
            worst = difference
    assert worst is not None
    bound = max(FLOOR, min(CAP, NOISE_FACTOR * noise))
    found = Round(
        precision=precision,
        steps=steps,
        tensors=tensors,
        worst=worst,
        noise=noise,
        bound=bound,
        disagreement=disagreement,
        verdict="different" if disagreement is not None else verdict_of(worst.relative, noise, bound),
    )
    return found, seen


def _disagreement(tried: Crew, number: int, folder: Path) -> str | None:
    """Every rank's state must be rank 0's, to the bit; which one is not, where, and by how much."""
    answers = tried.ask({"kind": "state", "path": str(folder / "rank0"), "ranks": [0]}, "state", STEP_SECONDS)
    for rank, answer in enumerate(answers):
        if answer["digest"] != answers[0]["digest"]:
            tried.ask({"kind": "state", "path": str(folder / "other"), "ranks": [rank]}, "state", STEP_SECONDS)
            found = largest(load_file(folder / "other"), load_file(folder / "rank0"), number)
            where = f"{found.name} differs by {found.absolute:.3g}"
            return f"rank {rank} is not at rank 0's state after step {number}: {where}"
    return None
