"""The leak check can fail: each kind of leak is planted, found and named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaks import HELPERS, SHARED_MEMORY, Watch

import apportion

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.processes
def test_nothing_is_found_where_nothing_is_left(watch: Watch) -> None:
    before = watch.look()
    subprocess.run([sys.executable, "-c", ""], check=True)
    with tempfile.TemporaryFile(), socket.create_server(("127.0.0.1", 0)):
        pass
    assert watch.leaks(before) == []


@pytest.mark.processes
def test_a_child_process_is_found_and_ended(watch: Watch) -> None:
    before = watch.look()
    says_so = [sys.executable, "-c", f"print(flush=True); {SLEEP[-1]}"]
    with subprocess.Popen(says_so, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n", "before it runs, it has no command line"
        (leak,) = watch.leaks(before, grace=0)
        assert leak.startswith(f"process: {child.pid}, child of {os.getpid()}")
        assert "time.sleep(60)" in leak
        assert child.wait(5) == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of other processes in /proc")
def test_an_orphan_is_found(watch: Watch) -> None:
    before = watch.look()
    start = f"import subprocess; print(subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=-3).pid)"
    pid = int(subprocess.run([sys.executable, "-W", "ignore", "-c", start], stdout=subprocess.PIPE, check=True).stdout)
    assert os.getpid() not in [p.pid for p in psutil.Process(pid).parents()]
    (leak,) = watch.leaks(before, grace=0.1)
    assert leak.startswith(f"process: {pid}, ")


@pytest.mark.processes
def test_what_a_program_starts_that_was_there_before_is_its_own(watch: Watch) -> None:
    code = "import subprocess, sys; sys.stdin.readline(); print(subprocess.Popen(sys.argv[1:]).pid, flush=True)"
    code += "; sys.stdin.readline()"
    command = [sys.executable, "-c", code, *SLEEP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        before = watch.look()
        server.stdin.write("now\n")
        server.stdin.flush()
        started = int(server.stdout.readline())
        assert watch.leaks(before, grace=0) == []
        server.stdin.write("end\n")
    (leak,) = watch.leaks(before, grace=0.1)
    assert leak.startswith(f"process: {started}, "), "its program has ended, and it has not"


@pytest.mark.processes
def test_a_process_that_is_ending_is_waited_for(watch: Watch) -> None:
    before = watch.look()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"]):
        assert watch.leaks(before, grace=10) == []


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_template_may_stay_and_what_it_forked_may_not(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    before = watch.look()
    code = "import os, sys, time; pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, HELPERS[0]], stdout=subprocess.PIPE, text=True) as template:
        assert template.stdout is not None
        worker = int(template.stdout.readline())
        (leak,) = watch.leaks(before, grace=0.1)
        assert leak.startswith(f"process: {worker}, child of {template.pid}")
        assert template.poll() is None
        # A second one is no longer the one that is kept.
        with subprocess.Popen([*SLEEP, HELPERS[0]]) as second:
            (leak,) = watch.leaks(before, grace=0)
            assert leak.startswith(f"process: {second.pid}, ")
        template.kill()


def test_a_listening_port_is_found(watch: Watch) -> None:
    before = watch.look()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (leak,) = watch.leaks(before, grace=0)
        assert leak == f"port: process {os.getpid()} listens on 127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm")
def test_named_shared_memory_is_found(watch: Watch) -> None:
    before = watch.look()
    path = SHARED_MEMORY / f"apportion-{uuid.uuid4().hex}"
    path.write_bytes(b"x")
    try:
        assert watch.leaks(before, grace=0) == [f"shared memory: {path}"]
    finally:
        path.unlink()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd")
def test_shared_memory_without_a_name_is_found(watch: Watch) -> None:
    before = watch.look()
    fd = os.memfd_create("apportion-weights")
    try:
        (leak,) = watch.leaks(before, grace=0)
        assert "memfd:apportion-weights" in leak
    finally:
        os.close(fd)


def test_a_temporary_file_is_found(watch: Watch) -> None:
    before = watch.look()
    folder = tempfile.mkdtemp()
    assert watch.leaks(before, grace=0) == [f"temporary file: {folder}"]
    os.rmdir(folder)


@pytest.mark.processes
@pytest.mark.thorough
def test_the_fixture_fails_the_test_that_leaks(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys, tempfile, pytest\n"
        "def test_leaks():\n"
        "    tempfile.mkstemp(prefix='forgotten')\n"
        "@pytest.mark.leaves('temporary file')\n"
        "def test_may():\n"
        "    tempfile.mkstemp()\n"
        "@pytest.mark.data('no such set')\n"
        "def test_needs_data():\n"
        "    assert False\n"
    )
    tests = Path(__file__).parents[1]
    paths = [str(path) for path in (tests, tests / "helpers", Path(apportion.__file__).parents[1])]
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "-o", "markers=data", "-rs"]
    folders = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path}/t", f"{tmp_path}/test_it.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *folders],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "2 passed, 1 skipped, 1 error" in run.stdout, run.stdout + run.stderr
    assert "left behind:\n  temporary file: " in run.stdout
    assert "forgotten" in run.stdout
    assert "real data is not at" in run.stdout


@given(st.integers())
def test_property_tests_live_with_it(number: int) -> None:
    assert number == number
