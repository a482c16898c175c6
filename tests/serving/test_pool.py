"""Who replaces whom: spares that are frozen or lack a net, nets that keep dying."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from served import Server, alive, children, eventually, save_net, serving

pytestmark = pytest.mark.processes

X = np.zeros((1, 8), dtype=np.float32)
FILES = ("1.onnx", "2.onnx")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n, file in enumerate(FILES):
        save_net(tmp_path / file, n)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, *FILES, "--deadline", "2s", "--replication", "between_graph") as server:
        server.said("spare ready")
        yield server


def spare(server: Server, times: int = 1) -> int:
    return int(server.said("spare ready", times=times)["pid"])


def replaced(server: Server, member: str, times: int) -> int:
    """It is killed; the process that has become it for the n-th time."""
    os.kill(server.pid(member), signal.SIGKILL)
    return int(server.said(f"^member {member} pid ", times=times)["pid"])


@pytest.mark.thorough
def test_a_spare_becomes_whoever_dies(server: Server) -> None:
    for member, times in (("m2", 1), ("m1", 2)):
        ready = spare(server, times)
        assert replaced(server, member, 2) == ready


@pytest.mark.thorough
def test_a_frozen_spare_is_given_up_soon(server: Server) -> None:
    frozen = spare(server)
    os.kill(frozen, signal.SIGSTOP)
    assert replaced(server, "m1", 2) != frozen
    assert "took more than 1 s to become" in server.said("member not replaced")["why"]
    eventually("the frozen one is gone", lambda: not alive(frozen))
    assert spare(server, 2) != frozen
    eventually("nobody is missed", lambda: not server.infer("ensemble", X)[1]["parameters"]["degraded"])


@pytest.mark.thorough
def test_a_spare_that_is_stopped_is_replaced_before_it_is_needed(server: Server) -> None:
    frozen = spare(server)
    os.kill(frozen, signal.SIGSTOP)
    assert f"process {frozen} has been stopped" in server.said("no spare")["why"]
    ready = spare(server, 2)
    assert not alive(frozen)
    assert replaced(server, "m1", 2) == ready


@pytest.mark.thorough
def test_a_process_that_is_stopped_while_it_becomes_the_spare_is_given_up_soon(server: Server) -> None:
    first = spare(server)
    os.kill(first, signal.SIGKILL)
    begun: list[int] = []
    eventually("the next one is started", lambda: begun.extend(children_but(server, first)) or begun)
    os.kill(begun[0], signal.SIGSTOP)
    began = time.monotonic()
    assert f"process {begun[0]} has been stopped" in server.said("no spare")["why"]
    assert time.monotonic() - began < 5
    assert spare(server, 2) != begun[0]


def children_but(server: Server, *others: int) -> list[int]:
    """Lists the server's processes that sit in no slot."""
    seated = (server.pid("m1"), server.pid("m2"))
    return [pid for pid in children(server.process.pid) if pid not in (*others, *seated)]


@pytest.mark.thorough
def test_a_net_that_does_not_come_to_an_end_is_told_while_it_is_waited_for(tmp_path: Path) -> None:
    endless(tmp_path / "endless.onnx")
    sooner = "from apportion.serving import model_preparation as m; from apportion.cli.app import main"
    program = f"{sooner}; m.PROGRESS_SECONDS = 1.0; main()"
    command = [sys.executable, "-c", program, "serve", "endless.onnx", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next((line for line in process.stderr if "for 2 s so far" in line), "")
        finally:
            process.terminate()
    assert "member m1 (endless.onnx) is loaded and timed, for 2 s so far" in line


def endless(path: Path) -> None:
    """A loop whose condition stays true."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xyab"]
    on = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("c", 9), ("d", 9))]
    once = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["a"], ["b"])]
    body = helper.make_graph(once, "body", [*on[:2], values[2]], [on[2], values[3]])
    true = helper.make_tensor("always", TensorProto.BOOL, [], [True])
    loop = helper.make_node("Loop", ["", "always", "x"], ["y"], body=body)
    graph = helper.make_graph([loop], "endless", values[:1], values[1:2], [true])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.mark.thorough
def test_a_net_that_cannot_be_loaded_for_now_leaves_the_others_their_spare(folder: Path, server: Server) -> None:
    (folder / "2.onnx").rename(folder / "away")
    replaced(server, "m1", 2)
    assert server.said("^no spare")["member"] == "m2"
    ready = spare(server, 2)
    assert replaced(server, "m1", 3) == ready
    spare(server, 3)
    os.kill(server.pid("m2"), signal.SIGKILL)
    assert "2.onnx cannot be run" in server.said("member not replaced")["why"]
    assert server.infer("m1", X)[0] == 200
    (folder / "away").rename(folder / "2.onnx")
    server.said("^member m2 pid ", times=2)
    eventually("it answers again", lambda: not server.infer("ensemble", X)[1]["parameters"]["degraded"])


@pytest.mark.thorough
def test_a_spare_that_can_load_nothing_is_tried_again(folder: Path) -> None:
    with serving(folder, "1.onnx") as server:
        server.said("spare ready")
        (folder / "1.onnx").rename(folder / "away")
        replaced(server, "m1", 2)
        assert "1.onnx cannot be run" in server.said("^no spare")["why"]
        server.said("^no spare", times=4)  # two lines each time
        (folder / "away").rename(folder / "1.onnx")
        ready = spare(server, 2)
        assert replaced(server, "m1", 3) == ready


@pytest.mark.thorough
def test_who_dies_young_again_and_again_is_replaced_later_each_time(server: Server) -> None:
    waits = []
    for times in range(1, 5):
        began = server.said("^member m1 pid ", times=times)["time"]
        os.kill(server.pid("m1"), signal.SIGKILL)
        died = server.said("^member died", times=times)["time"]
        back = server.said("^member m1 pid ", times=times + 1)["time"]
        assert times == 1 or died - began < 1.0, "the test was too slow for this"
        waits.append(back - died)
    assert waits[1:] == sorted(waits[1:])
    for wait, least in zip(waits[1:], (0.25, 0.5, 1.0), strict=True):
        assert wait >= least, waits
    assert server.infer("m2", X)[0] == 200
