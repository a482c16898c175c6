"""What the spaces of an environment are called here, and which class of gymnasium's a space is of."""

from __future__ import annotations

from typing import Any

KINDS = ("Box", "Discrete", "MultiBinary", "MultiDiscrete", "Dict", "Tuple", "Text", "Sequence", "Graph", "OneOf")
"""gymnasium's fundamental and composite spaces."""


def kind_of(space: Any) -> str | None:
    """Return the name of the class of gymnasium's that a space is an instance of; None where it is of none. Names are
    compared, so that spaces of gymnasium's predecessors are taken, too."""
    return next((base.__name__ for base in type(space).__mro__ if base.__name__ in KINDS), None)


def text_of(space: Any) -> str:
    """Return a space as it is named in messages, in at most 200 characters: the bounds of a large Box are long."""
    text = " ".join(str(space).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
