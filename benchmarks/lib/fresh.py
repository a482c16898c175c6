"""Fresh measurements of what a plan has priced: every candidate a little, then the best of them against each other."""

from dataclasses import dataclass
from math import comb, log
from statistics import mean, median

from parked import SideFailed

from apportion.errors import WorkerFailed
from apportion.planner.trials.trial import candidate, parked
from apportion.runtime.launch.local import Local

AT_ONCE = 5
"""Candidates whose processes wait side by side: memory is for no more."""
FIRST_ROUNDS, ROUNDS, ROUND_SECONDS = 5, 21, 0.4
CLOSE = 1.3
"""Whoever took longer than the best by more than this factor in the first measuring is not looked at again."""
SURE = 0.9


@dataclass(frozen=True)
class Point:
    """A candidate's seconds an example."""

    name: str
    exact: bool
    predicted: float
    measured: float

    @property
    def error(self):
        """Of the prediction, relative to what was measured."""
        return abs(self.predicted / self.measured - 1)

    def told(self):
        return {"candidate": self.name, "exact": self.exact, "predicted": self.predicted, "measured": self.measured}


def here(found):
    """Candidates (see `apportion.planner.trials.trial`) of those that were priced for this machine, with the price of
    each."""
    chosen = {}
    for p in found:
        if p.cost is not None and isinstance(p.launcher, Local):
            made = candidate(p.strategy, p.launcher)
            chosen.setdefault(str(made), (made, p.cost))
    return list(chosen.values())


def points(priced, workload):
    """Every candidate measured a little, few of them at a time: [(candidate, Point)]; what cannot run is left out."""
    found = []
    for begin in range(0, len(priced), AT_ONCE):
        some = priced[begin : begin + AT_ONCE]
        rounds = in_turns([c for c, _ in some], workload, FIRST_ROUNDS)
        for made, cost in some:
            if str(made) in rounds:
                seconds = median(rounds[str(made)])
                exact = made.strategy.exact
                found.append((made, Point(str(made), exact, cost.seconds_per_example, seconds)))
    return found


def in_turns(candidates, workload, rounds):
    """Seconds an example of each candidate in each round, by its name. What cannot run is left out."""
    refused = []
    try:
        with parked(candidates, workload, {"evaluation": None}, refused) as groups:
            steps = [_many(group) for group in groups]
            taken = {str(group.measured.candidate): [] for group in groups}
            for _ in range(rounds):
                for group, many in zip(groups, steps, strict=True):
                    taken[str(group.measured.candidate)].append(_seconds(group, many))
            return taken
    except (ValueError, WorkerFailed) as error:
        if len(candidates) == 1:
            print(f"left out: {candidates[0]}: {error}", flush=True)
            return {}
    alone = [in_turns([c], workload, rounds) for c in candidates]  # one that fails takes no other with it
    return {name: taken for each in alone for name, taken in each.items()}


def _many(group):
    """Steps that fill a round."""
    group.go(2, measure=False)
    _seconds(group, 2)
    return max(1, min(500, round(ROUND_SECONDS / mean(group.measured.seconds))))


def _seconds(group, many):
    """Of an example, over so many steps: the mean, since an average or a push now and then is a part of them."""
    before, examples = len(group.measured.seconds), group.measured.examples
    group.go(many)
    return sum(group.measured.seconds[before:]) / (group.measured.examples - examples)


def regret(chosen, measured, workload):
    """The chosen candidate against the best of those that are exact, in a fresh paired run: (best's name, seconds an
    example of the chosen, of the best, interval of chosen / best)."""
    exact = [(made, point.measured) for made, point in measured if made.strategy.exact]
    if not exact:
        raise SideFailed("no exact candidate could be measured")
    least = min(seconds for _, seconds in exact)
    close = [made for made, seconds in sorted(exact, key=lambda e: e[1]) if seconds < CLOSE * least]
    others = [made for made in close if str(made) != str(chosen)][: AT_ONCE - 1]
    taken = in_turns([chosen, *others], workload, ROUNDS)
    best = min(taken, key=lambda name: median(taken[name]))
    own = taken[str(chosen)]
    return best, median(own), median(taken[best]), interval([a / b for a, b in zip(own, taken[best], strict=True)])


def interval(ratios):
    """That holds the median ratio with at least 90 % probability, whatever their distribution: between two of them,
    counted from either end (of n tosses of a coin fewer than k are heads)."""
    n, k = len(ratios), 0
    while 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n <= 1 - SURE:
        k += 1
    ordered = sorted(ratios)
    return (ordered[k - 1], ordered[n - k]) if k else (ordered[0], ordered[-1])


def distinguishable(low, high):
    """Is one of two slower, as sure as SURE?"""
    return log(low) * log(high) > 0
