"""Findings about parameters: ranks that begin with different ones, networks that have others after a load than were
saved, and optimizers that hold other tensors than the parameters of the trained networks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from apportion.script_check.comparison.tensors import Array, initial, listed, shown
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord


def findings(ranks: Sequence[RankRecord], union: RankRecord) -> list[Finding]:
    """Returns that the ranks begin, or after a load go on, with different weights. Networks of which each rank holds a
    part of its own, such as the stages of a pipeline, are not compared: their tensors are not those of one process
    under their names, or are those of others."""
    networks = [record.events_of("network") for record in ranks]
    values = {_value(array) for event in union.events_of("network") for array in event["weights"].values()}
    for events in zip(*networks, union.events_of("network"), strict=False):
        *begun, one = events
        if one["step"] >= len(union.steps) or any(
            event["label"] != one["label"] or _held_in_parts(event, one) for event in begun
        ):
            continue
        for rank, event in enumerate(begun[1:], 1):
            if differs := _differing(event, begun[0], one, values):
                return [_finding(rank, event, differs)]
    return []


def _differing(event: Event, first: Event, one: Event, values: Collection[bytes]) -> list[str]:
    """The trained tensors that are neither those of rank 0 nor those of one process, under any name."""
    return [
        name
        for name, array in event["weights"].items()
        if name in event["trainable"]
        and not np.allclose(array, first["weights"][name], 1e-9, 1e-12, equal_nan=True)
        and not np.allclose(array, one["weights"][name], 1e-9, 1e-12, equal_nan=True)
        and _value(array) not in values
    ]


def _value(array: Array) -> bytes:
    return repr(array.shape).encode() + array.tobytes()


def _finding(rank: int, event: Event, differs: Sequence[str]) -> Finding:
    weights, later = event["weights"], bool(event["step"])
    names = tuple(shown(name, list(weights)) for name in differs)
    verb = f"goes on after step {event['step']}" if later else "begins"
    when = f"before step {event['step'] + 1}" if later else "before the first step"
    remedy = (
        "Load the weights on all ranks, or broadcast those of rank 0 after the load."
        if later
        else "Broadcast the weights of rank 0 before the first step, or seed all ranks alike when the network is made; "
        "DistributedDataParallel broadcasts what it wraps."
    )
    sentence = (
        f"Rank {rank} {verb} with other weights than rank 0: {len(differs)} of {len(weights)} tensors differ {when}, "
        f"{names[0]} first."
    )
    site = str(event["sites"].get(differs[0].rpartition(".")[0]) or event["site"])
    return Finding("different_beginnings", "difference", sentence, remedy, names, (rank,), event["step"] + 1, site)


def _held_in_parts(event: Event, one: Event) -> bool:
    """Whether a rank's network is a part of that of one process."""
    weights, whole = event["weights"], one["weights"]
    return set(weights) != set(whole) or any(weights[name].shape != whole[name].shape for name in weights)


