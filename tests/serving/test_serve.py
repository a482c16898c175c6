"""Servers of one net and of several: real processes, real sockets, real kills."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from browsers import Browser
from commands import SECONDS, start
from onnx import helper
from served import Server, alive, children, descriptors, eventually, net, save_net, serving

from apportion.serving.protocol.v2 import HEADER, NamedTensor, read_response, write_request

pytestmark = pytest.mark.processes

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four nets as ONNX files, and one as a program of torch.export."""
    path = tmp_path_factory.mktemp("nets")
    for n in range(1, 5):
        save_net(path / f"{n}.onnx", n)
    rows = {0: torch.export.Dim.DYNAMIC}
    torch.export.save(torch.export.export(net(5), (torch.from_numpy(X),), dynamic_shapes=(rows,)), path / "5.pt2")
    return path


def expected(*seeds: int, x: Any = X) -> Any:
    with torch.no_grad():
        return torch.stack([net(seed)(torch.from_numpy(np.asarray(x))) for seed in seeds]).double().mean(0).numpy()


@pytest.fixture(scope="module")
def four(folder: Path) -> Iterator[Server]:
    """Undisturbed by the tests that share it."""
    files = [f"{n}.onnx" for n in range(1, 5)]
    with serving(folder, *files, "--deadline", "2s", "--replication", "between_graph") as server:
        eventually("ready", lambda: server.ask("GET", "/v2/health/ready")[0] == 200)
        yield server


def outputs(told: dict[str, Any]) -> Any:
    return np.array(told["outputs"][0]["data"]).reshape(told["outputs"][0]["shape"])


# What is answered


@pytest.mark.thorough
def test_the_ensemble_answers_with_the_mean_of_all_members(four: Server) -> None:
    status, told = four.infer("ensemble", X)
    assert status == 200, told
    np.testing.assert_allclose(outputs(told), expected(1, 2, 3, 4), rtol=1e-5, atol=1e-6)
    assert told["parameters"] == {
        "members_used": "m1,m2,m3,m4", "members_late": "", "members_failed": "", "members_absent": "",
        "degraded": False,
    }  # fmt: skip


@pytest.mark.thorough
def test_each_member_answers_under_its_own_name(four: Server) -> None:
    for n in range(1, 5):
        status, told = four.infer(f"m{n}", X)
        assert status == 200
        np.testing.assert_allclose(outputs(told), expected(n), rtol=1e-5, atol=1e-6)
        assert told["parameters"]["members_used"] == f"m{n}"


def test_tensors_travel_as_bytes_both_ways(four: Server) -> None:
    pieces, json_bytes = write_request(
        [NamedTensor("input", "FP32", X)], id="9", parameters={"binary_data_output": True}
    )
    status, headers, body = four.ask("POST", "/v2/models/ensemble/infer", b"".join(pieces), **{HEADER: str(json_bytes)})
    assert status == 200, body
    head, (found,) = read_response(body, int(headers[HEADER.lower()]))
    assert head["id"] == "9"
    np.testing.assert_allclose(found.array, expected(1, 2, 3, 4), rtol=1e-5, atol=1e-6)


def test_large_tensors_go_through_shared_memory_and_all_of_it_comes_back(four: Server) -> None:
    x = np.random.default_rng(0).normal(size=(20_000, 8)).astype(np.float32)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", x)], parameters={"binary_data_output": True})
    for _ in range(60):  # more than the memory holds at once
        status, headers, body = four.ask("POST", "/v2/models/m2/infer", b"".join(pieces), **{HEADER: str(json_bytes)})
        assert status == 200, body
        _, (found,) = read_response(body, int(headers[HEADER.lower()]))
        np.testing.assert_allclose(found.array, expected(2, x=x), rtol=1e-4, atol=1e-5)


