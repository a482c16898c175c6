"""What is decided and written for a run on several hosts, without one: pure."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import shlex
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import apportion
from apportion.comm.membership import HostShare
from apportion.core.event import Event
from apportion.core.value import parse
from apportion.errors import ApportionError, CheckpointError
from apportion.process import usable_cores
from apportion.runtime.agents.hosts_launcher import RunHost
from apportion.runtime.hosts import recorded_hosts
from apportion.runtime.hosts.agent import lock_folder, meeting_address, remove_leftovers
from apportion.runtime.hosts.agent_connection import ending_text
from apportion.runtime.hosts.code_bundle import make_bundle, project_root, shipped_address, shipped_path, unpack
from apportion.runtime.hosts.frames import GREETING, MOST_JSON, FrameError, FrameReader, FrameWriter, check_message
from apportion.runtime.hosts.host_facts import (
    describe_host,
    overload,
    own_address,
    own_cores,
    ranks_of,
    refuse_unlike,
    unlike_patches,
    versions,
)
from apportion.runtime.hosts.host_failures import at_host
from apportion.runtime.hosts.host_ranks import RanksStart
from apportion.runtime.hosts.run_copy import RunCopy, mark_of, neighbour_target, path_inside, send_run
from apportion.runtime.launch.ray import why_not_joined
from apportion.runtime.launch.ssh import Ssh, parse_host
from apportion.runtime.supervisor.failures import Stop, WorkerStalled, late_text

LAUNCHERS = "apportion.runtime.launch"


# Hosts


@pytest.mark.parametrize(
    ("text", "destination", "workers"),
    [
        ("a", "a", 2),
        ("b:4", "b", 4),
        ("user@b:4", "user@b", 4),
        ("user@b.example.org", "user@b.example.org", 2),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("[fe80::1]:3", "fe80::1", 3),
        ("me@[::1]", "me@::1", 2),
    ],
)
def test_a_host_is_read_with_its_user_and_its_workers(text: str, destination: str, workers: int) -> None:
    assert parse_host(text, 2) == RunHost(destination, workers)


@pytest.mark.parametrize(
    "text", ["", "a b", "-oProxyCommand=x", "@a", "a:", "a:x", "a:-1", "fe80::1", "a:2:3", "u@v@w"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid host: write host, user@host or user@host:workers"):
        parse_host(text, None)


@pytest.mark.parametrize("text", ["a:0", "a:2222"])
def test_a_port_is_not_a_number_of_workers(text: str) -> None:
    with pytest.raises(ValueError, match=r"a host has 1 to 1000: a port is written options=\('-p', '2222'\)"):
        parse_host(text, None)


def test_hosts_are_named_once() -> None:
    with pytest.raises(ValueError, match="host a is named twice: name it once, with the number of its workers, a:4"):
        apportion.ssh("a", "b", "a:2")
    with pytest.raises(ValueError, match="names no host"):
        apportion.ssh()
    with pytest.raises(ValueError, match=r"options='-v' must be a list of texts: \('-v',\)"):
        apportion.ssh("a", options="-v")
    for wrong in ({"workers": 0}, {"threads": 0}, {"loaders": -1}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            apportion.ssh("a", **wrong)  # type: ignore[arg-type]


names = st.from_regex(r"[a-z][a-z0-9.]{0,8}", fullmatch=True)
options = st.lists(st.text(max_size=8), max_size=3).map(tuple)


@given(
    st.lists(names, min_size=1, max_size=4, unique=True), st.none() | st.integers(1, 9), st.none() | st.text(), options
)
def test_the_launcher_reads_as_it_is_written(
    hosts: list[str], workers: int | None, python: str | None, given: tuple[str, ...]
) -> None:
    value = Ssh(*hosts, workers=workers, python=python, options=given)
    assert parse(str(value), LAUNCHERS) == value
    assert parse(repr(value), LAUNCHERS) == value


def test_hosts_are_written_without_a_name() -> None:
    assert str(apportion.ssh("a", "user@b:4", workers=2)) == "ssh('a', 'user@b:4', workers=2)"
    assert parse("ssh(hosts=('a', 'b'))", LAUNCHERS) == apportion.ssh("a", "b")
    with pytest.raises(ValueError, match="hosts is given twice"):
        parse("ssh('a', hosts=('b',))", LAUNCHERS)
    with pytest.raises(ValueError, match="neither a number, a text, nor a value"):
        parse("ssh(1 + x)", LAUNCHERS)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ssh(nowhere)", "unknown launcher 'nowhere': one of .*; a text is written in quotes, 'nowhere'"),
        ("ssh('a', locall)", "did you mean local\\?; a text is written in quotes, 'locall'"),
        ("ssh(gpu-1)", "neither a number, a text, nor a value; a text is written in quotes, 'gpu-1'"),
        ("ssh(gpu.lan)", "a text is written in quotes, 'gpu.lan'"),
        ("ssh(10.0.0.1)", "does not parse .*, and a text in quotes"),
    ],
)
def test_a_host_without_quotes_is_told_of_them(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, LAUNCHERS)


def test_the_users_options_stand_before_our_own() -> None:
    launcher = apportion.ssh("user@b:4", options=("-p", "2222"), python="/opt/it's here/python")
    words = launcher.command(launcher.parsed()[0])
    assert words[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in words
    assert words[-2] == "user@b"
    assert shlex.split(words[-1])[-2:] == ["/opt/it's here/python", sys.executable], "the interpreters to try"


@pytest.mark.parametrize(
    "text",
    ["slurm", "slurm(workers=2, options=('--gres=gpu:1',))", "ray", "ray(workers=2, python='/opt/python', nodes=3)"],
)
def test_the_other_launchers_are_written_as_they_are_read(text: str) -> None:
    assert str(parse(text, LAUNCHERS)) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slurm(workers=0)", "workers=0 must be a whole number of at least 1, or None"),
        ("slurm(loaders=-1)", "loaders=-1 must be a whole number of at least 0"),
        ("slurm(options='--exact')", r"options='--exact' must be a list of texts: \('--exact',\)"),
        ("slurm(device='tpu')", 'device=.tpu. must be "cpu" or "cuda"'),
        ("slurm('node1')", "arguments are given by name"),
        ("ray(nodes=0)", "nodes=0 must be a whole number of at least 1, or None"),
    ],
)
def test_what_a_launcher_cannot_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, LAUNCHERS)


def test_threads_are_the_cores_of_a_host_over_its_ranks() -> None:
    assert apportion.ssh("a").threads_each(cores=8, ranks=2) == 4
    assert apportion.ssh("a", loaders=1).threads_each(cores=8, ranks=2) == 3
    assert apportion.ssh("a").threads_each(cores=2, ranks=4) == 1
    assert apportion.ssh("a", threads=5).threads_each(cores=2, ranks=4) == 5


# Messages


def reader(data: bytes) -> FrameReader:
    return FrameReader(io.BytesIO(data))


def written(*messages: Any) -> bytes:
    file = io.BytesIO()
    writer = FrameWriter(file)
    writer.greet()
    for message in messages:
        writer.send(message)
    return file.getvalue()


@given(st.binary(max_size=200), st.lists(st.binary(max_size=50) | st.fixed_dictionaries({"kind": st.text()})))
def test_messages_come_as_they_were_sent_whatever_a_shell_prints_first(noise: bytes, messages: list[Any]) -> None:
    assume(GREETING not in (noise + GREETING)[:-1])
    found = reader(noise + written(*messages))
    assert found.await_greeting()
    assert [found.receive() for _ in messages] == messages
    assert found.receive() is None


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_refused(data: bytes) -> None:
    found = reader(data)
    try:
        while (message := found.receive()) is not None:
            assert isinstance(message, bytes | dict)
    except FrameError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!cI", b"J", MOST_JSON + 1),
        struct.pack("!cI", b"X", 1) + b"x",
        struct.pack("!cI", b"J", 1) + b"x",
        struct.pack("!cI", b"J", 2) + b"[]",
        struct.pack("!cI", b"J", 2) + b"{}",
    ],
    ids=["too long", "unknown", "not JSON", "no message", "no kind"],
)
def test_what_is_no_message_is_refused_before_it_is_stored(data: bytes) -> None:
    with pytest.raises(FrameError):
        reader(data).receive()


def test_a_shell_that_prints_without_end_is_no_agent() -> None:
    assert not reader(b"x" * (1 << 17) + GREETING).await_greeting()
    assert not reader(b"").await_greeting()
    with pytest.raises(ValueError, match="longer than"):
        FrameWriter(io.BytesIO()).send({"kind": "x" * MOST_JSON})


# Code


def project(folder: Path) -> Path:
    for name, text in {
        "train.py": "import mine", "mine.py": "", "part/__init__.py": "", "part/inner.py": "x = 1", "data.csv": "1,2",
        ".hidden/no.py": "", "venv/pyvenv.cfg": "", "venv/lib/no.py": "", "__pycache__/no.py": "",
        "lib/site-packages/no.py": "",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_users_own_modules_go_along_and_nothing_else(tmp_path: Path) -> None:
    root, there = project(tmp_path / "project"), tmp_path / "there"
    unpack(make_bundle(root), there)
    found = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert found == {"train.py", "mine.py", "part/__init__.py", "part/inner.py"}
    assert (there / "part/inner.py").read_text() == "x = 1"
    assert there.stat().st_mode & 0o777 == 0o700


def test_too_much_code_is_refused_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("apportion.runtime.hosts.code_bundle.MOST_BYTES", 4)
        with pytest.raises(ValueError, match=r"hold more than 0 MB.*put the workload and its modules into a folder"):
            make_bundle(root)
    monkeypatch.setattr("apportion.runtime.hosts.code_bundle.MOST_FOLDERS", 0)
    with pytest.raises(ValueError, match="more than 0 folders below"):
        make_bundle(root)


def test_the_root_is_the_folder_of_the_workload_or_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = ModuleType("__main__")
    assert project_root(None, main) == tmp_path, "a notebook"
    main.__file__ = "scripts/train.py"
    assert project_root(None, main) == tmp_path / "scripts"
    main.__spec__ = SimpleNamespace(name="scripts.train")  # type: ignore[assignment]
    assert project_root(None, main) == tmp_path, "python -m"
    assert project_root("deep/er/work.py:workload", main) == tmp_path / "deep/er"
    assert project_root("package.work:workload", main) == tmp_path
    assert shipped_address("deep/er/work.py:workload") == "work.py:workload"
    assert shipped_address("package.work:workload") == "package.work:workload"


def test_modules_are_found_in_the_same_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [str(tmp_path / "lib"), str(tmp_path), "/usr/lib", str(tmp_path / "site-packages")]
    monkeypatch.setattr(sys, "path", entries)
    assert shipped_path(tmp_path) == [".", "lib"]


# Facts


def facts(**changes: Any) -> dict[str, Any]:
    told = {"cores": 4, "gpus": 0, "address": "10.0.0.2", "python": "/usr/bin/python3", "versions": versions()}
    return {**told, **changes}


def test_hosts_that_are_alike_train_together() -> None:
    refuse_unlike(versions(), [("a", facts()), ("b", facts(cores=2))], None)


@pytest.mark.parametrize("name", ["Python", "torch", "apportion"])
def test_another_version_is_refused_with_the_host_and_both(name: str) -> None:
    other = facts(versions={**versions(), name: "0.0.7"})
    with pytest.raises(ValueError, match=rf"host b has {name} 0\.0\.7 \(/usr/bin/python3\), and this one has {name} "):
        refuse_unlike(versions(), [("a", facts()), ("b", other)], None)
    none = facts(versions={**versions(), name: "none"})
    with pytest.raises(ValueError, match=f"host b has no {name}.*name an interpreter that has it with python="):
        refuse_unlike(versions(), [("a", facts()), ("b", none)], None)


def test_gpus_on_some_hosts_alone_are_refused() -> None:
    told = [("a", facts(gpus=2)), ("b", facts())]
    with pytest.raises(ValueError, match=r"host a has GPUs and host b none.*device='cpu'"):
        refuse_unlike(versions(), told, None)
    refuse_unlike(versions(), told, "cpu")


def test_a_host_has_as_many_ranks_as_cores_unless_it_is_told() -> None:
    assert ranks_of(facts(), None, None) == 4
    assert ranks_of(facts(), 3, None) == 3
    assert ranks_of(facts(gpus=2), None, None) == 2
    assert ranks_of(facts(gpus=2), None, "cpu") == 4
    assert overload("a", facts(), 4, 1) is None
    assert "host a has 4 workers x 2 threads and loaders on 4 cores" in (overload("a", facts(), 4, 2) or "")


def test_a_host_has_no_more_cores_than_the_run_was_given_there() -> None:
    assert own_cores({}) == own_cores({"APPORTION_HOST_CORES": ""}) == usable_cores()
    assert own_cores({"APPORTION_HOST_CORES": "1"}) == 1
    assert own_cores({"APPORTION_HOST_CORES": "100000"}) == usable_cores()


def test_the_address_of_a_host_is_where_others_reach_it() -> None:
    assert own_address({"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}) == "10.0.0.2"
    assert own_address({}) == "127.0.0.1"
    at_a_login = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22", "APPORTION_REACHED_FROM": "127.0.0.1"}
    assert own_address(at_a_login) == "127.0.0.1", "the launcher knows better than a variable of the user's login"
    assert meeting_address(["127.0.0.1"], "10.0.0.2") == "10.0.0.2", "the other one is the driver's own host"
    assert meeting_address(["127.0.0.1"], "127.0.0.1") == "127.0.0.1", "all of them are"
    assert meeting_address([], "10.0.0.2") == "10.0.0.2"


def test_a_rank_is_told_its_place_as_under_torchrun() -> None:
    start = RanksStart(
        share=HostShare(first=2, size=4, address="10.0.0.1", port=5000), count=2, own_address="10.0.0.2",
        replaceable=True, several=True, threads=3, run="x", secret_file="/s",
        environment={"APPORTION_PLAIN": "linear"}, path=[], directory="/",
    )  # fmt: skip
    told = start.environment_of(1, {"HOME": "/root", "PYTHONSAFEPATH": "1", "RANK": "77"})
    assert told == {
        "HOME": "/root", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3",
        "TORCHELASTIC_RUN_ID": "x", "APPORTION_SECRET_FILE": "/s", "APPORTION_PLAIN": "linear",
    }  # fmt: skip


# Failures


@pytest.mark.parametrize(
    ("stop", "cause"),
    [
        (Stop(3, "rank 3 was killed by SIGKILL"), "rank 3 on host b was killed by SIGKILL; resume=True goes on"),
        (Stop(3, "rank 3: KeyError: 1", "trace"), "rank 3 on host b: KeyError: 1"),
        (
            Stop(3, "rank 3 on host c was killed by SIGKILL"),  # the pool has said where it was
            "rank 3 on host c was killed by SIGKILL; resume=True goes on",
        ),
        (Stop(3, "host c is lost with rank 3: it ended"), "host c is lost with rank 3: it ended; resume=True goes on"),
        (Stop(3, "the disk is full"), "rank 3 on host b: the disk is full; resume=True goes on"),
        (Stop(3, "batch_size=1 is too small", mistake=True), "batch_size=1 is too small"),
        (
            Stop(3, "rank 3: ModuleNotFoundError: No module named 'x'", "trace"),
            "rank 3 on host b: ModuleNotFoundError: No module named 'x'; only the Python files below /p were sent to "
            "the hosts: install other modules on each of them",
        ),
    ],
)
def test_a_failure_names_the_host(stop: Stop, cause: str) -> None:
    assert at_host(stop, "b", "/p").cause == cause


@pytest.mark.parametrize(
    ("status", "said", "is_up", "told"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", False, "check the name"),
        (255, "root@b: Permission denied (publickey).", False, "ssh-copy-id b"),
        (255, "Host key verification failed.", False, "ssh b once by hand"),
        (255, "ssh: connect to host b port 22: Connection timed out", False, "did not answer for 8 s"),
        (255, "ssh: connect to host b port 22: Connection refused", False, "`ssh b true` must work without a question"),
        (255, "Timeout, server b not responding.", True, "the connection was lost (Timeout, server b not"),
        (96, "/opt/python", False, "host b has no Python /opt/python: install it there"),
        (97, "mktemp: failed to create directory", False, "no folder can be made for the run: mktemp"),
        (1, "python3: No module named apportion", False, "host b has no apportion, or an older one"),
        (1, "ImportError: no", False, "its agent ended with exit status 1 (ImportError: no) before it was ready"),
        (137, "", True, "its agent was ended by SIGKILL, by hand or by the system, and its ranks"),
    ],
)
def test_the_end_of_an_agent_is_told_with_the_cure(status: int, said: str, is_up: bool, told: str) -> None:
    text = ending_text(apportion.ssh("b"), "b", status, ["Warning: x", said, ""], is_up=is_up)
    assert "host b" in text
    assert told in text


CANCELLED = "slurmstepd-node2: error: *** STEP 14.0 ON b CANCELLED AT 2026-11-25T18:59:15"
STEP_LOST = "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 0"
BUSY = "srun: error: Unable to create step for job 16: More processors requested than permitted"
ENDED = "srun: error: b: task 0: Exited with exit code 96"


@pytest.mark.parametrize(
    ("text", "status", "said", "is_up", "told"),
    [
        (
            "slurm",
            137,
            [f"{CANCELLED} ***", "srun: error: b: task 0: Killed"],
            True,
            "cancelled the step .*by hand or by",
        ),
        ("slurm", 137, [f"{CANCELLED} DUE TO TIME LIMIT ***"], True, "agent, due to time limit; resume=True goes on"),
        ("slurm", 0, [STEP_LOST], True, "lost the step that held its agent .*io error.*resume=True goes on"),
        ("slurm", -9, [], True, "its srun was ended by SIGKILL; resume=True goes on"),
        ("slurm", 137, ["srun: error: b: task 0: Killed"], True, "its agent was ended by SIGKILL"),
        ("slurm", 1, [BUSY], False, "Slurm does not start its agent .*More processors requested than permitted"),
        ("slurm", 96, ["/opt/python", ENDED], False, "host b has no Python /opt/python: install it there"),
        ("slurm", 1, ["No module named apportion", ENDED], False, "host b has no apportion, or an older one"),
        ("ray", 255, ["The actor is dead because its node has died"], True, "lost the actor .*its node has died"),
        ("ray", 255, ["OSError: no sh"], False, "could not start the actor that holds its agent .OSError: no sh"),
        ("ray", 96, ["/opt/python"], False, "host b has no Python /opt/python: install it there"),
        ("ray", 137, ["Killed"], True, "its agent was ended by SIGKILL"),
    ],
)
def test_the_end_of_a_step_or_of_an_actor_is_told_from_that_of_its_agent(
    text: str, status: int, said: list[str], is_up: bool, told: str
) -> None:
    assert re.search(told, ending_text(parse(text, LAUNCHERS), "b", status, said, is_up=is_up))


def test_without_ray_it_is_said_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ApportionError, match=r"pip install ray, at the cluster's version"):
        apportion.ray().parsed()


REFUSED = "gcs_client.cc:210: Failed: Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing"


@pytest.mark.parametrize(
    ("error", "heard", "told"),
    [
        (ConnectionError("Could not find any running Ray instance."), [], "ray start --head on the first"),
        (ConnectionError("Failed to connect."), [REFUSED], "does not let this process in .InvalidAuthToken: Authentic"),
        (RuntimeError("Token authentication is enabled but no token was found"), [], "set RAY_AUTH_MODE=token"),
        (RuntimeError("Version mismatch: ray 2.59"), [], "cannot be joined: Version mismatch: ray 2.59"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_told_with_the_cure(error: Exception, heard: list[str], told: str) -> None:
    assert re.search(told, why_not_joined("auto", error, heard))


def test_ray_is_asked_for_the_cores_of_a_run_on_each_node() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}]
    assert apportion.ray()._bundles(nodes) == [{"CPU": 8}, {"CPU": 4}, {"CPU": 2}], "a node without a GPU has none"
    assert apportion.ray(nodes=2)._bundles(nodes) == [{"CPU": 8, "GPU": 2}, {"CPU": 4, "GPU": 1}]
    assert apportion.ray(nodes=2, workers=3, device="cpu")._bundles(nodes) == [{"CPU": 3}, {"CPU": 3}]
    assert apportion.ray(nodes=1, workers=2, threads=3, loaders=1)._bundles(nodes) == [{"CPU": 8, "GPU": 2}]
    with pytest.raises(ApportionError, match="has 3 nodes with cores, and nodes=4 are wanted"):
        apportion.ray(nodes=4)._bundles(nodes)
    with pytest.raises(ApportionError, match="has 0 nodes with cores"):
        apportion.ray()._bundles([])


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_a_copied_file_stays_in_the_run_directory(path: str) -> None:
    with pytest.raises(FrameError):
        path_inside(path)
    with pytest.raises(FrameError):
        neighbour_target(path or "..")


def test_a_copied_file_keeps_its_name() -> None:
    assert path_inside("checkpoints/step-1/model.safetensors").parts[0] == "checkpoints"
    assert neighbour_target("step-00000030") == "step-00000030"


def test_folders_that_killed_runs_have_left_go_and_others_stay(tmp_path: Path) -> None:
    names = ("apportion-hosts-own", "apportion-hosts-left", "apportion-hosts-running", "apportion-hosts-new", "other")
    own, left, running, new, other = (tmp_path / name for name in names)
    for folder in (own, left, running, new, other):
        folder.mkdir()
    lock = lock_folder(running)
    for folder in (own, left, running, other):
        os.utime(folder, (1e9, 1e9))
    remove_leftovers(own)
    assert [folder.exists() for folder in (own, left, running, new, other)] == [True, False, True, True, True]
    os.close(lock)
    os.utime(running, (1e9, 1e9))
    remove_leftovers(own)
    assert not running.exists()


def copied(source: Path, known: list[int] | None, target: Path) -> dict[str, Any]:
    """Copies a run directory through the messages of both ends, and returns the last of them."""
    sent = io.BytesIO()
    asked = io.BytesIO()
    for message in ({"kind": "alive"}, *[{"kind": "more"}] * 20):
        FrameWriter(asked).send(message)
    asked.seek(0)
    send_run(source, known, FrameWriter(sent), FrameReader(asked))
    sent.seek(0)
    found, copy = FrameReader(sent), RunCopy(target)
    while (message := found.receive()) is not None:
        if isinstance(message, dict) and message["kind"] == "fetched":
            if message["copied"]:
                copy.finish()
            copy.drop()
            return message
        copy.write(message)
    raise AssertionError("the last message is missing")


def test_a_run_directory_is_copied_as_it_is(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "checkpoints/step-1").mkdir(parents=True)
    (there / "checkpoints/latest").symlink_to("step-1")
    (there / "checkpoints/step-1/model").write_bytes(bytes(range(256)) * 5000)
    for name in ("run.json", "empty", ".training"):
        (there / name).write_text("{}" if name == "run.json" else "")
    here.mkdir()
    (here / "own").write_text("mine")
    (here / "run.json").write_text("old")
    assert copied(there, mark_of(here), here) == {"kind": "fetched", "copied": True, "there": True, "path": str(there)}
    found = {path.relative_to(here).as_posix() for path in here.rglob("*") if not path.is_dir()}
    assert found == {"own", "run.json", "empty", "checkpoints/step-1/model"}
    assert (here / "checkpoints/latest/model").read_bytes() == bytes(range(256)) * 5000
    assert (here / "run.json").read_text() == "{}"
    assert not copied(there, mark_of(there), here)["copied"], "both see one disk"
    assert not copied(tmp_path / "nowhere", None, here)["there"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def other_numpy(change: int) -> dict[str, object]:
    """The facts of a host whose numpy differs from this one's in one of its numbers."""
    words = versions()["numpy"].split(".")
    words[change] = str(int(words[change]) + 1)
    return {"hostname": "a", **facts(), "versions": {**versions(), "numpy": ".".join(words)}}


