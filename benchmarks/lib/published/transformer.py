"""A transformer's profile by its dimensions: what it computes, reads and writes, without the model and a machine.

One layer of the profile is one operation, as Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", 2019, run it: attention's scores are written to memory, the loss is computed in
float32, and nothing is computed twice. ``ways`` says how they slice it: by ``units`` (heads, hidden units, vocabulary),
or by ``inputs``, where the ranks' terms have to be summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from apportion.cost_model.profile import LayerProfile, Profile

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A language model like GPT-2: pre-normalised blocks, an MLP four times as wide, output weights tied to the
    embedding's."""

    hidden: int
    heads: int
    blocks: int
    length: int
    """The length in tokens of a sequence, which is one example."""
    vocabulary: int
    number_bytes: int = 2
    """The bytes of a weight and of an activation: 2 is float16 or bfloat16."""

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "blocks", "length", "vocabulary", "number_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def profile(self, batch_size: int) -> Profile:
        """The profile of a step on so many sequences, updated by Adam. In 16 bits its slots are three numbers of 32:
        the exact weight and two moments."""
        layers = tuple(_Layers(self, batch_size).all())
        return Profile(
            name=f"transformer of {self.blocks} x {self.hidden}",
            batch_size=batch_size,
            layers=layers,
            device="worked out",
            slots=3 * FLOAT32_BYTES // self.number_bytes if self.number_bytes < FLOAT32_BYTES else 2,
        )

    def stages(self, stages: int) -> tuple[int, ...]:
        """The layers of the profile that the stages of a pipeline begin with: as many blocks for each as can be, those
        left over to the first; the embedding goes with the first block, the output layer with the last."""
        if not 1 <= stages <= self.blocks:
            raise ValueError(f"stages={stages} of {self.blocks} blocks: use stages<={self.blocks}")
        each, over = divmod(self.blocks, stages)
        begins = [each * s + min(s, over) for s in range(stages)]
        return tuple(1 + LAYERS_OF_A_BLOCK * b if b else 0 for b in begins)


LAYERS_OF_A_BLOCK = 13


class _Layers:
    """The layers of a transformer, each made from the one before it."""

    def __init__(self, transformer: Transformer, batch_size: int) -> None:
        self.of = transformer
        self.tokens = batch_size * transformer.length
        self.before = ""

    def all(self) -> Iterator[LayerProfile]:
        """The layers of the whole transformer, in order."""
        t, tokens = self.of, self.tokens
        state = tokens * t.hidden * t.number_bytes
        weights = (t.vocabulary + t.length) * t.hidden * t.number_bytes
        yield self.layer("embedding", "Embedding", state, way="units", weights=weights)
        for i in range(t.blocks):
            yield from self.block(f"block{i}", state)
        logits = tokens * t.vocabulary
        yield self.layer("norm", "LayerNorm", state, weights=2 * t.hidden * t.number_bytes)
        flops = 2.0 * logits * t.hidden
        yield self.layer("output", "Linear", logits * t.number_bytes, way="units", flops=flops)
        for name in ("float", "subtract", "exp", "divide"):  # the cross-entropy, logits cut by vocabulary
            yield self.layer(f"loss.{name}", name, logits * FLOAT32_BYTES, way="units")

    def block(self, name: str, state: int) -> Iterator[LayerProfile]:
        """The layers of a block, attention and MLP; ``state``: the bytes that go from block to block."""
        t = self.of
        scores = self.tokens * t.heads * t.length * t.number_bytes
        of_scores = 2.0 * self.tokens * t.length * t.hidden
        yield self.layer(f"{name}.norm1", "LayerNorm", state, weights=2 * t.hidden * t.number_bytes)
        yield self.linear(f"{name}.qkv", 1, 3, "units")
        yield self.layer(f"{name}.scores", "matmul", scores, way="units", flops=of_scores)
        yield self.layer(f"{name}.softmax", "softmax", scores, way="units")
        yield self.layer(f"{name}.drop", "dropout", scores, way="units")
        yield self.layer(f"{name}.context", "matmul", state, way="units", flops=of_scores)
        yield self.linear(f"{name}.out", 1, 1, "inputs")
        yield self.layer(f"{name}.add1", "add", state)
        yield self.layer(f"{name}.norm2", "LayerNorm", state, weights=2 * t.hidden * t.number_bytes)
        yield self.linear(f"{name}.up", 1, 4, "units")
        yield self.layer(f"{name}.gelu", "GELU", 4 * state, way="units")
        yield self.linear(f"{name}.down", 4, 1, "inputs")
        yield self.layer(f"{name}.add2", "add", state)

    def linear(self, name: str, inputs: int, outputs: int, way: str) -> LayerProfile:
        """A Linear layer from ``inputs`` to ``outputs`` times the hidden size."""
        h, number = self.of.hidden, self.of.number_bytes
        return self.layer(
            name,
            "Linear",
            self.tokens * outputs * h * number,
            way=way,
            weights=(inputs * outputs * h * h + outputs * h) * number,
            flops=2.0 * self.tokens * inputs * outputs * h * h,
        )

    def layer(
        self, name: str, kind: str, nbytes: int, *, way: str = "", weights: int = 0, flops: float = 0.0
    ) -> LayerProfile:
        inputs = (self.before,) if self.before else ()
        self.before = name
        return LayerProfile(
            name=name,
            kind=kind,
            inputs=inputs,
            parameter_bytes=weights,
            activation_bytes=nbytes,
            kept_bytes=nbytes,
            flops=flops,
            ways=(way,) if way else (),
        )
