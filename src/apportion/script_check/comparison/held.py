"""Which parameters the optimizers hold: those of the networks that are trained, or others of the same shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apportion.script_check.comparison.tensors import Array, initial, listed, shown
from apportion.script_check.findings import Finding
from apportion.script_check.record import RankRecord


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
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
    return [
        Finding(
            "stale_optimizer",
            "difference",
            f"{what}: the optimizer holds {len(orphans)} tensors of the same shapes that are not the model's "
            f"parameters "
            "and never have a gradient (it was made before the parameters were replaced, sharded or moved).",
            "Make the optimizer after fully_shard, after the wrap and after any layer is replaced, from the model's "
            "parameters.",
            names,
            (),
            1,
            step["site"],
        )
    ]


def _flattened(record: RankRecord) -> Finding | None:
    """An optimizer was made before the parameters that it holds became parts of flat ones."""
    step = next((step for step in record.steps if step.get("flattened")), None)
    if step is None:
        return None
    names = tuple(shown(name, step["flattened"]) for name in step["flattened"])
    move = "moves" if len(names) == 1 else "move"
    return Finding(
        "stale_optimizer",
        "difference",
        f"{listed(names)} never {move}: the optimizer was made before the model was wrapped in "
        "FullyShardedDataParallel, which makes flat parameters where use_orig_params=True is not passed, and it holds "
        "tensors that are no longer the model's.",
        "Make the optimizer after the wrap, from the wrapped model's parameters, or pass use_orig_params=True.",
        names,
        (),
        step["number"],
        step["made_at"] or step["site"],
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
