"""The table of a plan, on the terminal and on its page, and its list of who lost: what stands there, and what is left
out."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
from by_hand import ROWS, chain, machine

from apportion.core.strategy import Strategy
from apportion.core.value import find, names
from apportion.cost_model.cost import Cost
from apportion.planner.build import make
from apportion.planner.candidate import Measurement, Priced
from apportion.planner.plan import Matched, Plan
from apportion.planner.plan_text import MOST_ROWS, cells, rows, show_plan
from apportion.reporting.html.plan_page import plan_page
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.fully_sharded import FullySharded
from apportion.strategies.local_sgd import LocalSgd
from apportion.strategies.pipeline_parallel import PipelineParallel
from apportion.strategies.tensor_parallel import TensorParallel


def row(strategy: Strategy, computing: float = 1.0, **more: float) -> Priced:
    cost = Cost(terms={"computing": computing, **more}, examples=ROWS, memory={"weights": 3 << 20})
    return Priced(strategy=strategy, layout=machine(), cost=cost)


def refused(strategy: Strategy) -> Priced:
    return Priced(strategy=strategy, layout=machine(), refusal="it cannot")


def plan(*found: Priced) -> Plan:
    return make(found, chain(1.0), machine().cluster)


def test_a_strategy_stands_in_the_table_once_with_its_best_value() -> None:
    values = [row(DataParallel(microbatches=n), 1.0 + n) for n in (1, 2, 3)]
    shown, left = rows(plan(*values, row(FullySharded(), 5.0), refused(TensorParallel())))
    assert [str(p.strategy) for p in shown] == ["data_parallel", "fully_sharded"]
    assert left == 2


def test_composites_of_each_kind_are_kinds_of_their_own_and_no_more_than_a_screen_of_them_is_shown() -> None:
    kinds: list[Strategy] = [
        DataParallel(of=PipelineParallel(), replicas=2),
        DataParallel(of=TensorParallel(), replicas=2),
    ]
    shown, left = rows(plan(row(DataParallel(), 0.5), *(row(kind) for kind in kinds)))
    assert (len(shown), left) == (3, 0)
    every = [find(name, "apportion.strategies")() for name in names("apportion.strategies")]
    many = [row(kind, 1.0 + i) for i, kind in enumerate([*every, *kinds])]
    shown, left = rows(plan(*many))
    assert (len(shown), left) == (MOST_ROWS, len(many) - MOST_ROWS)


def test_a_line_has_the_parts_of_the_prediction_and_the_step_that_counts() -> None:
    p = row(DataParallel(), 0.001, updating=0.002, loading=0.004, communicating=0.008, bubble=0.016, waiting=0.032)
    name = "data_parallel\n  local(workers=2, threads=1)"
    assert cells(p, learned=False) == [name, "63", "7", "8", "16", "32", "3 MiB", "1,587\n±10%", "yes"]
    measured = replace(p, tried=Measurement(step_seconds=0.1, low=0.09, high=0.11, steps=9))
    assert cells(measured, learned=True)[1:3] == ["100*", "63"]
    assert cells(measured, learned=True)[-2] == "1,000\n±10%"
    assert cells(row(LocalSgd(), 0.001), learned=False)[2:] == ["1", "-", "-", "-", "3 MiB", "100,000\n±10%", "no"]


def test_who_lost_is_told_once_for_each_strategy_and_what_else_there_is_to_say_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = [row(DataParallel(microbatches=n), 1.0 + n) for n in (1, 2, 3)]
    other = plan(row(FullySharded(), 1.0), *values, refused(TensorParallel()))
    matched = Matched(other="there", best=values[0], hosts=3, text="3 hosts of there match made")
    show_plan(replace(other, sensitivities=("with batch 7 choose something else",), matched=matched))
    text = capsys.readouterr().out
    assert "2 more that are slower are left out; --json has them" in text
    lost = text.partition("\nwhy not\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split(":")[0].strip() for line in lost] == ["data_parallel", "tensor_parallel"]
    assert "\nwhen it would change\n  with batch 7 choose something else\n" in text
    assert "\nside by side\n  3 hosts of there match made\n" in text
    assert "predicted; compute, send" in text
    assert "measured where it was tried" not in text


def page(told: Plan) -> str:
    """Its text, without the pictures."""
    html = re.sub(r"<svg.*?</svg>", "", plan_page(told.to_json()), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def test_the_page_tells_what_was_measured_beside_what_was_predicted() -> None:
    other = row(LocalSgd(), 0.003)
    predicted = plan(row(DataParallel(), 0.25), other)
    text = page(predicted)
    assert "batches of 100 on made, predicted" in text
    assert "250 ms 400 ±10%" in text
    assert "Side by side" not in text
    assert re.search(r"data_parallel local\(workers=2, threads=1\) chosen 250 ms .* yes", text)
    assert re.search(r"local_sgd local\(workers=2, threads=1\) approximate: .* no", text)
    seen = replace(row(DataParallel(), 0.25), tried=Measurement(step_seconds=0.5, low=0.45, high=0.55, steps=9))
    text = page(plan(seen, other))
    assert "batches of 100 on made, measured" in text
    assert "chosen 250 ms 500 ms 200 ±10%" in text


def test_the_page_says_what_else_there_is_to_say() -> None:
    first = row(DataParallel(), 0.25)
    matched = Matched(other="there", best=first, hosts=3, text="3 hosts of there match made")
    text = page(replace(plan(first), sensitivities=("with batch 7 choose something else",), matched=matched))
    assert "When it would change with batch 7 choose something else" in text
    assert "Side by side 3 hosts of there match made" in text
    assert "To run it apportion train" in text
    assert "On each host" not in text
    apart = machine(1, hosts=2)
    several = make([replace(first, layout=apart)], chain(1.0), apart.cluster)
    assert "To run it On each host, with its own NODE_RANK from 0 up:" in page(several)
