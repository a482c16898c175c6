"""What a pass does, as its driver writes it to a file for the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class PassPlan:
    """A pass over a script.

    ``target``: the file, or with ``module`` the name of the module; ``arguments``: the script's own; ``folder``: the
    folder of the script; ``record``: the folder that the ranks write to. ``ranks``: how many there are. ``steps``: the
    most steps of each optimizer. ``epoch_batches``: the batches to which longer loaders are shortened; 0 leaves them.
    ``memory``: the bytes that all ranks may use together; 0 for any number.
    ``float64``, ``no_dropout``: see ``precision.py`` and ``randomness.py``. ``no_gpu``: the CPU answers for
    ``gpus`` GPUs. ``join_gathers``, ``split_rows``, ``by_rank``: see ``contributions.py`` and ``splits.py``.
    ``reference``: the function of a file, as ``PATH:NAME``, whose gradients are computed before each step, see
    ``reference_gradients.py``.
    ``feed``: the file of what it is fed with, see ``feed.py``.
    """

    target: str
    arguments: tuple[str, ...]
    module: bool
    folder: str
    record: str
    ranks: int
    steps: int
    epoch_batches: int
    memory: int = 0
    float64: bool = True
    no_dropout: bool = True
    no_gpu: bool = False
    gpus: int = 1
    join_gathers: bool = False
    split_rows: bool = False
    by_rank: tuple[str, ...] = ()
    reference: str = ""
    feed: str | None = None

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))


def load_plan(path: str) -> dict[str, object]:
    """Returns the fields of what ``save`` has written."""
    return dict(json.loads(Path(path).read_text()))
