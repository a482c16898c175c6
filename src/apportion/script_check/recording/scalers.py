"""Records the scale of each GradScaler after its updates."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from apportion.script_check.recording.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Watch ``update`` of torch's GradScaler."""
    update = torch.amp.GradScaler.update

    @wraps(update)
    def updated(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        recorder.emit("scaler", scale=float(self.get_scale()), site=recorder.site())

    torch.amp.GradScaler.update = updated  # type: ignore[method-assign]
