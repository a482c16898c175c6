"""The scale of a GradScaler: on all ranks, and in gradients that are clipped before it is taken out of them.

One process clips the same scaled gradients, so that no comparison shows it: Adam hides that all steps have the norm at
which they are clipped, over the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns the first step at which the scales of two ranks differ, and the first clipping of scaled gradients."""
    return [*_scales_differ(ranks), *_clipped_scaled(ranks[0])]


def _scales_differ(ranks: Sequence[RankRecord]) -> list[Finding]:
    first = ranks[0].events_of("scaler")
    for record in ranks[1:]:
        for one, two in zip(first, record.events_of("scaler"), strict=False):
            if one["scale"] != two["scale"]:
                return [
                    Finding(
                        "scaler",
                        "warning",
                        f"After step {one['step']}, the scale of the GradScaler is {one['scale']:.6g} on rank 0 and "
                        f"{two['scale']:.6g} on rank {record.rank}.",
                        "Check for infinite gradients after the average over the ranks, so that all see the same.",
                        ranks=(0, record.rank),
                        step=one["step"] or None,
                        site=one["site"],
                    )
                ]
    return []


def _clipped_scaled(record: RankRecord) -> list[Finding]:
    """A clipping that takes effect between a scaled loss and the division of the same gradients by the scale."""
    scale: float | None = None
    clips = list[Event]()
    for event in record.events_of("scaled", "clip", "unscaled"):
        if event["kind"] == "scaled":
            scale = event["scale"]
        elif event["kind"] == "clip":
            if scale not in (None, 1.0) and (event["norm"] is None or event["norm"] > event["limit"]):
                clips.append(event)
        else:
            names = set(event["names"])
            found = next((clip for clip in clips if names & set(clip["names"]) - {""}), None)
            if found is not None and scale:
                return [_finding(found, scale)]
            scale, clips = None, []
    return []


def _finding(clip: Event, scale: float) -> Finding:
    return Finding(
        "clipped_scaled",
        "warning",
        f"{clip['function']} clips at {clip['limit']:.6g} gradients that are still multiplied by the scale {scale:.6g} "
        f"of the GradScaler: what remains is clipped at {clip['limit'] / scale:.6g}, in one process as well.",
        "Call the scaler's unscale_(optimizer) after backward and before the clipping.",
        step=clip["step"] + 1,
        site=clip["site"],
        factor=1 / scale,
    )
