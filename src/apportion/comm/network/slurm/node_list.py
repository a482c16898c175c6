"""Slurm's lists of nodes, as ``rack[1-2]node[01-03,7],login``, whose names ``scontrol show hostnames`` would print."""

from __future__ import annotations

import itertools
import re

_PARTS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECES = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def node_names(text: str) -> list[str]:
    """Returns the names of the nodes of a list, in its order. Raises ValueError where it is none."""
    parts = _PARTS.findall(text)
    if not parts or ",".join(parts) != text:
        raise ValueError(f"{text!r} is no list of nodes: names separated by commas, with numbers as node[1-3,07]")
    return [name for part in parts for name in _expanded(part, text)]


def _expanded(part: str, text: str) -> list[str]:
    choices = [_numbers(numbers, text) if numbers or not plain else [plain] for numbers, plain in _PIECES.findall(part)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(numbers: str, text: str) -> list[str]:
    found = []
    for each in numbers.split(","):
        match = _NUMBERS.fullmatch(each)
        if match is None:
            raise ValueError(f"[{numbers}] in the list of nodes {text!r} must hold numbers and ranges, as [1-3,07]")
        first, last = match[1], match[2] or match[1]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
