"""The key of a cached proof, made by rank 0 before a run: of the code, of what one update computes, and of the rows,
files and variables that a proof of this code was made on.

All of it happens in a fork of the rank, because models, losses and data sets may count their calls: the run begins as
it would without a proof.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion.core.parts import PartedDataset
from apportion.core.rng import seeded_rng
from apportion.core.strategy import State
from apportion.core.workload import Workload
from apportion.parallel.replica.step import reference
from apportion.runtime.cached_proof.forked import ForkedCallError, in_fork
from apportion.runtime.cached_proof.read_recorder import ReadRecorder
from apportion.runtime.cached_proof.store import Basis, OpenedParts, choose_rows, length, proofs_of
from apportion.runtime.proof.proof_workload import few_rows, moving, short_sequences
from apportion.runtime.proof.value_digest import seal
from apportion.runtime.proof.workload_digest import digested

SECONDS = 10.0
"""The seconds that making the key may take: a proof takes no longer."""
MOST_PARAMETERS = 100_000_000
"""The number of parameters above which an update takes longer than a proof, without being tried."""
UPDATE = "what one update on four rows computes"
MOST_BASES = 8
"""The number of different bases of one code that are looked at, the newest first."""
ROWS = 4
"""The number of rows in the update."""
SEED = 0
"""The seed of the weights, which is not the run's: another seed is another training of the same network."""
STEPS = 1000
"""The number of steps that a schedule is given, whatever the run's."""


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """What a proof holds for, and its digest."""

    key: str
    basis: Basis
    parts: Mapping[str, str]
    """The digests of what was found under the names of the basis, and of what one update has computed, by what a
    person calls each."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Makes the value from its fields as plain data, as ``asdict`` gives them."""
        return cls(**{**stored, "basis": Basis.from_json(stored["basis"])})


@dataclass(frozen=True, kw_only=True)
class ProofKey:
    """The keys under which proofs of a workload are cached."""

    code: str = ""
    """The digest of the code: the folder of its proofs."""
    code_parts: Mapping[str, str] = field(default_factory=dict)
    """The digests of the parts of the code, by what a person calls each."""
    found: tuple[Keyed, ...] = ()
    """What cached proofs of this code hold for that is now as it was then, the newest first."""
    made: Keyed | None = None
    """What a proof holds for that is made now; None where nothing of it can be reused, or ``found`` has it."""
    changed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What is not as it was for the cached proofs of this code that hold no longer, by the name of the proof."""
    seconds: float = 0.0
    """The seconds that the longest part of it takes at each start."""
    at: float = 0.0
    """The time at which ``made`` was made, in seconds since the epoch."""
    why: str | None = None
    """Why no proof is reused, nor kept for later; None where it can be."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, from which ``from_json`` makes the same value."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Makes the value that ``to_json`` has described."""
        found = tuple(Keyed.from_json(one) for one in stored["found"])
        made = None if stored["made"] is None else Keyed.from_json(stored["made"])
        return cls(**{**stored, "found": found, "made": made})


def proof_key(
    workload: Workload, dataset: Any, recorder: ReadRecorder | None, *, parameters: int = 0, reprove: bool = False
) -> ProofKey:
    """Returns the keys of a workload whose data set is open, and stops the recorder. ``recorder``: has recorded what
    was read since the process started; ``parameters``: the number of the network's; ``reprove``: a key for a new proof
    is made in any case."""
    recorder = recorder or ReadRecorder.started()
    try:
        if parameters > MOST_PARAMETERS:
            return ProofKey(why=f"an update of {parameters:,} parameters would take longer than the proof")
        # A fork reads an open file at the same place as this process; tensors are read in memory.
        reopens = recorder.holds_files() and type(dataset) is not TensorDataset
        opens = partial(_opened_again, workload) if reopens else _rows_here
        opened = partial(opens, dataset)
        return _proof_key(_KeyMaker(workload, dataset, opened, recorder), reprove=reprove)
    except (ForkedCallError, OSError) as error:
        return ProofKey(why=f"the update on four rows that tells this workload from others failed: {error}")
    finally:
        recorder.stop()


def _proof_key(maker: _KeyMaker, *, reprove: bool) -> ProofKey:
    first = in_fork(lambda: maker.first_pass(reprove=reprove), SECONDS)
    if "why" in first:
        return ProofKey(why=first["why"])
    code, found = first["code"], tuple(Keyed.from_json(one) for one in first["found"])
    known = ProofKey(code=code, code_parts=first["code_parts"], found=found, changed=first["changed"])
    if first["basis"] is None:
        return known
    basis = Basis.from_json(first["basis"])
    # Taken before anything of the new basis is digested: a file that is written from then on makes the proof useless,
    # and is found by its time.
    at = time.time()
    again = in_fork(lambda: maker.second_pass(basis), SECONDS)
    # An update that is not repeatable would never be found again by a later run, and says that something is read which
    # no key holds.
    if again["update"] != first["update"]:
        why = "the same update on four rows gave other bits when it was repeated"
        return ProofKey(why=f"{why}; a clock, or a generator that no seed sets, may be read")
    made = _keyed(code, again["update"], basis, again["found"])
    return replace(known, made=made, seconds=again["seconds"], at=at)


@dataclass(frozen=True)
class _KeyMaker:
    """Makes the parts of a key, each time from what the process has open, in a fork of it."""

    workload: Workload
    dataset: Any
    opened: Callable[[], Any]
    """Returns the rows that can be read."""
    recorder: ReadRecorder

    def first_pass(self, *, reprove: bool) -> dict[str, Any]:
        """Digests the code, and returns what the cached proofs of it hold for that is now as it was; where there is
        nothing, or where a new proof is wanted, the names of what a new one would be made on."""
        data, network, example = self._opened_network()
        # The code is digested before the update, which may change the network, its buffers, or what the loss keeps.
        code = digested(self.workload, network=network, batch=example)
        if code.digest is None:
            return {"why": f"{code.unhashable} has no digest"}
        update = update_digest(self.workload, data, _Model(self.workload, network))
        found, changed, keyed = [], dict[str, list[str]](), dict[Basis, Keyed]()
        for proof in proofs_of(code.digest):
            # Each basis is digested once, and now: nothing that an earlier run has recorded about the contents is
            # trusted.
            if proof.basis not in keyed and len(keyed) < MOST_BASES:
                keyed[proof.basis] = _keyed(code.digest, update, proof.basis, self._found(proof.basis, data))
            now = keyed.get(proof.basis)
            # The key seals the code, the bits of the update, and every name of the basis with its digest. One
            # difference in any of them gives another key.
            if now is not None and now.key == proof.key:
                found.append(asdict(now))
            elif now is not None:
                changed[proof.name] = what_changed(proof.parts, now.parts)
        basis = None
        if reprove or not found:
            rows = choose_rows(data, code.digest)
            # Libraries in C open files without an event of Python; what they still hold open is found in /proc.
            self.recorder.add_held_files()
            basis = Basis.from_reads(self.recorder.reads, rows, length(self.dataset)).to_json()
        known = {"code": code.digest, "code_parts": dict(code.parts), "changed": changed}
        return {**known, "update": update, "found": found, "basis": basis}

    def second_pass(self, basis: Basis) -> dict[str, Any]:
        """Repeats the update, and digests what a new proof is made on, in the order in which a later run does."""
        began = time.perf_counter()
        data, network, _ = self._opened_network()
        update = update_digest(self.workload, data, _Model(self.workload, network))
        return {"update": update, "found": self._found(basis, data), "seconds": time.perf_counter() - began}

    def _opened_network(self) -> tuple[Any, nn.Module, Any]:
        """Returns the rows, a new network, and the first example."""
        data = self.opened()
        with seeded_rng(SEED):
            network = self.workload.model()
            # Row 0 is read here in both forks: a data set may count its reads, and each fork has to count alike.
            return data, network, data[0]

    def _found(self, basis: Basis, data: Any) -> dict[str, str]:
        try:
            return basis.digests_now(data, self.recorder.environment)
        except (IndexError, KeyError) as error:  # rows that were there cannot be read now
            return {"the rows of the data": f"{type(error).__name__}: {error}"}


@dataclass
class _Model:
    """Makes the workload's model; the first call gets the one that was digested."""

    workload: Workload
    network: nn.Module | None = None

    def __call__(self) -> nn.Module:
        network, self.network = self.network, None
        return self.workload.model() if network is None else network


