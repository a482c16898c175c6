"""Common machines to plan for, without having them: one file of JSON each, found by listing.

Their numbers are from the makers' specifications, lowered to what programs reach; each file's ``name`` says how.
"""

from __future__ import annotations

import difflib
import json
from importlib import resources

from apportion.cost_model.cluster import Cluster


def names() -> list[str]:
    """The names of all clusters in the catalogue."""
    return sorted(f.name.removesuffix(".json") for f in resources.files(__name__).iterdir() if f.name.endswith(".json"))


def named(name: str) -> Cluster:
    """The cluster in the catalogue that has this name."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"cluster {name!r} is not in the catalogue: {hint}; or give a file of JSON")
    return Cluster.from_json(json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text()))
