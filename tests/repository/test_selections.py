"""Which tests a shard of the night has, and which a change can reach; and the figures of the layout."""

from __future__ import annotations

from pathlib import Path

import layout_figures
import pytest
import reachable_tests
import shards


def test_each_test_is_in_one_shard_and_each_file_is_spread_over_all() -> None:
    names = [f"tests/{file}.py::test_it[{case}]" for file in ("a", "b", "c") for case in range(21)]
    parts = [shards.in_shard(names, shard, 8) for shard in range(1, 9)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    for file in ("a", "b", "c"):
        counts = [sum(name.startswith(f"tests/{file}.py") for name in part) for part in parts]
        assert set(counts) == {2, 3}
    assert shards.in_shard(reversed(names), 3, 8) == parts[2]


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "a/b", "3/0"])
def test_an_invalid_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a shard"):
        shards.shard_of(text)


def test_a_change_reaches_the_tests_that_import_it_by_way_of_others(tmp_path: Path) -> None:
    files = {
        "src/apportion/__init__.py": "if TYPE_CHECKING:\n    from apportion.api.train import train as train\n",
        "src/apportion/__main__.py": "from apportion.api.train import train\n",
        "src/apportion/api/__init__.py": "",
        "src/apportion/api/train.py": "def train():\n    from apportion.core import rows\n",
        "src/apportion/core/__init__.py": "",
        "src/apportion/core/rows.py": "",
        "src/apportion/other.py": "",
        "tests/conftest.py": "",
        "tests/helpers/nets.py": "import apportion.other\n",
        "tests/test_train.py": "import apportion\n\napportion.train()\n",
        "tests/test_command.py": "command = ['-m', 'apportion']\n",
        "tests/test_nets.py": "from nets import net\n",
        "tests/test_page.py": "page = 'page.html'\n",
        "tests/repository/test_files.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = reachable_tests.Graph(tmp_path)

    def reached(*changed: str) -> set[str]:
        return {Path(test).stem.removeprefix("test_") for test in graph.reach(changed)} - {"files"}

    assert reached("src/apportion/core/rows.py") == {"train", "command"}
    assert reached("src/apportion/other.py") == {"nets"}
    assert reached("tests/helpers/nets.py") == {"nets"}
    assert reached("src/apportion/page.html") == {"page"}
    assert reached("docs/none.md") == set()
    assert reached("tests/conftest.py") == reached("pyproject.toml") == {"train", "command", "nets", "page"}


def test_lines_words_branches_and_twins_are_counted() -> None:
    text = '"""A text."""\n\nimport os  # why\n\n# alone\nseat = "is no net, is no longer"\n'
    assert layout_figures.line_counts(text) == {"code": 2, "docstring": 1, "comment": 1, "import": 1}
    counts = layout_figures.word_counts({"a.py": text + "# Told twice: told\n"})
    assert counts == {"seat": 1, "told": 2, "nobody": 0, "whoever": 0, "so many": 0, "is no": 1}
    branch = "isinstance(x, Local | Env)\nisinstance(x, str)\n"
    assert layout_figures.launcher_branches({"api/a.py": branch, "runtime/launch/b.py": branch}) == ["api/a.py:1"]
    body = "".join(f"    def {name}(self): ...\n" for name in "abcdef")
    assert layout_figures.twins({"a.py": f"class A:\n{body}class B:\n{body}class C(A):\n{body}"}) == [
        ("A", "B", 6),
        ("B", "C", 6),
    ]
