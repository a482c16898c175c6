"""One process imports a workload's packages for all those of its proof."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.api import run_proof as module
from apportion.api.run_proof import shared_imports
from apportion.comm.channel import Lines
from apportion.runtime.launch.local import Local
from apportion.runtime.spawn.imports import Imports
from apportion.runtime.spawn.template import Spare

pytestmark = pytest.mark.processes
PACKAGE = "site-packages/counted_package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that writes down each process that imports it, and sets a variable."""
    monkeypatch.setattr(module, "FEWEST", 1)
    folder = tmp_path / PACKAGE
    folder.mkdir(parents=True)
    folder.joinpath("__init__.py").write_text(
        "import os\n"
        f"open({str(tmp_path / 'imports')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "os.environ.setdefault('COUNTED', 'yes')\n"
        "if os.environ.get('THREADED'):\n"
        "    import threading, time\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    return tmp_path / "imports"


def look(sock: socket.socket, payload: bytes) -> int:
    """What a process that is forked finds."""
    found = {"there": "counted_package" in sys.modules, "variable": os.environ.get("COUNTED")}
    Lines(sock).send({**found, "rank": os.environ["RANK"]})
    return 0


def found_by(spare: Spare | None, ranks: int) -> list[dict[str, object]]:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        started = Local(device="cpu").start_from(spare, f"{Path(__file__).stem}:look", b"", ranks, 0)
    finally:
        sys.path.pop(0)
    found = []
    for process in started:
        process.channel.settimeout(30)
        found += Lines(process.channel).receive() or []
        assert process.wait(30) == 0
        process.channel.close()
    return found


def test_a_package_is_imported_once_and_what_it_sets_is_set_in_all(package: Path) -> None:
    with shared_imports(Imports(("counted_package",), {"COUNTED": "yes"}), 30) as spare:
        assert spare is not None
        found = found_by(spare, 3)
    assert [one["rank"] for one in found] == ["0", "1", "2"]
    assert all(one["there"] and one["variable"] == "yes" for one in found)
    assert len(package.read_text().splitlines()) == 1


@pytest.mark.parametrize("changed", [{"HF_HOME": "/elsewhere"}, {"PATH": None}])
def test_what_the_users_own_code_has_changed_before_the_imports_leaves_each_process_to_import(
    changed: dict[str, str | None], package: Path
) -> None:
    with shared_imports(Imports(("counted_package",), {"COUNTED": "yes", **changed}), 30) as spare:
        assert spare is None
        assert found_by(spare, 1) == [{"there": False, "variable": None, "rank": "0"}]


def test_a_package_that_starts_threads_leaves_each_process_to_import(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THREADED", "1")
    with shared_imports(Imports(("counted_package",), {"COUNTED": "yes"}), 30) as spare:
        assert spare is None


def test_a_spare_that_is_lost_leaves_each_process_to_import(package: Path) -> None:
    with shared_imports(Imports(("counted_package",), {"COUNTED": "yes"}), 30) as spare:
        assert spare is not None
        os.kill(spare.pid, 9)
        assert [one["there"] for one in found_by(spare, 2)] == [False, False]


def test_few_modules_start_no_process() -> None:
    with shared_imports(Imports((*["json"] * (module.FEWEST - 1),), {}), 30) as spare:
        assert spare is None


def test_the_modules_are_those_that_are_installed_and_were_not_inherited(tmp_path: Path) -> None:
    for name in ("early", "late"):
        file = tmp_path / "site-packages" / f"{name}_package.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"import os; os.environ.setdefault('{name.upper()}', '1')")
    (tmp_path / "own.py").write_text("import late_package")
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, os, sys; sys.path[:0] = sys.argv[1:3]\n"
            "import early_package\n"
            "from apportion.runtime.spawn.imports import imported, note_beginning\n"
            "import own\n"
            "assert not imported().modules\n"
            "del sys.modules['own'], sys.modules['late_package']\n"
            "os.environ.pop('LATE')\n"
            "note_beginning()\n"
            "import own; del os.environ['GONE']\n"
            "found = imported()\n"
            "print(json.dumps([found.modules, found.environment]))",
            str(tmp_path / "site-packages"),
            str(tmp_path),
        ],
        capture_output=True,
        env={**os.environ, "GONE": "1"},
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(told.stdout) == [["late_package"], {"LATE": "1", "GONE": None}]
