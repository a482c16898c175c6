"""check in ranks that are running already: each is told the same, of the strategy as these ranks run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launched_checks import Told, checked

pytestmark = pytest.mark.processes

EXACT = 1e-10
Checks = Sequence[tuple[str, str]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Told]]:
    """What three ranks on two hosts were told of a (strategy, network), by rank: all of them were started once."""
    checks: Checks = [
        ("data_parallel", "mlp"),
        ("fully_sharded", "mlp"),
        ("planted:a_little_too_much", "mlp"),
        ("planted:seed", "mlp"),
        ("hogwild", "mlp"),
        ("parameter_server(servers=1)", "mlp"),
        ("single_device", "mlp"),
        ("conv_parallel", "mlp"),
        ("data_parallel", "raises"),
        ("data_parallel", "is not built"),
        ("tensor_parallel(min_width=1)", "mlp"),
    ]
    found = checked((2, 1), checks, tmp_path_factory.mktemp("launched"))
    return lambda strategy, network: found[checks.index((strategy, network))]


Told2 = Callable[[str, str], list[Told]]


def test_every_rank_is_told_the_same_proof_of_what_the_hosts_do_together(told: Told2) -> None:
    ranks = told("data_parallel", "mlp")
    assert len(ranks) == 3
    assert all(one.proof == ranks[0].proof for one in ranks)
    assert ranks[0].sentence.startswith("data_parallel on 3 workers of 2 hosts trains the same network as one device")
    assert ranks[0].holds
    assert ranks[0].worst <= EXACT


@pytest.mark.parametrize("strategy", ["fully_sharded", "tensor_parallel(min_width=1)"])
def test_what_needs_every_layer_or_the_process_group_of_torch_is_proved_too(strategy: str, told: Told2) -> None:
    assert all(one.holds and one.worst <= EXACT for one in told(strategy, "mlp"))


def test_a_gradient_that_is_a_ten_millionth_too_large_on_one_rank_is_found(told: Told2) -> None:
    ranks = told("planted:a_little_too_much", "mlp")
    assert not any(one.holds for one in ranks)
    assert all(one.proof == ranks[0].proof for one in ranks)
    assert "does not train the same network as one device" in ranks[0].sentence
    assert "the first that is not one device's" in ranks[0].sentence, "with what each rank's layers computed"


def test_a_rank_with_another_seed_is_named_and_its_state_compared(told: Told2) -> None:
    ranks = told("planted:seed", "mlp")
    assert not ranks[0].holds
    proof = ranks[0].proof
    assert proof is not None
    disagreement = proof["rounds"][0]["disagreement"]
    assert disagreement.startswith("rank 1 is not at rank 0's state after step 1: model/")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("hogwild", "ValueError: hogwild keeps its weights in memory that all of its workers share, and these 3 ranks"),
        ("parameter_server(servers=1)", "ValueError: parameter_server(servers=1) keeps its weights in memory"),
        ("single_device", "ValueError: single_device runs in one process, and 3 ranks are running"),
        ("conv_parallel", "ValueError: Sequential has no convolution"),
    ],
)
def test_what_cannot_run_there_is_refused_by_name_on_all_ranks_alike(strategy: str, said: str, told: Told2) -> None:
    ranks = told(strategy, "mlp")
    assert ranks[0].raised.startswith(said)
    assert len({one.raised for one in ranks}) == 1


def test_a_rank_that_raises_keeps_nobody_waiting_and_all_are_told_why(told: Told2) -> None:
    ranks = told("data_parallel", "raises")
    assert [one.raised for one in ranks] == ["WorkerFailed: rank 1: RuntimeError: a bad row"] * 3
    assert max(one.seconds for one in ranks) < 30.0


def test_a_network_that_one_rank_cannot_build_is_told_by_all(told: Told2) -> None:
    ranks = told("data_parallel", "is not built")
    assert ranks[1].raised == "RuntimeError: not here"
    for rank in (0, 2):
        assert ranks[rank].raised.startswith("WorkerFailed: rank 1 on host ")
        assert ranks[rank].raised.endswith("RuntimeError: not here")


def test_a_rank_that_is_killed_keeps_nobody_waiting(tmp_path: Path) -> None:
    ((first, last),) = checked((2, 1), [("data_parallel", "killed")], tmp_path, lost=True)
    for one in (first, last):
        assert one.raised.startswith("WorkerFailed: rank 1 at ")
        assert one.raised.endswith("is gone: its connection has ended")
