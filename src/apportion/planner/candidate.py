"""A strategy on a layout with its price, or with the reason why it has none; and the rule which of two is the better
one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Placement
from apportion.cost_model.cost import Cost
from apportion.cost_model.profile import Profile
from apportion.planner.calibration import Correction, Trial
from apportion.planner.units import gibibytes
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local

MEASURED_BAND, CALLS_BAND = 0.1, 0.5
"""The shares by which a prediction may be off: the first for what is measured, or worked out from rates; the second for
our own calls in Python, which are counted and not timed. Of 54 predictions for three networks, from 0 to 70 % of which
were calls, 70 % were closer than the sum of both, for large steps as well as small ones."""
TIE = 0.03
"""The share by which two predictions must differ to be distinguished: the times of layers that both are made of are the
same measurements, so they differ by less than each may be off."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The times that real steps took."""

    step_seconds: float
    """The median seconds of a step."""
    low: float
    high: float
    """The upper end of the middle half of the steps, in seconds; ``low`` is its lower end."""
    steps: int
    terms: Mapping[str, float] | None = None
    """The measured parts of a step, as far as they are known."""
    without_core: float = 0.0
    """The share of the time in which a rank could have gone on and another program had its core."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.step_seconds <= self.high:
            raise AssertionError(f"a median of {self.step_seconds} lies between {self.low} and {self.high}")


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A strategy on a layout, with its price or with the reason why it has none."""

    strategy: Strategy
    layout: Placement
    cost: Cost | None = None
    """The predicted cost; None: the strategy cannot run this network, or not on this layout."""
    refusal: str = ""
    """The reason why the strategy cannot run here; empty where it can."""
    corrected: float | None = None
    """The seconds of a step, predicted with what trials of other strategies have taught."""
    overhead: float = 0.0
    """The share of the predicted step that our own calls take (see ``with_overhead``)."""
    tried: Measurement | None = None
    without_core: float = 0.0
    """The share of the time in which a worker could have gone on and another program had its core, while what the price
    is made of was measured."""
    layouts: int = 1
    """The number of layouts that the strategy was priced on; this one is the best of them."""

    def __str__(self) -> str:
        hosts = len(self.layout.hosts)
        return f"{self.strategy} on {self.launcher if hosts == 1 else f'{self.layout.ranks} workers of {hosts} hosts'}"

    @property
    def workers(self) -> int:
        """The number of processes that take batches: those of the layout without the strategy's servers."""
        ranks = self.layout.ranks
        return next((n for n in range(ranks, 0, -1) if self.strategy.ranks(n) == ranks), ranks)

    @property
    def local(self) -> Local | None:
        """The layout as processes of one machine; None where it needs several hosts."""
        if len(self.layout.hosts) > 1:
            return None
        return Local(workers=self.workers, threads=self.layout.threads, device=self._device)

    @property
    def launcher(self) -> Local | Env:
        """The launcher of the candidate: processes of one host, or for several hosts what has started them there."""
        return self.local or Env(device=self._device)

    @property
    def _device(self) -> str | None:
        kinds = {self.layout.device(rank).kind for rank in range(self.layout.ranks)}
        gpus = any(device.kind == "cuda" for device in self.layout.cluster.devices)
        return "cpu" if gpus and kinds == {"cpu"} else None

    @property
    def step_seconds(self) -> float:
        """The seconds of a step: measured where it was tried, else predicted."""
        assert self.cost is not None, "what is refused takes no time"
        if self.tried is not None:
            return self.tried.step_seconds
        return self.cost.step_seconds if self.corrected is None else self.corrected

    @property
    def seconds_per_example(self) -> float:
        """The seconds of a step divided by its examples, which exact strategies are ranked by."""
        assert self.cost is not None
        return self.step_seconds / self.cost.examples

    @property
    def examples_per_second(self) -> float:
        """The number of examples that are learned from in a second."""
        return 1.0 / self.seconds_per_example

    @property
    def error(self) -> float:
        """The share by which ``step_seconds`` may be off: the spread of what was measured; for a prediction, the bands
        of its measured part and of its calls, each by its share of the step. In either case the share of the time is
        added in which other programs held the cores: on a quiet machine the step would be shorter by as much."""
        if self.tried is None:
            return MEASURED_BAND * (1 - self.overhead) + CALLS_BAND * self.overhead + self.without_core
        return self.spread + self.tried.without_core

    @property
    def spread(self) -> float:
        """Half the distance between slow and fast measured steps, as a share of ``step_seconds``."""
        assert self.tried is not None, "what was not tried has no spread"
        return (self.tried.high - self.tried.low) / 2 / self.tried.step_seconds

    @property
    def expected(self) -> bool:
        """Is ``step_seconds`` the uncorrected prediction, which its terms add up to?"""
        return self.tried is None and self.corrected is None

    def with_overhead(self, profile: Profile) -> Priced:
        """Return the candidate with the share of its step that it would save on machines that begin an operation in no
        time."""
        if self.cost is None:
            return self
        cluster = self.layout.cluster
        at_once = replace(cluster, devices=tuple(replace(d, call_seconds=0.0) for d in cluster.devices))
        without = priced(self.strategy, replace(self.layout, cluster=at_once), profile).cost
        left = 1.0 if without is None else without.step_seconds / self.cost.step_seconds
        return replace(self, overhead=min(1.0, max(0.0, 1.0 - left)), without_core=profile.without_core)

    def corrected_by(self, correction: Correction) -> Priced:
        """Return the candidate as it is predicted with what trials of others have taught."""
        if self.cost is None:
            return self
        return replace(self, corrected=correction.step_seconds(family(self.strategy), self.cost))

    @property
    def simple(self) -> tuple[int, int, bool]:
        """The key that is lower for a simpler candidate: one process before several, few hosts before many, a plain
        strategy before a composite."""
        return self.layout.ranks, len(self.layout.hosts), getattr(self.strategy, "of", None) is not None


