"""A network of 200 different layers, and 64 devices of two kinds, for the time that a plan takes. All made up."""

from apportion.cost_model.cluster import Cluster, Device, Link, Rate
from apportion.cost_model.profile import LayerProfile, Profile

LAYERS, HOSTS = 200, 8


def layer(i):
    width = 1024 + 16 * (i % 37)
    return LayerProfile(
        name=f"layers.{i}",
        kind="Linear",
        inputs=(f"layers.{i - 1}" if i else "input",),
        parameter_bytes=4 * width * width,
        activation_bytes=4 * 256 * width,
        kept_bytes=8 * 256 * width,
        flops=2.0 * 256 * width * width,
        ways=("units", "inputs"),
    )


PROFILE = Profile(
    name="200 layers", batch_size=256, layers=tuple(layer(i) for i in range(LAYERS)), device="elsewhere", examples=10**6
)


def gpus():
    """8 hosts of 8."""
    devices = tuple(
        Device(
            name=f"host{h}/gpu{g}",
            host=f"host{h}",
            kind="cuda",
            model="a GPU",
            memory_bytes=80 << 30,
            rates=(Rate(threads=1, together=1, flops=1.5e13, bytes_per_second=1.5e12),),
        )
        for h in range(HOSTS)
        for g in range(8)
    )
    names = tuple(d.name for d in devices)
    within = tuple(
        Link(kind="nvlink", devices=names[8 * h : 8 * h + 8], latency=5e-6, bandwidth=2e11) for h in range(HOSTS)
    )
    between = Link(kind="ethernet", devices=names, latency=2e-5, bandwidth=1.2e10, port="host")
    return Cluster(name="8 hosts of 8 GPUs", devices=devices, links=(*within, between))


def cpus():
    """64 hosts of 16 cores."""
    rates = (
        Rate(threads=1, together=1, flops=1e11, bytes_per_second=1e10),
        Rate(threads=16, together=1, flops=1.2e12, bytes_per_second=5e10),
        Rate(threads=1, together=16, flops=8e10, bytes_per_second=4e9),
    )
    devices = tuple(
        Device(
            name=f"host{h}/cpu",
            host=f"host{h}",
            kind="cpu",
            model="cores",
            memory_bytes=64 << 30,
            cores=16,
            rates=rates,
        )
        for h in range(64)
    )
    memory = tuple(
        Link(kind="memory", devices=(d.name,), latency=1e-5, bandwidth=1e10, port="all", hidden=0.0) for d in devices
    )
    names = tuple(d.name for d in devices)
    between = Link(kind="ethernet", devices=names, latency=5e-5, bandwidth=1.2e9, port="host")
    return Cluster(name="64 hosts of 16 cores", devices=devices, links=(*memory, between))


CLUSTERS = gpus(), cpus()
