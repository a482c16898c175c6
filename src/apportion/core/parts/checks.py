"""What is refused of a workload whose data set is in parts, before anything of it is opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def check_parts(parts: object, data: Callable[..., Any], *, carries: bool) -> None:
    """Raise ValueError where this is no number of parts, ``data`` takes no part, or a state is carried."""
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise ValueError(
            f"parts={parts!r} must be a whole number of at least 1, the parts that the data set is in; leave it out "
            "where every process opens all of it"
        )
    if carries:
        raise ValueError(
            f"parts={parts} and carry contradict each other: a recurrent state follows its row through the whole data "
            "set; leave parts out"
        )
    try:
        inspect.signature(data).bind(0)
    except TypeError:
        raise ValueError(
            f"parts={parts} needs data to be a function of the number of a part: data=lambda part: ...; leave parts "
            "out where it makes the whole data set"
        ) from None
    except ValueError:  # a function of C, which does not say
        pass
