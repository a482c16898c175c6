"""A verb that the ranks of several hosts carry out together, seen from the driver: it gets what rank 0 returns.

Every rank calls the verb as it would under torchrun. What ranks tell is read as JSON of bounded length, and nothing of
it is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from apportion.core.policy import Policy
from apportion.errors import ApportionError, WorkerFailed
from apportion.runtime.agents.hosts_launcher import HostsLauncher
from apportion.runtime.hosts.frames import MOST_JSON, Message
from apportion.runtime.hosts.host_failures import rank_at_host, unresumed
from apportion.runtime.hosts.hosts_pool import HostsPool
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, WORDS_SECONDS, Shipment, StartedHosts
from apportion.runtime.launched.outcome import RESULT, error_of
from apportion.runtime.supervisor.failures import Finish, GoOn, Stop, failure
from apportion.runtime.supervisor.interrupts import Interrupts


class HostsVerb(StartedHosts):
    """One verb on several hosts."""

    def __init__(self, launcher: HostsLauncher, shipment: Shipment) -> None:
        super().__init__(launcher, shipment)
        self._result: Message | None = None
        """What rank 0 has sent of its result."""
        self._errors: dict[int, Message] = {}
        """What ranks have sent of the errors that the verb has raised there, by rank."""

    def value(self) -> Any:
        """Returns the value of the verb, which is plain JSON. Raises what rank 0 has raised; WorkerFailed where a rank
        or a host is lost, ApportionError where a host cannot take part. Ctrl-C ends the ranks."""
        interrupts = Interrupts(lambda interrupt: "", notices=False)  # there is nothing to save
        try:
            interrupts.install()
            interrupts.hold()
            self._start_agents()
            interrupts.release()
            self._begin()
            return self._heard()
        except WorkerFailed as error:
            cause = unresumed(str(error))
            raise type(error)(cause, rank=error.rank, traceback=error.traceback, where=error.where) from None
        finally:
            interrupts.hold()
            self._close()
            interrupts.restore()

    def _heard(self) -> Any:
        """Hears the ranks until every one of them has finished."""
        pool = self._make_pool(Policy())
        pause: float = LOOK_SECONDS
        while True:
            for rank, message in pool.hear(pause):
                self._take(rank, message)
            action = pool.action()
            if isinstance(action, Finish):
                self._hear_out(pool, range(pool.ranks))
                return self._reported_value()
            if isinstance(action, Stop):
                self._hear_out(pool, [action.rank])
                raise self._error(action, pool)
            pause = LOOK_SECONDS
            if isinstance(action, GoOn) and action.seconds is not None:
                pause = min(pause, action.seconds)

    def _hear_out(self, pool: HostsPool, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for other, message in pool.hear_out(rank, WORDS_SECONDS):
                self._take(other, message)

    def _take(self, rank: int, message: Message) -> None:
        """Takes what a rank tells."""
        if message["kind"] == "output":
            self._print(rank, message)
        elif message["kind"] == "warned":
            self._print(rank, {**message, "lines": [f"warning: {message['text']}"]})
        elif message["kind"] == "notice":
            raise WorkerFailed(str(message["cause"]))
        elif message["kind"] == RESULT and rank == 0:
            self._result = message
        elif message["kind"] == "raised" and "error" in message:
            self._errors[rank] = message["error"]

    def _reported_value(self) -> Any:
        if self._result is None:
            raise ApportionError(
                f"host {self._agents[0].host}: rank 0 has ended without a result, or it has more than "
                f"{MOST_JSON >> 20} MB: use fewer steps"
            )
        return self._result["value"]

    def _error(self, stop: Stop, pool: HostsPool) -> Exception:
        """Returns what a decision to stop is raised as, with the host of the rank that is the cause."""
        known = self._errors.get(stop.rank)
        error = failure(stop) if known is None else error_of(known)
        if not isinstance(error, WorkerFailed) or error.rank is None or not 0 <= error.rank < sum(self._counts):
            return error
        cause = rank_at_host(str(error), error.rank, pool.host_of(error.rank), str(self._shipment.root))
        return type(error)(cause, rank=error.rank, traceback=error.traceback, where=error.where)
