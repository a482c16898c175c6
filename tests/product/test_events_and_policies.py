"""What a run tells of itself, event by event, and what the fields of its policy decide."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_work import STEPS, checkpoints_of, dense, events_of, rows, work
from torch import Tensor, nn

import apportion

FIELDS = {
    "proof": {"verdict", "sentence", "seconds", "remembered"},
    "start": {
        "strategy", "launcher", "workers", "threads", "device", "parameters", "examples", "batch_size", "steps",
        "steps_per_epoch", "first_step", "resumed", "proof",
    },
    "step": {"values", "examples_per_second", "learning_rate"},
    "speed": {"rank", "examples_per_second", "loading", "computing", "waiting", "updating"},
    "evaluation": {"metrics", "final", "best"},
    "checkpoint": {"path", "seconds", "bytes"},
    "end": {"reason", "examples_per_second", "metrics", "run_dir", "resume"},
}  # fmt: skip
TESTED = work(evaluation=apportion.Evaluation(data=rows))
TWO = apportion.local(workers=2)


@pytest.mark.parametrize("strategy", ["data_parallel", "pipeline_parallel(microbatches=2)", "parameter_server"])
def test_events_have_the_fields_that_are_documented(strategy: str, tmp_path: Path, no_cached_proofs: Path) -> None:
    events = list(apportion.run(TESTED, strategy, launcher=TWO, run_dir=tmp_path / "run"))
    kinds = set(FIELDS)
    if strategy == "parameter_server":  # rank 0, which sends the steps, may find that the other has made all six
        kinds.remove("step")
    assert {event.kind for event in events} >= kinds
    for event in events:
        assert event.data.keys() >= FIELDS[event.kind], event.kind
        assert json.loads(json.dumps(dict(event.data))) == event.data, "every value is plain JSON"
        assert all(getattr(event, name) == value for name, value in event.data.items() if name != "seconds")
    assert all(one.step <= other.step for one, other in itertools.pairwise(e for e in events if e.kind == "step"))
    assert [event.kind for event in events[:3]] == ["proof", "proof", "start"]
    assert (events[-1].kind, events[-1].step, events[-1].reason) == ("end", STEPS, "finished")
    start = next(event for event in events if event.kind == "start")
    assert (start.workers, start.examples, start.batch_size, start.steps, start.resumed) == (2, 60, 12, STEPS, False)
    assert start.parameters == sum(parameter.numel() for parameter in dense().parameters())
    recorded = events_of(tmp_path / "run")
    assert {record["kind"] for record in recorded} == {event.kind for event in events}


def test_a_run_that_chooses_its_strategy_says_which_and_why(tmp_path: Path, no_cached_proofs: Path) -> None:
    events = list(apportion.run(work(), run_dir=tmp_path / "run", trial=False))
    plan, start = (next(event for event in events if event.kind == kind) for kind in ("plan", "start"))
    assert plan.why
    assert plan.strategy == start.strategy
    assert plan.launcher == start.launcher
    for candidate in plan.candidates:
        assert candidate.keys() >= {
            "strategy", "launcher", "exact", "predicted_seconds", "step_seconds", "examples_per_second", "refused",
        }  # fmt: skip
    assert (events[-1].kind, events[-1].step) == ("end", STEPS)


def test_a_loop_that_is_left_saves_the_run_and_ends_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for event in apportion.run(work(steps=100000), "data_parallel", launcher=TWO, run_dir=run_dir, check=False):
        if event.kind == "step":
            break
    (saved,) = checkpoints_of(run_dir)
    end = events_of(run_dir)[-1]
    assert (end["kind"], end["step"], end["data"]["reason"]) == ("end", saved, "stopped")


def test_a_second_run_reuses_the_proof_of_the_first_and_reprove_does_not(
    tmp_path: Path, no_cached_proofs: Path
) -> None:
    remembered = []
    for name, reprove in (("one", False), ("two", False), ("three", True)):
        run_dir = tmp_path / name
        events = list(apportion.run(work(), "data_parallel", launcher=TWO, run_dir=run_dir, reprove=reprove))
        start = next(event for event in events if event.kind == "start")
        assert start.proof["verdict"] == "equal"
        remembered.append(start.proof["remembered"])
    assert remembered == [False, True, False]


def test_a_run_without_a_proof_says_nothing_of_one(tmp_path: Path) -> None:
    events = list(apportion.run(work(), "data_parallel", launcher=TWO, run_dir=tmp_path / "run", check=False))
    assert not [event for event in events if event.kind == "proof"]
    assert next(event for event in events if event.kind == "start").proof is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_checkpoints_are_made_and_kept_as_the_policy_says(keep: int, tmp_path: Path) -> None:
    """One that is due while another is being written is left out, except for the last."""
    policy = apportion.Policy(checkpoint_every="2 steps", keep=keep)
    apportion.train(work(), "data_parallel", launcher=TWO, run_dir=tmp_path / "run", policy=policy, check=False)
    made = [event["step"] for event in events_of(tmp_path / "run") if event["kind"] == "checkpoint"]
    assert made[-1] == STEPS
    assert set(made) <= {2, 4, 6}
    assert checkpoints_of(tmp_path / "run") == made[-keep:]


def test_a_checkpoint_is_made_after_an_epoch_and_at_the_end(tmp_path: Path) -> None:
    """One that waits to be written is replaced by a newer one, so that a few of the forty are left out."""
    policy = "policy(checkpoint_every='1 epoch', keep=99)"
    apportion.train(work(steps=202), "single_device", run_dir=tmp_path / "run", policy=policy)
    *after_epochs, last = checkpoints_of(tmp_path / "run")
    assert last == 202
    assert after_epochs
    assert not [step for step in after_epochs if step % 5]


class Poisoned(nn.Module):
    """A loss that is not a number in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * (float("nan") if self.calls == 3 else 1.0)


