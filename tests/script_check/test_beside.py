"""What no comparison of gradients shows, from records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rank_events import Rank

from apportion.script_check.comparison import beyond_gradients, evaluations, ranks_agree
from apportion.script_check.comparison.reading import reading
from apportion.script_check.findings import Finding

EPOCH = ([0, 2], [4, 6], [8, 10])
OTHER = ([1, 3], [5, 7], [9, 11])
SHUFFLED = ([8, 2], [0, 10], [6, 4])
OTHER_SHUFFLED = ([9, 3], [1, 11], [7, 5])


def _found(ranks: Sequence[Rank], union: Rank | None = None) -> dict[str, Finding]:
    records = [rank.record for rank in ranks]
    found = beyond_gradients.findings(records, union and union.record, same_weights=True)
    return {finding.name: finding for finding in found}


def _names(ranks: Sequence[Rank], union: Rank | None = None) -> dict[str, str]:
    return {name: finding.severity for name, finding in _found(ranks, union).items()}


def _two() -> tuple[Rank, Rank]:
    return Rank(0), Rank(1)


def test_a_healthy_run_has_no_finding() -> None:
    one, two = _two()
    for rank, epochs in ((one, (EPOCH, SHUFFLED)), (two, (OTHER, OTHER_SHUFFLED))):
        for epoch in epochs:
            rank.epoch(epoch)
            rank.emit("draw", place="a", number=0, function="randn_like", site="train.py:3", gradients=True,
                      fetching=False, state="s", digest=f"d{rank.rank}", shape=(2, 1), values=None)  # fmt: skip
    assert _names((one, two)) == {}


def test_the_same_order_in_two_epochs() -> None:
    one, two = _two()
    for rank, epoch in ((one, SHUFFLED), (two, OTHER_SHUFFLED)):
        rank.epoch(epoch)
        rank.epoch(epoch)
    found = _found((one, two))["same_order"]
    assert found.severity == "warning"
    assert found.ranks == (0, 1)
    assert "set_epoch" in found.remedy
    assert "on ranks 0, 1 (rows 8, 2, 0, 10, 6, 4, ...), although" in found.sentence


def _made_anew(**fields: Any) -> tuple[Rank, Rank]:
    """Two ranks whose line 5 makes a loader for each of two epochs, with some fields in the second one."""
    one, two = _two()
    for rank, epoch in ((one, SHUFFLED), (two, OTHER_SHUFFLED)):
        rank.epoch(epoch)
        rank.epoch(epoch, "train.py:5 (2)", **{"made": 3, **fields})
    return one, two


@pytest.mark.parametrize("fields", [{}, {"data_set": 1}], ids=["one data set", "one of the same rows"])
def test_the_same_order_of_a_loader_that_is_made_anew(fields: dict[str, Any]) -> None:
    found = _found(_made_anew(**fields))["same_order"]
    assert (found.severity, found.site, found.ranks) == ("warning", "train.py:5", (0, 1))
    assert found.sentence.startswith("Two epochs have the same order")
    assert "made anew for each" in found.sentence


def test_a_fixed_order_of_a_loader_that_is_made_anew_is_a_note() -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        rank.epoch(epoch, shuffles=False)
        rank.epoch(epoch, "train.py:5 (2)", shuffles=False, made=3)
    assert _names((one, two)) == {"fixed_order": "note"}


@pytest.mark.parametrize(
    "fields",
    [{"made": 0}, {"rows": 24}, {"selection": "s"}, {"batch_size": 4}, {"sampler": "RandomSampler"}],
    ids=["made before", "other rows", "another part", "another size", "another sampler"],
)
def test_two_loaders_of_one_line_are_not_two_epochs(fields: dict[str, Any]) -> None:
    assert "same_order" not in _names(_made_anew(**fields))


def test_loaders_of_one_line_for_two_data_sets_are_not_two_epochs() -> None:
    one, two = _two()
    for rank, epoch in ((one, SHUFFLED), (two, OTHER_SHUFFLED)):
        rank.epoch(epoch)
        place = rank.iteration("train.py:5 (2)", made=3, data_set=1)
        for rows in epoch:
            rank.read(place, rows, values=[row + 0.5 for row in rows])
            rank.train()
    assert _names((one, two)) == {}


def test_loaders_of_one_line_for_two_networks_are_not_two_epochs() -> None:
    one, two = _two()
    for rank, epoch in ((one, SHUFFLED), (two, OTHER_SHUFFLED)):
        rank.epoch(epoch)
        place = rank.iteration("train.py:5 (2)", made=3)
        for number, rows in enumerate(epoch, 1):
            rank.read(place, rows)
            rank.train(optimizer=1, number=number)
    assert "same_order" not in _names((one, two))


def test_a_fixed_order_is_a_note() -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        for _ in range(2):
            rank.epoch(epoch, shuffles=None, epochs=False)
    assert _names((one, two)) == {"fixed_order": "note"}


def test_an_order_that_random_numbers_made_is_shuffled() -> None:
    one, two = _two()
    for rank, epoch in ((one, SHUFFLED), (two, OTHER_SHUFFLED)):
        for _ in range(2):
            place = rank.iteration(shuffles=None, epochs=False)
            for rows in epoch:
                rank.read(place, rows, random=True)
                rank.train()
            rank.emit("exhausted", loader=place[0], iteration=place[1])
    assert _names((one, two)) == {"same_order": "warning"}


def test_rows_that_two_ranks_read() -> None:
    one, two = _two()
    for rank in (one, two):
        rank.emit("computed", inputs="i", outputs="o", rows=2)
        rank.epoch(EPOCH, replicas=None, sampler="RandomSampler", rows=None)
    found = _found((one, two))["shared_rows"]
    assert found.severity == "warning"
    assert "6 of 6 rows" in found.sentence
    assert "the ranks call no collective" in found.sentence
    one.emit("collective", op="all_reduce")
    assert "collective" not in _found((one, two))["shared_rows"].sentence


def test_ranks_that_compute_parts_of_the_same_rows_are_healthy() -> None:
    one, two = _two()
    for rank in (one, two):
        rank.emit("computed", inputs=f"i{rank.rank}", outputs=f"o{rank.rank}", rows=2)
        rank.epoch(EPOCH, replicas=None, rows=None)
    assert _names((one, two)) == {}


def test_a_row_that_fills_the_last_batch_is_healthy() -> None:
    one, two = _two()
    one.epoch(EPOCH, rows=11)
    two.epoch(([1, 3], [5, 7], [9, 0]), rows=11)
    assert _names((one, two)) == {}


def test_the_same_row_in_the_middle_of_an_epoch() -> None:
    one, two = _two()
    one.epoch(EPOCH)
    two.epoch(([1, 0], [5, 7], [9, 11]))
    assert _names((one, two)) == {"shared_rows": "warning", "unread_rows": "note"}


def test_rows_of_data_sets_that_each_rank_numbers_itself_are_not_shared() -> None:
    one, two = _two()
    for rank in (one, two):
        place = rank.iteration(rows=6, replicas=None)
        for rows in ([0, 1], [2, 3]):
            rank.read(place, [row + 100 * rank.rank for row in rows])
            rank.events[-1]["indices"] = rows
            rank.train()
    assert _names((one, two)) == {}


@pytest.mark.parametrize(("second", "shared"), [((1, 2, 3, 4), 3), ((6, 7, 8, 9), 0), ((3, 7, 8, 9), 0)])
def test_rows_of_a_data_set_that_each_rank_splits_itself(second: tuple[int, ...], shared: int) -> None:
    one, two = _two()
    for rank, values in ((one, (0, 1, 2, 3)), (two, second)):
        place = rank.iteration(rows=8)
        for at in (0, 2):
            rank.read(place, values[at : at + 2])
            rank.events[-1]["indices"] = [at, at + 1]
            rank.train()
    found = _found((one, two))
    assert set(found) == ({"shared_rows"} if shared else set())
    if shared:
        assert "different rows on each rank" in found["shared_rows"].sentence
        assert "random_split" in found["shared_rows"].remedy
        assert "in epoch 1, 3 of 5 rows are read by several" in found["shared_rows"].sentence


@pytest.mark.parametrize(
    ("selections", "words"), [(("a", "b"), "each rank splits"), (("a", "a"), "although its sampler")]
)
def test_rows_of_a_subset_that_two_ranks_read(selections: tuple[str, str], words: str) -> None:
    one, two = _two()
    one.epoch(EPOCH, selection=selections[0], subset=True)
    two.epoch(([1, 0], [5, 4], [9, 11]), selection=selections[1], subset=True)
    assert words in _found((one, two))["shared_rows"].sentence


def test_a_split_of_each_rank_is_found_before_rows_come_twice() -> None:
    one, two = _two()
    one.epoch(EPOCH, selection="a", subset=True)
    two.epoch(OTHER, selection="b", subset=True)
    found = _found((one, two))["shared_rows"]
    assert found.sentence.endswith("the sampler DistributedSampler divides only their numbers.")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ("scaled clip unscaled", True),
        ("scaled unscaled clip", False),
        ("scaled unscaled clip scaled clip unscaled", True),
        ("scaled other unscaled", False),  # another network's gradients, which are not scaled
        ("scaled small unscaled", False),
        ("clip", False),
    ],
)
def test_gradients_that_are_clipped_while_they_are_scaled(events: str, found: bool) -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        rank.epoch(epoch)
        for event in events.split():
            if event in ("scaled", "unscaled"):
                rank.emit(event, scale=65536.0, names=["net.weight"], site="train.py:7")
            else:
                name, norm = ("critic.weight" if event == "other" else "net.weight"), 0.5 if event == "small" else 9.0
                rank.emit("clip", function="clip_grad_norm_", limit=1.0, norm=norm, names=[name], site="train.py:8")
    names = _found((one, two))
    assert set(names) == ({"clipped_scaled"} if found else set())
    if found:
        assert "what remains is clipped at 1.52588e-05" in names["clipped_scaled"].sentence


def test_a_loader_that_one_rank_ends_earlier() -> None:
    one, two = _two()
    one.epoch(EPOCH)
    two.epoch(OTHER[:2])
    assert _names((one, two))["uneven_batches"] == "warning"
    for rank in (one, two):
        rank.emit("join", site="train.py:4")
    assert "uneven_batches" not in _names((one, two)), (
        "ranks that have ended take part in the collectives of the others"
    )


@pytest.mark.parametrize(("resumed", "name"), [((4, 6), None), ((0, 2), "again"), ((8, 10), "left out")])
def test_rows_after_a_resume(resumed: tuple[int, int], name: str | None) -> None:
    one, two = _two()
    for rank, shift in ((one, 0), (two, 1)):
        place = rank.iteration()
        order = [[row + shift for row in rows] for rows in EPOCH]
        rank.emit("order", loader=place[0], iteration=place[1], batches=order)
        rank.read(place, order[0])
        rank.train()
        rank.emit("restore", what="Linear", site="train.py:30")
        place = rank.iteration()
        rank.read(place, order[0])  # read and not trained on
        rank.read(place, [row + shift for row in resumed])
        rank.train()
    found = _found((one, two))
    if name is None:
        assert found == {}
    else:
        assert list(found) == ["resumed_rows"]
        assert name in found["resumed_rows"].sentence


@pytest.mark.parametrize(("following", "names"), [(SHUFFLED, {}), (EPOCH, {"resumed_rows": "warning"})])
def test_the_best_weights_of_an_epoch_are_no_resume_in_it(
    following: Sequence[Sequence[int]], names: dict[str, str]
) -> None:
    one, two = _two()
    for rank, shift in ((one, 0), (two, 1)):
        rank.epoch([[row + shift for row in batch] for batch in EPOCH])
        rank.emit("restore", what="Linear", site="train.py:30")
        place = rank.iteration("train.py:6")
        for batch in following:
            rank.read(place, [row + shift for row in batch])
            rank.train(**({"weights_before": "w2"} if rank.step == 3 else {}))
    assert _names((one, two)) == names


def test_a_load_of_other_weights_is_no_resume() -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        rank.emit("restore", what="Linear", site="train.py:30")
        place = rank.iteration()
        rank.read(place, epoch[0])
        rank.train(weights_before="pretrained")
        rank.read(place, epoch[1])
        rank.train()
    assert _names((one, two)) == {}


def _mask(rank: Rank, state: str, rows: str) -> None:
    rank.emit("mask", function="dropout", state=state, rows=rows, shape=(2, 4), sharded=False, site="net.py:3")


def test_the_same_masks_for_different_rows() -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        _mask(rank, "s", f"r{rank.rank}")
        rank.epoch(epoch)
    found = _found((one, two))["same_draws"]
    assert (found.severity, found.site) == ("warning", "net.py:3")


def test_different_masks_for_replicated_activations() -> None:
    one, two = _two()
    for rank in (one, two):
        rank.events[0]["placements"] = {"net.weight": "(Shard(dim=0),)"}
        _mask(rank, f"s{rank.rank}", "r")
        rank.epoch(EPOCH)
    assert _names((one, two)) == {"unlike_draws": "warning"}


def test_the_same_noise_for_different_rows() -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        rank.emit("computed", inputs=f"i{rank.rank}", outputs=f"o{rank.rank}", rows=2)
        place = rank.iteration()
        for number, rows in enumerate(epoch):
            rank.read(place, rows)
            rank.emit("draw", place="train.py:7", number=number, function="randn_like", site="train.py:7",
                      gradients=True, fetching=False, state="s", digest=f"d{number}", shape=(2, 1),
                      values=None)  # fmt: skip
            rank.train()
    assert _names((one, two)) == {"same_draws": "warning"}


def _streamed(
    rows: tuple[Sequence[int], Sequence[int]], function: str, draws: int, shape: tuple[int, ...] = ()
) -> dict[str, str]:
    ranks = _two()
    for rank, read in zip(ranks, rows, strict=True):
        rank.emit("computed", inputs=f"i{rank.rank}", outputs=f"o{rank.rank}", rows=2)
        place = rank.iteration(rows=None, replicas=None)
        for first in range(0, len(read), 2):
            for number in range(draws):
                rank.emit("draw", place="train.py:7", number=number, function=function, site="train.py:7",
                          gradients=True, fetching=True, state="s", digest=f"d{number}", shape=shape,
                          values=None)  # fmt: skip
            rank.read(place, read[first : first + 2], indexed=False)
            rank.train()
    return _names(ranks)


def test_draws_by_which_a_stream_chooses_its_rows_are_the_same_on_all_ranks() -> None:
    rows = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert _streamed(rows, "randn", draws=2) == {"same_draws": "warning"}
    assert _streamed(rows, "randn", draws=4) == {}, "each rank draws the rows of all ranks, and yields its own"
    assert _streamed(rows, "random.randint", draws=2) == {}, "places in a buffer"
    assert _streamed(rows, "randn", draws=1, shape=(2, 3)) == {"same_draws": "warning"}, "noise for a batch"
    assert _streamed(rows, "randn", draws=1, shape=(4, 3)) == {}, "each rank draws the batches of all ranks at once"


def test_equal_rows_of_a_stream_are_not_one_row() -> None:
    assert _streamed(((0, 1, 2, 3, 0, 1), (1, 2, 3, 2, 1, 0)), "random.randint", draws=1) == {}
    assert _streamed(((0, 1, 2, 3), (1, 0, 3, 2)), "random.randint", draws=1) == {"shared_rows": "warning"}


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("evaluating", {"net": ("net", "net.0")}, "flags"),
        ("rates", [0.2], "learning_rates"),
        ("decays", [0.1], "weight_decay"),
        ("trainable", {"net.weight": False}, "trained_parameters"),
    ],
)
def test_settings_that_differ_between_ranks(field: str, value: object, name: str) -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        rank.epoch(epoch)
    next(event for event in two.events if event["kind"] == "step")[field] = value
    assert _names((one, two)) == {name: "warning"}


def _scheduled(rates: Sequence[float], own: Sequence[float], own_batch: int, speed: int = 1) -> dict[str, str]:
    ranks, union = _two(), Rank(0)
    for rank, shift in ((ranks[0], 0), (ranks[1], 100), (union, 0)):
        place = rank.iteration(batch_size=own_batch if rank is union else 2)
        for number, rate in enumerate(own if rank is union else rates):
            first = 4 * number + shift
            rank.read(place, [first, first + 1, first + 2, first + 3] if rank is union else [first, first + 1])
            rank.train(rate, schedule_steps=1 + number * (1 if rank is union else speed))
    return _names(ranks, union)


def test_a_schedule_that_runs_at_another_rate() -> None:
    falling = [1 - step / 20 for step in range(12)]
    assert _scheduled(falling[::2], falling[:6], own_batch=4) == {"schedule": "warning"}
    assert _scheduled(falling[::2], falling[:6], own_batch=2) == {}
    assert _scheduled(falling[:6], falling[:6], own_batch=4) == {}


def test_a_rate_scaled_by_the_number_of_ranks_is_a_note() -> None:
    falling = [1 - step / 20 for step in range(6)]
    assert _scheduled([2 * rate for rate in falling], falling, own_batch=4) == {"scaled_rate": "note"}


def test_a_warm_up_that_is_advanced_twice_is_no_scaled_rate() -> None:
    rising = [step / 20 for step in range(12)]
    assert _scheduled(rising[::2], rising[:6], own_batch=4, speed=2) == {"schedule": "warning"}
    assert _scheduled(rising[::2], rising[:6], own_batch=2, speed=2) == {}  # counted in batches of one process
    assert _scheduled(rising[::2], rising[:6], own_batch=4, speed=1) == {"scaled_rate": "note"}
    assert _scheduled(rising[:6], rising[:6], own_batch=4, speed=2) == {}


def _evaluated(value: float, alone: float, rows: tuple[Sequence[int], Sequence[int]]) -> dict[str, str]:
    ranks, union = _two(), Rank(0)
    for rank, epoch, read in ((ranks[0], EPOCH, rows[0]), (ranks[1], OTHER, rows[1])):
        rank.epoch(epoch)
        rank.evaluate([read])
        rank.figure(value)
    union.epoch(EPOCH)
    union.evaluate([sorted({*rows[0], *rows[1]})])
    union.figure(alone)
    return _names(ranks, union)


def test_figures_of_an_evaluation() -> None:
    assert _evaluated(0.5, 0.5, ((0, 1), (2, 3))) == {}
    assert _evaluated(0.5, 0.4, ((0, 1), (2, 3))) == {"evaluation": "warning"}
    assert _evaluated(1.0, 0.5, ((0, 1), (2, 3))) == {}, "a sum over two ranks that is divided later"
    assert _evaluated(0.5, 0.5, ((0, 1), (2, 0))) == {}, "the row that was read twice was dropped"
    assert _evaluated(0.5, 0.4, ((0, 1), (2, 0))) == {"evaluation": "warning"}
    assert _evaluated(0.5, 0.5, ((0, 1), (0, 1))) == {}, "each rank evaluates all rows"


def test_a_sum_over_the_ranks_is_shown_divided_by_their_number() -> None:
    ranks, union = _two(), Rank(0)
    for rank, value in ((ranks[0], 1.125), (ranks[1], 1.125), (union, 0.5)):
        rank.epoch(OTHER if rank.rank else EPOCH)
        rank.evaluate([[rank.rank]])
        rank.figure(value)
    assert "is 0.5625 (1.125 as a sum over 2 ranks), and 0.5 for" in _found(ranks, union)["evaluation"].sentence


def _sum_and_count(ranks: tuple[float, float], alone: tuple[float, float], *, between: bool = False) -> list[str]:
    pair, union = _two(), Rank(0)
    for rank, values in ((pair[0], ranks), (pair[1], ranks), (union, alone)):
        rank.epoch(OTHER if rank.rank else EPOCH)
        for value in values:
            if value is values[0] or between:
                rank.emit("forward", gradients=False, site="train.py:21")
            rank.figure(value)
    return [finding.sentence for finding in _found(pair, union).values()]


def test_a_sum_and_a_count_that_are_taken_at_one_line() -> None:
    assert _sum_and_count((12.0, 6.0), (12.0, 6.0)) == _sum_and_count((12.0, 6.0), (4.0, 2.0)) == []
    (sentence,) = _sum_and_count((12.5, 6.0), (11.0, 5.0))
    assert "are 12.5 and 6, and they are 11 and 5 for one process" in sentence
    assert _sum_and_count((12.5, 6.0), (11.0, 5.0), between=True) == [], "numbers of two batches"


def test_a_number_of_the_last_batch_is_no_figure_of_the_evaluation() -> None:
    """Loaders of accelerate read one batch ahead, and find their end before they hand the last one out."""
    ranks, union = _two(), Rank(0)
    for rank, batches in ((ranks[0], [[0, 2], [4]]), (ranks[1], [[1, 3], [5]]), (union, [[0, 1], [2, 3], [4], [5]])):
        rank.epoch(OTHER if rank.rank else EPOCH)
        place = rank.iteration("train.py:20")
        for rows in batches:
            rank.read(place, rows)
            if rows is batches[-1]:
                rank.emit("exhausted", loader=place[0], iteration=place[1])
            rank.emit("forward", gradients=False, site="train.py:21")
            rank.figure(float(len(rows) * (1 if rank is union else 2)), site="train.py:23")
    assert _names(ranks, union) == {}
    for rank, value in ((ranks[0], 0.5), (ranks[1], 0.5), (union, 0.4)):
        rank.figure(value)
    assert _found(ranks, union)["evaluation"].site == "train.py:25"


def test_a_figure_that_is_another_in_each_run_is_none_of_the_evaluation() -> None:
    ranks, union, again = _two(), Rank(0), Rank(0)
    for rank, seconds in ((ranks[0], 0.31), (ranks[1], 0.31), (union, 0.22), (again, 0.23)):
        rank.epoch(OTHER if rank.rank else EPOCH)
        rank.evaluate([[rank.rank]])
        rank.figure(seconds, site="train.py:24")
        rank.figure(0.5 if rank in ranks else 0.4)
    records = [rank.record for rank in ranks]
    readings = [reading(record) for record in records]
    assert evaluations.findings(records, readings, union.record)[0].site == "train.py:24"
    assert evaluations.findings(records, readings, union.record, again.record)[0].site == "train.py:25"


@pytest.mark.parametrize("accelerate", [False, True])
def test_numbers_of_the_last_batch_of_a_loader_that_is_read_ahead_are_no_figures(accelerate: bool) -> None:
    ranks, union = _two(), Rank(0)
    for rank, values in ((ranks[0], (3.0, 1.0)), (ranks[1], (3.0, 1.0)), (union, (1.5, 2.5))):
        rank.epoch(OTHER if rank.rank else EPOCH)
        place = rank.iteration("train.py:20")
        rank.read(place, [rank.rank])
        for number, value in enumerate(values):
            if number + 1 < len(values):
                rank.read(place, [rank.rank + 2])
            else:
                rank.emit("exhausted", loader=place[0], iteration=place[1])
            if accelerate:
                rank.emit("taken", loader=place[0], iteration=place[1], number=number)
            rank.emit("forward", gradients=False, site="train.py:21")
            rank.figure(value, site="train.py:22")
        if accelerate:
            rank.emit("exhausted", loader=place[0], iteration=place[1])
    assert _names(ranks, union) == {}
    for rank, accuracy in ((ranks[0], 0.5), (ranks[1], 0.5), (union, 0.4)):
        rank.figure(accuracy)
    assert _names(ranks, union) == {"evaluation": "warning"}


def test_shortened_epochs_are_named() -> None:
    one, two = _two()
    for rank, epoch in ((one, EPOCH), (two, OTHER)):
        rank.epoch(epoch, full=40)
    assert beyond_gradients.shortened([one.record, two.record]) == [
        "The epochs of the loader at train.py:5 were shortened from 40 batches to 3: the first 2 and the last."
    ]


def test_an_evaluation_on_one_rank_between_steps_is_no_step_left_out() -> None:
    ranks = _two()
    for rank, epochs in zip(ranks, ((EPOCH, SHUFFLED), (OTHER, OTHER_SHUFFLED)), strict=True):
        for epoch in epochs:
            rank.epoch(epoch)
            if not rank.rank:
                rank.evaluate([[1, 2], [3]])
    assert ranks_agree.findings([rank.record for rank in ranks]) == []
    late = Rank(1)
    late.epoch(OTHER)
    late.read(late.iteration(), OTHER[0])
    for rows in OTHER_SHUFFLED:
        late.read(("train.py:5", 1), rows)
        late.train()
    (finding,) = ranks_agree.findings([ranks[0].record, late.record])
    assert (finding.name, finding.step) == ("skipped_steps", 4)


@pytest.mark.parametrize("replacement", [True, False])
def test_rows_that_are_drawn_with_replacement_may_be_shared_unless_all_are(replacement: bool) -> None:
    own = ([0, 2], [2, 4], [5, 6]), ([7, 3], [3, 2], [0, 1])
    for epochs, expected in ((own, {}), ((own[0], own[0]), {"shared_rows": "warning"})):
        ranks = _two()
        for rank, epoch in zip(ranks, epochs, strict=True):
            rank.emit("computed", inputs=str(epoch), outputs=str(epoch), rows=2)
            rank.epoch(epoch, replacement=replacement, replicas=None, sampler="Weighted")
        assert _names(ranks) == expected
