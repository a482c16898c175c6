"""What a script asks of a GPU is answered on the CPU, where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from apportion.script_check.recording.plan import PassPlan

SCRIPT = """
import sys, torch
import torch.distributed as dist
from apportion.script_check.recording.functions import Functions
from apportion.script_check.recording import no_gpu
from apportion.script_check.recording.plan import load_plan
from apportion.script_check.recording.recorder import Recorder

recorder = Recorder(load_plan(sys.argv[1]), 0)
no_gpu.install(recorder)
torch.save({"w": torch.ones(2)}, sys.argv[2])
with Functions(recorder):
    for location in ("cuda:0", torch.device("cuda"), lambda storage, place: storage.cuda(0)):
        assert torch.load(sys.argv[2], map_location=location)["w"].device.type == "cpu"
    assert torch.ones(2).to(torch.device(1)).device.type == "cpu"
    assert torch.cuda.FloatTensor([1.0]).type(torch.cuda.LongTensor).type("torch.cuda.IntTensor").dtype == torch.int32
    with torch.accelerator.device_index(1):
        assert torch.accelerator.memory_allocated() == 0
    torch.set_default_device("cuda")
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    assert torch.cuda.device_count() == 4
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    part, whole = torch.zeros(2), torch.full((2,), 4.0)
    dist.get_world_size = lambda group=None: 2
    dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
    assert (part.tolist(), whole.tolist()) == ([2.0, 2.0], [4.0, 4.0])
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    assert whole.tolist() == [2.0, 2.0]
"""


@pytest.mark.processes
def test_the_cpu_answers_for_gpus(tmp_path: Path) -> None:
    plan = PassPlan("train.py", (), False, str(tmp_path), str(tmp_path), 1, 1, 0, float64=False, no_gpu=True, gpus=4)
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "plan.json"), str(tmp_path / "weights.pt")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
