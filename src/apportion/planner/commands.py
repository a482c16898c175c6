"""What to type so that a plan happens: our command, and the same under torchrun."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import NamedTuple

from apportion.launch.local import Local
from apportion.planner.priced import Priced


class Commands(NamedTuple):
    """Lines for a shell."""

    apportion: str | None
    """``apportion train``; None where several hosts are needed: each of them runs the other one."""
    torchrun: str
    """With its threads, and with each worker on cores of its own."""


def commands(workload: str, chosen: Priced) -> Commands:
    """``workload``: FILE:NAME; what is no address stands there as FILE:NAME."""
    address = workload if ":" in workload else "FILE:NAME"
    train = f"apportion train {_quoted(address)} --strategy {_quoted(str(chosen.strategy))}"
    ours = f"{train} --launcher {_quoted(str(chosen.launcher))}" if isinstance(chosen.launcher, Local) else None
    return Commands(ours, _torchrun(f"{train} --launcher {_quoted(_env(chosen))}", chosen))


def _env(chosen: Priced) -> str:
    device = chosen.launcher.device
    return "env" if device is None else f"env(device={device!r})"


def _torchrun(train: str, chosen: Priced) -> str:
    layout = chosen.layout
    a_host = Counter(layout.device(rank).host for rank in range(layout.ranks))
    each = max(a_host.values())
    threads = layout.threads
    where = "--standalone"
    if len(a_host) > 1:
        where = f"--nnodes={len(a_host)} --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=29500"
    cores = f"OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}"
    start = f"{cores} torchrun {where} --nproc-per-node={each} --no-python"
    on_cores = layout.device(0).kind == "cpu"
    if not on_cores or each == 1:
        return f"{start} {train}"
    first = "$LOCAL_RANK" if threads == 1 else f"$((LOCAL_RANK * {threads}))"
    last = "" if threads == 1 else f"-$((LOCAL_RANK * {threads} + {threads - 1}))"
    return f"{start} sh -c {shlex.quote(f'exec taskset -c {first}{last} {train}')}"


def _quoted(text: str) -> str:
    """As a person would: nothing around a plain word, double quotes around what has none of what they do not hold."""
    if shlex.quote(text) == text:
        return text
    return shlex.quote(text) if any(c in text for c in '"$`\\!') else f'"{text}"'
