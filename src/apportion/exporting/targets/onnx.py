"""The target ONNX, for ONNX Runtime and other programs that read the format, with any number of examples at once, and
inputs of any size in the dimensions in which the examples vary.

::

    nn.Module -- torch.export --> aten graph -- onnxscript, constants folded --> net.onnx (weights inside)

It wins wherever a model is to run without Python or torch, and on CPUs at small batches: one program instead of a
Python call a layer. It loses where the forward pass decides by the numbers in a tensor: torch.export follows one way
only, and refuses it.

``nn.RNN`` as the operator RNN of ONNX, for sequences of any length: torch.export would unroll its loop for the
length of the sample, as it does not with LSTM and GRU.

The sizes of inputs that an ONNX file takes: any in the dimensions in which the examples vary, and one in the others,
which is stated where the network takes more.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from apportion.core.torch_private import pytree
from apportion.errors import NotVerified
from apportion.exporting.blamed_layer import CHOOSE, ONE_WAY, blamed_layer, decides, first_cause, first_line, named
from apportion.exporting.examples import fixed_although_free
from apportion.exporting.onnxruntime_session import BF16, WEIGHTS, run_bits, runtime, session
from apportion.exporting.quantization.files import write_float16, write_int8
from apportion.exporting.target import (
    Compiled,
    Inputs,
    Reading,
    Target,
    TrainedNetwork,
    VaryingDimension,
    input_names,
    output_names,
    weights_digest,
)

_UNBOUNDED = 2
"""The least size at which torch.export traces a dimension: a lower bound up to it says nothing of the network."""


def free_dimensions(sample: Inputs, varying: Sequence[VaryingDimension]) -> Any:
    """Return the dimensions that are free, as torch.export takes them: that of the examples, and those that vary."""
    leaves, shape = pytree.tree_flatten(sample)
    free = [{0: torch.export.Dim.DYNAMIC} if isinstance(x, torch.Tensor) and x.ndim else None for x in leaves]
    for one in varying:
        dims = free[one.leaf]
        assert dims is not None
        dims[one.dim] = torch.export.Dim.DYNAMIC
    return pytree.tree_unflatten(free, shape)


def refusal(module: nn.Module, varying: Sequence[VaryingDimension], error: BaseException) -> str:
    """Return why a network cannot be exported for inputs of several sizes, and what to do instead."""
    cause = first_cause(error)
    lines = [line.strip(" -\t") for line in str(cause).splitlines()]
    why = next((line for line in lines if "static shape" in line or "specialized" in line), first_line(cause))
    return (
        f"{named(module, blamed_layer(module, error))} cannot be exported to ONNX for inputs that differ in "
        f"{', '.join(map(str, varying))}: it fixes the size ({why}); compute the layer by operations that do not loop "
        "or decide over that size in Python, or pad all examples to one size"
    )


def hold_bounds(module: nn.Module, program: Any, trained: TrainedNetwork) -> None:
    """Raise ValueError where the program that was exported is that of other sizes than the examples have, since the
    network decides by a size."""
    for one, (low, high) in _bounds(program, trained):
        outside = [size for size in one.sizes if size < low or (high is not None and size > high)]
        if outside:
            raise ValueError(
                f"{type(module).__name__} cannot be exported to ONNX for inputs that differ in {one}: it decides by "
                f"that size, so that a file would be right for {_range(low, high)} alone, and the examples have "
                f"{outside[0]}; compute the same for every size, or pad all examples to one size"
            )


def sizes_sentence(program: Any, trained: TrainedNetwork, described: Sequence[Mapping[str, Any]]) -> str:
    """Return what is to be known of the sizes that a file takes: which the network takes besides, and how to free
    them; empty where there is nothing. ``described``: the inputs of the file, with their names and shapes."""
    sentences = []
    for one, (low, high) in _bounds(program, trained):
        if low > _UNBOUNDED or high is not None:
            sentences.append(
                f"Dimension {one.dim} of {described[one.leaf]['name']} may be of {_range(low, high)}: the network "
                "computes something else beyond, or nothing."
            )
    fixed = fixed_although_free(trained.module, trained.sample, trained.varying)
    if fixed:
        found = ", ".join(f"{one.size} in dimension {one.dim} of {described[one.leaf]['name']}" for one in fixed)
        sentences.append(
            f"The file takes inputs of one size alone ({found}), as all examples have it, though the network computes "
            "others: to leave it free, give inputs of another size, apportion.export(..., check=[inputs]), or data "
            "that vary."
        )
    return " ".join(sentences)


def _bounds(program: Any, trained: TrainedNetwork) -> Iterator[tuple[VaryingDimension, tuple[int, int | None]]]:
    """The least and the largest size of each dimension that varies; None: the largest is not limited."""
    names = list(program.graph_signature.user_inputs)
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for one in trained.varying:
        value = values[names[one.leaf]]
        size = value.shape[one.dim]
        if isinstance(size, int):
            yield one, (size, size)
            continue
        limits = program.range_constraints.get(size.node.expr)
        if limits is None:
            continue
        high = int(limits.upper) if limits.upper.is_Integer and int(limits.upper) < 2**31 else None
        yield one, (int(limits.lower), high)


def _range(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return f"{low}" if low == high else f"{low} to {high}"


_ACTIVATIONS = {"tanh": "Tanh", "relu": "Relu"}


@contextmanager
def rnn_operators(network: nn.Module) -> Iterator[None]:
    """Hold each ``nn.RNN`` of a network as an operator of ONNX, which computes nothing by itself: for the time of an
    export."""
    found = [module for module in network.modules() if type(module) is nn.RNN]
    try:
        for module in found:
            forward: Callable[..., Any] = partial(_as_operators, module)
            object.__setattr__(module, "forward", forward)
        yield
    finally:
        for module in found:
            object.__delattr__(module, "forward")


def _as_operators(rnn: nn.RNN, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """input: (batch, time, inputs) or (time, batch, inputs), as ``batch_first`` says, or (time, inputs). hx: (layers *
    directions, batch, hidden), or without the batch, as the input is. Raises TypeError where the input is packed."""
    if not isinstance(input, Tensor):
        raise TypeError(
            f"it takes a {type(input).__name__}, whose lengths a file cannot hold, and not the padded tensor and a mask"
        )
    if input.ndim == 2:  # one sequence alone: the operator has a dimension for several
        several, start = input.unsqueeze(0 if rnn.batch_first else 1), None if hx is None else hx.unsqueeze(1)
        outputs, state = _as_operators(rnn, several, start)
        return outputs.squeeze(0 if rnn.batch_first else 1), state.squeeze(1)
    directions = 2 if rnn.bidirectional else 1
    found = input.transpose(0, 1) if rnn.batch_first else input
    last = []
    for layer in range(rnn.num_layers):
        start = None if hx is None else hx[layer * directions : (layer + 1) * directions]
        found, state = _layer(rnn, layer, directions, found, start)
        last.append(state)
    return (found.transpose(0, 1) if rnn.batch_first else found), torch.cat(last)


def _layer(rnn: nn.RNN, layer: int, directions: int, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    names = [f"l{layer}{suffix}" for suffix in ("", "_reverse")[:directions]]

    def stacked(kind: str) -> Tensor:
        return torch.stack([getattr(rnn, f"{kind}_{name}") for name in names])

    bias = torch.cat([stacked("bias_ih"), stacked("bias_hh")], 1) if rnn.bias else None
    time, batch = x.shape[:2]
    shapes = [(time, directions, batch, rnn.hidden_size), (directions, batch, rnn.hidden_size)]
    outputs, state = torch.onnx.ops.symbolic_multi_out(
        "RNN",
        (x, stacked("weight_ih"), stacked("weight_hh"), bias, None, start),
        attrs={
            "activations": [_ACTIVATIONS[rnn.nonlinearity]] * directions,
            "direction": "bidirectional" if directions == 2 else "forward",
            "hidden_size": rnn.hidden_size,
        },
        dtypes=(x.dtype, x.dtype),
        shapes=shapes,
    )
    return outputs.transpose(1, 2).flatten(2), state


MOST_BYTES = 2**31 - 2**20
"""The largest size in bytes of weights inside of the file: a protobuf message is smaller than 2 GiB."""


Precision = Literal["float32", "float16", "int8", "bfloat16"]


@final
@dataclass(frozen=True, repr=False)
class Onnx(Target):
    """The ONNX format. ``opset``: the version of ONNX's operators; None takes torch's own choice.

    ``precision``: "float32"; "float16" for weights of half the size, which are computed with in float32; "int8" for
    weights of a quarter of the size and for speed. ``most_lost``: the largest loss of accuracy on held-out examples
    that float16 and int8 may have: 0.003 is 0.3 points of a hundred. ``weight_bits``: 7 or 8 bits of an int8 weight;
    None: 8 where this processor has int8 dot products, and else 7, since sums would be cut off.
    """

    opset: int | None = None
    precision: Precision = "float32"
    most_lost: float = 0.003
    weight_bits: int | None = None

    suffix = ".onnx"
    takes_any_size = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision == "bfloat16":
            raise ValueError(
                "precision='bfloat16' is refused: ONNX Runtime has no arithmetic in bfloat16 on the CPU, and could not "
                "run the file; use 'float16' for a smaller file, or 'int8' for a smaller and faster one"
            )
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r} must be float32, float16 or int8")
        if not (isinstance(self.most_lost, int | float) and 0 <= self.most_lost <= 1):
            raise ValueError(f"most_lost={self.most_lost!r} must be the accuracy that may be lost, from 0 to 1")
        if self.weight_bits not in (None, 7, 8):
            raise ValueError(f"weight_bits={self.weight_bits!r} must be 7 or 8, or None")
        if self.precision != "float32":  # a run's float32 file stays beside it
            object.__setattr__(self, "suffix", f".{self.precision}.onnx")

    def write(self, trained: TrainedNetwork, path: Path) -> Compiled:
        """Write the file as ``Target.write`` says. Weights of more than 2 GiB lie in a file beside it."""
        module = trained.module
        weights = sum(t.nbytes for t in module.state_dict().values())
        if self.precision == "float32":
            program = self._program(trained)
            program.save(path, external_data=weights > MOST_BYTES)
            about = self._described(module, path)
            return Compiled(about=about, conclusion=sizes_sentence(program.exported_program, trained, about["inputs"]))
        self._check(module, weights)
        program = self._program(trained)
        model = program.model_proto
        try:
            if self.precision == "int8":
                compiled = write_int8(model, trained, path, weight_bits=self.weight_bits, most_lost=self.most_lost)
            else:
                compiled = write_float16(model, trained, path, most_lost=self.most_lost)
        except ValueError as error:
            raise ValueError(f"{type(module).__name__} cannot be exported to {self}: {error}") from error
        about = self._described(module, path)
        sizes = sizes_sentence(program.exported_program, trained, about["inputs"])
        return replace(compiled, about={**about, **compiled.about}, conclusion=f"{compiled.conclusion} {sizes}".strip())

    def _program(self, trained: TrainedNetwork) -> Any:
        """The network as ONNX, with any number of examples, and any size in the dimensions that vary. Raises ValueError
        with the layer's name."""
        module, sample = trained.module, trained.sample
        args, kwargs, names = _called(module, sample)
        with torch.no_grad():
            outputs = module(*args, **kwargs)

        def exported(shapes: Any) -> Any:
            with _quiet(), rnn_operators(module) if trained.varying else contextlib.nullcontext():
                return torch.onnx.export(
                    module,
                    args,
                    kwargs=kwargs,
                    dynamo=True,
                    opset_version=self.opset,
                    input_names=names,
                    output_names=output_names(outputs),
                    dynamic_shapes=shapes if isinstance(sample, dict | tuple) else (shapes,),
                )

        try:
            program = exported(free_dimensions(sample, trained.varying))
        except torch.onnx.errors.OnnxExporterError as error:
            where = named(module, blamed_layer(module, error))
            if decides(error):
                why = f"{ONE_WAY}, and a file has one way; {CHOOSE}"
            elif trained.varying and _has_one_size(exported, sample):
                raise ValueError(refusal(module, trained.varying, error)) from error
            else:
                why = f"{first_line(first_cause(error))}; write it in other operations of torch"
            raise ValueError(f"{where} cannot be exported to ONNX: {why}") from error
        assert program is not None
        hold_bounds(module, program.exported_program, trained)
        program.model.metadata_props[WEIGHTS] = weights_digest(module)
        return program

    def _described(self, module: nn.Module, path: Path) -> dict[str, Any]:
        try:
            found = described(path)
        except ImportError:
            raise
        except Exception as error:  # onnxruntime's own have no base but this
            why = f"{type(module).__name__} as ONNX cannot be run by ONNX Runtime on the CPU: {first_line(error)}"
            if torch.bfloat16 in {t.dtype for t in module.state_dict().values()}:
                why += "; it computes in bfloat16: export model.float()"
            raise ValueError(why) from error
        if self.opset not in (None, found["opset"]):  # torch takes another one without an error
            raise ValueError(
                f"opset={self.opset} is none that torch writes, which has made {found['opset']} of it: leave opset out"
            )
        return found

    def _check(self, module: nn.Module, weights: int) -> None:
        """Raise ValueError where the weights are too many for a file of another precision, or not of float32."""
        if weights > MOST_BYTES:
            raise ValueError(
                f"{type(module).__name__} has {weights:,} bytes of weights, and precision={self.precision!r} is for "
                f"up to {MOST_BYTES:,}: use precision='float32'"
            )
        other = [n for n, t in module.state_dict().items() if t.is_floating_point() and t.dtype != torch.float32]
        if other:
            raise ValueError(
                f"{other[0]} is {module.state_dict()[other[0]].dtype}, and precision={self.precision!r} is for "
                "networks of float32: export model.float()"
            )

    def read(self, path: Path, batches: Sequence[Inputs]) -> Sequence[Reading]:
        """Run the file with ONNX Runtime, as ``Target.read`` says."""
        made = session(path, threads=torch.get_num_threads())
        narrow = [value.type == BF16 for value in made.get_outputs()]

        def outputs() -> Iterator[Sequence[Any]]:
            for inputs in batches:
                given = fed(made, inputs)
                try:
                    found = run_bits(made, given)
                except Exception as error:  # onnxruntime's own have no base but this
                    shapes = ", ".join(str(x.shape) for x in given.values())
                    raise NotVerified(
                        f"{path.name} cannot be run by ONNX Runtime for inputs of shape {shapes}, which the network "
                        f"computes ({first_line(error)}); nothing was written"
                    ) from error
                yield [_widened(x) if bits else x for x, bits in zip(found, narrow, strict=True)]

        return [Reading(reader=f"onnxruntime {runtime().__version__}", outputs=outputs())]


