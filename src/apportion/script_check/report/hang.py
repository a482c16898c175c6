"""What each rank of a script that does not go on was doing, and the first collective in which the ranks differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from apportion.reporting.html import tables
from apportion.reporting.html.document import numbers, section
from apportion.script_check.hangs.sentences import operation

Json = Mapping[str, Any]


def hang_sections(answer: Json) -> Iterator[str]:
    """Yield the sections on ranks that wait for each other; nothing where they do not."""
    hang: Json = answer["hang"]
    if divergence := hang.get("first_divergence"):
        calls = divergence["calls"]
        heads = ["rank", "call", "tensors", "line"]
        table = tables.table(heads, [(rank, *_call(call)) for rank, call in calls.items()], texts=4)
        about = f"Call {divergence['sequence'] + 1} of the group {divergence['group']} is the first one that differs."
        yield section("The first collective that differs", f"<p>{escape(about)}</p>{table}")
    if ranks := hang.get("ranks"):
        heads = ["rank", "state", "steps", "waits in", "tensors", "line"]
        states = [(str(each["rank"]), each["state"], str(each["steps"]), *_waiting(each)) for each in ranks]
        body = tables.table(heads, states, texts=6)
        if answer["ranks"]:
            lines = "\n".join(map(escape, answer["ranks"]))
            body += numbers("with the stacks", f"<pre>{lines}</pre>", shown=False)
        yield section("What each rank was doing", body)


def _waiting(rank: Json) -> tuple[str, str, str]:
    return _call(rank["collective"]) if rank["collective"] else ("", "", rank["site"])


def _call(call: Json | None) -> tuple[str, str, str]:
    """Returns the cells of a call: what, of which tensors, at which line."""
    if call is None:
        return ("no call", "", "")
    tensors = ", ".join(f"{kind} {list(shape)}" for shape, kind in (call["inputs"] or call["outputs"] or ()))
    return (operation(call), tensors, str(call["site"]))
