"""What the tests of the product share. They use what a user has, ``import apportion`` and the command line, and nothing
of it is replaced: workers start cold, runs are proved, reports are drawn.

``scripts/test`` runs them by themselves, with ``--confcutdir=tests/product``, because ``tests/conftest.py`` replaces
parts of the product in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import durations
import numpy as np
import pytest
import torch

Command = Callable[..., subprocess.CompletedProcess[str]]
TEMPLATE_SECONDS = 20.0
"""The seconds in which the processes of a command end after it."""


def data_folder() -> Path:
    """The folder of the real data sets, whether or not it exists."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("APPORTION_DATA") or cache / "apportion" / "data")


DATA = data_folder()


def pytest_configure(config: pytest.Config) -> None:
    replacing = Path(__file__).parents[1] / "conftest.py"
    if any(getattr(plugin, "__file__", None) == str(replacing) for plugin in config.pluginmanager.get_plugins()):
        raise pytest.UsageError(
            "tests/conftest.py replaces parts of the product in this process: run scripts/test tests/product, or "
            "pytest --confcutdir=tests/product tests/product"
        )
    durations.register(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``@pytest.mark.data("cifar-10-batches-py")`` needs that real data set."""
    for item in items:
        for marker in item.iter_markers("data"):
            missing = [path for path in (DATA, *(DATA / name for name in marker.args)) if not path.exists()]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"real data is not at {missing[0]}"))


@pytest.fixture(scope="session", autouse=True)
def caches_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Proofs and measurements of other runs are not reused, and temporary files go into a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APPORTION_DATA", str(DATA))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))  # short: a Unix socket's path has 107 characters
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The processes of a test share few cores, and sums are made in one order."""
    torch.set_num_threads(1)


@pytest.fixture
def no_cached_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of caches for this test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def apportion_command(tmp_path: Path) -> Command:
    """``apportion_command("train", "mine.py:workload", cwd=...)`` runs the command line to its end, and returns its
    status and what it printed. ``within``: the seconds that it may take."""

    def run(
        *arguments: str, cwd: Path | None = None, env: Mapping[str, str | None] | None = None, within: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **{k: v for k, v in (env or {}).items() if v is not None}}
        for name in (k for k, v in (env or {}).items() if v is None):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, "-m", "apportion", *arguments],
            cwd=cwd or tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
        )

    return run


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    """``trained(workload, "data_parallel", 2)`` trains, and returns the weights and buffers at the end."""
    import apportion

    runs = iter(range(1000))

    def train(workload: Any, strategy: str = "single_device", workers: int = 1, **options: Any) -> dict[str, Any]:
        run_dir = tmp_path / f"run{next(runs)}"
        apportion.train(workload, strategy, launcher=apportion.local(workers=workers), run_dir=run_dir, **options)
        return apportion.load(run_dir, model=workload.model).state_dict()

    return train


@pytest.fixture
def furthest() -> Callable[[Mapping[str, Any], Mapping[str, Any]], float]:
    """The largest absolute difference of any two elements of the same name."""

    def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
        assert one.keys() == other.keys()
        return max((one[name].double() - other[name].double()).abs().max().item() for name in one)

    return difference


class Served:
    """A server that runs. ``url``: its address. ``events``: what its log says, as far as it has been read."""

    def __init__(self, process: subprocess.Popen[str], within: float) -> None:
        self.events: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._addressed = threading.Event()
        self.url = ""
        self._reader.start()
        assert self._addressed.wait(within), f"it did not serve within {within} s: {self.events}"
        assert self.url, self.events

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.events.append(json.loads(line)["event"] if line.startswith("{") else line.rstrip())
            if (found := re.match(r"serving on (http://\S+)", self.events[-1])) is not None:
                self.url = found[1]
                self._addressed.set()
        self._addressed.set()

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, the JSON that is answered) of a GET, or of a POST where there is a body."""
        request = urllib.request.Request(f"{self.url}{path}", None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def infer(self, model: str, inputs: Mapping[str, tuple[str, Any]], **parameters: Any) -> tuple[int, Any]:
        """(status, outputs by name or the error) for inputs by name, (datatype, values as nested lists)."""
        listed = [
            {
                "name": name,
                "datatype": datatype,
                "shape": np.shape(x),
                "data": np.asarray(x, object).reshape(-1).tolist(),
            }
            for name, (datatype, x) in inputs.items()
        ]
        status, told = self.ask(f"/v2/models/{model}/infer", {"inputs": listed, "parameters": parameters})
        if status != 200:
            return status, told["error"]
        return status, {x["name"]: np.array(x["data"]).reshape(x["shape"]) for x in told["outputs"]}


@pytest.fixture
def serve_command(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """``serve_command("net.onnx", "--quorum", "1")`` is a server on a port of its own, which ends with the test."""
    with contextlib.ExitStack() as ends:

        def serve(*arguments: str, within: float = 60.0) -> Served:
            command = [sys.executable, "-m", "apportion", "serve", *arguments, "--port", "0"]
            process = ends.enter_context(
                subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
            ends.callback(process.kill)
            ends.callback(process.wait, 20)
            ends.callback(process.terminate)
            return Served(process, within)

        yield serve
