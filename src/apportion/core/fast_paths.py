"""The fast paths that are switched off: each has a plain path behind it that computes the same, more slowly.

``linear``  Linear layers that put the gradient of their weight where it is needed themselves, and matrix products in
            the form that is fastest for few rows (``parallel/ops``). Plain: torch's own Linear, whose gradients
            autograd accumulates.
``pages``   Weights, gradients and optimizer slots of one host in shared memory (``parallel/shared_weights``). Plain:
            each rank has its own, and the gradients are summed by messages.
``fused``   Updates by torch's fused kernels (``parallel/optim``). Plain: each optimizer's own step, and its rule
            operation by operation.
``early``   Gradients that leave while the backward pass still computes (``parallel/replica/gradient_buckets.py``).
            Plain: they leave when it has ended.

The user names them in the environment variable ``APPORTION_PLAIN``, separated by commas; the program switches them off
for what it builds next, in this process (``switched_off``) or in the ranks of a job (``Job.plain``). A path is chosen
when a step is built, and stays as it was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

VARIABLE = "APPORTION_PLAIN"
ALL = ("linear", "pages", "fused", "early")
"""Every fast path."""

_switched: frozenset[str] = frozenset()


def is_plain(path: str) -> bool:
    """Whether what is built now takes the plain path here."""
    assert path in ALL, path
    return path in _switched or path in from_environment()


def chosen() -> tuple[str, ...]:
    """The fast paths that are switched off now, in the order of ``ALL``."""
    return tuple(path for path in ALL if is_plain(path))


def from_environment() -> tuple[str, ...]:
    """The fast paths that the user has switched off; ValueError where a name is unknown."""
    text = os.environ.get(VARIABLE)
    return checked([name.strip() for name in text.split(",") if name.strip()], f"{VARIABLE}={text}") if text else ()


def checked(paths: Collection[str], given: str) -> tuple[str, ...]:
    """Return these names in the order of ``ALL``; ValueError where one is unknown. ``given``: how they were written."""
    unknown = [path for path in paths if path not in ALL]
    if unknown:
        raise ValueError(f"{given}: {unknown[0]!r} is not a fast path; name some of {', '.join(ALL)}")
    return tuple(path for path in ALL if path in paths)


def switch_off(paths: Collection[str]) -> None:
    """Switch off these fast paths and no others in this process from now on, beside those of the environment."""
    global _switched
    _switched = frozenset(checked(paths, f"plain={tuple(paths)}"))


@contextmanager
def switched_off(*paths: str) -> Iterator[None]:
    """Switch off fast paths for a block: what is built and which jobs are made in it take the plain paths; afterwards
    it is as before."""
    before = _switched
    switch_off({*before, *paths})
    try:
        yield
    finally:
        switch_off(before)
