"""The names of all scopes with their values, side by side, so that one pass compares them by identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem, is_, is_not
from typing import Any, final

from apportion.core.python_state.scopes import MISSING, Scope


@final
class Entries:
    """Values by their number. ``counts``: whether a name of a scope may hold state."""

    def __init__(self, counts: Callable[[Scope, str], bool]) -> None:
        self._counts = counts
        self.scopes: list[Scope] = []
        self.keys: list[str] = []
        self.of: list[Scope] = []
        """The scope of each entry."""
        self.kept: list[Any] = []
        """What was committed last."""
        self.built: list[Any] = []
        """What every process begins with."""
        self._owners: list[Mapping[str, Any]] = []
        self._sized: list[Mapping[str, Any]] = []
        self._sizes: list[int] = []

    def add_scope(self, scope: Scope) -> None:
        """Take up a scope with all of its names."""
        self.scopes.append(scope)
        self._sized.append(scope.sized)
        self._sizes.append(len(scope.sized))
        self.add_names(scope)

    def add_names(self, scope: Scope) -> None:
        """Take up the names of a scope that are not known yet, with the values that they have."""
        known = self._known(scope)
        for key in scope.names():
            if key not in known:
                self._add(scope, key, scope.mapping.get(key, MISSING))

    def _known(self, scope: Scope) -> set[str]:
        return {key for key, of in zip(self.keys, self.of, strict=True) if of is scope}

    def _add(self, scope: Scope, key: str, built: Any) -> None:
        if self._counts(scope, key):
            self._owners.append(scope.mapping)
            self.keys.append(key)
            self.of.append(scope)
            self.kept.append(built)
            self.built.append(built)

    def now(self) -> list[Any]:
        """Return what is there now, in the order of ``kept``."""
        if [*map(len, self._sized)] != self._sizes:
            self._grow()
        try:
            return [*map(getitem, self._owners, self.keys)]
        except KeyError:
            return [owner.get(key, MISSING) for owner, key in zip(self._owners, self.keys, strict=True)]

    def _grow(self) -> None:
        """Take up names that were not there before."""
        for i, (scope, sized) in enumerate(zip(self.scopes, self._sized, strict=True)):
            if len(sized) != self._sizes[i]:
                self._sizes[i] = len(sized)
                known = self._known(scope)
                for key in scope.names():
                    if key not in known:
                        self._add(scope, key, MISSING)

    def changed(self, now: list[Any]) -> list[int]:
        """Return the entries that are not what was committed last."""
        if all(map(is_, now, self.kept)):
            return []
        return [i for i, differs in enumerate(map(is_not, now, self.kept)) if differs]

    def set(self, entry: int, value: Any) -> None:
        """Give an entry a value, or none."""
        if value is MISSING:
            self.of[entry].remove(self.keys[entry])
        else:
            self.of[entry].set(self.keys[entry], value)

    def name(self, entry: int) -> str:
        """Return what a person calls an entry."""
        return f"{self.of[entry].name}.{self.keys[entry]}"
