"""What can go wrong, by who has to act on it.

A ``ValueError`` is the user's mistake (exit status 2): it states the value, the rule and the cure.
An ``ApportionError`` is something that could not be done: a worker, a disk, an address (exit status 3; 1 for
those whose answer is "no").
An ``AssertionError`` is a defect of this package.
``ToldToEnd`` is none of these: a signal has asked the process to end, and the run is saved (exit status 128 and the
number of the signal).
"""

from __future__ import annotations


class ApportionError(Exception):
    """Something that was asked for correctly could not be done."""


class UnknownArgument(ValueError, TypeError):
    """A class or a function was given an argument that it does not have, or not given one that it needs. It is a
    TypeError, too, as Python's own error for that is."""


class WorkerFailed(ApportionError):
    """A worker raised, died or stopped answering.

    Where it raised, ``traceback`` is that rank's own, as text, and ``where`` the user's line in it
    (``file.py:12 in forward: return 1 / 0``); else None.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, traceback: str | None = None, where: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.where = where
        if where is not None:
            self.add_note(f"at {where}")
        if traceback is not None:
            self.add_note(f"rank {rank}'s own traceback:\n{traceback}")


class NotProved(Exception):
    """A run must not go on as it is, and may go on in another way: for who chooses one. Never leaves the package."""

    def __init__(self, sentence: str, *, proved: bool, plain: tuple[str, ...]) -> None:
        super().__init__(sentence)
        self.proved, self.plain = proved, plain
        """Was it shown with these fast paths switched off?"""


class Disproved(ApportionError):
    """A strategy does not train the network that it must, or that could not be shown where it had to be: the answer is
    "no" (exit status 1), and nothing was trained."""


class NotVerified(ApportionError):
    """An exported file does not compute what it must: the answer is "no" (exit status 1), and no file is left."""


class ProgramMissing(ApportionError):
    """A program of another package is needed, and is not installed."""


class NotFinite(WorkerFailed):
    """The loss, or a weight, is no longer a finite number, and the policy says that the run ends there (exit status
    1)."""


class PeerLost(ApportionError):
    """A collective failed because another rank is gone: a symptom; the cause is that rank's exit."""


class MembershipChanged(ApportionError):
    """A worker has died, or one has been replaced: what this one waited for will not come. It rejoins, and goes on from
    the last update."""


class StateLost(ApportionError):
    """No rank that is left has the state that the run had reached: it died with those that were lost. The run begins
    again, from its last checkpoint."""


class RanksDiffer(ApportionError):
    """What all ranks must hold alike they do not: the answer to whether this is one network is "no" (exit status 1)."""


class CheckpointError(ApportionError):
    """A checkpoint or a run directory could not be written, or cannot be trusted."""


class ToldToEnd(SystemExit):
    """The run has been ended by SIGTERM, by SIGHUP, or by what Slurm sends before the end of a job; what could be
    saved is saved, and everything that the run had started has ended. A program that does not catch it ends with the
    exit status that a shell gives for the signal: 128 and its number, 143 for SIGTERM and 129 for SIGHUP."""

    def __init__(self, number: int, cause: str) -> None:
        """Takes the number of the signal, and in words which process was signalled, and by what."""
        super().__init__(128 + number)
        self.number, self.cause = number, cause


class Superseded(CheckpointError):
    """The run was started again elsewhere, or another rank writes its run directory now: this one writes nothing
    more."""
