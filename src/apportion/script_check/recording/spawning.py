"""Runs, in the processes that there are, the function for which a script would start ranks of its own.

``torch.multiprocessing.spawn(function, args, nprocs=N)`` calls ``function(rank, *args)`` in N new processes. The ranks
of the check are these processes already, so each calls the function with its own rank. As one process the number of
ranks among the arguments is 1.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from apportion.script_check.recording.recorder import Recorder

_WORLD = ("world_size", "worldsize", "world", "nprocs", "num_processes", "n_gpus", "ngpus", "num_gpus", "size", "ws")


class SpawnsOtherRanks(Exception):
    """The script starts another number of ranks than the check."""


def install(recorder: Recorder) -> None:
    """Replace the functions that start ranks."""
    # The address and the port are taken before the script runs, which may set others before it spawns.
    ranks, environment = int(recorder.plan["ranks"]), dict(os.environ)
    one = recorder.feed is not None

    def spawn(
        function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *rest: Any, **more: Any
    ) -> None:
        if not one and nprocs != ranks:
            if nprocs == torch.cuda.device_count():
                raise SpawnsOtherRanks(f"The script starts a rank for each GPU, of which there are {nprocs}.")
            raise SpawnsOtherRanks(
                f"The script starts {nprocs} ranks by itself: run the check with --workers {nprocs}, or make their "
                f"number an argument."
            )
        _open_as_one_of(ranks, recorder.rank, environment)
        function(recorder.rank, *(_arguments_for_one_rank(function, args, nprocs) if one else args))

    for name in ("spawn", "start_processes"):
        setattr(mp, name, spawn)


def _arguments_for_one_rank(function: Callable[..., Any], args: tuple[Any, ...], nprocs: int) -> tuple[Any, ...]:
    """The arguments of a function with 1 for the number of ranks."""
    try:
        names = list(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):
        names = []
    return tuple(
        1 if type(value) is int and value == nprocs and (at >= len(names) or names[at].lower() in _WORLD) else value
        for at, value in enumerate(args)
    )


def _open_as_one_of(ranks: int, rank: int, environment: dict[str, str]) -> None:
    """Has the process group opened among the ranks of the check, whatever address and number the script gives."""
    open_group = dist.init_process_group

    @wraps(open_group)
    def opened(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ[name] = environment[name]
        for name in ("init_method", "store"):
            kwargs.pop(name, None)
        open_group(backend, **{**kwargs, "rank": rank, "world_size": ranks})

    dist.init_process_group = opened
