"""Frames a second of rollouts of other sizes: priced from round numbers, and told with what speaks for cores."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from by_hand import chain, machine

from apportion.cost_model.cluster import Cluster
from apportion.cost_model.profile import Pass, Profile
from apportion.cost_model.rollouts import LearnTiming, PlayTiming, RolloutTimes
from apportion.planner.build import make
from apportion.planner.calibration import Correction
from apportion.planner.plan_text import show_plan
from apportion.planner.rollouts.rates import RolloutRate, rates, table, why
from apportion.planner.search import search
from apportion.reporting.html.plan_page import plan_page

HOST = machine(2).cluster
SIZES = (2, 8)


def times(*places: tuple[str, int, float]) -> RolloutTimes:
    """Of each place (device, workers at once, how many times as long learning takes): a step of K environments takes 1
    s in them, and the network acts in 0.5 s, however many they are; 0.1 s go beside; a frame is learnt from in 0.25 s;
    an update takes 2 s."""
    played = tuple(
        PlayTiming(device=device, together=n, environments=k, environment=1.0, acting=0.5, beside=0.1)
        for device, n, _ in places
        for k in SIZES
    )
    learned = tuple(
        LearnTiming(
            device=device,
            together=n,
            environments=k,
            steps=t,
            forward=0.1 * k * t * slow,
            backward=0.15 * k * t * slow,
            update=2.0,
        )
        for device, n, slow in places
        for k in SIZES
        for t in (4, 16)
    )
    return RolloutTimes(environments=2, steps=4, played=played, learned=learned)


def playing(*places: tuple[str, int, float]) -> Profile:
    return replace(chain(1.0, parameter_bytes=0), batch_size=1, frames=8, rollouts=times(*places))


PLAYING = playing(("made", 1, 1.0), ("made", 2, 1.0))


def of(found: tuple[RolloutRate, ...], strategy: str, size: tuple[int, int], kind: str = "cpu") -> RolloutRate:
    (one,) = (r for r in found if (r.strategy, (r.environments, r.steps), r.kind) == (strategy, size, kind))
    return one


PARTS = "environment", "acting", "learning", "rest"


def rate(workers: int, frames: float, kind: str = "cpu", size: tuple[int, int] = (4, 8), **parts: float) -> RolloutRate:
    """The parts of a frame in microseconds."""
    seconds = {f"{name}_seconds": parts.get(name, 10.0) * 1e-6 for name in PARTS}
    return RolloutRate(
        strategy="single_device" if workers == 1 else "hogwild",
        workers=workers,
        kind=kind,
        environments=size[0],
        steps=size[1],
        own=size == (4, 8),
        frames_per_second=frames,
        error=0.1,
        **seconds,
    )


# Rates


@pytest.mark.parametrize("size", [(2, 4), (8, 4), (2, 16), (8, 16)])
def test_one_process_plays_learns_and_updates_one_after_the_other(size: tuple[int, int]) -> None:
    frames, steps = size[0] * size[1], size[1]
    found = of(rates(PLAYING, HOST), "single_device", size)
    step = steps * 1.6 + frames * 0.25 + 2.0
    assert found.frames_per_second == pytest.approx(frames / step)
    assert found.environment_seconds == pytest.approx(steps * 1.0 / frames)
    assert found.acting_seconds == pytest.approx(steps * 0.5 / frames)
    assert found.learning_seconds == pytest.approx(0.25)
    assert found.rest_seconds == pytest.approx((2.0 + steps * 0.1) / frames)
    assert found.seconds == pytest.approx(step / frames)
    assert (found.own, found.workers) == (size == (2, 4), 1)


@pytest.mark.parametrize("strategy", ["data_parallel", "parameter_server", "hogwild"])
def test_workers_that_disturb_nobody_make_as_many_frames_each(strategy: str) -> None:
    """Weights of no bytes are sent, and updated in two halves, in no time: each worker has one rollout a step."""
    found = rates(PLAYING, HOST)
    one, two = of(found, "single_device", (8, 16)), of(found, strategy, (8, 16))
    assert two.workers == 2
    assert 2 * one.frames_per_second <= two.frames_per_second * 1.001
    assert two.frames_per_second <= 2 * 128 / (16 * 1.6 + 128 * 0.25) * 1.001
    assert two.learning_seconds == pytest.approx(one.learning_seconds)


def test_what_is_longer_with_several_workers_at_once_is_taken_from_what_several_have_measured() -> None:
    found = rates(playing(("made", 1, 1.0), ("made", 2, 3.0)), HOST)
    assert of(found, "single_device", (8, 16)).learning_seconds == pytest.approx(0.25)
    assert of(found, "hogwild", (8, 16)).learning_seconds == pytest.approx(0.75)


def test_what_trials_have_taught_holds_for_other_sizes_too() -> None:
    plain, taught = rates(PLAYING, HOST), rates(PLAYING, HOST, Correction(computing=2.0))
    one, twice = of(plain, "single_device", (8, 16)), of(taught, "single_device", (8, 16))
    assert twice.frames_per_second == pytest.approx(one.frames_per_second / 2)
    assert twice.environment_seconds == pytest.approx(2 * one.environment_seconds)
    assert twice.seconds == pytest.approx(2 * one.seconds)


def test_they_may_be_off_as_other_predictions_by_calls_and_by_what_other_programs_took() -> None:
    """A step of calls alone may be off by half, one that was measured alone by a tenth."""
    busy = replace(PLAYING, passes=(Pass(rows=1, forward=1.0, backward=1.0, update=1.0, without_core=0.2),))
    assert of(rates(PLAYING, HOST), "single_device", (2, 4)).error == pytest.approx(0.1)
    assert of(rates(busy, HOST), "single_device", (2, 4)).error == pytest.approx(0.3)
    calls = of(rates(PLAYING, machine(2, call=1e3).cluster), "single_device", (2, 4))
    assert calls.error == pytest.approx(0.5, abs=0.01)


def test_every_size_and_strategy_has_one_rate_and_they_are_in_order() -> None:
    found = rates(PLAYING, HOST)
    sizes = [(r.environments, r.steps) for r in found]
    assert sizes == sorted(sizes)
    assert len(found) == 4 * 4
    assert {r.strategy for r in found} == {"single_device", "data_parallel", "parameter_server", "hogwild"}


def test_a_gpu_has_rates_of_its_own_beside_the_cores() -> None:
    cores, gpus = machine(2).cluster.devices[0], machine(2, kind="cuda").cluster
    gpu = tuple(replace(d, model="a gpu") for d in gpus.devices)
    names = (cores.name, *(d.name for d in gpu))
    both = Cluster(name="both", devices=(cores, *gpu), links=(replace(gpus.links[0], devices=names),))
    found = rates(playing(("made", 1, 1.0), ("a gpu", 1, 0.5)), both)
    assert of(found, "single_device", (8, 16), "cuda").learning_seconds == pytest.approx(0.125)
    assert of(found, "single_device", (8, 16)).learning_seconds == pytest.approx(0.25)
    assert {(r.kind, r.workers) for r in found} == {("cpu", 1), ("cuda", 1), ("cuda", 2)}, "all GPUs work as one does"


def test_another_machine_and_another_network_have_none() -> None:
    assert rates(replace(PLAYING, rollouts=None), HOST) == ()
    elsewhere = replace(HOST, devices=tuple(replace(d, model="another") for d in HOST.devices))
    assert rates(PLAYING, elsewhere) == ()
    assert {r.workers for r in rates(PLAYING, machine(1).cluster)} == {1}, "two workers have no place on one core"


# What is told of them


def test_the_table_marks_the_best_and_the_workloads_own() -> None:
    found = (rate(1, 100), rate(2, 150), rate(1, 300, size=(16, 8)), rate(2, 250, size=(16, 8)))
    heads, rows = table(found)
    assert heads == ["K x T", "single_device", "hogwild"]
    assert rows == [["4 x 8 own", "100 (1)", "150 (2)"], ["16 x 8", "> 300 (1)", "250 (2)"]]


def test_a_cell_has_the_number_of_workers_that_makes_most_frames_and_a_gpu_a_column_of_its_own() -> None:
    found = (rate(1, 100), rate(2, 180), rate(4, 170), rate(1, 90, "cuda"))
    heads, rows = table(found)
    assert heads == ["K x T", "single_device cpu", "hogwild cpu", "single_device cuda"]
    assert rows == [["4 x 8 own", "100 (1)", "> 180 (2)", "90 (1)"]]


def test_cores_win_and_what_they_lose_is_named() -> None:
    told = why((rate(1, 25_000), rate(2, 40_000, learning=20.0)))
    most = "most frames a second are predicted of 4 x 8 by hogwild with 2 workers: 40,000 (within 10%)"
    assert told[0] == f"{most}, the workload's own size"
    assert told[1] == (
        "of a frame of a worker there 10 us the environment, 10 us acting, 20 us learning and 10 us the rest (the "
        "update, pushing, pulling, waiting)"
    )
    assert told[2] == (
        "cores win: 2 workers make 1.60 times the frames of one, since each plays and learns by itself; a frame takes "
        "each of them 50 us instead of 40 us, most of it for learning"
    )


def test_cores_that_do_not_win_are_told_what_takes_longer() -> None:
    told = why((rate(1, 25_000), rate(2, 25_000, rest=50.0)))
    assert told[2] == (
        "cores do not win: 2 workers make 1.00 times the frames of one: a frame takes each of them 80 us instead of 40 "
        "us, most of it for the rest (the update, pushing, pulling, waiting)"
    )


def test_another_size_that_is_faster_is_compared_with_the_workloads_own() -> None:
    told = why((rate(1, 20_000), rate(1, 50_000, size=(16, 8))))
    assert (
        "16 x 8 by single_device: 50,000 (within 10%), 2.50 times those of the workload's own 4 x 8 by single_device"
        in told[0]
    )
    assert "only one number of workers was measured" in told[2]


def test_without_a_gpu_it_says_how_much_one_could_do() -> None:
    told = why((rate(1, 20_000, learning=20.0), rate(2, 40_000, learning=20.0)))
    assert told[3] == (
        "no GPU was measured: learning is 40% of a frame of 4 x 8 by single_device, so one that learnt in no time, and "
        "acted as fast as a core, would make 1.67 times the frames"
    )


@pytest.mark.parametrize(
    ("frames", "said"), [(80_000, "the GPU wins"), (20_000, "the GPU does not win"), (41_000, "about as many")]
)
def test_a_gpu_wins_or_not_by_what_was_measured(frames: float, said: str) -> None:
    told = why((rate(1, 25_000), rate(2, 40_000), rate(1, frames, "cuda", acting=60.0, learning=1.0)))
    (line,) = (text for text in told if "GPU" in text)
    assert said in line
    assert "on the GPU 60 us are acting and 1 us learning, on a core 10 us are acting and 10 us learning" in line


def test_it_says_what_it_does_not_know() -> None:
    told = why((rate(1, 1.0),), "64 environments: they take too long to open and to play")
    assert "not measured: 64 environments: they take too long to open and to play" in told
    assert told[-1].startswith("these are frames a second and not scores")
    assert why(()) == ()


# In a plan


def test_a_plan_tells_them_on_the_terminal_in_json_and_on_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make(search(PLAYING, HOST), PLAYING, HOST)
    assert plan.rollouts == rates(PLAYING, HOST)
    told = plan.to_json()
    assert json.loads(json.dumps(told)) == told
    assert [r["frames_per_second"] for r in told["rollouts"]] == [r.frames_per_second for r in plan.rollouts]
    assert told["rollouts_because"] == list(plan.rollouts_why)
    show_plan(plan)
    text = capsys.readouterr().out
    assert "other rollouts: frames/s, predicted" in text
    assert "2 x 4 own" in text
    assert text.count("> ") == 1, "the best is marked"
    assert "not scores" in text
    page = plan_page(told)
    assert "Other rollouts" in page
    assert "8 x 16" in page


def test_a_plan_of_an_ordinary_workload_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    ordinary = chain(1.0, parameter_bytes=0)
    plan = make(search(ordinary, HOST), ordinary, HOST)
    assert (plan.rollouts, plan.rollouts_why) == ((), ())
    show_plan(plan)
    assert "rollouts" not in capsys.readouterr().out
    assert "Other rollouts" not in plan_page(plan.to_json())
