"""Finds the random numbers that a network draws while it computes: dropout is turned off for a proof and named;
anything else is found. Tensors that depend on parameters or inputs are distinguished from constants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apportion.core import tree
from apportion.core.rng import mix, plain_rng_states, strategy_is_drawing
from apportion.core.torch_private import DispatchMode
from apportion.runtime.proof.row_draws import RowSeeds, drawn_alike, drawn_by_row, has_rows, is_ambiguous

NARROW = (torch.float32, torch.bfloat16, torch.float16)
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def without_dropout() -> Iterator[set[str]]:
    """Makes dropout pass everything on, in this process. Gives the functions that would have dropped something."""
    used: set[str] = set()
    functional: Any = nn.functional
    originals = {name: getattr(functional, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}

    def passing(name: str) -> Callable[..., Any]:
        def pass_on(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if training and p > 0:
                used.add(f"{name}(p={p:g})")
            return input

        return pass_on

    def attention(*arguments: Any, **options: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        options = {**dict(zip(names, arguments, strict=False)), **options}
        if options.get("dropout_p", 0.0) > 0:
            used.add(f"attention(dropout_p={options['dropout_p']:g})")
        return originals["scaled_dot_product_attention"](**{**options, "dropout_p": 0.0})

    for name in _DROPOUTS:
        setattr(functional, name, passing(name))
    functional.scaled_dot_product_attention = attention
    try:
        yield used
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def silence_recurrent_dropout(model: nn.Module) -> set[str]:
    """Sets dropout between the layers of nn.LSTM, GRU and RNN, which is inside their kernels, to 0; returns where it
    was."""
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
            found.add(f"{name or type(layer).__name__}(dropout={layer.dropout:g})")
            layer.dropout = 0.0
    return found


@dataclass(slots=True)
class _Call:
    """A call that is under way, of a layer or of a function of the workload."""

    name: str
    """The name of the layer with its class, or of the function."""
    kind: str
    """The class of the layer, or the function: what is drawn in a layer that is accepted is a function of it, since
    strategies may call one layer by several names."""
    rows: RowSeeds
    accepted: bool
    """True where its draws are accepted, or those of what has called it."""
    plain: tuple[object, ...] = ()
    """What Python's and numpy's generators were at as it began, and as the last call within it ended."""
    draws: int = 0


class Observed(DispatchMode):
    """Sees every operation of a model's forward passes, and of the workload's loss and update.

    It finds which ones draw random numbers, and (in float64) which ones give less than float64 of what depends on
    parameters and inputs. Draws for each row of a batch are made a function of the row, so that they are the same on
    every number of ranks; those of accepted layers and functions are one number for all rows.
    """

    def __init__(self, accepted: Collection[str] = (), *, coarse: bool = False) -> None:
        """``accepted``: the names of classes and functions whose draws are accepted; ``coarse``: rounding may make so
        much of a row's numbers that rows cannot be distinguished by them, so that all rows have one number."""
        super().__init__()
        self._coarse = coarse
        self.row_draws: set[str] = set()
        """What draws for each row, and was given the same numbers for the same row."""
        self.draws: set[str] = set()
        """What draws numbers that each rank has for itself."""
        self.accepted_draws: set[str] = set()
        """What draws numbers that the user has accepted."""
        self.plain_draws: set[str] = set()
        """What draws from Python's and numpy's generators."""
        self.narrow: set[str] = set()
        self._accepted = frozenset(accepted)
        self._calls: list[_Call] = []
        self._values = ComputedValues()

    def __deepcopy__(self, memo: object) -> Observed:
        """Returns itself: a copied model is watched as the original is."""
        return self

    def watch(self, model: nn.Module) -> None:
        """Watches the model from now on, whichever of its layers is called first."""
        for name, layer in model.named_modules():
            layer.register_forward_pre_hook(partial(self._begin_layer, name), with_kwargs=True)
            layer.register_forward_hook(self._end, always_call=True)

    @contextmanager
    def within(self, function: Any, field: str, inputs: Any) -> Iterator[None]:
        """Watches a call of a function of the workload, which is in this field of it."""
        own = getattr(function, "__name__", type(function).__name__)
        self._begin("", own if own.isidentifier() else field, bool({own, field} & self._accepted), inputs)
        try:
            yield
        finally:
            self._end()

    def _begin_layer(self, name: str, layer: nn.Module, *inputs: Any) -> None:
        self._values.mark_layer(layer, () if self._calls else inputs)
        kind = next(c.__name__ for c in type(layer).__mro__ if not c.__name__.startswith("FSDP"))
        self._begin(name, kind, kind in self._accepted, inputs)

    def _begin(self, name: str, kind: str, accepted: bool, inputs: Any) -> None:
        if not self._calls:
            self.__enter__()
        else:
            self._note_plain()
            # What an accepted layer calls is accepted with it.
            accepted = accepted or self._calls[-1].accepted
        called = f"{name} ({kind})" if name else kind
        self._calls.append(_Call(called, kind, RowSeeds(inputs), accepted, plain_rng_states()))

    def _end(self, *_: Any) -> None:
        self._note_plain()
        self._calls.pop()
        if not self._calls:
            self.__exit__(None, None, None)
        else:
            self._calls[-1].plain = plain_rng_states()

    def _note_plain(self) -> None:
        """Notes what the innermost call has drawn from Python's and numpy's generators since it was looked at last."""
        call, now = self._calls[-1], plain_rng_states()
        for name, before, after in zip(("random", "numpy.random"), call.plain, now, strict=True):
            if before != after:
                (self.accepted_draws if call.accepted else self.plain_draws).add(f"{name} in {call.name}")
        call.plain = now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), func.overloadpacket.__name__
        drawing = torch.Tag.nondeterministic_seeded in func.tags
        if drawing and self._calls and not strategy_is_drawing() and _draws(func, args, given):
            result = self._drawn(func, args, given)
        else:
            result = func(*args, **given)
        computed = self._values.record_operation(func, args, given, result)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if computed and isinstance(first, torch.Tensor) and first.dtype in NARROW:
            self.narrow.add(name)
        return result

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._calls[-1]
        what = f"{func.overloadpacket.__name__} in {call.name}"
        call.draws += 1
        if call.accepted:
            self.accepted_draws.add(what)
            result = drawn_alike(func, args, kwargs, mix(*call.kind.encode(), call.draws))
        else:
            result = NotImplemented
            if not self._coarse:
                result = drawn_by_row(func, args, kwargs, call.rows, call.draws)
            elif has_rows(func, args, kwargs, call.rows):
                result = drawn_alike(func, args, kwargs, mix(*call.kind.encode(), call.draws))
            if result is NotImplemented or is_ambiguous(func, args, kwargs, call.rows):
                self.draws.add(what)
            else:
                self.row_draws.add(what)
        return func(*args, **kwargs) if result is NotImplemented else result


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether an operation draws: one that may (a dropout inside an attention) does so only with a probability
    above 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


