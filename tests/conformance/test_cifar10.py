"""The real CIFAR-10: two workers train the network of one device, and it learns."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import apportion

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'cifar10.py'}:workload"


def losses(strategy: str, workers: int, run_dir: Path, steps: int) -> list[float]:
    """Every step's."""
    launcher = apportion.local(workers=workers, threads=2 // workers)
    found: list[float] = []
    for event in apportion.run(EXAMPLE, strategy, launcher=launcher, run_dir=run_dir, steps=steps):
        if event.kind == "step":
            found += event.data["values"]["loss"]
    return found


@pytest.mark.slow
@pytest.mark.data("cifar-10-batches-py")
@pytest.mark.timeout(900)
def test_the_losses_of_two_workers_are_those_of_one_device(tmp_path: Path) -> None:
    one = losses("single_device", 1, tmp_path / "one", 100)
    two = losses("data_parallel", 2, tmp_path / "two", 100)
    assert len(one) == len(two) == 100
    differences = [abs(a - b) / abs(a) for a, b in zip(one, two, strict=True)]
    print(f"relative difference: median {statistics.median(differences):.2g}, worst {max(differences):.2g}")
    assert statistics.median(differences) <= 1e-4
    assert max(differences) <= 1e-3


@pytest.mark.slow
@pytest.mark.data("cifar-10-batches-py")
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("reports")
def test_two_workers_learn_it_in_five_epochs(tmp_path: Path) -> None:
    end = apportion.train(
        EXAMPLE, "data_parallel", launcher=apportion.local(workers=2, threads=1), run_dir=tmp_path / "run"
    )
    print(f"test accuracy {end.data['metrics']['accuracy']:.4f}")
    assert end.data["metrics"]["accuracy"] >= 0.64
    assert f"{end.data['metrics']['accuracy']:.4f}"[:5] in (tmp_path / "run" / "report.html").read_text()
