"""Prove that a strategy computes what it must: its state after every step against its reference, tensor by tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from apportion.address import check_place
from apportion.crew import Crew
from apportion.errors import WorkerFailed
from apportion.job import Job
from apportion.launch.local import Local
from apportion.strategy import Strategy
from apportion.trial import Candidate, candidate
from apportion.values import parse
from apportion.workload import Workload

FLOOR = 1e-10
"""Differences below this are rounding in float64, whatever the noise measured."""
NOISE_FACTOR = 100.0
STEP_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one tensor over all steps."""

    name: str
    """``model/...``, ``optimizer/...`` or ``carry/...``."""
    step: int
    """Of all steps, the one where it is largest (the first is 1)."""
    absolute: float
    relative: float
    """To the largest value in the reference's tensor (at least 1): what the bound is for."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The proof in one precision."""

    precision: str
    steps: int
    tensors: int
    worst: Difference
    noise: float
    """The same measure between two one-device runs that differ by the order of their sums alone."""
    bound: float
    disagreement: str | None
    """A rank whose state is not rank 0's, and when."""

    @property
    def holds(self) -> bool:
        return self.disagreement is None and self.worst.relative <= self.bound


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What ``check`` found."""

    strategy: str
    workers: int
    exact: bool
    """Is the reference the one-device step, or the strategy's own (an approximate one)?"""
    rounds: tuple[Round, ...]
    by_design: tuple[str, ...]
    """What differs by design, or could not be checked, in words."""

    @property
    def holds(self) -> bool:
        """Is it the same network?"""
        return all(r.holds for r in self.rounds)


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
    float32 is reported, and checked in float32 alone. Dropout is turned off for it, and named.
    """
    if isinstance(workload, str):
        check_place(workload)
    tried: Strategy = parse(strategy, "apportion.strategies") if isinstance(strategy, str) else strategy
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    launcher = launcher or Local()
    chosen = candidate(tried, replace(launcher, workers=workers) if workers is not None else launcher)
    assert chosen.launcher.workers is not None
    named: list[str] = []
    rounds: list[Round] = []
    own = _own_precision(workload, chosen)
    try:
        wide, seen = _round(workload, chosen, steps, "float64")
        named += _by_design(seen)
        if seen["narrow"]:
            named.append(
                f"the model computes in float32 in places ({', '.join(seen['narrow'])}): checked in {own} alone"
            )
        else:
            rounds.append(wide)
    except WorkerFailed as error:
        if not _fixes_dtype(str(error)):
            raise
        named.append(f"the model fixes a precision ({error}): checked in {own} alone")
    if own != "float64":
        rounds.append(_round(workload, chosen, steps, own)[0])
    return Proof(
        strategy=str(tried),
        workers=chosen.launcher.workers,
        exact=tried.exact,
        rounds=tuple(rounds),
        by_design=tuple(named),
    )


def _own_precision(workload: Workload | str, chosen: Candidate) -> str:
    from apportion.address import load_workload

    return (load_workload(workload) if isinstance(workload, str) else workload).precision


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


def _round(
    workload: Workload | str, chosen: Candidate, steps: int, precision: str
) -> tuple[Round, dict[str, list[str]]]:
    """Strategy, reference, and a reference with nudged weights, step by step."""
    changes = {"precision": precision, **({"compile": False} if precision == "float64" else {})}
    launcher, workers = chosen.launcher, chosen.launcher.workers or 1
    base = Job(
        workload=workload,
        strategy=chosen.strategy,
        launcher=str(launcher),
        threads=launcher.threads_each(chosen.ranks),
        device=launcher.device,
        changes=changes,
        workers=workers,
        proof=True,
    )
    alone = Local(workers=1, threads=1, device="cpu")
    single = replace(base, threads=1, device="cpu")
    crews: list[Crew] = []
    try:
        for target, job, where, ranks in (
            ("steps", base, launcher, chosen.ranks),
            ("reference", single, alone, 1),
            ("reference", replace(single, nudge=_eps(precision)), alone, 1),
        ):
            crews.append(Crew(where, f"apportion.entry:{target}", job, ranks))
        built = [crew.answers("built", STEP_SECONDS) for crew in crews]
        total = built[0][0]["steps"]
        with tempfile.TemporaryDirectory(prefix="apportion-check-") as folder:
            return _compare_steps(crews, min(steps, total), precision, Path(folder))
    finally:
        for crew in crews:
            crew.close()


def _eps(precision: str) -> float:
    return torch.finfo(getattr(torch, precision)).eps


def _compare_steps(
    crews: Sequence[Crew], steps: int, precision: str, folder: Path
) -> tuple[Round, dict[str, list[str]]]:
    tried, reference, nudged = crews
    worst: Difference | None = None
    noise, tensors, disagreement = 0.0, 0, None
    seen: dict[str, list[str]] = {"dropout": [], "draws": [], "narrow": []}
    for number in range(1, steps + 1):
        for crew, name in ((reference, "reference"), (nudged, "nudged")):
            crew.send({"kind": "next", "path": str(folder / name)})
        went = tried.ask({"kind": "go", "steps": 1}, "went", STEP_SECONDS)
        seen = {key: sorted({*seen[key], *(name for answer in went for name in answer[key])}) for key in seen}
        disagreement = disagreement or _disagreement(tried, number, folder)
        for crew in (reference, nudged):
            crew.answers("state", STEP_SECONDS)
        expected = load_file(folder / "reference")
        difference = _largest(load_file(folder / "rank0"), expected, number)
        noise = max(noise, _largest(load_file(folder / "nudged"), expected, number).relative)
        tensors = len(expected)
        if worst is None or difference.relative > worst.relative:
            worst = difference
    assert worst is not None
    bound = max(FLOOR, NOISE_FACTOR * noise)
    found = Round(
        precision=precision,
        steps=steps,
        tensors=tensors,
        worst=worst,
        noise=noise,
        bound=bound,
        disagreement=disagreement,
    )
    return found, seen


def _disagreement(tried: Crew, number: int, folder: Path) -> str | None:
    """Every rank's state must be rank 0's, to the bit; which one is not, where, and by how much."""
    answers = tried.ask({"kind": "state", "path": str(folder / "rank0"), "ranks": [0]}, "state", STEP_SECONDS)
    for rank, answer in enumerate(answers):
        if answer["digest"] != answers[0]["digest"]:
            tried.ask({"kind": "state", "path": str(folder / "other"), "ranks": [rank]}, "state", STEP_SECONDS)
            found = _largest(load_file(folder / "other"), load_file(folder / "rank0"), number)
            where = f"{found.name} differs by {found.absolute:.3g}"
            return f"rank {rank} is not at rank 0's state after step {number}: {where}"
    return None


def _largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> Difference:
    """The tensor that differs most, relative to its largest value; a missing or foreign one differs without bound."""
    for name in sorted(found.keys() ^ expected.keys()):
        return Difference(name=name, step=step, absolute=float("inf"), relative=float("inf"))
    differences = (_difference(name, found[name], expected[name], step) for name in sorted(expected))
    return max(
        differences, key=lambda d: d.relative, default=Difference(name="nothing", step=step, absolute=0, relative=0)
    )


def _difference(name: str, found: Tensor, expected: Tensor, step: int) -> Difference:
    if found.shape != expected.shape:
        return Difference(name=name, step=step, absolute=float("inf"), relative=float("inf"))
    a, b = found.to(torch.float64), expected.to(torch.float64)
    if not b.numel():
        return Difference(name=name, step=step, absolute=0.0, relative=0.0)
    same = (a == b) | (a.isnan() & b.isnan())
    absolute = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max())
    scale = max(1.0, float(b.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
    return Difference(name=name, step=step, absolute=absolute, relative=absolute / scale)
