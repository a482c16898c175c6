"""What Slurm says to the tasks of a step, and where they meet: pure, and two ranks whose first port is taken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from commands import SECONDS

from apportion.comm.network import rendezvous
from apportion.comm.network.address import Address
from apportion.comm.network.handshake import Purpose, key_of_meeting
from apportion.comm.network.launched_ranks import given, other_hosts, ports, refuse_unstarted, run_name
from apportion.comm.network.rank_listener import RankListener
from apportion.comm.network.rendezvous import dial_first
from apportion.comm.network.slurm import (
    FIRST_PORT,
    PORTS,
    TRIES,
    allocated,
    environment_of_steps,
    first_port,
    node_names,
)
from apportion.comm.world import World
from apportion.errors import PeerLost

STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
}
"""The environment of a task of srun's."""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,3]", ["node08", "node09", "node10", "node3"]),
        ("a,b[1-2],c-3", ["a", "b1", "b2", "c-3"]),
        ("rack[1-2]node[1,5]", ["rack1node1", "rack1node5", "rack2node1", "rack2node5"]),
        ("gpu[1-2]-ib0", ["gpu1-ib0", "gpu2-ib0"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
    ],
)
def test_a_list_of_nodes_is_written_out_as_scontrol_does(text: str, names: list[str]) -> None:
    assert node_names(text) == names


JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[3-5]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
"""The environment of a shell in an allocation."""


