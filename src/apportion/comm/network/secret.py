"""The secret of a run: whoever knows it is one of the run's ranks.

Whatever started the ranks hands it to each of them in a file, whose path is in APPORTION_SECRET_FILE: a Secret of
Kubernetes, a file that was copied to every host. It is never sent; both ends of a connection prove that they know it
(``handshake.py``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from apportion.errors import ApportionError

NAME = "APPORTION_SECRET_FILE"
LEAST_BYTES, MOST_BYTES = 16, 4096
"""The least bytes of a secret, fewer of which could be guessed, and the most."""
MAKE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > ~/apportion-secret)"
"""The command that makes a secret."""


def secret_of_run(environment: Mapping[str, str]) -> bytes | None:
    """Returns the secret that APPORTION_SECRET_FILE names; None where it is not set. Raises ApportionError where the
    file cannot be read, and ValueError where others can read it or it holds no secret."""
    path = environment.get(NAME)
    if not path:
        return None
    try:
        with open(os.path.expanduser(path), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        raise ApportionError(
            f"{NAME}={path} cannot be read ({error.strerror}): every host needs the same file; make it with {MAKE}"
        ) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO) & ~stat.S_IRGRP:
        raise ValueError(
            f"{NAME}={path} has mode {stat.S_IMODE(mode):o}, and a secret may be read by its owner and group alone, "
            f"and written by its owner alone: chmod 600 {path}, or 640 where a group has to read it, as fsGroup in a "
            "volume of Kubernetes"
        )
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise ValueError(
            f"{NAME}={path} holds {len(secret)} bytes, and a secret has {LEAST_BYTES} to {MOST_BYTES}: make one with "
            f"{MAKE}"
        )
    return secret
