"""The metrics of a server, for Prometheus."""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The upper ends in seconds of the histogram's buckets."""


class _Answered(Collector):
    """The counts of all answers: plain numbers, which are made into metrics when they are collected."""

    def __init__(self) -> None:
        self.buckets: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.answers: collections.Counter[tuple[str, str]] = collections.Counter()
        self.degraded: collections.Counter[str] = collections.Counter()
        self.used: collections.Counter[str] = collections.Counter()

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client to collect the metrics."""
        latency = HistogramMetricFamily(
            "apportion_request_seconds", "from a request's head to its answer", labels=["model"]
        )
        for model, counts in self.buckets.items():
            ends = [*map(str, BUCKETS), "+Inf"]
            latency.add_metric([model], list(zip(ends, accumulate(counts), strict=True)), self.seconds[model])
        yield latency
        for name, about, labels, counts_of in (
            ("apportion_answers", "requests by HTTP status", ["model", "status"], self.answers),
            ("apportion_degraded_answers", "answers without a member", ["model"], self.degraded),
            ("apportion_member_used", "answers that a member is part of", ["member"], self.used),
        ):
            family = CounterMetricFamily(name, about, labels=labels)
            for key, many in counts_of.items():
                family.add_metric([key] if isinstance(key, str) else list(key), many)
            yield family


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._answered = _Answered()
        registry.register(self._answered)
        self.missed = Counter("apportion_member_misses", "deadlines a member missed", ["member"], registry=registry)
        self.restarts = Gauge("apportion_member_restarts", "processes that died", ["member"], registry=registry)
        self.queued = Gauge("apportion_queue_depth", "requests waiting for a member", ["member"], registry=registry)
        self.up = Gauge("apportion_member_up", "1: it has a process and is waited for", ["member"], registry=registry)
        self.batches = Gauge("apportion_member_batches", "batches computed", ["member"], registry=registry)
        self.slowdown = Gauge(
            "apportion_member_slowdown", "how much longer batches take than at the start", ["member"], registry=registry
        )
        self.rows = Gauge("apportion_member_rows", "rows computed", ["member"], registry=registry)
        self._children: dict[tuple[int, tuple[str, ...]], Any] = {}

    def answered(self, model: str, status: int, seconds: float, used: Sequence[str], *, degraded: bool) -> None:
        """Count a request for inference that has been answered."""
        counted = self._answered
        buckets = counted.buckets.get(model)
        if buckets is None:
            buckets = counted.buckets[model] = [0] * (len(BUCKETS) + 1)
        buckets[bisect_left(BUCKETS, seconds)] += 1
        counted.seconds[model] = counted.seconds.get(model, 0.0) + seconds
        counted.answers[model, str(status)] += 1
        for member in used:
            counted.used[member] += 1
        counted.degraded[model] += degraded

    def of(self, metric: Any, *labels: str) -> Any:
        """Return the child of a metric for these labels, which is looked up once."""
        key = id(metric), labels
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def summary(self) -> dict[str, Any]:
        """Return {"models": [{"model", "answers", "degraded", "p50_ms", "p99_ms", "statuses"}]}; the two quantiles are
        the upper ends of the buckets that hold them."""
        found: dict[str, dict[str, Any]] = {}
        buckets: dict[str, list[tuple[float, float]]] = {}
        for metric in self._registry.collect():
            for sample in metric.samples:
                if "model" not in sample.labels:
                    continue
                model = found.setdefault(
                    sample.labels["model"], {"model": sample.labels["model"], "degraded": 0, "statuses": {}}
                )
                if sample.name == "apportion_request_seconds_bucket":
                    buckets.setdefault(model["model"], []).append((float(sample.labels["le"]), sample.value))
                elif sample.name == "apportion_answers_total":
                    model["statuses"][sample.labels["status"]] = int(sample.value)
                elif sample.name == "apportion_degraded_answers_total":
                    model["degraded"] = int(sample.value)
        for name, model in found.items():
            model["answers"] = sum(model["statuses"].values())
            for key, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
                model[key] = _quantile(buckets.get(name, []), share) * 1e3
        return {"models": list(found.values())}


def _quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """Return the upper end of the bucket that holds the quantile; the last finite one where it is beyond all."""
    if not buckets or buckets[-1][1] == 0:
        return 0.0
    wanted = share * buckets[-1][1]
    reached = next((end for end, many in buckets if many >= wanted), BUCKETS[-1])
    return min(reached, BUCKETS[-1])