def loaded_weights(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns, for the first rank and load with it, that a network has other weights after a load than at the save."""
    for record in ranks:
        saves = dict[str, tuple[Event, dict[str, Array]]]()
        weights = dict[str, Array]()
        loaded: Event | None = None
        for event in record.events:
            if event["kind"] == "network":
                if loaded is not None and loaded["path"] in saves:
                    save, then = saves[loaded["path"]]
                    if differs := _changed_by_load(event["weights"], then, save):
                        return [_loaded_finding(record.rank, loaded, differs, event["weights"], then)]
                weights |= event["weights"]
            elif event["kind"] == "step":
                weights |= {**event["weights"], **event["buffers"]}
                loaded = None
            elif event["kind"] == "save":
                saves[event["path"]] = (event, dict(weights))
            elif event["kind"] == "load":
                loaded = event
                elsewhere = _saved_elsewhere(ranks, event, record)
                own = saves.get(event["path"])
                if elsewhere is not None and (own is None or own[0]["step"] < elsewhere[0]["step"]):
                    saves[event["path"]] = elsewhere
    return []


def _saved_elsewhere(
    ranks: Sequence[RankRecord], loaded: Event, record: RankRecord
) -> tuple[Event, dict[str, Array]] | None:
    """The last save by another rank, before a load, of the file that is loaded, and what this rank's weights were after
    as many steps."""
    others = [event for other in ranks if other is not record for event in other.events_of("save")]
    saves = [event for event in others if event["path"] == loaded["path"] and event["step"] <= loaded["step"]]
    if not saves:
        return None
    last = max(saves, key=lambda event: int(event["step"]))
    before = dict[str, Array]()
    for step in record.steps:
        if step["step"] <= last["step"]:
            before |= {**step["weights"], **step["buffers"]}
    return last, before


def _changed_by_load(found: Mapping[str, Array], saved: Mapping[str, Array], save: Event) -> list[str]:
    """The tensors that differ, where the network is the one that was saved: the same names and shapes, and values that
    the file holds wholly or in part."""
    common = [name for name in found if name in saved]
    if len(common) < len(found) or any(found[name].shape != saved[name].shape for name in common):
        return []
    differs = [name for name in common if not np.allclose(found[name], saved[name], rtol=1e-6, atol=1e-12)]
    return [name for name in differs if not save["tensors"] or _holds(save["tensors"], saved[name])]


def _holds(tensors: Mapping[str, Array], values: Array) -> bool:
    """Whether a file holds a tensor's values: all of them, or its first rows."""
    for tensor in tensors.values():
        if tensor.shape[1:] == values.shape[1:] and tensor.ndim and 0 < len(tensor) <= len(values):
            if np.allclose(tensor, values[: len(tensor)], rtol=1e-6, atol=1e-12):
                return True
        elif not tensor.ndim and tensor.shape == values.shape and np.allclose(tensor, values, rtol=1e-6):
            return True
    return False


def _loaded_finding(
    rank: int, loaded: Event, differs: Sequence[str], found: Mapping[str, Any], saved: Mapping[str, Any]
) -> Finding:
    names = tuple(shown(name, list(found)) for name in differs)
    repeats = _repeats(found[differs[0]], saved[differs[0]])
    sentence = (
        f"After the load at {loaded['site']}, {len(differs)} of {len(found)} tensors differ from what "
        f"they were when the "
        f"file was saved, {names[0]} first{repeats}."
    )
    remedy = (
        "Save whole tensors (full_tensor(), get_model_state_dict with full_state_dict) or the shards of all ranks "
        "(torch.distributed.checkpoint), and load each where it belongs."
    )
    return Finding(
        "loaded_weights", "difference", sentence, remedy, names, (rank,), int(loaded["step"]) + 1, str(loaded["site"])
    )


def _repeats(found: Array, saved: Array) -> str:
    rows = len(found) if found.ndim else 0
    for parts in range(2, rows + 1):
        size = rows // parts
        if rows % parts == 0 and all(
            np.allclose(found[:size], found[at * size : (at + 1) * size], rtol=1e-9) for at in range(1, parts)
        ):
            if np.ptp(found) and not np.allclose(saved[:size], saved[size : 2 * size]):
                return f": its rows {size} to {rows - 1} repeat rows 0 to {size - 1}, so that the file held one shard"
            break
    return ""


def stale_optimizers(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns that optimizers hold tensors which do not belong to any network, while parameters of the same shapes are
    held by no optimizer."""
    record = ranks[0]
    if not record.steps:
        return []
    if found := _flattened(record):
        return [found]
    weights = initial(record)
    trainable = {name for event in record.events_of("network") for name in event["trainable"]}
    held = {name for step in record.steps for name in step["weights"]}
    left = [name for name in weights if name in trainable and name not in held]
    orphans = _orphans(record, set(weights))
    if not left or not orphans:
        return []
    missing = Counter(weights[name].shape for name in left) - Counter(array.shape for array in orphans.values())
    if missing:
        return []
    names = tuple(shown(name, list(weights)) for name in left)
    everything = len(left) == len(trainable)
    move = "moves" if len(names) == 1 else "move"
    what = "No parameter of the network moves" if everything else f"{listed(names)} never {move}"
    step = next(step for step in record.steps if any(name in step["weights"] for name in orphans))
    sentence = (
        f"{what}: the optimizer holds {len(orphans)} tensors of the same shapes that are not the model's "
        f"parameters "
        "and never have a gradient (it was made before the parameters were replaced, sharded or moved)."
    )
    remedy = (
        "Make the optimizer after fully_shard, after the wrap and after any layer is replaced, from the model's "
        "parameters."
    )
    return [Finding("stale_optimizer", "difference", sentence, remedy, names, (), 1, step["site"])]


def _flattened(record: RankRecord) -> Finding | None:
    """An optimizer was made before the parameters that it holds became parts of flat ones."""
    step = next((step for step in record.steps if step.get("flattened")), None)
    if step is None:
        return None
    names = tuple(shown(name, step["flattened"]) for name in step["flattened"])
    move = "moves" if len(names) == 1 else "move"
    sentence = (
        f"{listed(names)} never {move}: the optimizer was made before the model was wrapped in "
        "FullyShardedDataParallel, which makes flat parameters where use_orig_params=True is not passed, and it holds "
        "tensors that are no longer the model's."
    )
    remedy = "Make the optimizer after the wrap, from the wrapped model's parameters, or pass use_orig_params=True."
    return Finding(
        "stale_optimizer", "difference", sentence, remedy, names, (), step["number"], step["made_at"] or step["site"]
    )


def _orphans(record: RankRecord, known: set[str]) -> dict[str, Array]:
    """The tensors of optimizers that belong to no network, have no gradient in any step, and never change."""
    first, last, moved = dict[str, Array](), dict[str, Array](), set[str]()
    for step in record.steps:
        for name, array in step["weights"].items():
            if name in known:
                continue
            first.setdefault(name, array)
            last[name] = array
            if step["gradients"].get(name) is not None:
                moved.add(name)
    return {name: last[name] for name in first if name not in moved}
