"""What a program costs, as XLA says once it has compiled it: for the CPU here, for a TPU in a process of its own.

libtpu compiles for a TPU without one: it takes a topology, such as ``v5e:2x2``, and compiles for one chip of it.
It may end its process where it does not like the machine, hence the other process, which this module is the program
of::

    python -m apportion.exporting.tpu.cost FILE.stablehlo v5e:2x2 64
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from apportion.exporting.tpu.archive import Archive
from apportion.exporting.tpu.jax_packages import UPTIME_REPORTS, chip_of, jax_package

SECONDS = 1800.0
"""How long libtpu may take for all programs of a file: the training step of ResNet-20 takes minutes."""

_UNKNOWN = "unknown"
"""The key of what libtpu says of a topology that it does not know."""


@dataclass(frozen=True, kw_only=True)
class ProgramCost:
    """What one run of a program takes, by the analyses of the compiler."""

    flops: float
    """Floating point operations; a multiplication and an addition are two."""
    bytes_moved: float
    """Bytes that are read and written by its operations, caches aside."""
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    code_bytes: int
    predicted_s: float | None
    """The compiler's own guess of the time; None: it makes none."""
    compile_s: float


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program that is compiled for a number of examples, and what it costs."""

    call: Callable[..., Any]
    cost: ProgramCost


def on_cpu(archive: Archive, batch: int) -> dict[str, CompiledProgram]:
    """Compile each program for this machine's CPU, for this number of examples."""
    return {name: _compiled(exported, batch, None) for name, exported in archive.programs.items()}


def ask_for_libtpu() -> None:
    """Raise ModuleNotFoundError where libtpu is not installed."""
    try:
        version("libtpu")
    except PackageNotFoundError:
        raise ModuleNotFoundError("No module named 'libtpu'", name="libtpu") from None


def on_tpu(path: Path, topology: str, batch: int) -> tuple[dict[str, ProgramCost], str]:
    """Compile each program of a file for one chip of a topology. Returns (the costs of those that were compiled, why
    others were not). Raises ValueError where libtpu knows no such topology."""
    command = [sys.executable, "-m", __name__, str(path.absolute()), topology, str(batch)]
    environment = {
        **os.environ,
        **{"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu", UPTIME_REPORTS: "0"},
        **{"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_LOG_DIR": "disabled"},
        **{"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3"},
    }
    with tempfile.TemporaryDirectory() as folder:  # libtpu leaves what it likes in its working directory
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS, check=False
            )
            said, why = ended.stdout, "" if ended.returncode == 0 else _last_line(ended.stderr)
        except subprocess.TimeoutExpired as late:
            said, why = late.stdout or b"", f"libtpu took longer than {SECONDS:g} s"
    found: dict[str, ProgramCost] = {}
    for line in said.decode(errors="replace").splitlines():
        if line.startswith("{"):
            given = json.loads(line)
            if _UNKNOWN in given:
                raise ValueError(
                    f"topology={topology!r} is none that libtpu compiles for ({given[_UNKNOWN]}): give one that it "
                    f"knows, such as 'v5e:2x2' or 'v4:2x2x1'"
                )
            name = given.pop("program")
            found[name] = ProgramCost(**given)
    return found, why


def _compiled(exported: Any, batch: int, device: Any) -> CompiledProgram:
    jax = jax_package()
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    shapes = [
        jax.ShapeDtypeStruct([n if isinstance(n, int) else batch for n in each.shape], each.dtype, sharding=sharding)
        for each in exported.in_avals
    ]
    args, kwargs = jax.tree.unflatten(exported.in_tree, shapes)
    began = time.monotonic()
    made = jax.jit(exported.call).lower(*args, **kwargs).compile()
    took = time.monotonic() - began
    costs: Mapping[str, float] = made.cost_analysis() or {}
    memory = made.memory_analysis()
    found = ProgramCost(
        flops=costs.get("flops", 0.0),
        bytes_moved=costs.get("bytes accessed", 0.0),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        predicted_s=costs.get("optimal_seconds"),
        compile_s=took,
    )
    return CompiledProgram(made, found)


def _last_line(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "libtpu ended its process without a word"


def main() -> None:
    """Compile each program of a file for a TPU, and print what it costs as a line of JSON."""
    path, topology, batch = sys.argv[1:]
    jax = jax_package()
    try:
        device = chip_of(topology)
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps({_UNKNOWN: _last_line(str(error).encode())}), flush=True)
        return
    for name, exported in Archive.read(Path(path)).programs.items():
        print(json.dumps({"program": name, **asdict(_compiled(exported, int(batch), device).cost)}), flush=True)


if __name__ == "__main__":
    main()
