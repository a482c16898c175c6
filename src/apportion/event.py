"""What a run tells about itself, as it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["trial", "start", "step", "speed", "evaluation", "checkpoint", "fault", "end"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run. ``data`` by kind (every value is plain JSON):

    - ``trial``: before the start, where no strategy was given. ``ranking``: what was measured, the fastest (which is
      taken) first, each with ``strategy``, ``launcher``, ``step_seconds`` (median), ``examples_per_second``;
      ``refused``: what cannot run the workload, with the ``cause``; ``seconds`` (it took)
    - ``start``: ``strategy``, ``launcher`` (as they are typed), ``workers``, ``threads``, ``device``, ``parameters``
      (how many), ``examples`` (in the training set), ``batch_size``, ``steps`` (planned in all),
      ``steps_per_epoch``, ``first_step`` (0, or where a resumed run goes on), ``resumed`` (bool)
    - ``step``: sampled, a few a second at most. ``values``: every named value since the previous event of this kind,
      one list a name, the last belonging to ``step``: ``{"loss": [2.30, 2.28, ...]}``; ``examples_per_second``
      (global, since the previous one), ``learning_rate``
    - ``speed``: sampled, one a rank. ``rank``, ``examples_per_second`` (its own), and seconds a step since the
      previous one: ``loading``, ``computing``, ``waiting`` (in collectives), ``updating``
    - ``evaluation``: ``metrics`` (``{"accuracy": 0.97}``), ``final`` (bool), ``best`` (bool: the best so far)
    - ``checkpoint``: ``path``, ``seconds`` (it took), ``bytes``
    - ``fault``: ``rank``, ``cause`` (one line), ``traceback`` (text or None), ``action`` (what was decided)
    - ``end``: ``reason`` ("finished", "stopped", "interrupted"), ``examples_per_second``, ``metrics`` (the last),
      ``run_dir``, ``resume`` (how to go on, or None), ``why`` (interrupted: why the last update could not be saved)
    """

    kind: EventKind
    step: int
    """Updates done in all when it happened."""
    epoch: float
    """Epochs done in all, with the fraction of the current one."""
    seconds: float
    """Since the run (this sitting of it) started."""
    data: Mapping[str, Any] = field(default_factory=dict)
