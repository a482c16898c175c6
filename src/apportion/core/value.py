"""The written form of a value (a strategy, a launcher, a policy): the same in Python, on the command line and in
reports.

``data_parallel(microbatches=2)`` is the class in ``strategies/data_parallel.py`` with that field: the folder is the
registry, and the name in the report is the file you open. An installed package adds one of its own by an entry point in
the group that is called as the folder: ``local_average = "my_package.local_average:LocalAverage"`` in
``apportion.strategies``.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from apportion.core.named_arguments import refuse_unknown, remedy, written

_KINDS = {
    "apportion.strategies": "strategy",
    "apportion.runtime.launch": "launcher",
    "apportion.exporting.targets": "target",
    "apportion.parallel.compression.methods": "compression",
    "apportion.core.orders": "order",
    "apportion.core.averages": "average",
    "apportion.reporting.loggers": "logger",
}
_EXAMPLES = {
    "strategy": "data_parallel(microbatches=2)",
    "launcher": "local(workers=2)",
    "target": "onnx(precision='int8')",
    "compression": "power_sgd(rank=2)",
    "order": "with_replacement(draws=1000)",
    "average": "ema(0.999)",
    "logger": "csv(path='metrics.csv')",
    "policy": "policy(keep=3)",
    "serving": "serving(port=8000)",
}
NESTED = "values"
"""The key of a field's metadata that names the folder of the values that it takes, where that is another one than its
own."""


def written_name(cls: type) -> str:
    """The name that a class is written with: ``DataParallel`` is written ``data_parallel``."""
    return written(cls.__name__)


class Value:
    """A frozen dataclass that is written as a call with the fields that differ from their defaults."""

    unnamed: ClassVar[str | None] = None
    """The field whose items are written first and without its name: ``ssh('a', 'b')``; None: every field is named."""

    positional: ClassVar[tuple[str, ...]] = ()
    """The fields that may be written in this order without their names: ``ema(0.999)``."""

    if not TYPE_CHECKING:  # which knows the fields by itself

        def __new__(cls, *args: Any, **given: Any) -> Self:
            """Refuses fields that the value does not have; ``__init__`` takes those that it has."""
            known = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else [*given]
            if not given.keys() <= set(known):
                refuse_unknown(written_name(cls), given, known, written_name(cls))
            return super().__new__(cls)

    def __str__(self) -> str:
        given: list[str] = []
        for f in sorted(dataclasses.fields(self), key=lambda f: f.name != self.unnamed):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name == self.unnamed:
                given += map(repr, value)
            elif value != f.default:
                given.append(f"{f.name}={value if isinstance(value, Value) else repr(value)}")
        return f"{written_name(type(self))}({', '.join(given)})" if given else written_name(type(self))

    def __repr__(self) -> str:
        text = str(self)
        return text if text.endswith(")") else text + "()"

    def _must_be_whole(self, *names: str, least: int = 1, unit: str = "") -> None:
        """Raise ValueError where one of these fields is not a whole number of at least this many, and not None where
        that is its default."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name in names:
            value, optional = getattr(self, name), defaults[name] is None
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= least) and not (
                optional and value is None
            ):
                what = f"a whole number of at least {least}{unit and f' {unit}'}{', or None' if optional else ''}"
                raise ValueError(f"{name}={value!r} must be {what}")


def names(package: str) -> list[str]:
    """The values that a folder holds, ``names("apportion.strategies")``, and that installed packages add to it."""
    return sorted({*own_names(package), *_added(package)})


def own_names(package: str) -> list[str]:
    """The values that a folder holds."""
    return sorted(m.name for m in pkgutil.iter_modules([folder(package)]) if not m.name.startswith("_"))


def folder(package: str) -> str:
    """The path of a folder of values."""
    return importlib.import_module(package).__path__[0]


@cache
def _added(package: str) -> dict[str, EntryPoint]:
    """The entry points of installed packages, by name; none takes the place of a file in the folder."""
    return {given.name: given for given in entry_points(group=package) if given.name not in own_names(package)}


def find(name: str, package: str) -> type:
    """The class that is written with this name: in the file of that name in that folder, or in an installed package."""
    if name not in own_names(package):
        return _find_added(name, package)
    module = importlib.import_module(f"{package}.{name}")
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__ and written_name(cls) == name:
            return cls
    raise AssertionError(f"{module.__name__} defines no class written {name}")


def _find_added(name: str, package: str) -> type:
    given = _added(package).get(name)
    if given is None:
        raise ValueError(unknown(name, package))
    added = given.load()
    if not (isinstance(added, type) and issubclass(added, Value) and written_name(added) == name):
        raise ValueError(f"{name} = {given.value!r} in the group {package} must be a class of values written {name}")
    return added


def kind_of(package: str) -> str:
    """What the values of a folder are, as "strategy"."""
    return _KINDS.get(package, "value")


def unknown(name: str, package: str) -> str:
    """The message of a name that no value of a folder is written with."""
    from apportion.core.argument_names import NAMES  # only a mistake needs it

    known = names(package)
    close = [NAMES.get(package, {}).get(name.lower(), "")]
    if not close[0]:
        close = difflib.get_close_matches(written(name), known, 1)
    hint = f"did you mean {close[0]}?" if close else "one of " + ", ".join(known)
    return f"unknown {kind_of(package)} {name!r}: {hint}"


def without_field(name: str, field: str | None, known: Collection[str], signature: str) -> str:
    """The message of a field that a value does not have."""
    return f"{name} has no {field!r}: {remedy(str(field), known, name)}; it is written {signature}"


