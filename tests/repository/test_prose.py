"""A docstring stands by itself where an editor shows it, away from the line above."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import layout_figures
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


def test_every_docstring_stands_by_itself() -> None:
    found = [
        f"{file}:{line}: {text}"
        for file in FILES
        for line, text in docstrings(ast.parse(file.read_text()))
        if leans(text)
    ]
    assert not found, "\n".join(found)


def test_the_words_that_a_reader_does_not_need_become_fewer() -> None:
    """``word_counts.json`` holds how often each stands in the package. No change may raise one, and a change that
    lowers one lowers it there."""
    kept = json.loads(layout_figures.COUNTS.read_text())
    found = layout_figures.word_counts(layout_figures.package_texts())
    more = {
        word: f"{kept.get(word, 0)} before, {count} now" for word, count in found.items() if count > kept.get(word, 0)
    }
    assert not more, f"say it in the words of docs/glossary.md: {more}"
    assert found == kept, "there are fewer: scripts/figures --write keeps it so"


@pytest.mark.parametrize("text", ["Of a worker.", "So too.", "By rank, seconds.", "Its inverse."])
def test_a_fragment_is_seen(text: str) -> None:
    assert leans(text)