@pytest.mark.parametrize("change", [0, 1])
def test_another_major_or_minor_version_of_numpy_is_refused(change: int) -> None:
    with pytest.raises(ValueError, match=r"host b has numpy .*, and this one has numpy .*: install the same"):
        refuse_unlike(versions(), [("a", facts()), ("b", other_numpy(change))], None)


def test_another_patch_of_numpy_is_a_warning() -> None:
    found = [("a", facts()), ("b", other_numpy(2))]
    refuse_unlike(versions(), found, None)
    assert [text.partition(" ")[2][:11] for text in unlike_patches(versions(), found)] == ["b has numpy"]


def event_message(kind: str, **data: object) -> dict[str, object]:
    event = {"kind": kind, "step": 1, "epoch": 0, "seconds": 0, "data": data}
    return {"kind": "event", "slot": 0, "event": event}


INVALID = [
    {"kind": "here"},
    {"kind": "here", "hostname": "a", **facts(), "cores": 10**9},
    {"kind": "here", "hostname": "a", **facts(), "cores": True},
    {"kind": "here", "hostname": "a", **facts(), "gpus": -1},
    {"kind": "here", "hostname": "a", **facts(), "address": None},
    {"kind": "here", "hostname": "a", **facts(), "versions": {"torch": 2}},
    {"kind": "place", "address": "a", "port": 0},
    {"kind": "place", "address": "a", "port": "22"},
    {"kind": "progress", "generation": 0, "lines": [["1"]], "stopped": []},
    {"kind": "progress", "generation": 0, "lines": [[1 << 70]], "stopped": []},
    {"kind": "exited", "slot": 0, "status": "dead", "out_of_memory": False},
    {"kind": "event", "slot": 0, "event": {"kind": "step", "step": 1, "epoch": math.nan, "seconds": 0, "data": {}}},
    {"kind": "event", "slot": 0, "event": {"kind": "step", "step": 1, "epoch": 0, "seconds": 0, "data": {}, "x": 1}},
    {"kind": "event", "slot": 0, "event": {"kind": "boom", "step": 1, "epoch": 0, "seconds": 0, "data": {}}},
    {"kind": "event", "slot": 0, "event": {"kind": "fault", "step": 1, "epoch": 0, "seconds": 0, "data": {}}},
    {"kind": "a kind that its reader checks", "slot": "0"},
    event_message("evaluation", metrics={"accuracy": "high"}),
    event_message("step", values={"loss": [1.0, "low"]}, examples_per_second=1.0),
    event_message("speed", rank=0, examples_per_second=1.0, loading=0.0, computing=0.0, waiting=None, updating=0.0),
    event_message("end", reason="finished", metrics={}, examples_per_second=1.0),
    event_message("rollouts", rank=0, score="high"),
]


