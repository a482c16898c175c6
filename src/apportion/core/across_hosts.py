"""What a strategy says of runs on several hosts. Each answer stands for a strategy that says nothing of it."""

from __future__ import annotations

from typing import ClassVar


class AcrossHosts:
    """The part of the interface of a strategy that is about several hosts."""

    survives: ClassVar[bool]
    """Does the strategy survive the loss of a worker on one host? Each says so itself."""

    @property
    def referenced_across_hosts(self) -> bool:
        """True where ``reference`` says what ranks on several hosts compute, too; False where what hosts send each
        other is changed on its way."""
        return True

    @property
    def recovers_across_hosts(self) -> bool:
        """True where those that are left of a run on several hosts go on with what they have after the loss of a
        worker, too; False where what survives a worker lies in memory that all of them share, so that all begin again
        from the last checkpoint."""
        return self.survives

    @property
    def deals_parts(self) -> bool:
        """Does each rank open its own parts alone of a data set in parts, so that they may lie on several hosts? False:
        every rank opens all of them, which is possible on one host."""
        return False

    @property
    def comes_and_goes(self) -> bool:
        """May ranks that others have started come and go while the training goes on? Then they do not meet before it,
        rank 0 alone saves and evaluates, and a rank that begins is told by it where the training is."""
        return False
