"""A strategy that survives the loss of workers, as simply as it can be done, and workloads to lose them in.

Every rank has the whole network; gradients are summed; after each update rank 0 keeps the whole state in memory that
outlives it, in two versions and a number that says which is whole.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Workload
from apportion.comm.world import World
from apportion.core.data.batch import Batch
from apportion.core.data.source import BatchSource
from apportion.core.fault_points import plant
from apportion.core.rng import seed_everything
from apportion.core.sampler import DataShard
from apportion.core.strategy import Recoverable, State, Step, Strategy
from apportion.errors import StateLost
from apportion.parallel.replica.replica import Replica
from apportion.parallel.replica.step import reference
from apportion.strategies.data_parallel import DataParallel

VERSION_BYTES = 1 << 20


@dataclass(frozen=True, repr=False)
class Surviving(Strategy):
    """data_parallel for models without buffers, with its state kept by rank 0."""

    survives: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        return SurvivingStep(workload, world)

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


@dataclass(frozen=True, repr=False)
class Forgetful(Strategy):
    """The same where nobody is left who has the state."""

    survives: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        step = SurvivingStep(workload, world)
        step.forgets = True
        return step

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


@dataclass(frozen=True, repr=False)
class Mortal(Strategy):
    """data_parallel whose workers kill themselves, once at each of these places: "1 committed 25; 0 rejoined 0" are
    slots, where, and the updates that are made by then (0: the first time)."""

    survives: ClassVar[bool] = True
    deaths: str = ""

    @property
    def exact(self) -> bool:
        return True

    def build(self, workload: Workload, world: World) -> Step:
        step = DataParallel().build(workload, world)
        deaths: dict[tuple[str, int], Callable[[], None]] = {}
        for slot, where, at in map(str.split, self.deaths.split(";")):
            if int(slot) != world.slot:
                continue
            if where in ("rejoining", "rejoined"):
                _die_around_rejoin(step, where)
            elif world.generation == 0:  # a replacement dies only as it rejoins
                deaths[where, int(at)] = _die(where)
        plant(lambda point: _reach(step, point, deaths))
        return step

    def reference(self, workload: Workload, world_size: int, log: tuple[Any, ...] = ()) -> Iterator[State]:
        return reference(workload)


def _reach(step: Any, point: str, deaths: Mapping[tuple[str, int], Callable[[], None]]) -> None:
    die = deaths.get((point, step.done))
    if die is None:
        return
    if point == "slice":  # half of what this rank has written is torn
        for part in step.gradient_update.slice_update.slice.parts:
            version = part.versions[(step.done + 1) % 2]
            for tensor in (version.weights, *version.slots):
                tensor[: len(tensor) // 2] = torch.nan
    die()


def _die_around_rejoin(step: Any, where: str) -> None:
    right, die = step.rejoin, _die(where)

    def rejoin(world: World) -> None:
        if where == "rejoining":
            die()
        right(world)
        if where == "rejoined":
            die()

    step.rejoin = rejoin


def _die(where: str) -> Callable[[], None]:
    mark = Path(os.environ["SURVIVING_MARKS"]) / f"died-{where}-{os.environ['LOCAL_RANK']}"

    def die() -> None:
        happens(where)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return die


class SurvivingStep(Step, Recoverable):
    forgets = False

    def __init__(self, workload: Workload, world: World) -> None:
        self.device = world.device
        self._replica = Replica(workload, rank=0, device=world.device)
        self.model, self.optimizers = self._replica.model, self._replica.optimizers
        seed_everything(workload.seed)
        self.source = BatchSource(workload, device=world.device, dtype=self._replica.input_dtype)
        self._replica.start_schedules(self.source.total, self.source.deal.batches)
        self._memory = world.shared("kept", 64 + 2 * VERSION_BYTES)
        self._kept = np.frombuffer(self._memory, dtype=np.int64, count=1)
        self._join_world(world)
        if world.generation == 0:
            self._keep()

    def _join_world(self, world: World) -> None:
        self.rank, self._group = world.rank, world.group()
        self.data_shard = DataShard(world.rank, world.size)

    @property
    def done(self) -> int:
        return self._replica.step

    def predict(self, batch: Batch) -> Any | None:
        return self._replica.predict(batch) if len(batch) else None

    def backward(self, batch: Batch) -> Tensor | None:
        self._replica.reseed(batch.step)
        self._loss = torch.zeros(1, dtype=torch.float64)
        if len(batch):
            loss = self._replica.loss(self._replica.outputs(batch), batch.targets)
            self._replica.backward(loss, len(batch) / batch.size)
            self._loss += loss.detach() * (len(batch) / batch.size)
        return None

    def update(self) -> Mapping[str, Tensor]:
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._group.all_reduce(p.grad).wait()
        self._group.all_reduce(self._loss).wait()
        for name in self.optimizers:
            self._replica.apply(name)
        self._replica.commit()
        self._keep()
        return {"loss": self._loss}

    def _keep(self) -> None:
        if self.rank != 0:
            return
        data = pickle.dumps(self._replica.state())
        start = 64 + self.done % 2 * VERSION_BYTES
        self._memory[start : start + len(data)] = data
        self._kept[0] = self.done

    def rejoin(self, world: World) -> None:
        self._join_world(world)
        if self.forgets:
            raise StateLost("it is forgotten")
        start = 64 + int(self._kept[0]) % 2 * VERSION_BYTES
        for p in self.model.parameters():
            p.grad = None
        self._replica.load(pickle.loads(self._memory[start : start + VERSION_BYTES]), slice(0))

    def state_dict(self) -> State:
        happens("saving", self.done)
        return self._replica.state()

    def load_state_dict(self, state: State) -> None:
        self._replica.load(state, slice(0))
        self._keep()

    def committed(self) -> State | None:
        return self._replica.committed()

    def spent(self) -> Mapping[str, float]:
        return {"loading": self.source.seconds, "waiting": self._group.waited, "updating": self._replica.seconds}


def happens(where: str, step: int = -1) -> None:
    """A place where a test may want to do something: it is written into a file of the folder SURVIVING_MARKS."""
    folder = os.environ.get("SURVIVING_MARKS")
    if folder is not None:
        with open(Path(folder) / where, "a") as file:
            file.write(f"{os.environ.get('LOCAL_RANK', 'spare')} {os.getpid()} {step}\n")
        hold = Path(folder) / f"hold-{where}-{os.environ.get('LOCAL_RANK', 'spare')}"
        while hold.exists():
            time.sleep(0.005)


def raises(where: str) -> None:
    """Where a test asks for it."""
    folder = os.environ.get("SURVIVING_MARKS")
    if folder is not None and (Path(folder) / f"raise-{where}-{os.environ.get('LOCAL_RANK', 'spare')}").exists():
        raise RuntimeError("asked for")


class Network(nn.Module):
    """``trouble(inputs)`` is called in the forward pass of training."""

    def __init__(self, trouble: Callable[[Tensor], Any] = lambda x: None) -> None:
        super().__init__()
        happens("building")
        raises("building")
        self.seen_by = 0
        self.hidden, self.out, self.trouble = nn.Linear(4, 16), nn.Linear(16, 2), trouble

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.seen_by != os.getpid():
                self.seen_by = os.getpid()
                happens("computing")
            time.sleep(float(os.environ.get("SURVIVING_PACE", "0")))
            raises("computing")
            self.trouble(x)
        else:
            happens("evaluating")
        return self.out(torch.tanh(self.hidden(x)))


def data(n: int = 61) -> TensorDataset:
    happens("opening")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(-1) == targets).double().mean())


def data_with_threads() -> TensorDataset:
    threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
    return data()


def data_with_files() -> TensorDataset:
    found = data()
    found.file = open(__file__)  # noqa: SIM115 (as data sets do)
    return found


def crash_on_poison(x: Tensor) -> None:
    if (x == POISON).any():
        ctypes.string_at(0)


def poisoned_data() -> TensorDataset:
    found = data()
    found.tensors[0][17] = POISON
    return found


POISON = 12345.0
workload = Workload(
    model=Network,
    data=data,
    loss=nn.functional.cross_entropy,
    optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    batch_size=16,
    steps=300,
    precision="float64",
    evaluation=Evaluation(data=lambda: data(48), metrics={"accuracy": accuracy}, every=10, best="max accuracy"),
    caches=("Network.seen_by",),
)
crashing = replace(workload, model=lambda: ctypes.string_at(0))
poisoned = replace(workload, model=lambda: Network(crash_on_poison), data=poisoned_data)
