"""Which sizes of rollouts are measured, in a time that is given: the workload's own first, which others are guessed
from; what would take longer than what is left is left out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from apportion.comm.channel import Message
from apportion.cost_model.rollouts import LearnTiming, PlayTiming

APART = 4
"""The factor between neighbouring sizes."""
FEW_STEPS = 6
"""The number of steps that a number of environments is played for at the least, where a step is slow."""
FEW_RUNS = 3
"""The number of times that something slow is learnt from at the least."""
PLAYING = 0.4
"""The share of the time for playing; learning has the rest."""
LITTLE = 0.05
"""The share of the time in which something is learnt from even where the time is up."""

Ask = Callable[[dict[str, Any]], Sequence[Message]]
"""Gives workers an order, and returns what each of them answers."""


def widths(own: int) -> list[int]:
    """Return the numbers of environments that are looked at: the workload's own first, then from the smallest on."""
    return [own, *sorted({1, max(1, own // APART), own * APART} - {own})]


def lengths(own: int) -> list[int]:
    """Return the numbers of steps that are looked at, in the same order."""
    return [own, *sorted({max(1, own // APART), own * APART} - {own})]


@final
class RolloutGrid:
    """The sizes of rollouts that the workers of one place are measured with."""

    def __init__(self, ask: Ask, own: tuple[int, int], device: str, together: int) -> None:
        """``ask``: gives the workers an order; ``own``: the workload's own numbers of environments and steps;
        ``device``: the model of the device that the network is on."""
        self._ask, self._own, self._device, self._together = ask, own, device, together
        self.played: list[PlayTiming] = []
        self.learned: list[LearnTiming] = []
        self.left_out: dict[str, str] = {}
        """The numbers of environments and of steps that were not measured, each with the reason."""

    @property
    def where(self) -> str:
        """The place of the workers in words."""
        many = "by one worker" if self._together == 1 else f"by {self._together} workers at once"
        return f"{many} on {self._device}"

    def measure(self, seconds: float) -> None:
        """Measure what there is time for. Each order is given its share of the time that is left."""
        began = time.monotonic()
        self._play(began, PLAYING * seconds)
        self._learn(began + seconds, LITTLE * seconds)

    def _play(self, began: float, seconds: float) -> None:
        left, opening = widths(self._own[0]), math.inf
        while left:
            width = left.pop(0)
            if self.played and self._playing(width, opening) > seconds:
                self.left_out[f"{width} environments"] = "they take too long to open and to play"
                continue
            share = max(0.0, began + seconds - time.monotonic()) / (1 + len(left))
            answers = self._ask({"kind": "play", "environments": width, "seconds": share})
            refused = next((a["refused"] for a in answers if a["refused"]), "")
            if refused:
                self.left_out[f"{width} environments"] = refused
                continue
            if width != self._own[0]:  # the workload's own are open already
                opening = min(opening, max(a["opening"] for a in answers) / width)
            names = ("environment", "acting", "beside", "a_rollout")
            found = {name: statistics.mean(a[name] for a in answers) for name in names}
            self.played.append(PlayTiming(device=self._device, together=self._together, environments=width, **found))

    def _playing(self, width: int, opening: float) -> float:
        """Return the least seconds that opening and playing ``width`` environments takes, from what others have taken.
        opening: the seconds of opening one, as far as they are known."""
        opening = opening if math.isfinite(opening) else 0.0
        a_step = max((t.environment + t.acting) / t.environments for t in self.played)
        return width * (opening + FEW_STEPS * a_step)

    def _learn(self, end: float, little: float) -> None:
        sizes = [(width, steps) for steps in lengths(self._own[1]) for width in self._widths()]
        for at, (width, steps) in enumerate(sizes):
            time_left = end - time.monotonic()
            if self.learned and FEW_RUNS * self._learning(width * steps) > max(time_left, little):
                continue
            share = max(0.0, time_left) / (len(sizes) - at)
            order = {"kind": "learn", "environments": width, "steps": steps, "seconds": share}
            self.learned.append(self._learnt(width, steps, self._ask(order)))
        for steps in sorted({steps for _, steps in sizes} - {t.steps for t in self.learned}):
            self.left_out[f"{steps} steps"] = "they take too long to learn from"

    def _widths(self) -> list[int]:
        """Return the numbers of environments that were played, the workload's own first, where it is among them."""
        return [t.environments for t in self.played]

    def _learnt(self, width: int, steps: int, answers: Sequence[Message]) -> LearnTiming:
        fused = [a["fused"] for a in answers if a["fused"] is not None]
        return LearnTiming(
            device=self._device,
            together=self._together,
            environments=width,
            steps=steps,
            **{name: statistics.mean(a[name] for a in answers) for name in ("forward", "backward", "update")},
            fused_update=statistics.mean(fused) if fused else None,
        )

    def _learning(self, frames: int) -> float:
        """Return the seconds that learning from ``frames`` frames takes, if a frame takes as long as in the fastest of
        the measurements."""
        each = min((t.forward + t.backward) / (t.environments * t.steps) for t in self.learned)
        return frames * each + statistics.median(t.update for t in self.learned)
