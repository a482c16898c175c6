"""The hosts that a run waits for: which, and for how long."""

from __future__ import annotations

from apportion.runtime.hosts.protocol.liveness import AbsentHosts

B, C = 1, 2


def test_without_a_limit_no_host_is_waited_for() -> None:
    absent = AbsentHosts(None)
    assert absent.add(B, 0.0, "lost") is None
    assert not absent
    assert absent.overdue(1e9) is None


def test_a_host_is_waited_for_until_it_takes_part_again() -> None:
    absent = AbsentHosts(60.0)
    assert absent.add(B, 10.0, "b is lost") == "is waited for, 60 s at most"
    assert absent.overdue(70.0) is None
    absent.remove(C)
    assert absent, "another one is back"
    absent.remove(B)
    assert not absent
    assert absent.overdue(1e9) is None


def test_a_host_that_stays_away_longer_ends_the_run_and_none_is_waited_for_any_more() -> None:
    absent = AbsentHosts(60.0)
    absent.add(B, 10.0, "b is lost")
    absent.add(C, 30.0, "c is lost")
    assert absent.overdue(70.1) == "b is lost; it was waited for 60 s (host_wait); resume=True goes on"
    assert not absent
    assert absent.add(B, 80.0, "b is lost") is None


def test_a_host_is_lost_once() -> None:
    absent = AbsentHosts(60.0)
    absent.add(B, 10.0, "the connection was lost")
    absent.add(B, 50.0, "it has said nothing")
    assert absent.overdue(70.1) == "the connection was lost; it was waited for 60 s (host_wait); resume=True goes on"
    absent.add(C, 0.0, "c is lost")
    assert absent.overdue(1e9) is None, "it was given up"


def test_the_time_counts_anew_for_a_host_that_is_lost_again() -> None:
    absent = AbsentHosts(60.0)
    absent.add(B, 10.0, "b is lost")
    absent.remove(B)
    absent.add(B, 50.0, "b is lost")
    assert absent.overdue(100.0) is None
    assert absent.overdue(110.1) is not None
