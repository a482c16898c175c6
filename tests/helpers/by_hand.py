"""Machines and networks with round numbers, so that a price can be worked out by hand: 1 GB/s everywhere, layers that
take whole seconds, weights of whole gigabytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Port, Rate
from apportion.cost_model.profile import LayerProfile, Profile, Timing

GB = 10**9
ROWS = 100


def machine(  # noqa: PLR0913 (what a machine has)
    ranks: int = 2,
    *,
    hosts: int = 1,
    kind: str = "cpu",
    call: float = 0.0,
    spread: float = 0.0,
    memory_rate: float = 1e9,
    flops: float = 1e9,
    **link: Any,
) -> Placement:
    """So many ranks on each of these hosts: on its cores, or a GPU each. One link joins all, without latency."""
    rates = (
        Rate(threads=1, together=1, flops=flops, bytes_per_second=memory_rate),
        Rate(threads=1, together=ranks, flops=flops, bytes_per_second=memory_rate),
    )
    devices = tuple(
        Device(
            name=f"h{host}/{kind}{number}",
            host=f"h{host}",
            kind=kind,  # type: ignore[arg-type]
            model="made",
            memory_bytes=1 << 50,
            rates=rates,
            cores=ranks if kind == "cpu" else 1,
            call_seconds=call,
            spread=spread,
        )
        for host in range(hosts)
        for number in range(1 if kind == "cpu" else ranks)
    )
    names = tuple(d.name for d in devices)
    port: Port = "device"
    joined = Link(**{"kind": "wire", "devices": names, "latency": 0.0, "bandwidth": 1e9, "port": port, **link})
    places = tuple(name for name in names for _ in range(ranks if kind == "cpu" else 1))
    return Placement(cluster=Cluster(name="made", devices=devices, links=(joined,)), devices=places)


def layer(name: str, *inputs: str, forward: float = 1.0, **facts: Any) -> LayerProfile:
    """It takes so many seconds for the whole batch, and twice that backward."""
    given: dict[str, Any] = {
        "kind": "Conv2d",
        "parameter_bytes": 0,
        "activation_bytes": 0,
        "kept_bytes": 0,
        "flops": 0.0,
        "timings": (Timing(rows=ROWS, forward=forward, backward=2 * forward),),
    }
    return LayerProfile(name=name, inputs=inputs, **{**given, **facts})


def network(*layers: LayerProfile, **facts: Any) -> Profile:
    return Profile(**{"name": "by hand", "batch_size": ROWS, "device": "made", "layers": layers, **facts})


def chain(*seconds: float, **facts: Any) -> Profile:
    """Layers one after the other that take so long forward; ``facts``: of each."""
    names = [f"l{i}" for i in range(len(seconds))]
    sources = ["x", *names[:-1]]
    return network(*(layer(n, s, forward=t, **facts) for n, s, t in zip(names, sources, seconds, strict=True)))


def bookkeeping(strategy: Strategy, profile: Profile, layout: Placement) -> float:
    """How many calls a step takes besides its layers, whose times were measured."""
    slow = tuple(replace(d, call_seconds=1.0) for d in layout.cluster.devices)
    slower = replace(layout, cluster=replace(layout.cluster, devices=slow))
    return strategy.cost(profile, slower).step_seconds - strategy.cost(profile, layout).step_seconds


def terms(strategy: Strategy, profile: Profile, **where: Any) -> dict[str, float]:
    """On a ``machine``."""
    return dict(strategy.cost(profile, machine(**where)).terms)


def seconds(strategy: Strategy, profile: Profile, **where: Any) -> float:
    """Likewise, of a step."""
    return strategy.cost(profile, machine(**where)).step_seconds


def timed(forward: float, **facts: Any) -> Timing:
    """Twice as long backward, as everything here."""
    return Timing(**{"rows": ROWS, "forward": forward, "backward": 2 * forward, **facts})


def conv(name: str, source: str, **facts: Any) -> LayerProfile:
    """8 rows high, a window of 3; 0.8 GB of outputs: a row is 0.1 GB."""
    given = {
        "kind": "Conv2d",
        "image": (8, 3, 1),
        "ways": ("height", "units", "inputs"),
        "activation_bytes": 8 * GB // 10,
    }
    return layer(name, source, **{**given, **facts})
