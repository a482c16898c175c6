"""The template that workers are forked from."""

from __future__ import annotations

import gc

import pytest
from ranks import on_ranks

from apportion.comm.world import World

pytestmark = pytest.mark.processes


def looked_at(world: World) -> tuple[int, int]:
    """How many objects a collection in a worker leaves alone, and looks at."""
    return gc.get_freeze_count(), len(gc.get_objects())


def test_a_collection_in_a_worker_leaves_alone_what_the_template_has_imported() -> None:
    for frozen, own in on_ranks(looked_at, 2):
        assert frozen > 100_000
        assert own < frozen / 10