def priced(strategy: Strategy, layout: Placement, profile: Profile) -> Priced:
    """Price the strategy on the layout; where it cannot run there or does not fit, return it with the reason."""
    try:
        cost = strategy.cost(profile, layout)
    except ValueError as error:
        return Priced(strategy=strategy, layout=layout, refusal=str(error))
    refusal = misfit(cost, layout)
    return Priced(strategy=strategy, layout=layout, cost=None if refusal else cost, refusal=refusal)


def misfit(cost: Cost, layout: Placement) -> str:
    """Say which device has too little memory; empty where all have enough."""
    for name, ranks in Counter(layout.devices).items():
        needed, there = cost.memory_bytes * ranks, layout.cluster.device(name).memory_bytes
        if needed > there:
            each = f" ({ranks} workers of {gibibytes(cost.memory_bytes)})" if ranks > 1 else ""
            return f"does not fit: needs {gibibytes(needed)}{each} on {name}, which has {gibibytes(there)}"
    return ""


def trials_of(found: Iterable[Priced]) -> list[Trial]:
    """Return what was predicted and measured of those candidates that were tried."""
    return [
        Trial(family(p.strategy), p.cost, p.tried.step_seconds)
        for p in found
        if p.tried is not None and p.cost is not None
    ]


def ranked(found: Iterable[Priced]) -> list[Priced]:
    """Sort candidates: exact ones by seconds an example, then approximate ones by seconds an example, then those that
    are refused. Among the fastest exact ones that cannot be distinguished, the simplest comes first."""
    able = sorted((p for p in found if p.cost is not None), key=lambda p: p.seconds_per_example)
    refused = [p for p in found if p.cost is None]
    exact = _simplest_first([p for p in able if p.strategy.exact])
    return [*exact, *(p for p in able if not p.strategy.exact), *refused]


def _simplest_first(able: Sequence[Priced]) -> list[Priced]:
    if not able:
        return []
    close = [p for p in able if tied(able[0], p)]
    first = min(close, key=lambda p: (p.simple, p.seconds_per_example))
    return [first, *(p for p in able if p is not first)]


def tied(fast: Priced, slow: Priced) -> bool:
    """Report whether two candidates cannot be distinguished: two measurements where their middle halves overlap by as
    much as a median is uncertain; predictions within ``TIE``."""
    ratio = slow.seconds_per_example / fast.seconds_per_example - 1
    if fast.tried is not None and slow.tried is not None:
        steps = min(fast.tried.steps, slow.tried.steps)
        return bool(ratio <= (fast.spread + slow.spread) / max(1.0, steps**0.5))
    return bool(ratio <= TIE)


def folded(found: Sequence[Priced]) -> list[Priced]:
    """Return each strategy once, in the given order: on its best layout, with the number of layouts that it was priced
    on. A strategy that is refused everywhere is kept once, in the first of its values."""
    many = Counter(str(p.strategy) for p in found if p.cost is not None)
    kept, values, families = list[Priced](), set[str](), set[str]()
    for p in found:
        known = str(p.strategy) in values if p.cost is not None else family(p.strategy) in families
        if not known:
            values.add(str(p.strategy))
            families.add(family(p.strategy))
            kept.append(replace(p, layouts=many[str(p.strategy)] or 1))
    return kept


def family(strategy: Strategy) -> str:
    """Return the name of the strategy without its parameters; for a composite, with the name of the strategy that it is
    made of."""
    name = str(strategy).partition("(")[0]
    of = getattr(strategy, "of", None)
    return name if of is None else f"{name}(of={family(of)})"
