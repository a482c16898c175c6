"""Two hosts on one machine, as the planner's benchmark makes them: nothing is left of them, whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from apportion.cost_model.cluster import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.serial]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAST, SLOW = 1e9, 1e7
LEFT_ALONE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hosts import two_hosts
with two_hosts(1e9) as hosts:
    print(hosts.names[0], flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; skipped where there can be no two hosts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "lib"))
    import hosts as module

    why = module.cannot()
    if why is not None:
        pytest.skip(why)
    return module


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_after_an_error(hosts: Any) -> None:
    started = []

    def fail() -> None:
        with hosts.two_hosts(FAST) as made:
            started.append((made.names, subprocess.Popen(made.command(1, ["sleep", "60"]))))
            assert all(name in namespaces() for name in made.names)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    ((names, process),) = started
    assert process.wait(10) != 0, "what ran there is gone too"
    assert not any(name in namespaces() for name in names)


@pytest.mark.parametrize("killed", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_process_that_was_ended(hosts: Any, killed: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEFT_ALONE, str(BENCHMARKS / "lib")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name in namespaces()
    process.kill() if killed else process.terminate()
    process.wait(20)
    process.stdout.close()
    with hosts.two_hosts():  # removes what a killed one could not
        assert name not in namespaces()


def test_the_ranks_of_two_hosts_share_no_memory_and_every_message_takes_the_cable(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from parked import Side

    digits = str(BENCHMARKS.parent / "examples" / "digits.py")
    command = [str(BENCHMARKS / "sides" / "on_host.py"), f"{digits}:workload"]
    with hosts.two_hosts(FAST) as made, Side(command, ranks=2, hosts=made) as side:
        side.wait_until_ready()

        def answers(*order: Any) -> list[dict[str, Any]]:
            return [json.loads(line) for line in side.ask(json.dumps(order))]

        assert all("in memory that all of its workers share" in a["refused"] for a in answers("hogwild", 1))
        answers("data_parallel", 2)
        made.set_rate(SLOW)
        # 85,002 weights of 4 bytes go each way, over 10 Mb/s.
        assert min(a["seconds"] for a in answers("data_parallel", 2)) > 2 * 0.8 * 85_002 * 4 * 8 / SLOW


MEASURE = """
import json, sys
from apportion import World
from apportion.profiler.launched_cluster import measure_here
world = World.from_env(device="cpu")
json.dump(measure_here(world, seconds=float(sys.argv[1])).to_json(), sys.stdout)
"""


def measured(hosts: Any, given: float) -> tuple[float, float]:
    """The bandwidth of a slow cable, and the share of a transfer that computing hides, as both ends measure them in
    the seconds that are given."""
    from parked import environment

    with ExitStack() as stack, hosts.two_hosts(SLOW) as made:
        port = made.port()
        started = [
            stack.enter_context(
                subprocess.Popen(
                    made.command(rank, [sys.executable, "-c", MEASURE, str(given)]),
                    env=environment() | made.environment(rank, 2, port),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        told = [json.loads(process.communicate(timeout=40)[0]) for process in started]
        assert max(made.sent()) < 4 * given * SLOW / 8, "a slow processor takes longer; it sends no more for that"
    cluster = Cluster.from_json(told[0])
    cable = cluster.link(*(device.name for device in cluster.devices))
    return cable.bandwidth, cable.hidden


@pytest.mark.thorough
def test_a_slow_cable_is_measured_with_what_it_carries_in_the_time_that_is_given(hosts: Any) -> None:
    """Sums of 4 MiB, which tell how much of a transfer computing hides, would take 3.4 s each, and a dozen of them are
    made. Of messages so short some of it goes at once; and where others keep the processors busy one measurement of
    three may be off."""
    for _ in range(3):
        bandwidth, hidden = measured(hosts, 2.0)
        assert 0.0 <= hidden <= 1.0
        if 0.5 * SLOW / 8 < bandwidth < 4 * SLOW / 8:
            return
    raise AssertionError(f"{bandwidth:.3g} bytes/s, the last of three, of a cable that carries {SLOW / 8:.3g}")
