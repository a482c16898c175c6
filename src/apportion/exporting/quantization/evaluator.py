"""What a quantized file computes by the definitions of its operators, and not by the kernels of ONNX Runtime.

The onnx package's own evaluator computes the graph. In its place torch computes convolutions, pools and integer
products, which numpy is slow at, and LSTMs of ONNX Runtime's own domain are computed as their documentation says. No
sum is cut off here: where a processor does that, the outputs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.core.torch_private import pytree
from apportion.exporting.blamed_layer import first_line, frames
from apportion.exporting.target import Inputs

AT_ONCE = 25
"""The number of examples that are computed at once, where each is by itself: what they hold stays in the caches."""


def evaluator(
    model: Any, *, at_once: int | None = AT_ONCE, layers: Mapping[str, str] | None = None
) -> Callable[[Inputs], list[Any]]:
    """Return the function that computes the outputs of a model (an ``onnx.ModelProto``) for inputs, as arrays.
    ``at_once``: None where the examples of a batch have a range in common. ``layers``: the layer of each node, by the
    node's name. Raises ValueError, with the layer's name, here or in that function, where the definition of an operator
    is not computed here."""
    from onnx.reference import ReferenceEvaluator

    with _refused(layers or {}):
        made: Any = ReferenceEvaluator(model, new_ops=_operators())
    names = [value.name for value in model.graph.input]
    if not all(_has_rows(value) for value in model.graph.output):
        at_once = None

    def evaluated(inputs: Inputs) -> list[Any]:
        leaves = [x.detach().numpy() for x in pytree.tree_leaves(inputs)]
        count = len(leaves[0])
        step = at_once or count
        with _refused(layers or {}):
            parts = [
                made.run(None, {name: x[at : at + step] for name, x in zip(names, leaves, strict=True)})
                for at in range(0, count, step)
            ]
        return [np.concatenate(one) if len(one) > 1 else one[0] for one in zip(*parts, strict=True)]

    return evaluated


def _has_rows(output: Any) -> bool:
    """Has an output as many rows as there are examples, which its first dimension then names?"""
    dims = output.type.tensor_type.shape.dim
    return bool(dims) and bool(dims[0].dim_param)


@contextmanager
def _refused(layers: Mapping[str, str]) -> Iterator[None]:
    """Raise ValueError, with the names of operator and layer, for whatever the evaluator raises: it has no base."""
    try:
        yield
    except Exception as error:
        node = next((frame["node"] for frame in frames(error) if "node" in frame), None)
        node = getattr(node, "onnx_node", node)
        name = getattr(node, "name", "")
        layer = layers.get(name) or layers.get(name.removesuffix("_quant")) or name
        raise ValueError(
            f"layer {layer} ({getattr(node, 'op_type', 'unknown')}) is not computed by the evaluator that an int8 file "
            f"is compared with ({first_line(error)}): use precision='float16', or write it in other operations of torch"
        ) from error


def _operators() -> list[Any]:
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_conv import Conv
    from onnx.reference.ops.op_conv_transpose import ConvTranspose
    from onnx.reference.ops.op_max_pool import MaxPool
    from onnx.reference.ops.op_rnn import RNN_14 as RNN

    def derived(name: str, run: Any, base: Any = OpRun, domain: str = "") -> Any:
        slow = {} if base is OpRun else {"slow": base._run}
        return type(name, (base,), {"op_domain": domain, "_run": run, **slow})

    return [
        derived("Conv", _convolution, Conv),
        derived("ConvTranspose", _transposed_convolution, ConvTranspose),
        derived("MaxPool", _max_pool, MaxPool),
        derived("QuantizeLinear", _quantize),
        derived("DequantizeLinear", _dequantize),
        derived("MatMulInteger", _integer_product),
        derived("DynamicQuantizeLSTM", _dynamic_lstm, domain="com.microsoft"),
        type("RNN", (RNN,), {"op_domain": "", "usual": RNN.choose_act, "choose_act": _activation}),
    ]


def _activation(self: Any, name: str, alpha: Any, beta: Any) -> Any:
    """The activation of this name: the rectifier, which the onnx package's own RNN lacks, or one of its own."""
    return _rectified if name.lower() == "relu" else self.usual(name, alpha, beta)


def _rectified(x: Any) -> Any:
    return np.maximum(x, 0)


