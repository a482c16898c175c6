"""The target StableHLO, for TPUs by way of JAX: the forward pass, and a training step with its gradient.

::

    nn.Module -- torch.export --> aten graph -- torchax --> jax -- jax.export --> net.stablehlo: forward, step
                                                                                  and the weights, for jax alone

It wins where a network that was trained here is to be served or trained further on TPUs: the file needs jax and neither
torch nor the network's code. It loses where the forward pass decides by the numbers in a tensor, which is refused. What
is lowered for a TPU is run by jax on the CPU, and equal to torch there; no TPU has run it, and the report says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from apportion.core.torch_private import pytree
from apportion.exporting.target import Compiled, Examples, Inputs, Reading, Table, Target, TrainedNetwork, called
from apportion.exporting.tpu import cost, lowering, training_check
from apportion.exporting.tpu.archive import FORWARD, STEP, Archive
from apportion.exporting.tpu.jax_packages import jax_package, versions
from apportion.exporting.tpu.lowering import for_training, traced_loss, traced_network
from apportion.exporting.tpu.training_check import LEARNING_RATE

PLATFORMS = ("tpu", "cpu", "cuda", "rocm")
PRECISIONS = ("highest", "high", "default")
LIMIT = 1e-5
"""The largest relative difference of the outputs by jax from those by torch, both in float32 on the CPU."""


@final
@dataclass(frozen=True, repr=False)
class Stablehlo(Target):
    """Programs in StableHLO, in a file that jax and numpy read.

    ``platforms``: what they are lowered for, and always for the CPU too. ``precision``: "highest" multiplies in
    float32, "default" lets a TPU do so in bfloat16 and is several times as fast there. ``training``: the training step
    too, where the task has a loss and examples for calibration. ``topology``: "v5e:2x2" compiles the programs for one
    chip of such TPUs by libtpu, which needs none, and reports what they cost; it takes minutes.
    """

    platforms: tuple[str, ...] = ("tpu",)
    precision: str = "highest"
    training: bool = True
    topology: str | None = None

    suffix = ".stablehlo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.platforms or not all(one in PLATFORMS for one in self.platforms):
            raise ValueError(f"platforms={self.platforms!r} must be some of {', '.join(PLATFORMS)}: ('tpu',)")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if self.topology is not None and not re.fullmatch(r"v\d+\w*:\d+(x\d+){1,2}", self.topology):
            raise ValueError(f"topology={self.topology!r} must be written as libtpu does, 'v5e:2x2'")

    def write(self, trained: TrainedNetwork, path: Path) -> Compiled:
        """Write the file as ``Target.write`` says. Raises NotVerified where the training step differs from torch's."""
        versions()  # raises ModuleNotFoundError first of all
        if self.topology is not None:
            cost.ask_for_libtpu()
        weights = lowering.weights_of(trained.module)
        forward, dynamic = self._forward(trained)
        examples, why = self._examples(trained)
        programs, network = {FORWARD: forward}, None
        dropped: list[str] = []
        step_batch: int | None = None
        if examples is not None:
            network, dropped = for_training(trained.module)
            programs[STEP], dynamic_step = self._step(trained, network, examples, weights, dynamic=dynamic)
            step_batch = None if dynamic_step else len(pytree.tree_leaves(examples.inputs)[0])
        training = {"training": why or "SGD", "training_batch": step_batch, "dropout_left_out": dropped}
        about = self._about(trained, forward, dynamic, training)
        Archive(programs, weights, about).write(path)
        archive = Archive.read(path)  # what is checked is what is in the file
        rows = len(pytree.tree_leaves(trained.sample if examples is None else examples.inputs)[0])
        compiled = cost.on_cpu(archive, rows)
        difference = None
        if examples is not None:
            assert network is not None
            assert trained.loss is not None
            difference = training_check.checked(archive, compiled[STEP].call, network, trained.loss, examples)
        costs, sentence = self._costs(compiled, path, rows)
        return Compiled(
            about=about,
            limit=LIMIT,
            tables=(self._programs(archive, difference, why), costs),
            conclusion=self._conclusion(archive, sentence),
        )

    def read(self, path: Path, batches: Sequence[Inputs]) -> Sequence[Reading]:
        """Run the file by jax on the CPU, as ``Target.read`` says."""
        archive = Archive.read(path)
        run = lowering.run_on_cpu(archive.programs[FORWARD])
        names, rows = [each["name"] for each in archive.about["inputs"]], archive.about["batch"]

        def outputs() -> Iterator[Sequence[Any]]:
            for inputs in batches:
                given = _fed(inputs, names)
                if rows is None:
                    found = run(archive.weights, *given)
                    yield list(found) if isinstance(found, tuple | list) else [found]
                else:
                    yield _in_pieces(run, archive.weights, given, rows)

        return [Reading(reader=f"jax {jax_package().__version__} on the CPU", outputs=outputs())]

    def _lowering(self) -> lowering.Lowering:
        return lowering.Lowering(platforms=tuple(dict.fromkeys((*self.platforms, "cpu"))), precision=self.precision)

    def _forward(self, trained: TrainedNetwork) -> tuple[Any, bool]:
        """Return the program of the forward pass, and whether it takes any number of examples: where that cannot be
        lowered, it takes as many as the sample has."""
        try:
            return self._forward_of(trained, dynamic=True), True
        except Exception:  # what is wrong, if it is not the number, is said next
            return self._forward_of(trained, dynamic=False), False

    def _forward_of(self, trained: TrainedNetwork, *, dynamic: bool) -> Any:
        function = lowering.jax_function(traced_network(trained.module, trained.sample, dynamic=dynamic))
        leaves = lowering.leaves_of(trained.sample, "inputs")
        weights = lowering.weights_of(trained.module)
        return self._lowering().lowered(lowering.forward_of(function), weights, *leaves, dynamic=dynamic)

    def _examples(self, trained: TrainedNetwork) -> tuple[Examples | None, str]:
        """Return the examples of the training step, as many as the sample has, or None and why there is no such
        step."""
        if not self.training:
            return None, "not asked for"
        if trained.loss is None or trained.calibration is None:
            return None, "it has no loss, or no examples for calibration"
        if not lowering.trained_names(trained.module):
            return None, "no parameter is trained"
        given = trained.calibration
        counts = [len(pytree.tree_leaves(tree)[0]) for tree in (trained.sample, given.inputs)]
        inputs, targets = pytree.tree_map(lambda x: x[: min(counts)], (given.inputs, given.targets))
        return Examples(inputs, targets), ""

    def _step(
        self,
        trained: TrainedNetwork,
        network: nn.Module,
        examples: Examples,
        weights: Mapping[str, Any],
        *,
        dynamic: bool,
    ) -> tuple[Any, bool]:
        """Return the program of the training step, and whether it takes any number of examples."""
        if dynamic:
            try:
                return self._step_of(trained, network, examples, weights, dynamic=True), True
            except Exception:  # what is wrong, if it is not the number, is said next
                pass
        return self._step_of(trained, network, examples, weights, dynamic=False), False

    def _step_of(
        self,
        trained: TrainedNetwork,
        network: nn.Module,
        examples: Examples,
        weights: Mapping[str, Any],
        *,
        dynamic: bool,
    ) -> Any:
        assert trained.loss is not None
        traced = traced_loss(network, trained.loss, examples.inputs, examples.targets, dynamic=dynamic)
        step = lowering.step_of(lowering.jax_function(traced), lowering.trained_names(network))
        batch = [
            *lowering.leaves_of(examples.inputs, "inputs"),
            *lowering.leaves_of(examples.targets, "targets"),
        ]
        return self._lowering().lowered(step, weights, np.float32(LEARNING_RATE), *batch, dynamic=dynamic)

    def _about(self, trained: TrainedNetwork, forward: Any, dynamic: bool, more: Mapping[str, Any]) -> dict[str, Any]:
        inputs = _named(trained.sample, "input")
        with torch.no_grad():
            outputs = _named(called(trained.module, trained.sample), "output")
        return {
            "platforms": list(forward.platforms),
            "run_on": ["cpu"],
            "precision": self.precision,
            "batch": None if dynamic else len(inputs[0][1]),
            "inputs": [_described(name, x, dynamic) for name, x in inputs],
            "outputs": [_described(name, x, dynamic) for name, x in outputs],
            "calling_convention": forward.calling_convention_version,
            **versions(),
            **more,
        }

    def _programs(self, archive: Archive, difference: training_check.StepDifference | None, why: str) -> Table:
        lowered = ", ".join(archive.programs[FORWARD].platforms)
        rows: list[tuple[Any, ...]] = [(FORWARD, "outputs", lowered, "cpu", "as verified")]
        note = ""
        if difference is not None:
            for what in ("loss", "gradients", "weights"):
                rows.append((STEP, what, lowered, "cpu", f"{getattr(difference, what):.1e}"))
            note = (
                f" Each of the step's {difference.tensors} tensors is held by itself too: the worst, "
                f"{difference.where}, differs by {difference.worst:.1e} of its largest number. Of "
                f"{difference.rounded} torch's own rounding, by itself in float64, is above {LIMIT / 10:g}: they are "
                f"held to ten times that, and differ by {difference.roundings:.1f} times at most."
            )
        else:
            rows.append((STEP, f"left out: {why}", "", "", ""))
        return Table(
            title="What was lowered, and what was run",
            columns=("program", "computes", "lowered for", "run on", "difference from torch"),
            rows=tuple(rows),
            note=f"The difference is the largest, relative to the largest number of what is computed: {LIMIT:g} at "
            f"most, or ten times torch's own rounding where that is more.{note} Nothing was run on a TPU.",
        )

    def _costs(self, on_cpu: Mapping[str, cost.CompiledProgram], path: Path, rows: int) -> tuple[Table, str]:
        """Return the table of what the programs cost, and a sentence on how they were compiled for TPUs."""
        found = [("XLA, CPU", name, each.cost) for name, each in on_cpu.items()]
        sentence = "It was not compiled for a TPU: name a topology, such as topology='v5e:2x2'."
        if self.topology is not None:
            chip = self.topology.partition(":")[0]
            compiled, why = cost.on_tpu(path, self.topology, rows)
            found += [(f"libtpu, one {chip}", name, each) for name, each in compiled.items()]
            sentence = f"libtpu has compiled {', '.join(compiled) or 'nothing'} for one {chip} chip without having one"
            sentence += f", and not the rest: {why}." if why else "."
        return Table(
            title=f"What a run of {rows} examples costs, by the compiler's own analyses",
            columns=(
                *("compiled by", "program", "GFLOP", "MB moved", "MB in", "MB out", "MB between", "MB of code"),
                *("ms predicted", "s to compile"),
            ),
            rows=tuple((where, name, *_figures(each)) for where, name, each in found),
            note="The predicted time is the compiler's guess, and nothing was timed. MB between: what the program "
            "needs besides its arguments and outputs.",
        ), sentence

    def _conclusion(self, archive: Archive, sentence: str) -> str:
        names, on = ", ".join(archive.programs), ", ".join(self.platforms)
        of = "a product in float32" if self.precision == "highest" else "products in less than float32"
        return (
            f"Lowered for {on}: {names}. They were run by jax on the CPU, and not on a TPU, where precision="
            f"{self.precision!r} means {of}. {sentence}"
        )


