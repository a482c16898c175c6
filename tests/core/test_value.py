"""Values are written the same way everywhere, and nothing in them is executed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.policy import Policy
from apportion.core.value import Value, check_written, find, names, parse, parse_as, written_name
from apportion.runtime.launch.env import Env
from apportion.runtime.launch.local import Local
from apportion.strategies.data_parallel import DataParallel
from apportion.strategies.single_device import SingleDevice

counts = st.none() | st.integers(1, 10**6)
launchers = st.builds(
    Local, workers=counts, threads=counts, device=st.sampled_from([None, "cpu", "cuda"]), loaders=st.integers(0, 99)
)
strategies = st.builds(DataParallel, microbatches=st.integers(1, 10**6)) | st.builds(SingleDevice)
intervals = st.none() | st.builds("{} {}".format, st.integers(1, 999), st.sampled_from(["s", "steps", "epochs"]))
policies = st.builds(Policy, checkpoint_every=intervals, keep=st.integers(1, 99))


@given(strategies)
def test_a_strategy_reads_as_it_is_written(value: Value) -> None:
    assert parse(str(value), "apportion.strategies") == value
    assert parse(repr(value), "apportion.strategies") == value


@given(launchers | st.builds(Env))
def test_a_launcher_reads_as_it_is_written(value: Value) -> None:
    assert parse(str(value), "apportion.runtime.launch") == value
    assert parse(repr(value), "apportion.runtime.launch") == value


@given(policies)
def test_a_policy_reads_as_it_is_written(value: Policy) -> None:
    assert parse_as(str(value), Policy) == value
    assert parse_as(repr(value), Policy) == value


def test_only_what_differs_is_written() -> None:
    assert str(DataParallel()) == "data_parallel"
    assert repr(DataParallel()) == "data_parallel()"
    assert str(DataParallel(microbatches=2)) == "data_parallel(microbatches=2)"
    assert str(Local(workers=2, device="cpu")) == "local(workers=2, device='cpu')"


@dataclass(frozen=True, repr=False)
class Nested(Value):
    """A value of values."""

    inner: Value = DataParallel()  # noqa: RUF009 (frozen)
    text: str = ""


def test_values_of_values_are_written_inside_each_other() -> None:
    assert str(Nested()) == "nested"
    assert str(Nested(SingleDevice())) == "nested(inner=single_device)"
    written = str(Nested(DataParallel(microbatches=2), "it's"))
    assert written == """nested(inner=data_parallel(microbatches=2), text="it's")"""


def test_every_file_of_a_folder_is_found_by_its_name() -> None:
    for package in ("apportion.strategies", "apportion.runtime.launch"):
        for name in names(package):
            assert written_name(find(name, package)) == name
            assert find(name, package).__module__ == f"{package}.{name}"
    assert {"data_parallel", "single_device"} <= set(names("apportion.strategies"))
    assert written_name(type("Conv2Parallel", (), {})) == "conv2_parallel"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data_paralel", "did you mean data_parallel"),
        ("zzz", "one of conv_parallel, data_parallel, "),
        ("data_parallel(", "does not parse"),
        ("data_parallel(2)", r"given by name, it is written data_parallel\(microbatches=1, shares="),
        ("data_parallel(batches=2)", "has no 'batches': did you mean microbatches="),
        ("data_parallel(microbatches=0)", "whole number of at least 1"),
        ("data_parallel(microbatches=print(1))", "unknown strategy"),
        ("data_parallel(microbatches=1+x)", "neither a number, a text, nor a value"),
        ("data_parallel(**{})", "has no None"),
        ("1 + 1", "must be a name"),
        ("a.b()", "must be a name"),
        ("__import__('os').system('true')", "must be a name"),
        ("", "does not parse"),
        ("data_parallel; 1", "does not parse"),
    ],
)
def test_what_is_no_value_is_refused_with_the_cure(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, "apportion.strategies")


@given(st.text(max_size=40))
def test_any_text_is_a_value_or_a_mistake(text: str) -> None:
    try:
        assert isinstance(parse(text, "apportion.strategies"), Value)
    except ValueError:
        pass


def test_a_text_is_checked_against_the_fields_that_stand_in_the_file_of_its_class() -> None:
    for text in ("data_parallel", "data_parallel(microbatches=2)", "parameter_server(servers=1, mode='ordered')"):
        check_written(text, "apportion.strategies")
    with pytest.raises(ValueError, match=r"parameter_server has no 'server': .*servers"):
        check_written("parameter_server(server=1)", "apportion.strategies")
    with pytest.raises(ValueError, match="paramter_server"):
        check_written("paramter_server(servers=1)", "apportion.strategies")


def test_a_policy_is_the_only_thing_it_can_be() -> None:
    with pytest.raises(ValueError, match=r"must be written policy\("):
        parse_as("local(workers=2)", Policy)
    with pytest.raises(ValueError, match='like "30 s"'):
        parse_as("policy(checkpoint_every='soon')", Policy)
    with pytest.raises(ValueError, match="neither a number"):
        parse_as("policy(keep=data_parallel)", Policy)
