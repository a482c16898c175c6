"""ssh: an agent on each of several hosts, started by the user's own ssh, starts that host's ranks."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from apportion.core.value import Value
from apportion.errors import ApportionError

AGENT = "apportion.runtime.hosts.agent"
"""The program that runs on each host."""
CONNECT_SECONDS = 8
"""The seconds that a host has to answer ssh."""
MOST_WORKERS = 1000
"""The largest number of workers of a host: a larger one is a port."""
NO_PYTHON, NO_FOLDER = 96, 97
"""The exit statuses of the command on a host that found no interpreter, and no place for its folder."""
_OPTIONS = (
    *("-T", "-a", "-x"),
    *("-o", "BatchMode=yes"),  # a question would wait for an answer that nobody can give
    *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),  # a host that has vanished is noticed in 15 s
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
"""The options of ssh; those of the user stand before them, and the first value of an option counts."""
_HOST = re.compile(r"(?P<user>[^@\s:\[\]]+@)?(?P<name>[^@\s:\[\]]+|\[[^@\s\[\]]+\])(?P<workers>:\d+)?")
# In one line, and without single quotes and exclamation marks, so that every login shell passes it on to sh as it is.
# The folder goes with this shell, so that an agent which is killed leaves nothing.
_ON_HOST = (
    'p=$1; case "$p" in "~/"*) p=$HOME/${p#"~/"};; esac; '
    'if [ -z "$p" ] && [ -x "$2" ]; then p=$2; fi; '
    'if [ -z "$p" ]; then p=$("${SHELL:-sh}" -lc "command -v python3" </dev/null 2>/dev/null | tail -n 1); fi; '
    f'command -v "${{p:-python3}}" >/dev/null 2>&1 || {{ echo "${{p:-python3}}" >&2; exit {NO_PYTHON}; }}; '
    f'd=$(mktemp -d "${{TMPDIR:-/tmp}}/apportion-hosts-XXXXXXXXXX") || exit {NO_FOLDER}; '
    f'trap : HUP INT TERM; PYTHONSAFEPATH=1 "${{p:-python3}}" -m {AGENT} "$d"; s=$?; rm -rf "$d"; exit $s'
)


@dataclass(frozen=True)
class SshHost:
    """A host of a run: where ssh finds it, and how many ranks it has."""

    destination: str
    """The host as ssh is told it, with the user where one was given."""
    workers: int | None
    """The number of workers; None: one a core, or one a GPU, as is found out there."""


@final
@dataclass(frozen=True, repr=False, init=False)
class Ssh(Value):
    """Worker processes on several hosts that ssh reaches without a question: ``ssh("a", "user@b:4", workers=2)``."""

    hosts: tuple[str, ...] = ()
    """The hosts, as ssh knows them, each with ``user@`` before it and the number of its workers behind a colon where
    these differ; rank 0 runs on the first."""
    workers: int | None = None
    """The number of workers of each host that names none; None: one a core, or one a GPU."""
    threads: int | None = None
    """The number of threads of each worker; None: the cores of its host, divided among its workers."""
    python: str | None = None
    """The interpreter on each host; None: the path of this one where it is there too, else the login shell's."""
    options: tuple[str, ...] = ()
    """Options for ssh, as ``("-F", "configuration", "-p", "2222")``."""
    device: str | None = None
    """The device type, "cpu" or "cuda"; None: the GPUs where there are any."""
    loaders: int = 0
    """The number of data-loading processes of each worker."""

    unnamed: ClassVar[str | None] = "hosts"
    launched: ClassVar[bool] = False
    """False: the ranks are not running yet, and have to be started."""
    insecure: ClassVar[bool] = False
    """False: the ranks prove to each other that they know the secret of the run."""

    def __init__(  # noqa: PLR0913 (the fields, and the hosts without a name)
        self,
        *names: str,
        hosts: Sequence[str] = (),
        workers: int | None = None,
        threads: int | None = None,
        python: str | None = None,
        options: Sequence[str] = (),
        device: str | None = None,
        loaders: int = 0,
    ) -> None:
        given: dict[str, object] = {"workers": workers, "threads": threads, "python": python}
        given |= {"device": device, "loaders": loaders, "options": _texts("options", options)}
        given["hosts"] = (*names, *_texts("hosts", hosts))
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._must_be_whole("workers", "threads")
        self._must_be_whole("loaders", least=0)
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f'device={device!r} must be "cpu" or "cuda"')
        if not self.hosts:
            raise ValueError('ssh() names no host: write ssh("first", "user@second:4"), rank 0 runs on the first')
        self.parsed()

    def parsed(self) -> list[SshHost]:
        """Returns the hosts. Raises ValueError where one is not written as it must be, or is named twice."""
        found = [parse_host(text, self.workers) for text in self.hosts]
        destinations = [host.destination for host in found]
        for name in destinations:
            if destinations.count(name) > 1:
                raise ValueError(f"host {name} is named twice: name it once, with the number of its workers, {name}:4")
        return found

    def threads_each(self, cores: int, ranks: int) -> int:
        """Returns the threads of each of so many ranks of a host with so many cores."""
        return self.threads if self.threads is not None else max(1, cores // ranks - self.loaders)

    def command(self, host: SshHost) -> list[str]:
        """Returns the command that starts the agent of a host, and is the connection to it."""
        words = ["exec", "sh", "-c", _ON_HOST, "apportion", self.python or "", sys.executable]
        return ["ssh", *self.options, *_OPTIONS, host.destination, shlex.join(words)]

    def start(self, host: SshHost) -> subprocess.Popen[bytes]:
        """Starts the agent of a host. Its standard input and output are the connection to it, and closing the input
        ends it. Raises ApportionError where there is no ssh here."""
        if shutil.which("ssh") is None:
            raise ApportionError("ssh is not on PATH: install it (Debian: apt-get install openssh-client)")
        return subprocess.Popen(
            self.command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )


def parse_host(text: str, workers: int | None) -> SshHost:
    """Returns the host that is written ``user@name:workers``, of which the name alone is needed. ``workers``: for a
    host that names none. Raises ValueError where it is written otherwise."""
    found = _HOST.fullmatch(text)
    if found is None or text.startswith("-"):
        raise ValueError(
            f"{text!r} is no host: write host, user@host or user@host:workers, and [...] around an address of IPv6"
        )
    name = found["name"].removeprefix("[").removesuffix("]")
    if found["workers"] is not None:
        workers = int(found["workers"][1:])
        if not 1 <= workers <= MOST_WORKERS:
            raise ValueError(
                f"{text!r} asks for {workers} workers, and a host has 1 to {MOST_WORKERS}: a port is written "
                "options=('-p', '2222'), or stands in ssh's configuration"
            )
    return SshHost(f"{found['user'] or ''}{name}", workers)


def _texts(name: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValueError(f"{name}={given!r} must be a list of texts: ({given!r},)")
    return tuple(given)
