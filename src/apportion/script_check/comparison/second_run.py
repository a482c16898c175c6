"""What a run that resumes in a process of its own has lost: the weights, or the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord


def findings(ranks: Sequence[RankRecord]) -> list[Finding]:
    """Returns what is lost between the two runs of a script, for the first rank that loses it; nothing where it was run
    once."""
    if not ranks or not all(record.runs for record in ranks):
        return []
    if not any(map(_goes_on, ranks)):
        return [_not_resumed(ranks[0])]
    return [finding for record in ranks for finding in _lost_state(record)][:1]


def _goes_on(record: RankRecord) -> bool:
    """Whether the second run begins with weights that a step of the first one has left."""
    first, second = record.runs
    left = {step["weights_after"] for step in first.steps}
    return any(begun["weights_before"] in left for begun in _first_steps(second))


def _first_steps(record: RankRecord) -> Iterator[Event]:
    return (step for step in record.steps if step["number"] == 1)


def _not_resumed(record: RankRecord) -> Finding:
    first, second = record.runs
    loads = second.events_of("load", "load_state", "restore")
    how = "loads nothing and " if not loads else ""
    return Finding(
        "not_resumed",
        "warning",
        f"The second run {how}begins with weights that none of the {len(first.steps)} steps of the first one has left.",
        "Load the weights that the first run has saved before the first step, and give with --then the arguments with "
        "which the script does so.",
        step=len(first.steps) + 1,
        site=loads[-1]["site"] if loads else "",
    )


def _lost_state(record: RankRecord) -> Iterator[Finding]:
    first, second = record.runs
    last = {step["optimizer"]: step for step in first.steps}
    for begun in _first_steps(second):
        before = last.get(begun["optimizer"])
        states = {} if before is None else {key: None for state in before["state"].values() for key in state}
        if states and not begun["stateful"] and begun["type"] == last[begun["optimizer"]]["type"]:
            yield Finding(
                "resumed_state",
                "warning",
                f"The second run goes on with the weights of the first one, and its {begun['type']} has lost its state "
                f"({', '.join(states)}) on rank {record.rank}: its next steps are not those of a run that goes on.",
                "Save optimizer.state_dict() with the weights, and load it before the first step.",
                ranks=(record.rank,),
                step=len(first.steps) + 1,
                site=begun["site"],
            )
