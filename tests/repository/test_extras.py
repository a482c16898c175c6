"""Every package that an extra brings is named by its extra where it is missing."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from apportion.cli.failures import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
OURS = {"test", "dev"}
NEVER_IMPORTED = {"libtpu"}
"""What other packages load by themselves."""


@pytest.mark.thorough
def test_a_missing_package_is_named_with_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[<>=;\[ ]", package)[0].lower().replace("-", "_"): extra
        for extra, packages in extras.items()
        if extra not in OURS
        for package in packages
        if not package.startswith("apportion[")
    }
    brings = {
        distribution.lower().replace("-", "_"): extra
        for name, extra in EXTRAS.items()
        for distribution in packages_distributions().get(name, [name])
    }
    assert {p: extra for p, extra in wanted.items() if p not in NEVER_IMPORTED and brings.get(p) != extra} == {}
