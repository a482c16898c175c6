"""The gathering of a state of whole tensors from the ranks that own its parts, and its division among ranks again."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from apportion.comm.group import Group, broadcast_tensors, collective, gather_messages
from apportion.core.json_data import from_plain, to_plain
from apportion.core.python_state.records import joined
from apportion.core.strategy import State
from apportion.errors import StateLost
from apportion.parallel.partition.full_model import FullModel
from apportion.parallel.partition.tensor_shards import ShardLayout


@final
class Resharder:
    """A converter between this rank's part of a state and the whole one. ``pieces``: this rank's, as JSON;
    ``optimizers``: their names."""

    def __init__(
        self, plain: FullModel, layout: ShardLayout, pieces: Mapping[str, Any], rank: int, optimizers: Sequence[str]
    ) -> None:
        self._plain, self._layout, self._rank, self._optimizers = plain, layout, rank, optimizers
        self.pieces = pieces

    @collective
    def gathered(self, own: State, group: Group, device: torch.device) -> State:
        """Return the whole state, on every rank. Called by all of them, with what each holds."""
        if group.size == 1:
            return own
        mine = {"model": {self._plain.first[k]: t for k, t in own.model.items()}, "optimizer": own.optimizer}
        owned = self._layout.owned(self._rank)

        def received(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
            kept = {k: t.contiguous() for k, t in tensors.items() if self._parameter(self._layout, k) in owned}
            for rank in range(group.size):
                own_turn = kept if rank == self._rank else None
                yield rank, broadcast_tensors(own_turn, group, source=rank, device=device)

        found = {part: self._join(self._layout, received(tensors)) for part, tensors in mine.items()}
        slots = gather_messages(own.settings.get("slots"), group, device=device)
        turns = (own.buffers if rank == self._rank else None for rank in range(group.size))
        gathered = [broadcast_tensors(turn, group, source=rank, device=device) for rank, turn in enumerate(turns)]
        records = gather_messages(own.settings.get("python", {}), group, device=device)
        python = (own.python if rank == self._rank else None for rank in range(group.size))
        values = [broadcast_tensors(turn, group, source=rank, device=device) for rank, turn in enumerate(python)]
        record, tensors = joined([*zip(records, values, strict=True)])
        return replace(
            own,
            **self._named(found),
            settings={**_with_slots(own.settings, slots), "python": record},
            buffers=dict(ChainMap(*gathered)),
            python=tensors,
        )

    def join_parts(self, parts: Sequence[tuple[State, Any]]) -> State:
        """Return the whole state, put together from all ranks' parts in rank order, each with its pieces, as it was
        divided then."""
        layout = ShardLayout.from_plain([pieces for _, pieces in parts])
        found = {
            part: self._join(layout, ((rank, getattr(state, part)) for rank, (state, _) in enumerate(parts)))
            for part in ("model", "optimizer")
        }
        first = parts[0][0]
        slots = [state.settings.get("slots") for state, _ in parts]
        buffers = dict(ChainMap(*(state.buffers for state, _ in parts)))
        record, tensors = joined([(state.settings.get("python", {}), state.python) for state, _ in parts])
        for name, reason in record.get("lost", {}).items():
            raise StateLost(f"{name}, which training changes, has died with a rank: it is {reason}")
        settings = {**_with_slots(first.settings, slots), "python": record}
        return replace(first, **self._named(found), settings=settings, buffers=buffers, python=tensors)

    def own_part(self, state: State) -> State:
        """Return this rank's part of a whole state, with those of the model's names that are in the state given."""
        model = {key: self._slice(self._plain.first[key], t) for key, t in state.model.items()}
        optimizer = {key: self._slice(self._parameter(self._layout, key), t) for key, t in state.optimizer.items()}
        return replace(state, model=_present(model), optimizer=_present(optimizer))

    def replicated(self, own: State) -> dict[str, Tensor]:
        """Return the tensors of this rank's part that others hold too: the same elements in the same order, under the
        same name."""
        found = {}
        for part in ("model", "optimizer"):
            for key, tensor in getattr(own, part).items():
                holders = self._layout.holders[self._parameter(self._layout, key)]
                held = [piece.places() for _, piece in holders]
                places = held[[rank for rank, _ in holders].index(self._rank)]
                if tensor.numel() and held.count(places) > 1:
                    which = "" if places is None else f", piece {list(dict.fromkeys(held)).index(places)}"
                    found[f"{part}/{key}{which}"] = tensor
        return found

    def _slice(self, name: str, tensor: Tensor) -> Tensor | None:
        piece = dict(self._layout.holders[name]).get(self._rank)
        if piece is None:
            return None
        return piece.slice_of(tensor) if tensor.shape == piece.shape else tensor

    def _named(self, found: Mapping[str, dict[str, Tensor]]) -> dict[str, Any]:
        """Return the state's tensors by all names that they go by."""
        model: dict[str, Tensor] = {}
        for key, first in self._plain.first.items():
            model[key] = found["model"][first] if key == first else found["model"][first].clone()
        return {"model": model, "optimizer": found["optimizer"]}

    def _join(self, layout: ShardLayout, parts: Iterable[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """Join every rank's pieces to whole tensors, by name."""
        joined: dict[str, Tensor] = {}
        for rank, tensors in parts:
            for key, tensor in tensors.items():
                piece = dict(layout.owners(self._parameter(layout, key))).get(rank)
                if piece is None:
                    continue
                if (
                    piece.index is None or piece.local_shape != tensor.shape
                ):  # a slot of another shape is the parameter's
                    joined.setdefault(key, tensor)
                    continue
                if key not in joined:
                    joined[key] = tensor.new_empty(piece.shape)
                piece.put(tensor, joined[key])
        return joined

    def _parameter(self, layout: ShardLayout, key: str) -> str:
        """Return the name of the parameter or buffer that a tensor belongs to: the key itself, or that of the slot's
        parameter."""
        if key in layout.holders:
            return key
        name = key.rpartition("/")[0]
        found = (name.removeprefix(f"{owner}/") for owner in self._optimizers if name.startswith(owner))
        return next(n for n in found if n in layout.holders)


def _present(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {key: t for key, t in tensors.items() if t is not None}


def _with_slots(settings: Mapping[str, Any], gathered: Sequence[Any]) -> dict[str, Any]:
    """Return the settings together with what the ranks' optimizers keep beside tensors, by optimizer and parameter."""
    merged: dict[str, dict[str, Any]] = {}
    for owners in (from_plain(part) for part in gathered if part):
        for owner, slots in owners.items():
            merged[owner] = {**slots, **merged.get(owner, {})}
    return dict(settings) | ({"slots": to_plain(merged, "optimizer")} if merged else {})
