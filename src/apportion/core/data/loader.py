"""Data-loading processes: what the coming steps need is loaded while this one computes.

torch's DataLoader runs them and keeps the order. Here is what makes them fit examples that are dealt: a request names a
step and a share of it, going on elsewhere discards what was loaded ahead, and no loader outlives its worker. What they
load comes back in memory that has no name, so that a killed run leaves nothing behind.
"""

from __future__ import annotations

import io
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from apportion.comm.sync import round_up
from apportion.errors import ApportionError
from apportion.process import die_with_parent, outlive_notice

LOOK_SECONDS = 1.0
"""The seconds between two looks at whether the loaders live, while a step waits for them."""
PREFETCH = 2
"""The number of requests under way for each process."""
PLACE_BYTES = 256 << 20
"""The bytes that one batch may take of the shared memory; a larger one goes through a pipe. Memory that is not touched
costs nothing."""

Request = Any


@dataclass(frozen=True)
class LoadFailed:
    """The error that a loader raised instead of loading."""

    summary: str
    traceback: str


class Ahead:
    """Processes that call ``load(request)`` for the requests to come.

    ``following(request)``: that request and those that will be asked for after it. ``begin()`` is called first in each
    process. The processes are started at the first request.
    """

    def __init__(
        self,
        processes: int,
        *,
        begin: Callable[[], None],
        load: Callable[[Request], Any],
        following: Callable[[Request], Iterable[Request]],
    ) -> None:
        self._shelf = _Shelf(PREFETCH * processes + 1)  # one more than are under way: the one that is being read
        self._line = _Line(following, self._shelf.places)
        with _meant():
            self._loader: Any = DataLoader(
                _Loads(load, self._shelf),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._line,
                collate_fn=_as_it_is,  # type: ignore[arg-type]
                num_workers=processes,
                multiprocessing_context="fork",
                worker_init_fn=_Begin(begin, os.getpid()),
                prefetch_factor=PREFETCH,
                persistent_workers=True,
                timeout=LOOK_SECONDS,
                generator=torch.Generator(),  # its draw is none of the training's
            )
        self._iterator: Iterator[PackedBatch] | None = None
        self._processes: list[BaseProcess] = []

    def take(self, request: Request) -> Any:
        """Return what was loaded for the request, or ``LoadFailed``. Asking out of turn discards what was loaded for
        another place."""
        if request not in self._line.out:
            self._go_on_at(request)
        while self._line.out[0] != request:
            self._receive()
        return self._shelf.unpack(self._receive())

    def start_over(self) -> None:
        """Discard everything that was loaded ahead."""
        self._line.first = None
        # What is under way is received and thrown away: torch's loader hands batches out in order, and its places in
        # the shared memory may only be written again after that.
        while self._line.out:
            self._receive()

    def _go_on_at(self, request: Request) -> None:
        self.start_over()
        self._line.first = request
        if self._iterator is None:
            self._start()
        else:
            iter(self._loader)  # the same processes, which have nothing under way

    def _start(self) -> None:
        others = set(multiprocessing.active_children())
        # torch's handler would raise wherever the training happens to be; a loader that died is found by _receive.
        handler = signal.getsignal(signal.SIGCHLD)
        with _meant():
            self._iterator = iter(self._loader)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        self._processes = [p for p in multiprocessing.active_children() if p not in others]

    def _receive(self) -> PackedBatch:
        assert self._iterator is not None
        while True:
            try:
                packed = next(self._iterator)
            except RuntimeError as error:
                self._look(error)
            else:
                self._line.out.popleft()
                return packed

    def _look(self, error: RuntimeError) -> None:
        for process in self._processes:
            if not process.is_alive():
                raise ApportionError(_death(process)) from error
        if "timed out" not in str(error):
            raise error

    def close(self) -> None:
        """End the loading processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
        self._iterator = None
        self._loader = None


class _Line:
    """The requests in the order in which they are handed out, each with its place in the shared memory; ``out``: those
    that are handed out and not taken yet."""

    def __init__(self, following: Callable[[Request], Iterable[Request]], places: int) -> None:
        self._following, self._places = following, places
        self.first: Request | None = None
        self.out: deque[Request] = deque()

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        first = self.first
        for number, request in enumerate(self._following(first)):
            if self.first != first:
                return
            self.out.append(request)
            yield request, number % self._places


class _Loads:
    """The data set of a loading process, whose items are what it loads, packed."""

    def __init__(self, load: Callable[[Request], Any], shelf: _Shelf) -> None:
        self._load, self._shelf = load, shelf

    def __getitem__(self, asked: tuple[Request, int]) -> PackedBatch:
        request, place = asked
        try:
            return self._shelf.pack(self._load(request), place)
        except Exception as error:
            return self._shelf.pack(LoadFailed(f"{type(error).__name__}: {error}", traceback.format_exc()), place)


@dataclass(frozen=True)
class PackedBatch:
    """A nest of tensors on its way: its shape, and where its numbers are."""

    head: bytes
    spans: tuple[slice, ...]
    """The stretches of the shared memory where the numbers are."""
    buffers: tuple[bytearray, ...] = ()
    """The numbers themselves, where there is not room enough in the shared memory."""


class _Shelf:
    """Memory that the loaders share with their worker, in places for one batch each."""

    def __init__(self, places: int) -> None:
        self.places = places
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = memoryview(mmap.mmap(-1, places * PLACE_BYTES, flags=flags))
        except OSError:  # not so much may be promised here
            self._memory = memoryview(b"")

    def pack(self, value: Any, place: int) -> PackedBatch:
        """Pack a value in this place: the same numbers at the same strides."""
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Packer(file, protocol=5, buffer_callback=buffers.append).dump(value)
        raw = [buffer.raw() for buffer in buffers]
        starts = [0, *itertools.accumulate(round_up(view.nbytes) for view in raw)]
        if starts[-1] > min(PLACE_BYTES, self._memory.nbytes):
            return PackedBatch(file.getvalue(), (), tuple(bytearray(view) for view in raw))
        first = place * PLACE_BYTES
        spans = tuple(slice(first + at, first + at + v.nbytes) for at, v in zip(starts, raw, strict=False))
        for span, view in zip(spans, raw, strict=True):
            self._memory[span] = view
        return PackedBatch(file.getvalue(), spans)

    def unpack(self, packed: PackedBatch) -> Any:
        """Unpack what was packed, in memory of its own."""
        # Of a process that this one has forked, over a pipe without a name: nothing from outside can get here.
        return pickle.loads(packed.head, buffers=packed.buffers or [_copy(self._memory[span]) for span in packed.spans])


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Packs tensors as plain memory, and everything else as cloudpickle does, which knows what a notebook defines."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.layout is torch.strided and not value.requires_grad:
            dense = value.resolve_conj().resolve_neg()
            # Dense memory in any order of dimensions is sent as it lies (channels_last keeps its strides); what has
            # holes or repeats elements is copied first.
            if dense.stride() != torch.empty_like(dense, device="meta").stride():
                dense = dense.clone()
            memory: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(memory), dense.dtype, tuple(dense.shape), dense.stride())
        return super().reducer_override(value)


def _copy(memory: memoryview) -> Any:
    """A copy in memory of torch's own alignment: kernels may add in another order where the alignment is another."""
    copy = torch.empty(len(memory), dtype=torch.uint8).numpy()
    copy[:] = memory
    return copy


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    flat = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)) if len(memory) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).as_strided(shape, stride)


@contextmanager
def _meant() -> Iterator[None]:
    """Silence the warnings about more loaders than cores and about a fork beside threads: the user, and torch, know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _as_it_is(packed: PackedBatch) -> PackedBatch:
    return packed


@dataclass(frozen=True)
class _Begin:
    """The first thing that a loader does."""

    begin: Callable[[], None]
    parent: int

    def __call__(self, number: int) -> None:
        die_with_parent(self.parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its worker decides
        outlive_notice()  # the same: torchrun signals the whole group of a rank
        self.begin()


def _death(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"data-loading process {process.pid} ended with exit status {code}: something in the data called exit"
    name = signal.Signals(-code).name
    why = (
        "by hand, or by the system for want of memory (then use fewer loaders)"
        if name == "SIGKILL"
        else "a crash in native code that the data calls, or someone stopped it"
    )
    return f"data-loading process {process.pid} was ended by {name}: {why}"
