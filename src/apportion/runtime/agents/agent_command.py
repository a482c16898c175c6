"""The command that runs an agent on a host, whichever launcher brings it there."""

from __future__ import annotations

import sys
from collections.abc import Mapping

AGENT = "apportion.runtime.hosts.agent"
"""The program that runs on each host."""
NO_PYTHON, NO_FOLDER = 96, 97
"""The exit statuses of the command on a host that found no interpreter, and no place for its folder."""
REACHED_FROM = "APPORTION_REACHED_FROM"
"""The variable by which a launcher tells an agent the address of another host of the run: the agent's own is the one by
which it reaches that. ssh needs none: sshd says it."""
HOST_CORES = "APPORTION_HOST_CORES"
"""The variable by which a launcher tells an agent how many cores of its host the run was given."""
# In one line, and without single quotes and exclamation marks, so that every login shell passes it on to sh as it is.
# The folder goes with this shell, so that an agent which is killed leaves nothing.
_ON_HOST = (
    'p=$1; case "$p" in "~/"*) p=$HOME/${p#"~/"};; esac; '
    'if [ -z "$p" ] && [ -x "$2" ]; then p=$2; fi; '
    'if [ -z "$p" ]; then p=$("${SHELL:-sh}" -lc "command -v python3" </dev/null 2>/dev/null | tail -n 1); fi; '
    f'command -v "${{p:-python3}}" >/dev/null 2>&1 || {{ echo "${{p:-python3}}" >&2; exit {NO_PYTHON}; }}; '
    't=${TMPDIR:-/tmp}; [ -d "$t" ] || t=/tmp; '  # a job may have one on its first node alone
    f'd=$(mktemp -d "$t/apportion-hosts-XXXXXXXXXX") || exit {NO_FOLDER}; '
    # A shell reports a program that was killed, and the driver reports it too: the line of this shell is discarded.
    "trap : HUP INT TERM USR1; exec 3>&2 2>/dev/null; "
    f'(exec 2>&3 3>&-; PYTHONSAFEPATH=1 exec "${{p:-python3}}" -m {AGENT} "$d"); s=$?; rm -rf "$d"; exit $s'
)


def agent_command(python: str | Mapping[str, str] | None) -> list[str]:
    """Returns the words that run an agent on a host, with the connection as its standard input and output. ``python``:
    the interpreter there; None: the path of this one where it is there too, else the login shell's."""
    return ["sh", "-c", _ON_HOST, "apportion", str(python or ""), sys.executable]
