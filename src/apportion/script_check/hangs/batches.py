"""The number of batches that each rank has read, where it explains why one of them left a loop earlier."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.script_check.record import RankRecord


def uneven_batches(records: Sequence[RankRecord]) -> str:
    """Returns a sentence about the last iteration over a loader that one rank has read to its end while another rank
    had more batches; an empty string where all ranks read the same number."""
    counts = [_counts(record) for record in records]
    ends = [{(e["loader"], e["iteration"]) for e in record.events_of("exhausted")} for record in records]
    for place in sorted({place for each in ends for place in each}, key=lambda each: -each[1]):
        for record, own, ended in zip(records, counts, ends, strict=True):
            others = [(each[place], other.rank) for each, other in zip(counts, records, strict=True) if place in each]
            most, rank = max(others, default=(0, 0))
            if place in ended and own.get(place, 0) < most:
                return (
                    f"The loader of {place[0]} gave rank {record.rank} {own.get(place, 0)} batches and rank {rank} at "
                    f"least {most} in epoch {place[1] + 1}."
                )
    return ""


def _counts(record: RankRecord) -> dict[tuple[str, int], int]:
    found = dict[tuple[str, int], int]()
    for event in record.events_of("batch"):
        place = event["loader"], event["iteration"]
        found[place] = found.get(place, 0) + 1
    return found
