"""A workload's profile, measured on this host: whole steps, layers, and the parts of layers that strategies make.

Whatever is timed is timed by as many workers at once as will compute at once: one that has the machine to itself finds
more memory bandwidth, and a profile of it can be wrong by a factor of two.

::

    layouts     2 threads        1 thread         2 x 1 thread
                |                |                |
    a budget    steps ... | layers ... | parts    of layers, the longest first
    each        B, B/2, B/8 rows         (units, height, ...) by 2, 4, ...

A worker that computes alone has no share of B/2 rows, and of its layers only the proportions matter: they are timed on
B/8. What takes long is repeated less often (``workload_worker.Runs``), and its parts are timed on fewer rows: the ratio
of the whole layer's time to the part's is the same there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from apportion.comm.channel import Message
from apportion.core.value import find
from apportion.core.workload import Workload
from apportion.cost_model.cluster import Cluster, Device, Placement
from apportion.cost_model.profile import LayerProfile, Pass, Profile, Timing
from apportion.cost_model.rollouts import RolloutTimes
from apportion.profiler.rollouts.grid import RolloutGrid
from apportion.runtime.launch.local import Local
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import MANY_STEPS, Job

SECONDS = 15.0
"""The seconds of measuring, for all layouts together."""
ANSWER_SECONDS = 600.0
STEPS_SHARE, LAYERS_SHARE = 0.4, 0.3
"""The shares of a layout's time for whole steps and for layers; parts of layers have the rest."""
PARTS_LEAST = 0.5
"""The share of a layout's time that parts of layers have where the least number of steps takes longer than its share:
parts are many, and small."""
ROWS = (1, 2, 8)
"""The numbers that the batch is divided by: the whole of it, a worker's share (of more workers where there are more), a
micro-batch."""
MOST_PARTS = 8
"""The largest number of parts that a layer is timed in; for more parts the time is worked out."""
PART_SECONDS = 0.5
"""The seconds of timing a part of a layer, at most."""
MOST_ON_CORES = 16
"""The largest number of workers that rollouts are measured with on the cores of a host with GPUs."""
PARTS_STEP_SECONDS = 0.1
"""The least seconds of a step on the rows that parts are timed on: the fewest such rows; where no step takes so long,
all rows."""


@dataclass
class _Setting:
    """A number of workers that compute at once on a device like this host's, and the numbers of parts that their
    layouts may cut a layer into."""

    threads: int
    together: int
    counts: set[int] = field(default_factory=set)
    shared: bool = False
    """Is a batch divided among the ranks of one of its layouts?"""

    @property
    def weight(self) -> int:
        """The weight of the setting when time is shared out: where there are parts of layers there is more to do."""
        return 2 if self.counts else 1


