"""Messages and sums by hand: which link, whose port, how often each byte passes it, and what was measured instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from apportion.cost_model.cluster import Cluster, Device, Link, Moved, Placement, Port, Rate
from apportion.cost_model.collectives import all_gather, all_reduce, broadcast, message, reduce_scatter
from apportion.cost_model.cost import Span
from apportion.cost_model.simulator import SimulatedTask, makespan, simulate, terms

RATE = Rate(threads=1, together=1, flops=1e9, bytes_per_second=1e9)
GB = 1e9
Collective = Callable[[Placement, Sequence[int], float], float]


def device(host: str, number: int = 0) -> Device:
    return Device(name=f"{host}/gpu{number}", host=host, kind="cuda", model="gpu", memory_bytes=1 << 40, rates=(RATE,))


def place(
    *hosts: int,
    port: Port = "device",
    latency: float = 0.0,
    bandwidth: float = GB,
    measured: tuple[Moved, ...] = (),
    within: float = 2 * GB,
) -> Placement:
    """A rank on each of so many GPUs of each host; what joins all is as it is given, each host has a link inside."""
    devices = tuple(device(f"h{h}", n) for h, many in enumerate(hosts) for n in range(many))
    names = tuple(d.name for d in devices)
    links = [Link(kind="net", devices=names, latency=latency, bandwidth=bandwidth, port=port, measured=measured)]
    if len(hosts) > 1:
        for h in range(len(hosts)):
            own = tuple(d.name for d in devices if d.host == f"h{h}")
            links.append(Link(kind="inside", devices=own, latency=0.0, bandwidth=within))
    return Placement(cluster=Cluster(name="c", devices=devices, links=tuple(links)), devices=names)


@pytest.mark.parametrize(("collective", "seconds"), [(all_reduce, 6.0), (all_gather, 3.0), (reduce_scatter, 3.0)])
def test_a_ring_of_four_passes_three_quarters_of_the_bytes_each_way(collective: Collective, seconds: float) -> None:
    """4 GB at 1 GB/s: 3/4 of them to be summed, and as many again to be told. Each way three messages."""
    assert collective(place(4), range(4), 4 * GB) == pytest.approx(seconds)
    assert collective(place(4, latency=0.5), range(4), 4 * GB) == pytest.approx(1.5 * seconds)
    assert collective(place(4), (2,), 4 * GB) == 0.0


def test_a_port_that_all_share_is_divided_among_them() -> None:
    assert all_reduce(place(4, port="all"), range(4), 4 * GB) == pytest.approx(4 * 6.0)
    assert all_reduce(place(4, port="host"), range(4), 4 * GB) == pytest.approx(4 * 6.0)
    assert all_reduce(place(1, 1, port="host"), range(2), 4 * GB) == pytest.approx(4.0), "a card each"


def test_what_one_hands_on_crosses_every_port_whole() -> None:
    """4 GB at 1 GB/s: between two ranks all of it crosses the wire once; from one to the next it goes in pieces, so a
    third and a fourth take no longer, but for their messages' latency. Through one port for all, each way of the three
    takes its turn. Over hosts: 4 s between two, then 2 s within each at 2 GB/s."""
    assert broadcast(place(2), range(2), 4 * GB) == pytest.approx(4.0)
    assert broadcast(place(1, 1, port="host"), range(2), 4 * GB) == pytest.approx(4.0)
    assert broadcast(place(4, latency=0.5), range(4), 4 * GB) == pytest.approx(4.0 + 3 * 0.5)
    assert broadcast(place(2, port="all"), range(2), 4 * GB) == pytest.approx(4.0)
    assert broadcast(place(4, port="all"), range(4), 4 * GB) == pytest.approx(12.0)
    assert broadcast(place(2, 2, port="host"), range(4), 4 * GB) == pytest.approx(4.0 + 2.0)
    assert broadcast(place(4), (2,), 4 * GB) == 0.0
    sums = (Moved(what="all_reduce", ranks=2, nbytes=1000, seconds=1.0),)  # 1000 bytes each way, two messages of 500
    assert broadcast(place(2, measured=sums), range(2), 500) == pytest.approx(0.5), "one way of the two"


def test_over_hosts_each_sums_within_itself_first_and_then_all_their_ranks_go_on() -> None:
    """Within: 4 GB at 2 GB/s, in both hosts at the same time. Between: two ports of each host carry 4 GB."""
    assert all_reduce(place(2, 2), range(4), 4 * GB) == pytest.approx(2.0 + 2.0)
    assert all_reduce(place(2, 2, port="host"), range(4), 4 * GB) == pytest.approx(2.0 + 4.0), "one card a host"
    assert all_reduce(place(2, 1), range(3), 4 * GB) == pytest.approx(2.0 + 4.0), "the host of one has one port"
    assert all_gather(place(2, 2), range(4), 4 * GB) == pytest.approx(1.0 + 1.0)


def test_what_was_measured_counts_where_it_is_of_as_many_ranks() -> None:
    table = (
        Moved(what="all_reduce", ranks=2, nbytes=1000, seconds=5.0),
        Moved(what="all_reduce", ranks=2, nbytes=3000, seconds=9.0),
        Moved(what="message", ranks=2, nbytes=1000, seconds=2.0),
    )
    two, four = place(2, measured=table, latency=0.25), place(4, measured=table, latency=0.25)
    assert all_reduce(two, range(2), 2000) == pytest.approx(7.0)
    assert all_gather(two, range(2), 2000) == pytest.approx(3.5), "one way of the two"
    assert all_reduce(four, range(4), 4 * GB) == pytest.approx(6.0 + 6 * 0.25)
    assert message(two, 0, 1, 3000) == pytest.approx(6.0)
    assert message(two, 0, 1, 1) == 0.25, "a message of no length takes its latency"
    assert message(two, 0, 1, GB, at_once=2) == pytest.approx(0.25 + 2.0), "two at once over the same port"


def test_ranks_of_two_hosts_that_were_measured_together_take_that_time() -> None:
    table = (
        Moved(what="all_reduce", ranks=4, nbytes=1000, seconds=8.0),
        Moved(what="all_reduce", ranks=2, nbytes=1000, seconds=1.0),
    )
    both = place(2, 2, measured=table)
    assert all_reduce(both, range(4), 1000) == pytest.approx(8.0)
    assert all_gather(both, range(4), 1000) == pytest.approx(4.0)
    assert all_reduce(both, (0, 2), 1000) == pytest.approx(1.0)


def test_a_message_goes_over_the_link_between_its_ends() -> None:
    layout = place(2, 2)
    assert message(layout, 0, 1, 4 * GB) == pytest.approx(2.0)
    assert message(layout, 1, 2, 4 * GB) == pytest.approx(4.0)
    assert message(layout, 1, 1, 4 * GB) == 0.0


def test_a_group_is_as_slow_as_its_slowest_link_whoever_was_asked_about_before() -> None:
    names = ("a", "b", "c")
    devices = tuple(device(name) for name in names)
    a, b, c = (d.name for d in devices)
    links = (
        Link(kind="fast", devices=(a, b), latency=0.0, bandwidth=3 * GB),
        Link(kind="slow", devices=(b, c), latency=0.0, bandwidth=GB),
        Link(kind="slower", devices=(a, c), latency=0.0, bandwidth=GB / 2),
    )
    cluster = Cluster(name="c", devices=devices, links=links)
    assert [cluster.joining(some).kind for some in ((a, b), (a, b, c), (a, c, b), (a, b))] == [
        "fast", "slow", "slower", "fast"
    ]  # fmt: skip


# The simulator


def test_tasks_wait_for_what_they_need_and_for_what_is_taken() -> None:
    """The first two share a device, and the lower order goes first; the last needs both devices at once."""
    tasks = (
        SimulatedTask("late", "computing", ("a",), 1.0, order=2.0),
        SimulatedTask("first", "computing", ("a",), 2.0, order=1.0),
        SimulatedTask("other", "computing", ("b",), 4.0),
        SimulatedTask("both", "communicating", ("a", "b"), 1.0, (0,)),
    )
    spans = simulate(tasks)
    assert [(s.begin, s.end) for s in spans] == [(2.0, 3.0), (0.0, 2.0), (0.0, 4.0), (4.0, 5.0)]
    assert makespan(spans) == 5.0


def test_a_follower_waits_for_all_that_it_needs() -> None:
    tasks = (
        SimulatedTask("short", "computing", ("a",), 1.0),
        SimulatedTask("long", "computing", ("b",), 3.0),
        SimulatedTask("after", "computing", ("c",), 1.0, (0, 1)),
    )
    assert simulate(tasks)[2].begin == 3.0


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="task one waits for itself"):
        simulate(
            [SimulatedTask("one", "computing", ("a",), 1.0, (1,)), SimulatedTask("two", "computing", ("a",), 1.0, (0,))]
        )
    with pytest.raises(ValueError, match="task nowhere: it has to occupy something"):
        simulate([SimulatedTask("nowhere", "computing", (), 1.0)])


def test_idle_time_is_communication_while_a_link_carries_something_and_else_bubble() -> None:
    """Computes 0-1 and 5-6 of 8 s. In between, two transfers at once from 2 to 4; after it, nothing."""
    spans = [
        Span("a", "x", "computing", 0.0, 1.0),
        Span("a", "y", "computing", 5.0, 6.0),
        Span("link", "m", "communicating", 0.5, 0.7),  # behind computing
        Span("link", "m", "communicating", 2.0, 3.5),
        Span("back", "m", "communicating", 3.0, 4.0),
        Span("b", "z", "computing", 1.0, 8.0),
    ]
    assert terms(spans, "a") == pytest.approx({"computing": 2.0, "communicating": 2.0, "bubble": 4.0})
