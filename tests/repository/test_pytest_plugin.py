"""The plugin that pytest imports in every session of an environment with apportion is found, and costs little."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import apportion.testing

ROOT = Path(__file__).parents[2]
LIMIT_SHARE = 0.1
"""Of the time that pytest itself takes to import, about 0.1 s."""


def test_the_entry_point_is_a_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, module),) = project["entry-points"]["pytest11"].items()
    assert name == "apportion"
    assert importlib.import_module(module).assert_same_network.__doc__


def test_the_public_names_of_testing_are_these() -> None:
    assert apportion.testing.__all__ == ["DifferentNetwork", "assert_same_network"] == dir(apportion.testing)
    for name in apportion.testing.__all__:
        assert getattr(apportion.testing, name).__doc__
    with pytest.raises(AttributeError, match=r"apportion\.testing has no 'check': its public names are"):
        apportion.testing.check  # noqa: B018


@pytest.mark.processes
@pytest.mark.usefixtures("cold_programs")
def test_the_plugin_imports_nothing_heavy() -> None:
    code = """
import json, sys, time
began = time.process_time()
import pytest
before, imported = time.process_time(), set(sys.modules)
import apportion.testing.plugin
print(json.dumps([time.process_time() - before, before - began, sorted(set(sys.modules) - imported)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seconds, pytests, modules = json.loads(done.stdout)
    assert [name for name in modules if not name.startswith("apportion")] == []
    assert seconds < LIMIT_SHARE * pytests
