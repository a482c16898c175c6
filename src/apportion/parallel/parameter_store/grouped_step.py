"""Downpour SGD whose workers are groups: each group holds the whole network in parts, as DistBelief's replicas did.

::

    group 0     rank 0 [part 0] -- rank 1 [part 1]     batch 0        a batch goes through all of a group's ranks
                  pull, push         pull, push
    stores      [ part 0's shards ] [ part 1's shards ]               one for each place in a group
                  pull, push         pull, push
    group 1     rank 2 [part 0] -- rank 3 [part 1]     batch 1

Every rank keeps to the store of its place, with those of the same place in other groups: a worker pulls and pushes the
pieces that it holds. Between two pushes no group waits for another. Batches are handed out in turn, a round of one
batch a group; ranks meet where the network is evaluated or saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.world import World
from apportion.core.data.batch import Batch, Whole
from apportion.core.sampler import DataShard
from apportion.core.strategy import Held, Recoverable, State, Step, Strategy
from apportion.core.workload import Workload
from apportion.errors import StateLost
from apportion.parallel.parameter_store.memory.store_spec import StoreRegions
from apportion.parallel.parameter_store.push_pull import PushPullSchedule
from apportion.parallel.parameter_store.store import Store
from apportion.parallel.parameter_store.worker_model import WHOLE, StoreWorker, extent_of, must_be_one_host, refuse
from apportion.parallel.partition.replica_groups import ReplicaGroup, how_many
from apportion.parallel.partition.replicated_step import build_split, predict


@final
class GroupsStep(Step, Recoverable):
    """One rank of one group, and the store of its place in the group."""

    whole = True

    def __init__(
        self, workload: Workload, world: World, rhythm: PushPullSchedule, of: Strategy, replicas: int | None
    ) -> None:
        refuse(workload)
        self.rank, self.device, self._world = world.rank, world.device, world
        self._place = place = ReplicaGroup.split(world, how_many(of, replicas, world.size))
        self._inner = inner = build_split(of, workload, place.within)
        self.model, self.optimizers, self.source = inner.model, inner.optimizers, inner.source
        self._worker = worker = StoreWorker(workload, world.device, split=inner)
        self._ordered = rhythm.mode == "ordered"
        turns = DataShard(place.replica, place.replicas, whole_batches=True)
        self.data_shard = WHOLE if self._ordered else turns
        across = place.across
        must_be_one_host("parameter_server of groups", across)
        extent = extent_of(worker, across, lock_free=rhythm.mode == "hogwild")
        memory = across.shared(across.another("store"), StoreRegions(extent).nbytes)
        self._store = store = Store(extent, memory, worker=across.rank, check=world.check)
        store.settle(lambda: store.put(worker.initial(), done=0), first=across.rank == 0)
        worker.move(store.weights)
        self._gradients = worker.layout.views(store.gradient)
        self._done = self._base = 0
        self._pulled = False
        """Tells whether the weights here are as they were pulled, and are not to be pulled again before the next
        batch."""
        self._own: tuple[Tensor, list[bool]] | None = None
        """The loss of the batch that is computed and not pushed, and which parameters have a gradient."""

    @property
    def done(self) -> int:
        return self._done

    def take(self) -> Batch | None:
        """Return this group's batch of the round, which counts as the whole round; empty where there is none for it. In
        ordered mode: the batch whose turn it is, empty for other groups."""
        first, total = self._done, self.source.total
        if first >= total:
            return None
        place, sampler = self._place, self.source.deal
        own = first if self._ordered else min(first + place.replica, total - 1)
        batch = self.source.at(own, WHOLE)
        there = self._turn() == place.replica if self._ordered else first + place.replica < total
        size = batch.size if self._ordered else sum(sampler.size(n) for n in self._round())
        whole = Whole(own, batch.epoch, size, batch.start, int(batch.index[0]))
        count = len(batch) if there else 0
        return Batch(self.source, whole, index=batch.index[:count], rows=slice(0, count))

    def _turn(self) -> int:
        """Return, in ordered mode, the group whose gradient is next."""
        return (self._done - self._base) % self._place.replicas

    def _round(self) -> range:
        return range(self._done, min(self._done + self._place.replicas, self.source.total))

    # A step

    def backward(self, batch: Batch) -> Tensor | None:
        if not self._ordered:
            return self._compute(batch.step) if len(batch) else None
        if self._turn() == 0:
            own = self._done + self._place.replica
            if own < self.source.total:
                self._pulled = False
                self._compute(own)
            self._place.across.group().barrier()  # a push before that would change what others pull
        return self._own[0] if len(batch) and self._own is not None else None

    def _compute(self, number: int) -> Tensor:
        store = self._store
        if not self._pulled:
            self._pull()
        store.queue.record_taken(number)
        store.queue.record_versions(store.pulled)
        batch = self.source.at(number, WHOLE)
        self._own = self._worker.compute(batch, self._gradients, store.change, first=True, alone=False)
        return self._own[0]

    def _pull(self) -> None:
        self._store.pull()
        self._worker.set_buffers(self._store.buffers)
        self._pulled = True

    def update(self) -> Mapping[str, Tensor]:
        return self._update_in_turn() if self._ordered else self._update()

    def _update(self) -> Mapping[str, Tensor]:
        loss = stale = torch.zeros((), dtype=torch.float64)
        if self._own is not None:
            loss, stale = self._own[0], self._push(self._done + self._place.replica)
        self._done = self._round().stop
        return {"loss": loss, "staleness": stale}

    def _push(self, number: int) -> Tensor:
        """Push the gradient with the hyperparameters that belong to this number of updates."""
        assert self._own is not None
        used = None if all(self._own[1]) else self._own[1]
        stale = self._store.push(self._worker.hyper.at(number), used=used, pull=not self._ordered)
        if not self._ordered:
            self._worker.set_buffers(self._store.buffers)
        self._own = None
        return torch.tensor(stale, dtype=torch.float64)

    def _update_in_turn(self) -> Mapping[str, Tensor]:
        turn = self._turn()
        report = self._store.memory.reports[turn]
        if turn == self._place.replica:
            assert self._own is not None
            report.loss = float(self._own[0])
            report.staleness = float(self._push(self._done))
        # All ranks of this place read what the one whose turn it was has reported, and none pushes before.
        self._place.across.group().barrier()
        self._done += 1
        return {"loss": torch.tensor(report.loss), "staleness": torch.tensor(turn, dtype=torch.float64)}

    # The whole

    def predict(self, batch: Batch) -> Any | None:
        if batch.start:  # one pass over the set is of one state of the weights, the same in all groups
            self._world.group().barrier()
            self._pull()
            self._world.group().barrier()
        return predict(self._inner, self._place, batch)

    def state_dict(self) -> State:
        everyone = self._world.group()
        everyone.barrier()  # everyone has pushed
        own = self._worker.state(self._done, self._store.read())
        everyone.barrier()  # no rank goes on while another still reads
        return self._inner.gathered(own)

    def load_state_dict(self, state: State) -> None:
        start = self._worker.load(self._inner.own_part(state))
        everyone = self._world.group()
        everyone.barrier()
        if self._place.replica == 0:
            self._store.put(start, done=state.step)
        everyone.barrier()
        self._done = self._base = state.step
        self._own, self._pulled = None, False

    def rejoin(self, world: World) -> None:
        raise StateLost("a group without one of its ranks has a part of the network, and of the batch it was at")

    def fingerprint(self, workload: Workload) -> dict[str, Any]:
        return self._inner.fingerprint(workload)

    @property
    def parameters(self) -> int:
        return self._inner.parameters

    @property
    def cuts(self) -> tuple[str, ...] | None:
        return self._inner.cuts

    def held(self) -> Held:
        return Held(self._store.nbytes, self._store.weights.nbytes + self._store.buffers.nbytes)

    def spent(self) -> Mapping[str, float]:
        spent = dict(self._inner.spent())
        return {**spent, "waiting": spent["waiting"] + self._store.waited}

    def close(self) -> None:
        self._inner.close()
