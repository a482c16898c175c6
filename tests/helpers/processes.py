"""Which tests start processes: ``scripts/test fast`` leaves those out that are marked so, and the mark is held."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import warm_ranks

from apportion.runtime.spawn.client import ForkServerClient

_started = 0


def started() -> int:
    """Returns how many processes this one has started, or asked for, so far."""
    return _started


def _count() -> None:
    global _started
    _started += 1


def watch(patch: pytest.MonkeyPatch) -> None:
    """Counts from here on: programs, forks, workers of the template and jobs of the ranks that are kept."""
    os.register_at_fork(before=_count)
    for place, name in ((subprocess.Popen, "__init__"), (ForkServerClient, "spawn"), (warm_ranks, "kept")):
        patch.setattr(place, name, _counted(getattr(place, name)))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        _count()
        return function(*arguments, **named)

    return call
