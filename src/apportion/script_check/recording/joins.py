"""Records that a script lets ranks that have no more batches take part in the collectives of the others."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.distributed.algorithms.join import Join

from apportion.script_check.recording.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Record the event ``join`` for each torch ``Join`` that is enabled, which ``join()`` of torch's wrappers makes."""
    begin = Join.__init__

    @wraps(begin)
    def begun(self: Join, joinables: Any, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        begin(self, joinables, enable, *args, **kwargs)
        if enable:
            recorder.emit("join", site=recorder.site())

    Join.__init__ = begun  # type: ignore[method-assign]
