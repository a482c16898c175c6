"""Programs that begin in a fork of a Python that has torch and apportion imported already.

The tests start hundreds of programs as their user would: ``apportion``, ``torchrun``, servers, and what these start in
turn. Each would import torch for two seconds of a core. While ``installed``, ``subprocess.Popen`` has the programs of
``is_warm`` forked by a process with one thread, which makes them children of whoever asked for them (``CLONE_PARENT``):
process ids, exit codes, signals and sessions are as usual. On other systems than Linux on x86_64 nothing changes.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import errno
import importlib
import json
import os
import platform
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

SECONDS = 60.0
FORKER = "test-forker"
"""The name that a process has in /proc which makes the children of a program: the program did not start it."""
PRELOADED = (
    "apportion.api.check",
    "apportion.api.running",
    "apportion.cli.app",
    "apportion.parallel.replica.fsdp",
    "apportion.reporting.html.run_page",
    "apportion.serving.offline_evaluation",
    "apportion.serving.pool.worker_main",
    "apportion.serving.server",
    "matplotlib.figure",
    "sklearn.datasets",
    "tensorboard.summary.writer.record_writer",
    "torch.distributed.run",
)
MODULES = ("apportion", "torch.distributed.run")
UNBUFFERED = "-u"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SAME = (*THREADS, "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "LD_PRELOAD")
"""Variables that Python or a library reads when it starts: a program that wants others starts anew."""
ON_A_HOST = ("ip", "netns", "exec")
"""The words that begin a program in a network namespace, before its name: the namespace stands for a host."""
_SYS_CLONE, _CLONE_PARENT, _CLONE_SETTID, _CLONE_NEWNET, _TID = 56, 0x8000, 0x01000000, 0x40000000, 720
"""The system call, its flags, and where glibc keeps the thread's number, as Linux on x86_64 has them."""
_popen, _execv = subprocess.Popen, os.execv
_forker: Forker | None = None


def is_warm(command: Sequence[str], folder: str) -> bool:
    """Whether a program is one of those that begin in a fork: Python without options (``-u`` aside), and the program is
    apportion, one of its processes, torchrun, what standard input says, a text that imports apportion or torch, or a
    script that starts others."""
    words = _words(command)
    if not words or command[0] != sys.executable:
        return False
    if words[0] == "-m":
        return len(words) > 1 and (words[1] in MODULES or words[1].startswith("apportion."))
    if words[0] == "-c":
        text, imported = words[1], "apportion|torch"
    elif words[0].endswith("_template.py"):  # it stays, and is known by its name
        return False
    elif words[0].endswith(".py"):
        text, imported = (Path(folder) / words[0]).read_text(), "apportion|torch|subprocess"
    else:
        return words[0] == "-" or Path(words[0]).name == "apportion"
    return re.search(rf"^\s*(import|from) ({imported})\b", text, re.MULTILINE) is not None


def _on_host(command: list[str]) -> tuple[list[str], str]:
    """A command, and the namespace that it is to be run in: "" for this one."""
    return (command[4:], command[3]) if tuple(command[:3]) == ON_A_HOST else (command, "")


def _words(command: Sequence[str]) -> list[str]:
    """What Python is told to run, and its arguments: torchrun says ``-u`` before them."""
    return list(command[2:] if command[1:2] == [UNBUFFERED] else command[1:])


