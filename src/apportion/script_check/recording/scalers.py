"""Records the scale of each GradScaler after its updates, and when gradients are scaled and made unscaled."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from apportion.script_check.recording.collectives import Collectives


def install(collectives: Collectives) -> None:
    """Watch torch's GradScaler. Records ``scaler`` after ``update``; ``scaled`` with the ``scale`` that a loss was
    multiplied by; ``unscaled`` with the ``names`` of an optimizer's parameters, by ``unscale_`` or within ``step``."""
    recorder = collectives.recorder
    update, scale, unscale = (getattr(torch.amp.GradScaler, name) for name in ("update", "scale", "unscale_"))

    @wraps(update)
    def updated(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        recorder.emit("scaler", scale=float(self.get_scale()), site=recorder.site())

    @wraps(scale)
    def scaled(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            recorder.emit("scaled", scale=float(self.get_scale()), site=recorder.site())
        return scale(self, outputs)

    @wraps(unscale)
    def unscaled(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        unscale(self, optimizer)
        if self.is_enabled():
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            found = [collectives.names.find(each) for each in parameters]
            recorder.emit("unscaled", names=[each[0] for each in found if each], site=recorder.site())

    torch.amp.GradScaler.update = updated  # type: ignore[method-assign]
    torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign]
    torch.amp.GradScaler.unscale_ = unscaled  # type: ignore[method-assign]
