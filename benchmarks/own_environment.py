"""A peer's own environment, of what its peers/NAME.txt asks for."""

import os
import subprocess
import sys
from pathlib import Path

from parked import SideFailed

HERE = Path(__file__).resolve().parent


def environment_of(name):
    """The interpreter of a peer's own environment, made where it is not there or was made of something else."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder, asked = cache / "apportion" / "peers" / name, HERE / "peers" / f"{name}.txt"
    python, made = folder / "bin" / "python", folder / "made.txt"
    if not made.exists() or made.read_text() != asked.read_text():
        print(f"making the environment of {name} in {folder}", file=sys.stderr, flush=True)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "-r", str(asked)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SideFailed(f"no environment for {name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        made.write_text(asked.read_text())
    return str(python)
