"""Turns prices into a plan: ranked, folded and explained; repeated whenever trials have taught something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.cost_model.cluster import Cluster
from apportion.cost_model.cost import TERMS
from apportion.cost_model.profile import Profile
from apportion.planner.calibration import Correction, correction
from apportion.planner.candidate import Priced, family, folded, ranked, tied, trials_of
from apportion.planner.plan import Matched, Plan
from apportion.planner.rollouts.rates import rates, why
from apportion.planner.search import search
from apportion.planner.units import label, microseconds, milliseconds, size
from apportion.planner.what_if.cluster_variants import of_hosts
from apportion.planner.what_if.sensitivity import sensitivities
from apportion.runtime.worker.cpu_wait import noted

MOST_HOSTS = 64
"""The largest number of hosts of one cluster that is tried to match another cluster."""
MOST_REASONS = 4
"""The largest number of reasons in the error that is raised where no strategy can run."""
MATCHED_WITH = 6
"""The number of the fastest strategies on the other cluster that are looked at when its hosts are counted."""


def make(  # noqa: PLR0913 (what a plan is of, and what was asked for)
    found: Sequence[Priced],
    profile: Profile,
    cluster: Cluster,
    *,
    workload: str | None = None,
    chosen: Priced | None = None,
    against: Cluster | None = None,
    workers: int | None = None,
) -> Plan:
    """Make the plan that these prices (and measurements) speak for. ``chosen``: an approximate candidate, where it was
    asked for and has shown in a pilot that it learns enough; None: the best exact one. ``against``: a cluster to match.

    Raises ValueError, with the reasons, where nothing exact can run.
    """
    order = ranked(found)
    first = chosen if chosen is not None else (order[0] if order else None)
    if first is None or first.cost is None or (chosen is None and not first.strategy.exact):
        raise ValueError(_none(order, profile, cluster))
    candidates = [p.with_overhead(profile) for p in folded([first, *(p for p in order if p is not first)])]
    taught = _taught(order)
    played = rates(profile, cluster, taught)
    return Plan(
        workload=profile.name if workload is None else workload,
        profile=profile,
        cluster=cluster,
        chosen=candidates[0],
        candidates=tuple(candidates),
        why=why_first(candidates, profile),
        reasons=tuple(why_not(p, candidates[0], profile) for p in candidates),
        sensitivities=sensitivities(order, first, profile, cluster, taught=taught, workers=workers),
        rollouts=played,
        rollouts_why=why(played, "" if profile.rollouts is None else profile.rollouts.left_out),
        matched=None if against is None else match(candidates[0], profile, cluster, against),
        found=tuple(order),
        only_workers=workers,
    )


def _taught(found: Sequence[Priced]) -> Correction | None:
    """Return the correction that the trials have taught; None where nothing was tried."""
    made = trials_of(found)
    return correction(made) if made else None


def _none(order: Sequence[Priced], profile: Profile, cluster: Cluster) -> str:
    refused = [p for p in folded(order) if p.cost is None and p.strategy.exact]
    reasons = "; ".join(f"{p.strategy}: {p.refusal}" for p in refused[:MOST_REASONS])
    able = dict.fromkeys(family(p.strategy) for p in order if p.cost is not None)
    others = f"; approximate ones can, which compute something else: {', '.join(able)}" if able else ""
    return f"nothing exact can run {profile.name} on cluster {label(cluster)}: {reasons}{others}"


def match(chosen: Priced, profile: Profile, cluster: Cluster, against: Cluster) -> Matched:
    """Predict how many hosts of the slower of two clusters are as fast as the other cluster."""
    there = _able(profile, against)
    best = there[0]
    names = [str(p.strategy).partition("(")[0] for p in (*there[:MATCHED_WITH], chosen)]
    names = list(dict.fromkeys([*names, "data_parallel"]))  # on one device nothing is best that goes on to others
    ratio = best.seconds_per_example / chosen.seconds_per_example
    said = f"on {label(against)} {best} takes {milliseconds(best.step_seconds)} a step"
    if 0.99 < ratio < 1.01:
        return Matched(other=against.name, best=best, hosts=None, text=f"{said}, as long as here")
    slow, wanted = (against, chosen) if ratio > 1 else (cluster, best)
    hosts = hosts_to_match(profile, slow, wanted.seconds_per_example, names)
    many = f"no number up to {MOST_HOSTS}" if hosts is None else f"{hosts}"
    if ratio > 1:
        text = f"{said}, {ratio:.2f} times as long as here; {many} of those hosts match what is here"
    else:
        text = f"{said}, {1 / ratio:.2f} times as fast as here; {many} of the hosts here match that"
    return Matched(other=against.name, best=best, hosts=hosts, text=text)


def hosts_to_match(
    profile: Profile, cluster: Cluster, seconds_per_example: float, strategies: Sequence[str] | None = None
) -> int | None:
    """Find the smallest number of hosts, each like the cluster's first one, that need no more than these seconds for an
    example, with one of these strategies; None: ``MOST_HOSTS`` are too few."""

    def enough(hosts: int) -> bool:
        try:
            return _able(profile, of_hosts(cluster, hosts), strategies)[0].seconds_per_example <= seconds_per_example
        except ValueError:
            return False

    few, many = 0, 1
    while not enough(many):
        few, many = many, many * 2
        if many > MOST_HOSTS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def _able(profile: Profile, cluster: Cluster, strategies: Sequence[str] | None = None) -> list[Priced]:
    """Return the exact candidates that can run on the cluster, the fastest first. Raises ValueError where there is
    none."""
    able = [p for p in search(profile, cluster, strategies=strategies) if p.cost is not None and p.strategy.exact]
    if not able:
        raise ValueError(f"nothing exact can run {profile.name} on cluster {label(cluster)}")
    return sorted(able, key=lambda p: p.seconds_per_example)


# Explanations in words why the first candidate won and why each other lost, from what their steps are made of.


_SAVES = {
    "computing": "of computing",
    "updating": "of updating weights",
    "communicating": "of communication that nothing hides",
    "bubble": "of bubble",
    "waiting": "of waiting for the slowest worker",
    "loading": "of loading examples",
}
_NOUNS = {
    "computing": "computing",
    "updating": "updating of weights",
    "communicating": "communication that nothing hides",
    "bubble": "bubble",
    "waiting": "waiting for the slowest worker",
    "loading": "loading of examples",
}
_SUMS = ("data_parallel", "map_reduce", "local_sgd", "fully_sharded")
"""The strategies that send gradients, or weights, of the whole network."""
_SMALL = 0.02
"""The smallest share of a step by which two parts must differ to be mentioned."""


def why_first(candidates: Sequence[Priced], profile: Profile) -> tuple[str, ...]:
    """Write a few lines on the first candidate, and how it compares with the second."""
    first = candidates[0]
    assert first.cost is not None
    how = _how(first)
    lines = [
        f"{first}: {milliseconds(first.step_seconds)} a step, {how}, {first.examples_per_second:,.0f} examples/s "
        f"(within {first.error:.0%})"
    ]
    if profile.frames:
        lines.append(_of_frames(first, profile))
    if first.layout.ranks == 1:
        lines.append("do not distribute: one process is fastest" + _no_other(candidates))
    rivals = [p for p in candidates[1:] if p.cost is not None and p.strategy.exact]
    if rivals:
        lines.append(_against(first, rivals[0], profile))
    if busy := noted(profile.without_core if first.tried is None else first.tried.without_core):
        lines.append(busy)
    return tuple(lines)


def _of_frames(first: Priced, profile: Profile) -> str:
    """Describe how many frames a second that is, where the time of one goes, and what that says of cores."""
    whole = first.seconds_per_example * first.layout.ranks
    played = profile.environment_seconds + profile.acting_seconds
    parts = (("in the environment", profile.environment_seconds), ("acting", profile.acting_seconds))
    times = ", ".join(f"{microseconds(seconds / profile.frames)} {where}" for where, seconds in parts)
    learning = microseconds(max(0.0, whole - played) / profile.frames)
    return (
        f"{first.examples_per_second * profile.frames:,.0f} frames/s: of a frame {times} and {learning} learning, on a "
        f"worker's core; {min(1.0, played / whole):.0%} of it is played step by step, which more cores divide and a "
        "GPU does not hasten"
    )


def _no_other(candidates: Sequence[Priced]) -> str:
    able = [p for p in candidates[1:] if p.cost is not None and p.layout.ranks > 1 and p.strategy.exact]
    return "" if able else ", and nothing else that is exact can run this network there"


def _against(first: Priced, second: Priced, profile: Profile) -> str:
    ratio = second.seconds_per_example / first.seconds_per_example
    if ratio < 1:
        fewer = (
            f" ({_workers(first)} instead of {_workers(second)})" if first.layout.ranks != second.layout.ranks else ""
        )
        return (
            f"{second} is {1 / ratio - 1:.1%} faster, which is within the uncertainty: the simpler one is taken{fewer}"
        )
    text = f"{ratio:.2f} times as fast as {second}"
    saved, lost = differences(first, second, profile.batch_size)
    if not (first.expected and second.expected):
        return f"{text}, {_how(second)}{_by_prediction(first, second, saved, lost)}"
    if saved:
        text += ": it saves " + _and(f"{milliseconds(s)} {_SAVES[term]}" for term, s in saved.items())
    if lost:
        text += " and spends " if saved else ": it spends "
        text += _and(f"{milliseconds(s)} more {_SAVES[term]}" for term, s in lost.items())
    return text


def _how(p: Priced) -> str:
    return "measured" if p.tried is not None else "predicted" if p.expected else "predicted with what the trials taught"


def _by_prediction(first: Priced, second: Priced, saved: Mapping[str, float], lost: Mapping[str, float]) -> str:
    """Describe what was predicted of two candidates where something else is known of one of them now: in words, as the
    milliseconds of the prediction do not add up to what was found."""
    assert first.cost is not None
    assert second.cost is not None
    if first.cost.seconds_per_example >= second.cost.seconds_per_example:
        ours, theirs = first.cost.step_seconds, second.cost.step_seconds
        return f"; predicted were {milliseconds(ours)} against {milliseconds(theirs)} a step"
    parts = [f"saves {_and(_NOUNS[term] for term in saved)}"] if saved else []
    parts += [f"spends more {_and(_NOUNS[term] for term in lost)}"] if lost else []
    return f": by prediction it {' and '.join(parts)}" if parts else ""


def differences(first: Priced, second: Priced, batch_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return (what the first candidate saves, what it spends more) in seconds for one batch, by term, the largest
    first."""
    ours, theirs = per_batch(first, batch_size), per_batch(second, batch_size)
    least = _SMALL * sum(theirs.values())
    by = {term: theirs[term] - ours[term] for term in TERMS}
    order = sorted(by, key=lambda term: -abs(by[term]))
    return (
        {term: by[term] for term in order if by[term] > least},
        {term: -by[term] for term in order if -by[term] > least},
    )


