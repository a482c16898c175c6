"""Put trained nets behind the Open Inference Protocol: one or several, which answer together by a deadline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from apportion.core.named_arguments import named_arguments
from apportion.core.value import parse_as
from apportion.serving.config import Serving, check_names, named


@named_arguments("serve")
def serve(
    members: Sequence[str] | Mapping[str, str] | str,
    *,
    deadline: float | None = None,
    quorum: int | None = None,
    trust: bool = False,
    serving: Serving | str | None = None,
) -> int:
    """Serve these nets until SIGTERM or Ctrl-C; the signal's number is returned.

    ``members``: a place, or several, which are then called m1, m2, ...; or places by name. A place is an ONNX file, a
    program of ``torch.export`` (.pt2), a run or a checkpoint of ours, or the address of a model on another server of
    the protocol (http://host:port/v2/models/NAME). ``deadline``: seconds. ``trust``: the file that a run names may run
    whosever it is (see ``load``). ``serving``: the other settings, also as a text, "serving(most_rows=64)". ValueError
    where a place holds no net, or nets do not fit each other; ApportionError where the address cannot be had or a
    member cannot be started.
    """
    places = [members] if isinstance(members, str | os.PathLike) else members
    for place in places.values() if isinstance(places, Mapping) else places:
        if not isinstance(place, str | os.PathLike):
            raise ValueError(f"member {place!r} must be the path of a net, or its address: serve('runs/a')")
    if isinstance(places, Mapping):
        given = {name: os.fspath(place) for name, place in places.items()}
    else:
        given = named([os.fspath(place) for place in places])
    serving = parse_as(serving, Serving) if isinstance(serving, str) else serving or Serving()
    if deadline is not None:
        serving = replace(serving, deadline=deadline)
    if quorum is not None:
        serving = replace(serving, quorum=quorum)
    if trust:
        serving = replace(serving, trust=True)
    check_names(given)
    from apportion.serving.server import answer  # the web server and all that

    return answer(given, serving)
