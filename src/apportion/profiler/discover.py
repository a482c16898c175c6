"""Discovery of what this machine has, by asking and not by measuring: cores, memory, NUMA nodes, GPUs and what joins
them.

Its rates are nominal, within a factor of two or three: good enough to see which layouts are worth a look, and what a
plan costs to make. ``measure`` replaces them.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from apportion.cost_model.cluster import Cluster, Device, Link, Rate
from apportion.process import usable_cores

HOST = "local"
CORE_FLOPS = 5e10
"""The FLOP/s of a core that is one of many at work: a float32 product on 256-bit vectors."""
CORE_BYTES = 1e10
"""The bytes of memory a second that one core gets when it is alone."""
NODE_BYTES = 5e10
"""The bytes of memory a second that all cores of a NUMA node share."""
GPU_RATES = {
    "V100": (1.4e13, 0.8e12),
    "T4": (6e12, 0.25e12),
    "A100": (1.85e13, 1.6e12),
    "L4": (2e13, 0.26e12),
    "L40": (6e13, 0.75e12),
    "H100": (5e13, 2.9e12),
    "H200": (5e13, 4.0e12),
}
"""The FLOP/s in float32 and bytes/s of GPUs as they are sold; those of others are worked out from their
multiprocessors."""
NVLINK_BYTES = 2.5e10
"""The bytes a second of one NVLink in one direction (V100, A100 and H100 differ in how many they have)."""
PCIE_BYTES = 1.2e10
"""The bytes a second of 16 lanes of PCIe of the third generation."""
_ASK_SECONDS = 10.0


def discover() -> Cluster:
    """Describe this machine, with nominal rates: the cores that this process may use (affinity, and its container's
    quota) and their memory, and the GPUs that torch sees."""
    cores = usable_cores()
    model = f"{cpu_model()}, {cores} cores"
    cpu = Device(
        name=f"{HOST}/cpu",
        host=HOST,
        kind="cpu",
        model=model,
        memory_bytes=memory_bytes(),
        cores=cores,
        rates=tuple(_nominal(cores, len(numa_nodes()), *layout) for layout in ((1, 1), (cores, 1), (1, cores))),
    )
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    memory = Link(kind="memory", devices=(cpu.name,), latency=3e-5, bandwidth=4e9, port="all", hidden=0.0)
    return Cluster(name=HOST, devices=(cpu, *gpus), links=(memory, *_gpu_links(cpu, gpus)))


def cpu_model() -> str:
    """Return the processor's name as its maker calls it; the machine's type where that is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return os.uname().machine
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join(found.group(1).split()) if found else os.uname().machine


def memory_bytes() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less where its container says so."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such cgroup, or "max"
            pass
    return min(limits)


def numa_nodes() -> tuple[tuple[int, ...], ...]:
    """Return the usable CPUs of each NUMA node that has any."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    nodes = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        try:
            own = tuple(cpu for cpu in _cpus(path.read_text()) if cpu in usable)
        except (OSError, ValueError):
            continue
        if own:
            nodes.append(own)
    return tuple(nodes) or (tuple(sorted(usable)),)


def _cpus(text: str) -> list[int]:
    """Parse a list of CPUs such as ``0-3,8`` into numbers."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _nominal(cores: int, nodes: int, threads: int, workers: int) -> Rate:
    busy = threads * workers
    memory = min(busy * CORE_BYTES, max(1.0, nodes * busy / cores) * NODE_BYTES)
    return Rate(threads=threads, together=workers, flops=threads * CORE_FLOPS, bytes_per_second=memory / workers)


def _gpu(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    known = [rates for name, rates in GPU_RATES.items() if re.search(rf"\b{name}\b", found.name)]
    flops, memory = known[0] if known else (found.multi_processor_count * 128 * 2 * 1.2e9, 5e11)
    return Device(
        name=f"{HOST}/gpu{index}",
        host=HOST,
        kind="cuda",
        model=found.name,
        memory_bytes=found.total_memory,
        rates=(Rate(threads=1, together=1, flops=flops, bytes_per_second=memory),),
    )


def _gpu_links(cpu: Device, gpus: tuple[Device, ...]) -> tuple[Link, ...]:
    pcie = Link(kind="pcie", devices=(cpu.name,), latency=1e-5, bandwidth=PCIE_BYTES, hidden=0.9)
    links = [replace(pcie, devices=(cpu.name, gpu.name)) for gpu in gpus]
    if len(gpus) > 1:
        lanes = nvlinks()
        joined = replace(pcie, devices=tuple(gpu.name for gpu in gpus))
        links.append(replace(joined, kind="nvlink", bandwidth=lanes * NVLINK_BYTES) if lanes else joined)
    return tuple(links)


def nvlinks() -> int:
    """Return the smallest number of NVLinks between any two GPUs of this machine; 0 where that cannot be found out."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return fewest_nvlinks(output)


def fewest_nvlinks(output: str) -> int:
    """Return the smallest number of NVLinks between two GPUs in the table of ``nvidia-smi topo -m``; 0 where two are
    joined otherwise."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in output.splitlines()]
    rows = [cells for cells in lines if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells]
    between = [cells[1 + at] for cells in rows for at in range(len(rows)) if cells[1 + at] != "X"]
    counts = [int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in between]
    return min(counts, default=0)
