"""The changes that would change the answer: the model is run again with one thing changed. Only changes of the answer
by more than predictions may be off are listed, except for the bandwidth at which two candidates are equally fast."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from apportion.cost_model.cluster import Cluster
from apportion.cost_model.compute import of_rows
from apportion.cost_model.profile import Profile
from apportion.planner.calibration import Correction
from apportion.planner.candidate import TIE, Priced, ranked
from apportion.planner.search import search
from apportion.planner.units import rate
from apportion.planner.what_if.cluster_variants import ASSUMED, across_hosts, one_gpu_more, one_host_more
from apportion.planner.what_if.crossover import Crossing, crossings
from apportion.planner.what_if.hypothetical import WhatIf

BATCHES = (2.0, 4.0, 0.5)


def sensitivities(
    found: Sequence[Priced],
    chosen: Priced,
    profile: Profile,
    cluster: Cluster,
    *,
    taught: Correction | None = None,
    workers: int | None = None,
) -> tuple[str, ...]:
    """Write one line for each change that would change the answer.

    ``found``: all candidates that were priced; ``chosen``: one of them, by prediction or by trials, from which
    ``taught`` was learned. ``workers``: the number that was asked for, which would be asked for elsewhere too. Nothing
    is said of an approximate candidate, which was chosen by a pilot and not by prediction; nor where predictions are
    far from the trials.
    """
    if not chosen.strategy.exact:
        return ()
    model = WhatIf(found, chosen, profile, cluster, taught)
    if not model.here or not model.reliable:
        return ()
    return (*map(_crossing_sentence, crossings(model)), *_batches(model), *_more(model, workers))


def _crossing_sentence(crossing: Crossing) -> str:
    where = "of memory between workers" if crossing.kind == "memory" else f"of {crossing.kind}"
    at_, here = rate(crossing.kind, crossing.bandwidth), rate(crossing.kind, crossing.now)
    if crossing.bandwidth > crossing.now:
        above = f"above {at_} {where} (here {here})" if at_ != here else f"with any more than the {here} {where} here"
        return f"{crossing.above} wins {above}"
    if at_ == here:
        return f"{crossing.below} wins with any less than the {here} {where} here"
    return f"{crossing.above} wins above {at_} {where} (here {here}); below, {crossing.below}"


def _batches(model: WhatIf) -> list[str]:
    """Find other batch sizes, no larger than the data set, at which another candidate is chosen, and is faster by more
    than predictions may be off; each candidate once."""
    lines, named = list[str](), set[str]()
    for factor in BATCHES:
        batch = model.profile.batch_size * factor
        if batch < 1 or batch != int(batch) or batch > (model.profile.examples or batch):
            continue
        other = of_rows(model.profile, int(batch))
        there = model.searched(profile=other)
        best = model.other(there)
        if best is None or str(best) in named:
            continue
        ours = there.ours
        if ours is None:
            text = f"{model.chosen.strategy} cannot run there"
        elif (ratio := ours.seconds_per_example / best.seconds_per_example) > 1 + _off(model, other, best, ours):
            text = f"{ratio:.2f} times as fast as {model.chosen.strategy}"
        else:
            continue
        named.add(str(best))
        lines.append(f"with batch {int(batch)} choose {best} ({text})")
    return lines


def _off(model: WhatIf, profile: Profile, *two: Priced) -> float:
    """Return the share by which the ratio of two predictions may be off, including what trials have refuted here."""
    return max(p.with_overhead(profile).error for p in two) + model.doubted - 1


def _more(model: WhatIf, workers: int | None) -> list[str]:
    """Say how much one more host helps, or one more GPU."""
    lines, cluster = [], model.cluster
    grown = one_host_more(cluster)
    assumed = "" if across_hosts(cluster) is not None else f" on {rate('ethernet', ASSUMED['bandwidth'])} Ethernet"
    for larger, what in (
        (grown, f"a {_ordinal(len(grown.hosts))} host{assumed}"),
        (one_gpu_more(cluster), "one GPU more"),
    ):
        if larger is not None:
            lines += _helps(model, larger, {d.name for d in cluster.devices}, workers, what)
    return lines


def _helps(model: WhatIf, larger: Cluster, known: Collection[str], workers: int | None, what: str) -> list[str]:
    """Say how much a larger cluster helps, from those of its layouts that use what is new there: the others are priced
    already. Less than a tie is not counted as help: a plan there would leave the new device idle."""
    new = [d.name for d in larger.devices if d.name not in known]
    found = search(model.profile, larger, workers=workers, strategies=model.strategies, using=new)
    best = next((p for p in ranked(model.learned(found)) if p.cost is not None and p.strategy.exact), None)
    if best is None:
        return []
    gain = model.here[0].seconds_per_example / best.seconds_per_example - 1
    return [f"{what} helps {gain:.0%}: {best}"] if gain > TIE else []


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third", 4: "fourth", 5: "fifth"}.get(n, f"{n}th")