@pytest.mark.parametrize("message", INVALID)
def test_a_message_with_an_invalid_value_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(FrameError, match=r"must be|has no|unknown kind of event"):
        check_message(message)


def test_the_facts_of_a_host_are_valid() -> None:
    check_message({"kind": "here", **describe_host()})


def test_a_loss_that_is_not_finite_is_valid() -> None:
    check_message(event_message("step", values={"loss": [math.nan]}, examples_per_second=1.0))
    check_message(event_message("evaluation", metrics={"accuracy": math.inf}))


def test_ranks_that_are_late_are_named_with_the_host_of_each() -> None:
    late = WorkerStalled((1, 2, 3), 7, 31.0, hosts=("a", "b", "b", "c"))
    cause = at_host(Stop(1, late_text(late)), "b", "/p").cause
    assert cause.startswith("ranks 1, 2 on host b and rank 3 on host c have not moved")
    assert late_text(replace(late, ranks=(3,), stopped=True)).startswith("rank 3 on host c has been stopped")


def test_the_end_of_a_run_is_recorded_whatever_number_of_samples_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_hosts, "MOST_WAITING", 3)
    record = recorded_hosts.DriverRecord()
    kinds = ["speed"] * 6 + ["rollouts", "fault", "end"]
    sent = [record.add(Event(kind=kind, step=1, epoch=0.0, seconds=0.0)) for kind in kinds]  # type: ignore[arg-type]
    assert [order is not None for order in sent] == [True] * 4 + [False] * 3 + [True] * 2
    assert [event.kind for event in record.take_rest()] == ["speed"] * 4 + ["fault", "end"]
    assert record.overdue_order() is None, "nothing waits"


