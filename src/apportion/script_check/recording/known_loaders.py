"""The loaders that a script has made, each known by the line that made it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from apportion.script_check.recording.constants import Constants
from apportion.script_check.recording.recorder import Recorder


class Loaders:
    """The loaders of this rank, in the order in which the script makes them."""

    def __init__(self, recorder: Recorder, constants: Constants) -> None:
        self.recorder, self._constants = recorder, constants
        self._made = dict[str, int]()

    def key(self, loader: Any) -> str:
        """Returns by what name a loader, or a sampler that is used as one, is known."""
        known = loader.__dict__.get("_apportion_key")
        if known is None:
            site = self.recorder.site()
            self._made[site] = number = self._made.get(site, 0) + 1
            known = site if number == 1 else f"{site} ({number})"
            loader.__dict__["_apportion_key"] = known
            loader.__dict__["_apportion_iterations"] = 0
        return str(known)

    def note_loader(self) -> None:
        """The script reads from a loader: what it computes with needs no other record."""
        self._constants.has_loader = True

    def begin(self, loader: DataLoader[Any], length: int | None, full: int | None) -> tuple[str, int]:
        """Record that an iteration begins; returns the loader's name and the iteration's number, from 0."""
        self.note_loader()
        key = self.key(loader)
        number = loader.__dict__["_apportion_iterations"]
        loader.__dict__["_apportion_iterations"] = number + 1
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self.recorder.emit(
            "iteration",
            loader=key,
            number=number,
            length=length,
            full=full,
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            rows=length_of(loader.dataset),
            sampler=type(sampler).__name__,
            shuffles=bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))),
            replicas=getattr(sampler, "num_replicas", None),
        )
        return key, number


def length_of(sized: Any) -> int | None:
    """Returns the length of a data set or sampler; None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # such as the sampler of an iterable data set
        return None
