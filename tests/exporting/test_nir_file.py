"""NIR files in the dialects of their readers: what a file says is what the graph computes, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import nir
import numpy as np
import pytest
import torch
from conftest import data_folder
from spiking_graphs import (
    COUNTS,
    GRAPHS,
    HALF,
    SUBTRACT_AT_THE_THRESHOLD,
    conv,
    dense,
    examples,
    graph,
    made,
    neurons,
    readout,
    source,
    traced,
)

from apportion.exporting.spiking.dialects.adaptation import depth_first, led_depth_first, too_early
from apportion.exporting.spiking.dialects.dialect import dialect
from apportion.exporting.spiking.graph import Convolution, Dense, Neurons, SpikingGraph
from apportion.exporting.spiking.nir_file import read, write
from apportion.exporting.spiking.simulator import simulate

NAMES = ("nir", "sinabs", "spikingjelly", "norse")


def counts(spiking: SpikingGraph, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the counts of all layers, flat, in an order that does not depend on that of the nodes."""
    found = simulate(spiking.to(torch.float64), inputs).counts
    return sorted((x.flatten(1) for x in found.values()), key=lambda x: (x.shape[1], *x.sum(0).tolist()))


def without_metadata(path: Path) -> Path:
    """Write the file again as a program would that says nothing of a dialect."""
    whole = nir.read(path)
    whole.metadata = {}
    bare = path.with_name(f"bare_{path.name}")
    nir.write(bare, whole)
    return bare


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_counts_the_spikes_that_were_computed_by_hand(name: str, tmp_path: Path) -> None:
    spiking = write(dialect(name).speaks(traced()), tmp_path / "net.nir", name)
    found = simulate(spiking.to(torch.float64), HALF)
    assert tuple(int(found.counts[layer]) for layer in ("first", "second")) == COUNTS[name]
    assert float(found.outputs) == pytest.approx(COUNTS[name][1] / spiking.timesteps, abs=1e-15)


def test_the_simulator_subtracts_at_the_threshold_as_computed_by_hand() -> None:
    found = simulate(traced(), HALF).counts
    assert tuple(int(found[layer]) for layer in ("first", "second")) == SUBTRACT_AT_THE_THRESHOLD


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", GRAPHS)
def test_a_file_computes_what_its_graph_computes(case: str, name: str, tmp_path: Path) -> None:
    spiking = dialect(name).speaks(made(case))
    again = write(spiking, tmp_path / "net.nir", name)
    inputs = examples(spiking)
    own, theirs = simulate(spiking, inputs), simulate(again.to(torch.float64), inputs)
    assert own.outputs.shape == theirs.outputs.shape
    assert (own.outputs - theirs.outputs).abs().max() < 1e-6 * own.outputs.abs().max()
    assert all(map(torch.equal, counts(spiking, inputs), counts(again, inputs)))
    assert all(x.any() for x in counts(spiking, inputs)), "every layer fires"
    assert again.timesteps == spiking.timesteps


def test_a_file_opens_in_nir_1_0_4_too_which_knows_no_v_reset(tmp_path: Path) -> None:
    write(dialect("sinabs").speaks(made("convolutional")), tmp_path / "net.nir", "sinabs")
    with h5py.File(tmp_path / "net.nir") as file:
        fields = [set(node) for node in file["node/nodes"].values() if node["type"][()] == b"IF"]
    assert fields == [{"r", "v_threshold", "type"}] * 3
    with h5py.File(tmp_path / "net.nir") as file:
        assert all(node["weight"].dtype == np.float32 for node in file["node/nodes"].values() if "weight" in node)


@pytest.mark.parametrize("written", NAMES)
@pytest.mark.parametrize("asked", NAMES)
def test_a_file_in_a_wrong_dialect_is_refused_by_what_it_says(written: str, asked: str, tmp_path: Path) -> None:
    path = tmp_path / "net.nir"
    write(dialect(written).speaks(made("fully_connected")), path, written)
    if asked == written:
        read(path, asked)
        return
    with pytest.raises(
        ValueError, match=f"net.nir is written in the dialect {written}, in which a neuron fires .*; in "
    ):
        read(path, asked)


