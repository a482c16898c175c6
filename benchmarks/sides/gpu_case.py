"""The process in which gpu.py runs cases of the conformance grid: a line of JSON for each that it is given.

python gpu_case.py cuda|cpu
"""

import contextlib
import json
import os
import platform
import re
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

import example_networks
import grid
import networks
from ranks import by_value

import apportion


def facts(device):
    """The card and the versions."""
    cuda = device == "cuda" and torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name(0) if cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl() if cuda else None,
        "python": platform.python_version(),
    }


def nccl():
    """The version of the NCCL that this process has loaded, as numbers; None: torch has none."""
    try:
        return list(torch.cuda.nccl.version())
    except AttributeError:  # a build of torch without it
        return None


def answered(case, device):
    """The result of a case, and a line of what was said."""
    try:
        with by_value(networks), by_value(example_networks), by_value(grid):
            proof = apportion.check(
                grid.at(case["network"], case["optimizer"]),
                case["strategy"],
                steps=grid.STEPS,
                launcher=apportion.local(workers=case["workers"], threads=1, device=device),
            )
    except Exception as error:
        if is_refusal(error, case["refused"]):
            return {"result": "refuses", "message": first(error)}
        return {"result": "fails", "message": f"{type(error).__name__}: {first(error)}"}
    if proof.holds:
        return {"result": "runs", "message": ""}
    return {"result": "fails", "message": f"{proof.verdict}: {proof.sentence}"}


def is_refusal(error, known):
    """Whether an error is an answer by name, with the remedy, or what the CPU says: torch raises ValueErrors too."""
    return isinstance(error, ValueError) and ("use " in str(error) or bool(known and re.search(known, str(error))))


def first(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def main():
    device = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    torch.set_num_threads(1)
    print(json.dumps(facts(device)), file=answers, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            print(json.dumps(answered(json.loads(line), device)), file=answers, flush=True)


if __name__ == "__main__":
    main()
