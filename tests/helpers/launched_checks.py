"""Checks in ranks that are running already, on one host or on what counts as several: a program that each rank runs,
and what all of them have told."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import SECONDS, finish, places, start

BATCH = 13
"""The rows of a batch: no number of ranks divides it, and the last batch of one row leaves ranks without any."""


@dataclass(frozen=True)
class Told:
    """What one rank was told of one check."""

    proof: Mapping[str, Any] | None
    """The proof as plain data; None where there is none."""
    raised: str
    """The type and the text of the error; "" where there is none."""
    holds: bool
    sentence: str
    seconds: float
    """The seconds that it took."""

    @property
    def worst(self) -> float:
        """The largest difference in float64, as a share of the largest change."""
        assert self.proof is not None
        assert self.proof["rounds"][0]["precision"] == "float64"
        return float(self.proof["rounds"][0]["worst"]["relative"])


def checked(
    hosts: Sequence[int],
    checks: Sequence[tuple[str, str]],
    folder: Path,
    *,
    steps: int = 4,
    lost: bool = False,
    within: Sequence[tuple[Sequence[str], Mapping[str, str]]] = (),
) -> list[list[Told]]:
    """Has so many ranks on each host check each (strategy, network), one after the other; returns what each rank was
    told, by check. A strategy may be ``planted:FAULT``, and a network the name of one of ``MODELS`` here.

    ``lost``: a rank does not live to tell. ``within``: of each rank the words by which it is started on its host, and
    its variables there, where the hosts are not this one.
    """
    program = [sys.executable, __file__, json.dumps([list(check) for check in checks]), str(folder), str(steps)]
    found = within or [((), place) for place in places(*hosts)]
    started = [start([*words, *program], **place) for words, place in found]
    if lost:
        for process in started:
            process.communicate(timeout=SECONDS)
    else:
        finish(started)
    paths = [path for rank in range(len(found)) if (path := folder / f"told-{rank}.json").exists()]
    ranks = [json.loads(path.read_text()) for path in paths]
    return [[Told(**told[number]) for told in ranks] for number in range(len(checks))]


# The program


def main() -> None:
    """Makes the checks as one rank."""
    import time

    import cloudpickle
    import example_networks
    import networks
    import planted
    import torch

    import apportion

    torch.set_num_threads(1)
    for module in (networks, planted, example_networks, sys.modules["__main__"]):
        cloudpickle.register_pickle_by_value(module)
    everything = {**networks.cases, **example_networks.examples, **MODELS}
    told = []
    for written, name in json.loads(sys.argv[1]):
        fault = written.partition("planted:")[2]
        strategy = planted.Faulty(fault) if fault else written
        began = time.monotonic()
        try:
            workload = everything[name](BATCH)
            proof = apportion.check(workload, strategy, steps=int(sys.argv[3]), launcher=apportion.env())
            found = {"proof": proof.to_json(), "raised": "", "holds": proof.holds, "sentence": proof.sentence}
        except Exception as error:
            found = {"proof": None, "raised": f"{type(error).__name__}: {error}", "holds": False, "sentence": ""}
        told.append({**found, "seconds": time.monotonic() - began})
    Path(sys.argv[2], f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))


def _failing(how: str) -> Any:
    """A network that fails in the second rank alone: it is not built there, or in its third step it raises, or its
    process is killed."""

    def make(batch_size: int) -> Any:
        import networks
        from torch import nn

        class Failing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.calls = networks.perceptron(), 0
                if how == "is not built" and os.environ["RANK"] == "1":
                    raise RuntimeError("not here")

            def forward(self, x: Any) -> Any:
                self.calls += 1
                if os.environ["RANK"] == "1" and self.calls == 3:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("a bad row")
                return self.net(x)

        return networks.workload(Failing, networks.tabular(batch_size, 10), batch_size)

    return make


MODELS = {how: _failing(how) for how in ("raises", "killed", "is not built")}
"""Networks that fail."""

if __name__ == "__main__":
    main()
