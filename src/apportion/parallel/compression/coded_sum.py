"""A sum between hosts of numbers that travel in a code, and what the code has left out until the next step.

Two hosts send each other their whole tensors in code, and both add up what the codes say, their own as well; where each
number has a code of its own they go in pieces, and the cable is busy while the hosts code and add. More hosts hand each
a part: who has a part adds up the codes of the others to its own numbers, and sends the sum in code to all. So the
result has the same bits everywhere, since all decode the same bytes in the same order.

Error feedback (Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy,
Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD", ICML 2019): what a code has left out of a tensor is added to
the next one, so that it arrives later and is not lost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from apportion.comm.network.host_exchange import HostExchange, HostSum

WORD = 8
"""The bytes by which codes begin: each may hold numbers of any type."""
PIECE = 128 << 10
"""The numbers of a piece, which stay in a core's own cache while they are coded and added."""


class Codec(ABC):
    """A code of some floating-point numbers, of a length that their number alone decides."""

    has_own_places: bool = False
    """Does each code stand for places of its own? Then a sum of several is not worth a code of its own, and all hosts
    send all others theirs."""
    by_number: bool = False
    """Has each number a code of its own, as long as every other's, and is nothing of it left out until the next step?
    Then a tensor may go in pieces."""

    @abstractmethod
    def nbytes(self, numel: int, itemsize: int) -> int:
        """Return the length of the code of ``numel`` numbers of ``itemsize`` bytes each."""

    @abstractmethod
    def encode(self, numbers: Tensor, code: Tensor) -> None:
        """Write the code of flat numbers into bytes."""

    @abstractmethod
    def add(self, code: Tensor, numbers: Tensor, *, times: float = 1.0) -> None:
        """Add ``times`` times what a code says to flat numbers."""

    def decode(self, code: Tensor, numbers: Tensor) -> None:
        """Write what a code says into flat numbers."""
        numbers.zero_()
        self.add(code, numbers)


