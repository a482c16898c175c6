"""The order in which a stage computes its micro-batches: pure decisions.

::

    gpipe, 3 stages, 4 micro-batches           1f1b
    stage 0  F0 F1 F2 F3 .. .. B3 B2 B1 B0     F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1  .. F0 F1 F2 F3 B3 B2 B1 B0 ..     .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2  .. .. F0 F1 F2 F3 ...             .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Both compute the same gradients. gpipe keeps the activations of all micro-batches until the first backward pass; 1f1b
those of as many as there are stages from this one to the last.
"""

from __future__ import annotations

from typing import Literal

Turn = tuple[Literal["forward", "backward"], int]
SCHEDULES = ("gpipe", "1f1b")


def turns(schedule: str, stage: int, stages: int, microbatches: int) -> list[Turn]:
    """The passes that a stage makes, in order: which pass of which micro-batch."""
    if schedule == "gpipe":
        forward: list[Turn] = [("forward", m) for m in range(microbatches)]
        return [*forward, *(("backward", m) for m in reversed(range(microbatches)))]
    before = min(stages - stage - 1, microbatches)
    order: list[Turn] = [("forward", m) for m in range(before)]
    for m in range(microbatches - before):
        order += [("forward", m + before), ("backward", m)]
    return [*order, *(("backward", m) for m in range(microbatches - before, microbatches))]
