"""Whether the names in the text of a value are there, without importing what they name: a misspelled strategy is
reported at once, and not after torch has been imported."""

from __future__ import annotations

import ast
from pathlib import Path

from apportion.core import value
from apportion.core.named_arguments import remedy


def check_written(text: str, package: str) -> None:
    """Raise ValueError where a text does not parse, names a value that is neither in this folder nor in an installed
    package, or gives a value of the folder a field that it does not have."""
    node = value.expression(text)
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise ValueError(f"{text!r} must be a name, or a name with arguments: data_parallel(microbatches=2)")
    if name.id not in value.own_names(package):
        if name.id not in value.names(package):
            raise ValueError(value.unknown(name.id, package))
        return
    if not isinstance(node, ast.Call) or not node.keywords:
        return
    fields = _fields(name.id, package)
    for argument in node.keywords if fields is not None else ():
        assert fields is not None
        if argument.arg not in fields:
            meant = remedy(str(argument.arg), fields, name.id)
            raise ValueError(
                f"{name.id} has no {argument.arg!r}: {meant}; it is written {name.id}({', '.join(fields)})"
            )


def _fields(name: str, package: str) -> list[str] | None:
    """Returns the fields of the class that is written with this name, as they are in its file; None where it inherits
    some."""
    try:
        tree = ast.parse((Path(value.folder(package)) / f"{name}.py").read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and value.written(node.name) == name:
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
