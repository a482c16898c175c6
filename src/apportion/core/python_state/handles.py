"""Objects that every process opens for itself: files, connections, locks, compiled patterns. They hold no state that
could be carried."""

from __future__ import annotations

import functools
import io
import logging
import pickle
import queue
import re
import types
import zlib
from typing import Any, final

import numpy as np
from torch import Tensor

_HANDLES = (io.IOBase, types.ModuleType, type, types.BuiltinFunctionType, re.Pattern, logging.Logger, np.memmap)
_CONSTANTS = (bool, int, str, bytes, types.NoneType)
LARGEST = 1 << 20
"""The bytes up to which an object is written to see whether it has changed."""


def is_handle(value: Any, *, of_user: bool) -> bool:
    """Tell whether an object stands for something outside of the process's memory, so that it cannot be written
    (pickled), or is the same in every process. An object of a
    class of the user's (``of_user``) that keeps a float, a tensor or an array is none."""
    if isinstance(value, _HANDLES):
        return True
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and all(isinstance(v, _CONSTANTS) for v in value.__defaults__ or ())
    if isinstance(value, functools.partial):
        parts = (*value.args, *value.keywords.values())
        return is_handle(value.func, of_user=False) and all(isinstance(part, _CONSTANTS) for part in parts)
    if isinstance(value, queue.Queue):
        return False
    if hasattr(type(value), "__next__") or isinstance(value, float | complex | Tensor | np.ndarray | np.generic):
        return False
    fields = getattr(value, "__dict__", None)
    if (
        of_user
        and isinstance(fields, dict)
        and any(isinstance(v, float | Tensor | np.ndarray) for v in fields.values())
    ):
        return False
    return fingerprint(value) is None


@final
class _Counting:
    """A file that keeps a checksum of what is written."""

    def __init__(self) -> None:
        self.checksum, self.nbytes = 0, 0

    def write(self, data: Any) -> None:
        self.checksum = zlib.adler32(data, self.checksum)
        self.nbytes += len(data)
        if self.nbytes > LARGEST:
            raise OverflowError


def fingerprint(value: Any) -> int | None:
    """Return a number for what an object holds; None where it cannot be written. An object of over ``LARGEST`` bytes
    has the number of its first ones."""
    file = _Counting()
    try:
        pickle.Pickler(file, protocol=5).dump(value)
    except OverflowError:
        return file.checksum
    except Exception:  # whatever the object raises where it cannot be written
        return None
    return file.checksum
