"""Train a workload: the arguments of a run are checked here, and ``running`` does the rest."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apportion.api.arguments import check_workload, launcher_of, policy_of, strategy_of
from apportion.core.named_arguments import named_arguments
from apportion.core.place_names import split_address
from apportion.runtime.checkpoint.code_ownership import loading

if TYPE_CHECKING:
    from apportion.core.event import Event, Result
    from apportion.core.launcher import Launcher
    from apportion.core.policy import Policy
    from apportion.core.strategy import Strategy
    from apportion.core.workload import Workload
    from apportion.reporting.logger import Logger


@named_arguments("run")
def run(  # noqa: PLR0913 (the settings, all of them by name)
    workload: Workload | str,
    strategy: Strategy | str | None = None,
    *,
    launcher: Launcher | str | None = None,
    run_dir: str | Path | None = None,
    resume: bool | Literal["auto"] = False,
    policy: Policy | str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    trial: bool = True,
    remeasure: bool = False,
    allow_approximate: bool = False,
    check: bool = True,
    require_proof: bool = False,
    reprove: bool = False,
    loggers: Sequence[Logger | str] = (),
) -> Generator[Event, None, None]:
    """Train, and yield what happens: steps, evaluations, checkpoints, faults, and the end.

    ``workload``: itself, or its address (``path/to/file.py:name``). ``strategy``: None predicts what each
    would take here, tries the best for at most 10 s or 5 % of the run, and takes the fastest; the next run like it
    takes the same. ``launcher``: ``local()``, the default, starts workers here, ``ssh("a", "b:4")`` on several hosts,
    ``slurm()`` on those of an allocation, ``ray()`` on those of a Ray cluster,
    and ``env()`` takes those that are running. ``run_dir``: None makes one under ``runs/``. ``resume`` goes on from the
    last checkpoint there; "auto" does where there is one, and starts the run where there is none. ``steps`` and
    ``seed`` replace the workload's.

    Where no strategy is given: ``trial=False`` takes the one that is predicted to be the fastest; ``remeasure``
    forgets earlier runs; ``allow_approximate`` also takes an approximate one, if it learns more in the same time. Under
    ``launcher=env()`` all ranks measure their hosts and the links between them, try the best few, and take the best
    exact one that uses all of them.

    Before its first step a run on several ranks is proved on its own workload (see docs/proof.md), for at most 10 s or
    5 % of the run; a later run of the same code, data, files and environment reuses that proof. ``check=False`` goes on
    without; ``require_proof`` ends the run where nothing could be shown; ``reprove`` makes a new proof where there is
    one already.

    ``loggers``: programs that keep the scalars of the run, by themselves or as text: "csv", "tensorboard", "mlflow",
    "wandb(project='mine')", "trackio".

    ``break`` checkpoints and stops every rank at the same step. SIGTERM is the notice to end: the last update is
    saved, and ToldToEnd, a SystemExit, is raised with status 143. Raises WorkerFailed where a worker fails,
    CheckpointError where the state cannot be kept, Disproved where the strategy does not train the network that it
    must, ValueError for what was asked wrongly.
    """
    if loading:
        raise ValueError(
            f"{loading[-1]} trains while load() imports it: put what trains under if __name__ == '__main__':, or give "
            "load(..., model=...)"
        )
    check_workload(workload, "train")
    where = launcher_of(launcher)
    address = workload if isinstance(workload, str) else _address(workload)
    _check_run_dir(run_dir, resume)
    # What a run needs, a program that only imports this package does without.
    from apportion.api.running import RunRequest, Training
    from apportion.planner.decision import Planning
    from apportion.reporting.logger import logged, loggers_of
    from apportion.runtime.notice import refuse_requeue

    asked = RunRequest(
        workload=workload,
        address=address,
        run_dir=str(Path(run_dir) if run_dir is not None else fresh_run_dir(address)),
        resume=resume,
        policy=policy_of(policy),
        prove=check,
        require_proof=require_proof,
        reprove=reprove,
        changes={name: value for name, value in (("steps", steps), ("seed", seed)) if value is not None},
    )
    chosen = None if strategy is None else strategy_of(strategy)
    planning = Planning(trial=trial, remeasure=remeasure, approximate=allow_approximate)
    training = Training(asked=asked, strategy=chosen, planning=planning)
    _check_proof(check, require_proof=require_proof, reprove=reprove)
    refuse_requeue(asked.policy, os.environ)
    wanted = loggers_of(loggers) if loggers else []
    events: Generator[Event, None, None] = where.dispatch(training)
    return logged(events, wanted) if wanted and os.environ.get("RANK", "0") == "0" else events


def _check_proof(check: bool, *, require_proof: bool, reprove: bool) -> None:
    """Raises ValueError where a run is to prove itself and not to."""
    for name, asked in (("require_proof", require_proof), ("reprove", reprove)):
        if asked and not check:
            raise ValueError(f"{name}=True and check=False contradict each other: leave either out")


def _check_run_dir(run_dir: str | Path | None, resume: object) -> None:
    if run_dir is not None and (not isinstance(run_dir, str | os.PathLike) or not os.fspath(run_dir).strip()):
        raise ValueError(
            f"run_dir={run_dir!r} must be the path of a folder: run_dir='runs/first', or None for a new one"
        )
    if resume not in (True, False, "auto"):
        raise ValueError(f'resume={resume!r} must be True, False or "auto" (go on where there is a checkpoint)')
    if resume and run_dir is None:
        raise ValueError(f"resume={resume!r} needs run_dir: the directory of the run to go on with")


@named_arguments("run", like=run)
def train(
    workload: Workload | str, strategy: Strategy | str | None = None, *, progress: bool | None = None, **options: Any
) -> Result:
    """Runs ``run`` to its end, with its options; returns what it came to: ``metrics``, ``run_dir``,
    ``examples_per_second``.

    ``progress``: whether the run is shown as it goes; None: in a notebook, and where standard output is a terminal. An
    interrupt (Ctrl-C, or the notebook's button) saves the last update, and raises KeyboardInterrupt, which a notebook
    shows as one line with the command that goes on.
    """
    from apportion.core.event import Result
    from apportion.reporting.progress.display import Display, in_notebook, on_terminal

    last = None
    events = run(workload, strategy, **options)
    shown = progress if progress is not None else in_notebook() or on_terminal()
    try:
        with closing(events), Display() if shown else nullcontext() as display:
            for event in events:
                if display is not None:
                    display.show(event)
                last = event
    except KeyboardInterrupt as interrupt:
        _in_one_line(interrupt)
        raise
    assert last is not None, "a run ends with an event"
    return Result(**vars(last))


def _in_one_line(interrupt: KeyboardInterrupt) -> None:
    """Has a notebook show the interrupt as what it says and not as a traceback."""
    notes = [note for error in (interrupt, interrupt.__context__) for note in getattr(error, "__notes__", ())]
    # The name of the method is IPython's: it asks an exception for the lines to show.
    interrupt._render_traceback_ = lambda: ["; ".join("; ".join(notes).splitlines()) or "interrupted"]  # type: ignore[attr-defined]


def fresh_run_dir(address: str | None) -> Path:
    """Returns ``runs/<name>-<date>-<time>``, which is not there yet."""
    name = "run" if address is None else Path(split_address(address).place).stem.rpartition(".")[2]
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def _address(workload: Workload) -> str | None:
    """Returns where the running script has this workload, for loading and resuming the run later; None in a
    notebook."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    for name, value in vars(main).items():
        if value is workload and file is not None:
            return f"{file}:{name}"
    return None
