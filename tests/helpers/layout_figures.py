"""Prints the figures of the package's layout, as ``scripts/figures`` does: how large it is, and what burdens a reader.

``--write`` writes the counts of words to tests/repository/word_counts.json, below which they must not rise again.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "apportion"
COUNTS = ROOT / "tests" / "repository" / "word_counts.json"
WORDS = {
    "seat": r"\bseats?\b",
    "told": r"\btold\b",
    "nobody": r"\bnobody\b",
    "whoever": r"\bwhoever\b",
    "so many": r"\bso many\b",
    "is no": r"\bis no\b(?! (?:longer|such)\b)",
}
"""The words of which a reader needs none, each with its pattern."""
LAUNCHERS = {"Local", "Env", "HostsLauncher", "Ssh", "Slurm", "Ray"}
TWIN = 6
"""The number of methods of one name from which on two classes are twins."""


def word_counts(texts: Mapping[str, str]) -> dict[str, int]:
    """Returns how often each of the words stands in these texts, whether or not they are capitals."""
    return {word: sum(len(re.findall(p, text, re.I)) for text in texts.values()) for word, p in WORDS.items()}


def line_counts(text: str) -> dict[str, int]:
    """Returns the numbers of lines of code, of docstrings, of comments alone in their line, and of imports. A line of
    code is neither blank, comment nor docstring."""
    tree = ast.parse(text)
    docstrings = {line for node in _docstrings(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    imports = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    code, comments = set[int](), set[int]()
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    return {
        "code": len(code),
        "docstring": len(docstrings),
        "comment": len(comments - code),
        "import": len(imports & code),
    }


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields the texts that stand as statements: docstrings, and those below attributes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def launcher_branches(texts: Mapping[str, str]) -> list[str]:
    """Returns where a launcher is told from others by its class: ``isinstance`` and ``match`` outside of
    runtime/launch."""
    found = []
    for file, text in texts.items():
        if file.startswith("runtime/launch/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
                kinds: list[ast.AST] = [node.args[1]]
            elif isinstance(node, ast.MatchClass):
                kinds = [node.cls]
            else:
                continue
            names = {n.id for kind in kinds for n in ast.walk(kind) if isinstance(n, ast.Name)}
            names |= {n.attr for kind in kinds for n in ast.walk(kind) if isinstance(n, ast.Attribute)}
            if names & LAUNCHERS:
                line = getattr(node, "lineno", 0) or node.cls.lineno  # type: ignore[union-attr]
                found.append(f"{file}:{line}")
    return found


def _classes(texts: Mapping[str, str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Returns the methods of each class, those of Python's own names left out, and the names of its bases."""
    methods: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                own = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
                methods[node.name] = {name for name in own if not name.startswith("__")}
                bases[node.name] = {re.sub(r"\[.*", "", ast.unparse(b)).rpartition(".")[2] for b in node.bases}
    return methods, bases


def _above(name: str, bases: Mapping[str, set[str]]) -> set[str]:
    """Returns the bases of a class and theirs."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = bases.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def twins(texts: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Returns the pairs of classes with many methods of one name, none of which a common base or a Protocol that both
    fulfil declares, with their number."""
    methods, bases = _classes(texts)
    above = {name: _above(name, bases) for name in methods}
    protocols = {name for name in methods if bases[name] & {"Protocol", "ABC"}}
    found = []
    for one, other in itertools.combinations(sorted(methods.keys() - protocols), 2):
        common = methods[one] & methods[other]
        if len(common) < TWIN or one in above[other] or other in above[one]:
            continue
        declaring = (above[one] & above[other]) | {name for name in protocols if methods[name] <= common}
        common -= {method for name in declaring for method in methods.get(name, ())}
        if len(common) >= TWIN:
            found.append((one, other, len(common)))
    return found


def import_cycles(texts: Mapping[str, str]) -> list[set[str]]:
    """Returns the groups of modules that import each other, imports for a type alone left out."""
    names = {
        f"apportion.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): file for file in texts
    }
    graph: dict[str, set[str]] = {}
    for name, file in names.items():
        graph[name] = set()
        tree = ast.parse(texts[file])
        typed = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node not in typed:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    graph[name].add(inside if inside in names else node.module)
        graph[name] &= names.keys() - {name}
    reached = {}
    for name in graph:
        seen, waiting = set[str](), [name]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[name] = seen
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in reached if a in reached[a]}
    return [set(group) for group in groups]


def longest_function(texts: Mapping[str, str]) -> tuple[int, str]:
    """Returns the lines of the longest function, its docstring not counted, and where it stands."""
    found = []
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node, clean=False) is not None:
                    lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                found.append((lines, f"{file} {node.name}"))
    return max(found, default=(0, ""))


def package_texts() -> dict[str, str]:
    """Returns the text of each module of the package, by its path in it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def figures(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines that are printed."""
    counts = [line_counts(text) for text in texts.values()]
    code, comments, imports = (sum(count[kind] for count in counts) for kind in ("code", "comment", "import"))
    lines = sum(text.count("\n") for text in texts.values())
    yield f"modules                      {len(texts):7,}"
    yield f"lines                        {lines:7,}"
    yield f"lines of code                {code:7,}"
    yield f"comment lines                {comments:7,}"
    yield f"imports, of the code         {imports / code:7.1%}"
    for word, count in word_counts(texts).items():
        yield f"{word!r:28} {count / lines * 1000:7.2f} in a thousand lines ({count})"
    branches = launcher_branches(texts)
    yield f"branches on a launcher       {len(branches):7} {' '.join(branches)}"
    pairs = twins(texts)
    yield f"twins                        {len(pairs):7}"
    yield from (f"    {one} and {other}: {count} methods of one name" for one, other, count in pairs)
    cycles = import_cycles(texts)
    yield f"import cycles                {len(cycles):7} {' '.join(map(str, map(sorted, cycles)))}".rstrip()
    longest, where = longest_function(texts)
    yield f"lines of the longest function{longest:7} {where}"


if __name__ == "__main__":
    read = package_texts()
    print("\n".join(figures(read)))
    if "--write" in sys.argv[1:]:
        COUNTS.write_text(json.dumps(word_counts(read), indent=1) + "\n", encoding="utf-8")
