"""The checks of the graph in a ``torch.export`` archive: expressions of sizes, guards, operators and trees have to be
data. torch evaluates, executes or imports these, so whatever is not on the lists here is refused."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_EXPRESSIONS = frozenset(
    [
        "Symbol",
        "Integer",
        "Float",
        "Rational",
        "Add",
        "Mul",
        "Pow",
        "Mod",
        "Max",
        "Min",
        "Abs",
        "floor",
        "ceiling",
        "Equality",
        "Unequality",
        "StrictLessThan",
        "LessThan",
        "StrictGreaterThan",
        "GreaterThan",
        "And",
        "Or",
        "Not",
        "Piecewise",
        "ExprCondPair",
        "sqrt",
        "exp",
        "log",
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "LShift",
        "RShift",
        "PowByNatural",
        "FloatPow",
        "FloatTrueDiv",
        "IntTrueDiv",
        "IsNonOverlappingAndDenseIndicator",
        "TruncToFloat",
        "TruncToInt",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
        "Identity",
    ]
)
"""The names of functions and classes that an expression of a size may use."""
_GUARDS = frozenset(
    ["Max", "Min", "Mod", "FloorDiv", "PythonMod", "CeilToInt", "FloorToInt", "TruncToInt", "ToFloat", "IntTrueDiv"]
)
_METHODS = frozenset(("size", "stride", "storage_offset"))
_SYMBOL = re.compile(r"[A-Za-z]+\d+|oo|int_oo|zoo|nan|true|false|True|False", re.ASCII)
_WORD = re.compile(r"[\w.+-]*", re.ASCII)
_KEY = re.compile(r"[\w. -]*", re.ASCII)
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Constant,
    ast.Tuple, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_LONGEST = 20_000
"""The largest number of characters of an expression."""

_HIGHER = frozenset(
    [
        "cond",
        "while_loop",
        "map",
        "map_impl",
        "scan",
        "associative_scan",
        "wrap",
        "invoke_subgraph",
        "flex_attention",
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "auto_functionalized",
        "auto_functionalized_v2",
        "out_dtype",
        "strict_mode",
    ]
)
"""The names of operators that take a graph."""
_TARGET = re.compile(
    r"torch\.ops\.(?:aten|prims|quantized_decomposed|torchvision)\.(?P<name>\w+)(?:\.\w+)?"
    rf"|torch\.ops\.higher_order\.(?:{'|'.join(sorted(_HIGHER))})"
    r"|torch\.(?:_?sym_\w+)"
    r"|math\.\w+"
    r"|_operator\.(?:add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_|lshift|rshift"
    r"|getitem)",
    re.ASCII,
)
_FILES = frozenset(("from_file", "save", "load"))
"""The names of operators that read or write files."""
_TREES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", "torch.Size", None)


def check_expression(text: str, where: str) -> None:
    """Raise ValueError where the expression is more than arithmetic with sizes."""
    for node in ast.walk(_parsed(text, where)):
        if not _of_sizes(node):
            raise _refused("expression", text, where)


def _of_sizes(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _EXPRESSIONS
        case ast.Name():
            return node.id in _EXPRESSIONS or _SYMBOL.fullmatch(node.id) is not None
    return _of_both(node)


def check_guard(text: str, where: str) -> None:
    """Raise ValueError where the guard is more than a comparison of the inputs' sizes with each other and with
    numbers."""
    for node in ast.walk(_parsed(text, where)):
        if not _of_guards(node):
            raise _refused("guard", text, where)


def _of_guards(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Subscript())) | ast.Subscript():
            return True
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _GUARDS
        case ast.Attribute():
            return node.attr in _METHODS
        case ast.Name():
            return node.id == "L" or node.id in _GUARDS
    return _of_both(node)


def _of_both(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return _WORD.fullmatch(node.value) is not None if isinstance(node.value, str) else _is_number(node.value)
    return isinstance(node, _NODES)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def check_target(text: str, where: str) -> None:
    """Raise ValueError where the text does not name an operator that computes with tensors and sizes alone."""
    found = _TARGET.fullmatch(text)
    if found is None or found["name"] in _FILES:
        raise ValueError(f"{where}: {text[:80]!r} is not an operator of a network that apportion serves")


def check_tree(text: str, where: str) -> None:
    """Raise ValueError where the inputs or outputs are more than tuples, lists and dicts."""
    protocol_and_tree = json.loads(text) if text else [1, None]
    if not isinstance(protocol_and_tree, list) or len(protocol_and_tree) != 2:
        raise ValueError(f"{where}: {text[:80]!r} describes no inputs or outputs")
    _check_node(protocol_and_tree[1], where)


def _check_node(node: Any, where: str) -> None:
    if node is None:
        return
    if not isinstance(node, dict) or node.get("type") not in _TREES:
        kind = node.get("type") if isinstance(node, dict) else node
        raise ValueError(f"{where}: inputs and outputs are {str(kind)[:80]!r}: they may be tuples, lists and dicts")
    context = node.get("context")
    for key in _keys(context):
        if not isinstance(key, int) and not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise ValueError(
                f"{where}: {str(key)[:80]!r} names an input or output: it may have letters, digits and '_'"
            )
    for child in node.get("children_spec") or ():
        _check_node(child, where)


def _keys(context: Any) -> list[Any]:
    """Return the keys of a dict in a tree. They come as JSON within JSON, which torch reads."""
    found = json.loads(context) if isinstance(context, str) else context
    return found if isinstance(found, list) else [] if found is None else [found]


def _parsed(text: str, where: str) -> ast.AST:
    try:
        if len(text) > _LONGEST or "\n" in text or "\r" in text:
            raise SyntaxError("it is too long")
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused("expression", text, where) from error


def _refused(what: str, text: str, where: str) -> ValueError:
    return ValueError(f"{where}: the {what} {text[:80]!r} is more than arithmetic with sizes, and could run code")
