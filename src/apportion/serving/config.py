"""The settings of a server, among them those that have no flag on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from apportion.core.value import Value
from apportion.serving.ensemble.aggregation import Aggregation
from apportion.serving.pool.circuit_breaker import BreakerConfig

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}

Replication = Literal["auto", "in_graph", "between_graph"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Serving(Value):
    """The settings of a server, with times in seconds and sizes in bytes."""

    deadline: float = 1.0
    """The seconds that a request has if it asks for none by ``parameters.timeout``."""
    longest_deadline: float = 60.0
    """The longest deadline in seconds that a request may ask for."""
    quorum: int = 1
    """The number of members that an answer needs."""
    replication: Replication = "auto"
    """Where members run: all in one graph, each in a process of its own, or as the server finds faster."""
    aggregation: Aggregation = "mean"
    """What an ensemble's answer is made of: the mean of its members, a weighted mean, or a vote."""
    weights: Mapping[str, float] | None = None
    """The weight of each member by its name, for ``aggregation="weighted_mean"``."""
    rename: Mapping[str, Mapping[str, str]] | None = None
    """The names of inputs and outputs in the ensemble, by member and by the name in the member's own file:
    ``{"m2": {"logits": "p"}}``."""
    batch: bool = True
    """Allow requests to be computed together where each row of a member's outputs is known to depend on its own row of
    the inputs alone. False: every request is computed by itself."""
    host: str = "127.0.0.1"
    """The address that the server listens at."""
    names: tuple[str, ...] = ()
    """Names by which clients address the server, besides ``host``, this machine's own name, localhost and the addresses
    that are listened at; requests that name another one in Host or Origin are answered 403. "*": any."""
    port: int = 8000
    """The port that it listens at; 0: any that is free."""
    queue_length: int = 64
    """The number of requests that may wait for one member; more are answered 429."""
    most_rows: int = 32
    """The largest number of rows of a batch that is put together."""
    most_bytes: int = 64 << 20
    """The largest size in bytes of a request's body."""
    most_json_bytes: int = 8 << 20
    """The largest size in bytes of the JSON in a request: the server does nothing else while it reads JSON, and large
    tensors are better sent as bytes."""
    body_seconds: float = 10.0
    """The seconds in which a request's body has to come."""
    most_requests: int = 256
    """The number of requests that are answered at once; more are answered 429."""
    inbox_bytes: int = 256 << 20
    """The size in bytes of the memory that holds large bodies and tensors of requests; where it is full, more are
    answered 429. The system gives it page by page, as it is used."""
    outbox_bytes: int = 64 << 20
    """The size in bytes of the memory that holds a member's large outputs; what does not fit goes through a socket."""
    threads: int | None = None
    """The number of threads of each member; None measures which is fastest."""
    load_seconds: float = 60.0
    """The seconds in which a member's process has to start and load its model."""
    drain_seconds: float = 1.0
    """The seconds in which requests that are there when the server is asked to end may still be answered."""
    trust: bool = False
    """Allow the file that a run names to be imported even where it is not the caller's own (see ``load``)."""
    patience: BreakerConfig = field(default_factory=BreakerConfig)
    """When a member that fails or is late is left out for a while, and when it is tried again."""

    def __post_init__(self) -> None:
        for name in ("deadline", "longest_deadline", "body_seconds", "load_seconds", "drain_seconds"):
            value = getattr(self, name)
            if not _is_number(value, int | float) or not 0.0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} must be a positive number of seconds")
        for name in (
            "queue_length", "most_rows", "most_bytes", "most_json_bytes", "most_requests", "inbox_bytes", "outbox_bytes"
        ):  # fmt: skip
            if not _is_number(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number of at least 1")
        if self.deadline > self.longest_deadline:
            raise ValueError(f"deadline={self.deadline} is longer than longest_deadline={self.longest_deadline}")
        self._check_choices()
        self._check_members()

    def _check_choices(self) -> None:
        if not _is_number(self.quorum, int):
            raise ValueError(f"quorum={self.quorum!r} must be a whole number of members")
        if not _is_number(self.port, int) or not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port!r} must be from 0 (any that is free) to 65535")
        if self.threads is not None and (not _is_number(self.threads, int) or self.threads < 1):
            raise ValueError(f"threads={self.threads!r} must be a whole number of at least 1, or None")
        for name, known in (("replication", get_args(Replication)), ("aggregation", get_args(Aggregation))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        for name in ("batch", "trust"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    def _check_members(self) -> None:
        if not isinstance(self.host, str) or not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"host={self.host!r} and names={self.names!r} must be texts")
        if self.weights is not None and not (
            isinstance(self.weights, Mapping) and all(_is_number(w, int | float) for w in self.weights.values())
        ):
            raise ValueError(f"weights={self.weights!r} must be numbers by the member's name, {{'m1': 2.0, 'm2': 1.0}}")
        if self.rename is not None and not (
            isinstance(self.rename, Mapping)
            and all(
                isinstance(names, Mapping) and all(isinstance(n, str) and n for pair in names.items() for n in pair)
                for names in self.rename.values()
            )
        ):
            raise ValueError(
                f"rename={self.rename!r} must be names by member, that of the member's own first: "
                "{'m2': {'logits': 'p'}}"
            )


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def seconds_of(text: str) -> float:
    """Return the seconds of a text such as "50ms", "2 s" or "1.5min". Raises ValueError where it is not a time."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} must be a time: write a number and one of {', '.join(_UNITS)}, for example 50ms")
    return float(found[1]) * _UNITS[found[2]]


# Members on the command line: a place, or NAME=PLACE


ENSEMBLE = "ensemble"
"""The name of all members together, which no single member may have."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


def named(places: Sequence[str]) -> dict[str, str]:
    """Return the places by member name: the names that are given, and m1, m2, ... for the others, by their place in the
    list."""
    found: dict[str, str] = {}
    for at, text in enumerate(places, start=1):
        given = re.fullmatch(rf"({_NAME})=(.+)", text)
        name, place = (given[1], given[2]) if given else (f"m{at}", text)
        if name in found:
            raise ValueError(f"two members are named {name}: {found[name]} and {place}")
        found[name] = place
    check_names(found)
    return found


def check_names(members: Mapping[str, str]) -> None:
    """Raise ValueError where the members cannot be served under these names."""
    if not members:
        raise ValueError("members is empty: give at least one net")
    for name in members:
        if name == ENSEMBLE or not re.fullmatch(_NAME, name):
            raise ValueError(
                f"member {name!r} must be named by letters, digits, '_', '.' and '-', and not {ENSEMBLE!r}: that is all"
            )