def per_batch(p: Priced, batch_size: int) -> dict[str, float]:
    """Return the predicted seconds for one global batch, by term: strategies differ in how many examples a step learns
    from."""
    assert p.cost is not None
    return {term: p.cost.terms.get(term, 0.0) * batch_size / p.cost.examples for term in TERMS}


def why_not(p: Priced, first: Priced, profile: Profile) -> str:
    """Say in one line why this candidate was not chosen."""
    if p is first:
        return "chosen"
    if p.cost is None:
        return p.refusal
    if not p.strategy.exact:
        return approximate(p, first)
    slower = p.seconds_per_example / first.seconds_per_example
    if slower <= 1:
        many = f": {_workers(p)}" if p.layout.ranks != first.layout.ranks else ""
        return f"as fast within the uncertainty ({1 - slower:.1%} faster), and less simple{many}"
    by = f"{slower:.2f} times as long" if slower >= 1.1 else f"{slower - 1:.1%} slower"
    more = differences(first, p, profile.batch_size)[0]
    tie = ", which is within the uncertainty" if tied(first, p) else ""
    if not (first.expected and p.expected):
        return f"{by}{tie}, {_how(p)}{_share(p, first, more)}"
    if not more:
        return f"{by}{tie}: a little of everything"
    term, seconds = next(iter(more.items()))
    return f"{by}{tie}: {_dominating(p, term, seconds, profile)}"


