"""The process that replacements of lost workers, or the processes of a proof, are forked from, as the driver sees it.

That of replacements is forked from the template once a run is under way, opens the job, and from then on only waits and
forks: a replacement begins with everything loaded, in milliseconds. What it forks it gives to the template, so that its
own death costs no worker. A workload that it cannot stand by for (see ``preloaded``) has its replacements forked from
the template, with torch imported but the job still to open. That of a proof imports the workload's packages alone.
"""

from __future__ import annotations

import socket
import threading
from typing import ClassVar, final

from apportion.runtime.spawn.client import ForkedProcess, ForkServerClient, SpawnTask
from apportion.runtime.spawn.template import template

SPAWN_SECONDS = 1.0
"""The seconds that a spare has to answer: a fork takes milliseconds, and a spare that takes longer is stopped, or
worse."""
CLOSE_SECONDS = 5.0
UNFIT = 3
"""The exit status of a spare that cannot stand by for the workload."""


@final
class Spare:
    """A spare as the driver sees it, from its start on."""

    program: ClassVar[str] = "apportion.runtime.worker.preloaded:serve"
    importer: ClassVar[str] = "apportion.runtime.worker.preloaded:serve_imports"
    """The program of a spare that imports packages and opens no job."""
    target: ClassVar[str] = "apportion.runtime.worker.preloaded:train_opened"
    """The function that a replacement is to call."""

    def __init__(self, task: SpawnTask) -> None:
        ours, theirs = socket.socketpair()
        parent = template()
        with theirs:
            self._process = parent.spawn(task, theirs)
        self._forks = ForkServerClient(ours, reaper=parent.forks)
        self._thread = threading.Thread(target=self._forks.listen, name="spare", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True while the spare can fork at once."""
        return self._forks.ready and not self._forks.gone

    def wait_ready(self, seconds: float) -> bool:
        """Blocks until the spare can fork at once, or is gone, or the time is up; returns whether it can."""
        return self._forks.wait_for(lambda: self._forks.ready, seconds) and self.ready

    @property
    def gone(self) -> bool:
        """True once the spare has ended."""
        return self._forks.gone

    @property
    def pid(self) -> int:
        """The process id of the spare."""
        assert self._process.pid is not None
        return self._process.pid

    def unfit(self) -> bool:
        """Tells, once the spare is gone, whether it ended because it cannot stand by for the workload."""
        return self._process.wait(SPAWN_SECONDS) == UNFIT

    def spawn(self, task: SpawnTask, channel: socket.socket) -> ForkedProcess:
        """Forks a replacement. Raises NotForked where the spare is gone, or does not answer."""
        return self._forks.spawn(task, channel, SPAWN_SECONDS)

    def close(self) -> None:
        """Ends the spare; what it has forked lives on."""
        self._process.kill()
        self._process.wait(CLOSE_SECONDS)
        self._forks.close()
        self._thread.join(CLOSE_SECONDS)
