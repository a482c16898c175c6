"""Records what accelerate's loaders hand out, which read one batch ahead, and its gathers for metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from typing import Any

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
