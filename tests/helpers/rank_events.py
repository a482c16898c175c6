"""Records of ranks, made event by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from apportion.script_check.record import RankRecord
from apportion.script_check.rows import Rows


class Rank:
    """The record of one rank that reads batches from a loader and trains on them."""

    def __init__(self, rank: int, *, wrapped: bool = True) -> None:
        self.rank, self.events, self.step = rank, list[dict[str, Any]](), 0
        self._numbers = dict[str, int]()
        self.emit(
            "network",
            averaged=wrapped,
            sharded=[],
            placements={},
            modules={"net": "Sequential", "net.0": "Linear"},
            weights={"net.weight": np.zeros(2)},
        )

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self.events.append({"kind": kind, "step": self.step, **fields})

    @property
    def record(self) -> RankRecord:
        """What the rank has recorded."""
        return RankRecord(self.rank, tuple(self.events))

    def iteration(self, loader: str = "train.py:5", **fields: Any) -> tuple[str, int]:
        """Begin an iteration over a loader."""
        number = self._numbers.get(loader, 0)
        self._numbers[loader] = number + 1
        begun = {
            "length": 3, "full": 3, "batch_size": 2, "rows": 12, "subset": False, "sampler": "DistributedSampler",
            "shuffles": True, "replicas": 2, "replacement": False, "pads": False, "epochs": True, "site": loader,
            "worker_seed": None, "selection": None, "data_set": 0, "made": 0,
        }  # fmt: skip
        self.emit("iteration", loader=loader, number=number, **{**begun, **fields})
        return loader, number

    def read(
        self,
        place: tuple[str, int],
        rows: Sequence[int],
        *,
        values: Sequence[float] = (),
        indexed: bool = True,
        random: bool = False,
    ) -> None:
        """Read one batch of rows, whose values are their numbers unless others are given."""
        number = sum(
            event["kind"] == "batch" and (event["loader"], event["iteration"]) == place for event in self.events
        )
        self.emit(
            "batch",
            loader=place[0],
            iteration=place[1],
            number=number,
            indices=list(rows) if indexed else None,
            rows=Rows(np.asarray(values or rows, dtype=np.float64)[:, None], "float64"),
            random=random,
        )

    def train(self, rate: float = 0.1, **fields: Any) -> None:
        """Compute gradients and make a step."""
        self.emit("forward", gradients=True, site="train.py:8")
        self.step += 1
        step = {
            "optimizer": 0, "number": self.step, "rates": [rate], "decays": [0.0], "evaluating": {"net": ()},
            "trainable": {"net.weight": True}, "gradients": {"net.weight": None}, "site": "train.py:9",
            "weights_before": f"w{self.step - 1}", "weights_after": f"w{self.step}",
        }  # fmt: skip
        self.emit("step", **{**step, **fields})

    def epoch(self, batches: Sequence[Sequence[int]], loader: str = "train.py:5", **fields: Any) -> None:
        """Train on all batches of an iteration."""
        place = self.iteration(loader, **fields)
        for rows in batches:
            self.read(place, rows)
            self.train()
        self.emit("exhausted", loader=place[0], iteration=place[1])

    def evaluate(self, batches: Sequence[Sequence[int]], loader: str = "train.py:20") -> None:
        """Evaluate all batches of an iteration."""
        place = self.iteration(loader)
        for rows in batches:
            self.read(place, rows)
            self.emit("forward", gradients=False, site="train.py:21")
        self.emit("exhausted", loader=place[0], iteration=place[1])

    def figure(self, value: float, site: str = "train.py:25", reduced: bool = True) -> None:
        """Take a number out of a tensor."""
        self.emit("figure", function="item", values=[value], reduced=reduced, direct=True, gradients=False, site=site)