def _fed(inputs: Inputs, names: Sequence[str]) -> list[Any]:
    """Return the arrays in the order of the file's inputs; those of a dict go by name."""
    leaves = lowering.leaves_of(inputs, "inputs")
    if not isinstance(inputs, dict):
        return leaves
    by_name = dict(zip((name for name, _ in _named(inputs, "input")), leaves, strict=True))
    return [by_name[name] for name in names]


def _in_pieces(run: Any, weights: Mapping[str, Any], given: Sequence[Any], rows: int) -> list[Any]:
    """Run a program that takes a fixed number of examples on another number of them: the last piece is filled up."""
    count, pieces = len(given[0]), []
    for at in range(0, count, rows):
        places = np.minimum(np.arange(at, at + rows), count - 1)
        found = run(weights, *(x[places] for x in given))
        outputs = found if isinstance(found, tuple | list) else (found,)
        pieces.append([x[: min(rows, count - at)] for x in outputs])
    return [np.concatenate(each) for each in zip(*pieces, strict=True)]


def _named(tree: Any, what: str) -> list[tuple[str, Any]]:
    """Return the tensors with their names: the keys of a dict, else numbers."""
    leaves = pytree.tree_leaves_with_path(tree)
    if isinstance(tree, dict):
        return [(".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), x) for path, x in leaves]
    return [(what if len(leaves) == 1 else f"{what}_{n}", x) for n, (_, x) in enumerate(leaves)]


def _described(name: str, x: Any, dynamic: bool) -> dict[str, Any]:
    kind = str(lowering.array_of(x).dtype)
    return {"name": name, "shape": [None if dynamic else len(x), *x.shape[1:]], "type": kind}


def _figures(each: cost.ProgramCost) -> tuple[Any, ...]:
    sizes = (each.bytes_moved, each.argument_bytes, each.output_bytes, each.temporary_bytes, each.code_bytes)
    predicted = "" if each.predicted_s is None else round(each.predicted_s * 1e3, 3)
    return (round(each.flops / 1e9, 6), *(round(size / 1e6, 6) for size in sizes), predicted, round(each.compile_s, 1))
