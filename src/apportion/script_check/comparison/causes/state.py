"""States of optimizers that were loaded on the wrong ranks."""

from __future__ import annotations

from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.comparison.tensors import listed
from apportion.script_check.findings import Finding


def repeated(evidence: Evidence) -> Finding | None:
    """Returns the finding that all ranks hold the same numbers as their different shards of an optimizer's state, which
    a checkpoint with the shards of one rank leaves behind."""
    steps = [step for step in evidence.steps if step is not None]
    if len(steps) < 2:
        return None
    shards = [step.get("state_shards", {}) for step in steps]
    found = dict[str, list[str]]()
    for name, first in shards[0].items():
        if "Replicate" in steps[0]["placements"].get(name, ""):
            continue  # ranks of one row of the mesh hold the same shard
        for key, digest in first.items():
            if all(other.get(name, {}).get(key) == digest for other in shards[1:]):
                found.setdefault(name, []).append(key)
    if not found:
        return None
    names = evidence.shown(list(found))
    keys = listed(list(dict.fromkeys(key for each in found.values() for key in each)))
    position = steps[0]["step"]
    loads = [event for event in evidence.ranks[0].events_of("load") if event["step"] < position]
    return Finding(
        "loaded_weights",
        "difference",
        f"Before step {evidence.found.shown} the ranks hold the same numbers as their different shards of the "
        f"optimizer's state of {listed(names)} ({keys}): what was loaded holds the shards of one rank.",
        "Save the whole state (get_optimizer_state_dict with full_state_dict) or the shards of all ranks "
        "(torch.distributed.checkpoint), and load each where it belongs.",
        names,
        (),
        evidence.found.shown,
        str(loads[-1]["site"]) if loads else evidence.found.site,
    )
