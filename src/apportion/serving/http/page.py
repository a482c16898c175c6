"""The pages for a person or a monitor: the page at /, the numbers that it shows, metrics, and the OpenAPI file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from apportion.serving.config import Serving
from apportion.serving.http.openapi import document
from apportion.serving.metrics import Metrics
from apportion.serving.pool.shared_arena import Arena
from apportion.serving.replication.choose import Staffed

HTML = b"text/html; charset=utf-8"
PAGE = (Path(__file__).parent / "page.html").read_bytes()
TEXT = b"text/plain; version=0.0.4; charset=utf-8"
JSON = b"application/json"


def pages(
    staffed: Staffed, serving: Serving, inbox: Arena, metrics: Metrics
) -> dict[str, tuple[bytes, Callable[[], bytes]]]:
    """Return the pages by path: (content type, a function that returns the body)."""
    return {
        "/": (HTML, lambda: PAGE),
        "/status": (JSON, lambda: orjson.dumps(status(staffed, serving, inbox, metrics))),
        "/metrics": (TEXT, lambda: _metrics(staffed, metrics)),
        "/openapi.json": (JSON, lambda: orjson.dumps(document(staffed.ensemble, serving))),
    }


def status(staffed: Staffed, serving: Serving, inbox: Arena, metrics: Metrics) -> dict[str, Any]:
    """Return the numbers that the page shows."""
    now, members = time.monotonic(), []
    for name, member in staffed.ensemble.members.items():
        members.append(
            {
                "name": name,
                "pid": None if member.process is None else member.process.pid,
                "state": member.state if member.state != "up" else member.breaker.state(now),
                "proven": member.batcher.proven,
                "runtime": member.runtime,
                "batched": member.batcher.batched,
                "row_ms": round(member.batcher.times.pace.expected(1) * 1e3, 3),
                "waiting": member.batcher.waiting,
                "computing": sum(len(flight.works) for flight in member.batcher.in_flight.values()),
                "batches": member.batcher.counts.batches,
                "rows": member.batcher.counts.rows,
                "late": member.batcher.counts.late,
                "lost": member.batcher.counts.lost,
                "restarts": member.restarts,
            }
        )
    return {
        "replication": staffed.replication,
        "deadline_ms": serving.deadline * 1e3,
        "inbox_bytes": inbox.nbytes - inbox.free,
        "quorum": staffed.ensemble.quorum,
        "members": members,
        **metrics.summary(),
    }


def _metrics(staffed: Staffed, metrics: Metrics) -> bytes:
    now = time.monotonic()
    for name, member in staffed.ensemble.members.items():
        up = member.state == "up" and member.breaker.state(now) == "closed"
        for gauge, value in (
            (metrics.restarts, member.restarts),
            (metrics.queued, member.batcher.waiting),
            (metrics.up, int(up)),
            (metrics.batches, member.batcher.counts.batches),
            (metrics.rows, member.batcher.counts.rows),
        ):
            metrics.of(gauge, name).set(value)
    return metrics.text()