def profile(
    workload: Workload | str,
    cluster: Cluster,
    layouts: Sequence[Placement],
    *,
    seconds: float = SECONDS,
    device: str | None = None,
    rollouts: float = 0.0,
) -> Profile:
    """Measure what a step of the workload takes on this host, in each way in which workers of these layouts share it.

    ``seconds``: for all of it but the start of the processes; a network so slow that the least number of runs takes
    longer is still given these runs. ``device``: the cluster's device that this host is; None: that of the first
    layout. ``rollouts``: the further seconds for rollouts of other sizes than the workload's, where its network makes
    its examples; 0: none are measured. Raises ValueError where no layout has a worker on such a device, or where the
    workload cannot be run.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0: a profile is measured; {SECONDS:g} are enough for most")
    here = _here(cluster, layouts, device)
    settings = _settings(layouts, here)
    if not settings:
        raise ValueError(f"no layout has a worker on {here.name}, whose times are to be measured: give one that has")
    facts: Message = {}
    found: list[Found] = []
    grids: list[RolloutGrid] = []
    single = _single(settings)
    beside = _beside(cluster, here, single)
    left, each = seconds, rollouts / (len(single) + len(beside))
    for at, setting in enumerate(settings):
        share = setting.weight / sum(later.weight for later in settings[at:])
        with _Measuring(workload, here, setting) as measuring:
            facts = facts or measuring.facts()
            began = time.monotonic()
            found.append(measuring.measure(facts, left * share))
            left = max(0.0, left - (time.monotonic() - began))
            if each and facts["environments"] and setting in single:
                grids.append(measuring.rollouts(facts, each))
    for other, setting in beside if each and facts["environments"] else ():
        with _Measuring(workload, other, setting) as measuring:
            grids.append(measuring.rollouts(facts, each))
    whole = made(workload if isinstance(workload, str) else None, here.model, facts, found)
    return replace(whole, rollouts=gathered(grids, facts)) if grids else whole


def _single(settings: Sequence[_Setting]) -> list[_Setting]:
    """Return the settings that rollouts are measured in: acting is done with one thread, whatever a worker has."""
    return [s for s in settings if s.threads == 1] or list(settings[:1])


def _beside(cluster: Cluster, here: Device, measured: Sequence[_Setting]) -> list[tuple[Device, _Setting]]:
    """Return the other places of a host with GPUs that rollouts are measured in: a GPU, one core, and all cores. The
    layouts of such a host have their workers on GPUs, and a network that acts may be faster on cores."""
    there: dict[str, Device] = {}
    for device in cluster.devices:
        if device.host == here.host:
            there.setdefault(device.kind, device)
    if set(there) == {"cpu"}:
        return []
    known = {(here.kind, setting.together) for setting in measured}
    wanted = [
        (device, together)
        for kind, device in there.items()
        for together in sorted({1, min(device.cores, MOST_ON_CORES)} if kind == "cpu" else {1})
    ]
    return [(device, _Setting(1, together)) for device, together in wanted if (device.kind, together) not in known]


def gathered(grids: Sequence[RolloutGrid], facts: Message) -> RolloutTimes:
    """Return what was measured of rollouts in all places."""
    left_out: dict[str, str] = {}
    for grid in grids:
        for what, reason in grid.left_out.items():
            everywhere = all(what in other.left_out for other in grids)
            left_out[what if everywhere else f"{what} {grid.where}"] = reason
    return RolloutTimes(
        environments=facts["environments"],
        steps=facts["rollout_steps"],
        played=tuple(t for grid in grids for t in grid.played),
        learned=tuple(t for grid in grids for t in grid.learned),
        left_out="; ".join(f"{what}: {reason}" for what, reason in left_out.items()),
    )


def _here(cluster: Cluster, layouts: Sequence[Placement], device: str | None) -> Device:
    if device is not None:
        return cluster.device(device)
    return layouts[0].device(0) if layouts else cluster.devices[0]


def _settings(layouts: Sequence[Placement], here: Device) -> list[_Setting]:
    found: dict[tuple[int, int], _Setting] = {}
    for layout in layouts:
        for rank in range(layout.ranks):
            if layout.device(rank).model == here.model:
                key = layout.threads, layout.together(rank)
                setting = found.setdefault(key, _Setting(*key))
                setting.counts |= {n for n in _powers(min(layout.ranks, MOST_PARTS)) if layout.ranks % n == 0}
                setting.counts |= {layout.ranks} if 1 < layout.ranks <= MOST_PARTS else set()
                setting.shared = setting.shared or layout.ranks > 1
    return list(found.values())


def _powers(most: int) -> list[int]:
    return [2**k for k in range(1, most.bit_length()) if 2**k <= most]


class _Measuring:
    """The workers of one setting."""

    def __init__(self, workload: Workload | str, here: Device, setting: _Setting) -> None:
        self._setting, self._here = setting, here
        launcher = Local(workers=setting.together, threads=setting.threads, device=here.kind)
        job = Job(
            workload=workload,
            strategy=find("single_device", "apportion.strategies")(),
            launcher=str(launcher),
            threads=setting.threads,
            device=here.kind,
            changes={"steps": MANY_STEPS},
        )
        self._pool = WorkerPool(launcher, "apportion.profiler.workload_worker:main", job, setting.together)

    def __enter__(self) -> _Measuring:
        self._pool.answers("ready", ANSWER_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def facts(self) -> Message:
        """Return the facts of the workload, see ``facts.facts``."""
        return self._ask({"kind": "facts"})[0]

    def measure(self, facts: Message, seconds: float) -> Found:
        """Measure whole steps, layers and parts, each in its share of the time."""
        times = self._ask({"kind": "loading"})[0]
        found = Found(times["seconds"], times["environment"], times["acting"])
        end = time.monotonic() + seconds
        rows = self._rows(facts)
        for at in rows:
            share = 0.5 if at == rows[0] else 0.5 / (len(rows) - 1)  # what is asked for most
            found.passes.append(self._whole(at, seconds * STEPS_SHARE * share))
        if not facts["layers"]:
            return found
        left = max(0.0, min(seconds * LAYERS_SHARE, end - time.monotonic()))
        asked = found.passes if self._setting.shared else found.passes[-1:]
        for whole in asked:
            self._layers(facts["layers"], whole, left / len(asked), found)
        if self._setting.counts and facts["untraceable"] is None:
            self._parts(facts["layers"], found, max(end, time.monotonic() + seconds * PARTS_LEAST))
        return found

    def rollouts(self, facts: Message, seconds: float) -> RolloutGrid:
        """Measure rollouts of a few sizes."""
        own = facts["environments"], facts["rollout_steps"]
        grid = RolloutGrid(self._ask, own, self._here.model, self._setting.together)
        grid.measure(seconds)
        return grid

    def _rows(self, facts: Message) -> list[int]:
        batch = facts["batch_size"]
        least = 2 if facts["batch_norm"] else 1
        shares = [by if by != 2 else max(2, self._setting.together) for by in ROWS if by != 2 or self._setting.shared]
        return sorted({max(min(least, batch), -(-batch // by)) for by in shares}, reverse=True)

    def _ask(self, order: Mapping[str, Any]) -> list[Message]:
        return self._pool.ask(order, str(order["kind"]), ANSWER_SECONDS)

    def _whole(self, rows: int, seconds: float) -> Pass:
        answers = self._ask({"kind": "pass", "rows": rows, "seconds": seconds})
        known = [a["fused"] for a in answers if a["fused"] is not None]
        return Pass(
            rows=answers[0]["rows"],
            threads=self._setting.threads,
            together=self._setting.together,
            **{name: statistics.mean(a[name] for a in answers) for name in ("forward", "backward", "update")},
            fused_update=statistics.mean(known) if known else None,
            without_core=max(a["without_core"] for a in answers),
        )

    def _layers(self, layers: Sequence[Mapping[str, Any]], whole: Pass, seconds: float, found: Found) -> None:
        """Time the layers on the rows of a whole step, scaled so that they add up to the time of the step, in each
        direction."""
        answers = self._ask({"kind": "layers", "rows": whole.rows, "seconds": seconds})
        forward, backward = (
            scaled(layers, [a[way] for a in answers], total)
            for way, total in (("forward", whole.forward), ("backward", whole.backward))
        )
        for layer in layers:
            name = layer["name"]
            found.timings.setdefault(name, []).append(self._timing(whole.rows, forward[name], backward[name]))

    def _timing(self, rows: float, forward: float, backward: float, way: str = "", share: float = 1.0) -> Timing:
        return Timing(
            rows=rows,
            threads=self._setting.threads,
            together=self._setting.together,
            way=way,
            share=share,
            forward=forward,
            backward=backward,
        )

    def _parts(self, layers: Sequence[Mapping[str, Any]], found: Found, end: float) -> None:
        """Time the parts of layers that differ, each beside the same layer whole, so that its time is known as a share
        of it."""
        rows = _few_rows(found.passes)
        whole = {name: timings[0] for name, timings in found.timings.items()}
        orders = list(self._orders(layers, whole))
        alone: dict[str, dict[str, float] | None] = {}
        for at, (name, way, ranks) in enumerate(orders):
            left = end - time.monotonic()
            if left <= 0:
                return
            seconds = min(PART_SECONDS, left / (2 * (len(orders) - at)))
            order = {"kind": "part", "layer": name, "rows": rows, "seconds": seconds}
            if name not in alone:
                alone[name] = mean(self._ask({**order, "way": "", "ranks": 1}))
            part, beside = mean(self._ask({**order, "way": way, "ranks": ranks})), alone[name]
            if part is None or beside is None:
                continue
            for layer in layers:
                if layer["like"] == name:
                    known = whole[layer["name"]]
                    timing = self._timing(
                        known.rows,
                        known.forward * part["forward"] / max(beside["forward"], 1e-9),
                        known.backward * part["backward"] / max(beside["backward"], 1e-9),
                        way,
                        part["share"],
                    )
                    found.timings[layer["name"]].append(timing)

    def _orders(
        self, layers: Sequence[Mapping[str, Any]], whole: Mapping[str, Timing]
    ) -> Iterator[tuple[str, str, int]]:
        """Yield (layer, way, number of parts), those of the layer that takes longest first."""
        first = [layer for layer in layers if layer["like"] == layer["name"]]
        for layer in sorted(first, key=lambda layer: -_both(whole[layer["name"]])):
            for way in layer["ways"]:
                for ranks in sorted(self._setting.counts):
                    yield layer["name"], way, ranks


def _few_rows(passes: Sequence[Pass]) -> float:
    """Return the fewest rows on which a step takes long enough to be timed part by part."""
    enough = [p.rows for p in passes if p.forward + p.backward >= PARTS_STEP_SECONDS]
    return min(enough, default=passes[0].rows)


def _both(timing: Timing) -> float:
    return timing.forward + timing.backward


# The profile

_APART = "kind", "layers", "model", "parameter_bytes", "environments", "rollout_steps"
"""The facts that are no fields of a profile, as they are."""


@dataclass
class Found:
    """The times that the workers of one setting have measured."""

    loading: float
    """The seconds of loading an example."""
    environment: float = 0.0
    """The seconds of an example in the environments."""
    acting: float = 0.0
    """The seconds of an example in which the network acts."""
    passes: list[Pass] = field(default_factory=list)
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    """The timings of the layers, by their names."""


def made(name: str | None, device: str, facts: Message, found: Sequence[Found]) -> Profile:
    """Make the profile: of ``facts`` that one worker has reported, and times from all settings. ``name``: the name of
    the profile; None: the model's."""
    given = {what: value for what, value in facts.items() if what not in _APART}
    passes = tuple(p for f in found for p in f.passes)
    layers = [_layer(layer, found) for layer in facts["layers"]]
    if not layers:  # one that is not known to have parts
        layers = [_as_one(facts["model"], facts["parameter_bytes"], passes)]
    return Profile(
        **given,
        name=facts["model"] if name is None else name,
        device=device,
        layers=tuple(layers),
        passes=passes,
        loading_seconds=statistics.median(f.loading for f in found),
        environment_seconds=statistics.median(f.environment for f in found),
        acting_seconds=statistics.median(f.acting for f in found),
    )


