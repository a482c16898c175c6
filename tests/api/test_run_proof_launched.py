"""A run of ranks that others have started on several hosts is proved on these ranks, before its first step."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from commands import finish, places, start

pytestmark = pytest.mark.processes

WORK = """
import dataclasses
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import apportion

torch.set_num_threads(1)


def total(outputs, targets):
    # where a mean over the rows is expected
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def examples():
    x = torch.randn(61, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


workload = apportion.Workload(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
    data=examples,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    batch_size=16,
    steps=12,
)


def trained(name, given=workload, strategy=sys.argv[1], **options):
    found = {"losses": []}
    events = apportion.run(given, strategy, launcher=apportion.env(device="cpu"), run_dir=name, **options)
    for event in events:
        if event.kind == "step":
            found["losses"] += event.data["values"]["loss"]
        if event.kind == "start":
            found["proof"] = event.data["proof"]
    return found


told = {"proved": trained("proved"), "again": trained("again"), "plain": trained("plain", check=False)}
try:
    trained("wrong", dataclasses.replace(workload, loss=total))
except apportion.Disproved as error:
    told["disproved"] = str(error)
if sys.argv[1] == "data_parallel":
    told["compressed"] = trained("compressed", strategy="data_parallel(compress=fp16)")
with open(f"told-{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
"""


def told_by_ranks(folder: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each of three ranks on two hosts tells."""
    (folder / "work.py").write_text(textwrap.dedent(WORK))
    monkeypatch.chdir(folder)
    where = {"XDG_CACHE_HOME": str(folder / "cache")}
    finish([start([sys.executable, "work.py", strategy], **place, **where) for place in places(2, 1)])
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("strategy", ["data_parallel", pytest.param("fully_sharded", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_run_on_two_hosts_is_proved_on_its_ranks_and_trains_the_same_bits_as_without(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = told_by_ranks(tmp_path, strategy, monkeypatch)
    proof = told[0]["proved"]["proof"]
    assert proof["verdict"] == "equal", proof
    assert proof["sentence"].startswith(f"{strategy} on 3 workers of 2 hosts trains the same network as one device")
    assert not proof["remembered"]
    assert told[0]["again"]["proof"]["remembered"]
    assert told[0]["plain"]["proof"] is None
    assert len(told[0]["plain"]["losses"]) == 12
    assert told[0]["proved"]["losses"] == told[0]["again"]["losses"] == told[0]["plain"]["losses"]
    assert "of 2 hosts does not train the same network as one device" in told[0]["disproved"]
    assert told[0]["disproved"] == told[1]["disproved"] == told[2]["disproved"]
    assert not (tmp_path / "wrong").exists(), "nothing was trained"
    if strategy == "data_parallel":
        compressed = told[0]["compressed"]["proof"]
        assert compressed["verdict"] == "not proved"
        assert "what hosts send each other is compressed" in compressed["sentence"]
        assert compressed["sentence"].endswith("--workers 3"), "it can be shown on one host"
