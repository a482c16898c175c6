"""The tensors that a forward pass may change: buffers, by their names, and parameters that no optimizer has.

::

    module._buffers["n"]        n.add_(1), or another tensor in its place: n = n + 1; in ``state_dict()`` or not
    module._parameters["w"]     a momentum encoder, a teacher: without gradient, moved in forward under no_grad

A committed copy of them is kept beside them: an update commits, an interrupted step rolls back, and the state that is
asked for meanwhile is the copy. A frozen network is large and never moves, so its parameters are not copied: they are
watched. torch counts most changes of a tensor, which is looked at after every step; it does not count those through
``.data``, which a sum over the numbers shows after steps 1, 2, 4, 8, ..., and whenever a step is rolled back. What has
moved once is copied from then on. Where it first moves in a step that is rolled back, its earlier value is lost, and
the run goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from apportion.core.torch_private import buffers_of, foreach_copy, parameters_of, persists, version_of
from apportion.errors import StateLost

AS_BUILT, HERE, ELSEWHERE = 0, 1, 2
"""The places where the value of a tensor is to be found, once the process is gone."""
_PLAIN = (Tensor, nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class ForwardTensor:
    """A place in a module with a tensor that a forward pass may change."""

    __slots__ = ("at", "built", "key", "moves", "name", "owner", "parameter", "persistent", "pointer", "version")

    def __init__(self, name: str, owner: dict[str, Any], key: str, *, persistent: bool, parameter: bool) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.persistent, self.parameter = persistent, parameter
        self.moves = False
        """True once the tensor has been seen to differ from the one that was built."""
        self.built = digest(self.tensor) if self.watched else None
        self.mark_unchanged()

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        found: Tensor = self.owner[self.key]
        return found

    @property
    def watched(self) -> bool:
        """True where it is asked whether the tensor moves. A buffer of ``state_dict()`` is copied and saved in any
        case."""
        return self.parameter or not self.persistent

    def mark_unchanged(self) -> None:
        """Note that the tensor which is there is as it should be."""
        self.at = self.tensor
        self.pointer, self.version = self.at.data_ptr(), _version(self.at)

    @property
    def is_unchanged(self) -> bool:
        """True if nothing has been changed since ``mark_unchanged``, as far as torch counts it."""
        now = self.owner[self.key]
        return now is self.at and now.data_ptr() == self.pointer and _version(now) == self.version

    def put(self, value: Tensor) -> None:
        """Put a value into the tensor that should be there; where a forward has put another one there, into a new one,
        since others may use that."""
        now = self.tensor
        if self.parameter:
            if now.data_ptr() == self.pointer:
                now.copy_(value)
            else:
                now.data = value.to(now.device, copy=True)
        elif now is self.at and now.shape == value.shape and now.dtype == value.dtype:
            now.copy_(value)
        else:
            self.owner[self.key] = value.to(now.device, copy=True)
        self.mark_unchanged()


def digest(tensor: Tensor) -> tuple[int, ...] | None:
    """A number pair that is equal for equal numbers; None for a tensor that is not in ordinary memory."""
    if tensor.layout is not torch.strided or type(tensor) not in _PLAIN or tensor.is_meta:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    bits = plain.contiguous().view(-1).view(_INTEGERS[plain.element_size()])
    return tuple(torch.stack([bits.sum(), bits[: len(bits) // 2].sum()]).tolist())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def places(model: nn.Module, trained: Iterable[Tensor] = ()) -> tuple[list[ForwardTensor], dict[str, ForwardTensor]]:
    """The places of a model, each once, buffers before parameters; and the same places by every name that they go by.
    ``trained``: the parameters that updates change."""
    known: dict[tuple[int, str], ForwardTensor] = {}
    seen = {id(p) for p in trained}
    named: dict[str, ForwardTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for holder in (buffers_of(module), parameters_of(module)):
            for key, tensor in holder.items():
                parameter = holder is parameters_of(module)
                if type(tensor) not in _PLAIN or (parameter and id(tensor) in seen):
                    continue
                name = f"{path}.{key}".lstrip(".")
                place = known.get((id(holder), key))
                if place is None:
                    persistent = parameter or persists(module, key)
                    place = ForwardTensor(name, holder, key, persistent=persistent, parameter=parameter)
                    known[id(holder), key] = place
                named[name] = place
    return sorted(known.values(), key=lambda place: place.parameter), named


def moved_tensors(model: nn.Module, trained: Iterable[Tensor], run_pass: Callable[[], Any]) -> list[ForwardTensor]:
    """The places that are not in every strategy's account of buffers, and that a training pass changes: parameters
    without gradient, as a teacher's, and buffers that ``state_dict()`` leaves out. ``run_pass`` makes a pass, of which
    nothing stays. It serves strategies that have to know before the first step: what is moved only later is not
    seen."""
    asked = [place for place in places(model, trained)[0] if place.watched and not place.tensor.requires_grad]
    if not asked:
        return []
    from apportion.parallel.tracing.network import undisturbed  # what it counts FLOPs with takes long to import

    try:
        with undisturbed(model) as changed:
            run_pass()
            names = set(changed())
    except Exception:  # with update= a model need not have a forward; any other mistake is raised by the first step
        return []
    return [place for place in asked if place.name in names]


@final
class ForwardState:
    """The tensors of one model that its forward passes change, with committed copies. ``trained``: the parameters that
    updates change."""

    def __init__(self, model: nn.Module, trained: Iterable[Tensor]) -> None:
        self.places, self._named = places(model, trained)
        self._copied = [p for p in self.places if not p.parameter]
        self._still = [p for p in self.places if p.built is not None]
        self._committed = self._clones()
        self._steps, self._looked = 0, False
        self._began: list[Tensor] | None = None
        self._repeats = False
        self._first: dict[ForwardTensor, Tensor] = {}

    def _clones(self) -> list[Tensor]:
        return [p.tensor.detach().clone() for p in self._copied]

    def begin_batch(self, *, first: bool = False) -> None:
        """Begin a pass over a batch in parts, each of which begins with what is there now. ``first``: no pass has been
        made, so that it is not known what moves."""
        self._began = None if first else self._clones()
        self._repeats = self._repeats or first
        if first or self._first:
            self._first = self._clones_of_still()

    def _clones_of_still(self) -> dict[ForwardTensor, Tensor]:
        return {p: p.tensor.detach().clone() for p in self._still if p.parameter}

    def mark_unchanged(self) -> None:
        """Note that what was done to the model so far was not done by a step."""
        for place in self.places:
            place.mark_unchanged()

    # After a step

    def find_moved(self) -> None:
        """Find the places that have never moved before and that this step has moved."""
        self._looked = True
        if self._still:
            self._steps += 1
            # Digests of all tensors take time, and are made after steps 1, 2, 4, 8 and so on; in between torch's own
            # counts of writes are compared.
            self._find(thorough=self._steps & (self._steps - 1) == 0)

    def _find(self, *, thorough: bool) -> None:
        found = []
        for place in self._still:
            is_unchanged = place.is_unchanged
            if is_unchanged and not thorough:
                continue
            # A parameter that was written to moves, whatever was written: a teacher begins as a copy of its pupil.
            if (place.parameter and not is_unchanged) or digest(place.tensor) != place.built:
                found.append(place)
            elif not is_unchanged:
                place.mark_unchanged()
        for place in found:
            self._still.remove(place)
            place.moves = True
            if place.parameter:
                self._copied.append(place)
                self._committed.append(place.tensor.detach().clone())
                place.mark_unchanged()

    def commit(self) -> None:
        """Commit what is there now."""
        if self.places:  # of a small network without any, a step is short
            self._commit()

    @torch.no_grad()
    def _commit(self) -> None:
        if not self._looked:
            self.find_moved()
        self._looked, self._began, self._first = False, None, {}
        now = [p.owner[p.key] for p in self._copied]
        for i, place in enumerate(self._copied):
            if now[i] is not place.at or (place.parameter and now[i].data_ptr() != place.pointer):
                place.mark_unchanged()
                if now[i].shape != self._committed[i].shape or now[i].dtype != self._committed[i].dtype:
                    self._committed[i] = now[i].detach().clone()
        if now:
            foreach_copy(self._committed, now)

    # Before one

    def roll_back(self) -> None:
        """Undo what was changed after the last commit; StateLost where a parameter has moved for the first time
        since."""
        self.put_back()
        if any(p.parameter and digest(p.tensor) != p.built for p in self._still):
            raise StateLost("parameters that no optimizer has were moved for the first time as a rank was lost")

    @torch.no_grad()
    def put_back(self) -> None:
        """Put the committed values back into all places that have moved before: after passes that were only to look."""
        self._put(self._committed)

    def _put(self, values: list[Tensor]) -> None:
        now = [p.owner[p.key] for p in self._copied]
        if all(t is p.at and not p.parameter for t, p in zip(now, self._copied, strict=True)):
            if now:
                foreach_copy(now, values)
            return
        for place, value in zip(self._copied, values, strict=True):
            place.put(value)

    @torch.no_grad()
    def again(self) -> None:
        """Prepare another part of the same pass, which begins with what the pass began with."""
        for place, value in self._first.items():
            place.put(value)
        moved = [p.name for p in self._still if p.parameter and not self._first and not p.is_unchanged]
        if moved:
            raise ValueError(
                f"{moved[0]}, which no optimizer has, is first moved by the forward of a later step, once for each "
                "part of the batch: move it in the first step too, or compute each batch in one part"
            )
        self._put(self._began if self._began is not None else self._committed)

    # The state

    def copies(self) -> dict[str, Tensor]:
        """The committed copies, by every name of the model's that each goes by; not clones of them."""
        kept = dict(zip(self._copied, self._committed, strict=True))
        return {name: kept[place] for name, place in self._named.items() if place in kept}

    def extra_buffers(self) -> dict[str, Tensor]:
        """The copies of those buffers that have moved, and that ``state_dict()`` does not have."""
        return {n: t for n, t in self.copies().items() if not self._named[n].persistent and self._named[n].moves}

    def settle(self) -> None:
        """Find all that moves, between two steps and before the state is saved."""
        self._find(thorough=True)

    @property
    def strayed(self) -> bool:
        """True if a forward is moving a parameter that never moved before."""
        return any(p.parameter and not p.is_unchanged for p in self._still)

    @torch.no_grad()
    def make_room(self, coming: Mapping[str, Tensor]) -> None:
        """Make room for tensors that are about to be copied into the model: memory of their shape, which is the model's
        own."""
        for name, place in self._named.items():
            now, value = place.tensor, coming.get(name)
            if value is not None and not place.parameter and (now is not place.at or value.shape != now.shape):
                place.put(value)

    @torch.no_grad()
    def loaded(self, beside: Mapping[str, Tensor]) -> None:
        """Take note that the model has been given another state. ``beside``: the part of that state which
        ``state_dict()`` does not have."""
        for name, value in beside.items():
            if name in self._named:
                self._named[name].put(value)
        self.mark_unchanged()
        self._find(thorough=True)
        self._committed = self._clones()
        self._looked, self._began = False, None
        self._first = self._clones_of_still() if self._repeats else {}

    # In memory that outlives this process

    def write(self, into: list[Tensor], codes: Any) -> None:
        """Write what is there now. ``codes`` says for each place whether it was written: a tensor that is as it was
        built is not, nor is one that has another shape by now."""
        self.find_moved()
        now = [p.owner[p.key] for p in self.places]
        for i, place in enumerate(self.places):
            if place.parameter and not place.moves:
                codes[i] = AS_BUILT
            else:
                codes[i] = HERE if now[i].shape == into[i].shape and now[i].dtype == into[i].dtype else ELSEWHERE
        pairs = [(a, b.detach()) for a, b, how in zip(into, now, codes.tolist(), strict=True) if how == HERE]
        if pairs:
            foreach_copy([kept for kept, _ in pairs], [own for _, own in pairs])

    @torch.no_grad()
    def read(self, kept: list[Tensor], codes: Any) -> None:
        """Go on from what was written. StateLost where a tensor is not there, but was in the memory of some process."""
        for place, value, how in zip(self.places, kept, codes.tolist(), strict=True):
            if how == HERE:
                place.put(value)
            elif how == ELSEWHERE or (place.built is not None and digest(place.tensor) != place.built):
                raise StateLost(f"{place.name}, which the forward changes, was in the memory of a rank that is lost")
        self.loaded({})
