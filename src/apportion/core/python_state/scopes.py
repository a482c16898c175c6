"""Places where code keeps things by name: instances, classes, functions, their closures, the globals they name;
and the entries of all of them side by side, which one pass compares by identity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from operator import getitem, is_, is_not
from typing import Any, final

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""What is kept where a name has no value."""


class Scope:
    """Names with values. ``name``: the path by which it was found; ``label``: what a person calls it."""

    __slots__ = ("_keys", "_names", "label", "mapping", "name", "owner", "root", "skipped")

    def __init__(
        self,
        name: str,
        label: str,
        mapping: Mapping[str, Any],
        *,
        keys: Iterable[str] | None = None,
        skipped: frozenset[str] = frozenset(),
        owner: Any = None,
    ) -> None:
        """``keys``: the names that count, others may come and go; None: all, but for those that are skipped.
        ``owner``: the object whose attributes they are, where other objects may refer to it."""
        self.name, self.label, self.mapping, self.skipped = name, label, mapping, skipped
        self.root, self.owner = "", owner
        self._keys = None if keys is None else list(keys)

    def names(self) -> list[str]:
        """Return the names that count, and are there or were asked for."""
        if self._keys is not None:
            return self._keys
        return [key for key in self.mapping if self._counts(key)]

    def restrict(self, keys: Iterable[str]) -> None:
        """Let these names count alone."""
        self._keys = [*keys]

    def _counts(self, key: str) -> bool:
        return key not in self.skipped and not (key.startswith("__") and key.endswith("__"))

    @property
    def sized(self) -> Mapping[str, Any]:
        """What is measured to find new names; of a scope with given names nothing is."""
        return self.mapping if self._keys is None else {}

    def set(self, key: str, value: Any) -> None:
        """Give a name a value."""
        assert isinstance(self.mapping, MutableMapping)
        self.mapping[key] = value

    def remove(self, key: str) -> None:
        """Take a name away."""
        assert isinstance(self.mapping, MutableMapping)
        self.mapping.pop(key, None)


@final
class ClassScope(Scope):
    """The attributes of a class."""

    __slots__ = ("_cls",)

    def __init__(self, name: str, cls: type) -> None:
        super().__init__(name, cls.__name__, vars(cls))
        self._cls = cls

    def set(self, key: str, value: Any) -> None:
        setattr(self._cls, key, value)

    def remove(self, key: str) -> None:
        if key in vars(self._cls):
            delattr(self._cls, key)


@final
class Cell(MutableMapping[str, Any]):
    """A variable of a closure, as a mapping with its name."""

    def __init__(self, variable: str, cell: Any) -> None:
        self._variable, self._cell = variable, cell

    def __getitem__(self, key: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it has no value yet
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter((self._variable,))

    def __len__(self) -> int:
        return 1


@final
class Slots(MutableMapping[str, Any]):
    """The ``__slots__`` of an object, as a mapping."""

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        self._owner, self._names = owner, list(names)

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self._owner, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        object.__setattr__(self._owner, key, value)

    def __delitem__(self, key: str) -> None:
        object.__delattr__(self._owner, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def slots_of(cls: type) -> list[str]:
    """The names that the classes of an object keep in slots."""
    found: list[str] = []
    for one in cls.__mro__:
        names = one.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else [*names]
    return [name for name in dict.fromkeys(found) if name not in ("__dict__", "__weakref__")]


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