def test_many_at_once_each_get_their_own_answer(four: Server) -> None:
    wrong: list[str] = []

    def ask(n: int) -> None:
        for at in range(25):
            x = np.full((1 + (n + at) % 3, 8), (n * 25 + at) / 100, dtype=np.float32)
            status, told = four.infer("ensemble", x)
            if status != 200 or not np.allclose(outputs(told), expected(1, 2, 3, 4, x=x), rtol=1e-4, atol=1e-5):
                wrong.append(f"{n} {at}: {status} {told}")

    expected(1, 2, 3, 4)  # the nets are drawn here, not by several threads
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong[:3]


@pytest.mark.serial
def test_an_answer_is_not_kept_back(four: Server) -> None:
    """By Nagle's algorithm it would be, for 40 ms on a connection that is kept."""
    connection = http.client.HTTPConnection("127.0.0.1", four.port, timeout=SECONDS)
    pieces, json_bytes = write_request([NamedTensor("input", "FP32", X)])
    took = []
    for _ in range(20):
        began = time.monotonic()
        connection.request("POST", "/v2/models/m1/infer", b"".join(pieces), {HEADER: str(json_bytes)})
        assert connection.getresponse().read()
        took.append(time.monotonic() - began)
    connection.close()
    assert sorted(took)[10] < 0.03


def test_metadata_is_what_the_protocol_asks_for(four: Server) -> None:
    assert four.get("/v2")["extensions"] == ["binary_tensor_data"]
    assert four.get("/v2/health/live") == {"live": True}
    assert four.get("/v2/health/ready") == {"ready": True}
    about = four.get("/v2/models/ensemble")
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 8]}]
    assert about["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}]
    assert about == four.get("/v2/models/ensemble/versions/1")
    assert four.get("/v2/models/m3/ready") == {"name": "m3", "ready": True}


@pytest.mark.parametrize(
    ("method", "path", "status", "why"),
    [
        ("GET", "/v3", 404, "/v3 does not exist"),
        ("GET", "/v2/models/m9", 404, "model 'm9' does not exist: it is one of m1, m2, m3, m4, ensemble"),
        ("GET", "/v2/models/m1/versions/2", 404, "has no version '2'"),
        ("POST", "/v2", 405, "asked for with GET"),
        ("GET", "/v2/models/m1/infer", 405, "asked for with POST"),
        ("POST", "/v2/models/m1/infer", 400, "the body is empty"),
        ("POST", "/infer", 404, "/infer does not exist"),
    ],
)
def test_what_there_is_not_is_said(four: Server, method: str, path: str, status: int, why: str) -> None:
    found, headers, body = four.ask(method, path)
    assert (found, headers["content-type"]) == (status, "application/json")
    assert why in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (np.zeros((1, 7)), r"input has shape [1, 7], the net takes [-1, 8] (-1: any number)"),
        (np.zeros(8), "input has shape [8]"),
    ],
)
def test_what_the_net_does_not_take_is_refused_before_it_is_asked(four: Server, x: Any, why: str) -> None:
    status, told = four.infer("ensemble", x)
    assert status == 400
    assert why in told["error"]


def test_a_body_that_is_too_large_is_refused_unread(four: Server) -> None:
    status, _, body = four.ask("POST", "/v2/models/m1/infer", b"", content_length=str(1 << 40))
    assert status == 413
    assert "of 67108864 at most" in json.loads(body)["error"]


def test_no_rows_give_no_rows(four: Server) -> None:
    status, told = four.infer("ensemble", np.zeros((0, 8)))
    assert (status, outputs(told).shape) == (200, (0, 3))


@pytest.mark.thorough
def test_a_program_of_torch_export_is_served_by_whatever_runs_it_faster(folder: Path) -> None:
    with serving(folder, "five=5.pt2") as server:
        tried = [line["event"] for line in server.lines if line.get("member") == "five"]
        assert any("five: onnxruntime" in line for line in tried)
        assert any("five: torch" in line for line in tried)
        status, told = server.infer("five", X)
        assert status == 200, told
        np.testing.assert_allclose(outputs(told), expected(5), rtol=1e-5, atol=1e-6)


