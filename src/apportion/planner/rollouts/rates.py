"""The frames a second of rollouts of any size by every strategy that a network which acts is trained with.

A size is another profile of the same network: its examples take what was measured of rollouts, and everything else, the
update, pushing, pulling, waiting, is priced by the strategy as for the workload itself. Each worker has one actor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from apportion.core.strategy import Strategy
from apportion.core.value import find
from apportion.cost_model.cluster import Cluster, Placement
from apportion.cost_model.profile import Pass, Profile
from apportion.cost_model.rollouts import RolloutTimes
from apportion.planner.calibration import Correction
from apportion.planner.candidate import Priced, family, priced
from apportion.planner.units import microseconds

ALONE, SYNCHRONOUS, ASYNCHRONOUS = "single_device", "data_parallel", ("parameter_server", "hogwild")


@dataclass(frozen=True, kw_only=True)
class RolloutRate:
    """The frames a second that are predicted of a strategy with rollouts of one size. The seconds are those of a frame,
    of the worker that makes it."""

    strategy: str
    workers: int
    kind: str
    """The kind of the device that each worker's network is on: ``cpu``, one core, or ``cuda``."""
    environments: int
    """The number of environments of a worker, K."""
    steps: int
    """The number of steps of a rollout, T."""
    own: bool
    """Has the workload these numbers of environments and steps itself?"""
    frames_per_second: float
    """The frames a second of all workers together."""
    error: float
    """The share by which they may be off, by the rule for other predictions."""
    environment_seconds: float
    acting_seconds: float
    learning_seconds: float
    """The seconds of forward and backward."""
    rest_seconds: float
    """The seconds of everything else: rollouts that are made a batch, the update, pushing, pulling, waiting."""

    @property
    def seconds(self) -> float:
        """The seconds of a frame, of the worker that makes it."""
        return self.environment_seconds + self.acting_seconds + self.learning_seconds + self.rest_seconds


def rates(profile: Profile, cluster: Cluster, taught: Correction | None = None) -> tuple[RolloutRate, ...]:
    """Predict the frames a second of every size that was measured, on those devices of the cluster that it was measured
    on, ordered by size; empty where the network does not make its examples. ``taught``: what trials have taught about
    predictions."""
    times = profile.rollouts
    if times is None:
        return ()
    found = [
        rate
        for device, together in times.places
        for layout in _layouts(cluster, device, together)
        for environments, steps in times.sizes(device, together)
        for strategy in _strategies(layout.ranks)
        if (rate := predicted(strategy, layout, profile, times, (environments, steps), taught)) is not None
    ]
    return tuple(sorted(found, key=lambda rate: (rate.environments, rate.steps, rate.kind, rate.workers)))


def predicted(
    strategy: Strategy,
    layout: Placement,
    profile: Profile,
    times: RolloutTimes,
    size: tuple[int, int],
    taught: Correction | None = None,
) -> RolloutRate | None:
    """Predict the frames a second of a strategy on a layout with rollouts of this size (K, T); None where the strategy
    cannot run there."""
    device, workers = layout.device(0), layout.ranks
    examples = workers if family(strategy) == SYNCHRONOUS else 1  # of a batch: those of all workers, or each one's own
    sized = of_size(profile, times, device.model, layout.together(0), size, examples)
    p = priced(strategy, layout, sized).with_overhead(sized)
    if p.cost is None:
        return None
    frames = size[0] * size[1]
    seconds = _step_seconds(p, taught)
    a_frame = seconds * workers / (p.cost.examples * frames)
    factor = seconds / p.cost.step_seconds
    (passes,) = sized.passes
    environment, acting, learning = (
        factor * part / frames
        for part in (sized.environment_seconds, sized.acting_seconds, passes.forward + passes.backward)
    )
    return RolloutRate(
        strategy=str(strategy),
        workers=workers,
        kind=device.kind,
        environments=size[0],
        steps=size[1],
        own=size == (times.environments, times.steps),
        frames_per_second=workers / a_frame,
        error=p.error,
        environment_seconds=environment,
        acting_seconds=acting,
        learning_seconds=learning,
        rest_seconds=max(0.0, a_frame - environment - acting - learning),
    )


