"""The preparation of a member before it is served: how its model is loaded, which runtime is fastest, and with how many
threads. It runs in a separate process, so that the server never imports torch: ``python -m apportion.serving.prepare``,
with JSON as input and as output."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apportion.errors import ApportionError
from apportion.exporting.onnxruntime_session import WEIGHTS, metadata
from apportion.process import die_with_parent
from apportion.serving.protocol.datatypes import Array
from apportion.serving.row_independence.decision import NOT_ALLOWED, why_not_together
from apportion.serving.runtimes.onnx_runtime import OnnxRuntime
from apportion.serving.runtimes.remote_runtime import RemoteRuntime
from apportion.serving.runtimes.runtime import Runtime, with_free_sizes
from apportion.serving.runtimes.source import Source, as_they_are, save_rows

TIMES, SECONDS = 30, 0.5
"""The number of times that each runtime computes one row, in turns with the others, and the seconds that each of them
has for it."""
INT8 = ".int8.onnx"
"""The ending of a file in int8, beside the run or the file of float32 that it was made from."""
BETTER = 1.3
"""The factor by which more threads must be faster than one to be given."""


@dataclass(frozen=True)
class TimedPreparation:
    """A way to run a member, and how fast it is."""

    source: Source
    runtime: str
    seconds: float
    """The median of the seconds that one row takes."""


def prepare(  # noqa: PLR0913 (as main is ordered)
    name: str,
    place: str,
    folder: Path,
    *,
    threads: Sequence[int],
    trust: bool = False,
    projects: Sequence[Path] | None = None,
    batch: bool = True,
) -> tuple[Source, list[str]]:
    """Return the fastest way to run the member, and a line for each that was tried. ``threads``: numbers to try.
    ``batch``: requests may be computed together, where no row depends on others.
    ``trust``: a run's code may run even where it does not belong to the caller's ``projects``. Raises ValueError where
    the place holds no model, or one of another owner."""
    if place.startswith(("http://", "https://")):
        return _elsewhere(name, place, batch=batch)
    path = Path(place)
    if not path.exists():
        raise ValueError(f"member {name}: there is no {place}")
    lines: list[str] = []
    others: list[list[Array]] = []
    if path.suffix == ".onnx":
        own = Source(name=name, runtime="onnx", path=str(path.resolve()))
        int8 = None if path.name.endswith(INT8) else path.parent / f"{path.stem}{INT8}"
        sources = [own, *_in_int8(own, int8, _digest(path), folder, lines)]
    else:
        run = path if path.is_dir() else None
        if run is not None:
            path = pinned_for(run, folder / name, trust, projects)
            lines.append(f"{name}: {path.name} of {run}")
        sources, others = _of_torch(name, path, run, folder, lines)
    found = _fastest([replace(source, threads=n) for source in sources for n in threads], lines)
    graph = next((source.path for source in sources if source.runtime == "onnx"), None)
    graph = found.path if found.runtime == "onnx" else graph
    return _described(found, folder, lines, graph=graph, others=others, batch=batch), lines


def _elsewhere(name: str, place: str, *, batch: bool) -> tuple[Source, list[str]]:
    """Return a model on another server, which is asked what it takes."""
    program = RemoteRuntime(place)
    try:
        source = Source(name=name, runtime="remote", path=place)
        source = replace(source, inputs=as_they_are(program.inputs), outputs=as_they_are(program.outputs))
    finally:
        program.close()
    why = "the graph of a model on another server cannot be read" if batch else NOT_ALLOWED
    return source, [f"{name}: {place}", _one_by_one(name, why)]


def _described(
    found: Source,
    folder: Path,
    lines: list[str],
    *,
    graph: str | None,
    others: Sequence[Sequence[Array]],
    batch: bool,
) -> Source:
    """Return the source with its inputs and outputs, a sample, and whether requests may be computed together.
    ``graph``: the ONNX file of the net, which is read for that; None where there is none. ``others``: rows of other
    sizes than the sample, which a net of torch takes as well."""
    program = found.open()
    try:
        row = found.rows()
        if row is None:
            row = program.example() if isinstance(program, OnnxRuntime) else None
        if row is not None and found.sample is None:
            found = replace(found, sample=save_rows(folder / f"{found.name}.npz", row))
        inputs, outputs = program.inputs, program.outputs
        if found.runtime == "torch" and row is not None:  # the sample alone does not show which sizes may vary
            inputs, outputs = with_free_sizes(program, [row, *others])
        why = why_not_together(program, row, graph, batch=batch)
    except ValueError as error:
        raise ValueError(f"member {found.name} ({found.path}): {error}") from error
    finally:
        program.close()
    together = f"{found.name}: requests are computed together: each row depends on itself alone"
    lines.append(together if why is None else _one_by_one(found.name, why))
    return replace(found, inputs=as_they_are(inputs), outputs=as_they_are(outputs), batched=why is None)


def _one_by_one(name: str, why: str) -> str:
    return f"{name}: requests are computed one by one: {why}"


def pinned_for(run: Path, folder: Path, trust: bool, projects: Sequence[Path] | None) -> Path:
    """Pin the checkpoint that every process loads, whatever the run does meanwhile, and return its path."""
    from apportion.runtime.checkpoint.load import pinned

    return pinned(run, folder, trust=trust, projects=projects)


def _of_torch(
    name: str, path: Path, run: Path | None, folder: Path, lines: list[str]
) -> tuple[list[Source], list[list[Array]]]:
    """Return (the ways to run a net of torch, rows of other sizes than its sample that it takes)."""
    from apportion.exporting.exporter import export
    from apportion.exporting.target import weights_digest
    from apportion.serving.runtimes.torch_runtime import leaves_of, opened, other_samples

    module, sample = opened(path)
    others = other_samples(path, sample)
    rows = save_rows(folder / f"{name}.npz", leaves_of(sample))
    base = Source(name=name, runtime="torch", path=str(path.resolve()), sample=rows)
    sources = [base, replace(base, channels_last=True)] if any(x.ndim == 4 for x in leaves_of(sample)) else [base]
    try:
        made = export(module, sample, folder / f"{name}.onnx", check=others)
    except Exception as error:  # of the exporter there are many
        lines.append(f"{name}: no ONNX: {error}")
        return sources, [leaves_of(other) for other in others]
    own = replace(base, runtime="onnx", path=str(made.path))
    beside = _in_int8(own, None if run is None else run / f"model{INT8}", weights_digest(module), folder, lines)
    return [own, *beside, *sources], [leaves_of(other) for other in others]


def _in_int8(own: Source, file: Path | None, digest: str | None, folder: Path, lines: list[str]) -> list[Source]:
    """The same net in int8, where its file is there and was exported from these weights: a copy of it, which stays as
    it is while it is served. The reason why a file is left out is logged."""
    if file is None or not file.is_file():
        return []
    if digest is None:
        why = "the float file does not name the weights that it was exported from, so that they cannot be compared"
    elif (other := _digest(file)) is None:
        why = "it does not name the weights that it was exported from, as files by apportion do"
    elif other != digest:
        why = "it was exported from other weights"
    else:
        return [replace(own, path=str(shutil.copyfile(file, folder / f"{own.name}{INT8}")))]
    lines.append(f"{own.name}: {file.name} is left out: {why}")
    return []


def _digest(path: Path) -> str | None:
    """The digest of the weights that an ONNX file was exported from; None where it names none, or cannot be run."""
    try:
        return metadata(path).get(WEIGHTS)
    except Exception:  # onnxruntime's own have no base but this; opening the file reports it
        return None


def _fastest(sources: Sequence[Source], lines: list[str]) -> Source:
    """Return the fastest of these sources, timed with one row each, in turns."""
    programs = [source.open() for source in sources]
    taken: list[list[float]] = [[] for _ in sources]
    rows = [_rows(source, program) for source, program in zip(sources, programs, strict=True)]
    end = time.monotonic() + SECONDS * len(sources)
    for turn in range(TIMES):
        for own, program, inputs in zip(taken, programs, rows, strict=True):
            began = time.perf_counter()
            program.run(inputs, float("inf"))
            if turn:
                own.append(time.perf_counter() - began)
        if time.monotonic() > end and turn:
            break
    found = [
        TimedPreparation(s, p.runtime, statistics.median(t)) for s, p, t in zip(sources, programs, taken, strict=True)
    ]
    for timed in found:
        many = f"{timed.source.threads} thread{'s' if timed.source.threads > 1 else ''}"
        kind = ", int8" if timed.source.path.endswith(INT8) else ""
        lines.append(f"{timed.source.name}: {timed.runtime}{kind}, {many}: {timed.seconds * 1e3:.3g} ms")
    for program in programs:
        program.close()
    return chosen(found).source


def chosen(found: Sequence[TimedPreparation]) -> TimedPreparation:
    """Return the fastest with the least number of threads, unless more threads are so much faster that they are worth
    it."""
    least = min(timed.source.threads for timed in found)
    alone = min((timed for timed in found if timed.source.threads == least), key=lambda timed: timed.seconds)
    best = min(found, key=lambda timed: timed.seconds)
    return best if best.seconds * BETTER <= alone.seconds else alone


def _rows(source: Source, program: Runtime) -> list[Array]:
    found = source.rows()
    if found is None and isinstance(program, OnnxRuntime):
        found = program.example()
    return found or [spec.filled(1) for spec in program.inputs]


def main() -> None:
    """Run the process that prepares a member: {"name", "place", "folder", "threads", "trust", "projects", "batch"} come
    on standard input, and the number of its parent as argument."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.read())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a workload prints is not the answer
    answer: dict[str, Any]
    try:
        source, lines = prepare(
            order["name"],
            order["place"],
            Path(order["folder"]),
            threads=order["threads"],
            trust=order["trust"],
            projects=[Path(folder) for folder in order["projects"]],
            batch=order["batch"],
        )
        answer = {"source": source.to_json(), "said": lines}
    except (ValueError, ApportionError) as error:
        answer = {"refused": str(error), "user": isinstance(error, ValueError)}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = ": free some of that disk, or set TMPDIR to a folder on another one" if full else ""
        answer = {"refused": f"member {order['name']} ({order['place']}): {error}{cure}", "user": False}
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
