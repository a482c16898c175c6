"""ssh: an agent on each of several hosts, started by the user's own ssh, starts that host's ranks."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from apportion.errors import ApportionError
from apportion.runtime.agents.agent_command import agent_command
from apportion.runtime.agents.hosts_launcher import ConnectionProcess, HostsLauncher, RunHost, as_texts

CONNECT_SECONDS = 8
"""The seconds that a host has to answer ssh."""
MOST_WORKERS = 1000
"""The largest number of workers of a host: a larger one is a port."""
SSH_FAILED = 255
"""The exit status of ssh for what went wrong with the connection itself."""
_OPTIONS = (
    *("-T", "-a", "-x"),
    *("-o", "BatchMode=yes"),  # a question would wait for ever: no user could answer it
    *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),  # a host that has vanished is noticed in 15 s
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)
"""The options of ssh; those of the user stand before them, and the first value of an option counts."""
_HOST = re.compile(r"(?P<user>[^@\s:\[\]]+@)?(?P<name>[^@\s:\[\]]+|\[[^@\s\[\]]+\])(?P<workers>:\d+)?")


class _ByHost(dict[str, str]):
    """The interpreters of some hosts, by the hosts' names: a field of a value, which has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


@final
@dataclass(frozen=True, repr=False, init=False)
class Ssh(HostsLauncher):
    """Worker processes on several hosts that ssh reaches without a question: ``ssh("a", "user@b:4", workers=2)``.
    ``python``: the interpreter of every host, or of some by their names, with ``user@`` or without it,
    ``python={"b": "/opt/bin/python"}``, which is also written ``ssh("a", "user@b:4=/opt/bin/python")``."""

    hosts: tuple[str, ...] = ()
    """The hosts, as ssh knows them, each with ``user@`` before it and the number of its workers behind a colon where
    these differ from ``workers``; rank 0 runs on the first."""
    options: tuple[str, ...] = ()
    """Options for ssh, as ``("-F", "configuration", "-p", "2222")``."""

    unnamed: ClassVar[str | None] = "hosts"
    python_by_host: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913 (the fields, and the hosts without a name)
        self,
        *names: str,
        hosts: Sequence[str] = (),
        workers: int | None = None,
        threads: int | None = None,
        python: str | Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        device: str | None = None,
        loaders: int = 0,
    ) -> None:
        by_host = _ByHost(python) if isinstance(python, Mapping) else python
        given: dict[str, object] = {"workers": workers, "threads": threads, "python": by_host}
        given |= {"device": device, "loaders": loaders, "options": as_texts("options", options)}
        given["hosts"] = (*names, *as_texts("hosts", hosts))
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self.__post_init__()
        for host in self.hosts:
            if not isinstance(host, str):
                raise ValueError(f'host {host!r} must be a text: ssh("first", "second:4") has 4 workers on the second')
        if not self.hosts:
            raise ValueError('ssh() names no host: write ssh("first", "user@second:4"), rank 0 runs on the first')
        self.parsed()

    def parsed(self) -> list[RunHost]:
        """Returns the hosts. Raises ValueError where one is not written as it must be, or is named twice."""
        found = [parse_host(text, self.workers) for text in self.hosts]
        destinations = [host.destination for host in found]
        for name in destinations:
            if destinations.count(name) > 1:
                raise ValueError(f"host {name} is named twice: name it once, with the number of its workers, {name}:4")
        if not isinstance(self.python, Mapping):
            return found
        given: dict[str, str] = {}
        for name, path in sorted(self.python.items(), key=lambda item: "@" in str(item[0])):  # the longer name holds
            meant = [each for each in destinations if name in (each, each.rpartition("@")[2])]
            if not meant or not isinstance(path, str) or not path:
                raise ValueError(
                    f"python={dict(self.python)!r} must give the path of an interpreter for some of the hosts "
                    f"{', '.join(destinations)}, and {name!r}: {path!r} does not"
                )
            given |= dict.fromkeys(meant, path)
        return [replace(host, python=host.python or given.get(host.destination)) for host in found]

    def command(self, host: RunHost) -> list[str]:
        """Returns the command that starts the agent of a host, and is the connection to it."""
        everywhere = None if isinstance(self.python, Mapping) else self.python
        words = shlex.join(["exec", *agent_command(host.python or everywhere)])
        return ["ssh", *self.options, *_OPTIONS, host.destination, words]

    def start(self, host: RunHost) -> ConnectionProcess:
        """Starts the agent of a host. Its standard input and output are the connection to it, and closing the input
        ends it. Raises ApportionError where ssh is not installed."""
        if shutil.which("ssh") is None:
            raise ApportionError("ssh is not on PATH: install it (Debian: apt-get install openssh-client)")
        return ConnectionProcess.begin(self.command(host))

    def why_lost(self, host: str, status: int | None, said: Sequence[str], *, is_up: bool) -> str | None:
        """Returns why ssh has lost a host, or cannot reach it, with the cure; None where ssh has not failed."""
        if status != SSH_FAILED:
            return None
        last = said[-1].removesuffix(".") if said else "ssh said nothing"
        if is_up:
            return f"host {host}: the connection was lost ({last}); resume=True goes on"
        return f"host {host} cannot be reached: {last}; {_cure(host, last)}"


def parse_host(text: str, workers: int | None) -> RunHost:
    """Returns the host that is written ``user@name:workers=python``, of which the name alone is needed. ``workers``:
    for a host that names none. Raises ValueError where it is written otherwise."""
    place, equals, python = text.partition("=")
    found = _HOST.fullmatch(place) if bool(equals) == bool(python) else None
    if found is None or text.startswith("-"):
        raise ValueError(
            f"{text!r} is not a valid host: write host, user@host or user@host:workers, [...] around an "
            "address of IPv6, and =/path/of/python behind it where a host has an interpreter of its own"
        )
    name = found["name"].removeprefix("[").removesuffix("]")
    if found["workers"] is not None:
        workers = int(found["workers"][1:])
        if not 1 <= workers <= MOST_WORKERS:
            raise ValueError(
                f"{text!r} asks for {workers} workers, and a host has 1 to {MOST_WORKERS}: a port is written "
                "options=('-p', '2222'), or stands in ssh's configuration"
            )
    return RunHost(f"{found['user'] or ''}{name}", workers, python=python or None)


def _cure(host: str, last: str) -> str:
    if "Permission denied" in last:
        return f"ssh must let you in without a question: ssh-copy-id {host}, or name a key in ssh's configuration"
    if "Host key verification failed" in last or "HOST IDENTIFICATION" in last:
        return f"its key is not the one that is known, or is not known yet: ssh {host} once by hand"
    if "Could not resolve" in last:
        return "check the name, or give it an address in ssh's configuration"
    if "timed out" in last:
        return f"it did not answer for {CONNECT_SECONDS} s: does it run, and is its port open?"
    return f"`ssh {host} true` must work without a question"