def _convolution(self: Any, x: Any, w: Any, b: Any = None, **given: Any) -> tuple[Any]:
    spatial = x.ndim - 2
    pads, strides = given.get("pads") or [0] * 2 * spatial, given.get("strides") or [1] * spatial
    if given.get("auto_pad") not in (None, "NOTSET") or not 1 <= spatial <= 3:
        found: tuple[Any] = self.slow(x, w, b, **given)
        return found
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[spatial - 1]
    bias = None if b is None else _tensor(b)
    dilations = given.get("dilations") or [1] * spatial
    padded = torch.nn.functional.pad(_tensor(x), _torch_pads(pads))
    return (convolve(padded, _tensor(w), bias, strides, 0, dilations, given.get("group") or 1).numpy(),)


def _transposed_convolution(self: Any, x: Any, w: Any, b: Any = None, **given: Any) -> tuple[Any]:
    """Also of groups, which the onnx package's own does not compute as ONNX defines them."""
    spatial = x.ndim - 2
    if given.get("auto_pad") not in (None, "NOTSET") or given.get("output_shape") or not 1 <= spatial <= 3:
        found: tuple[Any] = self.slow(x, w, b, **given)
        return found
    convolve: Any = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[spatial - 1]
    pads, strides = given.get("pads") or [0] * 2 * spatial, given.get("strides") or [1] * spatial
    more, dilations = given.get("output_padding") or [0] * spatial, given.get("dilations") or [1] * spatial
    bias = None if b is None else _tensor(b)
    # torch pads both ends alike: what is cut off at each end is cut off here, and what is added stays at the last one
    whole = convolve(_tensor(x), _tensor(w), bias, strides, 0, more, given.get("group") or 1, dilations)
    for at in range(spatial):
        whole = whole.narrow(2 + at, pads[at], whole.shape[2 + at] - pads[at] - pads[spatial + at])
    return (whole.contiguous().numpy(),)


def _max_pool(self: Any, x: Any, **given: Any) -> tuple[Any, ...]:
    spatial = x.ndim - 2
    usual = given.get("auto_pad") in (None, "NOTSET") and not given.get("ceil_mode") and not given.get("storage_order")
    if not usual or not 1 <= spatial <= 3 or len(self.onnx_node.output) > 1 or x.dtype != np.float32:
        found: tuple[Any, ...] = self.slow(x, **given)
        return found
    pool: Any = getattr(torch.nn.functional, f"max_pool{spatial}d")
    pads = given.get("pads") or [0] * 2 * spatial
    padded = torch.nn.functional.pad(_tensor(x), _torch_pads(pads), value=-torch.inf)
    strides, dilations = given.get("strides") or [1] * spatial, given.get("dilations") or [1] * spatial
    return (pool(padded, given["kernel_shape"], strides, 0, dilations).numpy(),)


def _torch_pads(pads: Sequence[int]) -> list[int]:
    """ONNX's pads (all begins, then all ends) in torch's order: the last dimension first, begin and end."""
    half = len(pads) // 2
    return [pads[at] for axis in reversed(range(half)) for at in (axis, axis + half)]


def _quantize(self: Any, x: Any, scale: Any, zero: Any = None, *, axis: int = 1, **_: Any) -> tuple[Any]:
    zero = np.zeros(1, np.uint8) if zero is None else zero
    least, most = np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max
    steps = _tensor(x) / _along(scale, x.ndim, axis)
    # torch rounds halves to even, as the definition of QuantizeLinear demands; the zero point is added after the
    # rounding.
    steps = steps.round_().add_(_along(zero, x.ndim, axis).float()).clamp_(least, most)
    return (steps.to(torch.from_numpy(np.zeros(0, zero.dtype)).dtype).numpy(),)


def _dequantize(self: Any, x: Any, scale: Any, zero: Any = None, *, axis: int = 1, **_: Any) -> tuple[Any]:
    steps = _tensor(x).float()
    if zero is not None and np.any(zero):
        steps = steps - _along(zero, x.ndim, axis).float()
    return (np.asarray((steps * _along(scale, x.ndim, axis)).numpy()),)


def _tensor(array: Any) -> Tensor:
    """An array as a tensor: a copy where the array is read-only, or runs backwards, as one that was reversed does."""
    held = np.asarray(array)
    return torch.from_numpy(held if held.flags.writeable and min(held.strides, default=0) >= 0 else held.copy())


