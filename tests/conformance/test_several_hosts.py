"""Every strategy that runs on several hosts trains the network of one device there, in float64: on two hosts of one
rank, on two of two, on one of two and one of one, and on three of one.

Ranks of this host that are told to be on several stand for them: they exchange over connections as such ranks do. One
test has network namespaces stand for hosts, with a cable between them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_checks import checked

pytestmark = pytest.mark.processes

EXACT = 1e-10
STEPS = 8
LAYOUTS = {"2x1": (1, 1), "2x2": (2, 2), "2+1": (2, 1), "3x1": (1, 1, 1)}
"""The ranks on each host."""
STATES = ("clipped", "batch_norm_2d", "counted_tokens", "tied_weights", "two_optimizers", "carried_state")
NETWORKS = {
    "data_parallel": ("mlp", "adam", *STATES, "sparse_embeddings"),
    "data_parallel(microbatches=2)": ("mlp", "adam"),
    "fully_sharded": ("mlp", "adam", "batch_norm_2d", "tied_weights", "counted_tokens"),
    "map_reduce": ("mlp", "adam", "cnn"),
    "local_sgd(every=2)": ("mlp", "adam"),
    "local_sgd(every=2, overlap=True)": ("mlp", "adam"),
    'parameter_server(mode="ordered", servers=1)': ("mlp", "adam", "batch_norm_2d"),
    "parameter_server(servers=1)": ("mlp", "adam", "batch_norm_2d"),
    "tensor_parallel(min_width=1)": ("mlp", "adam", "cnn", "tied_weights"),
    "layer_placement": ("mlp", "batch_norm_2d", "counted_tokens"),
    "pipeline_parallel(microbatches=3)": ("mlp", "cnn"),
    'pipeline_parallel(microbatches=3, schedule="1f1b")': ("mlp", "cnn"),
    "conv_parallel": ("cnn", "batch_norm_2d"),
    'conv_parallel(split="channel")': ("cnn",),
    "hybrid_parallel": ("cnn", "batch_norm_2d"),
    'hybrid_parallel(exchange="rotate")': ("cnn",),
    "wavefront_parallel": ("char_lstm",),
    "data_parallel(of=tensor_parallel(min_width=1), replicas=2)": ("mlp", "cnn"),
    "data_parallel(of=pipeline_parallel(microbatches=3), replicas=2)": ("mlp", "cnn"),
}
"""The networks that each strategy is proved on."""
STAGES = {"mlp": 3}
"""Into how many stages a network can be cut, where that is fewer than four."""


def networks_of(strategy: str, ranks: int) -> tuple[str, ...]:
    """The networks that a strategy can train on so many ranks."""
    staged = strategy.startswith(("layer_placement", "pipeline_parallel"))
    return tuple(name for name in NETWORKS[strategy] if not staged or STAGES.get(name, ranks) >= ranks)


EVERYWHERE = [
    pytest.param(layout, strategy, id=f"{layout}-{strategy}")
    for layout, hosts in LAYOUTS.items()
    for strategy in NETWORKS
    if "replicas=2" not in strategy or sum(hosts) % 2 == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "strategy"), EVERYWHERE)
def test_every_strategy_equals_its_reference_across_hosts(layout: str, strategy: str, tmp_path: Path) -> None:
    hosts = LAYOUTS[layout]
    names = networks_of(strategy, sum(hosts))
    for name, ranks in zip(names, checked(hosts, [(strategy, n) for n in names], tmp_path, steps=STEPS), strict=True):
        assert not ranks[0].raised, (name, ranks[0].raised)
        assert ranks[0].holds, (name, ranks[0].sentence)
        assert f" of {len(hosts)} hosts " in ranks[0].sentence
        assert ranks[0].worst <= EXACT, name
        assert all(one.proof == ranks[0].proof for one in ranks), name
        print(f"{layout}\t{strategy}\t{name}\t{ranks[0].worst:.1e}")  # pytest -s makes a table of it


@pytest.mark.slow
@pytest.mark.serial
def test_hosts_with_a_cable_between_them_equal_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "lib"))
    import hosts as module

    why = module.cannot()
    if why is not None:
        pytest.skip(why)
    ranks = (2, 1)
    checks = [("data_parallel", "mlp"), ("fully_sharded", "mlp"), ("tensor_parallel(min_width=1)", "mlp")]
    checks += [('parameter_server(mode="ordered", servers=1)', "mlp"), ("parameter_server(servers=2, copies=1)", "mlp")]
    with module.several_hosts(ranks, 1e9) as made:
        port, many = made.port(), sum(ranks)
        within = [(made.command(rank, []), made.environment(rank, many, port)) for rank in range(many)]
        found = checked(ranks, [*checks, ("planted:mean_of_means", "mlp"), ("hogwild", "mlp")], tmp_path, within=within)
    *right, wrong, refused = found
    for check, told in zip(checks, right, strict=True):
        assert all(one.holds and one.worst <= EXACT for one in told), (check, told[0])
    assert not any(one.holds or one.raised for one in wrong)
    assert len({one.raised for one in refused}) == 1
    assert refused[0].raised.startswith("ValueError: hogwild keeps its weights in memory")
