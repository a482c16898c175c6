"""One rank of a run on MNIST in which a host is four times slower. python straggler_side.py STRATEGY ACCURACY

Rank 0 says the seconds of training, evaluations among them, until the test accuracy is reached.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

import apportion
from apportion.core.value import parse

UNEVEN = f"{Path(__file__).resolve().parents[1] / 'networks' / 'mnist.py'}:uneven"


def main(strategy, accuracy):
    torch.set_num_threads(1)
    began = None
    with tempfile.TemporaryDirectory() as folder:
        given = {"launcher": apportion.env(device="cpu"), "run_dir": f"{folder}/run", "check": False}
        for event in apportion.run(UNEVEN, parse(strategy, "apportion.strategies"), **given):
            if event.kind == "step" and began is None:
                began = event.seconds
            if event.kind == "evaluation" and event.data["metrics"]["accuracy"] >= float(accuracy):
                print(event.seconds - (began or 0.0), flush=True)
                os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
