"""The collectives of torch.distributed: gloo on CPU and for ranks that share a GPU, NCCL where every rank of the host
has a GPU of its own, or where NCCL is set to let ranks share one.

The network interface that gloo talks over is chosen here too.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from apportion.comm.barrier import NAP_SECONDS
from apportion.comm.group import DONE, Group, WaitClock, Work, bytes_of
from apportion.errors import ApportionError, PeerLost

DEADLINE_SECONDS = 300.0
"""The deadline in seconds of meeting, and of one collective, where no supervisor watches (torchrun)."""
WATCHED_SECONDS = 86400.0
"""The deadline in seconds under a supervisor, which sees every rank's progress, finds a late one much sooner, and knows
a long wait (a large last checkpoint) from a late rank."""
BUFFERED_BYTES = 8 << 20
"""The bytes of messages that may be under way without a rank that receives them."""
PATIENCE_SECONDS = 10.0
"""The seconds of meeting before a rank says that it waits."""
CLOSE_SECONDS = 1.0
"""The seconds for messages that are under way when a group ends; a rank that has not received them by then has gone."""
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which NCCL lets ranks share a GPU."""
FIRST_SHARED = (2, 30)
"""The first version of NCCL that does."""
_RECORDED_WAITS = 8192
_lent: deque[list[Tensor]] = deque(maxlen=2)
"""The views of what the last collectives of this process were given, one list for each of gloo's threads
(``_lend``)."""
_meetings = itertools.count()
_parts: Counter[str] = Counter()


@final
class _Pending(Work):
    __slots__ = ("_collective", "_group", "_work")

    def __init__(self, work: Any, group: ProcessGroup, *, collective: bool = True) -> None:
        self._work, self._group, self._collective = work, group, collective

    def wait(self) -> None:
        if self._work is not None:  # gloo would wait for a second message
            work, self._work = self._work, None
            self._group._wait(work, collective=self._collective)

    @property
    def is_through(self) -> bool:
        return self._work is None


@final
class _Arriving(Work):
    """A message that arrives in the memory of the host, and goes on to a GPU once it is waited for."""

    __slots__ = ("_from", "_into", "_work")

    def __init__(self, work: Work, arrived: Tensor, into: Tensor) -> None:
        self._work, self._from, self._into = work, arrived, into

    def wait(self) -> None:
        self._work.wait()
        self._into.copy_(self._from)


