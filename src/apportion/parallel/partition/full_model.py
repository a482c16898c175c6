"""The facts about the plain model that are kept once it is cut, and the change of its optimizers into a part's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from apportion.core.fingerprint import fingerprint
from apportion.core.python_state.leaves import refuse_other_extra_state
from apportion.core.sampler import Sampler
from apportion.core.workload import Workload
from apportion.parallel.partition.tensor_shards import TensorShard


class FullModel:
    """The facts about the plain model that are kept once it is cut."""

    def __init__(self, model: nn.Module, workload: Workload, sampler: Sampler) -> None:
        names = dict(model.named_parameters(remove_duplicate=False))
        firsts: dict[Any, str] = {p: name for name, p in model.named_parameters()}
        refuse_other_extra_state(model, "a strategy that divides the network")
        state = model.state_dict()
        layers = dict(model.named_modules(remove_duplicate=False))
        buffers: dict[Any, str] = {}
        for key in state:
            path, _, own = key.rpartition(".")
            buffers.setdefault((id(layers.get(path, key)), own), key)
        self.first = {
            key: firsts[names[key]] if key in names else buffers[id(layers.get(path, key)), own]
            for key, (path, _, own) in ((key, key.rpartition(".")) for key in state)
        }
        """The first name of each key of the state: that of its parameter, or of its layer's buffer."""
        self.shapes = {key: tuple(t.shape) for key, t in state.items()}
        self.dtypes = {key: t.dtype for key, t in state.items()}
        self.parameters: int = sum(p.numel() for p in firsts)
        self.sparse = {
            firsts[m.weight]
            for m in model.modules()
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and m.weight in firsts
        }
        self.trained: dict[str, str] = {}
        """The name of the optimizer that each trained parameter belongs to."""
        self._names = firsts
        self._workload, self._sampler = workload, sampler
        self._mark = fingerprint(workload, model, {}, sampler)
        self._groups: dict[str, list[int]] = {}

    def pieces(self, model: nn.Module, given: Mapping[str, TensorShard]) -> dict[str, Any]:
        """Return a part's pieces as JSON, by the plain names that parameters go by first; a tensor without a piece is
        whole."""
        gathered: dict[str, Any] = {}
        for key, tensor in model.state_dict().items():
            assert key in self.first, f"{key} is not a tensor of the plain model"
            piece, name = given.get(key) or TensorShard(tuple(tensor.shape)), self.first[key]
            assert piece.shape == self.shapes[key], f"{key} is {self.shapes[key]}, not {piece.shape}"
            assert piece.local_shape == tensor.shape, (
                f"the piece of {key} is {piece.local_shape}, not {tuple(tensor.shape)}"
            )
            if key in given or name not in gathered:
                gathered[name] = piece.plain()
        return gathered

    def move(self, owner: str, optimizer: Optimizer, model: nn.Module, pieces: Mapping[str, TensorShard]) -> None:
        """Give an optimizer that was made for the plain model the part's parameters instead; the groups stay, also
        those that are empty then."""
        own = {self.first[name]: (p, pieces.get(name)) for name, p in model.named_parameters()}
        names = self._names
        self._groups[owner] = [len(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            entries: list[Any] = []
            for p in group["params"]:
                name = names.get(p)
                if name is not None and p.requires_grad:
                    self.trained[name] = owner
                if name is None or name in own:  # other tensors are refused with the replica
                    entries.append((name, p if name is None else own[name][0]))
            group["params"] = [p for _, p in entries]
            if "param_names" in group:
                group["param_names"] = [name for name, _ in entries]
        slots: dict[Any, Any] = dict(optimizer.state)
        optimizer.state.clear()
        for p, kept in slots.items():  # Adagrad has some before its first update
            if names[p] in own:
                mine, piece = own[names[p]]
                cut = {k: piece.slice_of(t).clone() if _like(t, p) else t for k, t in kept.items()} if piece else kept
                optimizer.state[mine] = cut

    def forget(self) -> None:
        """Drop the references to the plain model's tensors."""
        self._names = {}

    def fingerprint(self, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
        """Return the fingerprint of the plain model and of the optimizers as they were made for it."""
        found = fingerprint(self._workload, nn.Module(), optimizers, self._sampler)
        for owner, lengths in self._groups.items():
            for i, length in enumerate(lengths):
                found[f"optimizer {owner}".rstrip()][f"group {i}"]["parameters"] = length
        return found | {key: self._mark[key] for key in ("parameters", "buffers")}


def _like(value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape
