"""Checks that what a file of a run directory holds is what apportion writes there. Each refusal is a sentence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apportion.errors import CheckpointError

MOST_STEPS = 2**62
PARTS = tuple(f"{name}.safetensors" for name in ("model", "buffers", "optimizer", "average", "carry", "python"))
"""The files of a checkpoint, besides state.json."""


REPLACED = ".replaced-"
"""How the name of a checkpoint begins while another of its step takes its place."""


def saved_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the checkpoints in a run directory, oldest first."""
    pattern = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{8,}})")
    names = [path.name for path in (run_dir / "checkpoints").glob("*step-*") if path.is_dir()]
    return sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))})


def refuse_started(run_dir: str | os.PathLike[str]) -> None:
    """Raises ValueError where a run directory holds a run that could be resumed: a new run would be written over it."""
    path = Path(run_dir).absolute()
    if steps := saved_steps(path):
        raise ValueError(
            f"{path} already holds a run, at step {steps[-1]}: use resume=True to go on, or another run_dir="
        )


def mark_of(run_dir: str | os.PathLike[str]) -> list[int] | None:
    """Returns what tells a run directory from those of other hosts, unless they share the disk: of the file that it
    begins with. None where there is none."""
    try:
        found = Path(run_dir, "run.json").stat()
    except OSError:
        return None
    # The device number is left out: hosts number the same network disk differently.
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def read_json(path: Path) -> Any:
    """Reads a file of JSON. Raises OSError where it cannot be read, ValueError where it is not JSON, or nested so deep
    that it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def check_run(path: Path, run: Any) -> dict[str, Any]:
    """Returns what run.json holds. Raises CheckpointError where it does not hold what this package writes there."""
    if not isinstance(run, dict):
        raise CheckpointError(f"{path} is not a run.json of apportion: put it back, or start a new run")
    for name, (is_right, what) in _OF_A_RUN.items():
        if name in run and not is_right(run[name]):
            raise CheckpointError(
                f"{path} was changed: its {name} is {_short(run[name])} and must be {what}; put it back, or start a "
                "new run"
            )
    return run


def check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Checks what a checkpoint's state.json holds, of which the format and the seal are right. Raises CheckpointError
    where a field was changed."""
    for name, (is_right, what) in _OF_A_CHECKPOINT.items():
        if not is_right(manifest.get(name)):
            raise CheckpointError(f"{path} was changed: its {name} is {_short(manifest.get(name))} and must be {what}")


def _is_text(value: Any) -> bool:
    """Tells whether a value is text that can be the name of a file."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_number(value: Any, most: int = 2**64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most


def _is_fingerprint(value: Any) -> bool:
    seed = value.get("seed", 0) if isinstance(value, dict) else None
    return isinstance(seed, int) and not isinstance(seed, bool) and abs(seed) < 2**63


def _is_source(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_text(value.get(k)) for k in ("file", "sha256")))


def _is_term(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_is_number(value.get(name)) for name in ("number", "generation"))
        and _is_text(value.get("start"))
    )


def _are_files(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and PARTS[0] in value
        and all(name in PARTS and isinstance(entry, dict) for name, entry in value.items())
        and all(_is_number(entry.get("bytes")) and _is_text(entry.get("sha256")) for entry in value.values())
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_Rule = tuple[Callable[[Any], bool], str]
_OF_A_RUN: dict[str, _Rule] = {
    "address": (lambda value: value is None or _is_text(value), "text (FILE:NAME), or null"),
    "cwd": (_is_text, "the path of a folder"),
    "strategy": (_is_text, "text"),
    "launcher": (_is_text, "text"),
    "fingerprint": (_is_fingerprint, "an object, with a whole number as its seed"),
    "term": (_is_term, "an object with number, start and generation"),
    "source": (_is_source, "an object with file and sha256, or null"),
    "factory": (
        lambda value: _is_source(value) and (value is None or _is_text(value.get("name"))),
        "an object with name, file and sha256, or null",
    ),
}
_OF_A_CHECKPOINT: dict[str, _Rule] = {
    "step": (lambda value: _is_number(value, MOST_STEPS), "a whole number, 0 or more"),
    "settings": (lambda value: isinstance(value, dict), "an object"),
    "files": (_are_files, f"an object of {', '.join(PARTS)}, each with bytes and sha256"),
}
