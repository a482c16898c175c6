"""Epochs that are shortened, and what a script's own sampler sees of that."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import BatchSampler, RandomSampler

from apportion.script_check.recording.loaders import Shortened


class Counting:
    """A sampler that keeps the number of batches it has given out, and the number of its epochs."""

    def __init__(self, batches: int) -> None:
        self.batches, self.given, self.epoch = batches, 0, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        while self.given < self.batches:
            self.given += 1
            yield [self.given]
        self.epoch, self.given = self.epoch + 1, 0


def test_a_sampler_of_the_script_gives_out_one_batch_at_a_time() -> None:
    sampler = Counting(6)
    drawn = iter(Shortened(sampler, 8))
    assert [next(drawn), next(drawn)] == [[1], [2]]
    assert (sampler.given, sampler.epoch) == (2, 0)
    assert list(drawn) == [[3], [4], [5], [6]]
    assert (sampler.given, sampler.epoch) == (0, 1)


def test_the_last_batch_of_a_longer_epoch_is_kept() -> None:
    sampler = Counting(21)
    shortened = Shortened(sampler, 8)
    assert (len(shortened), list(shortened)) == (9, [*([n] for n in range(1, 9)), [21]])
    assert sampler.epoch == 1
    assert list(shortened) == [*([n] for n in range(1, 9)), [21]]
    assert shortened.order == []


def test_the_order_of_torchs_samplers_is_known_from_the_start() -> None:
    shortened = Shortened(BatchSampler(RandomSampler(range(40)), 2, drop_last=False), 8)
    first = next(iter(shortened))
    assert (shortened.order[0], len(shortened.order)) == (first, 8)


def test_a_sampler_without_an_end_ends() -> None:
    class Endless(Counting):
        def __iter__(self) -> Iterator[list[int]]:
            while True:
                self.given += 1
                yield [self.given]

    assert len(list(Shortened(Endless(5), 8))) == 5
