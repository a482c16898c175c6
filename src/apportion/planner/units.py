"""Numbers as people read them: three digits, a unit near at hand, no exponents."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.cost_model.cluster import Cluster


def number(value: float) -> str:
    """Format a number: 3.12, 0.0213, 5,590."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """Format seconds: 3.12 ms, 0.0213 ms, 12.3 s."""
    return f"{number(seconds * 1e3)} ms" if seconds < 0.9995 else f"{number(seconds)} s"


def microseconds(seconds: float) -> str:
    """Format seconds: 3.12 us, 590 us."""
    return f"{number(seconds * 1e6)} us"


def gibibytes(size: float) -> str:
    """Format a size in memory: 31 GiB, 532 MiB, 1 KiB."""
    return _in(size, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def size(nbytes: float) -> str:
    """Format the size of what is sent, in the units that links are sold by: 40 MB."""
    return _in(nbytes, 1000.0, ("B", "kB", "MB", "GB", "TB"))


def rate(kind: str, bandwidth: float) -> str:
    """Format a bandwidth: 3.1 Gb/s for a network, 12 GB/s for a link inside a host."""
    if kind in ("ethernet", "infiniband"):
        return _in(bandwidth * 8, 1000.0, ("b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"))
    return _in(bandwidth, 1000.0, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def label(cluster: Cluster) -> str:
    """Return the name of the cluster, without the part in brackets: in the catalogue that part says where its numbers
    come from."""
    return cluster.name.partition(" (")[0]


def _in(value: float, step: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{number(value)} {unit}"
        value /= step
    return f"{number(value)} {units[-1]}"
