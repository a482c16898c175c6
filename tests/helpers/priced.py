"""Clusters and profiles made up for prices."""

from __future__ import annotations

from typing import Any, Literal

from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Rate
from apportion.cost_model.profile import LayerProfile, Profile, Timing


def layer(name: str, parameters: int, rows: int, **other: Any) -> LayerProfile:
    """With so many numbers, 100 outputs an example, and 1 MFLOP an example."""
    given: dict[str, Any] = {
        "kind": "Conv2d",
        "inputs": ("x",),
        "parameter_bytes": 4 * parameters,
        "activation_bytes": 400 * rows,
        "kept_bytes": 400 * rows,
        "flops": 1e6 * rows,
    }
    return LayerProfile(name=name, **{**given, **other})


def profile(*parameters: int, rows: int = 64, **other: Any) -> Profile:
    """A layer for each of these numbers of weights; its times follow from the device's rates."""
    layers = tuple(layer(f"layer{i}", many, rows) for i, many in enumerate(parameters or (1000, 200_000, 5000)))
    return Profile(**{"name": "made up", "batch_size": rows, "layers": layers, "device": "none", **other})


def cpus(
    hosts: int = 1,
    *,
    cores: int = 2,
    bandwidth: float = 1.25e8,
    memory_bytes: int = 1 << 34,
    spread: float = 0.03,
    latency: float = 5e-5,
) -> Cluster:
    """Hosts of so many cores at 50 GFLOP/s each; between them Ethernet."""
    devices = tuple(
        Device(
            name=f"{host}/cpu",
            host=str(host),
            kind="cpu",
            model="core",
            memory_bytes=memory_bytes,
            rates=(
                Rate(threads=1, together=1, flops=5e10, bytes_per_second=1e10),
                Rate(threads=cores, together=1, flops=5e10 * cores, bytes_per_second=1e10 * min(cores, 1.5)),
                Rate(threads=1, together=cores, flops=5e10, bytes_per_second=1e10 * min(cores, 1.5) / cores),
            ),
            cores=cores,
            call_seconds=1e-6,
            spread=spread,
        )
        for host in range(hosts)
    )
    links = [Link(kind="memory", devices=(d.name,), latency=5e-6, bandwidth=5e9, port="all") for d in devices]
    if hosts > 1:
        names = tuple(d.name for d in devices)
        links.append(Link(kind="ethernet", devices=names, latency=latency, bandwidth=bandwidth, port="host"))
    return Cluster(name="made up", devices=devices, links=tuple(links))


def gpus(hosts: int = 1, each: int = 8, *, bandwidth: float = 1.25e9, memory_bytes: int = 80 << 30) -> Cluster:
    """Hosts of so many GPUs at 100 TFLOP/s; between hosts so many bytes a second for each GPU."""
    devices = tuple(
        Device(
            name=f"{host}/gpu{number}",
            host=str(host),
            kind="cuda",
            model="gpu",
            memory_bytes=memory_bytes,
            rates=(Rate(threads=1, together=1, flops=1e14, bytes_per_second=2e12),),
            call_seconds=5e-6,
        )
        for host in range(hosts)
        for number in range(each)
    )
    links = [
        Link(
            kind="nvlink",
            devices=tuple(d.name for d in devices if d.host == str(host)),
            latency=3e-6,
            bandwidth=3e11,
        )
        for host in range(hosts)
    ]
    if hosts > 1:
        names = tuple(d.name for d in devices)
        links.append(Link(kind="network", devices=names, latency=5e-6, bandwidth=bandwidth))
    return Cluster(name="made up", devices=devices, links=tuple(links))


def on(cluster: Cluster, each: int = 1, threads: int = 1) -> Placement:
    """So many ranks on every device."""
    return Placement(
        cluster=cluster, devices=tuple(d.name for d in cluster.devices for _ in range(each)), threads=threads
    )


Stage = Literal[56, 28, 14, 7]


def resnet50(rows: int = 32, backward: float = 0.12) -> Profile:
    """He et al., "Deep Residual Learning for Image Recognition", 2016, table 1: the weights of its convolutions, each
    with a part of the backward pass as large as its part of the FLOPs."""
    shapes: list[tuple[int, float]] = [(7 * 7 * 3 * 64, 7 * 7 * 3 * 64 * 112**2)]
    inputs = 64
    blocks: list[tuple[int, int, Stage]] = [(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)]
    for many, width, side in blocks:
        for block in range(many):
            sizes = [inputs * width, 9 * width * width, 4 * width * width]
            sizes += [inputs * 4 * width] if block == 0 else []
            shapes += [(size, size * side**2) for size in sizes]
            inputs = 4 * width
    shapes.append((2048 * 1000 + 1000, 2048 * 1000))
    flops = sum(f for _, f in shapes)
    return Profile(
        name="resnet50",
        batch_size=rows * 256,
        device="gpu",
        layers=tuple(
            layer(
                f"conv{i}",
                size,
                rows * 256,
                timings=(Timing(rows=rows, forward=backward / 2 * f / flops, backward=backward * f / flops),),
            )
            for i, (size, f) in enumerate(shapes)
        ),
    )
