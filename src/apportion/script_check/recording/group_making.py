"""Records the calls that make process groups, which all ranks have to make, and the one that takes them down."""

from __future__ import annotations

import inspect
import sys
import time
from functools import wraps
from typing import Any

import torch.distributed as dist

from apportion.script_check.recording.collectives import Collectives, replace_everywhere
from apportion.script_check.recording.recorder import Recorder

_MAKERS = ("init_process_group", "new_group", "split_group")


def install(collectives: Collectives) -> None:
    """Record these calls as collectives of the group of all ranks (``makes``: the ranks of the group that is made), and
    the events ``destroy`` and ``destroyed`` around the end of all groups."""
    for name in _MAKERS:
        function = getattr(dist, name, None)
        if function is not None:
            replace_everywhere(function, _recording_function(collectives, function), ("torch.distributed",))
    destroy = dist.destroy_process_group
    replace_everywhere(destroy, _recording_end(collectives.recorder, destroy), ("torch.distributed",))


def _recording_function(collectives: Collectives, function: Any) -> Any:
    """Returns a function that makes groups, and records its calls."""
    bind = inspect.signature(function).bind

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if collectives.inside:
            return function(*args, **kwargs)
        given = bind(*args, **kwargs).arguments
        world = collectives.groups.label(None)
        assert world is not None
        label, members = world
        wanted = given.get("ranks") or given.get("split_ranks")
        if given.get("use_local_synchronization") and wanted:  # only its members call it, or have to
            members = tuple(sorted(wanted))
            label = f"making of ranks {', '.join(map(str, members))}"
        if function.__name__ == "split_group" and given.get("parent_pg") is not None:
            found = collectives.groups.label(given["parent_pg"])
            label, members = found or (label, members)
        if collectives.recorder.rank not in members:
            return function(*args, **kwargs)
        by = sys._getframe(1).f_globals.get("__name__", "")
        call = collectives.record_begin(function.__name__, label, members, makes=_listed(wanted or members), by=by)
        made = collectives.run(call, lambda: function(*args, **kwargs))
        if isinstance(made, dist.ProcessGroup):
            collectives.groups.label_new(made, tuple(dist.get_process_group_ranks(made)))
        return made

    return recorded


def _listed(ranks: Any) -> Any:
    return [_listed(each) for each in ranks] if isinstance(ranks, list | tuple) else ranks


def _recording_end(recorder: Recorder, destroy: Any) -> Any:
    @wraps(destroy)
    def destroyed(group: Any = None) -> None:
        if group is None:
            recorder.emit("destroy", time=time.monotonic())
        destroy(group)
        if group is None:
            recorder.emit("destroyed")

    return destroyed
