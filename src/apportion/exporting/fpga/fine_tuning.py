"""Quantisation-aware fine-tuning and pruning, before the network is put in integers.

The forward pass rounds weights and activations as the circuit will; the backward pass takes rounding for the identity
(the straight-through estimator, Bengio et al., 2013). Pruning sets the weights of the least magnitude to 0 (L1 pruning,
Han et al., 2015), and fine-tuning leaves them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from apportion.core.torch_private import pytree
from apportion.exporting.fpga.fixed_point import FixedNet, IntegerFormat
from apportion.exporting.fpga.float_layers import FloatLayer, computed
from apportion.exporting.fpga.quantizer import quantized, weights
from apportion.exporting.target import TrainedNetwork

BATCH = 32
LEARNING_RATE = 1e-3
MOST_EXAMPLES = 20_000
"""The largest number of examples of an epoch."""


def pruned(layers: Sequence[FloatLayer], share: float) -> list[FloatLayer]:
    """Return the layers with this share of each layer's weights, those of the least magnitude, set to 0."""
    made = []
    for layer in layers:
        if layer.weight is not None and share > 0:
            magnitudes = layer.weight.abs().flatten()
            count = int(share * magnitudes.numel())
            least = magnitudes.kthvalue(count).values if count else -1.0
            layer = replace(layer, weight=torch.where(layer.weight.abs() <= least, 0.0, layer.weight))
        made.append(layer)
    return made


def fine_tuned(
    layers: Sequence[FloatLayer], calibration: Tensor, trained: TrainedNetwork, bits: int, epochs: int
) -> list[FloatLayer]:
    """Return the layers with weights that were trained as the integers of ``bits`` bits that they will become, on the
    training examples of the network and by its loss, both of which there must be.

    Weights that are 0 stay 0. The examples come in an order of a fixed seed; the random state of torch is not touched.
    """
    training, loss, collate = trained.training, trained.loss, trained.collate
    assert training is not None
    assert loss is not None
    net = quantized(layers, calibration, bits)
    masks = [None if layer.weight is None else layer.weight != 0 for layer in layers]
    made = [_trainable(layer) for layer in layers]
    parameters = [x for layer in made for x in (layer.weight, layer.bias) if x is not None]
    every = len(training)  # type: ignore[arg-type]  # a map-style data set has a length
    count = min(every, MOST_EXAMPLES)
    order = torch.Generator().manual_seed(0)
    batches = -(-count // BATCH)
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * batches)
    for _ in range(epochs):
        for rows in torch.randperm(every, generator=order)[:count].split(BATCH):
            inputs, targets = collate([training[int(n)] for n in rows])
            numbers = pytree.tree_leaves(inputs)[0].float()
            found = loss(_rounded_output(made, net, masks, numbers, bits), targets)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return [_settled(layer, mask) for layer, mask in zip(made, masks, strict=True)]


def _trainable(layer: FloatLayer) -> FloatLayer:
    tensors = [None if x is None else x.detach().float().clone().requires_grad_() for x in (layer.weight, layer.bias)]
    return replace(layer, weight=tensors[0], bias=tensors[1])


def _settled(layer: FloatLayer, mask: Tensor | None) -> FloatLayer:
    if layer.weight is None or mask is None:
        return layer
    bias = None if layer.bias is None else layer.bias.detach().double()
    return replace(layer, weight=(layer.weight * mask).detach().double(), bias=bias)


def _rounded_output(
    layers: Sequence[FloatLayer], net: FixedNet, masks: Sequence[Tensor | None], inputs: Tensor, bits: int
) -> Tensor:
    found: list[Tensor] = []
    for n, layer in enumerate(layers):
        fixed = net.layers[net.numbers[n]]
        if layer.kind == "input":
            found.append(_rounded(inputs, fixed.format))
            continue
        values = [found[m] for m in layer.inputs]
        mask = masks[n]
        if layer.weight is not None and mask is not None:
            before = net.layers[fixed.inputs[0]]
            if fixed.inputs[0] != net.numbers[layer.inputs[0]]:
                values = [_rounded(values[0], before.format)]
            layer = replace(layer, weight=_rounded_weight(layer.weight * mask, bits))
        value = computed(layer, values)
        found.append(_rounded(value, fixed.format) if fixed.kind == "requantise" else value)
    return found[-1]


def _rounded(numbers: Tensor, form: IntegerFormat) -> Tensor:
    """Return the numbers as the integers of a format mean them; the gradient passes where they are not limited."""
    scale = 2.0**form.exponent
    limited = numbers.clamp(form.low / scale, form.high / scale)
    with torch.no_grad():
        # Straight-through: the rounding error is a constant for autograd, so that the gradient is that of the clamp
        # alone, which is 0 where a number is limited.
        off = (form.of(numbers) / scale).to(numbers.dtype) - limited
    return limited + off


def _rounded_weight(weight: Tensor, bits: int) -> Tensor:
    with torch.no_grad():
        integers, exponents = weights(weight, bits)
        scale = torch.from_numpy(2.0**-exponents).reshape(-1, *[1] * (weight.ndim - 1))
        off = (torch.from_numpy(integers) * scale).to(weight.dtype) - weight
    return weight + off
