"""Healthy scripts of each stack get the answer "the same network", after all of their trained tensors were compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.script_check.driver import check_script
from apportion.script_check.script import Script

SCRIPTS = Path(__file__).parent / "stacks"
THOROUGH = [
    "accelerate_loaders.py",
    "accelerate_loaders.py --dispatch",
    "closures.py",
    "cuda_ddp.py",
    "cuda_mesh.py",
    "ddp_variants.py --kind static",
    "ddp_variants.py --kind view",
    "ddp_variants.py --kind unused",
    "ddp_variants.py --kind bf16",
    "ddp_variants.py --kind fp16",
    "fsdp1.py",
    "fsdp2_blocks.py",
    "fsdp2_meta.py",
    "loaders.py augment --workers 2",
    "loaders.py batchsampler",
    "loaders.py cycle",
    "loaders.py dataclass",
    "loaders.py list",
    "loaders.py named",
    "loaders.py pad",
    "loaders.py prefetch",
    "loaders.py stream --workers 2",
    "loaders_by_world.py",
    "loaders_by_world.py anew",
    "loaders_by_world.py anew1",
    "loaders_by_world.py anew2",
    "loaders_by_world.py one_line anew1",
    "loaders_by_world.py one_line anew2",
    "loaders_by_world.py one_line statistics",
    "minimum_gpus.py",
    "modules.py ckpt",
    "modules.py complex",
    "modules.py half",
    "modules.py shared",
    "modules.py wn",
    "optimizers.py grouped",
    "optimizers.py lbfgs",
    "optimizers.py lion",
    "optimizers.py look",
    "optimizers.py twice",
    "pipelines.py 1f1b",
    "pipelines.py gpipe",
    "pipelines.py inter",
    "raw_tensors.py",
    "reduced_by_hand.py",
    "spawned_ranks.py",
    "tensor_and_sequence_parallel.py",
    "two_optimizers.py",
    "updated_by_hand.py",
]
SLOW = [
    "accelerate_loaders.py --split --accum 2",
    "accumulation_by_world.py",
    "ddp_variants.py --kind accum",
    "joined_epochs.py",
    "modules.py compile",
    "one_cycle.py",
    "own_draws.py mixup",
    "own_draws.py paths",
    "own_draws.py replay",
    "scaled_gradients.py",
    "structured_batches.py graphs",
    "structured_batches.py images",
    "structured_batches.py samples",
    "structured_batches.py views",
]


@pytest.mark.processes
@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(call, marks=pytest.mark.thorough) for call in THOROUGH),
        *(pytest.param(call, marks=pytest.mark.slow) for call in SLOW),
    ],
)
def test_a_healthy_script_is_the_same_network(call: str) -> None:
    if call.startswith("accelerate"):
        pytest.importorskip("accelerate")
    target, *arguments = call.split()
    found = check_script(Script(str(SCRIPTS / target), tuple(arguments)))
    assert found.verdict == "the same network", (found.reason, [finding.sentence for finding in found.findings])
    assert found.compared["steps"] >= 5
    assert found.compared["tensors"] >= 2
    assert found.about or not target.startswith(("cuda", "minimum")), "a CPU in place of a GPU is mentioned"


@pytest.mark.processes
@pytest.mark.thorough
def test_a_script_that_starts_other_ranks_gets_their_number() -> None:
    found = check_script(Script(str(SCRIPTS / "spawned_ranks.py")), ranks=3)
    assert found.status == 3
    assert "--workers 2" in found.reason
