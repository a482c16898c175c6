"""The program of each rank of a pass: installs the hooks, and runs the script as ``python`` or ``torchrun`` would.

``python -m apportion.script_check.recording.main PLAN.json``, with torchrun's variables in the environment.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from apportion.process import die_with_parent
from apportion.script_check.feed import load_feed
from apportion.script_check.recording import lightning_devices, stacks
from apportion.script_check.recording.plan import load_plan
from apportion.script_check.recording.recorder import Finished, Recorder


def main(path: str) -> None:
    """Run one rank of the pass that a file describes, and end the process."""
    die_with_parent(os.getppid())  # a check that is killed leaves no rank behind
    plan: dict[str, Any] = load_plan(path)
    if plan["feed"]:
        plan["feed"] = load_feed(plan["feed"])
    recorder = Recorder(plan, int(os.environ["RANK"]))
    # Before torch is imported: a rank that hangs in an import of the script or of torch can be asked for its stacks,
    # too.
    stacks.install(recorder)
    lightning_devices.install(int(plan["ranks"]))
    _watch_exit(recorder)
    recorder.emit("start", pid=os.getpid(), rank=recorder.rank, thread=threading.get_ident(), time=time.monotonic())
    outcome: dict[str, Any] = {"how": "ended"}
    try:
        close = _install(recorder)
        recorder.emit("installed")
        _run(plan)
        close()
    except Finished:
        outcome = {"how": "enough steps"}
    except SystemExit as ending:
        outcome = {"how": "ended" if not ending.code else "exited", "code": ending.code}
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        outcome = _failure(recorder, error)
    if recorder.active:
        _finish(recorder, outcome)


def _finish(recorder: Recorder, outcome: dict[str, Any]) -> NoReturn:
    """Records how the script ended, and waits to be killed: an exit would close the connections that other ranks wait
    at, which would then raise, and gloo's threads abort or hang in one exit of ten."""
    sys.stdout.flush()
    sys.stderr.flush()
    recorder.finish(**outcome)
    while True:
        time.sleep(60.0)


def _watch_exit(recorder: Recorder) -> None:
    """Has ``os._exit``, with which scripts leave out what hangs at an exit, end the record first."""
    leave = os._exit

    @wraps(leave)
    def left(status: int) -> NoReturn:
        if recorder.active:
            _finish(recorder, {"how": "exited" if status else "ended", "code": status})
        leave(status)  # a process forked from the rank

    os._exit = left


def _install(recorder: Recorder) -> Callable[[], None]:
    """Sets the hooks; returns what is to be called after the script."""
    from apportion.script_check.recording import (  # torch is imported here, once
        clipping,
        collectives,
        constants,
        contributions,
        figures,
        functions,
        loaders,
        modules,
        optimizers,
        plain_optimizers,
        precision,
        randomness,
        reference_gradients,
        saves,
        spawning,
        splits,
        wrappers,
    )

    # The order matters, as a patch that is installed later runs first. This one comes first: what records calls runs
    # outside of it, and sees what the script asks for (a GPU, an average, float32) and not what is done in its place.
    precision.install(recorder)
    spawning.install(recorder)
    # Global hooks of modules run in the order in which they are registered: a network is known, with its weights,
    # before any other hook asks for a name.
    networks = modules.install(recorder)
    calls = collectives.install(recorder, networks)
    wrappers.install_reducers(calls)
    clipping.install(calls)
    # Outside of the wrapper that records clipping: in a replay, what is recorded is the clipping of the averaged
    # gradients.
    found, replay = constants.install(recorder, networks)
    own = contributions.install(recorder, networks)
    watches = optimizers.Watches(own, wrappers.install(recorder, networks), wrappers.watch_flattening(recorder))
    steps = optimizers.install(recorder, networks, watches, replay)
    # After the hook that records the script's own gradients, which the reference sets aside while it computes.
    if recorder.plan["reference"]:
        reference_gradients.install(recorder, networks)
    contributions.watch_gathers(recorder)
    if recorder.plan["by_rank"]:
        splits.install_by_rank(recorder, networks)
    saves.install(recorder)
    loaders.install(recorder, found)
    figures.install(recorder)
    plain = plain_optimizers.install(recorder, networks, steps)
    if recorder.plan["no_dropout"]:
        randomness.install(recorder)
    splitting = splits.install(recorder, networks) if recorder.plan["split_rows"] else None
    # Last: from here on, every function of torch that this process calls runs through the mode.
    functions.install(recorder, splitting, plain, found)
    return plain.close


def _run(plan: dict[str, Any]) -> None:
    target = str(plan["target"])
    sys.argv = [target, *plan["arguments"]]
    if plan["module"]:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")


def _failure(recorder: Recorder, error: BaseException) -> dict[str, Any]:
    everything = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in everything if recorder.is_user_file(frame.filename)]
    return {
        "how": "raised",
        "type": type(error).__name__,
        "message": str(error),
        "site": f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "",
        "line": (frames[-1].line or "") if frames else "",
        "stack": [(frame.filename, frame.lineno, frame.name) for frame in reversed(everything)],
    }


if __name__ == "__main__":
    main(sys.argv[1])
