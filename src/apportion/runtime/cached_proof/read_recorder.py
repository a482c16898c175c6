"""Records which files, folders and environment variables a workload reads, by name, while it is imported, built and
tried.

An audit hook of Python's sees every file that Python opens. It cannot be removed again, so that it looks at a variable
first: while nothing is recorded an event costs it a tenth of a microsecond. Environment variables are seen by a
subclass that ``os.environ`` is given meanwhile.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from apportion.process import PACKAGE
from apportion.runtime.proof.installed_packages import below_installed

LAUNCHED = frozenset((
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "MKL_NUM_THREADS", "OMP_NUM_THREADS", "RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "WORLD_SIZE",
))  # fmt: skip
"""The variables that a launch sets: the name of a cached proof has the ranks and threads; they count where the user's
own code asks for them."""
LAUNCHERS = (
    "COBALT_", "FLUX_", "HYDRA_", "I_MPI_", "JOB_COMPLETION_", "KUBERNETES_", "LSB_", "LSF_", "MPIR_", "MV2_", "OMPI_",
    "PALS_", "PBS_", "PMI_", "PMIX_", "PRTE_", "RAY_", "SLURMD_", "SLURM_", "SRUN_", "TORCHELASTIC_",
)  # fmt: skip
"""The beginnings of further variables that launchers and schedulers set for each run."""
OWN_VARIABLES = frozenset((
    "_", "COLUMNS", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "GPG_AGENT_INFO", "INVOCATION_ID", "JOURNAL_STREAM", "LINES",
    "OLDPWD", "SHELL_SESSION_ID", "SHLVL", "SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY",
    "STY", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID",
))  # fmt: skip
"""The variables that a shell, a terminal or a session sets anew; they count where they are asked for by name."""
ELSEWHERE = ("/proc/", "/sys/", "/dev/")
"""The folders whose files are the system's and not the user's."""
_SYSTEM = ("/lib", "/usr/lib", "/usr/share/locale", str(Path(sys.base_prefix).resolve()))
"""The folders of the libraries and data that every process maps."""
FRAMES = 200
"""The number of callers that are looked at, from the innermost, to find whose code reads."""
_SOURCE_READERS = frozenset(("linecache.py", "tokenize.py", "inspect.py", "traceback.py"))
"""The modules of Python's that read source: what the code does is digested by itself."""
_IMPORTS = ("<frozen importlib", "<frozen zipimport")
_STANDARD = str(Path(sysconfig.get_path("stdlib")).resolve()) + os.sep
_PACKAGES_LISTED = (os.path.join(_STANDARD, "importlib"), os.path.join(_STANDARD, "pkgutil.py"))
"""Where Python looks for packages: in every folder of its path, as the one that it was started in."""
_PACKAGE = str(PACKAGE) + os.sep
_READS_NOTHING = os.O_WRONLY | os.O_TRUNC | os.O_EXCL


@dataclass
class Reads:
    """The names of what was read."""

    files: set[str] = field(default_factory=set)
    """The paths of files: as they were given where that was relative, so that they are looked up in the folder of the
    run that asks for them."""
    folders: set[str] = field(default_factory=set)
    """The paths of folders that were listed."""
    variables: set[str] = field(default_factory=set)
    """The names of environment variables, also of those that were asked for and not set."""
    all_variables: bool = False
    """True where the user's code went through the whole environment."""


