"""Settings as plain JSON and back: what JSON has no word for (tuples, counters, keys that are no text) is tagged."""

from __future__ import annotations

from collections import Counter
from typing import Any


def to_plain(value: Any, where: str) -> Any:
    """JSON for a nest of numbers, texts, lists, tuples and dicts. ValueError naming the place of anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "pairs"
        return {kind: [[to_plain(k, where), to_plain(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a learning rate kept as a tensor
        return value.item()
    raise ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: use numbers, texts, lists and dicts"
    )


def from_plain(value: Any) -> Any:
    """What ``to_plain`` was given."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        plain = [from_plain(v) for v in items]
        if kind == "tuple":
            return tuple(plain)
        return Counter(dict(plain)) if kind == "counter" else dict(plain)
    return value
