"""The protocol of several hosts, simulated: seeded schedules of loss, delay, cuts, stops, deaths and restarts, and
mistakes that they find. ``print(replay(SEED))`` shows what happens in one."""

from __future__ import annotations

import pytest
from protocol_mistakes import MISTAKES
from simulated_runs import Simulation, explore, replay

SCHEDULES, TESTS = 100_000, 25
EACH = SCHEDULES // TESTS
ENOUGH = 6000
"""The schedules in which every planted mistake is found."""


@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.cases(1)
def test_one_driver_a_generation_no_step_twice_and_no_row_lost(number: int) -> None:
    found = explore(range(number * EACH, (number + 1) * EACH))
    assert found is None, replay(found)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.cases(6)
def test_a_mistake_in_the_protocol_is_found(mistake: str) -> None:
    assert explore(range(ENOUGH), MISTAKES[mistake]()) is not None


def test_a_schedule_replays_by_its_number() -> None:
    first, second = replay(30), replay(30)
    assert first == second
    assert first != replay(31)
    assert "FAULT: " in first


def test_a_schedule_that_violates_something_says_what() -> None:
    parts = MISTAKES["the lost are not killed before the table"]()
    found = explore(range(ENOUGH), parts)
    assert found is not None
    assert "violated: a worker that is lost still runs" in replay(found, parts)


def test_the_schedules_hold_what_they_are_to_hold() -> None:
    """A simulation in which nothing happens would find nothing."""
    seen = dict.fromkeys(("changes", "second terms", "tables of fewer", "dismissals"), 0)
    for seed in range(300):
        run = Simulation(seed)
        run.run()
        tables = list(run.tables.values())
        seen["changes"] += any(table.generation >= 2 for table in tables)
        seen["second terms"] += any(table.term.number >= 2 for table in tables)
        seen["tables of fewer"] += any(0 < len(table.slots) < sum(run.counts) for table in tables)
        seen["dismissals"] += any(driver.leaving for driver in run.drivers)
    assert min(seen.values()) >= 15, seen