@final
class CodedSum(HostSum):
    """The sum of one tensor in a code. ``keeps_errors``: with error feedback."""

    def __init__(self, codec: Codec, dtype: torch.dtype, *, keeps_errors: bool) -> None:
        self._codec, self._dtype, self._keeps_errors = codec, dtype, keeps_errors
        self._errors = self._no_errors()
        """What the codes of this rank's own numbers, and of the sums that it has made, have left out so far; empty
        before the first."""
        self._codes = torch.empty(0, dtype=torch.uint8)

    def __call__(self, flat: Tensor, hosts: HostExchange) -> None:
        own = hosts.own(flat)
        if own.numel():
            if hosts.hosts == 2 and self._codec.by_number:
                self._gather_in_pieces(own, hosts)
            elif hosts.hosts == 2 or self._codec.has_own_places:
                self._gather(own, hosts)
            else:
                self._scatter(own, hosts)
        hosts.share(flat)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._errors)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._errors = self._no_errors() | {name: tensor.clone() for name, tensor in state.items()}

    def _no_errors(self) -> dict[str, Tensor]:
        return {name: torch.empty(0, dtype=self._dtype) for name in ("own", "sum") if self._keeps_errors}

    def _gather(self, own: Tensor, hosts: HostExchange) -> None:
        """Sums in place what all hosts send all others."""
        codes = self._make_room(hosts.hosts, own.numel(), own.element_size())
        self._encode("own", own, [(own, codes[hosts.host])])
        hosts.gather(codes)
        # In the order of the hosts, this one's own code as well: every host adds the same numbers in the same order.
        self._codec.decode(codes[0], own)
        for code in codes[1:]:
            self._codec.add(code, own)

    def _gather_in_pieces(self, own: Tensor, hosts: HostExchange) -> None:
        """Sums in place what two hosts send each other: while a piece is on its way, others are coded and added."""
        each = self._codec.nbytes(1, own.element_size())
        codes = self._make_room(2, own.numel(), own.element_size())[:, : each * own.numel()]
        # Each of the two hosts adds the other's numbers to its own: a sum of two has the same bits in either order.
        under_way = []
        for numbers, rows in zip(own.split(PIECE), codes.split(each * PIECE, dim=1), strict=True):
            self._codec.encode(numbers, rows[hosts.host])
            under_way.append((numbers, rows[1 - hosts.host], hosts.begin_gather(rows)))
            self._codec.decode(rows[hosts.host], numbers)
        for numbers, theirs, finish in under_way:
            finish()
            self._codec.add(theirs, numbers)

    def _scatter(self, own: Tensor, hosts: HostExchange) -> None:
        """Sums in place by parts, of which each host has one."""
        parts = own.tensor_split(hosts.hosts)
        mine = parts[hosts.host]
        codes = self._make_room(2 * hosts.hosts, len(parts[0]), own.element_size())  # the first part is a longest one
        sends, receives = codes[: hosts.hosts], codes[hosts.hosts :]
        before = mine.clone()
        self._encode("own", own, [(p, c) for p, c in zip(parts, sends, strict=True) if p is not mine], exact=mine)
        hosts.swap(sends, receives)
        mine.zero_()
        for host in range(hosts.hosts):
            if host == hosts.host:
                mine.add_(before)
            elif mine.numel():
                self._codec.add(receives[host], mine)
        # The host that has made a sum takes it from the code as the others do, or it would go on with other bits.
        self._encode("sum", mine, [(mine, receives[hosts.host])])
        hosts.gather(receives)
        for part, code in zip(parts, receives, strict=True):
            if part.numel():
                self._codec.decode(code, part)

    def _encode(
        self, name: str, numbers: Tensor, codes: Sequence[tuple[Tensor, Tensor]], *, exact: Tensor | None = None
    ) -> None:
        """Writes the codes of parts of some numbers. With error feedback, what the codes have left out under this name
        is added before, and kept anew. ``exact``: the part that has no code."""
        codes = [(part, code) for part, code in codes if part.numel()]
        if self._keeps_errors and self._errors[name].numel():
            numbers.add_(self._errors[name])
        for part, code in codes:
            self._codec.encode(part, code)
        if self._keeps_errors:
            self._keep_errors(name, numbers, codes, exact)

    def _keep_errors(
        self, name: str, numbers: Tensor, codes: Sequence[tuple[Tensor, Tensor]], exact: Tensor | None
    ) -> None:
        def errors_of(part: Tensor) -> Tensor:
            begin = part.storage_offset() - numbers.storage_offset()
            return left[begin : begin + part.numel()]

        left = self._errors[name]
        if left.numel() == numbers.numel():
            left.copy_(numbers)
        else:
            left = self._errors[name] = numbers.clone()
        for part, code in codes:
            self._codec.add(code, errors_of(part), times=-1.0)
        if exact is not None:
            errors_of(exact).zero_()
        if not math.isfinite(left.sum().item()):  # a gradient that is not finite shows in the sum, and is over with it
            left.nan_to_num_(0.0, 0.0, 0.0)

    def _make_room(self, rows: int, numel: int, itemsize: int) -> Tensor:
        """Returns memory for ``rows`` codes of ``numel`` numbers, which is the same at every call."""
        length = -(-self._codec.nbytes(numel, itemsize) // WORD) * WORD
        if self._codes.numel() != rows * length:
            self._codes = torch.zeros(rows * length, dtype=torch.uint8)
        return self._codes.view(rows, length)


# A code of numbers rounded to a shorter floating-point type.


@final
class Rounded(Codec):
    """Numbers of another type, such as torch.float16."""

    by_number = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, numel: int, itemsize: int) -> int:
        return self._dtype.itemsize * numel

    def encode(self, numbers: Tensor, code: Tensor) -> None:
        self._numbers(code, numbers.numel()).copy_(numbers)

    def add(self, code: Tensor, numbers: Tensor, *, times: float = 1.0) -> None:
        numbers.add_(self._numbers(code, numbers.numel()), alpha=times)

    def decode(self, code: Tensor, numbers: Tensor) -> None:
        numbers.copy_(self._numbers(code, numbers.numel()))

    def _numbers(self, code: Tensor, numel: int) -> Tensor:
        return code.view(self._dtype)[:numel]
