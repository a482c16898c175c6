"""The kinds of messages between workers and servers, and between servers. Their numbers follow each name.

::

    worker                            server of a range                        its copy on another host
      HELLO range, seat, life  ---->
                               <----  WELCOME life, applied, staged
      STAGE number, gradient   ---->  kept                  STAGE, as it comes  ---->  kept
                               <----  STAGED                                   <----  STAGED
      (every range has it: nothing stops the push any more)
      APPLY number, pull       ---->  applied, run by run   ORDER_APPLY         ---->  applied in the same order
                               <----  APPLIED, weights                         <----  ACK

A push is in no shard before every range has it, and an answer tells of no version that the copy has not been told of.
So whatever dies, a push that has begun to be applied can be applied to the rest, and no bits are lost that anybody saw.
"""

from __future__ import annotations

from enum import IntEnum


class Say(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """range, seat (CONTROL: no worker's), life (0: a new one is asked for)"""
    WELCOME = 2
    """life, number of the last push that is applied, number of the one that is staged, batches in the weights"""
    NOT_HERE = 3
    LIFE_OVER = 4
    STAGE = 5
    """number, batches; then the tensors of a gradient"""
    STAGED = 6
    """number"""
    APPLY = 7
    """number, whether weights are wanted"""
    APPLIED = 8
    """how many pushes the range has had, batches in the weights; then weights, buffers and versions"""
    PULL = 9
    PULLED = 10
    """batches in the weights; then weights, buffers and versions"""
    TAKE = 11
    """batches in all, whether to wait for those that others have, pushes by which to be ahead (-1: any)"""
    TICKET = 12
    """batch (-1: none), batches in the weights"""
    FREEZE = 13
    FROZEN = 14
    """then, for each seat, the number of its last push that is applied"""
    CATCH_UP = 15
    """seat, number"""
    DONE = 16
    READ = 17
    BLOB = 18
    """bytes; then those"""
    LOG = 19
    PUT = 20
    """bytes, batches in the weights; then the bytes"""
    THAW = 21
    FENCE = 22
    """seat, the first life that may speak, whether its process is given up"""
    FENCED = 23
    """number of the last push that is applied, number of the one that is staged"""
    DISCARD = 24
    """seat"""
    BYE = 25
    LEAVE = 26
    """whether nobody is to be given a batch any more"""
    JOIN = 30
    """range, rank"""
    COPY_STAGE = 31
    """range, seat"""
    ACK = 32
    ORDER_APPLY = 33
    """seat, number"""
    ORDER_LIFE = 34
    """seat, life"""
    ORDER_OPEN = 35
    """seat, batch"""
    ORDER_BACK = 36
    """seat: its batches are to be handed out again"""
    ORDER_ENDED = 37
    """seat"""
    ORDER_DISCARD = 38
    """seat"""
    ORDER_PUT = 39
    """bytes, batches in the weights; then the bytes"""
    ORDER_END = 40
    ASK = 50
    """range"""
    ENTER = 51
    """rank: a server's process has begun"""
    TAKE_OVER = 52
    """range, rank, epoch"""
    DROP = 53
    """range, rank, epoch"""
    ADD = 54
    """range, rank, epoch, rank of the copy"""
    VIEW = 55
    """epoch, rank that answers, rank of its copy (NOBODY: none), whether the range is lost"""


CONTROL = -1
"""The seat of whoever is no worker."""
NOBODY = -1
MOST_BATCHES = 1 << 16
"""The most batches of one push."""
PIECE_BYTES = 4 << 20
"""The bytes of a gradient that are handed on to the copy while more arrive."""
REPLY_SECONDS = 300.0
"""The seconds without a byte after which a server that answers nothing is given up."""
