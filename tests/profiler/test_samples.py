"""What repeated measurements of a link come to."""

from __future__ import annotations

import pytest

from apportion.profiler import samples
from apportion.profiler.cluster_worker import SIZES


def test_only_large_messages_tell_the_bandwidth_and_only_small_ones_the_latency() -> None:
    """Small ones go another way here, at 1 MB/s; large ones at 1 GB/s, after 2 ms."""
    points = {n: 1e-6 * n if n <= samples.SMALL_BYTES else 2e-3 + n / 1e9 for n in SIZES}
    latency, bandwidth = samples.line(points)
    assert bandwidth == pytest.approx(1e9, rel=0.01)
    assert latency == pytest.approx(1e-6 * (4 + 16) * 1024 / 2, rel=0.02), "the middle of those up to 64 KiB"


def test_what_ranks_do_together_takes_as_long_as_the_slowest() -> None:
    assert samples.slowest([[1.0, 5.0], [3.0, 2.0]]) == [3.0, 5.0]


def test_two_samples_have_no_spread() -> None:
    assert samples.spread([[1.0, 2.0]]) == 0.0
    assert samples.spread([[1.0, 2.0], [1.0, 1.1, 0.9]]) == pytest.approx(0.0816, abs=1e-3)
