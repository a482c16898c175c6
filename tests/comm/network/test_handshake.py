"""The proof that both ends of a connection know the secret: pure."""

from __future__ import annotations

import pytest

from apportion.comm.network.handshake import (
    CLAIM_BYTES,
    GREETING_BYTES,
    MAGIC,
    PROOF_BYTES,
    Purpose,
    claim,
    greet,
    is_proved,
    proof_of,
    unpack,
)

SECRET, OTHER = b"s" * 32, b"t" * 32
PURPOSE = Purpose("run/world", 3).pack()


def test_both_ends_prove_that_they_know_the_secret() -> None:
    greeting = greet()
    claimed = claim(SECRET, greeting, PURPOSE)
    proved = proof_of(SECRET, greeting, claimed)
    assert proved is not None
    purpose, proof = proved
    assert unpack(purpose) == unpack(PURPOSE)
    assert unpack(purpose)[1] == 3
    assert is_proved(SECRET, greeting, claimed, proof)
    assert (len(greeting), len(claimed), len(proof)) == (GREETING_BYTES, CLAIM_BYTES, PROOF_BYTES)


def test_another_secret_proves_nothing_at_either_end() -> None:
    greeting = greet()
    claimed = claim(OTHER, greeting, PURPOSE)
    assert proof_of(SECRET, greeting, claimed) is None
    proved = proof_of(OTHER, greeting, claimed)
    assert proved is not None
    assert not is_proved(SECRET, greeting, claimed, proved[1])


def test_a_recorded_handshake_proves_nothing_again() -> None:
    first, second = greet(), greet()
    claimed = claim(SECRET, first, PURPOSE)
    proved = proof_of(SECRET, first, claimed)
    assert proof_of(SECRET, second, claimed) is None, "the accepting end's nonce is new"
    again = claim(SECRET, first, PURPOSE)
    assert proved is not None
    assert not is_proved(SECRET, first, again, proved[1]), "the dialling end's nonce is new"


def test_what_a_rank_claims_is_no_proof_of_the_other_end() -> None:
    greeting = greet()
    claimed = claim(SECRET, greeting, PURPOSE)
    assert not is_proved(SECRET, greeting, claimed, claimed[-PROOF_BYTES:]), "reflected"


@pytest.mark.parametrize("place", range(0, CLAIM_BYTES, 7))
def test_a_claim_of_which_one_byte_was_changed_proves_nothing(place: int) -> None:
    greeting = greet()
    claimed = bytearray(claim(SECRET, greeting, PURPOSE))
    claimed[place] ^= 1
    assert proof_of(SECRET, greeting, bytes(claimed)) is None


def test_another_protocols_greeting_is_told() -> None:
    with pytest.raises(ValueError, match=r"is not the greeting of a rank, b'apportion/1\\n'"):
        claim(SECRET, b"HTTP/1.1 400 Bad Request" + bytes(GREETING_BYTES), PURPOSE)
    assert greet().startswith(MAGIC)
