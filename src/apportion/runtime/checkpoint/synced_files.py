"""Files that are on the disk once they have been written, and what is told where they could not be."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apportion.errors import CheckpointError
from apportion.runtime.checkpoint.append_only_file import open_own


def sync(path: Path) -> None:
    """Writes the contents of a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> int:
    """Writes and syncs a file of JSON; returns how many bytes it has."""
    text = json.dumps(content, indent=1).encode()
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return len(text)


def unwritten(path: Path, error: Exception) -> CheckpointError:
    """Returns what is told of a file that could not be written: why, and what can be done."""
    cures = {
        errno.ENOSPC: "free some of the disk, or use a run_dir= on another one",
        errno.EDQUOT: "free some of your quota, or use a run_dir= on another disk",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
        errno.EACCES: "make the folder writable, or use another run_dir=",
        errno.EROFS: "use a run_dir= on a disk that is writable",
    }
    told = re.search(r"os error (\d+)", str(error))  # safetensors tells the number in its text only
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    cause = os.strerror(number) if number else str(error)
    cure = cures.get(number or 0, "check the disk, or use another run_dir=")
    return CheckpointError(f"{path} could not be written: {cause}; what was there before is intact; {cure}")
