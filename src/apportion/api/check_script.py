"""Prove that a training script, which is not changed for it, trains the same network on several ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from apportion.core.named_arguments import named_arguments
from apportion.core.place_names import close_file
from apportion.script_check.driver import STEPS
from apportion.script_check.driver import check_script as run_check
from apportion.script_check.findings import ScriptAnswer, check_finding_names
from apportion.script_check.script import Script, reference_function

RANKS = 2
"""The ranks on which a script runs where their number is not given."""
MOST_RANKS = 64


@named_arguments("check")
def check_script(  # noqa: PLR0913 (the flags)
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    workers: int = RANKS,
    steps: int = STEPS,
    accept: Sequence[str] = (),
    then: Sequence[str] | None = None,
    reference: str | None = None,
) -> ScriptAnswer:
    """Run a training script on several ranks, and once as one process on the union of their rows, and compare the two
    after every optimizer step, tensor by tensor.

    ``script``: the path of its file, or with ``module`` the dotted name that ``python -m`` takes. ``arguments``: the
    script's own. ``workers``: the number of ranks, at least 2, each with torchrun's variables in its environment.
    ``steps``: the largest number of optimizer steps that is compared. ``accept``: names of findings that are intended,
    and count as notes. ``then``: for a script that resumes in a run of its own, the arguments that this run has
    besides, such as ``["--resume", "last.pt"]``, or none: it is run a second time, in the folder that the first run
    has left, and compared across both. ``reference``: a function ``NAME(model, batch)`` of a file, as "FILE.py:NAME",
    that returns the loss over all rows of a step; its gradient, at the weights of each step, is compared with that of
    the ranks.

    The script runs unchanged, in float64 and without dropout, and what it writes is discarded. The answer has a
    ``verdict``, its ``findings`` with their remedies, and the exit ``status`` of the command line. Nothing is raised
    for a script that fails: the verdict is "could not run", with the reason. Raises ValueError for an argument that is
    wrong.
    """
    checked = script_of(script, arguments, module=module, then=then)
    check_ranks(workers)
    if not _whole(steps) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a whole number of optimizer steps, at least 1, as steps={STEPS}")
    if isinstance(accept, str):
        accept = (accept,)
    check_finding_names(accept)
    if reference is not None and then is not None:
        raise ValueError(
            f"reference={reference!r} gives the gradients of one run, and then={list(then)!r} asks for two: leave out "
            "either, or check the second run by itself, with its arguments and a checkpoint of the first"
        )
    function = None if reference is None else reference_function(reference)
    return run_check(checked, ranks=workers, steps=steps, accept=accept, reference=function)


def script_of(
    target: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    then: Sequence[str] | None = None,
) -> Script:
    """Returns a script with its arguments. Raises ValueError where there is no such file or module."""
    for word, value in (("arguments", arguments), ("then", then)):
        if isinstance(value, str):
            raise ValueError(f"{word}={value!r} must be a list of words, as {shlex.split(value)!r}")
    name = os.fspath(target)
    script = Script(name, tuple(map(str, arguments)), module, None if then is None else tuple(map(str, then)))
    if module:
        if name.endswith(".py") or os.sep in name:
            raise ValueError(
                f"{name!r} is a path, and -m takes the dotted name of a module, as package.train: leave -m out to "
                "check a file"
            )
        script.path  # noqa: B018 (raises where there is none)
        return script
    file = Path(name)
    if file.is_dir():
        raise ValueError(f"{name} is a folder, and a check needs the file of a script: give {file / 'train.py'}, say")
    if not file.is_file():
        raise ValueError(f"there is no file {name} (in {Path.cwd()}){_remedy(name)}")
    return script


def _remedy(name: str) -> str:
    try:
        Script(name, module=True).path  # noqa: B018 (raises where there is none)
    except (ValueError, ImportError):
        return close_file(Path(name), "give the path of the script")
    return f": {name} is a module, which -m {name} checks"


def check_ranks(workers: int) -> None:
    """Raise ValueError where a number of ranks leaves nothing to compare, or is not a whole number."""
    if not _whole(workers):
        raise ValueError(f"workers={workers!r} must be a whole number, as workers={RANKS}")
    if not 2 <= workers <= MOST_RANKS:
        why = "one process is what the ranks are compared with" if workers == 1 else "all ranks run on this machine"
        raise ValueError(
            f"{workers} ranks of a script cannot be checked, as {why}: give from 2 to {MOST_RANKS} workers, as "
            f"{RANKS}, the default"
        )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
