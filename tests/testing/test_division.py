"""Rows are divided into global batches and parts of ranks, in order, each row once."""

from __future__ import annotations

import pytest
import torch

from apportion.testing.trial import divided

ROWS = {"x": torch.arange(48).reshape(24, 2), "y": (torch.arange(24), torch.tensor(7.0))}


@pytest.mark.parametrize(
    ("ranks", "shared", "parts", "of_ranks"),
    [
        (2, False, None, [[0, 1, 2], [3, 4, 5]]),
        (3, False, None, [[0, 1], [2, 3], [4, 5]]),
        (2, False, (1, 5), [[0], [1, 2, 3, 4, 5]]),
        (2, True, None, [[0, 1, 2, 3, 4, 5]] * 2),
        (4, 2, None, [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]),
        (4, 2, (2, 4), [[0, 1], [0, 1], [2, 3, 4, 5], [2, 3, 4, 5]]),
    ],
)
def test_each_rank_has_its_part_of_each_batch(
    ranks: int, shared: bool | int, parts: tuple[int, ...] | None, of_ranks: list[list[int]]
) -> None:
    division = divided(ROWS, ranks, 4, shared, parts)
    for step in range(4):
        assert division.batch(ROWS, step)["y"][0].tolist() == [6 * step + n for n in range(6)]
        for rank, wanted in enumerate(of_ranks):
            part = division.part(ROWS, step, rank)
            assert part["y"][0].tolist() == [6 * step + n for n in wanted]
            assert part["x"][:, 0].tolist() == [2 * (6 * step + n) for n in wanted]
            assert part["y"][1] == 7


def test_a_number_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ValueError, match=r"24 examples, .* steps=5 .* for 2 ranks: .* multiple of 10, such as 20 or 30"
    ):
        divided(ROWS, 2, 5, False, None)
    with pytest.raises(ValueError, match=r"24 examples, .* steps=50 .* multiple of 100, such as 100, or the rows"):
        divided(ROWS, 2, 50, False, None)
