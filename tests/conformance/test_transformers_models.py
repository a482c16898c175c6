"""Networks of transformers and peft under every exact strategy: one device's, or refused by a sentence with a cure.

What each of them can do is the table of docs/models.md, and a cell that is not so fails. ``python
tests/conformance/test_transformers_models.py`` writes its rows anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import vision_models
from model_answers import STRATEGIES, answer, table, warm, write
from real_models import MODELS

pytestmark = pytest.mark.processes

TEMPLATE = "model_template.py"


@pytest.fixture(scope="module", autouse=True)
def warm_models() -> Iterator[None]:
    """The workers of these tests are forked from a process that has the libraries imported."""
    with warm(TEMPLATE):
        yield


def test_the_table_is_about_every_network_and_every_exact_strategy() -> None:
    assert set(table()) == {(m, s) for m in (*MODELS, *vision_models.MODELS) for s in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.thorough
def test_a_network_of_a_model_library_is_trained_exactly_or_refused(model: str, strategy: str) -> None:
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
