"""The times at which each pass of a pipeline begins and ends.

Every rank makes its passes in an order that is known, and every link carries what they give in that same order: the
beginning of each pass follows from the ends of others, without a queue of events (``simulator.py``, which finds the
same times).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from apportion.cost_model.cost import Span
from apportion.cost_model.simulator import spent

Kind = Literal["forward", "backward"]
Order = Sequence[tuple[Kind, int]]
"""The passes that a stage makes over its micro-batches, one after the other."""


@dataclass(frozen=True)
class TimedStage:
    """The seconds of a stage for one micro-batch."""

    forward: float
    backward: float
    messages: float
    """The seconds of each pass that are spent on messages."""
    update: float
    at_once: bool
    """Does the stage compute the whole batch, which comes and goes in micro-batches?"""


class TimedPasses:
    """The timed passes of all stages, made in these orders. ``links``: seconds that what goes over each cut is under
    way.

    An assertion fails where stages wait for each other in a circle.
    """

    def __init__(self, stages: Sequence[TimedStage], orders: Sequence[Order], links: Sequence[float]) -> None:
        self._stages, self._orders, self._links = stages, orders, links
        n, many = len(stages), len(orders[0]) // 2
        self._turns = [_turns(stage, order) for stage, order in zip(stages, orders, strict=True)]
        self._made: list[list[tuple[float, float]]] = [[] for _ in stages]
        self._sent: dict[tuple[Kind, int, int], tuple[float, float]] = {}
        """The beginning and end of each message, by its kind, the stage that it goes to and the micro-batch."""
        come: list[list[float | None]] = [[None] * many for _ in range(2 * n)]
        self._come: dict[Kind, list[list[float | None]]] = {"forward": come[:n], "backward": come[n:]}
        self._come["forward"][0] = self._come["backward"][-1] = [0.0] * many
        self._carried: dict[Kind, list[float]] = {"forward": [0.0] * len(links), "backward": [0.0] * len(links)}
        going = list(reversed(range(n)))
        while going:
            stage = going.pop()
            if self._advance(stage):  # its neighbours may go on
                going += [s for s in (stage - 1, stage + 1) if 0 <= s < n]
        assert all(len(made) == len(turns) for made, turns in zip(self._made, self._turns, strict=True))

    def _advance(self, stage: int) -> bool:
        """Let a stage go on as far as it can; False: it could make no pass."""
        part, made, turns = self._stages[stage], self._made[stage], self._turns[stage]
        first = len(made)
        for kind, numbers in turns[first:]:
            come, begin = self._come[kind][stage], made[-1][1] if made else 0.0
            for number in numbers:
                there = come[number]
                if there is None:
                    return len(made) > first
                begin = max(begin, there)
            end = begin + (part.forward if kind == "forward" else part.backward)
            made.append((begin, end))
            self._send(kind, stage, numbers, end)
        return len(made) > first

    def _send(self, kind: Kind, stage: int, numbers: Sequence[int], ready: float) -> None:
        to = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= to < len(self._stages):
            return
        cut, come, carried = min(stage, to), self._come[kind][to], self._carried[kind]
        for number in numbers:
            if (seconds := self._links[cut]) > 0:
                begin = max(ready, carried[cut])
                carried[cut] = come[number] = begin + seconds
                self._sent[kind, to, number] = begin, carried[cut]
            else:
                come[number] = ready

    def terms(self, stage: int) -> dict[str, float]:
        """The seconds of the step as this stage spends them, see ``simulator.spent``."""
        end = max(made[-1][1] for made in self._made)
        own = [(begin, until, "computing") for begin, until in self._made[stage]]
        return spent(own, list(self._sent.values()), end)

    def timeline(self) -> tuple[Span, ...]:
        """The spans of one stage after the other; a message that comes to a stage stands behind the pass that waits for
        it."""
        spans: list[Span] = []
        for stage, order in enumerate(self._orders):
            on, made, before = on_rank(stage), iter(self._made[stage]), None
            for kind, number in order:
                name = f"{kind} {number}"
                if not self._stages[stage].at_once:
                    spans.append(Span(on, name, "computing", *next(made)))
                elif kind != before:
                    spans.append(Span(on, f"{kind} of the batch", "computing", *next(made)))
                before = kind
                if (sent := self._sent.get((kind, stage, number))) is not None:
                    source = stage - 1 if kind == "forward" else stage + 1
                    link = f"{min(source, stage)}-{max(source, stage)} {kind}"
                    spans.append(Span(link, name, "communicating", *sent))
        return tuple(spans)


def on_rank(stage: int) -> str:
    """The name of a stage's rank in a timeline."""
    return f"rank {stage}"


def _turns(stage: TimedStage, order: Order) -> list[tuple[Kind, tuple[int, ...]]]:
    """The passes of a stage, each with the micro-batches that it computes."""
    if not stage.at_once:
        return [(kind, (number,)) for kind, number in order]
    kinds: tuple[Kind, Kind] = "forward", "backward"
    return [(kind, tuple(number for of, number in order if of == kind)) for kind in kinds]
