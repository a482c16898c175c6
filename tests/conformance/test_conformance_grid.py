"""Every strategy x every network of these tests and of the examples x 1 to 4 workers x SGD and Adam: one device's, or
refused by name. All of it is slow; what is proved always is in test_conformance.py.

In pieces: ``scripts/test -m slow tests/conformance/test_conformance_grid.py -k "tensor_parallel and examples"``
"""

from __future__ import annotations

import example_networks
import grid
import networks
import pytest
from grid import EXACT, NETWORKS, STEPS, STRATEGIES, optimizers, refusal, workers_of
from ranks import by_value

import apportion
from apportion.core.value import find, names, parse
from apportion.runtime.proof.proof import Proof


def prove(strategy: str, name: str, workers: int, optimizer: str) -> Proof:
    with by_value(networks), by_value(example_networks), by_value(grid):
        return apportion.check(grid.at(name, optimizer), strategy, workers=workers, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_network_equals_one_device_or_is_refused(strategy: str, name: str) -> None:
    for workers in workers_of(strategy):
        for optimizer in optimizers(name):
            why = refusal(strategy, name, workers, optimizer)
            if why is None:
                proof = prove(strategy, name, workers, optimizer)
                (found,) = proof.rounds
                at = f"{workers} workers, {optimizer}: {found}"
                assert found.precision == "float64", at
                assert found.steps == STEPS, at
                assert found.disagreement is None, at
                # L-BFGS divides by differences of gradients that vanish as it converges, which makes rounding large on
                # one device too: `check` measures how large, and `holds` is by that.
                assert found.worst.absolute <= EXACT or (name, optimizer) == ("lbfgs", "own"), at
                assert proof.holds, at
                assert not proof.by_design, at
                continue
            with pytest.raises(ValueError, match=why) as raised:
                prove(strategy, name, workers, optimizer)
            assert "use " in str(raised.value)  # the cure
            if name != "lbfgs":
                break  # whatever the optimizer


def test_every_exact_strategy_and_every_example_is_on_the_grid() -> None:
    """Those that play are proved by themselves, in tests/strategies/test_actor_critic.py."""
    exact = {name for name in names("apportion.strategies") if find(name, "apportion.strategies")().exact}
    assert {str(parse(strategy, "apportion.strategies")).partition("(")[0] for strategy in STRATEGIES} == exact
    texts = {file.stem: file.read_text() for file in example_networks.EXAMPLES.glob("*.py")}
    given = {name for name, text in texts.items() if "\nworkload = " in text and "apportion.actor_critic(" not in text}
    assert set(example_networks.examples) == given
