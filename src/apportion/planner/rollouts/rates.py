"""The frames a second of rollouts of any size by every strategy that a network which acts is trained with.

A size is another profile of the same network: its examples take what was measured of rollouts, and everything else, the
update, pushing, pulling, waiting, is priced by the strategy as for the workload itself. Each worker has one actor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from apportion.core.strategy import Strategy
from apportion.core.value import find
from apportion.cost_model.cluster import Cluster
from apportion.cost_model.placement import Placement
from apportion.cost_model.profile import Pass, Profile
from apportion.cost_model.rollouts import RolloutTimes
from apportion.planner.calibration import Correction
from apportion.planner.candidate import Priced, family, priced

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
