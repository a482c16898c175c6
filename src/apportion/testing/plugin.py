"""The plugin of pytest: the fixture ``assert_same_network`` and the marker ``ranks``.

pytest imports this module in every session of an environment that has apportion, so it imports nothing but pytest, and
does nothing in a session whose tests do not use the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FIXTURE = "assert_same_network"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(n, ...): the number of ranks on which the fixture assert_same_network compares the step of this test; "
        "with several numbers the test runs once with each",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a test with several numbers of ranks run once with each."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if FIXTURE in metafunc.fixturenames and marker is not None and len(marker.args) > 1:
        metafunc.parametrize(FIXTURE, marker.args, indirect=True, ids=[f"{n} ranks" for n in marker.args])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process that ranks are forked from, so that it is ready when the first test needs it."""
    uses = any(FIXTURE in getattr(item, "fixturenames", ()) for item in session.items)
    if uses and not session.config.option.collectonly:
        from apportion.testing.processes import prepare

        prepare()


@pytest.fixture
def assert_same_network(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return ``apportion.testing.assert_same_network``; ``@pytest.mark.ranks(2)`` gives its number of ranks, which an
    argument ``ranks=`` of the call overrides."""
    from apportion.testing.same_network import assert_same_network as compare

    marker = request.node.get_closest_marker("ranks")
    ranks: Any = getattr(request, "param", None)
    if ranks is None and marker is not None:
        if len(marker.args) != 1:
            raise ValueError("@pytest.mark.ranks() has no number: write the number of ranks, as @pytest.mark.ranks(2)")
        (ranks,) = marker.args
    given = {} if ranks is None else {"ranks": ranks}

    def assert_same(step: Any, **arguments: Any) -> None:
        __tracebackhide__ = True
        compare(step, **{**given, **arguments})

    return assert_same