def _has_one_size(exported: Callable[[Any], Any], sample: Inputs) -> bool:
    """Can the network be exported where the number of examples alone varies?"""
    try:
        exported(free_dimensions(sample, ()))
    except torch.onnx.errors.OnnxExporterError:
        return False
    return True


def fed(session: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the inputs as ``run_bits`` takes them; where none of them is bfloat16, ``session.run`` takes them too."""
    leaves = [x.detach() for x in pytree.tree_leaves(inputs)]
    arrays = [(x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy() for x in leaves]
    return dict(zip([x.name for x in session.get_inputs()], arrays, strict=True))


def _widened(bits: Any) -> Any:
    """Convert the bits of bfloat16 to float32, exactly."""
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def described(path: Path) -> dict[str, Any]:
    """Return {"opset", "inputs": [{"name", "shape", "type"}], "outputs"}, where None in a shape is any number."""
    import onnx

    made = session(path, threads=torch.get_num_threads())
    return {
        "opset": max(o.version for o in onnx.load(path, load_external_data=False).opset_import if not o.domain),
        **{
            what: [
                {"name": x.name, "shape": [n if isinstance(n, int) else None for n in x.shape], "type": x.type}
                for x in values
            ]
            for what, values in (("inputs", made.get_inputs()), ("outputs", made.get_outputs()))
        },
    }


def _called(module: nn.Module, sample: Inputs) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """Return (the positional arguments, the keyword arguments, the names of the file's inputs)."""
    if isinstance(sample, dict):
        return (), dict(sample), input_names(sample)
    return sample if isinstance(sample, tuple) else (sample,), {}, input_names(sample)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which prints its steps and warns of its own internals."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
