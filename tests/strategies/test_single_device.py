"""single_device is the plain loop that anyone would write: the same bits in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import networks
import pytest
import torch
from proofs import assert_equal
from ranks import by_value
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import apportion
from apportion import Workload
from apportion.comm.world import World
from apportion.core.sampler import Sampler
from apportion.core.strategy import batches
from apportion.strategies.single_device import SingleDevice

EXAMPLES, BATCH, STEPS, SEED = 101, 20, 14, 3
Options = dict[str, Any]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3, bias=False)
    )


def data() -> TensorDataset:
    return TensorDataset(networks.numbers(EXAMPLES, 3, 8, 8).float(), networks.classes(EXAMPLES, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)


def steps_down(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total)


def plain_loop(
    make: Callable[[Any], torch.optim.Optimizer], *, schedule: Any = None, clip: float | None = None, cast: Any = None
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(SEED)
    model, held = convolutional(), data()
    optimizer = make(model.named_parameters())
    scheduler = schedule(optimizer, STEPS) if schedule else None
    deal, losses = Sampler(EXAMPLES, BATCH, seed=SEED), []
    for step in range(STEPS):
        inputs, targets = default_collate([held[i] for i in deal.index(step).tolist()])
        with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses, slots(model, optimizer)


def slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    kept = {f"model/{k}": v for k, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        kept |= {f"optimizer/{name}/{k}": v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
    return kept


def ours(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    workload = Workload(
        model=convolutional, data=data, optimizer=make, loss=F.cross_entropy, batch_size=BATCH, steps=STEPS, seed=SEED,
        **options,
    )  # fmt: skip
    step = SingleDevice().build(workload, World())
    losses = [step(batch)["loss"].item() for batch in batches(step)]
    return losses, dict(step.state_dict().tensors())


def assert_same_bits(found: Iterable[Any], expected: Iterable[Any]) -> None:
    (losses, tensors), (right_losses, right_tensors) = found, expected
    assert losses == right_losses
    assert tensors.keys() == right_tensors.keys()
    assert all(torch.equal(t, tensors[name]) for name, t in right_tensors.items())
    assert max(losses) - min(losses) > 0.1, "it learns something"


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({}, {}),
        ({"schedule": steps_down}, {"schedule": steps_down}),
        ({"clip": 0.3}, {"clip_grad_norm": 0.3}),
        ({"schedule": steps_down, "clip": 0.3}, {"schedule": steps_down, "clip_grad_norm": 0.3}),
        ({"cast": torch.bfloat16}, {"precision": "bfloat16"}),
    ],
    ids=["momentum", "schedule", "clipping", "both", "bfloat16"],
)
def test_the_bits_of_a_plain_loop(theirs: Options, mine: Options) -> None:
    assert_same_bits(ours(sgd, **mine), plain_loop(sgd, **theirs))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_bits_of_a_plain_loop_under_every_optimizer(make: Any) -> None:
    chosen = lambda parameters: make(parameters, lr=0.01)  # noqa: E731
    assert_same_bits(ours(chosen), plain_loop(chosen))


def test_the_weights_on_average_are_refused_on_two_processes() -> None:
    with pytest.raises(ValueError, match="one process, not in 2"):
        SingleDevice().build(
            Workload(model=convolutional, data=data, optimizer=sgd, loss=F.cross_entropy, batch_size=4), World(size=2)
        )


def stochastic(p: float) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(p), nn.Linear(16, 3))


def test_a_step_can_be_repeated_with_the_same_draws() -> None:
    workload = Workload(
        model=stochastic(0.5), data=data, optimizer=sgd, loss=F.cross_entropy, batch_size=BATCH, steps=4, seed=1
    )
    step = SingleDevice().build(workload, World())
    start = step.state_dict()
    first = [step(batch)["loss"].item() for batch in batches(step)]
    step.load_state_dict(start)
    torch.rand(7)  # whatever was drawn in between
    assert [step(batch)["loss"].item() for batch in batches(step)] == first
    assert len(set(first)) == 4


def test_nothing_changes_before_update() -> None:
    workload = Workload(model=convolutional, data=data, optimizer=sgd, loss=F.cross_entropy, batch_size=BATCH, steps=4)
    step = SingleDevice().build(workload, World())
    step(step.source.at(0))
    before = dict(step.state_dict().tensors())
    step.backward(step.source.at(1))
    committed = step.committed()
    assert committed is not None
    for name, tensor in committed.tensors():
        assert torch.equal(tensor, before[name]), name
    step.update()
    after = dict(step.state_dict().tensors())
    assert not torch.equal(after["model/1.running_mean"], before["model/1.running_mean"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schedule": lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o)}, "ReduceLROnPlateau needs a metric"),
        ({"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")}, "must be one number"),
        (
            {"optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)},
            "not a parameter of the model",
        ),
        ({"optimizer": lambda p: {"a": sgd(p[:1]), "b": sgd(p[1:])}}, "2 optimizers need update="),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_cure(change: Options, told: str) -> None:
    fields: Options = {
        "model": convolutional, "data": data, "optimizer": sgd, "loss": F.cross_entropy, "batch_size": BATCH, **change
    }  # fmt: skip
    with pytest.raises(ValueError, match=told):
        first_step(Workload(**fields))


def first_step(workload: Workload) -> None:
    step = SingleDevice().build(workload, World())
    step(step.source.at(0))


def test_what_a_forward_pass_after_the_last_update_has_made_of_the_buffers_can_be_undone() -> None:
    step: Any = SingleDevice().build(networks.cases["batch_norm_2d"](8), World())
    first, second = (step.source.at(n, step.data_shard) for n in range(2))
    step(first)
    kept = {name: b.clone() for name, b in step.model.named_buffers()}
    step.backward(second)
    assert any(not torch.equal(b, kept[name]) for name, b in step.model.named_buffers())
    step.replica.roll_back()
    assert all(torch.equal(b, kept[name]) for name, b in step.model.named_buffers())


# fused


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=networks.EPS),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=networks.EPS),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_updates_are_the_same_updates(name: str) -> None:
    with by_value(networks), by_value(sys.modules[__name__]):
        job = replace(networks.cases["mlp"](61), optimizer=OPTIMIZERS[name], clip_grad_norm=0.3)
        assert_equal(apportion.check(job, "single_device(fused=True)", steps=networks.STEPS))


def test_fused_says_which_kernel_computes_and_leaves_the_groups_as_they_were_written() -> None:
    job = networks.cases["mlp"](8)
    plain, fused = (strategy.build(job, World()) for strategy in (SingleDevice(), SingleDevice(fused=True)))
    for step in (plain, fused):
        optimizer = step.optimizers[""]
        chosen = list[Any]()
        optimizer.register_step_pre_hook(lambda o, *_: chosen.append(o.param_groups[0]["fused"]))  # noqa: B023
        step(step.source.at(0))
        assert chosen == [True if step is fused else None]
        assert optimizer.param_groups[0]["fused"] is None
    assert str(SingleDevice(fused=True)) == "single_device(fused=True)"
    assert fused.state_dict().settings == plain.state_dict().settings, "one resumes from the other's checkpoints"
