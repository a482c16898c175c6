"""A peer's own environment, of what its peers/NAME.txt asks for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from parked import SideFailed

BENCHMARKS = Path(__file__).resolve().parents[1]


def environment_of(name):
    """The interpreter of a peer's own environment, made where it is not there or was made of something else."""

    def commands(folder, asked):
        yield [sys.executable, "-m", "venv", "--clear", str(folder)]
        yield [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(asked)]

    return str(_made(name, commands) / "bin" / "python")


def in_front_of_ours(name):
    """The environment variables with which this interpreter has a peer's packages in front of its own: for peers that
    train by torch, which is then the same one on both sides. They are installed without what they depend on."""

    def commands(folder, asked):
        shutil.rmtree(folder, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        yield [*install, "-r", str(asked)]

    folders = str(_made(name, commands)), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def _made(name, commands):
    """The folder of a peer, after `commands(folder, what it asks for)` where it is not there as asked."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder, asked = cache / "apportion" / "peers" / name, BENCHMARKS / "peers" / f"{name}.txt"
    made = folder / "made.txt"
    if not made.exists() or made.read_text() != asked.read_text():
        print(f"making the environment of {name} in {folder}", file=sys.stderr, flush=True)
        for command in commands(folder, asked):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SideFailed(f"no environment for {name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        made.write_text(asked.read_text())
    return folder
