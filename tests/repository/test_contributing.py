"""What an outside contributor looks for says what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version_and_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    assert PROJECT["description"] in citation["abstract"]


def test_the_workflow_runs_each_supported_python_and_the_oldest_torch() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["run"]["strategy"]["matrix"]
    named = [line.rpartition(":: ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert matrix["python"] == named
    assert f">={named[0]}" == PROJECT["requires-python"]
    oldest = next(line.removeprefix("torch>=") for line in PROJECT["dependencies"] if line.startswith("torch>="))
    torches = [each["torch"] for each in matrix["include"]]
    assert any(version.startswith(f"{oldest}.") for version in torches)
    assert any(step.get("run") == ".ci/run" for step in workflow["jobs"]["run"]["steps"])


def test_the_hooks_of_a_commit_are_those_of_the_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    check = (ROOT / "scripts" / "check").read_text()
    for hook in hooks:
        command = hook["entry"].removeprefix(".venv/bin/")
        assert command == "scripts/check" or f"run {command}" in check, command


def test_the_forms_for_issues_can_be_filled_in() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys(), path
        assert all(field["attributes"]["label"] for field in form["body"]), path
