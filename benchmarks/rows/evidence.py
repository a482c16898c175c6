"""Does it learn? Every strategy on real data: test accuracy after equal numbers of examples, and after equal time.

    python benchmarks/rows/evidence.py [mnist] [cifar10] [--workers 2] [--csv FILE]

mnist     60,000 digits, 3 epochs of batches of 64: a network of two Linear layers, three seeds.
cifar10   50,000 images, half of them mirrored, 3 epochs of batches of 64: two convolutions, a Linear layer, one seed.

The same workload for all: data, order, batch size, optimizer, learning rate and schedule are written once and nothing
is tuned for a strategy, each of which runs with the settings that it has by itself. Every one gets the same cores:
``workers`` processes of one thread, or the one process of single_device with so many threads. All see the same number
of examples, in the same order where they are synchronous.

A run evaluates ten times on the whole test set. Its clock runs from the first step and goes on while it evaluates.
"At T s" is the last evaluation by then, T the time that the fastest strategy of the row takes. Accuracies are means
over the seeds, with the lowest and the highest; times and examples are medians. The table is printed as it is measured,
and then in Markdown; ``--csv`` writes every evaluation of every run. A strategy that cannot be imported is named and
left out; a run that fails makes a failed row, and exit status 1.

The data lie in ~/.cache/apportion/data or $APPORTION_DATA: mnist/*-ubyte.gz, cifar-10-batches-py/*.
"""

import argparse
import csv
import gzip
import os
import pickle
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from apportion import Evaluation, Policy, Workload, run
from apportion.core.value import find
from apportion.errors import ApportionError
from apportion.runtime.launch.local import Local

STRATEGIES = (
    "single_device", "data_parallel", "fully_sharded", "map_reduce", "local_sgd", "parameter_server", "hogwild",
)  # fmt: skip
EVALUATIONS = 10
EPOCHS = 3
DATA = Path(os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data")


# The data


def digits(part):
    """MNIST: images (n, 784) float32 in 0..1, labels (n,)."""
    with gzip.open(DATA / "mnist" / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16)
    with gzip.open(DATA / "mnist" / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return TensorDataset(
        torch.from_numpy(images / np.float32(255)).view(-1, 784), torch.tensor(labels.astype(np.int64))
    )


def images(*batches):
    """CIFAR-10: images (n, 3, 32, 32) uint8, labels (n,)."""
    read = [pickle.loads((DATA / "cifar-10-batches-py" / batch).read_bytes(), encoding="latin1") for batch in batches]
    pixels = np.concatenate([batch["data"] for batch in read]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(pixels), torch.tensor([label for batch in read for label in batch["labels"]])


def centred(pixels):
    """About -2 to 2."""
    return (pixels.float() - 120.0) / 64.0


def test_images():
    pixels, labels = images("test_batch")
    return TensorDataset(centred(pixels), labels)


def mirrored(batch, draws):
    """Half of the images."""
    flip = draws.bernoulli(0.5)[:, None, None, None] > 0
    return batch.replace(inputs=centred(torch.where(flip, batch.inputs.flip(3), batch.inputs)))


# What is trained


def perceptron():
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 8 * 8, 10),
    )  # fmt: skip


def workload(model, data, test, **options):
    """The same optimizer and schedule for both networks."""
    return Workload(
        model=model,
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        batch_size=64,
        epochs=EPOCHS,
        evaluation=Evaluation(data=test, every=EPOCHS / EVALUATIONS, batch_size=1000),
        **options,
    )


@dataclass(frozen=True)
class Row:
    """What every strategy trains."""

    what: str
    workload: Workload
    seeds: int


ROWS = {
    "mnist": Row("MNIST, 784-128-10", workload(perceptron, lambda: digits("train"), lambda: digits("t10k")), seeds=3),
    "cifar10": Row(
        "CIFAR-10, two convolutions",
        workload(
            convolutions,
            lambda: TensorDataset(*images(*(f"data_batch_{i}" for i in range(1, 6)))),
            test_images,
            augment=mirrored,
        ),
        seeds=1,
    ),
}


# Measuring


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    examples: int
    seconds: float
    accuracy: float


def curve(trained, strategy, launcher):
    """The evaluations of one run."""
    points = []
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(checkpoint_every="1000 epochs")
        for event in run(trained, strategy, launcher=launcher, run_dir=Path(folder) / "run", policy=policy):
            if event.kind == "start":
                start, dealt = event.seconds, event.data
            elif event.kind == "evaluation":
                epochs, batches = divmod(event.step, dealt["steps_per_epoch"])
                seen = epochs * dealt["examples"] + batches * dealt["batch_size"]
                points.append(Point(seen, event.seconds - start, event.data["metrics"]["accuracy"]))
    return points


def curves(name, row, workers):
    """The evaluations of each seed's run."""
    strategy = find(name, "apportion.strategies")
    alone = strategy.one_process
    launcher = Local(workers=1 if alone else workers, threads=workers if alone else 1, device="cpu")
    return [curve(replace(row.workload, seed=seed), strategy(), launcher) for seed in range(row.seeds)]


def at(points, seconds):
    """The last evaluation by then; None before the first."""
    return max((p for p in points if p.seconds <= seconds), key=lambda p: p.seconds, default=None)


# Telling


def spread(accuracies):
    """In per cent: the mean, and from where to where."""
    percent = [100 * a for a in accuracies]
    return f"{mean(percent):.2f}" + (f" ({min(percent):.2f}-{max(percent):.2f})" if len(percent) > 1 else "")


def line(name, found, shortest):
    """A row of the table."""
    ends = [points[-1] for points in found]
    then = [at(points, shortest) for points in found]
    known = None not in then
    return [
        name,
        f"{ends[0].examples}",
        spread([p.accuracy for p in ends]),
        f"{median(p.seconds for p in ends):.1f}",
        f"{median(p.examples for p in then):.0f}" if known else "-",
        spread([p.accuracy for p in then]) if known else "-",
    ]


def heading(shortest):
    by_then = f"at {shortest:.1f} s"
    return ["strategy", "examples", "accuracy %", "seconds", f"examples {by_then}", f"accuracy % {by_then}"]


def as_text(lines):
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in lines)


