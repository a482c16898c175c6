"""Descriptions that a person may write by hand, in files of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from apportion.core.json_data import read


class JsonFile:
    """A dataclass that goes to a file of JSON and back."""

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Make what plain data describes. ValueError where a field is missing, unknown, or holds what cannot be."""
        try:
            return read(cls, data)
        except ValueError as error:
            what = cls.__name__.lower()
            raise ValueError(f"this is not a {what}: {error}; docs/planner.md has one to begin with") from None

    def save(self, path: str | Path) -> None:
        """Write the description to a file of JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what a file of JSON describes. ValueError where it describes none."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
