"""The state of a training that is not a tensor of the network's, with a committed copy: found, compared, carried.

::

    entries   a name in a scope -> a value      model.layers.0.calls -> 41       compared by identity
    leaves    an object changed in place        model.history, a generator       compared by what it holds

After each step what has changed is committed; a step that is cut off rolls back. ``record`` is the part that differs
from what every process begins with, as JSON and tensors, and ``load`` puts it into another process. What changes and
cannot be written so is ``lost``: it is named, and a process that would begin it anew refuses to.
"""

from __future__ import annotations

import enum
import json
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from apportion.core.python_state.handles import is_handle
from apportion.core.python_state.leaves import (
    ArrayLeaf,
    BufferLeaf,
    DictLeaf,
    ExtraLeaf,
    Leaf,
    SetLeaf,
    TensorLeaf,
    fields_leaf,
    leaf_of,
)
from apportion.core.python_state.records import NotStorable, Record, ValueReader, ValueWriter
from apportion.core.python_state.scopes import MISSING, Entries, Scope
from apportion.core.python_state.search import ATOMS, Search, origin
from apportion.core.replica_digest import tensor_digest
from apportion.errors import StateLost

FULL_DIGESTS, QUICK_BYTES = 3, 1 << 20
"""How often what has changed is digested whatever its size, and the bytes up to which it always is."""
COPY_RATE, COPY_SHARE, TIMED_STEPS = 4e9, 0.01, 8
"""The bytes a second at which memory is taken to be copied, the share of a step that a copy may take, and the number of
steps after which the fastest one is known."""
MOST_MADE = 10_000
"""The number of objects that training has put into one place up to which each is compared."""
REMEDY = (
    "keep it in a buffer, or as a number, a list, a dict or a generator that is an attribute, give it by "
    "get_extra_state(), or make it a function of the step; where training does not depend on it, name it in the "
    "workload: caches={}"
)


def remedy(name: str) -> str:
    """What a user can do about state that is lost."""
    return REMEDY.format(f"({name!r},)")


