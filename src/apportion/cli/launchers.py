"""The launcher that flags of the command line describe."""

from __future__ import annotations

import os
from typing import Any


def launcher_of(text: str | None, workers: int | None, hosts: str | None = None) -> Any:
    """The launcher that --launcher, --workers and --hosts describe together. Raises ValueError where they contradict
    each other."""
    from apportion.core.value import parse
    from apportion.runtime.launch.local import Local
    from apportion.runtime.launch.ssh import Ssh

    if hosts is not None:
        if text is not None:
            raise ValueError(f"--hosts {hosts} and --launcher {text} contradict each other: leave either out")
        return Ssh(hosts=[host.strip() for host in hosts.split(",")], workers=workers)
    launcher = parse(text, "apportion.runtime.launch") if text is not None else Local()
    return launcher if workers is None else launcher.with_workers(workers)


def is_first(launcher: str | None) -> bool:
    """Tells whether this process is the one that speaks for all, of those that others may have started."""
    from apportion.comm.network.launched_ranks import given

    return launcher is None or given(os.environ).get("RANK", "0") == "0"
