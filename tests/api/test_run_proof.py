"""A run proves itself before its first step, gives way where it is wrong, and leaves no trace."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import moving
import networks
import numpy as np
import planted
import pytest
import torch
from planted import Faulty
from ranks import by_value
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import apportion
from apportion import Disproved, Event, Workload
from apportion.api import prover, run_proof
from apportion.api.proof_workers import ProofRequest, ProofWorkers
from apportion.api.prover import likely_causes
from apportion.core.value import parse
from apportion.planner.decision import Decision, next_best
from apportion.planner.trials.trial import candidate
from apportion.reporting.journal import read_events
from apportion.runtime.checkpoint.run_directory import RunDirectory
from apportion.runtime.launch.local import Local
from apportion.runtime.launched import ranks as proof_ranks
from apportion.runtime.launched.ranks import LocalRanks, Ranks
from apportion.runtime.proof import limits, proof_workload
from apportion.runtime.proof.limits import OutOfTimeError, ProofLimits, ProofSteps
from apportion.runtime.proof.module_taps import Relation, TapDifference
from apportion.runtime.proof.proof import Difference, Round
from apportion.runtime.proof.proof_workload import LENGTH, few_rows, with_plain_sgd, with_short_sequences

PLACE = Local(workers=2, threads=1)


@pytest.fixture(autouse=True, scope="module")
def _whole() -> Iterator[None]:
    """Workers need not import these modules."""
    with by_value(moving), by_value(networks), by_value(planted), by_value(sys.modules[__name__]):
        yield


@pytest.fixture(autouse=True)
def _forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proof of another test is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def net(model: Any = networks.perceptron, **options: Any) -> Workload:
    data = lambda: TensorDataset(networks.numbers(61, 10).float(), networks.classes(61, 3))  # noqa: E731
    given: dict[str, Any] = {"precision": "float32", "epochs": 2, **options}
    return networks.workload(model, data, 20, **given)


def events(workload: Workload, strategy: Any = "data_parallel", **options: Any) -> list[Event]:
    return list(apportion.run(workload, strategy, launcher=PLACE, **{"check": True, **options}))


@pytest.mark.processes
@pytest.mark.usefixtures("reports")
def test_a_run_says_that_it_is_proved_and_writes_it_down(tmp_path: Path) -> None:
    told = events(net(), run_dir=tmp_path / "run")
    begun, settled, start = told[:3]
    assert [e.kind for e in told[:3]] == ["proof", "proof", "start"]
    assert begun.data["verdict"] == "begun"
    assert "check=False" in begun.data["sentence"]
    assert settled.data["verdict"] == start.data["proof"]["verdict"] == "equal"
    assert "trains the same network as one device" in start.data["proof"]["sentence"]
    assert RunDirectory(tmp_path / "run").read_run()["proof"]["verdict"] == "equal"
    assert [e.kind for e in read_events(tmp_path / "run")][:3] == ["proof", "proof", "start"]
    assert start.data["proof"]["sentence"] in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.processes
def test_the_next_run_like_it_remembers_the_proof_and_another_one_does_not(tmp_path: Path) -> None:
    events(net(), run_dir=tmp_path / "first")
    again = events(net(), run_dir=tmp_path / "again")
    assert again[0].kind == "start"
    assert again[0].data["proof"]["remembered"]
    assert again[0].data["proof"]["verdict"] == "equal"
    other = events(net(loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * 2), steps=2)
    assert other[0].kind == "proof"


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["data_parallel", None])
def test_a_run_directory_that_holds_a_run_is_refused_before_anything_is_proved_or_tried(
    strategy: str | None, tmp_path: Path
) -> None:
    events(net(), run_dir=tmp_path / "run", check=False)
    told = apportion.run(net(), strategy, launcher=PLACE if strategy else None, run_dir=tmp_path / "run", check=True)
    with pytest.raises(
        ValueError, match="already holds a run, at step 8: use resume=True to go on, or another run_dir="
    ):
        next(iter(told))
    assert not (tmp_path / "cache" / "apportion").exists()


@pytest.mark.processes
def test_what_was_disproved_is_remembered_too(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Disproved):
            events(net(planted.ReadsRank), run_dir=tmp_path / "run")
    assert len(list((tmp_path / "cache" / "apportion" / "proofs").iterdir())) == 1


@pytest.mark.processes
def test_a_wrong_strategy_that_was_named_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(Disproved, match=r"does not train the same network as one device: .* differs") as raised:
        events(net(), Faulty("mean_of_means"), run_dir=tmp_path / "run")
    assert "check=False" in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_a_model_that_reads_its_rank_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(Disproved):
        events(net(planted.ReadsRank), run_dir=tmp_path / "run")


@pytest.mark.parametrize(("factor", "told"), [(2.0, True), (0.5, True), (1.5, False), (None, False)])
def test_what_is_off_by_the_number_of_workers_is_told_to_be_a_sum_or_a_wrong_count(
    factor: float | None, told: bool
) -> None:
    worst = Difference(name="model/w", step=1, absolute=1.0, relative=0.5, factor=factor)
    found = Round(
        precision="float64", steps=1, tensors=1, worst=worst, noise=0, bound=0, disagreement=None, verdict="different"
    )
    assert any("off by the number of workers, 2" in line for line in likely_causes([found], 2, [])) is told
    drawn = ["random in 0.1 (Skips)"]
    assert list(likely_causes([replace(found, verdict="equal")], 2, drawn)) == []
    (said,) = likely_causes([found], 5, drawn)
    assert "it draws random numbers as it computes (random in 0.1 (Skips))" in said
    assert 'per_rank_draws=("Skips",)' in said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("output", "the other rows of the batch"),
        ("gradient of the output", "count= says"),
        ("gradient of the parameter", ""),
    ],
)
def test_the_first_module_that_differs_says_what_kind_of_mistake_it_is(what: Any, said: str) -> None:
    worst = Difference(name="model/w", step=1, absolute=1.0, relative=0.5)
    found = Round(
        precision="float64", steps=1, tensors=1, worst=worst, noise=0, bound=0, disagreement=None, verdict="different"
    )
    first = TapDifference("0.norm", 0, what, Relation("differs"))
    causes = list(likely_causes([found], 2, [], first))
    assert [said in cause for cause in causes] == [True] * bool(said)


@pytest.mark.processes
def test_the_first_module_that_computes_something_else_is_named() -> None:
    proof = apportion.check(net(planted.ReadsRank), "data_parallel", workers=2, steps=2)
    assert proof.first is not None
    assert "is the first that is not one device's" in proof.first
    assert proof.first in proof.sentence
    assert apportion.check(net(), "data_parallel", workers=2, steps=2).first is None


@pytest.mark.processes
def test_without_the_check_it_trains_all_the_same(tmp_path: Path) -> None:
    told = events(net(planted.ReadsRank), run_dir=tmp_path / "run", check=False)
    assert told[0].kind == "start"
    assert told[0].data["proof"] is None
    assert told[-1].data["reason"] == "finished"


class Signs(torch.optim.Optimizer):
    """Moves every weight by the sign of its gradient alone, and keeps nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.processes
