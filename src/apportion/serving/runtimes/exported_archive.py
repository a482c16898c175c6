"""The archive of ``torch.export.save`` (.pt2), checked before torch reads any of it.

torch's own loader trusts the file: it unpickles weights, constants and example inputs, loads compiled libraries, hands
expressions of sizes to ``sympify``, which evaluates them as Python, and writes names and guards into source code that
it executes. So the archive is read here as what it is, a zip file with JSON in it, and what may run code is refused.
torch is then given a copy that holds the checked entries and nothing else.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

# The checks of the graph in a ``torch.export`` archive: expressions of sizes, guards, operators and trees have to be
# data. torch evaluates, executes or imports these, so whatever is not on the lists here is refused.


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


MOST_JSON_BYTES = 256 << 20
"""The largest size in bytes of one description of a graph."""
_PLAIN = re.compile(r"[\w.@+:-]*", re.ASCII)
"""The form of a name that is written into source code: a name of these characters alone cannot call anything."""
_TEXT = re.compile(r"[^\"'\\\x00-\x1f\x7f\u0085\u2028\u2029{}]{0,10000}")
"""The form of a text that an operator is called with: it stands between quotes in source code, and cannot end them."""
_FIXED_NAMES = ("archive_format", "archive_version", "byteorder", "version", ".data/version", ".data/serialization_id")
_RAW = re.compile(r"data/(weights/weight_\d+|constants/tensor_\d+)")
_CONFIG = re.compile(r"data/(weights|constants)/\w+_config\.json")
_PICKLED = re.compile(r"data/(sample_inputs|weights|constants)/\w+\.pt")
_MODEL = re.compile(r"models/\w+\.json")


def checked(path: Path, check_pickle: Callable[[IO[bytes]], None]) -> IO[bytes]:
    """Return a copy of this archive that runs no code when it is loaded; the caller closes it. ``check_pickle`` raises
    for a pickle of more than tensors. Raises ValueError where the file is not such an archive, or would run code."""
    copied = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copied, "w", zipfile.ZIP_STORED) as copy:
            names = archive.namelist()
            if len(names) != len({*names}):
                raise ValueError("it has two entries of one name")
            if len(roots := {name.partition("/")[0] for name in names}) != 1:
                raise ValueError(
                    f"its entries lie in {len(roots)} folders instead of one: torch.export.save writes one"
                )
            for name in names:
                _copy(archive, copy, name, check_pickle)
        copied.seek(0)
    except BaseException as error:
        copied.close()
        if isinstance(error, zipfile.BadZipFile | NotImplementedError | RecursionError | EOFError):
            raise ValueError(str(error) or type(error).__name__) from error
        raise
    return copied


def _copy(
    archive: zipfile.ZipFile, copy: zipfile.ZipFile, name: str, check_pickle: Callable[[IO[bytes]], None]
) -> None:
    inner = name.partition("/")[2]
    if inner.startswith("extra/"):
        return
    if _MODEL.fullmatch(inner):
        graph = _json(archive, name)
        if not isinstance(graph, dict):
            raise ValueError(f"{inner} must be a JSON object")
        _strings(graph, inner)
        copy.writestr(name, json.dumps(graph))
        return
    if _CONFIG.fullmatch(inner):
        config = _json(archive, name)
        _check_config(config, inner)
        copy.writestr(name, json.dumps(config))
        return
    if not (inner in _FIXED_NAMES or _RAW.fullmatch(inner) or _PICKLED.fullmatch(inner)):
        raise ValueError(
            f"its entry {inner[:80]!r} is a pickle, a compiled library or unknown, and could run code: save the "
            "program anew by torch.export.save"
        )
    with archive.open(name) as source, copy.open(name, "w", force_zip64=True) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if _PICKLED.fullmatch(inner):
        with archive.open(name) as source:
            try:
                check_pickle(source)
            except Exception as error:  # whatever an unpickler says
                raise ValueError(
                    f"its entry {inner} is a pickle of more than tensors, which could run code: export the program "
                    "with example inputs that are tensors in lists, tuples and dicts"
                ) from error


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > MOST_JSON_BYTES:
        raise ValueError(f"{name} has {archive.getinfo(name).file_size} bytes, of {MOST_JSON_BYTES} at most")
    return json.loads(archive.read(name))


def _check_config(config: Any, inner: str) -> None:
    """Raise ValueError where a tensor is not raw bytes in an entry of its own: the other kinds are pickles."""
    listed = config.get("config") if isinstance(config, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f"{inner} lists no tensors")
    for tensor, about in listed.items():
        path = about.get("path_name") if isinstance(about, dict) else None
        if (
            not isinstance(path, str)
            or about.get("use_pickle") is not False
            or not _RAW.fullmatch(f"{inner.rpartition('/')[0]}/{path}")
        ):
            raise ValueError(f"{inner}: {tensor[:80]!r} is a pickle, which could run code: only plain tensors are read")
        _strings(about, f"{inner}: {tensor[:80]}")
    _check_names(listed, inner)


def _strings(value: Any, where: str, key: str = "") -> None:
    """Check every text in a value by the name under which it lies. Metadata, from which comments in source code are
    made, is emptied."""
    if isinstance(value, dict):
        metadata = value.get("metadata")
        if isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()):
            value["metadata"] = {}
        _check_names(value, where)
        for name, inner in value.items():
            _strings(inner, where, name)
    elif isinstance(value, list):
        for inner in value:
            _strings(inner, where, key)
    elif isinstance(value, str):
        _CHECKS.get(key, _check_name)(value, where)


def _check_names(names: Mapping[str, Any], where: str) -> None:
    for name in names:
        _check_name(name, where)


def _check_name(text: str, where: str) -> None:
    if not _PLAIN.fullmatch(text):
        raise ValueError(
            f"{where}: the name {text[:80]!r} has more than letters, digits, '_' and '.', and could run code"
        )


def _check_text(text: str, where: str) -> None:
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{where}: the text {text[:80]!r} has quotes or the like, and could run code")


_CHECKS: dict[str, Callable[[str, str], None]] = {
    "expr_str": check_expression,
    "guards_code": check_guard,
    "target": check_target,
    "as_operator": check_target,
    "in_spec": check_tree,
    "out_spec": check_tree,
    "as_string": _check_text,
    "as_strings": _check_text,
}