def _share(p: Priced, first: Priced, more: Mapping[str, float]) -> str:
    """Describe the prediction of a candidate whose measured time turned out otherwise: the term that it has most more
    of, as a share of its own step; or that it was not expected to take longer at all."""
    assert p.cost is not None
    assert first.cost is not None
    if p.cost.seconds_per_example <= first.cost.seconds_per_example:
        off = p.step_seconds / p.cost.step_seconds
        own = f"{off:.2f} times its prediction" if off > 1.005 else "no longer than it was predicted to"
        ours = first.step_seconds / first.cost.step_seconds
        return f": it takes {own}, {first.strategy} {ours:.2f} times"
    if not more:
        return ""
    term = next(iter(more))
    share = p.cost.terms.get(term, 0.0) / p.cost.step_seconds
    return f": {_NOUNS[term]} is {share:.0%} of its step by prediction"


def approximate(p: Priced, exact: Priced) -> str:
    """Describe a strategy that computes something else than training on one device: its step time alone decides
    nothing."""
    faster = exact.seconds_per_example / p.seconds_per_example
    if faster > 1.005:
        return (
            f"approximate: {faster:.2f}x faster per example; wins only if it needs less than {faster:.2f}x the examples"
        )
    return f"approximate, and no faster per example ({faster:.2f}x)"


def _dominating(p: Priced, term: str, seconds: float, profile: Profile) -> str:
    assert p.cost is not None
    took = milliseconds(seconds)
    share = p.cost.terms.get(term, 0.0) / p.cost.step_seconds
    if term == "communicating":
        if family(p.strategy).partition("(")[0] in _SUMS:
            return f"waits {took} for the sum of {size(profile.parameter_bytes)} of gradients"
        return f"waits {took} for what its workers send each other"
    if term == "bubble":
        half = "half" if 0.45 <= share <= 0.55 else f"{share:.0%}"
        return f"{half} of each step is bubble"
    if term == "waiting":
        return f"waits {took} for the slowest of {_workers(p)}"
    if term == "loading":
        return f"loads examples for {took} longer"
    if term == "updating":
        return f"updates {size(profile.parameter_bytes)} of weights for {took} longer"
    return f"computes {took} longer: {_workers(p)} of {_count(p.layout.threads, 'thread')}"


def _workers(p: Priced) -> str:
    return _count(p.layout.ranks, "worker")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _and(parts: object) -> str:
    texts = list(parts)  # type: ignore[call-overload]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1] if texts else ""
