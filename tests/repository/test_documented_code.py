"""The code in the pages runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "training.md").read_text(), re.MULTILINE | re.DOTALL)


def test_every_block_of_python_runs_by_itself(tmp_path: Path) -> None:
    assert len(BLOCKS) >= 4
    for number, block in enumerate(BLOCKS):
        (tmp_path / f"block{number}.py").write_text(block)
    code = f"import runpy; [runpy.run_path(f'block{{n}}.py') for n in range({len(BLOCKS)})]"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_complete_workload_trains(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    (tmp_path / "pyproject.toml").touch()
    code = (
        "import apportion\n"
        "if __name__ == '__main__':\n"
        "    print(apportion.train('mine.py:make(lr=0.05)', 'single_device', steps=300).metrics['accuracy'])"
    )
    (tmp_path / "use.py").write_text(code)
    ran = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) > 0.5
