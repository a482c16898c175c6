"""The mode that sees every function of torch in the script's thread, and hands each kind to the file it concerns."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from apportion.core.torch_private import in_backward, wrap_backward
from apportion.script_check.recording import figures, randomness
from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.figures import Reductions
from apportion.script_check.recording.plain_optimizers import PlainOptimizers
from apportion.script_check.recording.precision import Rewriting
from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.splits import Splits
from apportion.script_check.recording.tensors import digest


class Functions(TorchFunctionMode):
    """Rewrites arguments, leaves dropout out, and records figures."""

    def __init__(
        self,
        recorder: Recorder,
        splits: Splits | None = None,
        plain: PlainOptimizers | None = None,
        constants: Constants | None = None,
    ) -> None:
        super().__init__()
        self._splits, self._plain, self._constants = splits, plain, constants
        self._recorder, self._rewriting = recorder, Rewriting(recorder.plan)
        self._draws = WatchedDraws(recorder)
        install_draws(recorder, self._draws)
        self._reductions = Reductions()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function is torch.device and self._recorder.plan["no_gpu"] and type(next(iter(args), None)) is int:
            return torch.device("cuda", args[0])
        if name == "__get__" or function is torch.device or not (args or kwargs):
            return function(*args, **kwargs)
        if name == "empty" and args and args[0] == (0,):  # torch reads bytes into it, whose element type is a fact
            return function(*args, **kwargs)
        done, result = self._rewriting.replaced(name, args)
        if done:
            return result
        if self._plain is not None and args:
            self._plain.before_change(name, args[0])
        args, kwargs = self._rewriting.arguments(name, args, kwargs)
        if self._constants is not None:
            args, kwargs = self._constants.exchange(name, args, kwargs)
        if self._recorder.plan["no_dropout"]:
            done, result = randomness.dropout(self._recorder, name, args, kwargs)
            if done:
                return result
            args, kwargs = randomness.attention(self._recorder, name, args, kwargs)
        if name in NAMES:
            return self._draws.draw(name, function, args, kwargs)
        result = self._rewriting.result(name, function(*args, **kwargs))
        self._record(name, args, kwargs, result)
        return result

    def _record(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if in_backward():  # a checkpoint computes again what is recorded already
            return
        if self._splits is not None:
            self._splits.record_statistic(name, args, kwargs, result)
        if name in figures.NAMES:
            figures.record_figure(self._recorder, name, args, self._reductions.marked(args[0]) if args else False)
        else:
            self._reductions.follow(args, result)
        if name in figures.CRITERIA and isinstance(result, Tensor):
            figures.record_criterion(self._recorder, name, args, kwargs, result)


def install(recorder: Recorder, splits: Splits | None, plain: PlainOptimizers, constants: Constants) -> None:
    """Enter the mode for the rest of the process."""
    mode = Functions(recorder, splits, plain, constants)
    wrap_backward(mode)
    mode.__enter__()


# Records the random numbers that a script draws, and hands out those of all ranks in a pass that is fed.
#
# Ranks that draw the same numbers for different rows are found by it. Where ranks draw different numbers, as for the
# noise of a loss or for the rows of a batch, one process computes the same only with the ranks' own numbers. The
# orders of rows that a script draws with numpy or Python are recorded by a digest: a script without a loader may draw
# the same one in each epoch.


NAMES = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_",
    "log_normal_",
}  # fmt: skip
"""The functions of torch that draw, but for dropout."""
_CHOOSING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (random, ("choice", "choices")),
    (random.Random, ("choice", "choices", "randrange")),
)
_DRAWING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (random, ("random", "uniform", "gauss", "normalvariate", "betavariate", "randint", "randrange")),
    (np.random, ("rand", "randn", "random", "random_sample", "uniform", "normal", "standard_normal", "beta",
                 "binomial", "randint", "choice")),
)  # fmt: skip
LARGEST = 1 << 16
"""The most elements of a draw whose values are recorded."""
MOST_CALLS = 4096
"""The most draws at one place that are recorded."""
MOST_HANDED = 256
"""The most draws of a fed pass that are held for a checkpoint."""
_SETUP = ("torch/nn/init.py", "torch/utils/data/", "torch/optim/", "torch/distributed/")


class WatchedDraws:
    """The draws of this rank. A place is a line of the script, a function, and whether gradients are computed; the
    n-th draw at a place on one rank belongs to the n-th of another."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers = defaultdict[str, int](int)
        self._handed = dict[tuple[str, str], np.ndarray[Any, Any]]()

    def draw(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw with torch as the script asks, and record the result; in a pass that is fed, with the ranks' numbers.
        A checkpoint that computes a forward again gets the numbers that it had, and is not recorded."""
        self._recorder.draws += 1
        if not self._is_of_script():
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        state = digest((generator if isinstance(generator, torch.Generator) else torch.default_generator).get_state())
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or isinstance(result, DTensor) or result.is_meta:
            return result
        values = None if result.dtype == torch.bfloat16 else result.detach().to("cpu", copy=True).numpy()
        if values is None:
            return result
        # A checkpoint that computes a forward again restores the generator first: its state before the draw identifies
        # the draw of the forward.
        if in_backward():
            fed = self._handed.get((name, state))
        else:
            fed = self._record(name, state, values, given=isinstance(generator, torch.Generator))
            if fed is not None:
                self._handed[name, state] = fed
                if len(self._handed) > MOST_HANDED:
                    del self._handed[next(iter(self._handed))]
        return result if fed is None else _replaced(result, fed, name.endswith("_"))

    def draw_outside_torch(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The same for functions of numpy and Python that draw from their global generators."""
        self._recorder.draws += 1
        if not self._is_of_script():
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        values = np.asarray(result)
        if values.dtype.kind not in "iufb":
            return result
        fed = self._record(name, "", values)
        if fed is None:
            return result
        return fed.astype(values.dtype) if values.ndim else type(result)(fed)

    def record_order(self, name: str, order: str, rows: int) -> None:
        """Record an order of rows that the script itself has drawn, by a digest of it."""
        if not self._is_of_script():
            return
        recorder = self._recorder
        place = f"{recorder.site()} {name}"
        self._numbers[place] += 1
        if self._numbers[place] <= MOST_CALLS:
            gradients = torch.is_grad_enabled()
            recorder.emit(
                "permutation", place=place, site=recorder.site(), gradients=gradients, digest=order, shape=(rows,)
            )

    def _record(
        self, name: str, state: str, values: np.ndarray[Any, Any], *, given: bool = False
    ) -> np.ndarray[Any, Any] | None:
        """Writes one draw down; returns what it is replaced by, None where it stays. ``given``: whether the script
        draws from a generator of its own."""
        recorder = self._recorder
        site, gradients = recorder.site(), torch.is_grad_enabled()
        place = f"{site} {name} {'with' if gradients else 'without'} gradients"
        number = self._numbers[place]
        self._numbers[place] += 1
        if number >= MOST_CALLS:
            return None
        fed = None
        if recorder.feed is not None and not recorder.drawing:
            fed = recorder.feed.draw(place, number, values.shape)
        own = values if fed is None else fed
        recorder.emit(
            "draw",
            place=place,
            number=number,
            function=name,
            site=site,
            gradients=gradients,
            fetching=recorder.drawing == "rows",
            given=given,
            state=state,
            digest=digest(own),
            shape=own.shape,
            values=own if own.size <= LARGEST else None,
        )
        return fed

    def _is_of_script(self) -> bool:
        """Whether a draw is the script's own: not one by which a sampler makes an order."""
        recorder = self._recorder
        if recorder.drawing == "order" or not recorder.active or torch.compiler.is_compiling():
            return False
        return not self._is_setup()

    def _is_setup(self) -> bool:
        """Whether torch itself draws: initial weights, the seed of loader processes."""
        # Past this function, its caller and the method of this class that the wrapper calls.
        frame, is_user_file = sys._getframe(3), self._recorder.is_user_file
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            if any(part in frame.f_code.co_filename for part in _SETUP[:1]) or frame.f_code.co_name == "_next_seed":
                return True
            if not self._recorder.drawing and any(part in frame.f_code.co_filename for part in _SETUP[1:]):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return frame is None


def _replaced(result: Tensor, values: np.ndarray[Any, Any], in_place: bool) -> Tensor:
    with torch.no_grad():
        if values.shape == tuple(result.shape):
            result.detach().copy_(torch.from_numpy(values))
            return result
        if in_place:
            return result
        return torch.from_numpy(values).to(result.dtype).requires_grad_(result.requires_grad)


def install_draws(recorder: Recorder, drawing: WatchedDraws) -> None:
    """Watch the functions of numpy and Python that draw from global generators, and count those that choose, by
    which an order that is drawn differs from a fixed one."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            recorder.draws += 1
            return function(*args, **kwargs)

        return counted

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return drawing.draw_outside_torch(name, function, args, kwargs)

        return watched

    for owner, names in _CHOOSING:
        for name in names:
            setattr(owner, name, counting(getattr(owner, name)))
    for owner, names in _DRAWING:
        for name in names:
            setattr(owner, name, watching(f"{owner.__name__}.{name}", getattr(owner, name)))
    _watch_shuffles(recorder, drawing)


_ORDERING: tuple[tuple[Any, str, int | None], ...] = (
    (random, "shuffle", 0), (random, "sample", None), (random.Random, "shuffle", 1), (random.Random, "sample", None),
    (np.random, "shuffle", 0), (np.random, "permutation", None),
)  # fmt: skip
"""The functions that bring rows into an order, and the place of the argument whose order they change."""


def _watch_shuffles(recorder: Recorder, drawing: WatchedDraws) -> None:
    """Watch the functions that shuffle, those of numpy's generators as well."""

    def watching(name: str, function: Callable[..., Any], place: int | None) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder.draws += 1
            result = function(*args, **kwargs)
            rows = result if place is None else args[place] if len(args) > place else None
            if rows is not None and (order := _digest(rows)) is not None:
                drawing.record_order(name, order, len(rows))
            return result

        return watched

    for owner, name, place in _ORDERING:
        setattr(owner, name, watching(name, getattr(owner, name), place))

    class WatchedGenerator(np.random.Generator):
        """A generator of numpy whose orders are recorded."""

        permutation = watching("permutation", np.random.Generator.permutation, None)
        shuffle = watching("shuffle", np.random.Generator.shuffle, 1)

    default_rng = np.random.default_rng

    @wraps(default_rng)
    def generator(*args: Any, **kwargs: Any) -> np.random.Generator:
        recorder.draws += 1
        made = default_rng(*args, **kwargs)
        return WatchedGenerator(made.bit_generator) if type(made) is np.random.Generator else made

    np.random.default_rng = generator


def _digest(rows: Any) -> str | None:
    """A digest of an order of numbers, names, or tuples of such; None for anything else."""
    if not isinstance(rows, list | np.ndarray) or not len(rows) or len(rows) > LARGEST:
        return None
    if not all(map(_is_name, rows)) if isinstance(rows, list) else rows.dtype.kind not in "iufUS":
        return None
    data = repr(rows).encode() if isinstance(rows, list) else rows.tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _is_name(row: Any) -> bool:
    return isinstance(row, int | float | str) or (isinstance(row, tuple) and all(map(_is_name, row)))