NOT_READ = {
    *(("convolutional", written, "spikingjelly") for written in NAMES if written != "spikingjelly"),
    *((case, written, "norse") for case in ("convolutional", "residual") for written in NAMES if written != "norse"),
    *(("residual", written, "sinabs") for written in ("nir", "spikingjelly")),
}
"""(case, dialect of the file, dialect asked for) where the program would compute something else than the file says."""


@pytest.mark.parametrize("written", NAMES)
@pytest.mark.parametrize("asked", NAMES)
@pytest.mark.parametrize("case", ["fully_connected", "convolutional", "residual"])
def test_a_file_that_says_no_dialect_differs_by_outputs_and_spikes(
    case: str, written: str, asked: str, tmp_path: Path
) -> None:
    spiking = dialect(written).speaks(made(case))
    write(spiking, tmp_path / "net.nir", written)
    bare = without_metadata(tmp_path / "net.nir")
    inputs = examples(spiking)
    if (case, written, asked) in NOT_READ:
        with pytest.raises(
            ValueError, match=f"{asked} (computes .* before|flattens the examples|reads one for a layer)"
        ):
            read(bare, asked, timesteps=spiking.timesteps)
        return
    found = read(bare, asked, timesteps=spiking.timesteps)
    own, theirs = simulate(spiking, inputs).outputs, simulate(found.to(torch.float64), inputs).outputs
    difference = float((own - theirs.reshape(own.shape)).abs().max() / own.abs().max())
    alike = all(map(torch.equal, counts(spiking, inputs), counts(found, inputs)))
    if dialect(asked).rule == dialect(written).rule:
        assert difference < 1e-6
        assert alike
    elif {asked, written} == {"spikingjelly", "norse"}:
        assert alike, "they differ at the threshold itself, which no number of this net hits"
    else:
        assert difference > 1e-2
        assert not alike


def test_spikingjelly_and_norse_differ_at_the_threshold(tmp_path: Path) -> None:
    write(dialect("norse").speaks(traced()), tmp_path / "net.nir", "norse")
    found = read(without_metadata(tmp_path / "net.nir"), "spikingjelly", timesteps=6)
    assert float(simulate(found.to(torch.float64), HALF).outputs) != COUNTS["norse"][1] / 6


# The order of a program that goes depth first


def test_a_walk_follows_the_first_edge_to_its_end() -> None:
    edges = [("n0", "c1"), ("c1", "n1"), ("n1", "c2"), ("c2", "n2"), ("n2", "out"), ("n0", "s"), ("s", "n2")]
    assert depth_first("n0", edges) == ["n0", "c1", "n1", "c2", "n2", "out", "s"]
    assert too_early("n0", edges) == ("s", "n2")
    assert too_early("n0", edges[:5]) is None


@pytest.mark.parametrize("seed", range(30))
def test_any_graph_is_led_in_order_and_computes_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    names = [f"d{number}" for number in range(10)]
    edges = ["input>d0"]
    for number in range(1, len(names)):
        before = torch.randperm(number)[: 1 + int(torch.randint(3, ()))].tolist()
        edges += [f"n{one}>{names[number]}" for one in before]
    layers = [node for number, name in enumerate(names) for node in (dense(name, 6, 6), neurons(f"n{number}", 6))]
    edges += [f"d{number}>n{number}" for number in range(len(names))]
    edges += [f"n{n}>last" for n in range(len(names)) if not any(e.startswith(f"n{n}>") for e in edges)]
    spiking = graph([source(6), *layers, dense("last", 2, 6), readout(2)], " ".join([*edges, "last>output"]))
    led = led_depth_first(spiking)
    assert too_early("input", led.edges) is None
    inputs = examples(spiking)
    own, theirs = simulate(spiking, inputs), simulate(led, inputs)
    torch.testing.assert_close(own.outputs, theirs.outputs, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(own.counts[name], theirs.counts[name]) for name in own.counts)


def test_a_file_whose_sum_is_computed_too_early_is_refused(tmp_path: Path) -> None:
    write(dialect("nir").speaks(made("residual")), tmp_path / "net.nir", "nir")
    bare = without_metadata(tmp_path / "net.nir")
    for name in ("sinabs", "norse"):
        with pytest.raises(ValueError, match=r"computes n\d before \w+, which flows into it|Flatten"):
            read(bare, name, timesteps=3)