@final
class PythonState:
    """All of it in one process. ``caches``: names, as ``Class.attribute`` or the whole path, of what holds no state."""

    def __init__(self, caches: Collection[str] = ()) -> None:
        self._caches = frozenset(caches)
        self._search = Search(self._is_cache)
        self.lost: dict[str, str] = {}
        """What has changed, or may have, and cannot be carried: the reason by the name."""
        self.apart: str | None = None
        """Why one process cannot stand for another, where a strategy has each keep its own; None: it can."""
        self.shares = 1
        """The number of ranks that fetch the rows of one batch between them."""
        self._entries = Entries(self._search.counts)
        self._resting: set[str] = set()
        """What was loaded and has not changed since, where this process has a part of the network."""
        self._opened: dict[int, Any] = {}
        self._leaves: list[Leaf] = []
        self._contents: list[Any] = []
        self._under: dict[int, list[tuple[Leaf, Any]]] = {}
        """Objects that were made since, by the entry that they are in, or by -1 - the number of the object that is in
        their place."""
        self._began: tuple[list[Any], list[Any]] | None = None
        self._steps = 0
        self._digests: dict[str, int] | None = None
        self._unrecorded: int | None = None
        self._moved = False
        self._fastest, self._committed_at = float("inf"), 0.0
        self._asked = 0
        """How often a quick digest was asked for."""
        self._owner: dict[str, str] = {}
        """The entry, or the object, that each tensor of a record belongs to."""

    def _is_cache(self, scope: Scope, key: str) -> bool:
        return bool(self._caches) and (f"{scope.label}.{key}" in self._caches or f"{scope.name}.{key}" in self._caches)

    def watch(self, **roots: Any) -> None:
        """Look into these from now on; what they hold now is what every process begins with."""
        for name, value in roots.items():
            if value is None:
                continue
            if isinstance(value, nn.Module):
                self._search.models[name] = weakref.ref(value)
                self._search.known(iter((*value.parameters(), *value.buffers())))
            self._search.visit(name, value)
        self._take_found()

    def _take_found(self) -> None:
        """Take up what the search has found since."""
        for scope in self._entries.scopes:  # one of globals gets more names as more code is found
            if not scope.sized:
                self._entries.add_names(scope)
        for scope in self._search.scopes[len(self._entries.scopes) :]:
            self._entries.add_scope(scope)
        for leaf in self._search.leaves[len(self._leaves) :]:
            self._leaves.append(leaf)
            self._contents.append(leaf.keep())
        for name, kind in self._search.iterators.items():
            self.lost.setdefault(name, f"a {kind}, whose contents cannot be read without changing them")

    @property
    def moved(self) -> bool:
        """True once anything may have changed."""
        return self._moved

    # Comparing

    def commit(self) -> None:
        """Take what is there now as the state after a step."""
        self._began = None
        self._steps += 1
        now = time.perf_counter()
        if self._steps > 1:
            self._fastest = min(self._fastest, now - self._committed_at)
        self._committed_at = now
        thorough = self._steps & (self._steps - 1) == 0
        self._keep(thorough=thorough)
        if thorough and self._steps >= TIMED_STEPS:
            self._drop_large()
        if self._unrecorded is not None:
            self._refuse_unrecorded()

    def _drop_large(self) -> None:
        """Stop copying after every step what takes too much of one: it is lost."""
        for leaf in self._leaves:
            nbytes = int(leaf.target.nbytes) if leaf.moved and isinstance(leaf, TensorLeaf | ArrayLeaf) else 0
            if nbytes > QUICK_BYTES and nbytes / COPY_RATE > COPY_SHARE * self._fastest:
                leaf.dropped = True
                self.lose(leaf.name, f"of {nbytes / 1e6:.0f} MB, which take over {COPY_SHARE:.0%} of a step to copy")

    def settle(self) -> None:
        """Find all that has changed, between two steps and before the state is saved."""
        self._keep(thorough=True)

    def _keep(self, *, thorough: bool) -> None:
        now = self._entries.now()
        for i in self._entries.changed(now):
            self._keep_entry(i, now[i])
        for j, leaf in enumerate(self._leaves):
            if leaf.dropped:
                continue
            closely = thorough or (leaf.moved and not isinstance(leaf, TensorLeaf))
            if not leaf.same(self._contents[j], thorough=closely):
                self._digests, self._moved = None, True
                first, leaf.moved = not leaf.moved, True
                self._resting.discard(leaf.name)
                before, self._contents[j] = self._contents[j], leaf.keep(self._contents[j])
                made = self._keep_made(j, leaf, before)
                if self.apart is not None:
                    self.lose(leaf.name, self.apart)
                elif (first or made) and not isinstance(leaf, ExtraLeaf):
                    self._check(leaf.name, leaf.plain(self._contents[j]), whole=True)
        if self._under:
            self._keep_under()

    def _keep_made(self, j: int, leaf: Leaf, before: Any) -> bool:
        """Keep what the objects hold that a container was given, and tell whether it holds any."""
        held = leaf.held()
        if not held:
            self._under.pop(-1 - j, None)
            return False
        known = {id(one.target): (one, kept) for one, kept in self._under.get(-1 - j, ())}
        found = self._made(leaf.name, held)
        self._under[-1 - j] = [known.get(id(one.target)) or (one, one.keep()) for one in found]
        return bool(found)

    def _keep_under(self) -> None:
        for entry, found in self._under.items():
            for j, (leaf, kept) in enumerate(found):
                if not leaf.same(kept, thorough=True):
                    self._digests = None
                    found[j] = leaf, leaf.keep(kept)
                    self._recheck(entry)

    def _recheck(self, entry: int) -> None:
        """See whether what holds an object that has changed can still be written."""
        self._resting.discard(self._leaves[-1 - entry].name if entry < 0 else self._entries.name(entry))
        if entry < 0:
            self._check(
                self._leaves[-1 - entry].name, self._leaves[-1 - entry].plain(self._contents[-1 - entry]), whole=True
            )
        else:
            self._check(self._entries.name(entry), self._entries.kept[entry])

    def _keep_entry(self, i: int, value: Any) -> None:
        before, self._entries.kept[i] = self._entries.kept[i], value
        self._digests, self._moved = None, True
        self._resting.discard(self._entries.name(i))
        self._under.pop(i, None)
        if self.apart is not None and not _equal(value, self._entries.built[i]) and self._is_state(before, value):
            self.lose(self._entries.name(i), self.apart)
        if value is MISSING or type(value) in ATOMS:
            return
        if isinstance(value, Tensor) and type(before) is type(value) and i not in self._opened:
            self._under[i] = [(TensorLeaf("", value), TensorLeaf("", value).keep())]
            return
        self._under[i] = [(leaf, leaf.keep()) for leaf in self._made(self._entries.name(i), [value])]
        if type(before) is type(value) and i not in self._opened:
            return
        if not self._check(self._entries.name(i), value, quietly=True):
            handle = before is MISSING or before is None
            of_user = origin(type(value)) == "user"
            if handle and i not in self._opened and is_handle(value, of_user=of_user):
                self._opened[i] = value  # a file, a connection: opened once it is needed, in every process
            else:
                self._check(self._entries.name(i), value)

    def _is_state(self, before: Any, value: Any) -> bool:
        """Tell whether a new value is more than what every process opens for itself."""
        return (before is not MISSING and before is not None) or self._check("", value, quietly=True)

    def _made(self, name: str, values: list[Any]) -> list[Leaf]:
        """Objects within values that were made since, which are changed in place."""
        known = {*(id(leaf.target) for leaf in self._leaves), *(id(scope.owner) for scope in self._entries.scopes)}
        found, todo = dict[int, Leaf](), values
        while todo:
            one = todo.pop()
            if type(one) in ATOMS or id(one) in known or id(one) in found or isinstance(one, nn.Module | nn.Parameter):
                continue
            if len(found) >= MOST_MADE:
                self.lose(name, f"a nest of over {MOST_MADE} objects that training has made")
                break
            leaf = leaf_of("", one)
            if leaf is None and not callable(one) and not isinstance(one, tuple | enum.Enum):
                leaf = fields_leaf(one) if origin(type(one)) == "user" else None
            if leaf is not None:
                found[id(one)] = leaf
                todo += [item for _, item in leaf.inside()]
            elif type(one) is tuple:
                todo += one
        return [*found.values()]

    def _check(self, name: str, value: Any, *, whole: bool = False, quietly: bool = False) -> bool:
        """Tell whether a value can be written; where it cannot, it is lost."""
        try:
            writer = ValueWriter(self._at(), {}, self._search.classes)
            writer.contents(value, name) if whole else writer.value(value, name)
        except NotStorable as error:
            if not quietly:
                self.lose(name, str(error))
            return False
        return True

    def lose(self, name: str, reason: str) -> None:
        """Note that something cannot be carried."""
        if name not in self.lost:
            self.lost[name] = reason
            self._digests = None

    def _at(self) -> dict[int, str]:
        found = {id(scope.owner): scope.name for scope in self._entries.scopes if scope.owner is not None}
        found |= {id(leaf.target): leaf.name for leaf in self._leaves if not isinstance(leaf, ExtraLeaf)}
        for name, model in self._alive():
            found |= {id(p): f"{name} parameter {key}" for key, p in model.named_parameters()}
            found |= {id(m): f"{name} module {key}" for key, m in model.named_modules()}
        return found

    def _alive(self) -> list[tuple[str, nn.Module]]:
        found = ((name, model()) for name, model in self._search.models.items())
        return [(name, model) for name, model in found if model is not None]

    def _there(self) -> dict[str, Any]:
        """Return what a record may refer to by name."""
        found: dict[str, Any] = {scope.name: scope.owner for scope in self._entries.scopes if scope.owner is not None}
        found |= {leaf.name: leaf.target for leaf in self._leaves}
        for name, model in self._alive():
            found |= {f"{name} parameter {key}": p for key, p in model.named_parameters()}
            found |= {f"{name} module {key}": m for key, m in model.named_modules()}
        return found

    def _kept(self) -> dict[int, Any]:
        under = [pair for found in self._under.values() for pair in found]
        pairs = [*zip(self._leaves, self._contents, strict=True), *under]
        return {id(leaf.target): leaf.value(kept) for leaf, kept in pairs if not isinstance(leaf, ExtraLeaf)}

    def try_loading(self, load: Callable[[], Any]) -> None:
        """Find what the data set changes as it gives rows (``load``), where other processes load them: it is lost with
        them. It is as before afterwards."""
        self._keep(thorough=True)
        try:
            load()
        except Exception:  # the first step raises the same, at its own line
            return
        now, reason = self._entries.now(), "changed by the processes that load the rows, each of which has its own"
        for i in self._entries.changed(now):
            if self._entries.of[i].root in _BY_ROWS and self._is_state(self._entries.kept[i], now[i]):
                self.lose(self._entries.name(i), reason)
        for leaf, kept in zip(self._leaves, self._contents, strict=True):
            if leaf.root in _BY_ROWS and not leaf.same(kept, thorough=True):
                self.lose(leaf.name, reason)
        self.reset()

    # Going back

    def reset(self) -> None:
        """Undo what building has changed, by a look at how the model is called; what cannot be written stays."""
        now = self._entries.now()
        for i in self._entries.changed(now):
            if now[i] is MISSING or self._check(self._entries.name(i), now[i], quietly=True):
                self._entries.set(i, self._entries.kept[i])
            else:
                self._entries.kept[i] = self._entries.built[i] = now[i]
        for leaf, kept in zip(self._leaves, self._contents, strict=True):
            if not leaf.same(kept, thorough=True) and leaf.can_put(kept):
                leaf.put(kept)

    def roll_back(self) -> None:
        """Undo what was changed after the last commit. Raises StateLost where that was not kept."""
        now = self._entries.now()
        for i in self._entries.changed(now):
            self._entries.set(i, self._entries.kept[i])
        for leaf, kept in zip(self._leaves, self._contents, strict=True):
            self._put_leaf(leaf, kept)
        for found in self._under.values():
            for leaf, kept in found:
                self._put_leaf(leaf, kept)
        self._began = None

    put_back = roll_back

    def _put_leaf(self, leaf: Leaf, kept: Any) -> None:
        if leaf.dropped or leaf.same(kept, thorough=True):
            return
        if not leaf.can_put(kept) or (leaf.same(kept, thorough=False) and not leaf.explained):
            raise StateLost(f"{leaf.name} was changed for the first time as a rank was lost")
        leaf.put(kept)

    def begin(self) -> None:
        """Begin a pass over a batch in parts, each of which begins with what is there now."""
        now = self._entries.now()
        pairs = zip(self._leaves, self._contents, strict=True)
        self._began = now, [kept if leaf.same(kept, thorough=False) else leaf.keep(kept) for leaf, kept in pairs]

    def again(self) -> None:
        """Prepare another part of the same pass, which begins with what the pass began with; but for what the data set
        keeps, of which each part fetches other rows."""
        values, contents = self._began or (self._entries.kept, self._contents)
        now = self._entries.now()
        values = values + [MISSING] * (len(now) - len(values))
        for i, (one, other) in enumerate(zip(now, values, strict=True)):
            if one is not other and self._entries.of[i].root not in _BY_ROWS:
                self._entries.set(i, other)
        for leaf, kept in zip(self._leaves, contents, strict=False):
            stays = leaf.dropped or leaf.root in _BY_ROWS
            if not stays and leaf.can_put(kept) and not leaf.same(kept, thorough=False):
                leaf.put(kept)
        if self._began is None:
            for leaf, kept in (pair for found in self._under.values() for pair in found):
                if leaf.can_put(kept) and not leaf.same(kept, thorough=False):
                    leaf.put(kept)

    # The state

    def record(self) -> tuple[Record, dict[str, Tensor]]:
        """Return what differs from what every process begins with: plain JSON, and tensors by name."""
        writer = ValueWriter(self._at(), self._kept(), self._search.classes)
        entries: dict[str, dict[str, Any]] = {}
        objects: dict[str, Any] = {}
        by_rows: str | None = None
        for leaf, kept in zip(self._leaves, self._contents, strict=True):
            if leaf.moved and leaf.name not in self.lost:
                stored = self._stored(writer, leaf.plain(kept), leaf.name, whole=True)
                if stored is not _NOT:
                    objects[leaf.name] = stored
                    by_rows = leaf.name if leaf.root in _BY_ROWS else by_rows
        for i, (value, built) in enumerate(zip(self._entries.kept, self._entries.built, strict=True)):
            if value is built or _equal(value, built) or (i in self._opened and value is self._opened[i]):
                continue
            name, scope = self._entries.name(i), self._entries.of[i]
            if name in self.lost:
                continue
            stored = {"gone": True} if value is MISSING else self._stored(writer, value, name, whole=False)
            if stored is not _NOT:
                entries.setdefault(scope.name, {})[self._entries.keys[i]] = stored
                by_rows = name if scope.root in _BY_ROWS else by_rows
        found: Record = {"entries": entries, "objects": objects}
        return self._noted(found, by_rows), writer.tensors

    def _noted(self, found: Record, by_rows: str | None) -> Record:
        """Add what others have to know of a record."""
        if self._resting:
            found["resting"] = sorted(self._resting)
        if self.lost:
            found["lost"] = dict(self.lost)
        if by_rows is not None:
            found["by rows"] = {"name": by_rows, "shares": self.shares}
        return found

    def _stored(self, writer: ValueWriter, value: Any, name: str, *, whole: bool) -> Any:
        before = len(writer.tensors)
        try:
            stored = writer.contents(value, name) if whole else writer.value(value, name)
        except NotStorable as error:
            self.lose(name, str(error))
            return _NOT
        if len(writer.tensors) > before:
            self._owner |= dict.fromkeys([*writer.tensors][before:], name)
        return stored

    def load(self, record: Record, tensors: Mapping[str, Tensor], *, partly: bool = False) -> None:
        """Go on from what another process has recorded. ``partly``: this process has a part of the network, and what
        has no place here is another's. Raises ValueError where something of it is lost, or has no place."""
        self._refuse_lost(record)
        self.roll_back()
        leaves = {leaf.name: leaf for leaf in self._leaves}
        reader = ValueReader(self._there(), tensors, self._search.classes)
        self._begin_anew(record)
        for name, stored in record.get("objects", {}).items():
            if name not in leaves:
                if partly:
                    continue
                raise _no_place(name)
            self._load_leaf(leaves[name], reader, stored)
        scopes = {scope.name: scope for scope in self._entries.scopes}
        for scope_name, values in record.get("entries", {}).items():
            if scope_name not in scopes:
                if partly:
                    continue
                raise _no_place(f"{scope_name}.{next(iter(values))}")
            scope = scopes[scope_name]
            for key, stored in values.items():
                if stored == {"gone": True}:
                    scope.remove(key)
                else:
                    scope.set(key, reader.value(stored, scope.mapping.get(key)))
        self._loaded()
        if partly:
            entries = record.get("entries", {})
            self._resting = {f"{scope}.{key}" for scope, keys in entries.items() for key in keys}
            self._resting |= record.get("objects", {}).keys()

    def show(self, record: Record, tensors: Mapping[str, Tensor]) -> None:
        """Put what has a place here and is not lost, for a network that is only looked at."""
        self.load({part: record[part] for part in ("entries", "objects") if part in record}, tensors, partly=True)

    def _begin_anew(self, record: Record) -> None:
        """Put what the record does not have to what it was in the beginning."""
        entries = record.get("entries", {})
        for i, (kept, built) in enumerate(zip(self._entries.kept, self._entries.built, strict=True)):
            recorded = self._entries.keys[i] in entries.get(self._entries.of[i].name, {})
            if kept is not built and i not in self._opened and not recorded:
                self._entries.set(i, built)

    def _load_leaf(self, leaf: Leaf, reader: ValueReader, stored: Any) -> None:
        leaf.moved = True
        target = leaf.target
        if isinstance(leaf, ExtraLeaf):
            target.set_extra_state(reader.value(stored))
        elif isinstance(leaf, DictLeaf | SetLeaf):
            found = reader.value(stored, target)
            target.clear()
            target.update(found)
        elif isinstance(stored, dict) and "generator" in stored:
            leaf.put(reader.state(stored["generator"]))
        elif isinstance(leaf, BufferLeaf):
            leaf.put(reader.value(stored))
        elif isinstance(leaf, TensorLeaf):
            leaf.put([reader.value(stored), 0, None])
        elif isinstance(stored, dict) and "array" in stored:
            target[...] = reader.value(stored)
        else:
            found = reader.value(stored)
            target.clear()
            target.extend(found)

    def _loaded(self) -> None:
        now = self._entries.now()
        self._under.clear()
        for i in range(len(now)):
            if now[i] is not self._entries.kept[i]:
                self._keep_entry(i, now[i])
        pairs = zip(self._leaves, self._contents, strict=True)
        self._contents = [leaf.keep(kept if leaf.moved else None) for leaf, kept in pairs]
        self._digests, self._began, self._unrecorded = None, None, None

    def _refuse_lost(self, record: Record) -> None:
        for name, reason in record.get("lost", {}).items():
            raise ValueError(
                f"{name} is {reason}, and was not kept: going on would begin it anew; start a new run, and "
                f"{remedy(name)}"
            )
        by_rows = record.get("by rows")
        if by_rows is not None and by_rows["shares"] != self.shares:
            name, shares = by_rows["name"], by_rows["shares"]
            raise ValueError(
                f"{name} has changed as rows were fetched by {shares} workers, and there are {self.shares} now, each "
                f"of which would fetch others: go on with workers={shares}, or start a new run, and {remedy(name)}"
            )

    def load_unrecorded(self, step: int) -> None:
        """Go on from a state after this step that says nothing of Python's values."""
        self._loaded()
        self._unrecorded = step if step else None

    def _refuse_unrecorded(self) -> None:
        record, _ = self.record()
        step, self._unrecorded = self._unrecorded, None
        names = [f"{scope}.{key}" for scope, keys in record["entries"].items() for key in keys]
        for name in (*names, *record["objects"], *record.get("lost", ())):
            raise ValueError(
                f"the checkpoint of step {step} was written by an earlier apportion, which did not keep {name}: going "
                "on would begin it anew; start a new run, or, where training does not depend on it, name it in the "
                f"workload: caches=({name!r},)"
            )

    # Ranks

    def digests(self) -> dict[str, int]:
        """Return a number for each thing that has changed, by name, which is equal for equal values."""
        if self._digests is None:
            record, tensors = self.record()
            stored = {
                f"{scope}.{key}": value for scope, keys in record["entries"].items() for key, value in keys.items()
            }
            stored |= record["objects"]
            found = {name: zlib.crc32(json.dumps(value).encode()) for name, value in stored.items()}
            for name, tensor in tensors.items():
                owner = self._owner[name]
                found[owner] = zlib.crc32(f"{found[owner]} {tensor_digest(tensor)}".encode())
            self._digests = found
        return self._digests

    def quick_digest(self) -> int:
        """Return ``digest`` the first times, and as long as it is of little; 0 afterwards."""
        self._asked += 1
        return self.digest() if self._asked <= FULL_DIGESTS or self._nbytes() <= QUICK_BYTES else 0

    def _nbytes(self) -> int:
        """Return the bytes of the tensors and arrays that have changed."""
        entries = zip(self._entries.kept, self._entries.built, strict=True)
        values = [kept for kept, built in entries if kept is not built]
        values += [leaf.target for leaf in self._leaves if leaf.moved]
        return sum(int(value.nbytes) for value in values if isinstance(value, Tensor | np.ndarray))

    def digest(self) -> int:
        """Return one number of 32 bits for all of them; 0 where nothing has changed."""
        found = self.digests()
        return zlib.crc32(json.dumps(found, sort_keys=True).encode()) if found else 0


_NOT: Any = object()
_BY_ROWS = ("data", "collate", "augment")
"""The roots whose state depends on which rows a rank fetches."""


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and type(value) in ATOMS and value == other


def _no_place(name: str) -> ValueError:
    return ValueError(
        f"{name} was kept, and the workload has nothing of that name any more: change it back, or start a new run"
    )
