"""``apportion check FILE --workers 2`` finds mistakes of distributed training in scripts that were written without it,
names their class and where they are, and reports none in the twin of each script, which differs by the fix alone.

The scripts are in ``scripts/mistakes``: ``NN_name.py`` has the mistake and ``NN_name_fixed.py`` has not.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "scripts" / "mistakes"
SECONDS = 110.0
MOST_LINES = 14
"""Lines by which a script and its twin differ, at most."""


@dataclass(frozen=True)
class Mistake:
    """One mistake, and what a right answer names.

    ``what``: the class of the mistake, in a sentence.
    ``words``: a pattern that a sentence or a name of a finding has where it names the class.
    ``tensors``: parts of the names of tensors that the mistake reaches; a finding lists one of them at least.
    ``lines``: parts of the lines at fault; a finding points to one of them.
    ``workers``: the number of ranks.
    """

    script: str
    what: str
    words: str
    tensors: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    workers: int = 2


MISTAKES = [
    Mistake(
        "01_gradient_buckets",
        "the last bucket is not full, and its gradients are averaged by nothing",
        r"averag|reduc|synchroni",
        tensors=("conv1", "norm1"),
        workers=3,
    ),
    Mistake(
        "02_tied_embedding",
        "the gradient of the tied matrix is summed over the ranks twice",
        r"\b2(\.0+)?\b|twice|factor",
        tensors=("tokens.weight", "head.weight"),
    ),
    Mistake(
        "03_language_model_no_sync",
        "the gradients of the last micro-batch are not averaged, the first one's are",
        r"averag|synchroni|no_sync",
        tensors=("wte", "wpe", "attention", "lm_head"),
        lines=("synchronizes", "loss.backward()"),
    ),
    Mistake(
        "04_language_model_offsets",
        "all ranks draw the same windows of the text",
        r"same (rows|batch|data|input|sample|window|draw|random)|identical|alike|read by",
        lines=("windows.draw()", "generator.integers", "default_rng(seed)", "args.seed)", "torch.from_numpy", "model("),
    ),
    Mistake(
        "05_adversarial_networks",
        "the discriminator is not wrapped, and its gradients are averaged by nothing",
        r"averag|wrap|synchroni",
        tensors=("critic",),
    ),
    Mistake(
        "06_trainer_class_lstm",
        "each rank begins with weights of its own",
        r"begin|start|initial|first step",
        tensors=("lstm", "head"),
    ),
    Mistake(
        "07_label_smoothing",
        "each rank takes the mean over its own words, and the means have equal weight",
        r"token|word|label|target|element|equal weight|same weight|weighted|unequal|unlike",
        lines=("functional.cross_entropy", "smoothed_loss("),
    ),
    Mistake(
        "08_barlow_twins",
        "features are standardized and correlated over the rows of one rank",
        r"statistic|one rank's rows|own rows|rows of (one|a|each) rank|deviation",
        lines=("features.mean(0)", "standardize(first)", "correlation_loss("),
    ),
    Mistake(
        "09_two_towers",
        "features of other ranks are gathered without their gradient, so that the towers have half of it",
        r"0\.5|half|gather",
        tensors=("image_tower", "text_projection", "word_embedding"),
        lines=("dist.all_gather", "gather_features("),
    ),
    Mistake(
        "10_sharded_blocks_clipping",
        "each rank clips by the norm of its own shards",
        r"clip",
        tensors=("blocks.",),
        lines=("gradient.norm()", "clip_gradients(", "gradient.mul_", "limit / "),
    ),
    Mistake(
        "11_sequence_parallel_norm",
        "the gradients of the norms are partial sums over one rank's part of the sequence",
        r"partial|part of|sum|averag|synchroni",
        tensors=("norm1", "norm2"),
    ),
    Mistake(
        "12_pipeline_clipping",
        "each stage clips by the norm of its own parameters",
        r"clip",
        lines=("clip_grad_norm_",),
    ),
    Mistake(
        "13_accelerate_warmup",
        "the schedule counts steps of one rank, and is stepped once for every rank",
        r"learning rate|schedul",
        lines=("schedule.step()", "steps = ", "linear_schedule("),
    ),
    Mistake(
        "14_embedding_bags",
        "set_epoch is not called, and each epoch has the same order",
        r"set_epoch|same order|order",
        lines=("DistributedSampler(", "in self.loader", "DataLoader("),
    ),
    Mistake(
        "15_stream_of_records",
        "the loader processes share the records, the ranks do not, and each reads all of them",
        r"read by|same (rows|batch|data|sample|record)|(both|all|every|several|two|2) ranks",
        lines=("range(worker,", "DataLoader(", "in loader", "__iter__"),
    ),
    Mistake(
        "16_resumed_momentum",
        "after the resume only rank 0 has the state of the optimizer",
        r"optimizer|momentum",
        tensors=("0.weight", "3.weight", "momentum"),
    ),
    Mistake(
        "17_accuracy_of_batches",
        "the evaluation counts padded rows twice, and batches of unequal size have equal weight",
        r"evaluat|accuracy|twice|pad|held",
        lines=("loader = DataLoader(held_out", "in loader", "accuracies", "evaluate("),
    ),
    Mistake(
        "18_plateau",
        "each rank lowers the learning rate by its own loss",
        r"learning rate|\blr\b|\brates?\b",
        lines=("plateau",),
    ),
    Mistake(
        "19_accelerate_dropout",
        "the ranks draw the same dropout masks",
        r"random|mask|dropout|draw|generator",
        lines=("self.dropout", "set_seed(", "model("),
    ),
    Mistake(
        "20_trainer_loss_function",
        "the loss function takes the mean of its own batch, and the Trainer multiplies by the number of ranks",
        r"\b2(\.0+)?\b|token|label|word|divid|scale|weight",
        lines=("each.sum()", "focal_loss", "trainer.train()"),
    ),
]

QUICK = "16_resumed_momentum"


def cases() -> list[Any]:
    marks = {True: pytest.mark.thorough, False: pytest.mark.slow}
    return [pytest.param(each, id=each.script, marks=marks[each.script == QUICK]) for each in MISTAKES]


@lru_cache
def checked(script: str, workers: int) -> dict[str, Any]:
    """What the command answers about a script, and its status as "returncode"."""
    command = [sys.executable, "-m", "apportion", "check", f"{script}.py", "--workers", str(workers), "--json"]
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        pytest.fail(f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {**answer, "returncode": done.returncode}


def naming(mistake: Mistake, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings that name the class of the mistake. Notes do not count, nor do the names of files in a sentence."""
    named = []
    for finding in answer["findings"]:
        text = f"{finding['name'].replace('_', ' ')}\n{re.sub(r'[^ (]*[.]py', '', finding['sentence'])}"
        if finding.get("severity") != "note" and re.search(mistake.words, text, re.IGNORECASE):
            named.append(finding)
    return named