def test_a_member_may_be_on_another_server(folder: Path, four: Server) -> None:
    with serving(folder, f"there=http://127.0.0.1:{four.port}/v2/models/m2", "here=1.onnx") as server:
        status, told = server.infer("ensemble", X)
        assert status == 200, told
        np.testing.assert_allclose(outputs(told), expected(2, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replication", ["auto", "in_graph"])
@pytest.mark.thorough
def test_one_program_answers_as_processes_do(folder: Path, replication: str) -> None:
    with serving(folder, "1.onnx", "2.onnx", "3.onnx", "--replication", replication) as server:
        status, told = server.infer("ensemble", X)
        assert status == 200, told
        np.testing.assert_allclose(outputs(told), expected(1, 2, 3), rtol=1e-5, atol=1e-6)
        assert told["outputs"][0]["name"] == "output"
        status, told = server.infer("m2", X)
        assert status == 200, told
        assert told["outputs"][0]["name"] == "output"
        np.testing.assert_allclose(outputs(told), expected(2), rtol=1e-5, atol=1e-6)
        if replication == "auto":
            assert "requests/s at once" in server.said("^replication ")["event"]


def test_what_answers_without_a_member_cost_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    x = np.random.default_rng(1).normal(size=(300, 8)).astype(np.float32)
    np.savez("test.npz", input=x, targets=expected(1, 2, x=x).argmax(-1))
    process = start([sys.executable, "-m", "apportion", "serve", "1.onnx", "2.onnx", "--evaluate", "test.npz"])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, text
    assert re.search(r"^300 examples\nall members +100\.00%$", text, re.MULTILINE)
    shares = [100 * np.mean(expected(n, x=x).argmax(-1) == expected(1, 2, x=x).argmax(-1)) for n in (2, 1)]
    for n, share in zip((1, 2), shares, strict=True):
        assert re.search(rf"^without m{n} +{share:.2f}%  {share - 100:+.2f} points$", text, re.MULTILINE)


def test_requests_of_other_shapes_and_wrong_ones_do_each_other_no_harm(tmp_path: Path) -> None:
    """Many at once, so that they meet in the queue."""
    ends = [
        helper.make_tensor_value_info("input", 1, ["rows", "columns"]),
        helper.make_tensor_value_info("i", 7, ["rows"]),
    ]
    nodes = [helper.make_node("ReduceSum", ["input", "one"], ["sum"], keepdims=0)]
    nodes.append(helper.make_node("Gather", ["table", "i"], ["found"]))
    nodes.append(helper.make_node("Add", ["sum", "found"], ["output"]))
    held = [helper.make_tensor("one", 7, [1], [1]), helper.make_tensor("table", 1, [4], [0.0, 10.0, 20.0, 30.0])]
    out = [helper.make_tensor_value_info("output", 1, ["rows"])]
    graph = helper.make_graph(nodes, "g", ends, out, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "g.onnx")
    wrong: list[Any] = []

    def ask(n: int) -> None:
        for at in range(30):
            columns, index = 3 + (n + at) % 5, 99 if (n + at) % 7 == 0 else n % 4
            tensors = [
                {"name": "input", "shape": [1, columns], "datatype": "FP32", "data": [1.0] * columns},
                {"name": "i", "shape": [1], "datatype": "INT64", "data": [index]},
            ]
            status, _, body = server.ask("POST", "/v2/models/m1/infer", json.dumps({"inputs": tensors}).encode())
            told = json.loads(body)
            right = status == 400 if index == 99 else status == 200 and outputs(told) == [columns + 10 * index]
            if not right:
                wrong.append((columns, index, status, told))

    with serving(tmp_path, "g.onnx", "--deadline", "10s") as server:
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert server.get("/status")["members"][0]["restarts"] == 0
    assert not wrong, wrong[:3]


def test_who_gives_no_time_is_no_reason_to_leave_members_out(four: Server) -> None:
    for _ in range(8):
        status, _ = four.infer("ensemble", X, timeout=1)
        assert status == 504
    _, told = four.infer("ensemble", X)
    assert not told["parameters"]["degraded"]


# What goes wrong


@pytest.mark.thorough
def test_a_member_that_is_killed_costs_no_answer_and_is_back_with_another_process(folder: Path) -> None:
    files = [f"{n}.onnx" for n in range(1, 5)]
    with serving(folder, *files, "--deadline", "2s", "--replication", "between_graph") as server:
        server.said("spare ready")
        answers: list[tuple[int, dict[str, Any]]] = []
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                answers.append(server.infer("ensemble", X))

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        for kill in range(1, 4):
            member = f"m{kill}"
            dead = server.pid(member)
            os.kill(dead, signal.SIGKILL)
            server.said(rf"^member {member} pid ", times=2)
            assert server.pid(member) != dead
            server.said("spare ready", times=1 + kill)
        over.set()
        for thread in threads:
            thread.join(10)
        assert {status for status, _ in answers} == {200}
        assert all(told["parameters"]["members_used"] for _, told in answers)
        _, told = server.infer("ensemble", X)
        assert not told["parameters"]["degraded"]
        np.testing.assert_allclose(outputs(told), expected(1, 2, 3, 4), rtol=1e-5, atol=1e-6)


def test_at_the_deadline_whoever_is_late_is_left_out_and_said_to_be(folder: Path) -> None:
    with serving(folder, "1.onnx", "2.onnx", "--deadline", "200ms", "--replication", "between_graph") as server:
        frozen = server.pid("m2")
        os.kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        status, told = server.infer("ensemble", X)
        took = time.monotonic() - began
        os.kill(frozen, signal.SIGCONT)
        assert status == 200
        np.testing.assert_allclose(outputs(told), expected(1), rtol=1e-5, atol=1e-6)
        assert told["parameters"]["members_used"] == "m1"
        assert told["parameters"]["members_late"] == "m2"
        assert told["parameters"]["degraded"]
        assert 0.15 < took < 2.0


def test_a_quorum_that_is_missed_is_a_504_that_says_who(folder: Path) -> None:
    arguments = ["1.onnx", "2.onnx", "--deadline", "5s", "--quorum", "2", "--replication", "between_graph"]
    with serving(folder, *arguments) as server:
        os.kill(server.pid("m2"), signal.SIGSTOP)
        status, told = server.infer("ensemble", X, timeout=150_000)
        assert status == 504
        assert told == {"error": "the deadline passed before m2 answered: 1 answered of the 2 that the quorum needs"}


@pytest.mark.thorough
def test_a_member_that_hangs_is_left_out_of_the_wait_then_replaced(folder: Path) -> None:
    with serving(folder, "1.onnx", "2.onnx", "--deadline", "500ms", "--replication", "between_graph") as server:
        server.said("spare ready")
        frozen = server.pid("m2")
        os.kill(frozen, signal.SIGSTOP)
        for _ in range(3):
            server.infer("ensemble", X)
        began = time.monotonic()
        _, told = server.infer("ensemble", X)
        assert time.monotonic() - began < 0.45, "nobody waits for it any more"
        assert told["parameters"]["members_absent"] == "m2"
        server.said("^member m2 pid ", times=2)
        assert not alive(frozen)
        eventually("m2 is waited for", lambda: not server.infer("ensemble", X)[1]["parameters"]["degraded"])


def test_what_a_single_net_had_when_it_was_killed_is_asked_of_its_successor(folder: Path) -> None:
    with serving(folder, "1.onnx", "--deadline", "5s") as server:
        server.said("spare ready")
        pid = server.pid("m1")
        os.kill(pid, signal.SIGSTOP)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(server.infer("m1", X)))
        thread.start()
        eventually("it has the request", lambda: server.get("/status")["members"][0]["computing"])
        os.kill(pid, signal.SIGKILL)
        thread.join(10)
        status, told = found[0]
        assert status == 200, told
        np.testing.assert_allclose(outputs(told), expected(1), rtol=1e-5, atol=1e-6)


def test_it_ends_in_time_after_crashes_with_nothing_left_behind(folder: Path) -> None:
    with serving(folder, "1.onnx", "2.onnx", "--replication", "between_graph") as server:
        server.said("spare ready")
        os.kill(server.pid("m1"), signal.SIGKILL)
        os.kill(server.pid("m2"), signal.SIGSTOP)
        pids = children(server.process.pid)
        status, took = server.ends()
        assert status == 0
        assert took < 5.0
        eventually("its processes have ended", lambda: not any(map(alive, pids)), 1.0)


def test_its_processes_end_with_it_however_it_ends(folder: Path) -> None:
    with serving(folder, "1.onnx", "2.onnx", "--replication", "between_graph") as server:
        server.said("spare ready")
        pids = children(server.process.pid)
        assert len(pids) == 3
        server.ends(signal.SIGKILL)
        eventually("its processes have ended", lambda: not any(map(alive, pids)), 2.0)
    left = Path(tempfile.gettempdir()).glob(f"apportion-serve-{server.process.pid}-*")
    assert list(left), "whoever is killed cannot tidy up"
    with serving(folder, "1.onnx"):
        left = Path(tempfile.gettempdir()).glob(f"apportion-serve-{server.process.pid}-*")
        assert not list(left), "the next one does"


@pytest.mark.thorough
def test_replacing_members_keeps_no_descriptors(folder: Path) -> None:
    with serving(folder, "1.onnx", "2.onnx", "--replication", "between_graph") as server:
        server.said("spare ready")
        before = None
        for kill in range(1, 5):
            os.kill(server.pid("m1"), signal.SIGKILL)
            server.said("^member m1 pid ", times=1 + kill)
            server.said("spare ready", times=1 + kill)
            eventually("the page", lambda: server.get("/status")["members"][0]["proven"])
            if before is None:
                before = descriptors(server.process.pid)
            limit = before
            eventually("as few as before", lambda: descriptors(server.process.pid) <= limit)  # noqa: B023


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["none.onnx"], 2, "member m1: there is no none.onnx"),
        (["1.onnx", "--quorum", "2"], 2, "quorum=2 of 1 members"),
        (["1.onnx", "--deadline", "soon"], 2, "'soon' must be a time: write a number and one of us, ms, s, min"),
        (["1.onnx", "--replication", "both"], 2, "replication='both' must be one of auto, in_graph, between_graph"),
        (["a=1.onnx", "a=2.onnx"], 2, "two members are named a"),
        (["ensemble=1.onnx"], 2, "and not 'ensemble'"),
        (["1.onnx", "--host", "203.0.113.7"], 3, "cannot be listened at"),
        (["http://127.0.0.1:9/v2/models/x"], 3, "does not answer"),
        (["http://127.0.0.1:9/x"], 2, "must be written http://host:port/v2/models/NAME"),
    ],
)
def test_what_cannot_be_served_is_said_with_the_status_of_whose_fault_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, why: str
) -> None:
    monkeypatch.chdir(folder)
    process = start([sys.executable, "-m", "apportion", "serve", "--port", "0", *arguments])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == status, text
    assert why in text


