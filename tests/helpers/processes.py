"""Which tests start processes: ``scripts/test fast`` leaves those out that are marked so, and the mark is held."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm_python
import warm_ranks

from apportion.runtime.spawn.client import ForkServerClient

HELPERS = ("_template.py", "spawn.template", "warm_python.py")
_started = 0


def started() -> int:
    """Returns how many processes this one has started, or asked for, so far."""
    return _started


def _count() -> None:
    global _started
    _started += 1


def watch(patch: pytest.MonkeyPatch) -> None:
    """Counts from here on: programs, forks, workers of the template and jobs of the ranks that are kept. The template
    itself does not count, nor what a library asks the system once: the first test that comes by has them start."""
    os.register_at_fork(before=_count)
    begin = warm_python._popen.__init__

    def popen(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else [str(args)]
        program = Path(words[0]).name.startswith(("python", "apportion", "ip", "chrom"))
        if program and not any(word.endswith(HELPERS) for word in words[:3]):
            _count()
        begin(self, args, *rest, **named)

    patch.setattr(warm_python._popen, "__init__", popen)
    for place, name in ((ForkServerClient, "spawn"), (warm_ranks, "kept")):
        patch.setattr(place, name, _counted(getattr(place, name)))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        _count()
        return function(*arguments, **named)

    return call
