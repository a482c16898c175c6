"""Which sizes of rollouts are measured: by workers that answer at once, with times that are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apportion.cost_model.cluster import Cluster, Device, Rate
from apportion.profiler import measure_workload
from apportion.profiler.measure_workload import _beside, _Setting, gathered
from apportion.profiler.rollouts import grid
from apportion.profiler.rollouts.grid import RolloutGrid, lengths, widths

CORES = Device(
    name="a/cpu",
    host="a",
    kind="cpu",
    model="cores",
    memory_bytes=1 << 30,
    rates=(Rate(threads=1, together=1, flops=1e10, bytes_per_second=1e10),),
    cores=8,
)
GPU = replace(CORES, name="a/gpu0", kind="cuda", model="a gpu", cores=1)


class Made:
    """Two workers, and a clock that their work moves. ``opening``, ``a_step``, ``a_frame``: the seconds of opening an
    environment, of a step of one, and of learning from a frame; ``refused``: the environments that do not open."""

    def __init__(self, opening: float, a_step: float, a_frame: float, refused: tuple[int, ...] = ()) -> None:
        self.opening, self.a_step, self.a_frame, self.refused = opening, a_step, a_frame, refused
        self.now, self.orders = 0.0, list[dict[str, Any]]()

    def monotonic(self) -> float:
        return self.now

    def ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        self.orders.append(order)
        width = order["environments"]
        if order["kind"] == "play":
            if width in self.refused:
                return [{"refused": ""}, {"refused": "there are no so many"}]
            self.now += max(order["seconds"], width * (self.opening + grid.FEW_STEPS * self.a_step))
            moving = {"environment": width * self.a_step, "acting": 0.0, "beside": 0.0, "a_rollout": 0.0}
            return [
                {"refused": "", "opening": width * self.opening, **moving},
                {"refused": "", "opening": width * self.opening, **moving, "environment": 3 * width * self.a_step},
            ]
        seconds = width * order["steps"] * self.a_frame
        self.now += max(order["seconds"], grid.FEW_RUNS * seconds)
        return [{"forward": seconds / 2, "backward": seconds / 2, "update": 0.0, "fused": None}] * 2

    def sizes(self, kind: str) -> list[Any]:
        of = [order for order in self.orders if order["kind"] == kind]
        return [(o["environments"], o["steps"]) if kind == "learn" else o["environments"] for o in of]


def measured(made: Made, monkeypatch: pytest.MonkeyPatch, own: tuple[int, int] = (8, 16)) -> RolloutGrid:
    monkeypatch.setattr(grid.time, "monotonic", made.monotonic)
    found = RolloutGrid(made.ask, own, "cores", 2)
    found.measure(2.0)
    return found


@pytest.mark.parametrize(("own", "expected"), [(8, [8, 1, 2, 32]), (1, [1, 4]), (16, [16, 1, 4, 64]), (3, [3, 1, 12])])
def test_the_numbers_of_environments_are_around_the_workloads_own(own: int, expected: list[int]) -> None:
    assert widths(own) == expected


@pytest.mark.parametrize(("own", "expected"), [(16, [16, 4, 64]), (5, [5, 1, 20]), (1, [1, 4])])
def test_the_numbers_of_steps_are_around_the_workloads_own(own: int, expected: list[int]) -> None:
    assert lengths(own) == expected


def test_what_is_quick_is_measured_in_all_sizes_and_in_the_time_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(opening=1e-4, a_step=1e-5, a_frame=1e-6)
    found = measured(made, monkeypatch)
    assert made.sizes("play") == [8, 1, 2, 32]
    assert sorted(made.sizes("learn")) == [(k, t) for k in (1, 2, 8, 32) for t in (4, 16, 64)]
    assert made.sizes("learn")[0] == (8, 16), "the workload's own first"
    assert made.now == pytest.approx(2.0)
    assert found.left_out == {}
    (own,) = (t for t in found.played if t.environments == 8)
    assert (own.environment, own.together, own.device) == (pytest.approx(2 * 8e-5), 2, "cores"), "the mean of two"


def test_what_takes_long_to_open_is_left_out_by_what_one_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(opening=0.1, a_step=1e-5, a_frame=1e-6)
    found = measured(made, monkeypatch)
    assert made.sizes("play") == [8, 1, 2], "the workload's own are open already"
    assert found.left_out == {"32 environments": "they take too long to open and to play"}
    assert {k for k, _ in made.sizes("learn")} == {8, 1, 2}


def test_slow_environments_are_played_in_the_workloads_own_number_and_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(opening=0.0, a_step=5e-3, a_frame=1e-6)
    measured(made, monkeypatch)
    assert made.sizes("play") == [8, 1, 2]


def test_learning_that_takes_long_is_left_out_where_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(opening=0.0, a_step=1e-5, a_frame=2e-4)
    found = measured(made, monkeypatch)
    assert (8, 16) in made.sizes("learn")
    assert (32, 64) not in made.sizes("learn")
    assert found.left_out == {}, "fewer environments have 64 steps as well"
    assert made.now < 4.0


def test_a_number_of_steps_that_nothing_is_learnt_from_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Made(opening=0.0, a_step=1e-5, a_frame=0.1), monkeypatch)
    assert found.left_out == dict.fromkeys(("4 steps", "64 steps"), "they take too long to learn from")


def test_environments_that_do_not_open_are_left_out_with_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Made(1e-4, 1e-5, 1e-6, refused=(1, 2, 32)), monkeypatch)
    assert [t.environments for t in found.played] == [8]
    assert found.left_out == dict.fromkeys([f"{k} environments" for k in (1, 2, 32)], "there are no so many")


def test_what_was_left_out_in_one_place_alone_is_told_with_the_place() -> None:
    one, two = (RolloutGrid(lambda order: [], (8, 16), "cores", together) for together in (1, 2))
    one.left_out, two.left_out = {"32 environments": "slow"}, {"32 environments": "slow", "64 steps": "slower"}
    told = gathered([one, two], {"environments": 8, "rollout_steps": 16})
    assert told.left_out == "32 environments: slow; 64 steps by 2 workers at once on cores: slower"


def test_a_host_with_a_gpu_is_measured_on_it_and_on_its_cores() -> None:
    """Whichever of both the layers of the workload are timed on."""
    both = Cluster(name="both", devices=(CORES, GPU, replace(GPU, name="a/gpu1")))
    alone, all_cores = _Setting(1, 1), _Setting(1, 8)
    assert _beside(both, GPU, [alone]) == [(CORES, alone), (CORES, all_cores)]
    assert _beside(both, CORES, [alone]) == [(CORES, all_cores), (GPU, alone)]
    many = replace(CORES, cores=96)
    most = _Setting(1, measure_workload.MOST_ON_CORES)
    assert _beside(replace(both, devices=(many, GPU)), GPU, [alone]) == [(many, alone), (many, most)]


def test_a_host_without_a_gpu_is_measured_where_its_layouts_have_workers() -> None:
    assert _beside(Cluster(name="cores", devices=(CORES,)), CORES, [_Setting(1, 2)]) == []