WIDE = (torch.float64, torch.complex128)


class ComputedValues:
    """Follows the operations of a forward pass in float64, by the memory that tensors lie in.

    A value is computed where it depends on parameters, buffers or floating inputs. What depends on numbers that the
    forward makes by itself (a causal mask, an index, a random number) is a constant: the same on every rank, however
    coarsely it is rounded. Whole numbers and truth values are exact, and nothing that they are made into is computed.
    """

    def __init__(self) -> None:
        self._computed: set[int] = set()
        self._constant: set[int] = set()

    def mark_layer(self, layer: nn.Module, inputs: Any = ()) -> None:
        """Marks a layer that is about to be called: its own parameters and buffers are computed. ``inputs``:
        those of the network, which are computed too."""
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        found = {place for t in (*own, *tree.tensors(inputs)) if (place := _place(t))}
        self._computed |= found
        self._constant -= found

    def is_computed(self, tensor: Tensor) -> bool:
        """Tells whether a tensor depends on parameters or inputs. One of unknown origin does where it has float64,
        which is what they have."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        place = _place(tensor)
        return place in self._computed or (tensor.dtype in WIDE and (not place or place not in self._constant))

    def record_operation(self, func: Any, args: Iterable[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Records an operation with its result; tells whether that is computed."""
        computed = any(self.is_computed(t) for t in _tensors((args, kwargs)))
        returns = func._schema.returns
        for at, one in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if not isinstance(one, Tensor) or not (place := _place(one)):
                continue
            fresh = at < len(returns) and returns[at].alias_info is None
            if computed:
                self._computed.add(place)
                self._constant.discard(place)
            elif fresh:  # memory that held something else before
                # The allocator reuses addresses: a mark of the tensor that was there before must not survive.
                self._computed.discard(place)
                self._constant.add(place)
        return computed


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _place(tensor: Tensor) -> int:
    """Returns the address of the memory that a tensor lies in; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one of another class
        return 0