def test_an_address_in_use_is_said_at_once(folder: Path, four: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    process = start([sys.executable, "-m", "apportion", "serve", "--port", str(four.port), "1.onnx"])
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 3, text
    assert text == f"error: 127.0.0.1:{four.port} cannot be listened at: Address already in use\n"


PYTHON = """
import sys
import apportion
serving = apportion.Serving(port=0, aggregation="weighted_mean", weights={"a": 3.0, "b": 1.0})
sys.exit(apportion.serve({"a": "1.onnx", "b": "2.onnx"}, deadline=2.0, quorum=2, serving=serving))
"""


@pytest.mark.thorough
def test_from_python_it_serves_as_its_value_says_until_a_signal(folder: Path) -> None:
    with serving(folder, program=("-c", PYTHON)) as server:
        status, told = server.infer("ensemble", X)
        assert status == 200, told
        np.testing.assert_allclose(outputs(told), 0.75 * expected(1) + 0.25 * expected(2), rtol=1e-5, atol=1e-6)
        about = server.get("/status")
        assert (about["deadline_ms"], about["quorum"]) == (2000.0, 2), about
        assert server.ends()[0] == signal.SIGTERM


def test_metrics_count_what_was_answered(four: Server) -> None:
    four.infer("ensemble", X)
    _, _, body = four.ask("GET", "/metrics")
    assert 'apportion_answers_total{model="ensemble",status="200"}' in body.decode()
    assert 'apportion_member_up{member="m4"} 1.0' in body.decode()
    assert re.search(r'^apportion_member_slowdown\{member="m4"\} \d', body.decode(), re.MULTILINE)
    models = {model["model"]: model for model in four.get("/status")["models"]}
    assert models["ensemble"]["answers"] >= 1
    assert models["ensemble"]["p99_ms"] >= models["ensemble"]["p50_ms"] > 0


def test_a_browser_shows_the_members_and_what_became_of_requests(four: Server, browser: Browser) -> None:
    four.infer("ensemble", X)
    page = browser("--dump-dom", "--virtual-time-budget=3000", f"http://127.0.0.1:{four.port}/")
    for n in range(1, 5):
        assert re.search(
            rf'<tr data-member="m{n}"><td>m{n}</td><td class="closed">closed</td><td>{four.pid(f"m{n}")}<', page
        )
    assert "4 members, between_graph; deadline 2000 ms, quorum 1" in page
    assert '<tr data-model="ensemble"><td>ensemble</td>' in page


def test_the_openapi_file_has_every_endpoint_that_there_is(four: Server) -> None:
    about = four.get("/openapi.json")
    assert about["openapi"] == "3.1.0"
    for path, methods in about["paths"].items():
        if "get" in methods:
            status, _, _ = four.ask("GET", path.replace("{model}", "m1").replace("{version}", "1"))
            assert status == 200, path


ENDLESS = """<ir_version: 9, opset_import: ["" : 18]>
net (float[n, 8] input, float[1] times) => (float[n, 8] y) <bool go = {1}> {
    whole = Cast <to = 7> (times)  count = Squeeze (whole)
    y = Loop (count, go, input) <body = body (int64 i, bool c, float[n, 8] s) => (bool d, float[n, 8] t) {
        d = Identity (c)  t = Tanh (s) }>
}"""


@pytest.mark.thorough
def test_what_is_not_answered_when_the_server_ends_is_answered_503(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(ENDLESS), tmp_path / "net.onnx")
    tensors = [
        {"name": "input", "shape": [1, 8], "datatype": "FP32", "data": [0.5] * 8},
        {"name": "times", "shape": [1], "datatype": "FP32", "data": [1e12]},
    ]
    body = json.dumps({"inputs": tensors}).encode()
    with serving(tmp_path, "net.onnx", "--deadline", "30s", "--serving", "serving(drain_seconds=0.2)") as server:
        answers: list[tuple[int, bytes]] = []

        def ask() -> None:
            status, _, text = server.ask("POST", "/v2/models/m1/infer", body)
            answers.append((status, text))

        client = threading.Thread(target=ask)
        client.start()
        eventually("it computes", lambda: server.get("/status")["members"][0]["computing"] == 1)
        server.ends()
        client.join(SECONDS)
    ((status, text),) = answers
    assert status == 503
    assert b"the server has ended before this was answered" in text
