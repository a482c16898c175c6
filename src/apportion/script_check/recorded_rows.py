"""The steps of which the ranks' rows were recorded, which one process can therefore make on the same rows."""

from __future__ import annotations

from dataclasses import replace

from apportion.script_check.comparison.reading import reading
from apportion.script_check.ranks_pass import RanksPass
from apportion.script_check.record import RankRecord


def with_recorded_rows(ranks_pass: RanksPass) -> RanksPass:
    """Returns the pass with no more steps to compare than those whose batches were recorded by their contents: a large
    batch of images that is read again by its indices is another one where it is augmented at random. Where not even
    those of the first step were, all are read again."""
    records = ranks_pass.passed.records
    steps = min((_steps(record) for record in records), default=0)
    made = max((step["number"] for record in records for step in record.steps), default=0)
    if not 0 < steps < made:
        return ranks_pass
    sentence = (
        f"The batches are large, so the rows of the first {steps} of {made} steps were recorded, and these steps are "
        f"compared with one process."
    )
    return replace(
        ranks_pass, conditions=replace(ranks_pass.conditions, steps=steps), about=(*ranks_pass.about, sentence)
    )


def _steps(record: RankRecord) -> int:
    """The steps of an optimizer that a rank made before it read a batch to train on that was not recorded."""
    trained = {(each.loader, each.number) for each in reading(record) if not each.evaluation}
    unknown = [
        event["step"]
        for event in record.events_of("batch")
        if event.get("left_out") and (event["loader"], event["iteration"]) in trained
    ]
    first = min(unknown, default=None)
    return max((step["number"] for step in record.steps if first is None or step["step"] <= first), default=0)
