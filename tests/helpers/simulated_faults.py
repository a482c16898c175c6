"""What goes wrong in a simulated run. Each is given the simulation, a number from 0 to 1 that picks whom it befalls,
and for how many seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from simulated_hosts import Agent, Worker
    from simulated_runs import Driver, Simulation

About = tuple["Simulation", float, float]
_T = TypeVar("_T")


def _picked(among: Sequence[_T], draw: float) -> list[_T]:
    return [among[int(len(among) * draw)]] if among else []


def _workers(sim: Simulation, draw: float) -> list[Worker]:
    return _picked([worker for _, worker in sorted(sim.processes.items())], draw)


def _agents(sim: Simulation, draw: float) -> list[Agent]:
    return _picked([host.agent for host in sim.hosts if host.agent is not None and host.agent.alive], draw)


def _drivers(sim: Simulation, draw: float) -> list[Driver]:
    return _picked([driver for driver in sim.drivers if driver.alive], draw)


def kill_worker(about: About) -> None:
    sim, draw, _ = about
    for worker in _workers(sim, draw):
        worker.end()


def kill_two_workers(about: About) -> None:
    sim, draw, seconds = about
    kill_worker(about)
    sim.after(seconds / 4, kill_worker, (sim, 1 - draw, 0.0))


def stop_worker(about: About) -> None:
    sim, draw, seconds = about
    for worker in _workers(sim, draw):
        worker.stop(seconds)


def kill_one_stop_another(about: About) -> None:
    sim, draw, seconds = about
    kill_worker(about)
    sim.after(seconds / 8, stop_worker, (sim, 1 - draw, 2 * seconds))


def raise_in_worker(about: About) -> None:
    sim, draw, _ = about
    for worker in _workers(sim, draw):
        worker.fail()


def kill_then_raise(about: About) -> None:
    sim, draw, seconds = about
    kill_worker(about)
    sim.after(seconds / 8, raise_in_worker, (sim, 1 - draw, 0.0))


def kill_agent(about: About) -> None:
    sim, draw, _ = about
    for agent in _agents(sim, draw):
        agent.end()


def stop_agent(about: About) -> None:
    sim, draw, seconds = about
    for agent in _agents(sim, draw):
        agent.stop(seconds)


def kill_host(about: About) -> None:
    sim, draw, _ = about
    for host in _picked(sim.hosts, draw):
        host.end()


def cut_hosts(about: About) -> None:
    """Holds back everything between two hosts."""
    sim, draw, seconds = about
    first = int(len(sim.hosts) * draw)
    second = (first + 1) % len(sim.hosts)
    sim.cut((min(first, second), max(first, second)), seconds)


def cut_driver(about: About) -> None:
    """Holds back everything between a driver and a host."""
    sim, draw, seconds = about
    for driver in _drivers(sim, draw):
        host = driver.hosts[int(len(driver.hosts) * (7 * draw % 1))]
        sim.cut((host.number, driver.machine), seconds)


def cut_host_off(about: About) -> None:
    """Holds back everything between a host and all other machines."""
    sim, draw, seconds = about
    host = int(len(sim.hosts) * draw)
    for other in range(sim.machines):
        if other != host:
            sim.cut((min(host, other), max(host, other)), seconds)


def end_connection(about: About) -> None:
    """Ends a connection between a driver and an agent, for both."""
    sim, draw, _ = about
    for driver in _drivers(sim, draw):
        number = int(len(driver.hosts) * (7 * draw % 1))
        for link in (driver.down[number], driver.up[number]):
            link.closed, link.held = True, []
            link.deliver(None)


def stop_driver(about: About) -> None:
    sim, draw, seconds = about
    for driver in _drivers(sim, draw):
        driver.stop(seconds)


def kill_driver(about: About) -> None:
    sim, draw, _ = about
    for driver in _drivers(sim, draw):
        driver.end()


def kill_drivers_machine(about: About) -> None:
    sim, draw, _ = about
    for driver in _drivers(sim, draw):
        driver.end(silent=True)


def start_elsewhere(about: About) -> None:
    about[0].elsewhere(None)


def start_elsewhere_while_cut_off(about: About) -> None:
    """Starts the run again while its driver cannot be reached by some hosts, or is stopped."""
    sim, draw, seconds = about
    if draw < 0.5:
        cut_driver(about)
    else:
        stop_driver(about)
    sim.after(seconds / 2, sim.elsewhere, None)


def repeat_message(about: About) -> None:
    """Lets a message that says its generation arrive once more, late."""
    sim, draw, seconds = about
    for driver in _drivers(sim, draw):
        number = int(len(driver.hosts) * (7 * draw % 1))
        for link in (driver.down[number], driver.up[number]):
            link.repeats = seconds / 2


FAULTS: list[Callable[[Any], None]] = [
    kill_worker, kill_two_workers, stop_worker, kill_one_stop_another, raise_in_worker, kill_then_raise, kill_agent,
    stop_agent, kill_host, cut_hosts, cut_driver, cut_host_off, end_connection, stop_driver, kill_driver,
    kill_drivers_machine, start_elsewhere, start_elsewhere_while_cut_off, repeat_message,
]  # fmt: skip
