"""The template of the tests with the model libraries imported too: they take seconds, and every worker needs them."""

from __future__ import annotations

import warnings

import real_models
import warm_template


def main() -> None:
    """``python model_template.py FD DRIVER_PID``, as ``apportion.runtime.spawn.template`` is called."""
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, when it is asked about itself by peft
    for workload in real_models.MODELS.values():
        workload.model()
    warm_template.main()


if __name__ == "__main__":
    main()
