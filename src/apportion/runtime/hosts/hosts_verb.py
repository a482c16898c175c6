"""A verb that the ranks of several hosts carry out together, seen from the driver: it gets what rank 0 returns.

Every rank calls the verb as it would under torchrun. What ranks tell is read as JSON of bounded length, and nothing of
it is unpickled.
"""

from __future__ import annotations

from typing import Any

from apportion.errors import ApportionError, WorkerFailed
from apportion.runtime.hosts.frames import MOST_JSON, Message
from apportion.runtime.hosts.host_failures import host_of, rank_at_host, unresumed
from apportion.runtime.hosts.started_hosts import LOOK_SECONDS, Shipment, StartedHosts
from apportion.runtime.launch.ssh import Ssh
from apportion.runtime.launched.outcome import RESULT, error_of
from apportion.runtime.supervisor.decisions import Finish, GoOn, Stop, failure
from apportion.runtime.supervisor.interrupts import Interrupts


class HostsVerb(StartedHosts):
    """One verb on several hosts."""

    def __init__(self, launcher: Ssh, shipment: Shipment) -> None:
        super().__init__(launcher, shipment)
        self._result: Message | None = None
        """What rank 0 has told of its result."""
        self._errors: dict[int, Message] = {}
        """What ranks have told of the errors that the verb has raised there, by rank."""

    def value(self) -> Any:
        """Returns the value of the verb, which is plain JSON. Raises what rank 0 has raised; WorkerFailed where a rank
        or a host is lost, ApportionError where a host cannot take part. Ctrl-C ends the ranks."""
        interrupts = Interrupts(lambda: "")
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
        allowed = self._allowances()
        pause: float = LOOK_SECONDS
        while True:
            news = self._next(pause)
            if news is not None:
                self._take(*news)
            self._refuse_silent(allowed, news)
            action = self._action()
            if isinstance(action, Finish):
                self._hear_out(range(sum(self._counts)))
                return self._told()
            if isinstance(action, Stop):
                self._hear_out([action.rank])
                raise self._error(action)
            pause = LOOK_SECONDS
            if isinstance(action, GoOn) and action.seconds is not None:
                pause = min(pause, action.seconds)

    def _take(self, number: int, message: Message | bytes | None) -> None:
        """Takes what an agent tells. Raises ApportionError where the agent has ended."""
        self._refuse_ended(number, message)
        if not isinstance(message, dict):
            return
        if message["kind"] == "output":
            self._print(number, message)
        elif message["kind"] == RESULT and message["rank"] == 0:
            self._result = message
        elif message["kind"] == "raised" and "error" in message:
            self._errors[message["rank"]] = message["error"]
        self._note(message, 0)

    def _told(self) -> Any:
        if self._result is None:
            raise ApportionError(
                f"host {self._agents[0].host}: rank 0 has ended without a result, or it has more than "
                f"{MOST_JSON >> 20} MB: use fewer steps"
            )
        return self._result["value"]

    def _error(self, stop: Stop) -> Exception:
        """Returns what a decision to stop is raised as, with the host of the rank that is the cause."""
        told = self._errors.get(stop.rank)
        error = failure(stop) if told is None else error_of(told)
        if not isinstance(error, WorkerFailed) or error.rank is None or not 0 <= error.rank < sum(self._counts):
            return error
        host = self._agents[host_of(error.rank, self._counts)].host
        cause = rank_at_host(str(error), error.rank, host, str(self._shipment.root))
        return type(error)(cause, rank=error.rank, traceback=error.traceback, where=error.where)
