"""The template that workers are forked from."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import networks
import pytest
from ranks import by_value, on_ranks

import apportion
from apportion.comm.world import World
from apportion.errors import ApportionError
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.template import Template, close_template

pytestmark = pytest.mark.processes


def looked_at(world: World) -> tuple[int, int]:
    """How many objects a collection in a worker leaves alone, and looks at."""
    return gc.get_freeze_count(), len(gc.get_objects())


def test_a_collection_in_a_worker_leaves_alone_what_the_template_has_imported() -> None:
    for frozen, own in on_ranks(looked_at, 2):
        assert frozen > 100_000
        assert own < frozen / 10


RARE = ("wave", "no_such_module", "mailbox")
"""Modules that no test and nothing of torch imports, and one that is none."""


def imported(world: World) -> tuple[list[str], int]:
    """Which of the modules a worker begins with, and how many objects a collection looks at."""
    return [name for name in RARE if name in sys.modules], len(gc.get_objects())


def test_the_template_imports_once_what_it_is_asked_to_and_passes_over_what_cannot_be() -> None:
    Local().import_ahead(RARE)
    for found, own in on_ranks(imported, 2):
        assert found == ["wave", "mailbox"]
        assert own < 20_000


@pytest.mark.parametrize(("strategy", "there"), [("fully_sharded", True), ("data_parallel", False)])
@pytest.mark.thorough
def test_ranks_begin_with_what_their_strategy_imports_and_others_without(
    strategy: str, there: bool, tmp_path: Path
) -> None:
    close_template()  # an earlier test may have had it import more
    workload = networks.mlp(8)
    made = workload.model

    def model() -> object:
        if ("torch.distributed.fsdp" in sys.modules) is not there:
            raise AssertionError(f"FSDP is {'not ' * there}imported as the network is built")
        return made()

    with by_value(networks):
        apportion.train(
            replace(workload, model=model, steps=1), strategy, launcher=apportion.local(workers=2),
            run_dir=tmp_path / "run", check=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL, .* check that memory is left"),
        ("raise SystemExit(3)", r"exit status 3\): .* check that `python -c 'import torch'` works"),
    ],
)
def test_a_template_that_cannot_start_says_how_it_ended(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Template, "program", ("-c", program))
    template = Template()
    with pytest.raises(ApportionError, match=why):
        template.wait_ready()
    template.close()
