"""The rows of `export.py` about int8: ResNet-56 written in float32 and in int8, once, for all of them."""

import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from parked import SideFailed

import apportion
from apportion.api.export import Data, Examples
from apportion.exporting.onnxruntime_session import session
from apportion.exporting.quantization.files import this_processor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import cifar10_data
import resnet20_cifar10

ROOT = Path(os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data")
WEIGHTS = ROOT / "models" / "akamaster_resnet_cifar10"
DEPTH, CALIBRATION, TURNS = 56, 1024, 200


@functools.cache
def files():
    """The folder that holds them (until this process ends), and what was exported: (folder, float32, int8)."""
    folder = tempfile.TemporaryDirectory()
    net, images = published(), training_images()
    data = Data(calibration=images)
    made = [
        apportion.export(net, images.inputs[:2], Path(folder.name) / f"{precision}.onnx", target=target, data=data)
        for precision, target in (("float32", "onnx"), ("int8", "onnx(precision='int8')"))
    ]
    return folder, *made


def published():
    found = list(WEIGHTS.glob(f"resnet{DEPTH}-*.th"))
    if not found:
        raise SideFailed(f"there are no published weights of ResNet-{DEPTH} at {WEIGHTS}")
    state = torch.load(found[0], map_location="cpu", weights_only=True)["state_dict"]
    net = resnet20_cifar10.ResNet((DEPTH - 2) // 6)
    net.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    return net.eval()


def training_images():
    x, y = cifar10_data.training_set()
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:CALIBRATION]
    return Examples(resnet20_cifar10.normalised(x[rows].float()), y[rows])


class Size:
    what, unit = f"ResNet-{DEPTH}, int8 against float32", "bytes"

    def measure(self):
        _, float32, int8 = files()
        return int8.nbytes, float32.nbytes, int8.nbytes / float32.nbytes


class Speed:
    what, unit = f"ResNet-{DEPTH}, one image by ONNX Runtime, int8 against float32; {this_processor()}", "ms"

    def measure(self):
        _, float32, int8 = files()
        image = {"input": training_images().inputs[:1].numpy()}
        best = [float("inf"), float("inf")]
        for threads in (1, 2):
            sides = [session(one.path, threads=threads) for one in (int8, float32)]
            best = [min(pair) for pair in zip(best, medians(sides, image), strict=True)]
        ours, peer = best
        return ours, peer, peer / ours


def medians(sides, image):
    """The milliseconds that each takes, in turns."""
    taken = [[] for _ in sides]
    for _ in range(TURNS):
        for own, side in zip(taken, sides, strict=True):
            began = time.perf_counter()
            side.run(None, image)
            own.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(own[10:]) for own in taken]
