"""Updates in one pass: the same numbers, and states from wherever they come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn

import apportion.parallel.optim.fused as fused_module
from apportion.parallel.optim.fused import with_fused_updates

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}
KERNELS = {"SGD": "_fused_sgd_", "Adam": "_fused_adam_", "AdamW": "_fused_adamw_", "Adagrad": "_fused_adagrad_"}


def fused(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    workload = networks.workload(lambda: nn.Linear(1, 1), list, 1, optimizer=OPTIMIZERS[name])
    made = with_fused_updates(workload).optimizer([("p", p) for p in parameters])  # type: ignore[list-item]
    assert isinstance(made, torch.optim.Optimizer)
    return made


def weights(device: str, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(3, 4), (5,), ()]
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype).to(device)) for s in shapes]


def update(optimizer: torch.optim.Optimizer, parameters: list[Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
    optimizer.step()


def resumed(name: str, device: str, dtype: torch.dtype, saved: str) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after two updates unfused, and two more from the state that these left, fused and not; ``saved``: of the
    number of updates in that state."""
    plain = weights(device, dtype)
    first = OPTIMIZERS[name](plain)
    for number in range(2):
        update(first, plain, number)
    state = copy.deepcopy(first.state_dict())
    for slots in state["state"].values():
        if "step" in slots:
            slots["step"] = slots["step"].to("cpu", getattr(torch, saved))
    own = [nn.Parameter(p.detach().clone()) for p in plain]
    second = fused(name, own)
    second.load_state_dict(state)
    for number in range(2, 4):
        update(first, plain, number)
        update(second, own, number)
        assert [group["fused"] for group in second.param_groups] == [None], "between steps as it was written"
    return own, plain


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
@pytest.mark.parametrize("saved", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_fused_from_a_state_that_was_made_unfused(name: str, saved: str, device: str) -> None:
    own, plain = resumed(name, device, torch.float64, saved)
    for a, b in zip(own, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("saved", ["float32", "float64"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_away_from_the_cpu_the_kernel_finds_the_number_of_updates_beside_the_weights_as_32_bits(
    name: str, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU would be handed: the same rules of where tensors are hold on torch's meta device."""
    handed: list[Tensor] = []
    monkeypatch.setattr(fused_module, "_has_kernel", lambda *_: True)

    def kernel(parameters: list[Tensor], *lists: Any, **_: Any) -> None:
        handed.extend(lists[2 if name == "Adagrad" else 4])

    monkeypatch.setattr(torch, KERNELS[name], kernel)
    parameters: list[Tensor] = [nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    optimizer, unfused = fused(name, parameters), OPTIMIZERS[name](parameters)
    if name != "Adagrad":
        update(unfused, parameters, 0)
    state = unfused.state_dict()
    for slots in state["state"].values():
        slots["step"] = torch.tensor(7.0, dtype=getattr(torch, saved))
    optimizer.load_state_dict(state)
    optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
    update(optimizer, parameters, 1)
    assert [(t.device.type, t.dtype) for t in handed] == [("meta", torch.float32)] * 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_torch_has_no_kernel_the_update_is_the_plain_one(name: str) -> None:
    """torch's meta device, for which no fused kernel is accepted, as Adagrad's is not on the GPUs of some versions."""
    parameters: list[Tensor] = [nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    for number in range(2):
        update(fused(name, parameters), parameters, number)
