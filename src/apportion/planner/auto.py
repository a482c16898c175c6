"""The strategy that a run takes where none is given: as it was decided before, or measured, predicted and tried.

Deciding, with the proof of what is chosen, takes at most ten seconds or 5 % of the run, whichever is more: a single
process finds out first how long the run is.

::

    start | one process | prices, where they fit | trials: at most MOST_SECONDS or 5 % of the run | proof

A run that is over before a second candidate is even built, or that leaves no time for a trial and a proof, takes that
one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from apportion.core import json_data
from apportion.core.json_data import cache_folder
from apportion.core.strategy import Strategy
from apportion.core.value import parse, parse_as
from apportion.core.workload import Workload
from apportion.errors import ApportionError
from apportion.planner.decision import Decision, Planning
from apportion.planner.performance_monitor import Expected, cores_wanted, expected_of
from apportion.planner.predict import offered, predicted
from apportion.planner.trials.measured_plan import Piloted, pilot
from apportion.planner.trials.significance import SURE
from apportion.planner.trials.trial import LEAST_ROUNDS, Candidate, TrialWorkers, candidate
from apportion.planner.trials.tune import TuningResult, TuningTrial, refine
from apportion.process import most_threads, usable_cores
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.limits import BUDGET_SHARE, STARTED_SECONDS, budget, proving
from apportion.runtime.worker.cpu_wait import noted

MOST_SECONDS = 7.0
"""The most seconds that trials take; they also never take more than ``BUDGET_SHARE`` of the run."""
LEAST_SECONDS = 0.5
"""The least seconds that trials are begun with: starting a second candidate takes as long."""
STARTS = 2
"""The times that processes are started, one after another, before the first round of trials."""
LONG_SECONDS = 1.0
"""The seconds from which a first step is so long that it is not made again."""
SHORT_SECONDS, LEAST_STEPS = 0.1, 3
"""The seconds that the few steps after the first take about in all, and the least number of them: the second is often
slower than those after it, and a run that seems twice as long is given twice the time for its choice."""
PREDICTING, PILOT = 0.4, 0.3
"""The shares of the time of trials that prices and a pilot are given."""
PRICED_SECONDS, PRICED_STEPS = 5.0, 50
"""The least time that prices take: about these seconds, for a machine that is not known yet, and the time of this
number of steps of the workload, since each layer and its parts are timed by one process and by several."""
BUSY, QUIET = 0.15, 0.05
"""The share of the time without a core from which other programs are taken to have the cores, and the one below which
what was found while they had them is not taken."""
FAR_OFF = 5.0
"""The factor between a step now and in an earlier run from which what that run found is not taken."""
STEPS_EACH = 3 + LEAST_ROUNDS
"""The least number of steps that a candidate makes in trials."""


def decide(
    workload: Workload | str, changes: Mapping[str, Any], launcher: Local, planning: Planning | None = None
) -> Decision:
    """Decide on a strategy for this machine. Raises what a worker fails with, where not even one process can run the
    workload."""
    candidates = offered(launcher)
    if len(candidates) == 1:
        return Decision(chosen=candidates[0], plan=None, expected=None)
    deciding = _Deciding(workload, changes, launcher, planning or Planning(), candidates)
    decision = deciding.recalled()
    if decision is None:
        decision = deciding.decide()
        deciding.keep(decision)
    return decision


class _Deciding:
    """A decision on its way: a single process tells what the workload is and how long a run of it takes."""

    def __init__(
        self,
        workload: Workload | str,
        changes: Mapping[str, Any],
        launcher: Local,
        planning: Planning,
        candidates: Sequence[Candidate],
    ) -> None:
        self._began = time.monotonic()
        self._workload, self._changes, self._launcher, self._planning = workload, changes, launcher, planning
        self._candidates = list(candidates)
        alone = TrialWorkers(candidates[0], workload, changes)
        try:
            built = time.monotonic()
            alone.built()
            self._built = time.monotonic() - built
            """The seconds that starting a candidate takes."""
            facts = alone.facts()
            self._steps = int(changes.get("steps", facts["steps"]))
            asked = {"launcher": str(launcher), "trial": planning.trial, "approximate": planning.approximate}
            asked |= {"most_threads": most_threads()}
            self._key = decision_key(facts["mark"], asked)
            self._known = None if planning.remeasure else load_decision(self._key)
            wanted = cores_wanted() or 0.0
            if self._known is not None and self._known.get("busy") and wanted < QUIET:
                self._known = None  # it was found while other programs had the cores
            if self._known is None or wanted > BUSY:
                self._first = _a_step(alone)
                if self._known is not None and self._first.seconds > FAR_OFF * float(self._known["a_step"]):
                    self._known = None  # it was found on a machine that was quieter
            else:
                self._first = _FirstSteps(float(self._known["a_step"]), {}, 0.0)
            self._busy = self._first.without_core > BUSY
            """Do other programs have the cores?"""
            self._a_step = self._first.seconds if self._known is None else float(self._known["a_step"])
        finally:
            alone.pool.close()
        if self._busy and self._known is None:
            self._try_fewer_threads()

    def _try_fewer_threads(self) -> None:
        """Make steps with fewer threads, where other programs have the cores that all threads would wait for: the
        fastest number comes first."""
        first = self._candidates[0]
        threads = first.launcher.threads or 1
        for fewer in dict.fromkeys((threads // 2, 1)):
            if not 0 < fewer < threads:
                continue
            slim = replace(first, launcher=replace(first.launcher, threads=fewer))
            tried = TrialWorkers(slim, self._workload, self._changes)
            try:
                tried.built()
                found = _a_step(tried)
            finally:
                tried.pool.close()
            if found.seconds < self._first.seconds:
                self._first, self._a_step = found, found.seconds
                self._candidates = [slim, *(other for other in self._candidates if str(other) != str(slim))]

    def recalled(self) -> Decision | None:
        """Return what an earlier run has decided; None where nothing usable was kept, or it was decided for a much
        shorter run."""
        known = self._known
        if known is None or known["measured_for"] < self._budget() / 2:  # that was of a much shorter run
            return None
        try:
            plan = known[DECISION_PLAN]
            strategy: Strategy = parse(plan["strategy"], "apportion.strategies")
            chosen = candidate(strategy, parse_as(plan["launcher"], Local))
            expected = None if known["expected"] is None else Expected(**known["expected"])
            plan = {**plan, "remembered": True, "why": f"{plan['why']}, as an earlier run found"}
        except (KeyError, TypeError, ValueError):  # of another version
            return None
        return Decision(chosen=chosen, plan={**plan, "seconds": self._took()}, expected=expected)

    def keep(self, decision: Decision) -> None:
        """Keep the decision for the next run, unless nothing was measured or predicted for it."""
        if decision.expected is not None and decision.plan is not None and not decision.expected.rough:
            expected = {**vars(decision.expected), "terms": dict(decision.expected.terms)}
            kept: dict[str, Any] = {DECISION_PLAN: decision.plan, "expected": expected}
            kept |= {"a_step": self._a_step, "measured_for": self._budget(), "busy": self._busy}
            save_decision(self._key, kept)

    def _budget(self) -> float:
        """Seconds that trials may take."""
        return min(MOST_SECONDS, BUDGET_SHARE * self._run())

    def _run(self) -> float:
        """Estimate the seconds that the run takes."""
        return self._steps * self._a_step

    def _left(self) -> float:
        """Seconds of the budget that are left for measuring, beside the proof of what is chosen."""
        return budget(self._run()) - STARTED_SECONDS - self._took() - proving(self._built, self._a_step)

    def decide(self) -> Decision:
        """Decide by measuring, predicting and trying as much as the time allows."""
        seconds = min(self._budget(), self._left() - STARTS * self._built)
        if seconds < max(LEAST_SECONDS, self._built):
            why = f"the run takes about {self._run():.2g} s, too short to measure others first and prove what is chosen"
            return self._first_taken(why)
        priced: list[Candidate] = []
        if PRICED_SECONDS + PRICED_STEPS * self._a_step + seconds <= self._left():
            priced = self._priced(PREDICTING * MOST_SECONDS)
            seconds = min(seconds, max(self._left(), LEAST_SECONDS))
        most = int(seconds / (STEPS_EACH * self._a_step))
        if not self._planning.trial or most < 2:
            return self._by_prediction(priced)
        share = 1 - PILOT if self._planning.approximate else 1.0
        refined = refine(self._all(priced), self._workload, self._changes, seconds=share * seconds, most=_few(most))
        piloted = self._pilot(priced, refined, PILOT * seconds) if self._planning.approximate else None
        if piloted is not None and isinstance(piloted[1], Piloted) and piloted[1].better:
            return self._taken(piloted[0], piloted[1].text, _tried_rows(refined.tried, priced))
        return self._refined(refined, priced, piloted)

    def _all(self, priced: Sequence[Candidate]) -> list[Candidate]:
        """Return the priced candidates, followed by those that were not priced."""
        known = {str(p) for p in priced}
        return [*priced, *(p for p in self._candidates if str(p) not in known)]

    def _priced(self, seconds: float) -> list[Candidate]:
        """Return the priced candidates; none for a workload that cannot be profiled, which may still be able to run."""
        try:
            return predicted(self._workload, self._launcher, seconds, remeasure=self._planning.remeasure)
        except (ValueError, ApportionError):
            return []

    def _by_prediction(self, priced: Sequence[Candidate]) -> Decision:
        exact = [p for p in priced if p.strategy.exact]
        if not exact:
            return self._first_taken("nothing else was measured or predicted")
        ranked = sorted(exact, key=lambda p: p.cost.seconds_per_example if p.cost is not None else float("inf"))
        best = next((p for p in ranked if self._builds(p)), self._candidates[0])
        return self._taken(best, "the fastest by prediction; nothing was tried", _priced_rows(priced))

    def _builds(self, chosen: Candidate) -> bool:
        """Report whether the candidate's strategy can build a step of this workload: prices do not know of all that is
        refused when a step is built."""
        if chosen.strategy.one_process:
            return True
        built = TrialWorkers(chosen, self._workload, self._changes)
        try:
            built.built()
        except (ValueError, ApportionError):
            return False
        finally:
            built.pool.close()
        return True

    def _refined(
        self, refined: TuningResult, priced: Sequence[Candidate], piloted: tuple[Candidate, Piloted | str] | None
    ) -> Decision:
        chosen = refined.chosen
        assert chosen.measured is not None
        measured = Expected(step_seconds=chosen.measured.step_seconds, terms=chosen.measured.terms, measured=True)
        data = _tried_rows(refined.tried, priced)
        why = [_why(refined) + _pilot_sentence(piloted), *filter(None, [noted(chosen.measured.without_core_share)])]
        return self._decision(candidate(chosen.strategy, chosen.launcher), "; ".join(why), data, measured)

    def _pilot(
        self, priced: Sequence[Candidate], refined: TuningResult, seconds: float
    ) -> tuple[Candidate, Piloted | str] | None:
        """Return the fastest approximate candidate with its pilot, or with why there could be none; None where no
        approximate one is faster."""
        found = [(p.cost.seconds_per_example, str(p), p) for p in priced if p.cost is not None and not p.strategy.exact]
        best, chosen = min(found)[2] if found else None, refined.chosen
        assert chosen.measured is not None
        if best is None or min(found)[0] >= chosen.measured.seconds_per_example:  # it is not even faster
            return None
        exact = candidate(chosen.strategy, chosen.launcher)
        try:
            return best, pilot(exact, best, self._workload, self._changes, steps=self._steps, seconds=seconds / 2)
        except (ValueError, ApportionError) as error:  # it cannot be compared: the exact one is taken
            return best, str(error).partition("\n")[0]

    def _first_taken(self, why: str) -> Decision:
        """Decide on the one process whose first steps were timed: they are what later ones should roughly take."""
        chosen = self._candidates[0]
        if self._busy:
            why += f"; other programs had the cores for {self._first.without_core:.0%} of the time"
        expected = Expected(step_seconds=self._first.seconds, terms=self._first.terms, measured=True, rough=True)
        return self._decision(chosen, why, [], expected)

    def _taken(self, chosen: Candidate, why: str, candidates: list[dict[str, Any]]) -> Decision:
        expected = None if chosen.cost is None else expected_of(chosen.cost)
        return self._decision(chosen, why, candidates, expected)

    def _decision(
        self, chosen: Candidate, why: str, candidates: list[dict[str, Any]], expected: Expected | None
    ) -> Decision:
        plan = {
            "strategy": str(chosen.strategy),
            "launcher": str(chosen.launcher),
            "why": why,
            "candidates": candidates,
            "remembered": False,
            "seconds": self._took(),
        }
        return Decision(chosen=chosen, plan=plan, expected=expected)

    def _took(self) -> float:
        return time.monotonic() - self._began


@dataclass(frozen=True)
class _FirstSteps:
    """What the first few steps of a candidate took."""

    seconds: float
    """The seconds of a step after the first; of the first where that was long."""
    terms: Mapping[str, float]
    """The same by what they went to, as far as that was measured."""
    without_core: float
    """The share of the time in which a thread could have gone on and had no core."""


def _a_step(alone: TrialWorkers) -> _FirstSteps:
    """Time a few steps after the first; the first alone where that was long."""
    began = time.perf_counter()
    answers = alone.go(1, measure=False)
    first = time.perf_counter() - began
    if first > LONG_SECONDS:
        return _FirstSteps(first, {"computing": first}, max(answer["without_core"] for answer in answers))
    alone.go(max(LEAST_STEPS, min(5, int(SHORT_SECONDS / first))))
    measured = alone.measured
    return _FirstSteps(measured.step_seconds, measured.terms, measured.without_core_share)


def _few(most: int) -> int | None:
    """Return the number of candidates as a limit; None where it is large enough to need no limit."""
    return most if most < 6 else None


def _pilot_sentence(piloted: tuple[Candidate, Piloted | str] | None) -> str:
    """Why the approximate candidate of a pilot was not taken; nothing where there was none to try."""
    if piloted is None:
        return ""
    chosen, found = piloted
    if isinstance(found, str):
        return f"; no pilot of {chosen.strategy}: {found}"
    return f"; {chosen.strategy} learned no more in the same time"


def _why(refined: TuningResult) -> str:
    measured = [t for t in refined.tried if t.measured is not None]
    assert refined.chosen.measured is not None
    took = f"{refined.chosen.measured.step_seconds * 1e3:.3g} ms a step"
    if len(measured) == 1:
        return f"{took}, and nothing else could run"
    if refined.chosen is not measured[0]:
        return f"{took}, and the simplest of those that cannot be distinguished from the fastest ({measured[0]})"
    sure = "" if refined.confidence >= SURE else ", though it cannot be distinguished from the next"
    return f"the fastest, {took}{sure}"


def _tried_rows(tried: Sequence[TuningTrial], priced: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Describe the candidates that were tried, then those that were only priced, then those that were refused."""
    known = {str(t) for t in tried}
    rows = [
        {
            **_row(t.strategy, t.launcher, None if t.predicted is None else t.predicted.step_seconds),
            "step_seconds": None if t.measured is None else t.measured.step_seconds,
            "examples_per_second": None if t.measured is None else t.measured.examples_per_second,
            "refused": t.refused,
        }
        for t in tried
    ]
    able = [row for row in rows if row["refused"] is None]
    refused = [row for row in rows if row["refused"] is not None]
    return [*able, *_priced_rows([p for p in priced if str(p) not in known]), *refused]


