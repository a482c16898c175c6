"""A docstring stands by itself where an editor shows it, away from the line above."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import apportion

PACKAGE = Path(apportion.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LEANING = {"Of", "By", "So", "That", "Who", "As", "In", "From", "To", "At"}
"""First words that lean on what stands before: a docstring begins with a verb, an article or a noun."""
LEAST_WORDS = 3


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of every docstring, those below attributes and constants among them."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body:
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from texts(body[:1])
        for before, after in itertools.pairwise(body):
            if isinstance(before, ast.Assign | ast.AnnAssign):
                yield from texts([after])


def texts(statements: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for found in statements:
        value = found.value if isinstance(found, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield found.lineno, value.value


def leans(text: str) -> bool:
    words = re.findall(r"[\w'`.]+", text)
    return len(words) < LEAST_WORDS or words[0].strip("`") in LEANING


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_every_docstring_stands_by_itself(file: Path) -> None:
    found = [f"{file}:{line}: {text}" for line, text in docstrings(ast.parse(file.read_text())) if leans(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["Of a worker.", "So too.", "By rank, seconds.", "Its inverse."])
def test_a_fragment_is_seen(text: str) -> None:
    assert leans(text)