def _along(values: Any, dimensions: int, axis: int) -> Tensor:
    """The values of a whole tensor, or of each index along the axis, in a shape that is multiplied with it."""
    held = _tensor(np.atleast_1d(values))
    if held.numel() == 1:
        return held.reshape([1] * dimensions) if dimensions else held.reshape([])
    return held.reshape([-1 if at == axis % dimensions else 1 for at in range(dimensions)])


def _integer_product(self: Any, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> tuple[Any]:
    # In float64, where matrix products are fast: products of 8 bits over fewer than 2**37 terms stay exact.
    left, right = (_tensor(x).double() for x in (a, b))  # whole numbers, exact below 2 ** 53
    if a_zero is not None:
        left = left - _tensor(np.atleast_1d(a_zero)).double().reshape(-1, 1)
    if b_zero is not None:
        right = right - _tensor(np.atleast_1d(b_zero)).double()
    return ((left @ right).to(torch.int32).numpy(),)


def _dynamic_lstm(self: Any, x: Any, w: Any, r: Any, *rest: Any, **given: Any) -> tuple[Any, ...]:
    """com.microsoft.DynamicQuantizeLSTM. x (time, batch, inputs); w and r (directions, inputs or hidden, 4 * hidden),
    gates in ONNX's order: input, output, forget, cell."""
    names = ("b", "lengths", "h", "c", "p", "w_scale", "w_zero", "r_scale", "r_zero")
    held: Mapping[str, Any] = dict(zip(names, [*rest, *[None] * len(names)], strict=False))
    activations = [str(name).lower() for name in given.get("activations") or ["sigmoid", "tanh", "tanh"]]
    if held["lengths"] is not None or held["p"] is not None or set(activations) - {"sigmoid", "tanh"}:
        raise NotImplementedError("LSTMs with lengths, peepholes or other activations than sigmoid and tanh")
    directions, batch, hidden = len(w), x.shape[1], r.shape[1]
    none = np.zeros((directions, batch, hidden), np.float32)
    h, c = (none if held[name] is None else held[name] for name in ("h", "c"))
    outputs, last_h, last_c = [], [], []
    for at in range(directions):
        backwards = given.get("direction") == "reverse" or at == 1
        bias = np.zeros(8 * hidden, np.float32) if held["b"] is None else held["b"][at]
        times = _tensor(x[::-1].copy() if backwards else x)
        ahead = _dynamic_product(times.flatten(0, 1), w[at], held["w_scale"][at], held["w_zero"][at])
        ahead = (ahead + _tensor(bias[: 4 * hidden] + bias[4 * hidden :])).unflatten(0, (len(x), batch))
        state, cell, steps = _tensor(h[at]), _tensor(c[at]), []
        for time in range(len(x)):
            gates = ahead[time] + _dynamic_product(state, r[at], held["r_scale"][at], held["r_zero"][at])
            # ONNX orders the gates i, o, f, c, and torch i, f, g, o.
            entered, shown, kept, new = gates.chunk(4, dim=1)
            cell = kept.sigmoid() * cell + entered.sigmoid() * new.tanh()
            state = shown.sigmoid() * cell.tanh()
            steps.append(state)
        outputs.append(torch.stack(steps[::-1] if backwards else steps).numpy())
        last_h.append(state.numpy())
        last_c.append(cell.numpy())
    return (np.stack(outputs, axis=1), np.stack(last_h), np.stack(last_c))[: len(self.onnx_node.output)]


def _dynamic_product(rows: Tensor, weight: Any, scale: Any, zero: Any) -> Tensor:
    """Rows, quantized to 8 bits by their own range, times quantized weights."""
    least, most = min(0.0, float(rows.min())), max(0.0, float(rows.max()))
    # The range includes 0 on both sides, so that 0 is exactly representable; in float32, as the operator is defined,
    # since a step in float64 would round some numbers to other integers.
    step = np.float32((most - least) / 255) or np.float32(1)
    offset = round(-least / float(step))
    steps = ((rows / float(step)).round() + offset).clamp(0, 255).double() - offset
    whole = _tensor(weight).double() - _tensor(np.atleast_1d(zero)).double()
    return (steps @ whole).float() * float(step) * _tensor(np.atleast_1d(scale))