def _priced_rows(priced: Sequence[Candidate]) -> list[dict[str, Any]]:
    ranked = sorted(
        ((not p.strategy.exact, p.cost.seconds_per_example, i, p, p.cost) for i, p in enumerate(priced) if p.cost),
        key=lambda found: found[:3],
    )
    return [_row(p.strategy, p.launcher, cost.step_seconds) for _, _, _, p, cost in ranked]


def _row(strategy: Strategy, launcher: Local, predicted_seconds: float | None) -> dict[str, Any]:
    return {
        "strategy": str(strategy),
        "launcher": str(launcher),
        "exact": strategy.exact,
        "predicted_seconds": predicted_seconds,
        "step_seconds": None,
        "examples_per_second": None,
        "refused": None,
    }


# Plans of earlier runs: for the same workload on the same machine nothing is measured again.


DECISION_PLAN = "told"
"""The field of what is kept that holds the data of a ``plan`` event."""
DECISION_FIELDS = {DECISION_PLAN, "expected", "a_step", "measured_for"}
"""The fields of what is kept: the data of a ``plan`` event, the time that its steps should take, the seconds of a step
of one process, and the seconds that the measuring was allowed."""


def decisions_folder() -> Path:
    """Return the folder that decisions are kept in."""
    return cache_folder("plans")


def described_machine() -> dict[str, Any]:
    """Describe what a plan depends on of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "name": platform.node(),
        "torch": torch.__version__,
        "apportion": metadata.version("apportion"),
    }


def decision_key(mark: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return the key of a plan for this workload, asked for in this way, on this machine."""
    text = json.dumps({"workload": mark, "asked": asked, "host": described_machine()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_decision(name: str) -> dict[str, Any] | None:
    """Return what was kept under this key; None where nothing was, or it is incomplete."""
    try:
        found = json.loads((decisions_folder() / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= DECISION_FIELDS else None


def save_decision(name: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan for the next run; where nothing can be written, the next run measures again."""
    json_data.keep(decisions_folder() / f"{name}.json", plan)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
