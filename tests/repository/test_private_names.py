"""Private names of torch stand in one file, so that another torch is looked at there and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import apportion

ROOT = Path(apportion.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "torch_private.py")
OF_TORCH = frozenset((
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version", "_is_view", "_opt_called",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
))  # fmt: skip
"""Attributes of torch's modules, tensors and optimizers."""


def private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """The lines in which torch's private names stand, and these."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith("torch.") and any(map(private, each.name.split("."))):
                    yield node.lineno, each.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in [*(node.module or "").split("."), *(each.name for each in node.names)]:
                if private(name):
                    yield node.lineno, f"{node.module}.{name}"
        elif isinstance(node, ast.Attribute) and private(node.attr):
            written = ast.unparse(node)
            if written.startswith("torch.") or (node.attr in OF_TORCH and not written.startswith("self.")):
                yield node.lineno, written


def test_no_other_file_has_a_private_name_of_torch() -> None:
    found = {path.relative_to(ROOT).as_posix(): list(private_names(path.read_text())) for path in FILES}
    found = {path: names for path, names in found.items() if names}
    assert not found, f"put these into torch_private.py: {found}"


@pytest.mark.parametrize(
    "line",
    ["import torch._dynamo", "from torch.utils import _pytree", "from torch._C import x", "torch._foreach_add_(a)",
     "module._buffers.pop('x')", "torch.nn.modules.module._global"],
)  # fmt: skip
def test_such_a_name_is_seen(line: str) -> None:
    assert list(private_names(line))