def lines_of(finding: dict[str, Any]) -> set[int]:
    """The line numbers that a finding gives: in its site, and as file.py:line in its sentence."""
    text = json.dumps([finding.get("site"), finding["sentence"]])
    site = finding.get("site")
    numbers = {int(number) for number in re.findall(r"\.py:(\d+)", text)}
    if isinstance(site, dict):
        numbers |= {value for value in site.values() if isinstance(value, int)}
    if isinstance(site, list | tuple):
        numbers |= {value for value in site if isinstance(value, int)}
    return numbers


def placed(mistake: Mistake, findings: list[dict[str, Any]]) -> bool:
    """Whether a finding lists a tensor that the mistake reaches, or a line at fault."""
    listed = [tensor for finding in findings for tensor in finding.get("tensors", ())]
    if any(part in tensor for part in mistake.tensors for tensor in listed):
        return True
    text = (FOLDER / f"{mistake.script}.py").read_text().splitlines()
    given = {number for finding in findings for number in lines_of(finding)}
    return any(part in text[number - 1] for part in mistake.lines for number in given if 0 < number <= len(text))


@pytest.mark.parametrize("mistake", cases())
def test_a_mistake_is_found_and_its_class_is_named(mistake: Mistake) -> None:
    answer = checked(mistake.script, mistake.workers)
    assert answer["returncode"] == 1, answer
    assert naming(mistake, answer), (mistake.what, answer["findings"], answer.get("reason"))


@pytest.mark.parametrize("mistake", cases())
def test_the_tensor_or_the_line_is_right(mistake: Mistake) -> None:
    answer = checked(mistake.script, mistake.workers)
    assert placed(mistake, naming(mistake, answer)), (mistake.tensors, mistake.lines, answer["findings"])


@pytest.mark.parametrize("mistake", cases())
def test_the_script_with_the_fix_has_no_finding(mistake: Mistake) -> None:
    answer = checked(f"{mistake.script}_fixed", mistake.workers)
    assert answer["returncode"] == 0, answer


def test_each_script_differs_from_its_twin_by_the_fix_alone() -> None:
    scripts = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert scripts == sorted(name for each in MISTAKES for name in (each.script, f"{each.script}_fixed"))
    for each in MISTAKES:
        pair = [(FOLDER / f"{name}.py").read_text().splitlines() for name in (each.script, f"{each.script}_fixed")]
        changed = [line for line in difflib.ndiff(*pair) if line[:2] in ("- ", "+ ")]
        assert 0 < len(changed) <= MOST_LINES, (each.script, changed)
        assert all(any(part in line for line in pair[0]) for part in each.lines), each
