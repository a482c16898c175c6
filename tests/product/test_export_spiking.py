"""Exports to spiking networks: what the verdict counts, what is refused, and what was never run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apportion
from apportion.api.export import Data, Examples, verified
from apportion.errors import NotVerified

pytest.importorskip("nir", reason="not installed: apportion[spiking]")


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that has learned the first 1,100 digits by heart, and all digits."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:1100]), y[:1100]).backward()
        optimizer.step()
    return net.eval(), x, y


def exported(net: nn.Module, x: Tensor, held_out: Examples, y: Tensor, target: str, folder: Path) -> Any:
    data = Data(calibration=Examples(x[:512], y[:512]), held_out=held_out)
    return apportion.export(net, x[:2], folder / "net.nir", target=target, data=data)


def test_the_verdict_counts_inputs_and_membranes_and_no_chip_is_said_to_have_run_the_file(tmp_path: Path) -> None:
    net, x, y = trained()
    made = exported(net, x, Examples(x[1100:], y[1100:]), y, "spiking(timesteps=2)", tmp_path)
    energy = next(table for table in made.tables if table.title.startswith("Energy"))
    prices = {"Loihi": 23.6, "TrueNorth": 26, "ODIN": 12.7, "SpiNNaker2": 10, "SENECA": 2.8}
    neurons, macs, first = 64 + 32, 64 * 64 + 64 * 32 + 32 * 10, 64 * 64
    float32 = 4.6 * macs + 0.9 * neurons
    winners = set()
    for name, price in prices.items():
        row = next(row for row in energy.rows if row[0].startswith(name))
        certain = made.about["synaptic_operations"] * price + 4.6 * first
        least, most = certain + 0.1 * 2 * neurons, certain + price * 2 * neurons
        assert row[2:4] == (pytest.approx(1e-12 * least, rel=0.01), pytest.approx(1e-12 * most, rel=0.01))
        winners |= {name} if most < float32 else set()
    less = re.search(r"\): ([^:]*) would take less energy than float32", made.conclusion)
    assert {name for name in prices if less is not None and name in less[1]} == winners
    assert re.search(r"would take \S+ nJ to \S+ nJ", made.conclusion)
    chips = next(table for table in made.tables if table.title.startswith("Chips"))
    assert {row[-1] for row in chips.rows} == {"simulated"}
    assert len(chips.rows) >= 4


def test_steps_that_lose_more_on_examples_that_chose_nothing_leave_no_file(tmp_path: Path) -> None:
    net, x, y = trained()
    noisy = x[1100:] + torch.randn(len(x) - 1100, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        held_out = Examples(noisy, net(noisy).argmax(1))
    with pytest.raises(NotVerified, match=r"of the 697 examples that were held out.*most_lost=\d.*timesteps"):
        exported(net, x, held_out, y, "spiking(most_lost=0.01)", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_what_automatic_steps_lose_is_reported(tmp_path: Path) -> None:
    net, x, y = trained()
    made = exported(net, x, Examples(x[1100:], y[1100:]), y, "spiking(most_lost=0.05)", tmp_path)
    found = made.verification
    assert found.held_out == 697
    assert any(f"{found.before['accuracy']:.4f}" in line and "697" in line for line in verified(made))


class Named(nn.Module):
    def __init__(self, first: nn.Module, features: int) -> None:
        super().__init__()
        self.eye, self.brain = first, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.brain(self.eye(x).relu().flatten(1))
        return found


@pytest.mark.parametrize(
    ("net", "target", "message"),
    [
        (Named(nn.Conv2d(1, 4, (1, 3)), 192), "spiking(timesteps=4)", r"layer eye \(Conv2d\) has a kernel of \(1, 3\)"),
        (Named(nn.Conv2d(1, 4, (3, 1)), 192), "spiking(timesteps=4, dialect='sinabs')", r"layer eye \(Conv2d\)"),
    ],
)
def test_a_layer_is_refused_by_its_own_name(net: nn.Module, target: str, message: str, tmp_path: Path) -> None:
    x = torch.rand(80, 1, 8, 8)
    data = Data(calibration=Examples(x, torch.arange(80) % 3))
    with pytest.raises(ValueError, match=message):
        apportion.export(net.eval(), x[:2], tmp_path / "net.nir", target=target, data=data)


@pytest.mark.parametrize(
    "net", [nn.Sequential(nn.Flatten(), nn.ReLU()), nn.Sequential(nn.AvgPool2d(2), nn.ReLU(), nn.Flatten())]
)
def test_a_network_without_weights_has_a_verdict_too(net: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(80, 2, 4, 4)
    data = Data(calibration=Examples(x, None))
    made = apportion.export(net.eval(), x[:2], tmp_path / "net.nir", target="spiking(timesteps=4)", data=data)
    assert "and the net no multiplication; " in made.conclusion


@pytest.mark.parametrize("dialect", ["nir", pytest.param("sinabs", marks=pytest.mark.thorough)])
def test_a_network_whose_outputs_are_maps_is_exported(dialect: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1)).eval(), torch.randn(80, 2, 5, 4)
    data = Data(calibration=Examples(x, None))
    target = f"spiking(timesteps=64, dialect='{dialect}')"
    made = apportion.export(net, x[:2], tmp_path / "net.nir", target=target, data=data)
    assert made.verification.network_difference < 0.2
