"""Max pools, attention, recurrent layers and what depends on numbers, through every target: compiled right, or refused
by the layer's name with the cure, and no file left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hard_nets
import pytest
from hard_nets import NETS, exported
from stablehlo_cases import TPU

TARGETS = {
    "int8": "onnx(precision='int8')",
    "spiking": "spiking(timesteps=4)",
    "verilog": "verilog(bits=4, verify='simulated', place=False, most_lost=None)",
}
TOKENS = r"Last takes .*torch\.int64.*(embed|embedding)"
NO_SPIKES = {
    **dict.fromkeys(
        ("max pool", "overlapping max pool"), r"layer 2 \(MaxPool2d\) cannot become spiking.*use an average pool"
    ),
    "global max pool": r"layer 2 \(AdaptiveMaxPool2d\) cannot become spiking.*use an average pool",
    "attention": r"layer attention \(MultiheadAttention\) .*use convolutions",
    "causal attention": r"layer given \(Linear\) .*more than one dimension; flatten its input first",
    "transformer": r"layer block \(TransformerEncoderLayer\) .*attention multiplies.*use convolutions",
    **dict.fromkeys(("LSTM", "LSTM of both directions", "GRU"), TOKENS),
    "LSTM cells": r"layer cell \(LSTMCell\) .*use convolutions or linear layers",
    "decides": r"layer odd \(Deciding\) has no fixed graph.*decides by the numbers.*decide nothing",
    "selects": r"layer odd \(Selecting\) .*build the net of",
    "counts": r"layer odd \(Counting\) has no fixed graph.*decides by the numbers.*decide nothing",
    "cuts": r"layer odd \(Cutting\) .*build the net of",
    "number of examples": r"Part has no fixed graph for any number of examples.*or the shapes of its inputs",
    "all examples together": r"layer odd \(Centred\) .*averages over other dimensions",
}
NO_CIRCUIT = {
    "overlapping max pool": r"layer 2 \(MaxPool2d\) .*ceil_mode; use neither",
    "global max pool": r"layer 2 \(AdaptiveMaxPool2d\) .*use a MaxPool2d",
    "attention": r"layer attention \(MultiheadAttention\) .*use convolutions or linear layers",
    "causal attention": r"layer given \(Linear\) .*flatten its input",
    "transformer": r"layer block\.self_attn \(MultiheadAttention\) .*use convolutions or linear layers",
    **dict.fromkeys(("LSTM", "LSTM of both directions", "GRU"), TOKENS),
    "LSTM cells": r"layer cell \(LSTMCell\) .*use convolutions over a window",
    "decides": r"layer odd \(Deciding\) .*decides by the numbers.*may not depend on the numbers",
    "selects": r"layer odd \(Selecting\) .*linear layers, .* have one",
    "counts": r"layer odd \(Counting\) .*decides by the numbers.*may not depend on the numbers",
    "cuts": r"layer odd \(Cutting\) .*linear layers, .* have one",
    "number of examples": r"layer odd \(Parity\) .*add two of the same shape",
    "all examples together": r"layer odd \(Centred\) .*use AdaptiveAvgPool2d",
}
NO_ONNX = {
    "causal attention": r"Causal cannot be exported to ONNX: only 4D .*; write it in other operations",
    "decides": r"layer odd \(Deciding\) cannot be exported to ONNX: it decides by the numbers.*torch\.where",
}
NO_TPU = {
    "global max pool": r"layer 2 \(AdaptiveMaxPool2d\) .*torchax has nothing for .*write it in other operations",
    **{
        name: rf"layer odd \({kind}\) cannot be lowered for TPUs: it decides by the numbers in a tensor.*torch\.where"
        for name, kind in {
            "decides": "Deciding", "selects": "Selecting", "counts": "Counting", "cuts": "Cutting",
        }.items()
    },
}  # fmt: skip
REFUSED = {"int8": NO_ONNX, "spiking": NO_SPIKES, "verilog": NO_CIRCUIT, "stablehlo": NO_TPU}
"""For each target the nets that it refuses, and what it says; it compiles the others."""


def assert_compiled_right_or_refused(name: str, target: str, told: dict[str, Any]) -> None:
    assert "failed" not in told, told.get("failed")
    said = REFUSED[target].get(name)
    if said is not None:
        assert "refused" in told, (name, told)
        assert re.search(said, told["refused"], re.DOTALL), (name, told["refused"])
        assert told["left"] == []
        return
    assert "refused" not in told, (name, told)
    for difference, limit, examples in told["verified"]:
        assert difference <= limit
        assert examples == 4 + 1 + 7
    assert told["left"] == ["net"]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        # what int8 compiles takes some seconds each
        pytest.param(name, target, marks=[pytest.mark.slow] if target == "int8" and name not in NO_ONNX else [])
        for name in NETS
        for target in TARGETS
    ],
)
@pytest.mark.cases(12)
def test_a_hard_net_is_compiled_right_or_refused_by_its_layer(name: str, target: str, tmp_path: Path) -> None:
    if target == "verilog":
        pytest.importorskip("alkaid")
    assert_compiled_right_or_refused(name, target, exported(name, TARGETS[target], tmp_path))


@pytest.mark.skipif(not (TPU / "jax").is_dir(), reason=f"needs jax in {TPU}: scripts/test slow installs it there")
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("cold_programs")
@pytest.mark.parametrize("names", [list(NETS)[:8], list(NETS)[8:]], ids=["first", "second"])
def test_hard_nets_are_lowered_right_for_tpus_or_refused_by_their_layers(names: list[str], tmp_path: Path) -> None:
    command = [sys.executable, hard_nets.__file__, str(tmp_path), "stablehlo", *names]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=490, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [one["net"] for one in told] == names
    for one in told:
        assert_compiled_right_or_refused(one["net"], "stablehlo", one)
