"""Mistakes that are planted in strategies of a user's own, written as docs/add_a_strategy.md says: each is found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import apportion
from apportion import State, Step, Strategy, Workload, World
from apportion.parallel.replica.step import ReplicaStep, reference


@final
@dataclass(frozen=True, repr=False)
class Summed(Strategy):
    """Each worker computes a share of every batch, and the gradients are summed; with a mistake."""

    exact = True
    mistake: str = ""

    def build(self, workload: Workload, world: World) -> Step:
        workload.must_feed(world.size)
        return STEPS.get(self.mistake, SummedStep)(workload, world, self.mistake)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def plain_states(workload: Workload) -> Iterator[State]:
    """Yields what one device comes to, as a reference that a user has written gives it: states, and nothing else."""
    for state in reference(workload):
        yield State(**{field.name: getattr(state, field.name) for field in fields(State)})


@final
@dataclass(frozen=True, repr=False)
class WithItsReference(Strategy):
    """The same, held to a reference of its own."""

    exact = True
    mistake: str = ""
    shared: bool = False
    """True where the reference makes the same mistake."""

    def build(self, workload: Workload, world: World) -> Step:
        return Summed(self.mistake).build(workload, world)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return self._mistaken(workload) if self.shared else plain_states(workload)

    def _mistaken(self, workload: Workload) -> Iterator[State]:
        step = self.build(workload, World(rank=0, device=torch.device("cpu")))
        while (batch := step.take()) is not None:
            step(batch)
            yield step.state_dict()


@final
@dataclass(frozen=True, repr=False)
class Approximate(Strategy):
    """The same, which promises what its reference computes and no more."""

    exact = False
    mistake: str = ""

    def build(self, workload: Workload, world: World) -> Step:
        return Summed(self.mistake).build(workload, world)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return plain_states(workload)


class SummedStep(ReplicaStep):
    deals_parts = True

    def __init__(self, workload: Workload, world: World, mistake: str) -> None:
        self.mistake = mistake
        super().__init__(workload, world)

    def reduce_gradients(self, loss: Tensor) -> Tensor:
        for p in self._replica.trainable():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            self._group.all_reduce(p.grad).wait()
            self.spoil(p)
        self._group.all_reduce(loss).wait()
        return loss

    def spoil(self, p: nn.Parameter) -> None:
        """Makes a mistake in the gradient of one parameter."""
        assert p.grad is not None
        if self.mistake == "factor" and p.shape == (6,):  # a bias
            p.grad *= 1 + 1e-6
        if self.mistake == "two elements" and p.shape == (2,):
            p.grad[0] *= 1.001
        if self.mistake == "tiny term" and p.shape == (5,):
            p.grad *= 2


class WrongLoss(SummedStep):
    def reduce_gradients(self, loss: Tensor) -> Tensor:
        return super().reduce_gradients(loss) * self._group.size


class OwnLoss(SummedStep):
    """Reports the loss of its own rows."""

    def reduce_gradients(self, loss: Tensor) -> Tensor:
        own = loss.clone()
        super().reduce_gradients(loss)
        return own * self._group.size


class PredictsZeros(SummedStep):
    def predict(self, batch: Any) -> Any:
        outputs = super().predict(batch)
        return None if outputs is None else torch.zeros_like(outputs)


class PredictsBackwards(SummedStep):
    def predict(self, batch: Any) -> Any:
        outputs = super().predict(batch)
        return None if outputs is None else outputs.flip(0)


class PredictsFewer(SummedStep):
    """Leaves out rows, as a step does that drops what does not fill its ranks evenly."""

    def predict(self, batch: Any) -> Any:
        outputs = super().predict(batch)
        return None if outputs is None else outputs[1:]


class PredictsOnOneRank(SummedStep):
    def predict(self, batch: Any) -> Any:
        outputs = super().predict(batch)
        return outputs if self.rank == 0 else None


class ForgetsOptimizer(SummedStep):
    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(replace(state, optimizer={}))


class LoadsWeightsAlone(SummedStep):
    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state.model)
        self._replica.step = state.step


class NamesNoLoss(SummedStep):
    def update(self) -> Mapping[str, Tensor]:
        return {"cost": super().update()["loss"]}


STEPS: dict[str, Any] = {
    "a loss that is too large": WrongLoss,
    "the loss of a rank's own rows": OwnLoss,
    "a loss by another name": NamesNoLoss,
    "zeros predicted": PredictsZeros,
    "rows predicted backwards": PredictsBackwards,
    "fewer rows predicted": PredictsFewer,
    "the rows of one rank predicted": PredictsOnOneRank,
    "resumes without the optimizer": ForgetsOptimizer,
    "resumes with weights alone": LoadsWeightsAlone,
}


def rows() -> TensorDataset:
    inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :2].argmax(1))


class Network(nn.Module):
    """With a tensor of five elements which one term of the loss, of 1e-10 of it, moves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 2)
        self.alone = nn.Parameter(torch.linspace(-1.0, 1.0, 5))

    def forward(self, x: Tensor) -> Tensor:
        tiny = 1e-10 * (self.alone * x[:, :5]).pow(2).sum(1, keepdim=True)
        return self.last(torch.tanh(self.first(x))) + tiny * x.new_tensor([1.0, 0.0])  # type: ignore[no-any-return]