def as_markdown(title, lines):
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"### {title}", "", rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])


def measure(name, row, workers):
    """(the curves by strategy, the strategies that failed); says how each ended."""
    found, failed = {}, []
    for strategy in STRATEGIES:
        try:
            find(strategy, "apportion.strategies")
        except (ImportError, ValueError) as error:
            print(f"{name}: {strategy} is left out: {error}", flush=True)
            continue
        try:
            found[strategy] = curves(strategy, row, workers)
        except (ApportionError, ValueError) as error:
            failed.append(strategy)
            print(f"{name}: {strategy} FAILED: {str(error).splitlines()[0]}", flush=True)
            continue
        ends = [points[-1] for points in found[strategy]]
        accuracy = spread([p.accuracy for p in ends])
        print(f"{name}: {strategy}: {accuracy} % in {median(p.seconds for p in ends):.1f} s", flush=True)
    return found, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="row", help="of " + ", ".join(ROWS) + "; none: all")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="every evaluation of every run")
    arguments = parser.parse_args()
    names = arguments.rows or list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown {', '.join(unknown)}: it is one of {', '.join(ROWS)}")
    told, written, any_failed = [], [], False
    for name in names:
        found, failed = measure(name, ROWS[name], arguments.workers)
        any_failed = any_failed or bool(failed)
        written += [
            (name, strategy, seed, p.examples, f"{p.seconds:.3f}", p.accuracy)
            for strategy, runs in found.items()
            for seed, evaluations in enumerate(runs)
            for p in evaluations
        ]
        if found:
            shortest = min(median(points[-1].seconds for points in runs) for runs in found.values())
            lines = [heading(shortest), *(line(strategy, runs, shortest) for strategy, runs in found.items())]
            lines += [[strategy, "FAILED", "", "", "", ""] for strategy in failed]
            print(f"\n{as_text(lines)}\n", flush=True)
            told.append(as_markdown(f"{ROWS[name].what}, {arguments.workers} workers", lines))
    print("\n\n".join(told))
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("row", "strategy", "seed", "examples", "seconds", "accuracy"), *written])
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
