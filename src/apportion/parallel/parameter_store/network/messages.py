"""The kinds of messages between workers and servers, and between servers, with what their numbers say.

::

    worker                            server of a range                        its copy on another host
      HELLO range, worker, incarnation  ---->
                               <----  WELCOME incarnation, applied, staged
      STAGE number, gradient   ---->  kept                  STAGE, as it comes  ---->  kept
                               <----  STAGED                                   <----  STAGED
      (every range has it: nothing stops the push any more)
      APPLY number, pull       ---->  applied, run by run   ORDER_APPLY         ---->  applied in the same order
                               <----  APPLIED, weights                         <----  ACK

A push is in no shard before every range has it, and an answer names no version that the copy has not received.
So whatever dies, a push that has begun to be applied can be applied to the rest, and no bits are lost that anybody saw.
"""

from __future__ import annotations

from enum import IntEnum


class StoreMessage(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """Asks to be answered: the range, the worker (CONTROL: no worker's), the incarnation (0: a new one is wanted)."""
    WELCOME = 2
    """Tells the incarnation, the numbers of the last push that is applied and of the one that is staged, and the
    batches in the weights."""
    NOT_HERE = 3
    """Says that this process does not answer for the range."""
    INCARNATION_OVER = 4
    """Says that another process has taken the worker's place, or that this one was given up."""
    STAGE = 5
    """Brings a push: its number, and how many batches it is of; its tensors follow."""
    STAGED = 6
    """Says that the push of this number is there whole."""
    APPLY = 7
    """Asks to apply the push of this number; and whether the weights are wanted."""
    APPLIED = 8
    """Tells how many pushes the range has had, and the batches in the weights; where they are wanted weights, buffers
    and versions follow."""
    PULL = 9
    """Asks for the weights."""
    PULLED = 10
    """Tells the batches in the weights; weights, buffers and versions follow."""
    TAKE = 11
    """Asks for a batch: of how many in all, whether to wait for those that others have, and the pushes by which the
    worker may be ahead (-1: any); and the last batch that it was given (-1: none), which tells whether an answer was
    lost."""
    TICKET = 12
    """Tells the batch (-1: none), and the batches in the weights."""
    FREEZE = 13
    """Asks that nothing changes until THAW, or the end of the conversation."""
    FROZEN = 14
    """Says that nothing changes; the number of each worker's last push that is applied follows."""
    CATCH_UP = 15
    """Asks to apply what a worker has staged, up to this number."""
    DONE = 16
    """Says that what was asked is done."""
    READ = 17
    """Asks for the contents of the range."""
    BLOB = 18
    """Tells how many bytes follow."""
    LOG = 19
    """Asks for the log of the range."""
    PUT = 20
    """Brings other contents: how many bytes follow, and the batches in the weights."""
    THAW = 21
    """Asks that the range may change again."""
    FENCE = 22
    """Names a worker, the first incarnation that may speak for it, and whether its process is given up."""
    FENCED = 23
    """Tells the numbers of the last push that is applied, and of the one that is staged."""
    DISCARD = 24
    """Asks to drop what a worker has staged."""
    BYE = 25
    """Says that the worker has ended."""
    LEAVE = 26
    """Says that the worker takes no batches for now; and whether no worker is to be given any."""
    JOIN = 30
    """Asks to become the copy of a range: the range, and the rank."""
    COPY_STAGE = 31
    """Opens the conversation in which the gradients of a range's worker are handed on."""
    ACK = 32
    """Says that the copy knows of the order."""
    ORDER_APPLY = 33
    """Has the copy apply a push: the worker, and the number."""
    ORDER_INCARNATION = 34
    """Has the copy note the incarnation of a worker."""
    ORDER_OPEN = 35
    """Has the copy note that a worker has a batch."""
    ORDER_BACK = 36
    """Has the copy hand the batches of a worker out again."""
    ORDER_ENDED = 37
    """Has the copy note that a worker takes no more batches."""
    ORDER_DISCARD = 38
    """Has the copy drop what a worker has staged."""
    ORDER_PUT = 39
    """Has the copy begin with everything that the server has: how many bytes follow."""
    ORDER_END = 40
    """Tells the copy that the run is over."""
    ASK = 50
    """Asks rank 0 who answers for a range."""
    ENTER = 51
    """Tells rank 0 that the process of a server has begun: its range, and its rank."""
    TAKE_OVER = 52
    """Asks rank 0 to answer in the place of a lost server: the range, the rank, the epoch."""
    DROP = 53
    """Asks rank 0 to go on without the copy: the range, the rank, the epoch."""
    ADD = 54
    """Asks rank 0 to have a copy: the range, the rank, the epoch, the rank of the copy."""
    VIEW = 55
    """Tells the epoch, the rank that answers, the rank of its copy (NO_RANK: none), and whether the range is lost."""


CONTROL = -1
"""The number in place of a worker's, in a conversation that belongs to no worker."""
NO_RANK = -1
MOST_BATCHES = 1 << 16
"""The most batches of one push."""
PIECE_BYTES = 4 << 20
"""The bytes of a gradient that are handed on to the copy while more arrive."""
REPLY_SECONDS = 300.0
"""The seconds without a byte after which a server that does not answer is given up."""
