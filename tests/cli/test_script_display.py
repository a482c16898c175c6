"""What the check of a script prints: the verdict, the findings, what was compared; in 80 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from apportion.cli.script_command import WIDTH, answer_lines
from apportion.script_check.findings import Finding, ScriptAnswer, answer

SITE = "train.py:2"
SCALE = Finding(
    "scale", "difference", "Every gradient is 0.5 times that of one process.", "Divide once.",
    ("body.weight", "body.bias", "head.weight", "head.bias", "tail.weight"), site=SITE,
)  # fmt: skip
ORDER = Finding("same_order", "warning", "Epochs 1 and 2 have the same order of rows.", "Call set_epoch.")
FIXED = Finding("fixed_order", "note", "No sampler shuffles.")
COMPARED = {"ranks": 2, "steps": 1, "tensors": 5, "reference": "the script as one process"}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(f"first\n    loss = {'very_' * 20}long\n")
    return str(path)


def shown(found: ScriptAnswer, script: str) -> list[str]:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in answer_lines(found, script)]
    assert all(len(line) <= WIDTH for line in lines)
    return lines


def test_a_difference_has_its_tensors_line_remedy_and_name(script: str) -> None:
    lines = shown(answer([SCALE], compared=COMPARED, about=["The script ran in a copy of its folder."]), script)
    text = "\n".join(lines)
    assert lines[0] == "Another network: train.py on 2 ranks does not train what one process does."
    assert "  Every gradient is 0.5 times that of one process.\n" in text
    assert "  tensors: body.weight, body.bias, head.weight, head.bias and 1 more\n" in text
    assert "\n  at train.py:2:\n     loss = very_very" in text
    assert "  fix: Divide once.\n  accept with: --accept scale\n" in text
    assert text.endswith(
        "\n\nCompared: 2 ranks, 1 step, 5 tensors; with the script as one process.\n"
        "The script ran in a copy of its folder."
    )


def test_what_is_accepted_and_what_is_a_note_is_said_to_be_that(script: str) -> None:
    text = "\n".join(shown(answer([FIXED, ORDER, SCALE], ["scale"], compared=COMPARED), script))
    assert text.startswith("The same network, but: ")
    assert text.index("  Wrong: Epochs 1") < text.index("  Note: No sampler") < text.index("  Accepted: Every gradient")
    assert text.count("accept with") == 1


@pytest.mark.parametrize(
    ("found", "first"),
    [
        (answer([]), "The same network: "),
        (answer([], undecided="there is no reference"), "Undecided: there is no reference."),
        (ScriptAnswer("could not run", reason="the script failed"), "Could not run: the script failed."),
        (
            ScriptAnswer("the ranks wait for each other", (SCALE,), ranks=("Rank 0 waits",)),
            "The ranks wait for each other: ",
        ),
    ],
    ids=lambda value: value.verdict if isinstance(value, ScriptAnswer) else "",
)
def test_every_verdict_comes_first(found: ScriptAnswer, first: str, script: str) -> None:
    lines = shown(found, script)
    assert lines[0].startswith(first)
    assert not found.ranks or "Rank 0 waits" in lines