def test_what_waits_is_sent_again_ever_more_rarely_until_rank_0_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(recorded_hosts.time, "monotonic", lambda: now)
    record = recorded_hosts.DriverRecord()
    record.add(Event(kind="fault", step=1, epoch=0.0, seconds=0.0))
    record.note_written([1])
    now += 100.0
    record.add(Event(kind="fault", step=2, epoch=0.0, seconds=0.0))
    assert record.overdue_order() is None, "it has just been sent"
    sent = []
    for _ in range(300):
        now += 1.0
        sent += [now - 1100.0] if record.overdue_order() is not None else []
    assert sent[:4] == [2.0, 6.0, 14.0, 30.0]
    assert len(sent) < 15, "a rank that is stopped does not read them"
    assert max(after - before for before, after in itertools.pairwise(sent)) == recorded_hosts.MOST_AGAIN_SECONDS
    record.add(Event(kind="fault", step=3, epoch=0.0, seconds=0.0))
    record.note_written([2])
    now += 2.0
    order = record.overdue_order()
    assert order is not None
    assert [event["number"] for event in order["events"]] == [3]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_name_that_this_host_cannot_write_ends_the_copy_by_name(tmp_path: Path, kind: str) -> None:
    copy = RunCopy(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"cannot be copied to .*surrogates not allowed"):
        copy.write({"kind": kind, "path": "a\ud800", "target": "b\ud800"})
    copy.drop()
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_is_found_by_the_name_of_its_host_with_the_user_or_without() -> None:
    launcher = apportion.ssh("a", "me@b:4", "you@b", python={"you@b": "/2", "b": "/1"})
    assert [host.python for host in launcher.parsed()] == [None, "/1", "/2"]


@pytest.mark.parametrize("python", [3, ["/p"], Path("/p")])
def test_an_interpreter_that_is_no_text_is_refused(python: object) -> None:
    with pytest.raises(ValueError, match=r"python=.* must be the path of an interpreter as text"):
        apportion.ssh("a", python=python)  # type: ignore[arg-type]
