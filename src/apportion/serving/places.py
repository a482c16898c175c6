"""How members are written on the command line: a place, or NAME=PLACE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ENSEMBLE = "ensemble"
"""What all members together are called; none of them may be."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


def named(places: Sequence[str]) -> dict[str, str]:
    """By name: those that are given, m1, m2, ... for the others, by their place in the list."""
    found: dict[str, str] = {}
    for at, text in enumerate(places, start=1):
        given = re.fullmatch(rf"({_NAME})=(.+)", text)
        name, place = (given[1], given[2]) if given else (f"m{at}", text)
        if name in found:
            raise ValueError(f"two members are named {name}: {found[name]} and {place}")
        found[name] = place
    check_names(found)
    return found


def check_names(members: Mapping[str, str]) -> None:
    """ValueError where they cannot be served under these names."""
    if not members:
        raise ValueError("there is no member: give at least one net")
    for name in members:
        if name == ENSEMBLE or not re.fullmatch(_NAME, name):
            raise ValueError(
                f"member {name!r} must be named by letters, digits, '_', '.' and '-', and not {ENSEMBLE!r}: that is all"
            )
