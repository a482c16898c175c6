"""The records of processes that each have a part of the network, put together into one record of the whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from apportion.core.python_state.records import Record
from apportion.core.replica_digest import tensor_digest

_DIFFERS = "not the same on every rank"


def joined(parts: Sequence[tuple[Record, Mapping[str, Tensor]]]) -> tuple[Record, dict[str, Tensor]]:
    """Put together what processes have recorded that each have a part of the network. What several of them have in
    different states is lost; what has changed in one since all of them loaded it is that one's."""
    found: Record = {"entries": {}, "objects": {}}
    tensors: dict[str, Tensor] = {}
    lost: dict[str, str] = {}

    def add(place: dict[str, Any], key: str, stored: Any, name: str) -> None:
        if place.setdefault(key, stored) != stored:
            lost[name] = _DIFFERS

    active = {name for record, _ in parts for name in _recorded(record) - {*record.get("resting", ())}}
    for record, values in (_without_resting(*part, active) for part in parts):
        lost |= record.get("lost", {})
        found |= {"by rows": record["by rows"]} if "by rows" in record else {}
        for name, stored in record.get("objects", {}).items():
            add(found["objects"], name, stored, name)
        for scope, entries in record.get("entries", {}).items():
            for key, stored in entries.items():
                add(found["entries"].setdefault(scope, {}), key, stored, f"{scope}.{key}")
        for name, tensor in values.items():
            if tensor_digest(tensors.setdefault(name, tensor)) != tensor_digest(tensor):
                lost[name] = _DIFFERS
    if lost:
        found["lost"] = lost
    return found, tensors


def _recorded(record: Record) -> set[str]:
    """The names of all that a record has."""
    entries = {f"{scope}.{key}" for scope, keys in record.get("entries", {}).items() for key in keys}
    return entries | {*record.get("objects", {})}


def _without_resting(
    record: Record, tensors: Mapping[str, Tensor], active: Collection[str]
) -> tuple[Record, Mapping[str, Tensor]]:
    """A record without what its process has only loaded, where another process has changed that since."""
    resting = {*record.get("resting", ())} & {*active}
    if not resting:
        return record, tensors
    entries = {
        scope: {key: stored for key, stored in keys.items() if f"{scope}.{key}" not in resting}
        for scope, keys in record["entries"].items()
    }
    objects = {name: stored for name, stored in record["objects"].items() if name not in resting}
    stays = {name: t for name, t in tensors.items() if name not in resting and name.partition("[")[0] not in resting}
    return {**record, "entries": entries, "objects": objects}, stays
