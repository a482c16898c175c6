"""Profiles by the authors of PipeDream (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
Training", SOSP 2019; https://github.com/msr-fiddle/pipedream): every layer's times on one V100, as their graph files
have them.

::

    node4 -- Conv2d(64, 64, kernel_size=(3, 3)) -- forward_compute_time=46.201, backward_compute_time=113.330, ...
        node4 -- node5
"""

import re

from apportion.cost_model.cluster import Cluster, Device, Link, Rate
from apportion.cost_model.partitioning import LayerWork
from apportion.cost_model.profile import LayerProfile, Profile, Timing

BATCH_SIZE = 128
"""Of a worker, in the profiles of VGG-16 and ResNet-50."""
_NODE = re.compile(r"(node\d+) -- (.+) -- (forward_compute_time=.+)")
_EDGE = re.compile(r"\t(node\d+) -- (node\d+)")


def read(path, batch_size=BATCH_SIZE):
    """A graph file as a profile, without the inputs, which are loading. Nodes are numbered in order of execution."""
    described, inputs = {}, {}
    for line in path.read_text().splitlines():
        if edge := _EDGE.fullmatch(line):
            inputs.setdefault(edge[2], []).append(edge[1])
        elif node := _NODE.fullmatch(line):
            described[node[1]] = node[2], dict(number.split("=") for number in node[3].split(", "))
        elif line.strip():
            raise ValueError(f"{path.name}: {line!r} is neither a node nor an edge")
    layers = tuple(
        _layer(name, *described[name], tuple(inputs.get(name, ())), batch_size)
        for name in sorted(described, key=lambda name: int(name.removeprefix("node")))
        if not described[name][0].startswith("Input")
    )
    return Profile(name=path.stem, batch_size=batch_size, layers=layers, device="V100")


def _layer(name, text, numbers, inputs, batch_size):
    nbytes = sum(float(part) for part in numbers["activation_size"].strip("[]").split("; "))
    timing = Timing(
        rows=batch_size,
        forward=float(numbers["forward_compute_time"]) / 1000,
        backward=float(numbers["backward_compute_time"]) / 1000,
    )
    return LayerProfile(
        name=name,
        kind=re.split(r"\W", text)[0],
        inputs=inputs,
        parameter_bytes=round(float(numbers["parameter_size"])),
        activation_bytes=round(nbytes),
        kept_bytes=round(nbytes),
        flops=0.0,
        timings=(timing,),
    )


def works(profile):
    """Its layers, as the recurrence for stages with replicas takes them."""
    return [
        LayerWork(layer.timings[0].forward, layer.timings[0].backward, layer.parameter_bytes, crossing)
        for layer, crossing in zip(profile.layers, profile.crossing_bytes, strict=True)
    ]


def machines(workers, bits_per_second):
    """So many hosts of one V100 each, on one switch."""
    names = tuple(f"v100-{i}" for i in range(workers))
    rate = Rate(threads=1, together=1, flops=14e12, bytes_per_second=900e9)
    devices = tuple(
        Device(name=name, host=name, kind="cuda", model="V100", memory_bytes=16 << 30, rates=(rate,)) for name in names
    )
    link = Link(kind="ethernet", devices=names, latency=50e-6, bandwidth=bits_per_second / 8, port="host")
    return Cluster(name=f"{workers} x V100", devices=devices, links=(link,))
