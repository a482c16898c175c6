"""References of proofs, computed once: the same network is proved under many strategies, and what one device makes of
it is the same each time.

``pool`` stands in for ``WorkerPool`` in ``apportion.runtime.launched.ranks``, for the processes of proofs. The ranks of
a strategy are those of ``warm_ranks``. What a rank of a reference answers, and the file that it writes with it, is
noted the first time, and told again to the next proof whose workload is the same to the byte, in the same environment.
A rank is started where something is asked that has not been asked before; it then goes the whole way from the
beginning.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import warm_ranks

from apportion.comm.channel import Message
from apportion.core.strategy import Strategy
from apportion.core.workload import Workload
from apportion.parallel.replica import step as single_step
from apportion.runtime.launch.local import Local
from apportion.runtime.proof.proof_workload import few_rows
from apportion.runtime.spawn.template import Spare
from apportion.runtime.supervisor.worker_pool import WorkerPool
from apportion.runtime.worker.job import Job
from apportion.strategies.single_device import SingleDevice

MOST = 200
"""So many references are remembered at most, those of the last proofs."""
SECONDS = 60.0
"""How long a rank may take for what it does again."""
LARGE = 1 << 20
"""A larger file is not remembered, nor what comes after it."""


@dataclass(eq=False)
class Answer:
    """What a rank said after certain orders, and what it wrote."""

    message: Message | None = None
    written: bytes | None = None
    after: dict[str, Answer] = field(default_factory=dict)
    """What came next, by the order that it was an answer to."""


remembered: OrderedDict[Hashable, Answer] = OrderedDict()


def pool(
    launcher: Local, target: str, job: Job, ranks: int, importer: Spare | None = None
) -> warm_ranks.Kept | Reference | WorkerPool:
    """Returns ranks, or for a reference what answers in their place. ``importer``: of no use to ranks that are there
    already. Processes of trials and surveys are new ones."""
    if not job.proof:
        return WorkerPool(launcher, target, job, ranks, importer)
    if not target.endswith(":reference") or isinstance(job.workload, str) or job.strategy.replays(job.workers):
        return warm_ranks.kept(launcher, target, job, ranks)
    return Reference(lambda: warm_ranks.kept(launcher, target, job, ranks), _beginning(launcher, job))


def _beginning(launcher: Local, job: Job) -> Answer:
    """Returns the first answer of a job, which is remembered from here on."""
    if _is_one_device(job.strategy):
        job = replace(job, strategy=SingleDevice())
        if _is_not_cut(job):
            job = replace(job, workers=1, rows=0, cut=0)
    data = cloudpickle.dumps(replace(job, launcher="local"))
    key = hashlib.sha256(data).digest(), warm_ranks.surroundings(launcher, 1)
    found = remembered.setdefault(key, Answer())
    remembered.move_to_end(key)
    while len(remembered) > MOST:
        remembered.popitem(last=False)
    return found


def _is_one_device(strategy: Strategy) -> bool:
    """Tells whether the reference is one device's, whatever the settings: ``return reference(workload)``."""
    function: Any = type(strategy).reference
    same = function.__code__.co_code == SingleDevice.reference.__code__.co_code
    return same and strategy.exact and function.__globals__.get("reference") is single_step.reference


def _is_not_cut(job: Job) -> bool:
    """Tells whether the proof is made on the workload's own data: those of one on few rows depend on the number of
    workers, and of steps."""
    assert isinstance(job.workload, Workload)
    try:
        workload = replace(job.workload, **job.changes)
        return few_rows(workload, job.rows or workload.batch_size, job.cut, job.workers) is workload
    except Exception:  # its data cannot be opened here
        return False


class Reference:
    """The one rank of a reference, which is a process only from where nothing is remembered."""

    def __init__(self, start: Any, beginning: Answer) -> None:
        self._start, self._pool = start, None
        self._made: list[Mapping[str, Any]] = []
        self._asked: deque[Mapping[str, Any]] = deque()
        self._at: Answer | None = beginning
        self._sent: Answer | None = beginning
        self._built = False
        if beginning.message is None:
            self._go_on()

    def send(self, order: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Gives an order, to a process where its answer is not remembered."""
        self._asked.append(order)
        if self._pool is not None:
            self._pool.send(order)
            return
        assert self._sent is not None
        self._sent = self._sent.after.get(_words(order))
        if self._sent is None or self._sent.message is None:
            self._go_on()

    def answers(self, kind: str, seconds: float) -> list[Message]:
        """Returns the answer to the oldest order that has not been answered; the first is that it is built."""
        order = self._asked.popleft() if self._built else None
        if self._pool is not None:
            message = self._answered(order, kind, seconds)
        else:
            assert self._at is not None
            self._at = self._at.after[_words(order)] if order is not None else self._at
            assert self._at.message is not None
            message = dict(self._at.message)
            if order is not None and "path" in order:
                path = Path(order["path"])
                path.unlink(missing_ok=True)  # the file before may still be mapped
                path.write_bytes(self._at.written or b"")
                message["path"] = order["path"]
        assert message["kind"] == kind
        self._built = True
        if order is not None:
            self._made.append(order)
        return [message]

    def close(self) -> None:
        """Lets the process go, if there is one."""
        if self._pool is not None:
            self._pool.close()

    def _go_on(self) -> None:
        """Starts the process, and has it do again what has been answered without it."""
        self._pool = self._start()
        if self._built:
            self._pool.answers("built", SECONDS)
        for order in self._made:
            again = {**order, "path": f"{order['path']}.again"} if "path" in order else order
            self._pool.send(again)
            self._pool.answers(_KINDS[order["kind"]], SECONDS)
        for order in self._asked:
            self._pool.send(order)

    def _answered(self, order: Mapping[str, Any] | None, kind: str, seconds: float) -> Message:
        """Returns the answer of the process, and remembers it."""
        (message,) = self._pool.answers(kind, seconds)
        if self._at is not None and order is not None:
            self._at = self._at.after.setdefault(_words(order), Answer())
        if self._at is not None:
            written = Path(order["path"]) if order is not None and "path" in order else None
            if written is not None and not written.exists():  # what cannot be predicted is not written
                written = None
            if kind not in _REMEMBERED or (written and written.stat().st_size > LARGE):
                self._at = None
            else:
                self._at.written = written.read_bytes() if written else None
                self._at.message = dict(message)
        return message


_KINDS = {
    "again": "built",
    "next": "state",
    "start": "started",
    "taps": "tapped",
    "predict": "predicted",
    "reload": "reloaded",
}
"""What answers which order."""
_REMEMBERED = ("built", "state", "started", "predicted", "reloaded")


def _words(order: Mapping[str, Any]) -> str:
    return repr(sorted((name, repr(value)) for name, value in order.items() if name != "path"))
