"""What the tests of every strategy ask of a proof."""

from __future__ import annotations

from apportion.runtime.proof.proof import Proof, Round

EXACT = 1e-10


def assert_equal(proof: Proof, *, by_design: bool = False) -> Round:
    """In float64 every rank has what the reference has; ``by_design``: something (dropout's draws) may differ."""
    (found,) = proof.rounds
    assert found.precision == "float64"
    assert found.disagreement is None
    assert found.worst.absolute <= EXACT, found
    assert proof.holds
    assert by_design or not proof.by_design
    return found
