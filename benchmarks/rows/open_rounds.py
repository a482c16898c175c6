"""Rounds of local_sgd that close at their deadline, while hosts come and go: for `several_hosts.py`."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hosts import cannot, several_hosts
from parked import SideFailed, environment

from apportion.parallel.averaging.reference import check_log
from apportion.parallel.averaging.round_log import RoundLog

SIDE = str(Path(__file__).resolve().parents[1] / "sides" / "open_rounds_side.py")
EVERY_SECONDS, AWAY_SECONDS = 20.0, 6.0
"""How often a host goes, and for how long."""
MOST_SECONDS = 900.0
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class ComingAndGoing:
    """The loss after some rounds over four hosts, two of which come and go, against that of the two steady ones."""

    what: str
    strategy: str
    deadline: float
    rounds: int
    rate: float
    unit: str = "loss"

    def measure(self):
        """What `table.result` takes: the losses and their ratio, and what the log says of the rounds."""
        if (why := cannot()) is not None:
            raise SideFailed(why)
        ours, log, gone = self._run(4)
        peer, steady, _ = self._run(2)
        check_log(log, 0)
        returns = log.returns()
        return {
            "ours": ours,
            "peer": peer,
            "ratio": peer / ours,
            "rounds": len(log.rounds),
            "longest round": log.longest,
            "longest round of the steady hosts": steady.longest,
            "deadline": self.deadline,
            "killed": gone.count("killed"),
            "frozen": gone.count("frozen"),
            "returns": len(returns),
            "returns in the next round": sum(first == at + 1 for _, at, first in returns),
            "rounds by rank": [len(log.took_part(rank)) for rank in range(4)],
        }

    def _run(self, many):
        """(loss, log, what was done to the hosts from the third on) of a run over so many."""
        given = [SIDE, "{folder}", str(self.rounds), self.strategy]
        with several_hosts((1,) * many, self.rate) as hosts, tempfile.TemporaryDirectory() as folder:
            port, command = hosts.port(), [sys.executable, *(part.format(folder=folder) for part in given)]

            def start(rank):
                error = open(Path(folder, f"errors{rank}"), "a")  # noqa: SIM115 (the process has it)
                where = environment() | hosts.environment(rank, many, port)
                return subprocess.Popen(hosts.command(rank, command), env=where, stdout=error, stderr=error)

            running = [start(rank) for rank in range(many)]
            try:
                gone = self._disturb(running, start, Path(folder)) if many > 2 else []
                running[0].wait(MOST_SECONDS)
                if running[0].returncode != 0:
                    raise SideFailed(Path(folder, "errors0").read_text().strip()[-400:])
                return json.loads(Path(folder, "loss").read_text()), RoundLog.load(Path(folder, "log")), gone
            finally:
                for process in running:
                    process.kill()
                    process.wait()

    def _disturb(self, running, start, folder):
        """Until rank 0 has ended: kill one of the last two hosts' processes and start it again, freeze the other's, in
        turn."""
        while not (folder / "rounds").exists() and running[0].poll() is None:
            time.sleep(LOOK_SECONDS)
        gone = []
        for turn in itertools.count():
            if not self._wait(running[0], EVERY_SECONDS - AWAY_SECONDS if turn else EVERY_SECONDS / 2):
                return gone
            killed, frozen = (2, 3) if turn % 2 == 0 else (3, 2)
            running[killed].kill()
            running[killed].wait()
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[frozen].pid, signal.SIGSTOP)
            goes_on = self._wait(running[0], AWAY_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[frozen].pid, signal.SIGCONT)
            if not goes_on:
                return gone
            running[killed] = start(killed)
            gone += ["killed", "frozen"]

    def _wait(self, process, seconds):
        """Waits so long; returns whether the process still runs."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            time.sleep(LOOK_SECONDS)
        return process.poll() is None
