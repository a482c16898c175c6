"""Whether the names in the text of a value are there, without importing what they name: a misspelled strategy is
reported at once, and not after torch has been imported."""

from __future__ import annotations

import ast
from pathlib import Path

from apportion.core import value
from apportion.core.named_arguments import written


def check_written(text: str, package: str) -> None:
    """Raise ValueError where a text does not parse, names a value that is neither in this folder nor in an installed
    package, or gives a value of the folder a field that it does not have."""
    node = value.expression(text, value.kind_of(package))
    name = value.named_in(node, text, package)
    if name not in value.own_names(package):
        if name not in value.names(package):
            raise ValueError(value.unknown(name, package))
        return
    fields = _fields(name, package) if isinstance(node, ast.Call) and node.keywords else None
    if fields is None:
        return
    for argument in node.keywords if isinstance(node, ast.Call) else ():
        if argument.arg not in fields:
            raise ValueError(value.without_field(name, argument.arg, fields, f"{name}({', '.join(fields)})"))


def _fields(name: str, package: str) -> list[str] | None:
    """Returns the fields of the class that is written with this name, as they are in its file; None where it inherits
    some."""
    try:
        tree = ast.parse((Path(value.folder(package)) / f"{name}.py").read_bytes())
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
