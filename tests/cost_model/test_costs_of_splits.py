"""What strategies cost that split one network: where they cut it, what they wait for, what they refuse; and what others
have published."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.strategy import Strategy
from apportion.cost_model.cluster import Cluster, Device, Link, Placement, Rate
from apportion.cost_model.collectives import all_gather, all_reduce, reduce_scatter
from apportion.cost_model.cost import Cost
from apportion.cost_model.partitioning import LayerWork, balanced, chain, replicated
from apportion.cost_model.profile import LayerProfile, Profile, Timing
from apportion.cost_model.simulator import SimulatedTask, simulate, terms
from apportion.cost_model.strategies import pipeline, wavefront
from apportion.cost_model.strategies.pipeline import TimedPasses, TimedStage
from apportion.parallel.pipeline.staging import Turn, turns
from apportion.strategies.conv_parallel import ConvParallel
from apportion.strategies.hybrid_parallel import HybridParallel
from apportion.strategies.layer_placement import LayerPlacement
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.tensor_parallel import TensorParallel
from apportion.strategies.wavefront_parallel import WavefrontParallel

GIGABIT = 1e9 / 8
EVERY = (
    LayerPlacement(),
    PipelineParallel(),
    PipelineParallel(microbatches=32, schedule="gpipe", recompute=True),
    WavefrontParallel(),
    TensorParallel(),
    ConvParallel(),
    ConvParallel(split="channel"),
    HybridParallel(),
    HybridParallel(exchange="rotate"),
)


def layout(  # noqa: PLR0913 (what machines are)
    ranks: int,
    *,
    flops: float = 1e11,
    memory_rate: float = 1e11,
    bandwidth: float = 1e10,
    latency: float = 1e-5,
    call: float = 1e-6,
    hidden: float = 1.0,
    spread: float = 0.0,
    memory: int = 1 << 40,
) -> Placement:
    """Machines of one core, each on a port of its own."""
    devices = tuple(
        Device(
            name=f"m{i}/cpu",
            host=f"m{i}",
            kind="cpu",
            model="made",
            memory_bytes=memory,
            rates=(Rate(threads=1, together=1, flops=flops, bytes_per_second=memory_rate),),
            call_seconds=call,
            spread=spread,
        )
        for i in range(ranks)
    )
    names = tuple(d.name for d in devices)
    link = Link(kind="ethernet", devices=names, latency=latency, bandwidth=bandwidth, hidden=hidden)
    return Placement(cluster=Cluster(name="made", devices=devices, links=(link,)), devices=names)


def layer(name: str, kind: str, *inputs: str, **facts: object) -> LayerProfile:
    given = {"parameter_bytes": 0, "activation_bytes": 1000, "kept_bytes": 1000, "flops": 0.0, **facts}
    return LayerProfile(name=name, kind=kind, inputs=inputs, **given)  # type: ignore[arg-type]


def dense(name: str, rows: int, inputs: int, outputs: int, source: str) -> LayerProfile:
    return layer(
        name,
        "Linear",
        source,
        parameter_bytes=4 * outputs * (inputs + 1),
        activation_bytes=4 * rows * outputs,
        kept_bytes=4 * rows * inputs,
        flops=2.0 * rows * inputs * outputs,
        ways=("units", "inputs"),
    )


def mlp(widths: list[int], rows: int) -> Profile:
    layers: list[LayerProfile] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers.append(dense(f"{2 * i}", rows, a, b, layers[-1].name if layers else "x"))
        if i < len(widths) - 2:
            layers.append(layer(f"{2 * i + 1}", "ReLU", f"{2 * i}", activation_bytes=4 * rows * b))
    return Profile(name="mlp", batch_size=rows, layers=tuple(layers), device="other")


def timed(seconds: list[float], rows: int, *, activation_bytes: int = 0) -> Profile:
    """Layers that take so long, forward and twice that backward; times are proportional to the rows."""
    layers = tuple(
        layer(
            f"{i}",
            "Linear",
            f"{i - 1}",
            parameter_bytes=0,
            activation_bytes=activation_bytes,
            kept_bytes=100,
            timings=(Timing(rows=rows, forward=s, backward=2 * s),),
        )
        for i, s in enumerate(seconds)
    )
    return Profile(name="timed", batch_size=rows, layers=layers, device="made")


def convolutions(rows: int, *, size: int = 64, channels: int = 32, many: int = 4, norm: bool = False) -> Profile:
    layers, source, seen = [], "x", 3
    for i in range(many):
        image = 4 * rows * channels * size * size
        layers.append(
            layer(
                f"features.{i}",
                "Conv2d",
                source,
                parameter_bytes=4 * channels * seen * 9,
                activation_bytes=image,
                kept_bytes=image,
                flops=2.0 * rows * channels * seen * 9 * size * size,
                ways=("height", "width", "units", "inputs"),
                image=(size, 3, 1),
            )
        )
        if norm:
            layers.append(layer(f"norm.{i}", "BatchNorm2d", f"features.{i}", activation_bytes=image))
        source, seen = layers[-1].name, channels
    layers.append(layer("flatten", "flatten", source, activation_bytes=4 * rows * channels * size * size))
    layers.append(dense("classifier.0", rows, channels * size * size, 512, "flatten"))
    layers.append(layer("classifier.1", "ReLU", "classifier.0", activation_bytes=4 * rows * 512))
    layers.append(dense("classifier.2", rows, 512, 10, "classifier.1"))
    return Profile(name="net", batch_size=rows, layers=tuple(layers), device="other", batch_norm=norm)


def recurrent(stack: int, length: int, rows: int, hidden: int = 256) -> Profile:
    lstm = layer(
        "lstm",
        "LSTM",
        "embedding",
        parameter_bytes=stack * 8 * hidden * hidden * 4,
        activation_bytes=4 * rows * length * hidden,
        kept_bytes=stack * 24 * rows * length * hidden,
        flops=stack * 16.0 * hidden * hidden * rows * length,
        stack=stack,
        length=length,
        ways=("units", "layer", "chunk"),
    )
    head = dense("head", rows * length, hidden, 65, "lstm")
    embedding = layer("embedding", "Embedding", "x", parameter_bytes=65 * hidden * 4)
    return Profile(name="lm", batch_size=rows, layers=(embedding, lstm, head), device="other")


# Where a chain is cut


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.data())
def test_balanced_stages_are_the_best_of_all_ways_to_cut(seconds: list[int], stages: int, data: st.DataObject) -> None:
    crossing = [0.0, *(data.draw(st.none() | st.integers(0, 5)) for _ in seconds[1:])]
    free = [i for i in range(1, len(seconds)) if crossing[i] is not None]
    if len(free) < stages - 1:
        with pytest.raises(ValueError, match=r"stages? at most"):
            balanced(seconds, crossing, stages)
        return

    def longest_and_sent(cuts: tuple[int, ...]) -> tuple[float, float]:
        bounds = [0, *cuts, len(seconds)]
        cross = [0.0, *(crossing[c] or 0.0 for c in cuts), 0.0]
        each = [sum(seconds[a:b]) + cross[i] + cross[i + 1] for i, (a, b) in enumerate(itertools.pairwise(bounds))]
        return max(each), sum(cross)

    found = tuple(balanced(seconds, crossing, stages))
    assert longest_and_sent(found) == min(map(longest_and_sent, itertools.combinations(free, stages - 1)))


def test_of_cuts_that_are_equally_good_the_one_that_sends_less_is_taken() -> None:
    assert balanced([4, 1, 1, 1], [0.0, 1, 0, 1], 2) == [2]
    assert balanced([1, 2, 1, 1, 1, 5], [0.0, 0, 1, None, None, 0], 3) == [1, 5]  # 3 and 5 before it, not 3 and 4
    assert balanced([5, 1, 1, 9], [0.0, 2, 1, 0], 2) == [3]
    assert balanced([1, 1, 1, 9], [0.0, 0, 0, 0], 2) == [3]
    assert balanced([2, 2, 2, 9], [0.0, 0, 0, 0], 3) == [1, 3]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(*(st.integers(0, 9) for _ in range(4))), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from((0.5, 2.0, 50.0)),
)
def test_replicated_stages_are_the_best_of_all_ways(
    numbers: list[tuple[int, ...]], workers: int, bandwidth: float
) -> None:
    layers = [LayerWork(*map(float, n)) for n in numbers]

    def seconds(begin: int, end: int, m: int) -> float:
        own = layers[begin:end]
        ring = 2 * (m - 1) / m * sum(w.parameter_bytes for w in own) / bandwidth
        computing = sum(w.forward for w in own) + max(sum(w.backward for w in own), ring)
        sides = [layers[at].crossing_bytes for at in (begin, end) if 0 < at < len(layers)]
        return max(computing, *(2 * side / bandwidth for side in sides), 0.0) / m

    def every() -> list[float]:
        found = []
        for many in range(1, len(layers) + 1):
            for cuts in itertools.combinations(range(1, len(layers)), many - 1):
                bounds = list(itertools.pairwise([0, *cuts, len(layers)]))
                for shared in itertools.product(range(1, workers + 1), repeat=many):
                    if sum(shared) <= workers:
                        found.append(max(seconds(a, b, m) for (a, b), m in zip(bounds, shared, strict=True)))
        return found

    stages, slowest = replicated(layers, workers, bandwidth)
    assert slowest == pytest.approx(min(every()))
    assert slowest == pytest.approx(max(seconds(s.first, s.last + 1, s.replicas) for s in stages))
    assert [s.first for s in stages] == [0, *(s.last + 1 for s in stages[:-1])]
    assert sum(s.replicas for s in stages) <= workers


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 9))
def test_choices_of_a_chain_are_the_cheapest_of_all(costs: list[tuple[int, int]], change: int) -> None:
    def price(choices: tuple[int, ...]) -> int:
        changes = sum(a != b for a, b in itertools.pairwise(choices))
        return sum(own[a] for own, a in zip(costs, choices, strict=True)) + change * changes

    total, choices = chain(costs, lambda i, a, b: change * (a != b))
    assert total == price(tuple(choices)) == min(map(price, itertools.product((0, 1), repeat=len(costs))))


# What a step costs


@pytest.mark.parametrize("strategy", EVERY, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_terms_add_up_and_are_not_negative(strategy: Strategy, ranks: int) -> None:
    profile = {
        "wavefront_parallel": recurrent(64, 128, 32),
        "conv_parallel": convolutions(64, size=256),
        "hybrid_parallel": convolutions(64),
    }.get(str(strategy).partition("(")[0], mlp([512] * 70, 256))
    cost = strategy.cost(profile, layout(ranks, spread=0.02))
    assert all(seconds >= 0 for seconds in cost.terms.values()), cost.terms
    assert cost.step_seconds == pytest.approx(sum(cost.terms.values()))
    assert cost.step_seconds > 0
    assert cost.examples == profile.batch_size
    assert cost.memory["weights"] <= profile.parameter_bytes * (1 if ranks > 1 else 3)
    if ranks > 1 and not isinstance(strategy, ConvParallel):
        assert cost.memory["weights"] < profile.parameter_bytes
    ends = max((span.end for span in cost.timeline), default=0.0)
    assert ends <= cost.step_seconds * 1.0001


def share(cost: Cost, term: str) -> float:
    return cost.terms.get(term, 0.0) / cost.step_seconds


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 0.1), min_size=8, max_size=16), st.integers(2, 8), st.sampled_from(("gpipe", "1f1b")))
def test_more_microbatches_never_wait_for_a_larger_share(seconds: list[float], ranks: int, schedule: str) -> None:
    profile = timed(seconds, 64)
    shares = [
        share(PipelineParallel(microbatches=m, schedule=schedule).cost(profile, layout(ranks, call=0.0)), "bubble")
        for m in (1, 2, 4, 8, 16, 32)
    ]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(shares)), shares


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_wait_for_the_published_share(schedule: str) -> None:
    """(n - 1) / (m + n - 1), of stages that are alike and send nothing."""
    for ranks, microbatches in ((2, 4), (4, 8), (8, 32)):
        strategy = PipelineParallel(microbatches=microbatches, schedule=schedule)
        cost = strategy.cost(timed([0.01] * 16, 32), layout(ranks, call=0.0))
        assert share(cost, "bubble") == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=0.01)


def test_layers_placed_one_after_the_other_never_work_at_once() -> None:
    profile = timed([0.02] * 12, 8)
    alone = 12 * 0.06
    for ranks in (2, 3, 4):
        assert LayerPlacement().cost(profile, layout(ranks)).step_seconds > alone


def test_long_pipelines_cost_what_their_simulation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, where = timed([0.01, 0.011, 0.012, 0.01] * 8, 32, activation_bytes=1 << 20), layout(16)
    simulated = PipelineParallel(microbatches=16).cost(profile, where)
    monkeypatch.setattr(pipeline, "MOST_TASKS", 0)
    closed = PipelineParallel(microbatches=16).cost(profile, where)
    assert simulated.timeline
    assert not closed.timeline
    assert closed.step_seconds == pytest.approx(simulated.step_seconds, rel=0.05)


def test_long_waves_cost_what_their_simulation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, where = recurrent(8, 128, 32), layout(4)
    simulated = WavefrontParallel().cost(profile, where)
    monkeypatch.setattr(wavefront, "MOST_TASKS", 0)
    closed = WavefrontParallel().cost(profile, where)
    assert simulated.timeline
    assert not closed.timeline
    assert closed.step_seconds == pytest.approx(simulated.step_seconds, rel=0.05)


def test_1f1b_keeps_fewer_activations_than_gpipe_in_the_same_time() -> None:
    profile, where = timed([0.01] * 8, 32), layout(4)
    gpipe, one = (PipelineParallel(microbatches=16, schedule=s).cost(profile, where) for s in ("gpipe", "1f1b"))
    assert one.step_seconds == pytest.approx(gpipe.step_seconds, rel=0.02)
    assert one.memory["activations"] <= gpipe.memory["activations"] / 4
    again = PipelineParallel(microbatches=16, recompute=True).cost(profile, where)
    assert again.step_seconds == pytest.approx(one.step_seconds * 4 / 3, rel=0.05)


def test_a_stage_with_batch_norm_is_a_wall_in_the_pipeline() -> None:
    profile = timed([0.01] * 8, 32)
    layers = list(profile.layers)
    layers[7] = replace(layers[7], kind="BatchNorm2d")
    profile = replace(profile, layers=tuple(layers), batch_norm=True)
    with pytest.raises(ValueError, match="statistics of a part of the batch"):
        PipelineParallel().cost(profile, layout(2))
    walled = PipelineParallel(batch_norm="whole").cost(profile, layout(2, call=0.0))
    assert walled.step_seconds == pytest.approx(8 * 0.03, rel=0.05)  # of two stages, nothing overlaps


@given(data=st.data(), schedule=st.sampled_from(["gpipe", "1f1b"]), ranks=st.integers(1, 5), many=st.integers(1, 6))
def test_passes_in_their_order_are_when_the_simulator_says(
    data: st.DataObject, schedule: str, ranks: int, many: int
) -> None:
    """To the last bit, with stages that wait for the whole batch and links that take no time among them."""
    seconds = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.7])
    whole = [data.draw(st.booleans()) if schedule == "gpipe" else False for _ in range(ranks)]
    stages = [TimedStage(data.draw(seconds), data.draw(seconds), 0.0, 0.0, at_once) for at_once in whole]
    links = [data.draw(seconds) for _ in range(ranks - 1)]
    orders = [turns(schedule, stage, ranks, many) for stage in range(ranks)]
    found = TimedPasses(stages, orders, links)
    spans = simulate(tasks_of(stages, orders, links))
    assert found.timeline() == spans
    assert all(found.terms(stage) == terms(spans, f"rank {stage}") for stage in range(ranks))


def tasks_of(stages: list[TimedStage], orders: list[list[Turn]], links: list[float]) -> list[SimulatedTask]:
    """Every pass on its rank, after the one before it there and after what it needs of its neighbours."""
    places: dict[tuple[str, int, int], int] = {}
    for stage, (part, order) in enumerate(zip(stages, orders, strict=True)):
        for kind, number in order:
            places.setdefault((kind, stage, -1 if part.at_once else number), len(places))
            cut = stage - 1 if kind == "forward" else stage
            if 0 <= cut < len(links) and links[cut] > 0:
                places[f"{kind} sent", stage, number] = len(places)
    tasks: dict[int, SimulatedTask] = {}
    for stage, (part, order) in enumerate(zip(stages, orders, strict=True)):
        before: list[int] = []
        for kind, number in [("forward", -1), ("backward", -1)] if part.at_once else order:
            source, cut = (stage - 1, stage - 1) if kind == "forward" else (stage + 1, stage)
            needs = list(before)
            for each in [m for k, m in order if k == kind] if part.at_once else [number]:
                if 0 <= source < len(stages):
                    sender = places[kind, source, -1 if stages[source].at_once else each]
                    sent = places.get((f"{kind} sent", stage, each))
                    needs.append(sender if sent is None else sent)
                    if sent is not None:
                        link = f"{min(source, stage)}-{max(source, stage)} {kind}"
                        name = f"{kind} {each}"
                        tasks[sent] = SimulatedTask(name, "communicating", (link,), links[cut], (sender,), order=sent)
            name = f"{kind} of the batch" if part.at_once else f"{kind} {number}"
            seconds = part.forward if kind == "forward" else part.backward
            before = [places[kind, stage, number]]
            tasks[before[0]] = SimulatedTask(name, "computing", (f"rank {stage}",), seconds, tuple(needs))
    return [tasks[place] for place in sorted(tasks)]


def test_cuts_are_named_or_refused() -> None:
    profile = timed([0.01] * 8, 32)
    named = PipelineParallel(cuts=("4",)).cost(profile, layout(2))
    assert named.step_seconds == pytest.approx(PipelineParallel().cost(profile, layout(2)).step_seconds)
    assert PipelineParallel(cuts=("1",)).cost(profile, layout(2)).step_seconds > 1.5 * named.step_seconds
    for cuts, why in ((("9",), "not a layer"), (("1", "2"), "make 3 stages")):
        with pytest.raises(ValueError, match=why):
            PipelineParallel(cuts=cuts).cost(profile, layout(2))


def test_transfers_that_computing_cannot_hide_cost_their_time() -> None:
    profile = timed([0.01] * 8, 32, activation_bytes=1 << 24)
    hidden, exposed = (
        PipelineParallel(schedule="gpipe").cost(profile, layout(2, hidden=h, bandwidth=1e9)).step_seconds
        for h in (1.0, 0.0)
    )
    assert exposed > 1.05 * hidden


def test_gpipe_hides_transfers_that_1f1b_waits_for() -> None:
    """Of 1f1b each stage has as many micro-batches under way as there are stages from it on: none for the way."""
    profile, slow = timed([0.01] * 8, 32, activation_bytes=1 << 24), layout(2, bandwidth=1e9)
    gpipe, one = (PipelineParallel(schedule=s).cost(profile, slow).step_seconds for s in ("gpipe", "1f1b"))
    assert gpipe < 0.95 * one
    assert PipelineParallel(schedule="gpipe") in list(PipelineParallel.candidates(profile, slow))
    schedules = {s.schedule for s in PipelineParallel.candidates(timed([0.01] * 8, 32), layout(2))}
    assert schedules == {"1f1b"}


# Slices, waves, strips


def test_slices_win_with_few_rows_and_lose_over_slow_links() -> None:
    profile = mlp([2048] * 9, 16)
    alone = TensorParallel().cost(profile, layout(1)).step_seconds
    assert TensorParallel().cost(profile, layout(4)).step_seconds < alone / 2
    assert TensorParallel().cost(profile, layout(4, bandwidth=1e6)).step_seconds > alone


def test_a_pair_sends_less_than_its_layers_alone() -> None:
    pairs = mlp([2048, 2048, 2048], 64)
    no_pair = replace(pairs, layers=tuple(replace(x, kind="Softmax") if x.kind == "ReLU" else x for x in pairs.layers))
    found = [TensorParallel().cost(p, layout(2)).terms["communicating"] for p in (pairs, no_pair)]
    assert found[0] < found[1]


def test_a_narrow_layer_is_computed_by_every_rank() -> None:
    profile = mlp([3072, 2048, 2048, 10], 128)
    cost = TensorParallel().cost(profile, layout(2))
    wide = sum(x.parameter_bytes for x in profile.layers[:3])
    assert cost.memory["weights"] == pytest.approx(wide / 2 + profile.layers[-1].parameter_bytes, rel=1e-3)


def test_waves_overlap_layers_and_short_chunks_cost_calls() -> None:
    profile = recurrent(4, 128, 32)
    alone = sum(profile.layer_seconds(x, layout(1).device(0), rows=32).both for x in profile.layers)
    two = WavefrontParallel().cost(profile, layout(2)).step_seconds
    assert alone / 2 < two < 0.8 * alone
    slow = layout(2, call=1e-4)
    fine, coarse = (WavefrontParallel(chunk=c).cost(profile, slow) for c in (1, 32))
    assert fine.step_seconds > coarse.step_seconds


def test_high_images_are_worth_strips_and_low_ones_are_not_proposed() -> None:
    high, low = convolutions(2, size=256), convolutions(2, size=8)
    alone = sum(high.layer_seconds(x, layout(1).device(0), rows=2).both for x in high.layers)
    assert ConvParallel().cost(high, layout(4)).step_seconds < alone / 2
    assert ConvParallel(split="height") in list(ConvParallel.candidates(high, layout(4)))
    assert ConvParallel(split="height") not in list(ConvParallel.candidates(low, layout(4)))


def test_columns_are_priced_by_the_width_of_image_and_window() -> None:
    square = convolutions(2, size=64)
    rows, columns = (ConvParallel(split=split).cost(square, layout(4)) for split in ("height", "width"))
    assert rows.terms == columns.terms
    convs = [replace(x, across=(8, 7, 1)) if x.image else x for x in square.layers]
    oblong = replace(square, layers=tuple(convs))
    turned = [replace(x, image=(8, 7, 1), across=(64, 3, 1)) if x.image else x for x in square.layers]
    assert ConvParallel().cost(oblong, layout(4)).terms == rows.terms
    narrow = ConvParallel(split="width").cost(oblong, layout(4))
    assert narrow.terms == ConvParallel().cost(replace(square, layers=tuple(turned)), layout(4)).terms
    assert narrow.terms["computing"] > rows.terms["computing"], "each edge is longer, and half of the image"


def in_groups(*groups: int) -> Profile:
    profile = convolutions(4, many=len(groups))
    convs = iter(groups)
    return replace(profile, layers=tuple(replace(x, groups=next(convs)) if x.image else x for x in profile.layers))


def test_towers_send_nothing_and_what_follows_them_is_gathered() -> None:
    profile, here = in_groups(1, 2, 1, 2), layout(2, bandwidth=1e6)
    image, outputs = profile.layers[0].activation_bytes, profile.layers[-3].activation_bytes
    ranks = range(2)
    cost = ConvParallel(split="group").cost(profile, here)
    expected = all_gather(here, ranks, image) + reduce_scatter(here, ranks, image) + all_reduce(here, ranks, outputs)
    assert cost.terms["communicating"] == pytest.approx(expected, rel=1e-3)
    towers = ConvParallel(split="group").cost(in_groups(1, 2, 2, 2), here)
    assert towers.terms["communicating"] == pytest.approx(all_reduce(here, ranks, outputs), rel=1e-3)
    assert cost.memory["weights"] == pytest.approx(ConvParallel(split="channel").cost(profile, here).memory["weights"])


def test_the_first_towers_add_up_the_gradient_of_what_all_have() -> None:
    here = layout(2, bandwidth=1e6)
    later = in_groups(1, 2, 1, 2)
    pooled = layer("pool", "MaxPool2d", "x", activation_bytes=later.layers[0].activation_bytes, image=(64, 2, 2))
    first = replace(later.layers[1], inputs=("pool",))
    profile = replace(later, layers=(pooled, first, *later.layers[2:]))
    outputs, image = profile.layers[-3].activation_bytes, pooled.activation_bytes
    both = all_gather(here, range(2), image) + reduce_scatter(here, range(2), image)
    expected = both + all_reduce(here, range(2), outputs) + all_reduce(here, range(2), image)
    assert ConvParallel(split="group").cost(profile, here).terms["communicating"] == pytest.approx(expected, rel=1e-3)


def test_channels_with_fewer_groups_than_workers_are_computed_alike() -> None:
    here = layout(4, bandwidth=1e6)
    few, many = (ConvParallel(split="channel").cost(in_groups(1, n, 1, 1), here).terms for n in (2, 4))
    assert few["computing"] > many["computing"]
    image = in_groups(1, 2, 1, 1).layers[0].activation_bytes
    sums = 2 * all_reduce(here, range(4), image)  # after the last two, and back
    assert few["communicating"] == pytest.approx(sums + all_gather(here, range(4), image), rel=1e-3)


def test_groups_are_refused_as_they_are_when_built() -> None:
    split = ConvParallel(split="group")
    with pytest.raises(ValueError, match='no convolution with groups: use split="channel", or data_parallel'):
        split.cost(convolutions(4), layout(2))
    with pytest.raises(ValueError, match='groups=2 cannot be shared by 4 workers: use workers<=2, or split="channel"'):
        split.cost(in_groups(1, 2, 1, 2), layout(4))


def test_halos_hide_behind_the_inside_until_the_link_is_slow() -> None:
    profile = convolutions(2, size=256)
    fast, slow = (ConvParallel().cost(profile, layout(4, bandwidth=b)).terms for b in (1e10, 1e5))
    sums = sum(x.parameter_bytes for x in profile.layers[:4]) + profile.layers[-3].activation_bytes
    assert fast["communicating"] < 0.1 * fast["computing"]
    row, layers, both_ways = 2 * 32 * 256 * 4, 3, 2  # the first looks at the images, which every rank has
    halos = layers * both_ways * 2 * row / 1e5
    assert slow["communicating"] == pytest.approx(halos + 2 * 3 / 4 * sums / 1e5, rel=0.05)


def test_the_trick_shares_out_all_that_is_computed_and_sends_what_crosses() -> None:
    profile, where = convolutions(64), layout(4)
    cost = HybridParallel().cost(profile, where)
    alone = sum(profile.layer_seconds(x, layout(1).device(0), rows=64).both for x in profile.layers)
    crossing = profile.crossing_bytes[[x.name for x in profile.layers].index("classifier.0")]
    assert cost.terms["computing"] == pytest.approx(alone / 4, rel=0.05)
    assert cost.terms["communicating"] > 3 / 4 * crossing / 1e10
    assert cost.memory["weights"] < profile.parameter_bytes / 3
    rotated = HybridParallel(exchange="rotate").cost(profile, where)
    assert rotated.terms["communicating"] < cost.terms["communicating"]  # all shares but the first come meanwhile


# What is proposed, and refused


def test_nothing_is_proposed_where_there_is_nothing_to_do() -> None:
    where = layout(2)
    images, text, dense_only = convolutions(64), recurrent(2, 64, 32), mlp([64, 64], 32)
    assert not list(WavefrontParallel.candidates(images, where))
    assert not list(WavefrontParallel.candidates(text, layout(3)))
    assert next(iter(WavefrontParallel.candidates(text, where))) == WavefrontParallel()
    for strategy in (ConvParallel, HybridParallel):
        assert not list(strategy.candidates(text, where))
        assert not list(strategy.candidates(dense_only, where))
        assert list(strategy.candidates(images, where))
    assert not list(PipelineParallel.candidates(dense_only, where))  # one layer
    for strategy in (PipelineParallel, LayerPlacement, TensorParallel, ConvParallel, HybridParallel, WavefrontParallel):
        assert not list(strategy.candidates(images, layout(1)))


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_all_that_is_proposed_has_a_price_or_a_reason(ranks: int) -> None:
    for profile in (convolutions(64, norm=True), recurrent(4, 128, 64), mlp([256] * 40, 64)):
        kinds = (PipelineParallel, LayerPlacement, TensorParallel, ConvParallel, HybridParallel, WavefrontParallel)
        for strategy in itertools.chain.from_iterable(kind.candidates(profile, layout(ranks)) for kind in kinds):
            assert strategy.cost(profile, layout(ranks)).step_seconds > 0


def test_recomputing_is_proposed_only_where_memory_does_not_suffice() -> None:
    profile = timed([0.01] * 8, 32)
    profile = replace(profile, layers=tuple(replace(x, kept_bytes=10_000_000) for x in profile.layers))
    assert not any(s.recompute for s in PipelineParallel.candidates(profile, layout(4)))
    assert any(s.recompute for s in PipelineParallel.candidates(profile, layout(4, memory=10_000_000)))


def test_slicing_begins_later_where_the_first_layer_is_dear_to_exchange() -> None:
    profile = convolutions(256, size=32, channels=64)
    start = [x.name for x in profile.layers].index("classifier.0")
    assert HybridParallel() in list(HybridParallel.candidates(profile, layout(4)))
    pooled = list(profile.layers)
    pooled[start] = replace(pooled[start], parameter_bytes=4 * 512 * 65, flops=2.0 * 256 * 64 * 512)
    pooled[start + 1] = replace(pooled[start + 1], kind="LayerNorm")
    pooled.insert(start + 2, dense("classifier.big", 256, 512, 65536, "classifier.1"))
    pooled[-1] = dense("classifier.2", 256, 65536, 10, "classifier.big")
    late = replace(profile, layers=tuple(pooled))
    found = list(HybridParallel.candidates(late, layout(4, bandwidth=1e9)))
    assert HybridParallel() in found
    assert HybridParallel(tensor="classifier.big") in found


@pytest.mark.parametrize(
    ("facts", "strategy", "why"),
    [
        ({"own_update": True}, LayerPlacement(), "only the last stage has"),
        ({"own_update": True}, PipelineParallel(), "only the last stage has"),
        ({"own_update": True}, TensorParallel(), "calls the network as it likes"),
        ({"own_update": True}, ConvParallel(), "what forward calls is cut"),
        ({"own_update": True}, HybridParallel(), "its parts are called"),
        ({"carries": True}, LayerPlacement(), "back from the last stage to the first"),
        ({"carries": True}, ConvParallel(), "does not divide"),
        ({"carries": True}, HybridParallel(), "rows do not stay"),
        ({"cut_by_rows": False}, PipelineParallel(), "couples examples"),
        ({"cut_by_rows": False}, HybridParallel(exchange="rotate"), "couples examples"),
        ({"untraceable": "it decides by its numbers"}, PipelineParallel(), "cannot be cut into stages"),
        ({"untraceable": "it decides by its numbers"}, ConvParallel(), "it decides by its numbers"),
        (
            {"untraceable": "it decides by its numbers"},
            HybridParallel(),
            "it decides by its numbers; so hybrid_parallel cannot cut",
        ),
        ({"precision": "bfloat16"}, WavefrontParallel(), "choose a type for each operation"),
        ({}, PipelineParallel(stages=5), "needs as many workers"),
        ({}, WavefrontParallel(), "no recurrent layers"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_run_has_no_price_but_a_reason(facts: dict[str, object], strategy: Strategy, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        strategy.cost(replace(convolutions(64), **facts), layout(2))


def test_too_few_layers_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="workers<=2"):
        LayerPlacement().cost(timed([0.1, 0.1], 8), layout(3))
    with pytest.raises(ValueError, match="workers<=2"):
        WavefrontParallel().cost(recurrent(2, 64, 32), layout(3))
    with pytest.raises(ValueError, match="cannot feed 8 workers"):
        HybridParallel().cost(convolutions(4), layout(8))
    with pytest.raises(ValueError, match="finds no layer that it can slice"):
        TensorParallel().cost(timed([0.1], 8), layout(2))


def test_many_layers_on_many_devices_take_few_tasks() -> None:
    profile, where = mlp([256] * 101, 512), layout(64)
    for microbatches in (4, 8, 16, 32):
        cost = PipelineParallel(microbatches=microbatches).cost(profile, where)
        assert len(cost.timeline) <= pipeline.MOST_TASKS
    assert len(WavefrontParallel().cost(recurrent(64, 512, 32), where).timeline) <= wavefront.MOST_TASKS


# What others have measured


def test_gpipe_speeds_up_transformer_48_as_published() -> None:
    """Huang et al., GPipe, NeurIPS 2019, table 2: Transformer-48 with 32 micro-batches on 2, 4 and 8 accelerators, 1.8,
    3.4 and 6.3 times as fast as one of them. Only the bubble, and what is recomputed, is told by the model: layers
    that are alike, and links that are fast beside them."""
    profile = timed([0.1] * 48, 32, activation_bytes=1 << 20)

    def seconds(ranks: int) -> float:
        strategy = PipelineParallel(microbatches=32, schedule="gpipe", recompute=True)
        return strategy.cost(profile, layout(ranks, bandwidth=1e11)).step_seconds

    assert seconds(2) / seconds(4) == pytest.approx(3.4 / 1.8, rel=0.1)
    assert seconds(2) / seconds(8) == pytest.approx(6.3 / 1.8, rel=0.1)


def test_the_speech_net_of_distbelief_is_slower_on_more_than_8_machines() -> None:
    """Dean et al., 2012, figure 3: a network of 42 million weights, 11 frames of 40 in, four layers of 2560 and 8192
    out, is 2.2 times as fast on 8 machines as on one, and slower on more. A machine of 2012: two sockets of eight cores
    at 2.6 GHz, of which SSE takes 8 operations a cycle, 333 GFLOP/s, and a matrix product reaches 60 % of that;
    gigabit Ethernet with 0.1 ms from program to program. The paper does not say how many frames are in a batch."""
    profile = mlp([440, 2560, 2560, 2560, 2560, 8192], 100)
    assert profile.parameter_bytes / 4 == pytest.approx(42e6, rel=0.02)
    seconds = {
        n: TensorParallel()
        .cost(profile, layout(n, flops=2e11, memory_rate=4e10, bandwidth=GIGABIT, latency=1e-4))
        .step_seconds
        for n in (1, 2, 4, 8, 16)
    }
    assert seconds[16] > seconds[8]
    assert seconds[8] < seconds[4] < seconds[2] < seconds[1]


def test_passes_are_simulated_in_the_order_of_the_schedule() -> None:
    cost = PipelineParallel(microbatches=4).cost(timed([0.01] * 4, 4), layout(2))
    for stage in range(2):
        done = [span.name for span in sorted(cost.timeline, key=lambda s: s.begin) if span.on == f"rank {stage}"]
        assert done[:-1] == [f"{kind} {number}" for kind, number in turns("1f1b", stage, 2, 4)]
