"""Networks of timm and torchvision under every exact strategy: test_transformers_models.py has those of transformers.

``scripts/test slow`` installs both libraries beside .venv's own packages. Run as a program, this file writes their
rows of docs/models.md anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from model_answers import STRATEGIES, answer, table, warm, write
from vision_models import FOLDER, MODELS

pytestmark = pytest.mark.processes

TEMPLATE = "vision_template.py"


@pytest.fixture(scope="module", autouse=True)
def warm_models() -> Iterator[None]:
    """The workers of these tests are forked from a process that has the libraries imported."""
    if not FOLDER.is_dir():
        pytest.skip(f"timm and torchvision are not in {FOLDER}: scripts/test -m slow installs them")
    with warm(TEMPLATE):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_network_of_timm_or_torchvision_is_trained_exactly_or_refused(model: str, strategy: str) -> None:
    assert answer(MODELS[model], strategy) == table()[model, strategy]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_three_workers_do_the_same_in_both_precisions(model: str, strategy: str, precision: str) -> None:
    workload = replace(MODELS[model], precision=precision)  # type: ignore[arg-type]
    assert answer(workload, strategy, workers=3) == table()[model, strategy]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    with warm(TEMPLATE):
        write(MODELS)
