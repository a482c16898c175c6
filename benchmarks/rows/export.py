"""Exported files against the same network in float32.

    python benchmarks/rows/export.py --json FILE [--only id,...]

int8_size   bytes of ResNet-56 in int8 against float32: the ratio is the part that is left, and smaller is better.
int8_ort    milliseconds that ONNX Runtime takes for one image with each of them, the better of one thread and two: the
            ratio is how many times as fast int8 is. `what` says whether the processor has int8 dot products.

The network is that of examples/resnet20_cifar10.py with 56 layers and the published weights, from the folder
models/akamaster_resnet_cifar10 beside the data sets, and is calibrated on 1024 training images. The two files run in
this process, in turns, A B A B, and figures are medians of 200 of them. What fails makes a failed row, and exit status
1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from int8_rows import Size, Speed
from table import main, measured

ROWS = {"int8_size": Size(), "int8_ort": Speed()}

if __name__ == "__main__":
    sys.exit(main(__doc__, ROWS, measured(ROWS)))
