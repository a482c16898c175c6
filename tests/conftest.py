"""What all tests share: real data or a reason, one thread, deadlines, and nothing left behind."""

from __future__ import annotations

import gc
import getpass
import inspect
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from zlib import crc32

import durations
import hypothesis
import processes
import pytest
import quick_pickles
import recorded_references
import slurm_cluster
import ssh_hosts
import torch
import warm_python
import warm_ranks
from browsers import BROWSER, Browser
from leaks import Watch
from slurm_cluster import SlurmCluster
from ssh_hosts import SshHosts

from apportion.reporting import recording
from apportion.runtime.launched import ranks as proof_ranks
from apportion.runtime.spawn.template import Template
from apportion.runtime.supervisor.worker_pool import WorkerPool

# How long one example takes says nothing on a machine that does something else too.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

STARTED = pytest.StashKey[int]()
DRAW = recording._report
Within = Callable[[float, str], AbstractContextManager[None]]
Eventually = Callable[..., None]


def data_folder() -> Path:
    """Where the real data sets are, if they are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("APPORTION_DATA") or cache / "apportion" / "data")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves(what): how the line begins that the leak check may report")
    durations.register(config)


@pytest.hookimpl(tryfirst=True)  # before those are left out that have some mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_further_cases(items)
    skip_without_data(items)


def mark_further_cases(items: list[pytest.Item]) -> None:
    """Of a test with ``@pytest.mark.cases(n)`` all cases but n, which are spread over all of them, are ``thorough``; of
    another one that starts processes all but one. That one is chosen by the test's name, so that the tests together
    have strategies, numbers of workers and the like from everywhere in their lists."""
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "serial", "thorough"))):
            cases.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for (_, name), found in cases.items():
        marker = found[0].get_closest_marker("cases")
        if marker is not None:
            wanted = min(len(found), marker.args[0])
            kept = {round(at * (len(found) - 1) / max(1, wanted - 1)) for at in range(wanted)}
        elif found[0].get_closest_marker("processes"):
            kept = {crc32(name.encode()) % len(found)}
        else:
            continue
        for at, item in enumerate(found):
            if at not in kept:
                item.add_marker(pytest.mark.thorough)


def skip_without_data(items: list[pytest.Item]) -> None:
    """``@pytest.mark.data`` needs the folder, ``@pytest.mark.data("cifar-10-batches-py")`` that set in it."""
    folder = data_folder()
    for item in items:
        for marker in item.iter_markers("data"):
            missing = [path for path in (folder, *(folder / name for name in marker.args)) if not path.exists()]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"real data is not at {missing[0]}"))


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Fails a test that starts a process and is not marked so: ``scripts/test fast`` would run it too."""
    item.stash[STARTED] = processes.started()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    unmarked = not (item.get_closest_marker("processes") or item.get_closest_marker("slow"))
    if processes.started() > item.stash[STARTED] and unmarked:
        pytest.fail("starts a process: mark it with pytest.mark.processes", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Several processes of a test share few cores; and sums come out in one order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_proof_before_a_run() -> Iterator[None]:
    """What a run computes is proved by the tests of its strategy: a run in a test does not prove itself as well, unless
    the test says ``check=True``."""
    from apportion.api.train import run

    defaults = inspect.unwrap(run).__kwdefaults__
    assert defaults["check"] is True
    defaults["check"] = False
    yield
    defaults["check"] = True


@pytest.fixture(scope="session", autouse=True)
def no_report_after_a_run() -> Iterator[None]:
    """Drawing the report of a run takes longer than most runs of the tests: it is left out of the runs of this process,
    unless the test wants ``reports``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_report", lambda run_dir: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def functions_pickled_quickly() -> Iterator[None]:
    """What a test gives to its workers is pickled without a look at every module there is."""
    with pytest.MonkeyPatch.context() as patch:
        quick_pickles.install(patch)
        yield


@contextmanager
def drawing() -> Iterator[None]:
    """Runs end with their report, as they do at a user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_report", DRAW)
        yield


@pytest.fixture
def reports() -> Iterator[None]:
    """The runs of this test end with their report."""
    with drawing():
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_template() -> Iterator[None]:
    """Workers of this process are forked from a template that has every strategy imported; those of the programs that a
    test starts are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Template, "program", (str(Path(__file__).with_name("helpers") / "warm_template.py"),))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_programs(watch: Watch) -> Iterator[None]:
    """What a test starts as its user would begins in a fork of a Python that has torch imported, unless the test wants
    ``cold_programs``."""
    with warm_python.installed():
        yield


@pytest.fixture
def cold_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of this test start as they do at a user's: each is a new Python."""
    monkeypatch.setattr(subprocess, "Popen", warm_python._popen)


@pytest.fixture(scope="module")
def cold_servers() -> Iterator[None]:
    """The programs of this file's own fixtures and tests start as they do at a user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", warm_python._popen)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_ranks_for_proofs(watch: Watch, counted_processes: None) -> Iterator[None]:
    """The processes of a proof stay for the next one, and what a reference has computed is remembered, unless the test
    wants ``cold_ranks``."""
    with pytest.MonkeyPatch.context() as patch, warm_ranks.keeping():
        patch.setattr(proof_ranks, "WorkerPool", recorded_references.pool)
        yield


@pytest.fixture
def cold_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs of this test start processes of their own."""
    monkeypatch.setattr(proof_ranks, "WorkerPool", WorkerPool)


@pytest.fixture(scope="session", autouse=True)
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """The watch over all the tests, which gives them (and their processes) a temporary folder of their own."""
    usual = tempfile.gettempdir()
    own = tmp_path_factory.mktemp("t")  # short: a Unix socket's path has 107 characters at most
    with pytest.MonkeyPatch.context() as patch:
        # What torch.compile has compiled stays for the next session.
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more would be processes that stay
        patch.setenv("TMPDIR", str(own))
        patch.setattr(tempfile, "tempdir", None)
        yield Watch(own)


@pytest.fixture(scope="session", autouse=True)
def counted_processes() -> Iterator[None]:
    """Each process that a test starts is counted."""
    with pytest.MonkeyPatch.context() as patch:
        processes.watch(patch)
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(watch: Watch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a listening port, shared memory or a temporary file."""
    before = watch.look()
    yield
    allowed = tuple(what for marker in request.node.iter_markers("leaves") for what in marker.args)
    found = [leak for leak in watch.leaks(before) if not (allowed and leak.startswith(allowed))]
    if found:
        pytest.fail("left behind:\n" + "\n".join(f"  {leak}" for leak in found), pytrace=False)


@pytest.fixture
def within() -> Within:
    """``with within(5, "the driver's exit"): ...`` fails where that took more seconds."""

    @contextmanager
    def deadline(seconds: float, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        assert took <= seconds, f"{what} took {took:.2f} s, more than {seconds:g} s"

    return deadline


@pytest.fixture
def eventually() -> Eventually:
    """``eventually(lambda: not psutil.pid_exists(pid), within=5, what="the worker is gone")`` waits for it."""

    def wait(condition: Callable[[], object], *, within: float, what: str) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """As many hosts that ssh reaches as the module says (``HOSTS``); its tests are skipped where there can be none."""
    if (why := ssh_hosts.cannot()) is not None:
        pytest.skip(why)
    with ssh_hosts.ssh_hosts(tmp_path_factory.mktemp("hosts"), request.module.HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes of Slurm's; tests are skipped where there can be none."""
    if (why := slurm_cluster.cannot()) is not None:
        pytest.skip(why)
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def nothing_is_left_on_a_host(hosts: SshHosts, eventually: Eventually) -> Iterator[None]:
    """No process and no file of a run stays on any host, whatever has happened to it."""
    yield
    eventually(lambda: hosts.left() == [], within=15, what=f"nothing is left on the hosts, not {hosts.left()}")


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    if BROWSER is None:
        pytest.skip("chromium is not on PATH: apt-get install chromium")
    folder = tmp_path / "browser"
    folder.mkdir()
    return Browser(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("a disk of 1 MiB can be mounted by root on Linux only")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, timeout=10
    )
    if mounted.returncode != 0:
        pytest.skip(f"a disk of 1 MiB could not be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=10)
