"""The program of each rank of a pass: installs the hooks, and runs the script as ``python`` or ``torchrun`` would.

``python -m apportion.script_check.recording.main PLAN.json``, with torchrun's variables in the environment.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apportion.script_check.feed import load_feed
from apportion.script_check.recording.plan import load_plan
from apportion.script_check.recording.recorder import Finished, Recorder


def main(path: str) -> None:
    """Run one rank of the pass that a file describes, and end the process."""
    plan: dict[str, Any] = load_plan(path)
    if plan["feed"]:
        plan["feed"] = load_feed(plan["feed"])
    recorder = Recorder(plan, int(os.environ["RANK"]))
    recorder.emit("start", pid=os.getpid(), rank=recorder.rank)
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
        recorder.emit("end", **outcome)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without the exit of gloo's threads, which may abort or hang


def _install(recorder: Recorder) -> Callable[[], None]:
    """Sets the hooks; returns what is to be called after the script."""
    from apportion.script_check.recording import (  # torch is imported here, once
        constants,
        functions,
        loaders,
        losses,
        modules,
        optimizers,
        plain_optimizers,
        precision,
        randomness,
        spawning,
    )

    precision.install(recorder)
    spawning.install(recorder)
    networks = modules.install(recorder)
    found, replay = constants.install(recorder, networks)
    steps = optimizers.install(recorder, networks, replay)
    loaders.install(recorder, found)
    losses.install(recorder)
    plain = plain_optimizers.install(recorder, networks, steps)
    if recorder.plan["no_dropout"]:
        randomness.install(recorder)
    functions.install(recorder, plain, found)
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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if recorder.own(frame.filename)]
    return {
        "how": "raised",
        "type": type(error).__name__,
        "message": str(error),
        "site": f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "",
        "line": (frames[-1].line or "") if frames else "",
    }


if __name__ == "__main__":
    main(sys.argv[1])
