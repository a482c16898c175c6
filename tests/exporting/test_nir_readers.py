"""Our simulator beside the programs themselves: by outputs and by the spikes of every neuron, in float64."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import data_folder
from sklearn.datasets import load_digits
from spiking_graphs import COUNTS, GRAPHS, HALF, dense, examples, graph, made, neurons, readout, source, traced
from torch import Tensor, nn

from apportion.errors import NotVerified, ProgramMissing
from apportion.exporting.spiking.calibration.calibrate import percentiles
from apportion.exporting.spiking.conversion.assemble import assembled
from apportion.exporting.spiking.conversion.lowering import lowered
from apportion.exporting.spiking.dialects.dialect import dialect
from apportion.exporting.spiking.graph import SpikingGraph
from apportion.exporting.spiking.nir_file import write
from apportion.exporting.spiking.readers import reading
from apportion.exporting.spiking.readers.process import READERS, Run, run
from apportion.exporting.spiking.readers.reading import by_program
from apportion.exporting.spiking.simulator import simulate

FOLDER = Path(sys.prefix) / "readers"
EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGES = 200
LIMIT = 1e-4
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("cold_programs")]
installed = pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/test slow installs tests/readers.txt")


def held_to(reader: str, spiking: SpikingGraph, inputs: Tensor, path: Path) -> tuple[Tensor, int]:
    """Hold the simulator to the reader, for one file; return the reader's outputs and the number of all spikes."""
    written = write(dialect(reader).speaks(spiking), path, reader)
    theirs = run(reader, path, inputs, timesteps=written.timesteps, folders=[FOLDER], seconds=400)
    ours = [simulate(written.to(torch.float64), part) for part in inputs.split(50)]
    outputs = torch.cat([one.outputs for one in ours])
    difference = float((outputs - theirs.outputs.reshape(outputs.shape)).abs().max() / outputs.abs().max())
    assert difference < LIMIT
    assert set(theirs.counts) == set(ours[0].counts)
    spikes = 0
    for name, counts in theirs.counts.items():
        own = torch.cat([one.counts[name] for one in ours])
        assert torch.equal(own, counts.double()), f"{reader}, {name}"
        spikes += int(own.sum())
    return theirs.outputs.reshape(outputs.shape), spikes


