"""Four ResNets on CIFAR-10 as one ensemble that answers by a deadline.

    python examples/resnet_ensemble.py WEIGHTS nets
    apportion serve nets/*.onnx --evaluate examples/resnet20_cifar10.py:workload
    apportion serve nets/*.onnx --deadline 50ms

WEIGHTS is a folder with the published state dicts of github.com/akamaster/pytorch_resnet_cifar10 (resnet20-12fca82f.th
and so on); their test accuracies are 91.73, 92.63, 93.10 and 93.39 %,
the ensemble's is 94.53 %.
"""

import argparse
from pathlib import Path

import torch
from resnet20_cifar10 import ResNet

import apportion

FILES = {
    20: "resnet20-12fca82f.th",
    32: "resnet32-d509ac18.th",
    44: "resnet44-014dd654.th",
    56: "resnet56-4bfd9763.th",
}


def published(folder, layers):
    """The net of so many layers with its published weights."""
    kept = torch.load(Path(folder) / FILES[layers], map_location="cpu", weights_only=True)["state_dict"]
    net = ResNet(blocks=(layers - 2) // 6)
    weights = {name.removeprefix("module."): value for name, value in kept.items()}
    missing, _ = net.load_state_dict(weights, strict=False)
    assert all(name.endswith("num_batches_tracked") for name in missing), missing  # older torch did not save it
    return net.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("nets", type=Path)
    arguments = parser.parse_args()
    arguments.nets.mkdir(parents=True, exist_ok=True)
    sample = torch.randn(2, 3, 32, 32)
    for layers in FILES:
        made = apportion.export(published(arguments.weights, layers), sample, arguments.nets / f"resnet{layers}.onnx")
        print(f"{made.path}: {made.nbytes:,} bytes")


if __name__ == "__main__":
    main()
