"""The process that workers are forked from: it has torch imported and a first optimizer step behind it.

A cold Python with torch takes seconds; a fork of this one takes milliseconds. It is safe because the template is
single-threaded (one BLAS thread, one torch thread, no CUDA) and only ever waits, forks and reaps. It lives as long as
the driver: the driver's death closes its socket and, on Linux, kills it; its own death kills the workers.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, final

from apportion.errors import ApportionError
from apportion.process import die_with_parent, in_slurm_job, take_orphans_in
from apportion.runtime.spawn.client import ForkedProcess, ForkServerClient, NotForked, SpawnTask
from apportion.runtime.spawn.fork_server import ForkServer, freeze
from apportion.runtime.spawn.streams import outlive_terminal

START_SECONDS = 120.0
"""The seconds that the template may take to import torch on a busy machine with a cold disk."""
SPAWN_SECONDS = 10.0
SPARE_SECONDS = 1.0
"""The seconds that a spare has to answer: a fork takes milliseconds, and a spare that takes longer is stopped, or
worse."""
CLOSE_SECONDS = 5.0
UNFIT = 3
"""The exit status of a spare that cannot stand by for the workload."""


@final
class Template:
    """A running template; start it early, it imports while the driver goes on."""

    program: tuple[str, ...] = ("-m", "apportion.runtime.spawn.template")
    """The arguments that Python is started with. A program that starts very many workers may name one that imports
    more, and then calls ``main``."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.forks = ForkServerClient(ours)
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        threading.Thread(target=self._live, args=(theirs,), name="template", daemon=True).start()

    def _live(self, theirs: socket.socket) -> None:
        """Starts the template and listens to it. One thread does both: on Linux the process dies with the thread that
        started it, and the caller's may end before the driver does."""
        try:
            with theirs:
                self._process = self._start(theirs.fileno())
        except OSError as error:
            self._why = f" ({error})"
            self.forks.lose()
        else:
            self.forks.listen()

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, *self.program, str(descriptor), str(os.getpid())],
            pass_fds=[descriptor],
            env={**os.environ, **one_thread},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a worker prints does not mix with what a program may read from the driver
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )

    @property
    def alive(self) -> bool:
        """True while the template can still fork."""
        return not self.forks.gone and (self._process is None or self._process.poll() is None)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Blocks until the condition holds, or the template is gone, or the time is up; returns whether it holds."""
        return self.forks.wait_for(condition, seconds)

    def wait_ready(self) -> None:
        """Blocks until the template can fork at once. Raises ApportionError where it cannot start."""
        if not self.wait_for(lambda: self.forks.ready, START_SECONDS):
            raise self._died()

    def import_ahead(self, modules: Sequence[str]) -> None:
        """Has the template import these modules, and returns at once; workers that are forked later have them."""
        self.forks.import_ahead(modules)

    def spawn(self, task: SpawnTask, channel: socket.socket) -> ForkedProcess:
        """Fork a worker that talks through the other end of ``channel``."""
        try:
            return self.forks.spawn(task, channel, START_SECONDS)
        except NotForked as error:
            raise self._died() from error

    def _died(self) -> ApportionError:
        status = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(1.0)
        if status == -signal.SIGKILL:
            cause = "was ended by SIGKILL, by hand or by the system for want of memory: check that memory is left"
        else:
            cause = (
                f"did not answer{self._why} (exit status {status}): if it said why, that is above; check that "
                "`python -c 'import torch'` works and that memory is left"
            )
        return ApportionError(f"the process that workers are forked from {cause}")

    def close(self) -> None:
        """Ends the template and every worker."""
        self.forks.close()
        self.wait_for(lambda: False, SPAWN_SECONDS)
        if self._process is None:
            return
        try:
            self._process.wait(SPAWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_template: Template | None = None
_template_lock = threading.Lock()


def template() -> Template:
    """This driver's template, started on first use and kept for the next run, like multiprocessing's forkserver."""
    global _template
    with _template_lock:
        if _template is not None and not _template.alive:
            _template.close()
            _template = None
        if _template is None:
            _template = Template()
        return _template


def close_template() -> None:
    """End the template now rather than with the driver."""
    global _template
    with _template_lock:
        if _template is not None:
            _template.close()
        _template = None


@final
class Spare:
    """The process that replacements of lost workers, or the processes of a proof, are forked from, as the driver sees
    it.

    That of replacements is forked from the template once a run is under way, opens the job, and from then on only waits
    and forks: a replacement begins with everything loaded, in milliseconds. What it forks it gives to the template, so
    that its own death costs no worker. A workload that it cannot stand by for (see ``preloaded``) has its replacements
    forked from the template, with torch imported but the job still to open. That of a proof imports the workload's
    packages alone.
    """

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
        return self._process.wait(SPARE_SECONDS) == UNFIT

    def spawn(self, task: SpawnTask, channel: socket.socket) -> ForkedProcess:
        """Forks a replacement. Raises NotForked where the spare is gone, or does not answer."""
        return self._forks.spawn(task, channel, SPARE_SECONDS)

    def close(self) -> None:
        """Ends the spare; what it has forked lives on."""
        self._process.kill()
        self._process.wait(CLOSE_SECONDS)
        self._forks.close()
        self._thread.join(CLOSE_SECONDS)


# The template's side


def _warm_up() -> None:
    """Imports everything that a worker imports, and sets up what the first optimizer step does, once for all
    workers."""
    import torch

    from apportion.core.torch_private import import_compiler_late

    torch.set_num_threads(1)
    import_compiler_late()  # the driver waits for this process, and most workers compile nothing
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()
    importlib.import_module("apportion.runtime.worker.training.loop")


def main() -> None:
    """Runs a template: ``python -m apportion.runtime.spawn.template FD DRIVER_PID``."""
    descriptor, driver = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(driver)
    outlive_terminal()
    take_orphans_in()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if in_slurm_job(os.environ):  # its driver, or its agent, gets them too, and decides
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _warm_up()
    freeze()
    ForkServer(socket.socket(fileno=descriptor)).serve()


if __name__ == "__main__":
    main()