class Forker:
    """The end of a socket to a process that forks. ``environment`` is what that process began with."""

    def __init__(self, sock: socket.socket, environment: dict[str, str]) -> None:
        self._socket, self._lock = sock, threading.Lock()
        self._socket.settimeout(SECONDS)
        self._environment = environment

    def takes(self, environment: dict[str, str]) -> bool:
        """Whether a program may begin with this environment in a fork of that process."""
        return all(
            self._environment.get(name) == environment.get(name) for name in SAME if name not in THREADS
        ) and all(environment.get(name) in (self._environment.get(name), "1") for name in THREADS)

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Returns the process id of a new child of this process."""
        with self._lock:
            file = os.memfd_create("order")
            try:
                os.write(file, json.dumps(order).encode())
                rights = array.array("i", [file, *descriptors])
                self._socket.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            finally:
                os.close(file)
            answer = json.loads(self._socket.recv(4096) or b"null")
        if not isinstance(answer, int):
            raise OSError(errno.EAGAIN, f"the warm Python did not fork: {answer}")
        return answer

    def close(self) -> None:
        self._socket.close()


class WarmPopen(_popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` whose child may be a fork of the warm Python."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        (cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others) = rest
        command, host = _on_host([os.fspath(a) for a in args] if isinstance(args, (list, tuple)) else [])
        environment = dict(os.environ if env is None else env)
        folder = os.fspath(cwd) if cwd is not None else os.getcwd()
        plain = not shell and preexec_fn is None and executable is None and close_fds and os.getpid() == _owner
        warm = (_forker or (_start and _start())) if plain and is_warm(command, folder) else None
        if warm is None or not warm.takes(environment):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)  # type: ignore[misc]
            return
        numbers = [end if end != -1 else usual for end, usual in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        order = {
            "argv": command,
            "environment": environment,
            "folder": folder,
            "host": host,
            "session": bool(others[-2]),
            "kept": list(pass_fds),
        }
        try:
            self.pid = warm.fork(order, [*numbers, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


_owner = 0
"""The process whose children the forker makes: a fork of that process has no forker."""


def _have(forker: Forker | None) -> None:
    global _forker, _owner
    _forker, _owner = forker, os.getpid()


class _Start:
    """Starts the process that forks, when the first program wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> Forker:
        with self._lock:
            if _forker is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), str(os.getpid())]
                with theirs:
                    self._process = _popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
                _have(Forker(ours, dict(os.environ)))
            return _forker

    def end(self) -> None:
        """Ends that process, if there is one."""
        if _forker is not None:
            _forker.close()
            self._process.wait(SECONDS)
            _have(None)


_start: _Start | None = None


def processes() -> set[int]:
    """The process that forks, if there is one: no test has left it behind."""
    return {_start._process.pid} if _start is not None and _start._process is not None else set()


@contextmanager
def installed() -> Iterator[None]:
    """Has ``subprocess.Popen`` use the warm Python, which starts with the first program that wants it."""
    global _start
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield
        return
    _start = _Start()
    _have(None)
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _popen  # type: ignore[misc]
        _start.end()
        _start = None


# The side of the process that forks


def _serve(sock: socket.socket) -> None:
    """Forks until whoever asks is gone; returns only in a fork, once ``_begin`` has made it the program."""
    while True:
        data, control, _, _ = sock.recvmsg(16, 4096)
        if not data:
            os._exit(0)
        numbers = array.array("i")
        for _, _, rights in control:
            numbers.frombytes(rights)
        order, *descriptors = numbers
        try:
            pid = _fork_for_parent()
        except OSError as error:
            sock.send(json.dumps(str(error)).encode())
        else:
            if pid == 0:
                sock.close()
                with open(order, "rb") as file:
                    file.seek(0)
                    _begin(json.loads(file.read()), descriptors)
            sock.send(json.dumps(pid).encode())
        for number in numbers:
            os.close(number)


