"""The proof that both ends of a connection know the secret, before anything else is read from it.

::

               <-  HELLO, nonce h, HMAC(secret, "hello" h)                    dialling
    accepting  MAGIC, nonce a                                              ->
               <-  nonce b, purpose, HMAC(secret, "dialled"  a b purpose)     dialling
    accepting  HMAC(secret, "accepted" a b purpose)                        ->

The nonces are new, so that a handshake which was recorded proves nothing. The end that accepts sends nothing that was
made with the secret before the other end has proved itself. The purpose says what the connection is for and which rank
dials it, and is proved with the rest. Each message has one length: nothing is stored on a stranger's word.

The hello alone lets no rank in. It is sent with the first packet and answers nothing, so that the accepting end knows
without waiting for a round trip which connections are a rank's, and closes those of strangers first where it has too
many. It may be left out.

The secret is what makes a process one of the run's ranks. Whatever started the ranks hands it to each of them in a
file, whose path is in APPORTION_SECRET_FILE: a Secret of Kubernetes, a file that was copied to every host. It is never
sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from apportion.errors import ApportionError

SECRET_ENV = "APPORTION_SECRET_FILE"
LEAST_BYTES, MOST_BYTES = 16, 4096
"""The least bytes of a secret, fewer of which could be guessed, and the most."""
MAKE_SECRET = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > ~/apportion-secret)"
"""The command that makes a secret."""


def secret_of_run(environment: Mapping[str, str]) -> bytes | None:
    """Returns the secret that APPORTION_SECRET_FILE names; None where it is not set. Raises ApportionError where the
    file cannot be read, and ValueError where others can read it or it holds no secret."""
    path = environment.get(SECRET_ENV)
    if not path:
        return None
    try:
        with open(os.path.expanduser(path), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        raise ApportionError(
            f"{SECRET_ENV}={path} cannot be read ({error.strerror}): every host needs the same file; make it with "
            f"{MAKE_SECRET}"
        ) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO) & ~stat.S_IRGRP:
        raise ValueError(
            f"{SECRET_ENV}={path} has mode {stat.S_IMODE(mode):o}, and a secret may be read by its owner and group "
            f"alone, and written by its owner alone: chmod 600 {path}, or 640 where a group has to read it, as fsGroup "
            "in a volume of Kubernetes"
        )
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise ValueError(
            f"{SECRET_ENV}={path} holds {len(secret)} bytes, and a secret has {LEAST_BYTES} to {MOST_BYTES}: make one "
            f"with {MAKE_SECRET}"
        )
    return secret


MAGIC = b"apportion/1\n"
HELLO = b"apportion/hello\n"
"""The beginning of a hello, which no nonce has by chance."""
NONCE_BYTES = 32
_DIGEST_BYTES = hashlib.sha256().digest_size
_RANK = struct.Struct("!I")
PURPOSE_BYTES = _DIGEST_BYTES + _RANK.size
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
"""The bytes that the accepting end begins with."""
HELLO_BYTES = len(HELLO) + NONCE_BYTES + _DIGEST_BYTES
"""The bytes of a hello."""
CLAIM_BYTES = NONCE_BYTES + PURPOSE_BYTES + _DIGEST_BYTES
"""The bytes that the dialling end answers."""
PROOF_BYTES = _DIGEST_BYTES
"""The bytes by which the accepting end proves itself in turn."""


@dataclass(frozen=True)
class Purpose:
    """What a connection is for: the name of the group, which both ends know, and the rank that dials."""

    name: str
    rank: int

    def pack(self) -> bytes:
        """Returns the bytes that are sent for it."""
        return named(self.name) + _RANK.pack(self.rank)


def named(name: str) -> bytes:
    """Returns what stands for the name of a group in a purpose."""
    return hashlib.sha256(name.encode()).digest()


def unpack(purpose: bytes) -> tuple[bytes, int]:
    """Returns what stands for the name, and the rank, of a purpose as it was sent."""
    return purpose[:_DIGEST_BYTES], _RANK.unpack(purpose[_DIGEST_BYTES:])[0]


def key_of_meeting(secret: bytes, name: str) -> bytes:
    """Returns what the ranks of one meeting prove to know, where those of another one with the same secret may come."""
    return hmac.new(secret, b"meeting" + name.encode(), hashlib.sha256).digest()


def greet() -> bytes:
    """Returns what the accepting end begins with."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def hello(secret: bytes) -> bytes:
    """Returns what the dialling end may begin with."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return HELLO + nonce + _mac(secret, b"hello", nonce)


def nonce_of_hello(secret: bytes, given: bytes) -> bytes | None:
    """Returns the nonce of a hello; None where it was made without the secret."""
    nonce, mac = given[len(HELLO) : -_DIGEST_BYTES], given[-_DIGEST_BYTES:]
    # Compared in constant time: the time of ``==`` would tell a stranger how many bytes of a guess are right.
    return nonce if hmac.compare_digest(mac, _mac(secret, b"hello", nonce)) else None


def claim(secret: bytes, greeting: bytes, purpose: bytes) -> bytes:
    """Returns what the dialling end answers. Raises ValueError where the greeting is not this protocol's."""
    if not greeting.startswith(MAGIC):
        raise ValueError(f"{greeting[: len(MAGIC)]!r} is not the greeting of a rank, {MAGIC!r}")
    # A nonce of each end goes into both proofs, so that neither end can be made to prove something old; and the side
    # stands in front, so that a proof cannot be sent back to the end that made it.
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + purpose + _mac(secret, b"dialled", greeting, nonce, purpose)


def proof_of(secret: bytes, greeting: bytes, claimed: bytes) -> tuple[bytes, bytes] | None:
    """Returns the purpose of a connection and what proves the accepting end to the other; None where the claim was made
    without the secret."""
    nonce, purpose, mac = claimed[:NONCE_BYTES], claimed[NONCE_BYTES:-_DIGEST_BYTES], claimed[-_DIGEST_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"dialled", greeting, nonce, purpose)):
        return None
    return purpose, _mac(secret, b"accepted", greeting, nonce, purpose)


def is_proved(secret: bytes, greeting: bytes, claimed: bytes, proof: bytes) -> bool:
    """Returns whether the accepting end has proved that it knows the secret."""
    nonce, purpose = claimed[:NONCE_BYTES], claimed[NONCE_BYTES:-_DIGEST_BYTES]
    return hmac.compare_digest(proof, _mac(secret, b"accepted", greeting, nonce, purpose))


def _mac(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, side + b"".join(parts), hashlib.sha256).digest()
