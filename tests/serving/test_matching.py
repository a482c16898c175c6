"""Which inputs of the members are the same, and what is reported where none are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from apportion.serving.replication.matching import matched
from apportion.serving.runtimes.runtime import Spec
from apportion.serving.runtimes.source import Source, as_they_are


def member(name: str, inputs: Sequence[str]) -> Source:
    specs = [[Spec(tensor, "FP32", (None, 2)) for tensor in names] for names in (inputs, "y")]
    return Source(name=name, runtime="onnx", path="", inputs=as_they_are(specs[0]), outputs=as_they_are(specs[1]))


def inputs_of(source: Source) -> list[tuple[str, str]]:
    assert source.inputs is not None
    return [(tensor.own, tensor.spec.name) for tensor in source.inputs]


def test_names_may_be_exchanged() -> None:
    _, other = matched([member("m1", "ab"), member("m2", "ab")], {"m2": {"a": "b", "b": "a"}})
    assert inputs_of(other) == [("b", "a"), ("a", "b")]


@pytest.mark.parametrize(("first", "second"), [("a", "ab"), ("ab", "a"), ("ab", "")])
def test_members_of_other_numbers_of_inputs_are_not_sent_to_rename(first: str, second: str) -> None:
    numbers = f"have {len(first)} and {len(second)} inputs, {', '.join(first)} and {', '.join(second) or 'none'}: "
    with pytest.raises(ValueError, match=re.escape(numbers)) as refused:
        matched([member("m1", first), member("m2", second)], None)
    assert "rename" not in str(refused.value)


def test_the_line_that_maps_names_the_member_s_own_input() -> None:
    with pytest.raises(ValueError, match=re.escape("Serving(rename={'m2': {'b': 'q'}})")):
        matched([member("m1", "aq"), member("m2", "ab")], {"m2": {"b": "z"}})
