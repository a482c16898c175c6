"""The template of the tests with timm and torchvision imported too: they take seconds, and every worker needs them."""

from __future__ import annotations

import vision_models
import warm_template


def main() -> None:
    """``python vision_template.py FD DRIVER_PID``, as ``apportion.runtime.spawn.template`` is called."""
    for workload in vision_models.MODELS.values():
        workload.model()
    warm_template.main()


if __name__ == "__main__":
    main()