def _fork_for_parent() -> int:
    """Forks a process whose parent is this one's: what ``fork`` does in glibc, with one more flag."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.pthread_self.restype = libc.syscall.restype = ctypes.c_long
    thread = libc.pthread_self() + _TID
    if ctypes.c_int.from_address(thread).value != os.getpid():
        raise OSError(errno.ENOSYS, "this C library keeps the number of a thread elsewhere")
    sys.stdout.flush()
    sys.stderr.flush()
    flags = _CLONE_PARENT | _CLONE_SETTID | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(*map(ctypes.c_long, (_SYS_CLONE, flags, 0, 0, thread, 0)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(pid)


def _begin(order: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Makes a fork the program that was asked for, and ends with it."""
    Path("/proc/self/comm").write_text("python")
    if order["session"]:
        os.setsid()
    _take(descriptors, (0, 1, 2, *order["kept"]))
    unbuffered = bool(order["environment"].get("PYTHONUNBUFFERED")) or order["argv"][1] == UNBUFFERED
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=unbuffered)  # type: ignore[union-attr]
    stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = stderr
    _find_modules(order["environment"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    if order["host"]:
        _enter(order["host"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import numpy

    numpy.random.seed()
    _end(_run, order["argv"])


def _find_modules(environment: dict[str, str]) -> None:
    """Has modules, and what is installed, found where the environment of a program says, before its own begins."""
    from apportion.core import value

    before, now = (where.get("PYTHONPATH", "") for where in (os.environ, environment))
    if before != now:
        old, new = (list(filter(None, path.split(os.pathsep))) for path in (before, now))
        sys.path[1:] = [*new, *(folder for folder in sys.path[1:] if folder not in old)]
        importlib.invalidate_caches()
        value._added.cache_clear()


def _enter(host: str) -> None:
    """Moves this process, and whatever it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), host)


def _take(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives the descriptors that were sent these numbers, and closes what else is open."""
    high = [os.dup2(given, 200 + i) for i, given in enumerate(descriptors)]
    os.closerange(0, 200)
    for number, there in zip(numbers, high, strict=True):
        os.dup2(there, number)
    os.closerange(200, 200 + len(high)) if max(numbers) < 200 else None


def _run(argv: Sequence[str]) -> None:
    """Runs a module, a text or a script as ``python`` does, with a forker of its own for what it starts."""
    os.execv = _exec
    option, *rest = _words(argv)
    program = rest.pop(0) if option in ("-m", "-c") else option
    if not program.startswith("apportion."):
        _fork_forker()
    if option == "-m":
        sys.path[0], sys.argv = os.getcwd(), [program, *rest]
        sys.modules.pop(program, None)  # it is __main__, as in a new Python
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    elif option == "-":
        sys.path[0], sys.argv = "", ["-", *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), vars(main))
    else:
        sys.path[0], sys.argv = str(Path(program).resolve().parent), [program, *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = program
        exec(compile(Path(program).read_bytes(), program, "exec"), vars(main))


def _exec(path: Any, argv: Sequence[Any]) -> None:
    """What ``os.execv`` is to a program that was forked: another warm one goes on in its place, in this process."""
    command = [os.fspath(word) for word in argv]
    if is_warm(command, os.getcwd()):
        _end(_run, command)
    _execv(path, argv)


def _fork_forker() -> None:
    """Forks a process that makes children for this one."""
    from apportion.process import die_with_parent

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, name = os.getpid(), Path("/proc/self/comm")
    name.write_text(FORKER)
    if os.fork() == 0:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # or whoever reads what the program prints would wait for this process too
            os.dup2(null, number)
        os.close(null)
        ours.close()
        _serve(theirs)
    name.write_text("python")
    theirs.close()
    _have(Forker(ours, dict(os.environ)))


def _end(program: Any, *arguments: Any) -> None:
    """Calls a program and ends this process as Python would."""
    code, killed = 0, False
    try:
        program(*arguments)
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            code = left.code or 0
        else:
            print(left.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        killed = True
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # A thread may be held up in a write for ever: Python does not wait for it either, once it ends.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    if killed:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def main() -> None:
    """``python warm_python.py FD PARENT``: imports what the programs would, and forks."""
    from apportion.core.value import own_names
    from apportion.process import die_with_parent
    from apportion.runtime.spawn import fork_server, template

    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen = WarmPopen  # type: ignore[misc]  # torchrun has it by name
    template._warm_up()
    strategies = [f"apportion.strategies.{name}" for name in own_names("apportion.strategies")]
    for module in (*strategies, *PRELOADED):
        importlib.import_module(module)
    for kept in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        kept.atexit = False  # torch unregisters thousands of operators one by one, of a process that ends
    fork_server.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.modules["warm_python"] = sys.modules["__main__"]  # what a program imports by name is this one
    main()
