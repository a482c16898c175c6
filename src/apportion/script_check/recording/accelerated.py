"""Records what accelerate's loaders give each rank.

Its usual loader reads one batch ahead, so that the batch which the script has is not the one that was read last. Its
dispatching loader reads on rank 0 alone, several batches for one step, and sends each rank its rows: what its own
loader reads does not belong to any step, and the rows that come out of it are recorded in its place, under the name of
its loader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from typing import Any

from apportion.script_check.recording.batches import recorded
from apportion.script_check.recording.known_loaders import Loaders
from apportion.script_check.recording.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Records which batch the script has where accelerate's loader has read the next one already, and the gathers that
    drop the rows by which the last batches were filled."""
    module = sys.modules.get("accelerate.data_loader")
    shard = getattr(module, "DataLoaderShard", None)
    if shard is None or hasattr(shard, "_apportion_watched"):
        return
    shard._apportion_watched = True
    iterate = shard.__iter__

    @wraps(iterate)
    def handed(self: Any) -> Iterator[Any]:
        place: dict[str, Any] | None = None
        for position, batch in enumerate(iterate(self)):
            base = self.base_dataloader
            place = {"loader": base.__dict__["_apportion_key"], "iteration": base.__dict__["_apportion_iterations"] - 1}
            recorder.emit("taken", **place, number=position + self.skip_batches)
            yield batch
        if place is not None:
            recorder.emit("exhausted", **place)  # for the script, which has only now computed the last batch

    shard.__iter__ = handed
    accelerator: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is not None:
        gather = accelerator.gather_for_metrics

        @wraps(gather)
        def gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.emit("gather_for_metrics", site=recorder.site())
            return gather(self, *args, **kwargs)

        accelerator.gather_for_metrics = gathered


_MODULE, _CLASS = "accelerate.data_loader", "DataLoaderDispatcher"


def install_dispatcher(loaders: Loaders) -> None:
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
