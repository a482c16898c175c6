"""Networks of model libraries under every exact strategy: one device's, or refused by a sentence that says what to do.

What each of them can do is the table of docs/models.md, and a cell that is not so fails. ``python
tests/test_real_models.py`` writes the table anew.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import networks
import pytest
import real_models
from proofs import EXACT
from ranks import by_value
from real_models import MODELS

import apportion
from apportion.errors import ApportionError
from apportion.proof import FLOOR
from apportion.template import Template, close_template
from apportion.values import find, names

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
STRATEGIES = tuple(
    name
    for name in names("apportion.strategies")
    if name != "single_device" and find(name, "apportion.strategies")().exact
)
REASONS = {
    "couples the rows": r"depends on the rows beside it|statistics of a (part|batch)",
    "no convolution": r"no convolution",
    "no recurrent layer": r"no nn\.LSTM, nn\.GRU or nn\.RNN",
    "cannot be traced": r"cannot be traced|cannot be followed|which would happen once, when it is traced",
}
"""Why a network is refused, and the sentence by which that is known."""
NEVER = re.compile(r"torch\.fx|Traceback|Proxy|[a-z]Error\b|dynamo")
"""What no sentence for a user has in it."""


@pytest.fixture(scope="module", autouse=True)
def warm_models() -> Iterator[None]:
    """The workers of these tests are forked from a process that has the libraries imported."""
    with warm():
        yield


@contextmanager
def warm() -> Iterator[None]:
    """A template of workers that has the libraries imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(Template, "program", (str(Path(__file__).with_name("model_template.py")),))
        close_template()
        try:
            yield
        finally:
            close_template()


def answer(model: str, strategy: str, workers: int = 2, **changes: object) -> str:
    """ "exact", "exact in float32", or why it is refused. Anything else fails."""
    workload = replace(MODELS[model], **changes)  # type: ignore[arg-type]
    try:
        with by_value(networks), by_value(real_models):
            proof = apportion.check(workload, strategy, workers=workers, steps=2)
    except (ValueError, ApportionError) as error:
        return reason(str(error))
    assert proof.verdict == "equal", proof.sentence
    assert proof.gradients is None or proof.gradients.verdict == "equal"
    if proof.rounds[0].precision != "float64":
        return f"exact in {proof.rounds[0].precision}"
    assert proof.rounds[0].worst.relative <= FLOOR == EXACT
    return "exact"


def reason(sentence: str) -> str:
    """Why, of a refusal that names what it is about and what to do."""
    assert not NEVER.search(sentence), sentence
    assert "use " in sentence, sentence
    found = [name for name, pattern in REASONS.items() if re.search(pattern, sentence)]
    assert found, sentence
    return found[0]


# The table


def table() -> dict[tuple[str, str], str]:
    """What the page says: (network, strategy) -> the answer."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return {(row[0], name.strip("`")): cell for row in rows for name, cell in zip(head[1:], row[1:], strict=True)}


def write() -> None:
    """Write the page's table anew, of what is found."""
    head = f"| | {' | '.join(f'`{name}`' for name in STRATEGIES)} |"
    rows = [f"| {m} | {' | '.join(answer(m, s) for s in STRATEGIES)} |" for m in MODELS]
    before, _, after = PAGE.read_text().partition("| | ")
    after = "\n".join(line for line in after.splitlines()[1:] if not line.startswith("|"))
    lines = [before + head, "|" + "---|" * (len(STRATEGIES) + 1), *rows, "", after.lstrip()]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


def test_the_table_is_about_every_network_and_every_exact_strategy() -> None:
    assert set(table()) == {(m, s) for m in MODELS for s in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_network_of_a_model_library_is_trained_exactly_or_refused(model: str, strategy: str) -> None:
    assert answer(model, strategy) == table()[model, strategy]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_three_workers_do_the_same_in_both_precisions(model: str, strategy: str, precision: str) -> None:
    assert answer(model, strategy, workers=3, precision=precision) == table()[model, strategy]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    with warm():
        write()