class Convolved(nn.Module):
    """A network of another kind, with the same shapes where mistakes are planted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(1, 6, 3), nn.GroupNorm(2, 6), nn.Linear(6, 2)
        self.alone = nn.Parameter(torch.linspace(-1.0, 1.0, 5))

    def forward(self, x: Tensor) -> Tensor:
        tiny = 1e-10 * (self.alone * x[:, :5]).pow(2).sum(1, keepdim=True)
        seen = F.gelu(self.norm(self.first(x[:, None]))).mean(2)
        return self.last(seen) + tiny * x.new_tensor([1.0, 0.0])  # type: ignore[no-any-return]


def workload(model: Any = Network, **changes: Any) -> Workload:
    given: dict[str, Any] = {
        "model": model,
        "data": rows,
        "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "batch_size": 21,
        "epochs": 3,
    }
    return Workload(**{**given, **changes})


def found(mistake: str, **changes: Any) -> Any:
    return apportion.check(workload(**changes), Summed(mistake), workers=2, steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Network, Convolved])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_without_a_mistake_the_strategy_is_proved(model: Any, optimizer: str) -> None:
    kinds = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adam": lambda p: torch.optim.Adam(p, lr=0.01)}
    proof = found("", model=model, optimizer=kinds[optimizer])
    assert proof.verdict == "equal", proof.sentence


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Network, Convolved])
@pytest.mark.parametrize(
    ("mistake", "named"), [("factor", "bias"), ("two elements", "last.bias"), ("tiny term", "alone")]
)
def test_a_mistake_in_the_gradient_of_one_tensor_is_found(mistake: str, named: str, model: Any) -> None:
    proof = found(mistake, model=model)
    assert proof.verdict == "different"
    assert named in proof.sentence
    assert "with a cosine of" in proof.sentence


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Network, Convolved])
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("a loss that is too large", "the loss that rank"),
        ("the loss of a rank's own rows", "the loss that rank"),
        ("a loss by another name", "reports no loss"),
        ("zeros predicted", "predicts for its rows"),
        ("rows predicted backwards", "predicts for its rows"),
        ("fewer rows predicted", "has not as many rows"),
        ("the rows of one rank predicted", "no rank has the outputs of row"),
        ("resumes without the optimizer", "after a state was loaded"),
        ("resumes with weights alone", "after a state was loaded"),
    ],
)
def test_what_a_step_owes_besides_its_states_is_compared(mistake: str, said: str, model: Any) -> None:
    proof = found(mistake, model=model)
    assert proof.verdict == "different"
    assert said in proof.sentence


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Network, Convolved])
def test_a_reference_of_the_users_does_not_replace_one_device(model: Any) -> None:
    made = workload(model)

    def verdict(strategy: Strategy) -> tuple[str, str]:
        proof = apportion.check(made, strategy, workers=2, steps=3)
        return proof.verdict, proof.sentence

    assert verdict(WithItsReference())[0] == "equal"
    for mistake, said in (
        ("a loss that is too large", "the loss that rank"),
        ("zeros predicted", "predicts for its rows"),
        ("resumes without the optimizer", "after a state was loaded"),
    ):
        found, sentence = verdict(WithItsReference(mistake))
        assert found == "different"
        assert said in sentence
    found, sentence = verdict(WithItsReference("two elements", shared=True))
    assert found == "different"
    assert "last.bias" in sentence


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Network, Convolved])
def test_what_an_approximate_strategy_predicts_is_compared_and_the_rest_is_named(model: Any) -> None:
    right = apportion.check(workload(model), Approximate(), workers=2, steps=3)
    assert right.verdict == "equal"
    left = "not compared: the values that its steps report (it is approximate), the step after a state that is loaded"
    assert left in right.sentence
    assert len(right.to_json()["uncompared"]) == 2
    for mistake in ("zeros predicted", "rows predicted backwards", "fewer rows predicted"):
        wrong = apportion.check(workload(model), Approximate(mistake), workers=2, steps=3)
        assert wrong.verdict == "different"
        assert "predicts for its rows" in wrong.sentence


def part_of_rows(part: int) -> TensorDataset:
    inputs = torch.randn(17 + 3 * part, 8, generator=torch.Generator().manual_seed(part))
    return TensorDataset(inputs, inputs[:, :2].argmax(1))


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Network, Convolved])
@pytest.mark.parametrize("parts", [2, 3])
def test_what_ranks_predict_for_their_own_parts_of_the_data_is_compared(parts: int, model: Any) -> None:
    in_parts = {"data": part_of_rows, "parts": parts}
    right = found("", model=model, **in_parts)
    assert right.verdict == "equal", right.sentence
    assert "not compared" not in right.sentence
    for mistake in ("zeros predicted", "rows predicted backwards"):
        wrong = found(mistake, model=model, **in_parts)
        assert wrong.verdict == "different"
        assert "predicts for its rows" in wrong.sentence


def adversary(step: Any, batch: Any) -> dict[str, Tensor]:
    outputs = step.model(batch.inputs, batch.targets)
    return {"loss": step.minimize(outputs.square().mean(), batch)}


class OfTwo(nn.Module):
    """Is called with inputs and targets, by its update alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x).sum(1) - y  # type: ignore[no-any-return]


@pytest.mark.thorough
def test_what_was_not_compared_is_in_the_sentence_and_in_run_json(tmp_path: Any) -> None:
    made = workload(OfTwo, loss=None, update=adversary)
    apportion.train(made, "data_parallel", launcher=apportion.local(2), run_dir=tmp_path / "run")
    proof = json.loads((tmp_path / "run" / "run.json").read_text())["proof"]
    assert proof["verdict"] == "equal"
    (left,) = proof["uncompared"]
    assert left.startswith("what it predicts (one device does not: TypeError")
    assert f"not compared: {left}" in proof["sentence"]


def test_a_run_with_a_wrong_reported_loss_is_refused(tmp_path: Any) -> None:
    with pytest.raises(apportion.Disproved, match="the loss that rank"):
        apportion.train(
            workload(), Summed("a loss that is too large"), launcher=apportion.local(2), run_dir=tmp_path / "run"
        )