def mean(answers: Sequence[Message]) -> dict[str, float] | None:
    """Return the mean of what all ranks report of a part; None where the layer cannot be cut so."""
    if answers[0]["share"] is None:
        return None
    return {what: statistics.mean(a[what] for a in answers) for what in ("share", "forward", "backward")}


def scaled(layers: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, float]], total: float) -> dict[str, float]:
    """Return the seconds of each layer in one direction: the mean over all ranks and all layers that are ``like`` each
    other, scaled to add up to the total. The loss belongs to the last layer."""
    known = {layer["name"]: statistics.mean(t.get(layer["name"], 0.0) for t in timed) for layer in layers}
    alike: dict[str, list[float]] = {}
    for layer in layers:
        alike.setdefault(layer["like"], []).append(known[layer["name"]])
    found = {layer["name"]: statistics.mean(alike[layer["like"]]) for layer in layers}
    found[layers[-1]["name"]] += statistics.mean(t.get("", 0.0) for t in timed)
    both = sum(found.values())
    return {name: seconds * total / both if both else total / len(layers) for name, seconds in found.items()}


def _layer(layer: dict[str, Any], found: Sequence[Found]) -> LayerProfile:
    rest = {k: v for k, v in layer.items() if k not in ("like", "ways", "inputs", "image", "across")}
    image, across = layer.get("image"), layer.get("across")
    return LayerProfile(
        **rest,
        inputs=tuple(layer["inputs"]),
        ways=tuple(layer["ways"]),
        image=None if image is None else (image[0], image[1], image[2]),
        across=None if across is None else (across[0], across[1], across[2]),
        timings=tuple(t for f in found for t in f.timings.get(layer["name"], ())),
    )


def _as_one(model: str, parameter_bytes: int, passes: Sequence[Pass]) -> LayerProfile:
    timings = (
        Timing(rows=p.rows, threads=p.threads, together=p.together, forward=p.forward, backward=p.backward)
        for p in passes
    )
    return LayerProfile(
        name=model,
        kind=model,
        inputs=(),
        parameter_bytes=parameter_bytes,
        activation_bytes=0,
        kept_bytes=0,
        flops=0.0,
        timings=tuple(timings),
    )