def value_of(given: Any, package: str, kinds: type | tuple[type, ...]) -> Any:
    """The value that is given: itself, where it is one of these kinds, or what its text writes. Raises ValueError where
    it is neither."""
    if isinstance(given, str):
        return parse(given, package)
    if isinstance(given, kinds):
        return given
    kind = kind_of(package)
    if isinstance(given, type) and issubclass(given, kinds):
        name = written_name(given)
        raise ValueError(f"{kind}={name} is the class, and a value is needed: {kind}={name}(), or {kind}='{name}'")
    example = _EXAMPLES.get(kind, names(package)[0])
    raise ValueError(
        f"{kind}={given!r} must be a {kind} or its text: {kind}=apportion.{example}, or {kind}={example!r}"
    )


def parse(text: str, package: str) -> Any:
    """The value that ``text`` writes, for example ``data_parallel(microbatches=2)``. Literals and nested values only:
    nothing in it is executed."""
    return _build(expression(text, kind_of(package)), text, package)


def parse_as(text: str, cls: type) -> Any:
    """The value that ``text`` writes, of the one class that can be meant, for example a policy."""
    node = expression(text, written_name(cls))
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name) or name.id != written_name(cls):
        raise ValueError(f"{text!r} must be written {written_name(cls)}(...)")
    return _construct(cls, node, text, None)


def expression(text: str, kind: str) -> ast.expr:
    """The text of a value, parsed. ``kind``: what it must be, as "strategy". Raises ValueError where it does not
    parse."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"{text!r} does not parse ({error.msg}): write it like {_example(kind)}, and a text in quotes"
        ) from None


def named_in(node: ast.expr, text: str, package: str) -> str:
    """The name of the value that a parsed text writes. Raises ValueError where it is not written as a name."""
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(name, ast.Name):
        return name.id
    kind = kind_of(package)
    plain = written(text.strip().partition("(")[0].rpartition(".")[2])
    hint = f": did you mean {plain}?" if plain in names(package) else f": {_example(kind)}"
    raise ValueError(f"{text!r} must be a name, or a name with arguments{hint}")


def _example(kind: str) -> str:
    return _EXAMPLES.get(kind, _EXAMPLES["strategy"])


def _build(node: ast.expr, text: str, package: str) -> Any:
    return _construct(find(named_in(node, text, package), package), node, text, package)


def _construct(cls: type, node: ast.expr, text: str, package: str | None) -> Any:
    arguments = node.keywords if isinstance(node, ast.Call) else []
    values: dict[str, Any] = {}
    if isinstance(node, ast.Call) and node.args:
        unnamed, positional = getattr(cls, "unnamed", None), getattr(cls, "positional", ())
        if unnamed is None and len(node.args) > len(positional):
            raise ValueError(f"{text!r}: arguments are given by name, it is written {_signature(cls)}")
        given = [_argument(argument, text, package) for argument in node.args]
        values |= {unnamed: tuple(given)} if unnamed is not None else dict(zip(positional, given, strict=False))
    known = {f.name: f.metadata.get(NESTED, package) for f in dataclasses.fields(cls)}
    for argument in arguments:
        if argument.arg not in known:
            raise ValueError(without_field(written_name(cls), argument.arg, known, _signature(cls)))
        if argument.arg in values:
            raise ValueError(f"{text!r}: {argument.arg} is given twice; it is written {_signature(cls)}")
        values[argument.arg] = _argument(argument.value, text, known[argument.arg])
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}; it is written {_signature(cls)}") from None


def _argument(node: ast.expr, text: str, package: str | None) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        written = ast.get_source_segment(text.strip(), node) or ast.unparse(node)
        quoted = f"a text is written in quotes, {written!r}"
        if package is None or not isinstance(node, ast.Call | ast.Name):
            raise ValueError(f"{text!r}: {written} is neither a number, a text, nor a value; {quoted}") from None
        if isinstance(node, ast.Name) and node.id not in names(package):
            raise ValueError(f"{text!r}: {unknown(node.id, package)}; {quoted}") from None
        return _build(node, text, package)


def _signature(cls: type) -> str:
    fields = ", ".join(
        f"{f.name}={f.default!r}" if f.default is not dataclasses.MISSING else f.name for f in dataclasses.fields(cls)
    )
    return f"{written_name(cls)}({fields})"


def check_written(text: str, package: str) -> None:
    """Raise ValueError where a text does not parse, names a value that is neither in this folder nor in an installed
    package, or gives a value of the folder a field that it does not have."""
    node = expression(text, kind_of(package))
    name = named_in(node, text, package)
    if name not in own_names(package):
        if name not in names(package):
            raise ValueError(unknown(name, package))
        return
    fields = _fields(name, package) if isinstance(node, ast.Call) and node.keywords else None
    if fields is None:
        return
    for argument in node.keywords if isinstance(node, ast.Call) else ():
        if argument.arg not in fields:
            raise ValueError(without_field(name, argument.arg, fields, f"{name}({', '.join(fields)})"))


def _fields(name: str, package: str) -> list[str] | None:
    """Returns the fields of the class that is written with this name, as they are in its file; None where it inherits
    some."""
    try:
        tree = ast.parse((Path(folder(package)) / f"{name}.py").read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and written(node.name) == name:
            if [base.id for base in node.bases if isinstance(base, ast.Name)] not in (
                ["Strategy"],
                ["Value"],
                ["Target"],
            ):
                return None
            annotated = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            return [
                line.target.id
                for line in annotated
                if isinstance(line.target, ast.Name) and "ClassVar" not in ast.unparse(line.annotation)
            ]
    return None
