"""The effects of a forward beside what it returns: it changes modules, and draws random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from apportion.core.rng import RngState
from apportion.core.torch_private import pytree, version_of

HOLDERS = ("_parameters", "_buffers", "_modules")
_DEPTH = 3
"""The depth to which nested lists and dicts are looked into."""
_CONSTANT = "_tensor_constant"
"""The name that torch.fx gives to what it puts on a module for a graph."""


class Before:
    """The contents of modules, to be compared with what the modules have later, and put back. ``whole``: the numbers of
    parameters without gradient are put back, too; else these are only compared."""

    def __init__(self, root: nn.Module, *, whole: bool = True) -> None:
        self._frozen = [
            (name, p, version_of(p), p.data_ptr(), p.detach().clone() if whole else None)
            for name, p in root.named_parameters()
            if type(p) is nn.Parameter and not p.requires_grad and not p.is_inference()
        ]
        self._kept: list[tuple[str, str, Any, Any]] = []
        for path, module in root.named_modules():
            own = vars(module)
            self._kept.append((path, "", own, dict(own)))
            for name, value in own.items():
                self._kept += [(path, name, x, _content(x)) for x in _inside(value, tensors=name != "_buffers")]

    def put_back(self) -> tuple[list[str], bool]:
        """Put the contents back; returns the names of what was changed, and whether a tensor of the trace had stayed
        there."""
        names, stays = set[str](), False
        for path, name, x, content in self._kept:
            changed = _changed(x, content)
            if not changed:
                continue
            own = [name] if name and name not in HOLDERS else changed
            names |= {f"{path}.{each}".lstrip(".") for each in own}
            stays = stays or any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(_content(x)))
            _put(x, content)
        for path, p, version, pointer, kept in self._frozen:
            moved = version_of(p) != version or p.data_ptr() != pointer
            if moved or (kept is not None and not torch.equal(p, kept)):
                names.add(path)
                put_into(p, kept, pointer)
        return sorted(names), stays


def _inside(value: Any, *, tensors: bool, depth: int = _DEPTH) -> Iterator[Any]:
    """The lists, dicts and sets in a value, and its tensors that are not parameters."""
    if isinstance(value, list | dict) and depth:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(each, tensors=tensors, depth=depth - 1)
    elif isinstance(value, set) or (tensors and type(value) is Tensor and not value.is_inference()):
        yield value


def _content(x: Any) -> Any:
    if isinstance(x, Tensor):
        return version_of(x), x.detach().clone()
    return dict(x) if isinstance(x, dict) else list(x) if isinstance(x, list) else set(x)


def _changed(x: Any, content: Any) -> list[str]:
    """The keys whose values have changed; for a value without keys, one empty name if it has changed."""
    if isinstance(x, dict):
        keys = (k for k in {**content, **x} if not str(k).startswith(_CONSTANT))
        return [str(k) for k in keys if k not in x or k not in content or not _same(x[k], content[k])]
    if isinstance(x, list):
        same = len(x) == len(content) and all(map(_same, x, content))
    else:
        same = version_of(x) == content[0] if isinstance(x, Tensor) else x == content
    return [] if same else [""]


def _same(now: Any, before: Any) -> bool:
    plain = isinstance(now, bool | int | float | str) and type(now) is type(before)
    return now is before or (plain and bool(now == before))


def _put(x: Any, content: Any) -> None:
    if isinstance(x, Tensor):
        with torch.no_grad():
            x.copy_(content[1])
    elif isinstance(x, list):
        x[:] = content
    else:
        constants = {k: v for k, v in x.items() if str(k).startswith(_CONSTANT)} if isinstance(x, dict) else ()
        x.clear()
        x.update(content)
        x.update(constants)


def put_into(tensor: Tensor, kept: Tensor | None, pointer: int) -> None:
    """Put these numbers into a tensor, in its memory at this address: where ``.data`` was given other memory, others
    may use that."""
    with torch.no_grad():
        if kept is None:
            return
        if tensor.data_ptr() == pointer:
            tensor.copy_(kept)
        else:
            tensor.data = kept


def draws() -> tuple[Any, ...]:
    """The states of the random generators."""
    gpus = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    return *RngState.now().fingerprint(), gpus
