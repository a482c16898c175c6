"""``benchmarks/rows/gpu.py``: what it draws, and what it makes of a case that dies, hangs or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = ("one", "two", "nccl", "product")
STRATEGIES = ("data_parallel", "fully_sharded", "single_device")
POINTS = [(f"net{n}", "sgd", "cannot" if n % 2 else None) for n in range(12)]
TESTS = [f"test_x.py::test_{n}" for n in range(4)]
CASE = {"kind": "grid", "id": "one", "workers": 1, "strategy": "data_parallel", "network": "mlp", "optimizer": "sgd",
        "refused": None}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "rows"))
    import gpu

    return gpu


def drawn(gpu: Any, seed: int, ids: tuple[str, ...] = SETTINGS) -> list[dict[str, Any]]:
    strategies = lambda workers: STRATEGIES[: 4 - workers]  # noqa: E731
    return list(gpu.drawn(seed, ids, strategies, lambda *_: list(POINTS), TESTS))


def test_the_seed_alone_decides_what_is_drawn(gpu: Any) -> None:
    assert drawn(gpu, 1) == drawn(gpu, 1)
    assert drawn(gpu, 1) != drawn(gpu, 2)


def test_every_case_is_drawn_once(gpu: Any) -> None:
    cases = drawn(gpu, 3)
    assert len({json.dumps(case, sort_keys=True) for case in cases}) == len(cases)
    assert len(cases) == len(POINTS) * (3 + 2 + 2) + len(TESTS)


def test_each_strategy_has_its_turn_in_each_setting_before_any_has_two(gpu: Any) -> None:
    grid = [case for case in drawn(gpu, 4) if case["kind"] == "grid"]
    for each in range(12):
        turn = grid[7 * each : 7 * each + 7]
        assert len({(case["id"], case["strategy"]) for case in turn}) == 7


def test_of_four_networks_at_first_one_is_refused(gpu: Any) -> None:
    own = [c for c in drawn(gpu, 5) if c["kind"] == "grid" and (c["id"], c["strategy"]) == ("two", "data_parallel")]
    assert [case["refused"] is not None for case in own[:8]] == [False, False, False, True] * 2


def test_tests_of_the_product_come_between(gpu: Any) -> None:
    kinds = [case["kind"] for case in drawn(gpu, 6)]
    assert [n for n, kind in enumerate(kinds) if kind == "product"][:3] == [8, 17, 26]


def test_the_tests_of_a_folder_are_found_without_the_slow_ones(gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\n\n@pytest.mark.slow\ndef test_slow(): ...\n\n"
        "@pytest.mark.thorough\n@pytest.mark.parametrize('n', [1, 2])\ndef test_quick(n): ...\n\ndef helper(): ...\n"
    )
    (tmp_path / "test_b.py").write_text("import pytest\npytestmark = [pytest.mark.slow]\ndef test_x(): ...\n")
    assert gpu.product_tests(tmp_path) == ["test_a.py::test_quick"]


@pytest.mark.parametrize(("version", "why"), [(None, "no NCCL"), ([2, 28, 9], "2.28.9"), ([2, 30, 3], "")])
def test_ranks_share_a_card_by_nccl_from_a_version_on(gpu: Any, version: Any, why: str) -> None:
    said = gpu.old(version)
    assert why in said if why else not said


def test_the_environment_of_nccl_is_set_for_its_settings_alone(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    plain = gpu.environment("two", device="cuda", nccl="/x/libnccl.so.2", folder="/x")
    over = gpu.environment("product_nccl", device="cuda", nccl="/x/libnccl.so.2", folder="/x")
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in plain
    assert plain.get("LD_PRELOAD") != "/x/libnccl.so.2"
    assert (over["NCCL_MULTI_RANK_GPU_ENABLE"], over["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert over["LD_PRELOAD"] == "/x/libnccl.so.2"
    assert plain["CUDA_VISIBLE_DEVICES"] == over["CUDA_VISIBLE_DEVICES"] == "3"
    assert gpu.environment("two", device="cpu", nccl=None, folder="/x")["CUDA_VISIBLE_DEVICES"] == ""


@pytest.fixture
def sample(gpu: Any, tmp_path: Path) -> Iterator[Any]:
    made = gpu.Sample(SimpleNamespace(device="cpu", nccl=None), tmp_path)
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.thorough
def test_a_case_that_does_not_answer_and_one_that_dies_end_nothing(
    gpu: Any, sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.server("one")
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "CASE_SECONDS", 0.01)
        hung = sample.run(CASE, 100.0)
    assert (hung["result"], hung["message"]) == ("fails", "no answer in 0 s")
    server = sample.server("one")
    gpu.end(server._process)
    died = sample.run(CASE, 100.0)
    assert died["result"] == "fails"
    assert "ended" in died["message"]
    raised = sample.run({**CASE, "network": "no such network"}, 100.0)
    assert (raised["result"], raised["message"]) == ("fails", "KeyError: 'no such network'")
    refused = sample.run({**CASE, "strategy": "conv_parallel", "refused": "has no convolution"}, 100.0)
    assert (refused["result"], refused["on_the_cpu"]) == ("refuses", "refuses")
    runs = sample.run(CASE, 100.0)
    assert (runs["result"], runs["message"], runs["transport"]) == ("runs", "", "none")
    assert sample.written()["totals"] == {"one": {"runs": 1, "refuses": 1, "fails": 3}}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("pass", "runs"),
        ("raise ValueError('torch 2.11 cannot: use data_parallel')", "refuses"),
        ("raise ValueError('2 rows, not 3')", "fails"),
        ("assert 'use data_parallel' == ''", "fails"),
    ],
)
def test_a_test_that_a_strategy_refuses_is_no_failure(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, result: str
) -> None:
    folder = tmp_path / "tests" / "product"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(f"def test_it():\n    {body}\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    given = gpu.environment("product", device="cpu", nccl=None, folder=tmp_path)
    assert gpu.tested("test_a.py::test_it", given, 60)[0] == result


@pytest.mark.processes
@pytest.mark.slow
def test_part_a_runs_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "rows" / "gpu.py"), "--part", "a", "--device", "cpu"]
    command += ["--seconds", "20", "--seed", "5", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert (found["part"], found["seed"], found["device"]) == ("a", 5, "cpu")
    assert {"what": "nccl", "why": "NCCL joins GPUs"} in found["left_out"]
    assert found["machine"]["torch"]
    assert len(found["cases"]) >= 2
    assert {case["result"] for case in found["cases"]} <= {"runs", "refuses"}
    assert f"seed {found['seed']}: {len(found['cases'])} cases" in done.stdout