class _Buffered:
    """Messages that are copies, whose end only a thread waits for: gloo tells it no other way."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
        self._taken = self._through = 0
        self.error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._follow, name="sends", daemon=True)
        self._thread.start()

    def add(self, work: Any, nbytes: int) -> None:
        self._taken += nbytes
        self._works.put((work, nbytes))

    @property
    def nbytes(self) -> int:
        """The bytes that are under way."""
        return self._taken - self._through

    def _follow(self) -> None:
        while (given := self._works.get())[0] is not None:
            try:
                given[0].wait()
            except RuntimeError as error:
                self.error = error
                return
            self._through += given[1]

    def close(self) -> None:
        """End the thread: one that lets go of a message while Python ends takes the process down with SIGABRT."""
        self._works.put((None, 0))
        self._thread.join(CLOSE_SECONDS)


@dataclass(frozen=True)
class _Place:
    """The place where the ranks of a group have found each other, and where those of a part of it will.

    torch names a part by what else this process has made: ranks that were in other parts before (of one rank there is
    none to make) would look for each other under different names. These names are of what the ranks have in common.
    """

    store: Any
    name: str
    timeout: timedelta
    gpu: torch.device | None
    """The device of NCCL's groups; None: the groups are gloo's."""

    @classmethod
    def of_world(cls, name: str, device: torch.device, timeout: timedelta) -> _Place:
        world = dist.group.WORLD
        assert world is not None
        own_gpu = device.type == "cuda" and "nccl" in dist.get_backend_config(world)
        return cls(world.get_group_store(), name, timeout, device if own_gpu else None)

    def of_part(self, ranks: Sequence[int]) -> _Place:
        """The place of a part. A part that is made again does not find what it left there."""
        name = f"{self.name}/{','.join(map(str, ranks))}"
        _parts[name] += 1
        return replace(self, name=f"{name}/{_parts[name]}")

    def connect(self, rank: int, size: int) -> Any:
        made: Any = dist.ProcessGroupGloo if self.gpu is None else dist.ProcessGroupNCCL
        return made(dist.PrefixStore(self.name, self.store), rank, size, timeout=self.timeout)  # type: ignore[attr-defined]


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def over_nccl(local_size: int, gpus: int) -> bool:
    """Whether ranks that compute on GPUs talk over NCCL: each of a host's ranks has a GPU of its own, or the user
    lets ranks share one (NCCL_MULTI_RANK_GPU_ENABLE=1), and NCCL is recent enough for that."""
    if local_size <= gpus:
        return True
    return os.environ.get(SHARED_GPU) == "1" and tuple(torch.cuda.nccl.version())[:2] >= FIRST_SHARED


@final
class ProcessGroup(Group):
    """The ranks of a group of torch.distributed. ``owned``: the group of torch ends with this one."""

    beside = True

    def __init__(
        self, process_group: Any, *, owned: bool, all_waits: WaitClock | None = None, place: _Place | None = None
    ) -> None:
        self._pg, self._owned, self._place = process_group, owned, place
        self.rank, self.size = process_group.rank(), process_group.size()
        self.waits: deque[tuple[float, float]] = deque(maxlen=_RECORDED_WAITS)
        self.all_waits = WaitClock() if all_waits is None else all_waits
        self._buffered: _Buffered | None = None
        self._sends: list[_Pending] = []  # gloo gives up a send whose work object is not kept

    @classmethod
    def connect(
        cls, *, rank: int, size: int, device: torch.device, local_size: int, watched: bool = False
    ) -> ProcessGroup:
        """Meet the other ranks at MASTER_ADDR:MASTER_PORT. ``watched``: a supervisor sees which rank is late."""
        timeout = timedelta(seconds=WATCHED_SECONDS if watched else DEADLINE_SECONDS)
        if dist.is_initialized():  # the user's own script has done it
            return cls(dist.group.WORLD, owned=False, place=_Place.of_world("given", device, timeout))
        nccl = device.type == "cuda" and over_nccl(local_size, torch.cuda.device_count())
        if not nccl:
            choose_interface(os.environ["MASTER_ADDR"])
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR:MASTER_PORT)"
        waits = threading.Timer(PATIENCE_SECONDS, _say_waiting, [rank, size, where])
        waits.daemon = True
        waits.start()
        name = f"apportion/{next(_meetings)}"
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))  # type: ignore[attr-defined]
            dist.init_process_group(
                "nccl" if nccl else "gloo",
                # The store outlives a meeting: under a name of its own no rank finds what an earlier one left there.
                store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if nccl else None,
            )
        except (RuntimeError, ValueError, OSError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ApportionError(
                f"rank {rank} of {size} could not meet the others at {where}: {first}; check that rank 0 runs there, "
                "that every rank was started, and that the port is open between the hosts"
            ) from error
        finally:
            waits.cancel()
        return cls(dist.group.WORLD, owned=True, place=_Place.of_world(name, device, timeout))

    def part(self, ranks: Sequence[int]) -> ProcessGroup:
        """Make the group of some of these ranks, in this order; called by them alone."""
        assert self._place is not None, "of a group that connect() has made"
        place = self._place.of_part(ranks)
        made = self._start(place.connect, ranks.index(self.rank), len(ranks))
        return ProcessGroup(made, owned=True, all_waits=self.all_waits, place=place)

    def lane(self) -> ProcessGroup:
        return self.part(range(self.size))

    def all_reduce(self, tensor: Tensor) -> Work:
        return _Pending(self._start(self._pg.allreduce, _lend(tensor)), self)

    def gather_into(self, rows: Tensor, own: Tensor) -> None:
        if own.numel():
            *into, given = _lend(*rows.unbind(0), own)
            self._wait(self._start(self._pg.allgather, [into], [given]))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        self._wait(self._start(self._pg.broadcast, *_lend(tensor), source))

    def reduce_scatter(self, rows: Tensor, into: Tensor) -> None:
        # gloo sums in an order of its own, which need not be that of the ranks.
        theirs = torch.empty_like(rows, memory_format=torch.contiguous_format)
        own, got = _lend(rows.contiguous().view(-1), theirs.view(-1))
        self._wait(self._start(self._pg.alltoall_base, got, own, [], []))
        # Over dimension 0 in rank order, on every rank, so that the result does not depend on which rank came first.
        torch.sum(theirs, 0, out=into)

    def send(self, tensor: Tensor, to: int) -> Work:
        assert tensor.is_contiguous(), "what is sent is contiguous"
        self._other(to)
        if self._buffered is None:
            self._buffered = _Buffered()
        if self._buffered.error is not None:
            raise self._lost(self._buffered.error)
        size = tensor.nbytes
        if not size:
            return DONE
        if self._needs_host(tensor):
            tensor = tensor.cpu()
        # gloo sends when the other side receives: a copy can wait for that, as in shared memory.
        if tensor.device.type == "cpu" and self._buffered.nbytes + size <= BUFFERED_BYTES:
            self._buffered.add(self._message(self._pg.send, tensor.clone(), to), size)
            return DONE
        work = _Pending(self._message(self._pg.send, tensor, to), self, collective=False)
        self._sends = [*(work for work in self._sends if not work.is_through), work]
        return work

    def receive(self, into: Tensor, source: int) -> Work:
        assert into.is_contiguous(), "what is received into is contiguous"
        self._other(source)
        if not into.numel():
            return DONE
        arrived = torch.empty(into.shape, dtype=into.dtype, device="cpu") if self._needs_host(into) else into
        work = _Pending(self._message(self._pg.recv, arrived, source), self, collective=False)
        return work if arrived is into else _Arriving(work, arrived, into)

    def _needs_host(self, tensor: Tensor) -> bool:
        """Whether a message goes by way of the host's memory: gloo, whose collectives copy from and to GPUs, would take
        the address of a GPU's memory for one of the host's."""
        return _is_on_gpu(tensor) and (self._place is None or self._place.gpu is None)

    def _message(self, way: Any, tensor: Tensor, rank: int) -> Any:
        # As bytes: no backend knows every type.
        return self._start(way, [bytes_of(tensor)], rank, 0)

    def barrier(self) -> None:
        options = dist.BarrierOptions()
        if self._place is not None and self._place.gpu is not None:
            options.device_ids = [self._place.gpu.index]  # a part's rank is not the number of its GPU
        self._wait(self._start(self._pg.barrier, options))

    def _start(self, collective: Any, *arguments: Any) -> Any:
        try:
            return collective(*arguments)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any, *, collective: bool = True) -> None:
        began = time.perf_counter()
        self.all_waits.begin()
        try:
            self._through(work)
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self.all_waits.end()
            ended = time.perf_counter()
            self.all_waits.seconds += ended - began
        if collective:
            self.waits.append((began, ended))

    def _through(self, work: Any) -> None:
        """Wait, while messages through memory go on: the rank that this rank waits for may wait for one of those."""
        if not self.all_waits.move_on():
            work.wait()
            return
        over: Future[None] = Future()
        # A message of gloo tells its end to the thread that waits alone.
        thread = threading.Thread(target=_follow, args=(work, over), name="waits", daemon=True)
        thread.start()
        while self.all_waits.move_on():
            try:
                over.result(NAP_SECONDS)
                break
            except TimeoutError:
                continue
        over.result()
        thread.join()  # as ``_Buffered.close``

    def _lost(self, error: RuntimeError) -> PeerLost:
        first = str(error).splitlines()[0] if str(error) else "no message"
        return PeerLost(f"rank {self.rank} lost another rank in a collective: {first}")

    def close(self) -> None:
        if self._buffered is not None:
            self._buffered.close()
            self._buffered = None
        if self._owned and not isinstance(self._pg, dist.ProcessGroup):  # of a part
            self._pg.shutdown()
        elif self._owned and dist.is_initialized():
            dist.destroy_process_group(self._pg)
        self._owned = False


def _lend(*tensors: Tensor) -> list[Tensor]:
    """Return the same tensors for a collective of gloo, and keep views of them.

    Its thread lets go of them a moment after the end of the collective is reported. Where it is the last in C++ to hold
    a tensor it takes the interpreter's lock for that, and if Python ends just then the process goes down with SIGABRT.
    A view holds its base in C++, so that what views are kept of is not the thread's to let go of."""
    lent = [tensor.detach() for tensor in tensors]
    _lent.append([tensor.view(tensor.shape) for tensor in lent])
    return lent


def _follow(work: Any, over: Future[None]) -> None:
    try:
        work.wait()
    except BaseException as error:
        over.set_exception(error)
    else:
        over.set_result(None)


def _say_waiting(rank: int, size: int, where: str) -> None:
    sys.stderr.write(
        f"rank {rank} of {size} has waited {PATIENCE_SECONDS:.0f} s for the others at {where} and goes on waiting: "
        "does rank 0 run there, and was every rank started?\n"
    )
    sys.stderr.flush()


# The network interface


_SIOCGIFADDR = 0x8915


def choose_interface(master: str) -> None:
    """Point gloo at the network interface that reaches MASTER_ADDR, unless the user has chosen one.

    gloo's own choice is whatever address the host's name resolves to: often a loopback one, which no other host can
    reach, or none at all.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ApportionError(
            f"MASTER_ADDR={master} cannot be resolved ({error}): give the address of rank 0's host"
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # a datagram socket: chooses the route, sends nothing
        except OSError:
            return
        own = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if _address(name) == own:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
