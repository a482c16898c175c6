"""Records what accelerate's dispatching loader gives each rank.

That loader reads on rank 0 alone, several batches for one step, and sends each rank its rows. What its own loader reads
is therefore no step's batch: the rows that come out of it are recorded in its place, under the name of its loader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from typing import Any

from apportion.script_check.recording.batches import recorded
from apportion.script_check.recording.known_loaders import Loaders

_MODULE, _CLASS = "accelerate.data_loader", "DataLoaderDispatcher"


def install(loaders: Loaders) -> None:
    """Watch the dispatching loader, if accelerate has been imported by now."""
    found = getattr(sys.modules.get(_MODULE), _CLASS, None)
    if found is None or "_apportion_watched" in vars(found):
        return
    found._apportion_watched = True
    iterate = found.__iter__

    @wraps(iterate)
    def watched(self: Any) -> Iterator[Any]:
        base = self.base_dataloader
        base.__dict__["_apportion_dispatched"] = True
        length = len(self) if hasattr(base.dataset, "__len__") else None
        key, iteration = loaders.begin_iteration(base, length, length)
        for number, batch in enumerate(iterate(self)):
            loaders.recorder.emit(
                "batch",
                loader=key,
                iteration=iteration,
                number=number,
                indices=None,
                rows=recorded(batch),
                random=False,
            )
            yield batch
        loaders.recorder.emit("exhausted", loader=key, iteration=iteration)

    found.__iter__ = watched