def of_size(
    profile: Profile, times: RolloutTimes, device: str, together: int, size: tuple[int, int], examples: int
) -> Profile:
    """Return the profile of the same network with rollouts of another size, ``examples`` of them a batch, as it would
    be measured on this device in each of ``together`` workers at once."""
    playing, learning = times.playing(device, together, *size), times.learning(device, together, *size)
    update, fused = times.updating(device, together)
    frames = size[0] * size[1]
    share = examples * frames / (profile.batch_size * profile.frames)
    layers = (
        replace(
            layer,
            activation_bytes=round(layer.activation_bytes * share),
            kept_bytes=round(layer.kept_bytes * share),
            flops=layer.flops * share,
            timings=(),
        )
        for layer in profile.layers
    )
    timed = Pass(
        rows=1,
        together=together,
        forward=learning.forward,
        backward=learning.backward,
        update=update,
        fused_update=fused,
        without_core=profile.without_core,
    )
    return replace(
        profile,
        batch_size=examples,
        layers=tuple(layers),
        device=device,
        passes=(timed,),
        loading_seconds=sum(playing),
        frames=frames,
        environment_seconds=playing.environment,
        acting_seconds=playing.acting,
        rollouts=None,
    )


def _step_seconds(p: Priced, taught: Correction | None) -> float:
    assert p.cost is not None
    return p.cost.step_seconds if taught is None else taught.step_seconds(family(p.strategy), p.cost)


def _layouts(cluster: Cluster, model: str, together: int) -> Iterator[Placement]:
    """Return the layouts of one host on which ``together`` workers compute at once on each device of this model: one
    device of cores; one GPU, and all of them."""
    devices = [d for d in cluster.devices if d.model == model]
    devices = [d for d in devices if d.host == devices[0].host]
    if not devices or together > devices[0].cores:
        return
    yield Placement(cluster=cluster, devices=(devices[0].name,) * together)
    if devices[0].kind == "cuda" and len(devices) > 1:
        yield Placement(cluster=cluster, devices=tuple(d.name for d in devices))


def _strategies(workers: int) -> list[Strategy]:
    """Return the strategies by which ``workers`` workers train a network that acts."""
    names = (ALONE,) if workers == 1 else (SYNCHRONOUS, *ASYNCHRONOUS)
    return [find(name, "apportion.strategies")() for name in names]


# Frames a second in words: a table of sizes by strategies, and why cores, or a GPU, win or not.


EQUAL = 1.05
"""The factor up to which two predictions are called equally fast."""
NOTABLE = 0.05
"""The least share of a frame by which one of its parts must differ to be named."""
_PARTS = {
    "environment_seconds": "the environment",
    "acting_seconds": "acting",
    "learning_seconds": "learning",
    "rest_seconds": "the rest (the update, pushing, pulling, waiting)",
}


class RatesTable(NamedTuple):
    """Frames a second by size and strategy, in texts."""

    heads: list[str]
    """The heads of the columns: of the sizes, then of each strategy on each kind of device."""
    rows: list[list[str]]


def table(rates: Sequence[RolloutRate]) -> RatesTable:
    """Make the table: each cell has the frames a second with the best number of workers, and that number in brackets.
    The best cell is marked by ``>``, the workload's own size by ``own``."""
    columns = list(dict.fromkeys((r.strategy, r.kind) for r in sorted(rates, key=lambda r: (r.kind, r.workers))))
    kinds = {kind for _, kind in columns}
    best = _best(rates)
    rows = []
    for size in dict.fromkeys((r.environments, r.steps) for r in rates):
        there = [r for r in rates if (r.environments, r.steps) == size]
        cells = [f"{_size(there[0])}{' own' if there[0].own else ''}"]
        for column in columns:
            found = [r for r in there if (r.strategy, r.kind) == column]
            cells.append(_cell(_best(found), best) if found else "-")
        rows.append(cells)
    return RatesTable(["K x T", *(name if len(kinds) == 1 else f"{name} {kind}" for name, kind in columns)], rows)


def _cell(rate: RolloutRate, best: RolloutRate) -> str:
    return f"{'> ' if rate is best else ''}{rate.frames_per_second:,.0f} ({rate.workers})"


def why(rates: Sequence[RolloutRate], left_out: str = "") -> tuple[str, ...]:
    """Say in a few lines which size makes most frames a second, where the time of a frame goes, whether cores and a GPU
    win, and what is not known. ``left_out``: the sizes that were not measured, and the reason."""
    if not rates:
        return ()
    best = _best(rates)
    lines = [_most(best, rates), _of_a_frame(best)]
    on_cores = [r for r in rates if r.kind == "cpu"]
    if on_cores:
        lines.append(_cores(on_cores))
    lines.append(_gpu(rates))
    if left_out:
        lines.append(f"not measured: {left_out}")
    lines.append(
        "these are frames a second and not scores: with another K or T a network learns differently from as many frames"
    )
    return tuple(lines)


