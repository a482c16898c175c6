"""The script that is checked, and how it is called."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Script:
    """A training script. ``target``: its file, or with ``module`` the dotted name that ``python -m`` takes;
    ``arguments``: its own."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def path(self) -> Path:
        """The file that runs. Raises ValueError where there is none."""
        if not self.module:
            path = Path(self.target).resolve()
            if not path.is_file():
                raise ValueError(f"there is no script {self.target}")
            return path
        try:
            found = importlib.util.find_spec(self.target)
        except ModuleNotFoundError:
            found = None
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{self.target}.__main__")
        if found is None or found.origin is None:
            raise ValueError(f"there is no module {self.target} that python -m could run from here")
        return Path(found.origin).resolve()

    @property
    def folder(self) -> Path:
        """The folder whose files count as the user's: that of the script, or the one from which its package is
        imported."""
        path = self.path
        return path.parents[self.target.count(".") + (path.name == "__main__.py")] if self.module else path.parent