@pytest.mark.parametrize("on_nan", ["stop", "warn", "ignore"])
def test_a_loss_that_is_not_finite_is_answered_as_the_policy_says(on_nan: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"policy": apportion.Policy(on_nan=on_nan), "run_dir": tmp_path / "run"}  # type: ignore[arg-type]
    workload = work(loss=Poisoned())
    if on_nan == "stop":
        with pytest.raises(apportion.WorkerFailed):
            apportion.train(workload, "single_device", **given)
    else:
        assert apportion.train(workload, "single_device", **given).step == STEPS
    found = [event for event in events_of(tmp_path / "run") if event["kind"] == "fault"]
    assert len(found) == (0 if on_nan == "ignore" else 1)
    if on_nan != "ignore":
        for step in checkpoints_of(tmp_path / "run"):
            state = apportion.load(tmp_path / "run", which=step, model=dense).state_dict()
            assert all(torch.isfinite(value).all() for value in state.values())


INVALID: dict[str, Any] = {
    "checkpoint_every": "often",
    "keep": 0,
    "max_restarts": -1,
    "on_loss": "retry",
    "copies": 0,
    "host_grace": "soon",
    "on_host_loss": "replace",
    "host_wait": "1 h",
    "on_nan": "raise",
    "requeue": "yes",
}


@pytest.mark.parametrize("field", INVALID)
def test_an_invalid_field_of_a_policy_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        apportion.Policy(**{field: INVALID[field]})


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "a batch of fewer rows than workers": ("data_parallel", 2, {"batch_size": 1}, "batch_size=1"),
    "no convolution to cut": ("conv_parallel", 2, {}, "conv_parallel"),
    "no recurrent layer to cut": ("wavefront_parallel", 2, {}, "wavefront_parallel"),
    "more stages than layers": ("pipeline_parallel(stages=9)", 2, {}, "9"),
    "an optimizer that cannot be cut": (
        "fully_sharded", 2, {"optimizer": lambda parameters: torch.optim.LBFGS(parameters)}, "LBFGS",
    ),
    "steps that are never averaged": ("local_sgd(every=0)", 2, {}, "every=0"),
    "two workers of one process": ("single_device", 2, {}, "single_device"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_right_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    strategy, workers, changes, named = REFUSED[name]
    launcher = apportion.local(workers=workers)
    with pytest.raises((ValueError, apportion.ApportionError)) as refused:
        apportion.train(work(**changes), strategy, launcher=launcher, run_dir=tmp_path / "run")
    assert named in str(refused.value)
    assert not checkpoints_of(tmp_path / "run")
    assert not [event for event in events_of(tmp_path / "run") if event["kind"] == "step"]


def test_an_error_of_the_user_comes_with_its_rank_and_line(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise LookupError("the cause")

    with pytest.raises(apportion.WorkerFailed, match="the cause") as raised:
        apportion.train(work(loss=loss), "data_parallel", launcher=TWO, run_dir=tmp_path / "run", check=False)
    assert raised.value.rank in (0, 1)
    assert raised.value.traceback is not None
    assert "LookupError" in raised.value.traceback
    assert Path(__file__).name in str(raised.value.where)