def test_an_optimizer_that_sees_signs_alone_hides_no_factor() -> None:
    proof = apportion.check(net(optimizer=Signs), Faulty("a_little_too_much"), workers=2, steps=2)
    assert proof.rounds[0].holds
    assert proof.gradients is not None
    assert proof.gradients.verdict == "different"
    assert proof.verdict == "different"


class Last(nn.Module):
    """Its weights are no numbers from the start: nothing can be shown of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float("nan")


@pytest.mark.processes
def test_what_nothing_is_shown_of_trains_and_says_so_unless_a_proof_is_required(tmp_path: Path) -> None:
    policy: dict[str, Any] = {"policy": apportion.Policy(on_nan="ignore")}
    told = events(net(Last), run_dir=tmp_path / "run", steps=2, **policy)
    proofs = [e for e in told if e.kind == "proof"]
    assert proofs[-1].data["verdict"] == "undecided"
    with pytest.raises(Disproved, match="it is not shown"):
        events(net(Last), run_dir=tmp_path / "other", require_proof=True)
    assert not (tmp_path / "other").exists()


class DrawsAndMoves(moving.Everything):
    """With dropout, and buffers, teachers and draws of every generator besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


def left(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights, buffers and slots, and what else a checkpoint has."""
    folder = run_dir / "checkpoints" / "latest"
    return {f"{path.stem}/{k}": t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


@pytest.mark.processes
@pytest.mark.thorough
def test_a_proof_leaves_no_trace_in_the_run_whether_it_is_made_or_remembered_or_left_out(tmp_path: Path) -> None:
    given = moving.workload(DrawsAndMoves, steps=9, precision="float32")
    expected: dict[str, torch.Tensor] = {}
    for kind, check in (("proved", True), ("remembered", True), ("plain", False)):
        whole, cut = tmp_path / kind, tmp_path / f"{kind}_resumed"
        start = next(e for e in events(given, run_dir=whole, check=check) if e.kind == "start")
        assert (start.data["proof"] or {}).get("remembered") == {"proved": False, "remembered": True}.get(kind)
        assert start.data["proof"] is None or start.data["proof"]["verdict"] == "equal"
        events(replace(given, steps=5), run_dir=cut, check=check)
        events(given, run_dir=cut, check=check, resume=True)
        expected = expected or left(whole)
        assert len(expected) > 20
        for run_dir in (whole, cut):
            assert left(run_dir).keys() == expected.keys()
            assert not [name for name, t in left(run_dir).items() if not torch.equal(t, expected[name])], run_dir


def test_require_proof_and_no_check_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="contradict"):
        apportion.run(net(), "data_parallel", check=False, require_proof=True)


# Its time


def test_what_a_step_of_the_run_takes_is_told_by_steps_of_two_sizes() -> None:
    steps = ProofSteps()
    assert steps.run_step(10) == 0.0
    steps.record_step(4, 0.9)
    steps.record_step(4, 0.5)
    assert steps.run_step(10) == 0.25  # in float32, and rows are not known to cost anything
    steps.record_step(1, 0.2)
    assert steps.run_step(10) == pytest.approx((0.2 + 0.1 * 39) / 2)
    assert steps.run_step(1) == 0.25


@pytest.mark.parametrize(("run_steps", "longer"), [(100, False), (10_000, True)])
def test_a_proof_before_a_long_run_has_a_share_of_it(run_steps: int, longer: bool) -> None:
    given = ProofLimits(10.0, share=0.05, run_steps=run_steps)
    before = given.seconds_left
    for seconds, rows in ((0.2, 2), (0.6, 6)):
        given.lengthen(rows, seconds, 2.0)
    assert given.seconds_left == pytest.approx(0.05 * 10_000 * 0.6 if longer else before, abs=0.1)


def test_a_proof_ends_at_its_first_step_where_there_is_no_time_for_the_others() -> None:
    ProofLimits(10.0, share=0.0, run_steps=0).step(1.0, 0.1, 5)
    with pytest.raises(OutOfTimeError, match="the whole proof needs about"):
        ProofLimits(10.0, share=0.0, run_steps=0).step(6.0, 0.1, 5)


def test_the_folder_of_a_proof_is_there_until_every_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker fails, and another is still writing its state: the failure is what the user reads."""
    closed: list[Path] = []

    class Writing:
        def __init__(self, *given: object) -> None: ...

        def close(self) -> None:
            closed.append(workers.folder / f"state{len(closed)}")
            closed[-1].write_bytes(b"late")

    monkeypatch.setattr(proof_ranks, "WorkerPool", Writing)
    chosen = candidate(parse("data_parallel", "apportion.strategies"), PLACE)
    asked = ProofRequest(workload=net(), chosen=chosen, steps=4)
    with (
        pytest.raises(ValueError, match="a rank failed"),
        ProofWorkers.started(asked, ProofLimits(None, share=0.0, run_steps=0), "float64", LocalRanks()) as workers,
    ):
        raise ValueError("a rank failed")
    assert len(closed) == 3
    assert not workers.folder.exists()


class Words(nn.Module):
    """Takes sequences of any length, unless it is told of one."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.words, self.out, self.length = nn.Embedding(20, 8), nn.Linear(8, 20), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.length not in (None, x.shape[1]):
            raise RuntimeError(f"{x.shape[1]} words, and {self.length} are wanted")
        return self.out(self.words(x).cumsum(1)).transpose(1, 2)


def texts() -> TensorDataset:
    words = torch.randint(20, (70, 40), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words, words)


@pytest.mark.processes
@pytest.mark.parametrize(("length", "verdict"), [(None, "equal"), (40, "not proved")])
def test_where_there_is_no_time_for_whole_sequences_their_beginnings_are_proved(
    length: int | None, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def impatient(request: ProofRequest, ranks: Ranks) -> Any:
        asked.append(request)
        if not request.short:
            raise OutOfTimeError("it needs about 100 s")
        return prover.prove(request, ranks)

    monkeypatch.setattr(run_proof, "prove", impatient)
    given = replace(net(lambda: Words(length)), data=texts, loss=nn.CrossEntropyLoss())
    found = next(e for e in events(given, run_dir=tmp_path / "run") if e.kind == "start").data["proof"]
    assert found["verdict"] == verdict, found["sentence"]
    assert [(request.short, request.least) for request in asked][:2] == [(False, False), (True, False)]
    assert [request.least for request in asked[2:]] == ([] if verdict == "equal" else [True])
    assert ("about 100 s" in found["sentence"]) == (verdict == "not proved")


def test_beginnings_of_sequences_take_all_along_that_is_as_long() -> None:
    long, examples = 40, 5
    ids, mask = torch.arange(long), torch.ones(long, long)

    class Dictionaries(Dataset[Any]):
        def __len__(self) -> int:
            return examples

        def __getitem__(self, i: int) -> Any:
            floats = torch.ones(long, 3), torch.ones(7)
            return {"ids": ids + i, "mask": mask, "floats": floats, "name": "x", "array": np.arange(long)}, ids

    cut = with_short_sequences(Dictionaries())
    assert len(cut) == examples  # type: ignore[arg-type]
    inputs, targets = cut[1]
    assert inputs["ids"].tolist() == list(range(1, LENGTH + 1))
    assert [inputs["mask"].shape, inputs["floats"][0].shape, inputs["floats"][1].shape] == [
        (LENGTH, LENGTH), (LENGTH, 3), (7,),
    ]  # fmt: skip
    assert (targets.shape, inputs["array"].shape, inputs["name"]) == ((LENGTH,), (LENGTH,), "x")
    tensors = TensorDataset(torch.zeros(5, long, dtype=torch.int64), torch.zeros(5, long, 2))
    assert [t.shape for t in with_short_sequences(tensors)[0]] == [(LENGTH,), (LENGTH, 2)]


@pytest.mark.parametrize("x", [torch.zeros(5, 3, 40, 40), torch.zeros(5, 3, 40, 40, dtype=torch.uint8),
                               torch.zeros(5, 10, dtype=torch.int64), torch.zeros(5, 400)], ids=str)  # fmt: skip
def test_what_is_no_long_sequence_of_tokens_is_not_cut(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no example has a sequence"):
        with_short_sequences(TensorDataset(x, torch.zeros(5, dtype=torch.int64)))


@pytest.mark.processes
def test_a_proof_that_does_not_fit_the_memory_is_not_begun_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_free_bytes", lambda: 1e6)
    wide = net(lambda: nn.Linear(10, 3000), epochs=None, steps=2)
    proof = next(e for e in events(wide, run_dir=tmp_path / "run") if e.kind == "start").data["proof"]
    assert proof["verdict"] == "not proved"
    assert re.search(r"needs 0\.00\d+ GB of memory, of which 0\.001 GB are free, and at least \d+ s", proof["sentence"])
    assert "apportion check" in proof["sentence"]


# What is taken instead


def row(strategy: str, seconds: float | None = 1.0, **more: Any) -> dict[str, Any]:
    launcher = "local(workers=1, threads=2)" if strategy == "single_device" else str(PLACE)
    plain = {"exact": strategy != "local_sgd", "predicted_seconds": None, "refused": None, "examples_per_second": None}
    return {"strategy": strategy, "launcher": launcher, "step_seconds": seconds, **plain, **more}


def decided(*rows: dict[str, Any]) -> Decision:
    chosen = candidate(parse(rows[0]["strategy"], "apportion.strategies"), PLACE)
    told = {"strategy": rows[0]["strategy"], "launcher": rows[0]["launcher"], "why": "fast", "candidates": list(rows)}
    return Decision(chosen=chosen, plan=told, expected=None)


def test_the_next_best_exact_one_is_taken_and_the_report_says_why() -> None:
    first = decided(
        row("data_parallel"), row("local_sgd"), row("map_reduce", refused="too large"), row("tensor_parallel")
    )
    then = next_best(first, {str(first.chosen)}, PLACE, "it was wrong")
    assert str(then.chosen.strategy) == "tensor_parallel"
    assert then.plan is not None
    assert "it was wrong" in then.plan["why"]
    assert "it was wrong" in next(r["refused"] for r in then.plan["candidates"] if r["strategy"] == "data_parallel")


def test_one_process_is_what_is_left_in_the_end() -> None:
    first = decided(row("data_parallel"))
    assert str(next_best(first, {str(first.chosen)}, PLACE, "no").chosen.strategy) == "single_device"


# The workload of a proof


def test_few_rows_keep_the_short_batch_and_the_number_of_steps() -> None:
    made = few_rows(net(), 7, 4, 2)
    assert made.batch_size == 7
    assert len(made.open_data()) == 7 + 1  # 61 examples in batches of 20 leave one # type: ignore[arg-type]
    assert made.total_steps(2) == net().total_steps(4)


def test_a_short_batch_at_the_end_of_a_long_epoch_is_among_the_steps() -> None:
    made = few_rows(replace(net(), batch_size=6), 6, 4, 2)
    assert len(made.open_data()) == 6 + 1  # 61 examples in batches of 6 leave one # type: ignore[arg-type]


@pytest.mark.processes
def test_a_dataset_that_draws_as_it_is_read_is_no_difference(tmp_path: Path) -> None:
    draws = replace(net(), data=lambda: networks.Restless(61), precision="float64")
    assert events(draws, run_dir=tmp_path / "run")[1].data["verdict"] == "equal"


def test_a_batch_that_is_small_already_stays_as_it_is() -> None:
    assert few_rows(net(), 20, 4, 2).batch_size == 20


def test_a_schedule_that_begins_at_zero_is_begun_where_weights_move() -> None:
    def warm(optimizer: Any, total: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 1000))

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    made = proof_workload.moving(net(schedule=warm))
    assert made.schedule is not None
    made.schedule(optimizer, 5000)
    assert optimizer.param_groups[0]["lr"] >= 0.005


def test_plain_sgd_moves_by_the_gradient() -> None:
    layer = nn.Linear(2, 2)
    made = with_plain_sgd(net(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-9)))
    optimizer = made.optimizer(list(layer.named_parameters()))
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # type: ignore[union-attr]
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.detach(), before - layer.weight.grad)


@pytest.mark.processes
def test_a_warm_up_from_zero_hides_no_wrong_step() -> None:
    def warm(optimizer: Any, total: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 1000)

    for changes in ({"schedule": warm}, {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-5)}):
        for model in (networks.perceptron, lambda: planted.Narrow(quietly=False)):
            wrong = apportion.check(replace(net(model), **changes), Faulty("mean_of_means"), workers=2, steps=3)
            assert not wrong.holds, changes