def test_an_allocation_has_nodes_and_the_tasks_that_were_asked_for() -> None:
    assert allocated(JOB) == [("node3", None), ("node4", None), ("node5", None)], "Slurm counts where nobody has asked"
    asked = {**JOB, "SLURM_NTASKS": "5"}
    assert allocated(asked) == [("node3", 2), ("node4", 2), ("node5", 1)]
    assert allocated({**asked, "SLURM_TASKS_PER_NODE": "2"}) == allocated(JOB), "what does not fit is not taken"
    step = {**asked, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURMD_NODENAME": "node4"}
    assert allocated(step) == [("node4", None), ("node3", None), ("node5", None)], "the driver's own comes first"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {},
            "SLURM_JOB_ID is not set here: put the command into a file for sbatch, or type it in the shell",
        ),
        ({**JOB, "SLURM_STEP_NUM_TASKS": "4"}, "this is one of 4 tasks that srun has started: leave srun out"),
    ],
)
def test_outside_an_allocation_and_in_a_task_of_several_no_steps_are_started(
    environment: dict[str, str], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        allocated(environment)


def test_the_options_of_a_job_are_not_those_of_its_steps() -> None:
    job = {"SLURM_CPUS_PER_TASK": "4", "SLURM_MEM_PER_CPU": "1", "SLURM_GPUS_PER_TASK": "1", "SRUN_CPUS_PER_TASK": "4"}
    kept = {"HOME": "/root", "SLURM_CONF": "/etc/slurm.conf", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "77"}
    assert environment_of_steps({**kept, **job}) == kept


@pytest.mark.parametrize("text", ["", "node[1-", "node1-3]", "node[a]", "node[]", "node[1-2", "a,,b", "a,"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of nodes"):
        node_names(text)


def test_the_ranks_of_a_step_meet_on_its_first_node_at_a_port_of_the_job() -> None:
    place = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    port = str(FIRST_PORT + (77 * TRIES + 1) % PORTS)
    assert given(STEP) == {**place, "MASTER_ADDR": "node3", "MASTER_PORT": port}
    assert given({**STEP, "MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1", "what is set stays"
    assert other_hosts(STEP) == ["node4"]
    assert "MASTER_ADDR" not in given({**STEP, "SLURM_STEP_NODELIST": "node[1x3]"}), "which is asked for"


def test_rank_0_tries_several_ports_where_none_was_given() -> None:
    first = first_port(STEP)
    assert first is not None
    assert ports({**STEP, "MASTER_PORT": str(first)}) == list(range(first, first + TRIES))
    assert ports({**STEP, "MASTER_PORT": "29500"}) == [29500]
    assert ports({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(first), **STEP}) == [first], "of torchrun"


def test_the_ports_of_jobs_that_follow_each_other_do_not_meet_and_lie_below_those_of_the_system() -> None:
    firsts = [first_port({"SLURM_JOB_ID": str(job)}) for job in range(10_000)]
    assert len(set(firsts[: PORTS // TRIES])) == PORTS // TRIES
    assert all(first is not None and 15_000 <= first < 32_768 - TRIES for first in firsts)


def test_steps_of_a_job_and_its_starts_are_told_apart() -> None:
    assert run_name(STEP) != run_name({**STEP, "SLURM_STEP_ID": "0"})
    assert run_name(STEP) != run_name({**STEP, "SLURM_RESTART_COUNT": "1"})
    torchrun = {**STEP, "WORLD_SIZE": "4"}
    assert run_name(torchrun) == run_name({**torchrun, "SLURM_STEP_ID": "0"}), "whose agents may be steps of their own"


def test_mpiruns_numbers_win_over_those_of_the_program_that_it_starts_by_srun() -> None:
    ours = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    found = given({**STEP, **ours})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("5", "8", "1")


def test_a_batch_script_that_lacks_srun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, text in batch.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=4, but this process runs in .* write srun before the command"):
        World.from_env()
    refuse_unstarted({**batch, "SLURM_NTASKS": "1"})
    refuse_unstarted({**batch, "WORLD_SIZE": "4"})  # torchrun, from there
    refuse_unstarted({"SLURM_NTASKS": "4"})  # at a terminal that salloc has opened
    refuse_unstarted(STEP)


def test_a_rank_finds_its_own_run_at_the_next_port_where_another_runs_is_at_the_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both have the same secret, the file in their user's home."""
    own, other = (key_of_meeting(b"s" * 32, name) for name in ("own", "other"))
    first = RankListener(Address("127.0.0.1", -1), other)
    second = RankListener(Address("127.0.0.1", -1), own)
    try:
        places = [first.address, second.address]
        sock, found = dial_first(places, own, Purpose("own/meeting", 1), 10)
        with sock, second.take("own/meeting", 1, 10):
            assert found == second.address
        monkeypatch.setattr(rendezvous, "SEARCH_SECONDS", 0.2)
        with pytest.raises(PeerLost, match="did not let this rank in"):
            dial_first([first.address, first.address], own, Purpose("own/meeting", 1), 10)
    finally:
        first.close()
        second.close()
    assert "or is of another run" in capfd.readouterr().err
    with pytest.raises(PeerLost, match=rf"nothing answers at 127\.0\.0\.1:\d+ to {places[1].port} "):
        dial_first(places, own, Purpose("own/meeting", 1), 0.1)


TASK = """
import json

import torch

import apportion

world = apportion.World.from_env(device="cpu", insecure=True)
total = torch.tensor([10.0**world.rank])
world.group().all_reduce(total).wait()
world.close()
print(json.dumps([world.rank, world.size, total.item()]))
"""


@contextmanager
def hanging_up(address: tuple[str, int]) -> Iterator[None]:
    """Another program at an address."""
    with socket.create_server(address) as server:
        server.settimeout(0.1)
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                with suppress(TimeoutError):
                    server.accept()[0].close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.mark.processes
def test_ranks_of_a_step_meet_where_the_first_port_is_another_programs() -> None:
    """Each of two ranks stands for a node. The address is given: a node has a name that the others know."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing
        except OSError:
            pytest.skip("needs an address that is not of this host alone")
        address = probe.getsockname()[0]
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": address}
    step["SLURM_JOB_ID"] = str(os.getpid())  # of its own, where others test beside this one
    port = first_port(step)
    assert port is not None
    with hanging_up((address, port)):
        tasks = [
            subprocess.Popen(
                [sys.executable, "-c", TASK],
                env={**os.environ, **step, "SLURM_PROCID": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [task.communicate(timeout=SECONDS) for task in tasks]
    for rank, (out, err) in enumerate(told):
        assert out, err
        assert json.loads(out) == [rank, 2, 11.0]
