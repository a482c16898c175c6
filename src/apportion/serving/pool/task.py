"""The work that is given to a member, and the outcomes that it may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.errors import ApportionError
from apportion.serving.pool.frames import Placed
from apportion.serving.pool.shared_arena import Lease
from apportion.serving.protocol.datatypes import Array


class Lost(ApportionError):
    """The member's process died while it had the request."""


class Refused(ValueError):
    """The model does not take these inputs."""


class Failed(ApportionError):
    """The member could not compute it."""


Outcome = list[Array] | Exception


@dataclass(slots=True, eq=False)
class MemberTask:
    """A request for one member. ``settle`` is called once: with the outputs, or with the reason why there are none."""

    tensors: Sequence[Placed]
    rows: int
    deadline: float
    settle: Callable[[Outcome], None]
    held: Sequence[Lease] = ()
    """The memory in which the tensors lie, if it is shared."""
    over: bool = False
    """Tells that the request has been settled or given up, and its outcome is no longer waited for."""
    alone: bool = False
    """Tells that the request may not be computed together with others."""


@dataclass(slots=True)
class InFlightBatch:
    """A batch that a process computes or is about to."""

    works: list[MemberTask]
    rows: int
    sent: float
    deadline: float
