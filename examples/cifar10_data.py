"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32x32 pixels in 10 classes.

The original python-version batches lie in ~/.cache/apportion/data/cifar-10-batches-py, or below $APPORTION_DATA.
Where they do not, they are downloaded once and checked against the published MD5.
"""

import fcntl
import hashlib
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import torch

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
TRAINING, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)


def training_set():
    """Images (50000, 3, 32, 32) uint8, labels (50000,) int64."""
    return read(TRAINING)


def test_set():
    """Images (10000, 3, 32, 32) uint8, labels (10000,) int64."""
    return read(TEST)


def crop(images, *, top, left, flip, size):
    """(n, channels, size, size): the square of image i whose corner is (top[i], left[i]), mirrored where flip[i]."""
    squares = images.unfold(2, size, 1).unfold(3, size, 1)  # a view: (n, channels, top, left, size, size)
    cropped = squares[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(flip[:, None, None, None], cropped.flip(3), cropped)


def standardised(images):
    """float32 of mean 0 and standard deviation 1 in each image."""
    pixels = images.flatten(1).float()
    pixels -= pixels.mean(1, keepdim=True)
    deviation = pixels.square().mean(1, keepdim=True).sqrt()
    pixels /= deviation.clamp(min=pixels.shape[1] ** -0.5)  # an even image has none
    return pixels.view(images.shape).contiguous(memory_format=torch.channels_last)


def folder():
    """Where the batches are read from."""
    root = os.environ.get("APPORTION_DATA") or Path.home() / ".cache" / "apportion" / "data"
    return Path(root) / "cifar-10-batches-py"


def read(names):
    """Images and labels of some batches, in order."""
    place = folder()
    if not place.is_dir():
        download(place)
    missing = [name for name in names if not (place / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{place} lacks {', '.join(missing)}: remove the folder to have it downloaded again")
    batches = [_load(place / name) for name in names]
    images = torch.from_numpy(np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32))
    return images, torch.tensor([label for batch in batches for label in batch["labels"]])


def download(place):
    """Fetch and unpack the batches; one line that says how to get them where that cannot be done."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _download(place)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"CIFAR-10 is not in {place} and could not be downloaded ({error}): get {URL} (MD5 {MD5}) "
            f"and unpack it with: tar -xzf cifar-10-python.tar.gz -C {place.parent}"
        ) from error


def _download(place):
    # Workers open their data at the same time: one of them downloads, the others wait.
    lock = os.open(place.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            return
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            archive = Path(scratch) / "cifar-10-python.tar.gz"
            print(f"downloading {URL} (163 MiB)", file=sys.stderr)
            with urllib.request.urlopen(URL, timeout=30) as answer, archive.open("wb") as file:
                shutil.copyfileobj(answer, file)
            _check(archive)
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            (Path(scratch) / place.name).rename(place)
    finally:
        os.close(lock)


def _check(archive):
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    if digest != MD5:
        raise ValueError(f"its MD5 is {digest}")


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # its name since numpy 2
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): lambda name, *_: np.dtype(name),
}


class _Unpickler(pickle.Unpickler):
    """Builds numpy arrays and nothing else: a pickle from elsewhere could run anything."""

    def find_class(self, module, name):
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 batch")
        return _KNOWN[module, name]


def _load(path):
    with path.open("rb") as file:
        return _Unpickler(file, encoding="latin1").load()