def _rows_here(dataset: Any) -> Any:
    """Returns the rows that this process can read, as a data set."""
    return OpenedParts(dataset) if isinstance(dataset, PartedDataset) else dataset


def _opened_again(workload: Workload, dataset: Any) -> Any:
    """Opens the data set once more, and of one in parts those that this process has opened."""
    if isinstance(dataset, PartedDataset):
        closed = dataset.closed()
        for part in dataset.opened:
            closed.open(part)
        return _rows_here(closed)
    with seeded_rng(workload.seed):
        return workload.open_data()


def what_changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the names of the parts that are not as they were. What an update computes follows from the others, and is
    named where it alone has changed."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [name for name in names if name != UPDATE] or names


def _keyed(code: str, update: str, basis: Basis, found: Mapping[str, str]) -> Keyed:
    names = json.dumps(basis.to_json(), sort_keys=True)
    parts = {UPDATE: update, **found}
    sealed = seal("proof", code, names, *(text for pair in parts.items() for text in pair))
    return Keyed(key=sealed.hex(), basis=basis, parts=parts)


def update_digest(workload: Workload, dataset: Any, model: Callable[[], nn.Module]) -> str:
    """Returns the digest of weights, buffers, slots and carried states after one update of one device on the CPU, in
    the run's own precision and from weights of a fixed seed. Sequences are cut short where the model takes that.
    Raises what the update raises."""
    same = moving(
        replace(
            workload,
            model=model,
            data=lambda: dataset,
            parts=None,
            seed=SEED,
            steps=STEPS,
            evaluation=None,
            compile=False,
        )
    )
    few = replace(few_rows(same, ROWS, 1, 1), steps=STEPS)
    short = short_sequences(few)
    try:
        with seeded_rng(SEED):
            short.open_data()
    except ValueError:  # the data are not sequences: a model that is built for them would be built again
        return _digest(few)
    try:
        return _digest(short)
    except Exception:  # a model that takes whole sequences alone
        return _digest(few)


def _digest(workload: Workload) -> str:
    with seeded_rng(SEED):
        return state_digest(next(iter(reference(workload))))


def state_digest(state: State) -> str:
    """Returns the digest of the bits of every tensor of a state, with its name and shape."""
    parts: list[Any] = []
    for name, tensor in sorted(state.tensors(), key=lambda pair: pair[0]):
        parts += [name, f"{tuple(tensor.shape)} {tensor.dtype}", _bits(tensor)]
    return seal("state", *parts).hex()


def _bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    raw = plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha1(raw.numpy().data if raw.numel() else b"", usedforsecurity=False).digest()
