"""The script that is checked, and how it is called."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@dataclass(frozen=True)
class Script:
    """A training script. ``target``: its file, or with ``module`` the dotted name that ``python -m`` takes;
    ``arguments``: its own; ``then``: where it resumes in a run of its own, the arguments that this run has besides."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    then: tuple[str, ...] | None = None

    @property
    def path(self) -> Path:
        """The file that runs. Raises ValueError where it does not exist."""
        if not self.module:
            path = Path(self.target).resolve()
            if not path.is_file():
                raise ValueError(f"there is no script {self.target}")
            return path
        found = _module_spec(self.target)
        if found is not None and found.submodule_search_locations is not None:
            found = _module_spec(f"{self.target}.__main__")
        if found is None or found.origin is None:
            raise ValueError(
                f"there is no module {self.target} that python -m could run from {Path.cwd()}: give its dotted name, "
                "as package.train, from the folder that has the package"
            )
        return Path(found.origin).resolve()

    @property
    def folder(self) -> Path:
        """The folder whose files count as the user's: that of the script, or the one from which its package is
        imported."""
        path = self.path
        return path.parents[self.target.count(".") + (path.name == "__main__.py")] if self.module else path.parent


def _module_spec(name: str) -> ModuleSpec | None:
    """Returns where a module is, for which no package is imported: one may import torch, and take seconds."""
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    parts = name.split(".")
    for at in range(len(parts)):
        if path is None or not parts[at].isidentifier():
            return None
        found = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if found is None:
            return None
        path = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
    return found
