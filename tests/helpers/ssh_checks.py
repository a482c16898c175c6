"""Checks on hosts that ssh reaches: a program that a driver on one of them runs, and what it was told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import SECONDS
from launched_checks import BATCH, MODELS, Told
from ssh_hosts import SshHosts


def checked_by_ssh(
    hosts: SshHosts, names: Sequence[str], checks: Sequence[tuple[str, str]], folder: Path, *, steps: int = 4
) -> list[Told]:
    """Has a driver on the first host check each (strategy, network) on these hosts, as ``user@name:workers``, one after
    the other; returns what it was told. Strategies and networks are those of ``launched_checks``."""
    driver = start_checks(hosts, names, checks, folder, steps=steps)
    try:
        out, err = driver.communicate(timeout=len(checks) * SECONDS)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 0, out + err
    return [Told(**told) for told in json.loads((folder / "told.json").read_text())]


def start_checks(
    hosts: SshHosts, names: Sequence[str], checks: Sequence[tuple[str, str]], folder: Path, *, steps: int = 4
) -> subprocess.Popen[str]:
    """Starts that driver, which writes ``told.json``."""
    return hosts.start(driver_command(str(hosts.launcher(*names, workers=1, threads=1)), checks, folder, steps), folder)


def driver_command(launcher: str, checks: Sequence[tuple[str, str]], folder: Path, steps: int) -> list[str]:
    """The command of a driver that makes the checks with any launcher, as it is written."""
    return [sys.executable, __file__, json.dumps([list(check) for check in checks]), str(folder), str(steps), launcher]


# The program


def main() -> None:
    """Makes the checks."""
    import cloudpickle
    import example_networks
    import launched_checks
    import networks
    import planted

    import apportion
    from apportion.core.value import parse

    for module in (networks, planted, example_networks, launched_checks):
        cloudpickle.register_pickle_by_value(module)
    everything = {**networks.cases, **example_networks.examples, **MODELS}
    launcher: Any = parse(sys.argv[4], "apportion.runtime.launch")
    told = []
    for written, name in json.loads(sys.argv[1]):
        fault = written.partition("planted:")[2]
        strategy = planted.Faulty(fault) if fault else written
        began = time.monotonic()
        print(written, name, flush=True)
        try:
            proof = apportion.check(everything[name](BATCH), strategy, steps=int(sys.argv[3]), launcher=launcher)
            found = {"proof": proof.to_json(), "raised": "", "holds": proof.holds, "sentence": proof.sentence}
        except Exception as error:
            found = {"proof": None, "raised": f"{type(error).__name__}: {error}", "holds": False, "sentence": ""}
        told.append({**found, "seconds": time.monotonic() - began})
        Path(sys.argv[2], "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