@installed
@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_small_graphs_have_the_spikes_of_the_program_itself(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "net.nir"
    write(dialect(reader).speaks(traced()), path, reader)
    found = run(reader, path, HALF, timesteps=traced().timesteps, folders=[FOLDER])
    assert tuple(int(found.counts[name]) for name in ("first", "second")) == COUNTS[reader]
    for name in GRAPHS:
        _, spikes = held_to(reader, made(name), examples(made(name)), path)
        assert spikes > 500, name


def digits() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained network, its training images, and images and labels that are held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    training = len(images) - IMAGES
    for _ in range(15):
        for rows in torch.randperm(training).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
    return net.eval(), images[:training], images[training:], labels[training:]


def converted(net: nn.Module, calibration: Tensor, timesteps: int) -> SpikingGraph:
    rates = lowered(net, calibration[:2])
    return assembled(rates, percentiles(rates, calibration.double()), timesteps)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_network_of_digits_is_read_by_every_program(reader: str, tmp_path: Path) -> None:
    net, calibration, images, labels = digits()
    outputs, spikes = held_to(reader, converted(net, calibration, 16), images, tmp_path / "net.nir")
    assert spikes > 10_000
    if reader == "sinabs":  # the others reset to zero, and lose what is above the threshold
        assert float((outputs.argmax(1) == labels).double().mean()) > 0.9


def example(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        return importlib.import_module(name)


def cifar10() -> tuple[nn.Module, Tensor, Tensor]:
    module = example("resnet20_cifar10")
    (path,) = (data_folder() / "models" / "akamaster_resnet_cifar10").glob("resnet20-*.th")
    published = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    model = module.resnet20()
    model.load_state_dict({key.removeprefix("module."): tensor for key, tensor in published.items()})
    training, held_out = (images()[0] for images in (module.training_set, module.test_set))
    return model.eval(), module.normalised(training[:100]), module.normalised(held_out[:IMAGES])


@installed
@pytest.mark.slow
@pytest.mark.data("cifar-10-batches-py", "models/akamaster_resnet_cifar10")
@pytest.mark.parametrize("reader", READERS)
def test_resnet20_is_read_by_every_program(reader: str, tmp_path: Path) -> None:
    model, calibration, images = cifar10()
    _, spikes = held_to(reader, converted(model, calibration, 4), images, tmp_path / "net.nir")
    assert spikes > 1_000_000


# The process of a reader


@installed
@pytest.mark.slow
def test_the_program_itself_gives_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    spiking = dialect("spikingjelly").speaks(made("convolutional"))
    write(spiking, tmp_path / "net.nir", "spikingjelly")
    batches = list(examples(spiking, 9).split(4))
    (one,) = by_program(tmp_path / "net.nir", "spikingjelly", batches)
    assert (one.reader, one.simulated_by) == ("spikingjelly 2.0.0", None)
    found = [outputs for (outputs,) in one.outputs]
    assert [len(outputs) for outputs in found] == [4, 4], "it is slow, and runs the first two batches"
    for inputs, outputs in zip(batches, found, strict=False):
        own = simulate(spiking, inputs).outputs.numpy()
        assert abs(own - outputs).max() < 1e-6 * abs(own).max()


@installed
@pytest.mark.slow
def test_a_program_that_fails_or_is_late_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.nir").write_text("no HDF5")
    with pytest.raises(NotVerified, match=r"spikingjelly 2\.0\.0 cannot run no\.nir: .*file signature"):
        run("spikingjelly", tmp_path / "no.nir", HALF, timesteps=2, folders=[FOLDER])
    with pytest.raises(NotVerified, match=r"norse has not run no\.nir within 0\.1 s"):
        run("norse", tmp_path / "no.nir", HALF, timesteps=2, folders=[FOLDER], seconds=0.1)


def test_rounding_alone_refuses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A membrane that twelve steps of 1/12 raise to the threshold reaches it in float64, as programs compute, and not
    in float32, in which our simulator runs all examples."""
    nodes = [source(1), dense("a", 1, 1), neurons("n", 1), dense("b", 1, 1), readout(1)]
    whole = graph(nodes, "input>a>n>b>output", 12)
    layers = [replace(whole.by_name[name], bias=torch.zeros(1)) for name in ("a", "b")]
    weights = [torch.full((1, 1), weight, dtype=torch.float64) for weight in (1 / 12, 1.0)]
    made_of = (replace(layer, weight=weight) for layer, weight in zip(layers, weights, strict=True))
    spiking = dialect("spikingjelly").speaks(whole.with_nodes(*made_of).to(torch.float64))
    written = write(spiking, tmp_path / "net.nir", "spikingjelly")
    x = torch.ones(3, 1)
    right = simulate(written.to(torch.float64), x)
    assert right.outputs.flatten().tolist() == pytest.approx([1 / 12] * 3)
    assert simulate(written, x).outputs.flatten().tolist() == [0.0] * 3

    def by_the_program(reader: str, path: Path, inputs: Tensor, *, timesteps: int) -> Run:
        return Run(reader=reader, outputs=right.outputs, counts=right.counts)

    monkeypatch.setattr(reading, "version", lambda name: "2.0.0")
    monkeypatch.setattr(reading, "run", by_the_program)
    (found,) = by_program(tmp_path / "net.nir", "spikingjelly", [x[:2], x[2:]])
    outputs = [outputs for (outputs,) in found.outputs]
    assert found.reference is not None
    assert [len(part) for part in outputs] == [2, 1]
    for inputs, part in zip((x[:2], x[2:]), outputs, strict=True):
        (must,) = found.reference(inputs)
        assert abs(must - part).max() < 1e-12


def test_a_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramMissing, match=r"sinabs is not installed, which was to run net\.nir"):
        run("sinabs", tmp_path / "net.nir", HALF, timesteps=2)


@pytest.mark.parametrize("name", ["nir", "sinabs", "spikingjelly", "norse"])
def test_a_program_that_is_not_installed_reads_nothing(name: str, tmp_path: Path) -> None:
    assert by_program(tmp_path / "net.nir", name, [HALF]) == []
