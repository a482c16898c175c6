"""Finds the test files that a change can reach, by the imports of the package, the helpers and the tests.

``python reachable_tests.py`` prints those that the current change can reach: what differs from the commit at which the
branch left ``origin/main``, or from the last commit but one, and what is not committed.

The graph is read, and nothing is imported. It holds the imports of a file, wherever in it they stand; the modules that
a text in it names, as "apportion.strategies" names a folder of which each module is found; the public names that are
used as ``apportion.train``; and the conftest.py files of a test. A changed file that is not Python reaches the tests
that name it. The tests of tests/repository read all files, and are always among them.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERYTHING = {"pyproject.toml", "constraints.txt", "scripts/setup"}
"""Files that reach every test."""


class Graph:
    """The files of a checkout, and what each of them imports. All paths are relative to the root."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        package = root / "src" / "apportion"
        self.modules = {_name(path, root / "src"): _relative(path, root) for path in package.rglob("*.py")}
        self._helpers = {path.stem: _relative(path, root) for path in (root / "tests" / "helpers").glob("*.py")}
        self.tests = sorted(_relative(path, root) for path in (root / "tests").rglob("test_*.py"))
        self._public = _public_names(package / "__init__.py", self.modules)
        self._imports: dict[str, set[str]] = {}

    def reach(self, changed: Iterable[str]) -> list[str]:
        """Returns the test files that can reach one of the changed files, in order."""
        changed = set(changed)
        if changed & EVERYTHING:
            return self.tests
        named = {path for path in changed if not path.endswith(".py")}
        found = []
        for test in self.tests:
            files = self.closure(test)
            own = any(Path(path).name in self._text(test) for path in named)
            if files & changed or own or test.startswith("tests/repository/"):
                found.append(test)
        return found

    def closure(self, file: str) -> set[str]:
        """Returns the file and all that it imports, directly or by way of others."""
        found, waiting = {file}, [file]
        while waiting:
            new = self.imports(waiting.pop()) - found
            found |= new
            waiting += new
        return found

    def imports(self, file: str) -> set[str]:
        """Returns the files that a file imports."""
        if file not in self._imports:
            self._imports[file] = set(self._read(file)) - {file}
        return self._imports[file]

    def _read(self, file: str) -> Iterator[str]:
        tree = ast.parse(self._text(file))
        beside = {path.stem: _relative(path, self._root) for path in (self._root / file).parent.glob("*.py")}
        local = {} if file.startswith("src/") else {**self._helpers, **beside}
        first = file == "src/apportion/__init__.py"
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._module(alias.name, local)
            elif isinstance(node, ast.ImportFrom) and not first:
                for alias in node.names:
                    yield from self._module(f"{node.module}.{alias.name}", local)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "apportion":
                if node.attr in self._public:
                    yield self._public[node.attr]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._text_names(node.value)
        if file.startswith("tests/"):
            yield from self._conftests(file)

    def _module(self, name: str, local: Mapping[str, str]) -> Iterator[str]:
        """Yields the file of a module, or of the module that a name stands in, and the packages above it."""
        parts = name.split(".")
        if parts[0] != "apportion":
            if parts[0] in local:
                yield local[parts[0]]
            return
        if len(parts) == 2 and parts[1] in self._public:
            yield self._public[parts[1]]
        for length in range(1, len(parts) + 1):
            if (module := ".".join(parts[:length])) in self.modules:
                yield self.modules[module]

    def _text_names(self, text: str) -> Iterator[str]:
        if text == "apportion":
            yield self.modules.get("apportion.__main__", self.modules["apportion"])
        elif text.startswith("apportion.") and text in self.modules:
            yield from (path for name, path in self.modules.items() if name == text or name.startswith(f"{text}."))
        elif "import apportion" in text or "from apportion" in text or "-m apportion" in text:
            yield from self._public.values()  # a program that a test writes
            yield self.modules.get("apportion.__main__", self.modules["apportion"])

    def _conftests(self, file: str) -> Iterator[str]:
        for folder in Path(file).parents:
            path = (folder / "conftest.py").as_posix()
            if (self._root / path).is_file():
                yield path
            if path == "tests/product/conftest.py":
                return  # it is a run of its own

    def _text(self, file: str) -> str:
        return (self._root / file).read_text(encoding="utf-8")


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _name(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _public_names(init: Path, modules: Mapping[str, str]) -> dict[str, str]:
    """Returns the file of each public name of the package, of which the package imports none before it is used."""
    found = {}
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                module = modules.get(f"{node.module}.{alias.name}", modules[node.module])
                found[alias.asname or alias.name] = module
    return found


def changed_files() -> set[str]:
    """Returns the files of this change, those among them that are not committed."""
    base = _git("merge-base", "HEAD", "origin/main") or ["HEAD~1"]
    if base == _git("rev-parse", "HEAD"):
        base = ["HEAD~1"]
    untracked = _git("ls-files", "--others", "--exclude-standard")
    return {*_git("diff", "--name-only", "--no-renames", base[0]), *untracked}


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")[:-1]


if __name__ == "__main__":
    print("\n".join(Graph().reach(changed_files())))