# Refusals


def changed(spiking: SpikingGraph, name: str, **fields: Any) -> SpikingGraph:
    return spiking.with_nodes(replace(spiking.by_name[name], **fields))


def without_a_synapse() -> SpikingGraph:
    thresholds = torch.tensor([1.0, 2.0], dtype=torch.float64)
    nodes = [source(2), dense("a", 2, 2), neurons("n", 2), neurons("m", 2, threshold=thresholds), readout(2)]
    return graph(nodes, "input>a>n>m>output")


def branches_of_images_and_numbers() -> SpikingGraph:
    nodes = [
        source(2, 5, 5), conv("a", 2, (2, 5, 5), 3), neurons("n", 2, 3, 3), conv("p", 3, (2, 3, 3), 3),
        conv("q", 4, (2, 3, 3), 3), neurons("m", 4, 1, 1), conv("r", 3, (4, 1, 1), 1), neurons("both", 3, 1, 1),
        readout(3, 1, 1),
    ]  # fmt: skip
    return graph(nodes, "input>a>n>p>both n>q>m>r>both>output")


WRONG: dict[str, tuple[Callable[[], SpikingGraph], str, str]] = {
    "signed": (
        lambda: changed(made("fully_connected"), "n1", reset="signed"), "nir", r"n1 \(Neurons\) takes spikes back",
    ),
    "rule": (
        lambda: made("fully_connected"), "norse", r"n1 \(Neurons\) resets by 'subtract' at .*convert the network for",
    ),
    "first step": (
        lambda: replace(dialect("nir").speaks(made("fully_connected")), current="first_step"), "nir",
        "constant current",
    ),
    "kernel": (
        lambda: changed(
            dialect("nir").speaks(made("convolutional")), "lambda", weight=torch.ones(6, 4, 6, 4).double(),
            padding=(2, 1),
        ), "nir", r"lambda \(Convolution\) has a kernel of \(6, 4\)",
    ),
    "thresholds": (
        lambda: dialect("spikingjelly").speaks(without_a_synapse()), "spikingjelly",
        r"m \(Neurons\) has a threshold for",
    ),
    "flatten": (
        lambda: dialect("norse").speaks(graph(
            [*made("convolutional").nodes[:6], neurons("flat", 96), dense("fc", 3, 96), readout(3)],
            "input>features.0>graph>lambda>2.relu>flatten>flat>fc>output",
        )), "norse", r"flatten \(Flatten\): norse flattens the examples too",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_a_dialect_cannot_say_is_refused_by_the_layers_name(case: str, tmp_path: Path) -> None:
    make, name, why = WRONG[case]
    with pytest.raises(ValueError, match=why):
        write(make(), tmp_path / "net.nir", name)
    assert list(tmp_path.iterdir()) == []


def test_branches_of_different_sizes_are_led_through_too(tmp_path: Path) -> None:
    spiking = dialect("sinabs").speaks(branches_of_images_and_numbers())
    again = write(spiking, tmp_path / "net.nir", "sinabs")
    inputs = examples(spiking)
    assert all(map(torch.equal, counts(spiking, inputs), counts(again, inputs)))


@pytest.mark.parametrize(("name", "why"), [("snntorch", "leaky neuron of beta=0.9"), ("lava", "is unknown")])
def test_a_dialect_that_there_is_not_is_refused_with_those_that_there_are(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"dialect='{name}' .*{why}.*nir.*sinabs.*spikingjelly.*norse"):
        write(traced(), tmp_path / "net.nir", name)
    assert list(tmp_path.iterdir()) == []


def one_number(value: float) -> Any:
    return np.full((1,), value, dtype=np.float32)


def foreign(path: Path, node: Any, *, edges: list[tuple[str, str]] | None = None) -> Path:
    """Write a file with this one node, which another program might have written."""
    nodes = {
        "input": nir.Input({"input": np.array([1])}),
        "node": node,
        "output": nir.Output({"output": np.array([1])}),
    }
    nir.write(path, nir.NIRGraph(nodes, edges or [("input", "node"), ("node", "output")], type_check=False))
    return path


FOREIGN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "LIF": (
        lambda: nir.LIF(*(one_number(x) for x in (2, 1, 0, 1))), "nir",
        r"node \(LIF\) is not a node of a spiking graph",
    ),
    "Linear": (
        lambda: nir.Linear(np.ones((1, 1), np.float32)), "sinabs",
        r"node \(Linear\): sinabs leaves it out without a word",
    ),
    "AvgPool2d": (
        lambda: nir.AvgPool2d(*(np.array([2, 2]),) * 2, np.array([0, 0])), "norse", r"node \(AvgPool2d\): norse leaves",
    ),
    "r": (lambda: nir.IF(one_number(2), one_number(1)), "nir", r"node \(IF\) has a resistance r other than 1"),
    "v_reset": (
        lambda: nir.IF(one_number(1), one_number(1), one_number(0.5)), "nir", r"node \(IF\) has a v_reset other than 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_node_that_would_be_computed_wrong_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, name, why = FOREIGN[case]
    with pytest.raises(ValueError, match=why):
        read(foreign(tmp_path / "net.nir", make()), name, timesteps=3)


def test_a_cycle_is_refused_and_a_file_of_something_else(tmp_path: Path) -> None:
    node = nir.Affine(np.ones((1, 1), np.float32), one_number(0))
    edges = [("input", "node"), ("node", "node"), ("node", "output")]
    with pytest.raises(ValueError, match="has a cycle through node"):
        read(foreign(tmp_path / "net.nir", node, edges=edges), "nir", timesteps=3)
    with pytest.raises(ValueError, match=r"net\.nir does not say for how many steps it is run: give timesteps"):
        read(foreign(tmp_path / "net.nir", node), "nir")
    (tmp_path / "no.nir").write_text("no HDF5")
    with pytest.raises(ValueError, match=r"no\.nir cannot be read as a NIR file"):
        read(tmp_path / "no.nir", "nir")


def test_pools_and_layers_without_bias_are_read(tmp_path: Path) -> None:
    nodes = {
        "input": nir.Input({"input": np.array([2, 4, 4])}),
        "sum": nir.SumPool2d(np.array([2, 2]), np.array([2, 2]), np.array([0, 0])),
        "mean": nir.AvgPool2d(np.array([2, 2]), np.array([2, 2]), np.array([0, 0])),
        "flatten": nir.Flatten({"input": np.array([2, 1, 1])}, 0, -1),
        "linear": nir.Linear(np.array([[1, 10]], dtype=np.float32)),
        "output": nir.Output({"output": np.array([1])}),
    }
    names = list(nodes)
    nir.write(tmp_path / "net.nir", nir.NIRGraph(nodes, list(pairwise(names))))
    spiking = read(tmp_path / "net.nir", "nir", timesteps=1)
    assert [type(node) for node in spiking.nodes[1:3]] == [Convolution, Convolution]
    assert isinstance(spiking.by_name["linear"], Dense)
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    means = x.sum((2, 3)) / 4
    assert float(simulate(spiking, x).outputs) == pytest.approx(float(means[0, 0] + 10 * means[0, 1]))


@pytest.mark.data("models/nir_paper")
def test_the_files_of_the_paper_are_read_or_refused_by_the_nodes_name() -> None:
    folder = data_folder() / "models" / "nir_paper"
    for name in ("nir", "sinabs", "spikingjelly"):
        spiking = read(folder / "cnn_sinabs.nir", name, timesteps=10)
        assert [type(node).__name__ for node in spiking.nodes[1:4]] == ["Convolution", "Neurons", "Convolution"]
        assert {node.reset for node in spiking.neurons} == {dialect(name).reset}
        assert isinstance(spiking.nodes[-2], Neurons)
        found = simulate(spiking, torch.rand(3, 2, 34, 34, generator=torch.Generator().manual_seed(0)))
        assert found.outputs.shape == (3, 10)
        assert all(x.any() for x in found.counts.values())
    with pytest.raises(ValueError, match=r"8 \(Flatten\): norse flattens the examples too"):
        read(folder / "cnn_sinabs.nir", "norse", timesteps=10)
    for file, why in (("lif_norse", r"1 \(LIF\)"), ("braille_noDelay_bias_zero", r"lif1\.lif \(CubaLIF\)")):
        with pytest.raises(ValueError, match=f"{why} is not a node of a spiking graph"):
            read(folder / f"{file}.nir", "nir", timesteps=10)
