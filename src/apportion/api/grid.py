"""The members of a grid: a function that makes workloads, called with every combination of some arguments."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from apportion.api.side_by_side import MemberRun
from apportion.core.place_names import arguments_of, split_address

_MOST = 1000
"""The largest number of members: more are a slip, and would take days."""


def grid_values(axes: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each argument of a grid that is written ``lr=[0.1, 0.2]``, one text for each argument. Raises
    ValueError for a text that is not such a list, and for an argument that is given twice."""
    found: dict[str, list[Any]] = {}
    for text in axes:
        name, equals, written = (part.strip() for part in text.partition("="))
        example = f"write --grid '{name if name.isidentifier() else 'lr'}=[0.1, 0.2]'"
        if not equals or not name.isidentifier():
            raise ValueError(f"grid {text!r} must be the name of an argument and a list of its values: {example}")
        try:
            values = ast.literal_eval(written)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"grid {text!r}: {written!r} must be a list of numbers, texts in quotes, True, False or None: {example}"
            ) from None
        if not isinstance(values, list) or not values:
            raise ValueError(f"grid {text!r}: {written} must be a list of at least one value: {example}")
        if name in found:
            raise ValueError(f"grid {text!r}: {name} is given twice, give all of its values in one list: {example}")
        found[name] = values
    return found


def grid_members(workload: str, axes: Sequence[str]) -> list[MemberRun]:
    """One member for each combination of the values, in the order of the lists, the last one fastest. ``workload``: the
    address of a function, which may have other arguments already. Raises ValueError where one is given in both places,
    and for more than 1,000 members."""
    grid, fixed, parts = grid_values(axes), arguments_of(workload), split_address(workload)
    for name in grid:
        if name in fixed:
            raise ValueError(f"{name} is an argument of {workload!r} and of the grid: leave either out")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if len(combinations) > _MOST:
        raise ValueError(
            f"the grid has {len(combinations):,} members, and at most {_MOST:,} are trained: use fewer values"
        )
    bare = parts._replace(call="")
    found = []
    for given in combinations:
        address = bare._replace(call=_call(fixed | given)).at(parts.place)
        found.append(MemberRun(_name(given), address))
    if len({member.name for member in found}) < len(found):  # texts that differ in what a file name cannot have
        found = [MemberRun(f"{n}-{member.name}", member.workload) for n, member in enumerate(found, start=1)]
    return found


def _call(arguments: Mapping[str, Any]) -> str:
    return f"({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _name(arguments: Mapping[str, Any]) -> str:
    """The name of a member's folder, ``lr=0.1,width=64``."""
    written = ",".join(f"{name}={value}" for name, value in arguments.items())
    return re.sub(r"[^\w.,=+-]", "_", written)[:120]
