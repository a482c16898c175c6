"""What a strategy answers to a network of a model library: it trains it exactly, or says why not and what to do.

The answers are the table of docs/models.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import networks
import pytest
import real_models
import vision_models
from proofs import EXACT
from ranks import by_value

import apportion
from apportion import Workload
from apportion.core.value import find, names
from apportion.errors import ApportionError
from apportion.runtime.proof.comparison import FLOOR
from apportion.runtime.spawn.template import Template, close_template

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
STRATEGIES = tuple(
    name
    for name in names("apportion.strategies")
    if name != "single_device" and find(name, "apportion.strategies")().exact
)
REASONS = {
    "couples the rows": r"depends on the rows beside it|statistics of a (part|batch)",
    "no convolution": r"no convolution",
    "no recurrent layer": r"no nn\.LSTM, nn\.GRU or nn\.RNN",
    "cannot be cut": r"cannot be cut \(split=",
    "cannot be exchanged": r"only rows of examples can be exchanged",
    "cannot be traced": r"cannot be traced|cannot be followed|which would happen once, when it is traced",
}
"""Why a network is refused, and the sentence by which that is known."""
NEVER = re.compile(r"torch\.fx|Traceback|Proxy|[a-z]Error\b|dynamo")
"""What no sentence for a user has in it."""


@contextmanager
def warm(template: str) -> Iterator[None]:
    """Have workers forked from this file's process, which has the libraries imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(Template, "program", (str(Path(__file__).with_name(template)),))
        close_template()
        try:
            yield
        finally:
            close_template()


def answer(workload: Workload, strategy: str, workers: int = 2) -> str:
    """Return "exact", "exact in float32", or why it is refused. Anything else fails."""
    try:
        with by_value(networks), by_value(real_models), by_value(vision_models):
            proof = apportion.check(workload, strategy, workers=workers, steps=2)
    except (ValueError, ApportionError) as error:
        return reason(str(error))
    assert proof.verdict == "equal", proof.sentence
    assert proof.gradients is None or proof.gradients.verdict == "equal"
    if proof.rounds[0].precision != "float64":
        return f"exact in {proof.rounds[0].precision}"
    worst = proof.rounds[0].worst  # where little has moved, rounding alone is more than this share of it
    assert min(worst.relative, worst.absolute) <= FLOOR == EXACT
    return "exact"


def reason(sentence: str) -> str:
    """Why, of a refusal that names what it is about and what to do."""
    assert not NEVER.search(sentence), sentence
    assert "use " in sentence, sentence
    found = [name for name, pattern in REASONS.items() if re.search(pattern, sentence)]
    assert found, sentence
    return found[0]


# The table


def _parts() -> tuple[str, list[str], str]:
    """What stands before the table on the page, the lines of the table, which is the first one, and what follows."""
    before, start, rest = PAGE.read_text().partition("| | ")
    lines, blank, after = (start + rest).partition("\n\n")
    return before, lines.splitlines(), blank + after


def table() -> dict[tuple[str, str], str]:
    """What the page says: (network, strategy) -> the answer."""
    _, lines, _ = _parts()
    head, _, *rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return {(row[0], name.strip("`")): cell for row in rows for name, cell in zip(head[1:], row[1:], strict=True)}


def write(models: Mapping[str, Workload]) -> None:
    """Write the rows of these networks anew, of what is found."""
    cells = table()
    cells |= {(m, s): answer(workload, s) for m, workload in models.items() for s in STRATEGIES}
    head = f"| | {' | '.join(f'`{name}`' for name in STRATEGIES)} |"
    every = dict.fromkeys(m for m, _ in cells)
    rows = [f"| {m} | {' | '.join(cells[m, s] for s in STRATEGIES)} |" for m in every]
    before, _, after = _parts()
    lines = [head, "|" + "---|" * (len(STRATEGIES) + 1), *rows]
    PAGE.write_text(before + "\n".join(lines) + after)
