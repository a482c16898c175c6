"""What the documents and the set-up say is so."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import nn

import apportion
from apportion.core.value import names

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"]


def pinned(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.partition(";")[0].split("==") for line in lines if not line.startswith("#"))


def needed(requirements: list[str]) -> set[str]:
    """The names of everything that these requirements install here."""
    seen: set[str] = set()
    waiting = [(Requirement(r), "") for r in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if str(requirement) in seen or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        ):
            continue
        seen.add(str(requirement))
        for extra in {"", *requirement.extras}:
            waiting += [(Requirement(r), extra) for r in metadata.requires(requirement.name) or []]
    return {canonicalize_name(Requirement(r).name) for r in seen}


def test_everything_that_the_tests_need_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]
    asked = [*project["dependencies"], *extra["tensorboard"], *extra["report"], *extra["test"]]
    known = {canonicalize_name(name) for name in pinned()}
    assert needed(asked) - known == {"apportion"}
    assert {canonicalize_name(Requirement(r).name) for r in extra["dev"]} - known == {"apportion"}


def test_the_pins_are_within_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {**pinned("tests/ray.txt"), **pinned("tests/tpu.txt"), **pinned()}  # they have environments of their own
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for text in [*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)]:
        requirement = Requirement(text)
        if requirement.name != "apportion":
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, text


def first_sentence(file: Path) -> str:
    """The first paragraph of a module's docstring, as the tree in the README has it."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "").removesuffix(".")


def test_the_tree_in_the_readme_has_the_docstring_of_every_package() -> None:
    tree = README.partition("src/apportion/\n")[2].partition("examples/")[0]
    listed = dict(re.findall(r"^  (\w+(?:\.py|/))  +(\S.*)$", tree, re.MULTILINE))
    package = ROOT / "src" / "apportion"
    modules = {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    packages = {p.parent.name + "/": first_sentence(p) for p in package.glob("*/__init__.py")}
    assert listed.keys() == modules | packages.keys()
    assert {name: text for name, text in listed.items() if name in packages} == packages


def test_every_page_of_the_docs_is_in_their_index() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert listed == {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}


def test_the_workload_in_the_readme_is_one() -> None:
    (code,) = re.findall(r"```python\n(workload = .*?)```", README, re.DOTALL)
    names_in_it = {"apportion": apportion, "torch": torch, "F": nn.functional, "Net": nn.Identity, "training_set": list}
    exec(code, names_in_it)
    assert isinstance(names_in_it["workload"], apportion.Workload)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_strategy_has_a_page_that_says_when_it_loses() -> None:
    for name in names("apportion.strategies"):
        assert "## When it loses" in (ROOT / "docs" / f"{name}.md").read_text(), name


@pytest.mark.processes
@pytest.mark.parametrize("script", ["scripts/setup", "scripts/demo", "scripts/test", "scripts/check", ".ci/run"])
def test_scripts_parse(script: str) -> None:
    shell = "bash" if script == ".ci/run" else "sh"
    subprocess.run([shell, "-n", ROOT / script], check=True)
