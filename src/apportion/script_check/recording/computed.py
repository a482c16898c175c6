"""Records a digest of what a network computes in its first steps: ranks that compute the same do the same work.

Ranks of a tensor- or sequence-parallel group read the same rows, and their modules compute different parts of what
follows from them. Replicas that read the same rows compute the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from apportion.script_check.recording.recorder import Recorder
from apportion.script_check.recording.tensors import local_bytes

STEPS = 3
"""The optimizer steps for whose forwards digests are recorded."""


class ForwardDigests:
    """The digest of one forward of an outermost module: of its inputs, and of the outputs of all modules."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recording = False

    def begin_forward(self, module: Any, inputs: Any) -> None:
        """Before the forward of an outermost module."""
        self._recording = self._recorder.step < STEPS and torch.is_grad_enabled()
        if not self._recording:
            return
        self._hash = hashlib.blake2b(digest_size=8)
        found = list(tensors(inputs))
        self._inputs = hashlib.blake2b(digest_size=8)
        for tensor in found:
            self._inputs.update(local_bytes(tensor))
        self._rows = len(found[0]) if found and found[0].dim() else None

    def add_output(self, output: Any, outermost: bool) -> None:
        """After the forward of a module."""
        if not self._recording or torch.compiler.is_compiling():
            return
        for tensor in tensors(output):
            self._hash.update(local_bytes(tensor))
        if outermost:
            self._recording = False
            self._recorder.emit(
                "computed", inputs=self._inputs.hexdigest(), outputs=self._hash.hexdigest(), rows=self._rows
            )


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tree of lists, tuples, dicts and objects that are mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)
