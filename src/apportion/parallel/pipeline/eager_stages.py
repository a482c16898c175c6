"""Stages of a network that run its own forward, each a stretch of it: which modules a cut may lie between, what every
stage holds, and the proof that the stretches are the network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from apportion.comm.world import World
from apportion.core import tree
from apportion.core.data.batch import Batch, rows_of
from apportion.core.modes import evaluating
from apportion.core.strategy import RecordedCuts
from apportion.core.torch_private import buffers_of, modules_of, parameters_of
from apportion.cost_model.partitioning import SECONDS_PER_BYTE, SECONDS_PER_MESSAGE
from apportion.parallel.ops.factored_linear import Products
from apportion.parallel.partition.equivalence import copied, same_outputs
from apportion.parallel.partition.tensor_shards import TensorShard
from apportion.parallel.pipeline.cut_points import RUNS, Places, changing_buffers, names_of, place_of
from apportion.parallel.pipeline.eager_forward import OtherWay, OwnForward, Recorded
from apportion.parallel.pipeline.meta_shapes import CannotRun
from apportion.parallel.pipeline.microbatch import StageLinks
from apportion.parallel.pipeline.single_stage import checkpointed
from apportion.parallel.pipeline.staging import StagePart, Staging
from apportion.parallel.pipeline.whole_batch import normalises, refuse_coupled
from apportion.parallel.replica.initial_model import memory_of
from apportion.parallel.tracing.network import undisturbed

Cut = Callable[[Sequence[str], Callable[[], Places]], Sequence[int]]
"""A function (the calls, a function that measures them) -> the calls that the stages after the first begin with, the
same on all ranks."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@final
class OwnStages(StagePart):
    """This rank's stretch of a network's forward, and how micro-batches pass through it."""

    def __init__(self, model: nn.Module, inputs: Any, world: World, cut: Cut, staging: Staging) -> None:
        super().__init__(world, staging)
        microbatches = staging.microbatches
        few = rows_of(inputs, slice(0, 2))
        stateful = changing_buffers(model, few)
        _refuse_moved(model, stateful)
        if microbatches > 1 or staging.recompute:
            if staging.whole_batch_norm:
                _refuse_whole_batch(model)
            staging.refuse_state(model, stateful)
        if microbatches > 1:  # every rank, so that all say the same
            refuse_coupled(model, inputs, microbatches)
        sample = rows_of(inputs, slice(0, max(2, -(-tree.length(inputs) // microbatches))))
        self._own, self._trains = opened(model, few, world.size, staging.cuts or ())
        try:
            with evaluating(model.modules()), undisturbed(model):
                self._evaluates = self._own.record(few)
            if self._evaluates.calls != self._trains.calls:
                raise CannotRun(f"{type(model).__name__} calls other layers in evaluation than in training")
            refused = _tied(model, self._trains, stateful)
            at = cut(self._trains.calls, lambda: _measured(self._own, self._trains, sample, refused))
            self.cuts = names_of(self._trains.calls, at)
            bounds = [0, *at, len(self._trains.calls)]
            prove(self._own, self._trains, bounds, sample)
        except BaseException:
            self._own.close()
            raise
        self._bounds = bounds[world.rank], bounds[world.rank + 1]
        self.model, self.pieces = held_parameters(model, (self._trains, self._evaluates), bounds, world.rank)
        self._trained = [module for module in model.modules() if module.training]
        self._products = Products(())
        self.ends = StageLinks.connect(world.group(), world.device)

    def run(self, received: Sequence[Any], batch: Batch) -> Any:
        def stretch(*received: Any) -> Any:
            return self._own.stretch(batch.inputs, self._trains, *self._bounds, received)

        return checkpointed(stretch, *received) if self._staging.recompute else stretch(*received)

    def evaluated(self, received: Sequence[Any], batch: Batch) -> Any:
        return self._own.stretch(batch.inputs, self._evaluates, *self._bounds, received)


def _refuse_whole_batch(model: nn.Module) -> None:
    found = [name for name, layer in model.named_modules() if normalises(layer)]
    if found:
        raise CannotRun(
            f'batch_norm="whole" puts together what comes to {found[0]}, which is not known where the forward of '
            f"{type(model).__name__} cannot be followed: use microbatches=1, or layer_placement"
        )


# Which modules are called as one


def opened(model: nn.Module, inputs: Any, size: int, named: Sequence[str]) -> tuple[OwnForward, Recorded]:
    """The network as calls of the modules in its lists of layers; of the layers of all modules where that is too few,
    or where a cut is named within one."""
    called = _called(model, inputs)
    why: CannotRun | None = None
    for opens in (has_lists, _has_layers):
        own = OwnForward(model, _units(model, called, opens))
        try:
            with undisturbed(model), torch.enable_grad():  # a forward may do other things where gradients are asked for
                found = own.record(inputs)
        except CannotRun as error:
            own.close()
            why = error
            continue
        trains = [i for i, m in enumerate(found.modules) if next(m.parameters(), None) is not None]
        if len(trains) >= size and all(place_of(found.calls, cut) is not None for cut in named):
            return own, found
        own.close()
    if why is not None:
        raise why
    if isinstance(named, RecordedCuts):  # of another network: its fingerprint shows that
        return opened(model, inputs, size, ())
    wanted = f"{size} stages" if not named else f"cuts={tuple(named)}"
    raise CannotRun(
        f"layer_placement and pipeline_parallel cut between layers, and {type(model).__name__} calls too few for "
        f"{wanted}: use fewer workers, or data_parallel"
    )


def _called(model: nn.Module, inputs: Any) -> set[nn.Module]:
    """The modules that a forward calls."""
    found: set[nn.Module] = set()
    hooks = [m.register_forward_pre_hook(lambda m, _: found.add(m)) for m in model.modules()]
    try:
        with undisturbed(model):
            tree.call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def has_lists(module: nn.Module) -> bool:
    """Return whether a module holds layers in a list, dict or sequence. Of torch's own modules only these containers
    are looked into."""
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _LISTS):
        return False
    return any(isinstance(m, _LISTS) and next(m.parameters(), None) is not None for m in module.modules())


def _has_layers(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _LISTS):
        return False
    return any(True for m in module.children() if next(m.parameters(), None) is not None)


def _units(model: nn.Module, called: set[nn.Module], opens: Callable[[nn.Module], bool]) -> Mapping[str, nn.Module]:
    """The called modules, by path, that are in no other module than those that are looked into."""

    def within(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            where = f"{path}.{name}".lstrip(".")
            if child in called and not opens(child):
                yield where, child
            else:
                yield from within(where, child)

    found: dict[nn.Module, str] = {}
    for path, module in within("", model):
        found.setdefault(module, path)
    return {path: module for module, path in found.items()}


# Where it is cut


def _tied(model: nn.Module, recorded: Recorded, stateful: Sequence[str]) -> dict[int, str]:
    """The calls before which a cut would put a changing buffer into two stages, and why there can be none."""
    names = {name: t for name, t in model.named_buffers(remove_duplicate=False)}
    found: dict[int, str] = {}
    for name in stateful:
        tensor, owner = names.get(name), name.rpartition(".")[0]
        at = [
            i
            for i, module in enumerate(recorded.modules)
            if (tensor is not None and any(memory_of(b) == memory_of(tensor) for b in module.buffers()))
            or (tensor is None and owner and any(m is model.get_submodule(owner) for m in module.modules()))
        ]
        if not at:
            raise CannotRun(
                f"the forward of {type(model).__name__} changes its own {name} between its layers, once on every "
                "stage: put what changes it into a layer of its own"
            )
        found |= dict.fromkeys(range(at[0] + 1, at[-1] + 1), f"{name}, which changes, would be used on both sides")
    return found


def _measured(own: OwnForward, recorded: Recorded, inputs: Any, because: Mapping[int, str]) -> Places:
    """The calls, timed on these inputs; what lies between them counts as nothing."""
    seconds = [float("inf")] * len(recorded.calls)
    began, ended = list[float](), list[float]()
    hooks = []
    for i, module in enumerate(recorded.modules):
        if module not in recorded.modules[:i]:
            hooks.append(module.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())))
            hooks.append(module.register_forward_hook(lambda *_: ended.append(time.perf_counter())))
    try:
        for _ in range(RUNS):
            began.clear()
            ended.clear()
            with undisturbed(own.model):
                tree.call(own.model, inputs)
            if len(began) == len(ended) == len(seconds):
                seconds = [min(s, b - a) for s, a, b in zip(seconds, began, ended, strict=True)]
    finally:
        for hook in hooks:
            hook.remove()
    seconds = [0.0 if s == float("inf") else s for s in seconds]
    crossing: list[float | None] = [0.0]
    for at in range(1, len(recorded.calls)):
        nbytes = sum(recorded.nbytes[n] for n in recorded.crossing(at))
        crossing.append(None if at in because else SECONDS_PER_MESSAGE + nbytes * SECONDS_PER_BYTE)
    return Places(tuple(recorded.calls), tuple(seconds), tuple(crossing), because)


# The proof


def _refuse_moved(model: nn.Module, changed: Sequence[str]) -> None:
    """Refuse a forward that moves a parameter: a stage keeps the buffers of its own layers, and what else a forward
    changes would not be kept the same by all stages."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    moved = [name for name in changed if name in parameters]
    if moved:
        raise ValueError(
            f"the forward of {type(model).__name__} moves {moved[0]}, a parameter that no optimizer has, and would "
            "move it in each stage and for each micro-batch: use data_parallel"
        )


def prove(own: OwnForward, recorded: Recorded, bounds: Sequence[int], inputs: Any) -> None:
    """Check that the stretches one after the other, each on copies, give what the network gives; a ValueError where
    they do not."""
    model = own.model
    draws = torch.default_generator.get_state()
    with undisturbed(model):
        expected = tree.call(model, copied(inputs))
    torch.default_generator.set_state(draws)
    with undisturbed(model):
        values: Any = []
        try:
            for begin, end in itertools.pairwise(bounds):
                values = copied(own.stretch(copied(inputs), recorded, begin, end, values))
        except OtherWay as error:
            raise CannotRun(str(error)) from error
        except RuntimeError as error:  # torch refuses what it is given within a stretch
            raise CannotRun(f"in stages {type(model).__name__} does not run: use data_parallel") from error
    if not same_outputs(values, expected):
        raise CannotRun(
            f"in stages {type(model).__name__} gives other outputs than as a whole: between its layers it writes in "
            "place to what another stage uses, or it changes with every call; give cuts= elsewhere, or use "
            "data_parallel"
        )


# The parameters and buffers that a stage which runs the network's own forward holds.


def held_parameters(
    model: nn.Module, records: Sequence[Recorded], bounds: Sequence[int], rank: int
) -> tuple[nn.Module, Mapping[str, TensorShard]]:
    """A module with the parameters and buffers that a stage uses, under the plain names, and the shards of those
    parameters that several stages use, of whose gradient each has one term. The parameters that the stage does not hold
    have no numbers in the network from now on."""
    uses = [_used(model, records, begin, end) for begin, end in itertools.pairwise(bounds)]
    everything = set[int]().union(*uses)
    own = uses[rank] | ({id(t) for t in model.parameters()} - everything if rank == 0 else set())
    called = {id(b) for record in records for module in record.modules for b in module.buffers()}
    own |= {id(b) for b in model.buffers() if id(b) not in called}
    holder, pieces = nn.Module(), dict[str, TensorShard]()
    persistent = set(model.state_dict())
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in parameters_of(module).items():
            if p is not None and id(p) in own:
                where = f"{path}.{name}".lstrip(".")
                _owner(holder, path).register_parameter(name, p)
                if sum(id(p) in use for use in uses) > 1:
                    pieces[where] = TensorShard(tuple(p.shape), partial=True)
        for name, b in buffers_of(module).items():
            if b is not None and id(b) in own:
                keeps = f"{path}.{name}".lstrip(".") in persistent
                _owner(holder, path).register_buffer(name, b, persistent=keeps)
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in parameters_of(module).items():
            if p is not None and id(p) not in own:
                meta = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
                parameters_of(module)[name] = empty.setdefault(id(p), meta)
    return holder, pieces


def _owner(holder: nn.Module, path: str) -> nn.Module:
    for step in filter(None, path.split(".")):
        if step not in modules_of(holder):
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    return holder


def _used(model: nn.Module, records: Sequence[Recorded], begin: int, end: int) -> set[int]:
    """The parameters and buffers that the calls of a stage, and the functions between these, use."""
    found: set[int] = set()
    for record in records:
        for module in record.modules[begin:end]:
            found |= {id(t) for t in (*module.parameters(), *module.buffers())}
        for p, places in record.parameters.items():
            if any(begin <= max(0, place - 1) < end for place in places):
                found.add(p)
    return found