class ReadRecorder:
    """Records what this process reads from its start until ``stop``."""

    def __init__(self) -> None:
        self.reads = Reads()
        self.environment: Mapping[str, str] = dict(os.environ)
        """The environment as it was at the start: what code sets by itself counts as code."""
        self._descriptors = _descriptors()
        self._written: set[str] = set()
        self._iterated: Any = None

    @classmethod
    def started(cls) -> Self:
        """Starts to record in this process, in the place of an earlier recorder."""
        global _recorder, _hooked
        recorder = cls()
        _recorder = recorder
        if not _hooked:
            sys.addaudithook(_hook)
            _hooked = True
        # The object stays the same: modules may have kept a reference to os.environ, and C code sees the same
        # environment.
        os.environ.__class__ = _ObservedVariables
        if hasattr(os, "environb"):
            os.environb.__class__ = _ObservedVariables
        return recorder

    def stop(self) -> None:
        """Stops to record."""
        global _recorder
        if _recorder is not self:
            return
        _recorder = None
        os.environ.__class__ = _Variables
        if hasattr(os, "environb"):
            os.environb.__class__ = _Variables

    def holds_files(self) -> bool:
        """Tells whether this process has opened files or connections since the start, and keeps them open."""
        return bool(_descriptors() - self._descriptors)

    def add_held_files(self) -> None:
        """Notes the files that this process holds open or has mapped into its memory, which may have been opened by
        libraries written in C (Linux)."""
        held = {target for _, target in _descriptors() - self._descriptors}
        with suppress(OSError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                held.add(line[73:] if line[73:].startswith("/") else "")
        for path in held:
            is_data = path.startswith("/") and not path.startswith(_SYSTEM) and ".so" not in Path(path).name
            if is_data and _counts(path) and Path(path).is_file():
                self.reads.files.add(path)

    def file(self, path: Any, mode: Any, flags: Any, frame: FrameType) -> None:
        """Notes a file that is opened, unless it is only written."""
        name = _name(path)
        if name is None:
            return
        if _only_writes(mode, flags):
            self._written.add(name)
        # What the run has written itself is not an input of it.
        elif name not in self._written and _counts(name) and _is_of_workload(frame):
            self.reads.files.add(name)

    def folder(self, path: Any, frame: FrameType) -> None:
        """Notes a folder that is listed."""
        name = _name("." if path is None else path)
        if name is not None and _counts(name) and _is_of_workload(frame):
            self.reads.folders.add(name)

    def variable(self, key: Any, frame: FrameType) -> None:
        """Notes a variable that is asked for."""
        name = os.fsdecode(key) if isinstance(key, str | bytes) else None
        if name is None or name == self._iterated or not _is_of_workload(frame):
            return
        if not is_of_launcher(name) or _is_users(frame):
            self.reads.variables.add(name)

    def iteration(self, frame: FrameType) -> None:
        """Notes that all variables are gone through, unless a library does it, as one that starts a process."""
        if _is_users(frame):
            self.reads.all_variables = True

    def passes(self, key: Any) -> None:
        """Notes the variable that an iteration is at: a copy of the environment asks for each of them."""
        self._iterated = os.fsdecode(key) if key is not None else None


_recorder: ReadRecorder | None = None
_hooked = False


def recorder() -> ReadRecorder | None:
    """Returns the recorder of this process; None where nothing is recorded."""
    return _recorder


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # This runs at every audit event of the process, for as long as it lives: the cheapest test comes first.
    if _recorder is None or event not in ("open", "os.listdir", "os.scandir", "sqlite3.connect"):
        return
    frame = sys._getframe().f_back
    if frame is None:
        return
    if event == "open":
        path, mode, flags = arguments
        _recorder.file(path, mode, flags, frame)
    elif event == "sqlite3.connect":
        _recorder.file(arguments[0], "r", 0, frame)
    else:
        _recorder.folder(arguments[0], frame)


_Variables: Any = type(os.environ)


class _ObservedVariables(_Variables):  # type: ignore[misc]
    """The environment, which tells the recorder what is asked for."""

    def __getitem__(self, key: Any) -> Any:
        if _recorder is not None:
            _recorder.variable(key, sys._getframe(1))
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        if _recorder is not None:
            _recorder.iteration(sys._getframe(1))
        for key in super().__iter__():
            if _recorder is not None:
                _recorder.passes(key)
            yield key
        if _recorder is not None:
            _recorder.passes(None)


def _descriptors() -> set[tuple[str, str]]:
    """Returns the open files and connections, by number and what they are of (Linux)."""
    found = set[tuple[str, str]]()
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{entry}")
                if target.startswith("socket:") or (target.startswith("/") and not target.startswith(ELSEWHERE)):
                    found.add((entry, target))
    return found


def _name(path: Any) -> str | None:
    """Returns the path as it counts: None where an open file is opened again."""
    try:
        return os.path.normpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else None
    except (TypeError, ValueError):
        return None


def _only_writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return "+" not in mode and not mode.startswith("r")
    return isinstance(flags, int) and bool(flags & _READS_NOTHING)


def _counts(name: str) -> bool:
    return not name.startswith(ELSEWHERE) and not below_installed(os.path.realpath(name))


def _is_of_workload(frame: FrameType) -> bool:
    """Tells whether a read belongs to the workload: not to this package, nor to Python, which imports a module or shows
    a line of source, nor to a library that is being imported, whose settings the first update shows."""
    callers = _callers(frame)
    reader = next(callers, None)
    if reader is None or reader.startswith((*_IMPORTS, _PACKAGE)):
        return False
    if not below_installed(reader):
        return True
    caller = next((file for file in callers if file.startswith((*_IMPORTS, _PACKAGE)) or not below_installed(file)), "")
    return not caller.startswith(_IMPORTS)


def _is_users(frame: FrameType) -> bool:
    """Tells whether the user's own code reads, and no library does it for it."""
    file = next(_callers(frame), None)
    return file is not None and not file.startswith((*_IMPORTS, _PACKAGE)) and not below_installed(file)


def is_of_launcher(name: str) -> bool:
    """Tells whether a launcher or a scheduler sets this variable for each run. Libraries ask for such variables to find
    their place among the ranks; what they compute does not depend on it. The user's own code may ask for anything."""
    return name in LAUNCHED or name.startswith(LAUNCHERS)


def _callers(frame: FrameType | None) -> Iterator[str]:
    """Yields the files of the code that reads, the innermost first, without Python's own; the import of a module is
    among them. Nothing comes where Python reads source."""
    for _ in range(FRAMES):
        if frame is None:
            return
        file = frame.f_code.co_filename
        if os.path.basename(file) in _SOURCE_READERS or file.startswith(_PACKAGES_LISTED):
            return
        if file.startswith(_IMPORTS) or (
            file != __file__ and not file.startswith("<frozen ") and not _is_standard(file)
        ):
            yield file
        frame = frame.f_back


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and "-packages" + os.sep not in file
