"""The report about a pass: why its ranks wait for each other, and what its collectives show although none waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.script_check.findings import Finding
from apportion.script_check.hangs import sentences
from apportion.script_check.hangs.causes import Cause, cause, mismatch, unlike_message
from apportion.script_check.hangs.divergence import (
    SILENT,
    Divergence,
    conflicts,
    first_unlike_message,
    surplus,
    traffic,
)
from apportion.script_check.hangs.states import RankState, sequences, stack_lines, states
from apportion.script_check.record import Event, RankRecord


@dataclass(frozen=True)
class Hang:
    """``finding``: why the ranks wait. ``all_wait``: whether each rank that has not ended is in a
    collective. ``lines``: what each rank was doing, with the innermost call and the user's
    frames, to be printed. ``details``: the whole, as plain values."""

    finding: Finding
    all_wait: bool = True
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def hang(
    records: Sequence[RankRecord],
    dumps: Mapping[int, str],
    *,
    died: Sequence[int] = (),
    quiet: float = 0.0,
    folder: str = "",
) -> Hang | None:
    """Returns why the ranks of a pass wait for each other; None where none waits for another.

    ``dumps``: the text of ``faulthandler`` about each rank that had not ended; ``died``: the ranks whose process ended
    without an event ``end``; ``quiet``: for how many seconds nothing went on; ``folder``: of the script.
    """
    found = states(records, dumps, died, folder)
    why = cause(records, found)
    if why is None:
        return None
    lines = list[str]()
    for state in found:
        lines.append(sentences.capitalized(sentences.describe_state(state)))
        if state.stacks:
            lines += [f"    {line}" for line in stack_lines(state.stacks[0], folder)]
    all_wait = not any(state.how in ("loading", "elsewhere") for state in found)
    return Hang(why.finding, all_wait, tuple(lines), _details(why, found, quiet))


def findings(records: Sequence[RankRecord]) -> list[Finding]:
    """Returns what the collectives of ranks that have all ended show: calls that do not fit together, of which the
    backend has taken no notice. None are compared under torch's ``Join``, by which a rank that has no more batches
    answers the collectives of the others with calls of its own."""
    if records and all(record.events_of("join") for record in records):
        return []
    calls = sequences(records)
    found = silent_divergences(records)
    found += [mismatch(each) for each in conflicts(calls, records) if each.what not in SILENT]
    pair = first_unlike_message(traffic(records))
    found += [] if pair is None else [unlike_message(*pair)]
    if not found and all(record.outcome is not None and record.outcome["how"] == "ended" for record in records):
        found = [mismatch(each) for each in surplus(calls)]
    return found


def silent_divergences(records: Sequence[RankRecord]) -> list[Finding]:
    """Returns the divergences that no backend notices, and by which ranks do not wait: unlike tensors are combined."""
    return [mismatch(each) for each in conflicts(sequences(records), records) if each.what in SILENT]


def _details(why: Cause, found: Sequence[RankState], quiet: float) -> dict[str, Any]:
    return {
        "quiet_seconds": round(quiet, 1),
        "first_divergence": None if why.divergence is None else _divergence(why.divergence),
        "ranks": [
            {
                "rank": state.rank,
                "state": state.how,
                "site": state.site,
                "steps": state.steps,
                "collective": _call(state.call),
                "last_collective": _call(state.last),
                "outcome": None if state.outcome is None else {k: v for k, v in state.outcome.items() if k != "kind"},
                "stacks": [
                    {
                        "thread": stack.thread,
                        "frames": [[frame.file, frame.line, frame.function] for frame in stack.frames],
                    }
                    for stack in state.stacks
                ],
            }
            for state in found
        ],
    }


def _divergence(divergence: Divergence) -> dict[str, Any]:
    return {
        "group": divergence.group,
        "sequence": divergence.position,
        "differs": divergence.what,
        "calls": {str(rank): _call(call) for rank, call in divergence.calls.items()},
    }


def _call(call: Event | None) -> dict[str, Any] | None:
    if call is None:
        return None
    fields = ("op", "group", "sequence", "root", "inputs", "outputs", "names", "gradient", "site", "line")
    return {name: call[name] for name in fields}