def _most(best: RolloutRate, rates: Sequence[RolloutRate]) -> str:
    text = (
        f"most frames a second are predicted of {_size(best)} by {_who(best)}: {best.frames_per_second:,.0f} (within "
    )
    text += f"{best.error:.0%})"
    own = [r for r in rates if r.own]
    if best.own or not own:
        return f"{text}, the workload's own size" if best.own else text
    usual = _best(own)
    times = best.frames_per_second / usual.frames_per_second
    return f"{text}, {times:.2f} times those of the workload's own {_size(usual)} by {_who(usual)}"


def _of_a_frame(rate: RolloutRate) -> str:
    times = [f"{microseconds(getattr(rate, part))} {name}" for part, name in _PARTS.items()]
    return f"of a frame of a worker there {', '.join(times[:-1])} and {times[-1]}"


def _cores(rates: Sequence[RolloutRate]) -> str:
    """Compare one worker with several on cores, with rollouts of the size that makes most frames there."""
    best = _best(rates)
    there = [r for r in rates if (r.environments, r.steps) == (best.environments, best.steps)]
    alone, several = [r for r in there if r.workers == 1], [r for r in there if r.workers > 1]
    if not alone or not several:
        return "whether more cores win is not known: only one number of workers was measured"
    one, many = _best(alone), _best(several)
    times = many.frames_per_second / one.frames_per_second
    grown = _grown(one, many)
    if times > EQUAL:
        text = (
            f"cores win: {many.workers} workers make {times:.2f} times the frames of one, since each plays and learns "
            "by itself"
        )
        return f"{text}; {grown}" if grown else f"{text}, and a frame takes none of them longer"
    reason = f": {grown}" if grown else ""
    return f"cores do not win: {many.workers} workers make {times:.2f} times the frames of one{reason}"


def _grown(one: RolloutRate, many: RolloutRate) -> str:
    """Say how much longer a frame takes a worker of several, and what takes longer; empty where nothing does."""
    longer = many.seconds - one.seconds
    if longer <= NOTABLE * one.seconds:
        return ""
    more = {name: getattr(many, part) - getattr(one, part) for part, name in _PARTS.items()}
    name = max(more, key=lambda part: more[part])
    return (
        f"a frame takes each of them {microseconds(many.seconds)} instead of {microseconds(one.seconds)}, most of it "
        f"for {name}"
    )


def _gpu(rates: Sequence[RolloutRate]) -> str:
    """Say whether a GPU makes more frames than the cores; where there is none, how many more it could make at most."""
    on_gpu, on_cores = [r for r in rates if r.kind != "cpu"], [r for r in rates if r.kind == "cpu"]
    if not on_gpu:
        return _no_gpu(on_cores)
    if not on_cores:
        return "whether cores win is not known: rollouts were measured on the GPU alone"
    best, rival = _best(on_gpu), _best(on_cores)
    times = best.frames_per_second / rival.frames_per_second
    parts = (
        f"of a frame of a worker on the GPU {_both(best)}, on a core {_both(rival)}; the environments are stepped on "
        "cores in either case"
    )
    if times > EQUAL:
        return f"the GPU wins: {_who(best)} makes {times:.2f} times the frames of {_who(rival)} on cores; {parts}"
    if times * EQUAL < 1:
        return f"the GPU does not win: {_who(best)} makes {times:.2f} times the frames of {_who(rival)}; {parts}"
    return f"the GPU and the cores make about as many frames; {parts}"


def _both(rate: RolloutRate) -> str:
    return f"{microseconds(rate.acting_seconds)} are acting and {microseconds(rate.learning_seconds)} learning"


def _no_gpu(rates: Sequence[RolloutRate]) -> str:
    """Bound what a GPU could do for one worker: it can hasten no more than learning, since a step of the environment
    waits for each action, whose few observations take a GPU no less time than a core."""
    alone = [r for r in rates if r.workers == 1]
    if not alone:
        return "no GPU was measured"
    one = _best(alone)
    share = one.learning_seconds / one.seconds
    return (
        f"no GPU was measured: learning is {share:.0%} of a frame of {_size(one)} by {_who(one)}, so one that learnt "
        f"in no time, and acted as fast as a core, would make {1 / max(1e-9, 1 - share):.2f} times the frames"
    )


def _best(rates: Iterable[RolloutRate]) -> RolloutRate:
    return max(rates, key=lambda rate: rate.frames_per_second)


def _size(rate: RolloutRate) -> str:
    return f"{rate.environments} x {rate.steps}"


def _who(rate: RolloutRate) -> str:
    return rate.strategy if rate.workers == 1 else f"{rate.strategy} with {rate.workers} workers"
