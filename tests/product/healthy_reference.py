"""What the ranks of a script, and one process on the rows of all of them, make of the weights, in float64 and step by
step; written without the check of scripts, whose healthy cases it judges.

A script of N ranks and its twin of one process differ in what follows from N alone: the one process takes the batch of
all ranks (the scripts divide it by the number of processes), the rows that ``DistributedSampler`` repeats or leaves out
for N ranks, and the draws of all ranks where each draws its own. Dropout is off on both sides.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

SECONDS = 60.0
OWN_DRAWS = "index = torch.randint(len(y), (BATCH // world,), generator=generator)"
DRAWS_OF_ALL = "index = torch.cat([torch.randint(len(y), (BATCH // RANKS,), generator=g) for g in GENERATORS])"


def text_of_reference(text: str, ranks: int) -> str:
    """The script as one process that takes the draws of ``ranks`` ranks."""
    generators = f"RANKS = {ranks}\nGENERATORS = [torch.Generator().manual_seed(SEED + rank) for rank in range(RANKS)]"
    if OWN_DRAWS not in text:
        return text
    return text.replace(OWN_DRAWS, DRAWS_OF_ALL).replace("\n\n\n", f"\n{generators}\n\n\n", 1)


def without_dropout(text: str) -> str:
    return text.replace("DROPOUT = 0.1", "DROPOUT = 0.0")


def weights_by_step(text: str, folder: Path, ranks: int, rows_of: int) -> list[list[Tensor]]:
    """The weights after each optimizer step, in one vector, of each of ``ranks`` processes; samplers distribute the
    rows as for ``rows_of`` ranks. A process that has not ended after ``SECONDS`` is killed, and what it has recorded
    counts, because gloo can hang at exit. Raises RuntimeError where a process fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "script.py"
    path.write_text(without_dropout(text))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    temporary = tempfile.mkdtemp(prefix="healthy-")  # short, as loader processes make sockets in it
    context = multiprocessing.get_context("fork")
    results = [folder / f"weights{rank}.pt" for rank in range(ranks)]
    arguments = [(path, rank, ranks, port, rows_of, temporary) for rank in range(ranks)]
    processes = [context.Process(target=_run, args=each, daemon=False) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    shutil.rmtree(temporary, ignore_errors=True)
    if any(process.exitcode for process in processes if process not in hanging):
        log = "".join((folder / f"log{rank}.txt").read_text()[-1500:] for rank in range(ranks))
        raise RuntimeError(f"{len(hanging)} hang, exit codes {[process.exitcode for process in processes]}: {log}")
    return [torch.load(result) for result in results]


def _run(path: Path, rank: int, ranks: int, port: int, rows_of: int, temporary: str) -> None:
    log = os.open(path.parent / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    warnings.simplefilter("default")  # those of torch about a script are no errors, as they are in tests
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    _record_steps(path.parent / f"weights{rank}.pt")
    if rows_of != ranks:
        _distribute_as_for(rows_of)
    sys.argv = [str(path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without the threads of gloo, which can hang at exit


def _record_steps(result: Path) -> None:
    steps: list[Tensor] = []

    def record(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]
        steps.append(torch.cat([w.flatten().double() for w in whole]).clone())
        torch.save(steps, result)

    register_optimizer_step_post_hook(record)


def _distribute_as_for(ranks: int) -> None:
    """One process takes, in their order, the rows that ``DistributedSampler`` gives to ``ranks`` ranks."""
    module = torch.utils.data.distributed
    original = module.DistributedSampler

    class Union(original):  # type: ignore[misc, valid-type]
        def __init__(self, dataset: Any, **options: Any) -> None:
            super().__init__(dataset, num_replicas=ranks, rank=0, **options)

        def __iter__(self) -> Iterator[int]:
            of_ranks = []
            for self.rank in range(ranks):
                of_ranks.append(list(super().__iter__()))
            return iter([index for group in zip(*of_ranks, strict=True) for index in group])

        def __len__(self) -> int:
            return ranks * self.num_samples

    torch.utils.data.DistributedSampler = Union  # type: ignore[misc]


def furthest(ranks: Sequence[Sequence[Tensor]], reference: Sequence[Tensor], *, parts: bool, most: int) -> float:
    """The largest difference of a weight from the reference's at any of the first ``most`` steps; ``parts``: the ranks
    hold the parts of one network, and not the same network."""
    counts = {len(steps) for steps in (*ranks, reference)}
    assert len(counts) == 1, f"the numbers of optimizer steps differ: {counts}"
    largest = 0.0
    for number, expected in enumerate(reference[:most]):
        found = [torch.cat([steps[number] for steps in ranks])] if parts else [steps[number] for steps in ranks]
        largest = max(largest, *((weights - expected).abs().max().item() for weights in found))
    return largest
