"""Which inputs and outputs of the members are the same: those of the same name, whatever their order.

Members of one input and one output each match whatever the names. All other names have to be the same, or are made so
by ``Serving(rename={"m2": {"logits": "p"}})``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from apportion.serving.runtimes.source import ServedTensor, Source

Renames = Mapping[str, Mapping[str, str]]
Tensors = tuple[ServedTensor, ...]


def matched(sources: Sequence[Source], rename: Renames | None) -> list[Source]:
    """Return the members with their inputs and outputs in the order of the first one's. ``rename``: by member, the name
    in the ensemble of an input or output by its own. Raises ValueError where a member has other inputs or outputs."""
    renamed = _renamed(sources, rename or {})
    first = renamed[0]
    assert first.inputs is not None
    assert first.outputs is not None
    found = [first]
    for source in renamed[1:]:
        assert source.inputs is not None
        assert source.outputs is not None
        single = {len(x) for x in (first.inputs, first.outputs, source.inputs, source.outputs)} == {1}
        arranged = {
            what: _arranged(first.name, source.name, what, theirs, own, single=single)
            for what, theirs, own in (
                ("inputs", first.inputs, source.inputs),
                ("outputs", first.outputs, source.outputs),
            )
        }
        found.append(replace(source, inputs=arranged["inputs"], outputs=arranged["outputs"]))
    return found


def _renamed(sources: Sequence[Source], rename: Renames) -> list[Source]:
    if strange := [name for name in rename if name not in {source.name for source in sources}]:
        members = ", ".join(source.name for source in sources)
        raise ValueError(f"rename={dict(rename)} names the member {strange[0]!r}: the members are {members}")
    found = []
    for source in sources:
        names = rename.get(source.name, {})
        assert source.inputs is not None
        assert source.outputs is not None
        known = [tensor.own for tensor in (*source.inputs, *source.outputs)]
        if strange := [name for name in names if name not in known]:
            raise ValueError(
                f"rename: member {source.name} has no input or output {strange[0]!r}: it has {', '.join(known)}"
            )
        inputs, outputs = (
            tuple(replace(t, spec=replace(t.spec, name=names.get(t.own, t.spec.name))) for t in tensors)
            for tensors in (source.inputs, source.outputs)
        )
        for what, tensors in (("inputs", inputs), ("outputs", outputs)):
            name, times = Counter(tensor.spec.name for tensor in tensors).most_common(1)[0] if tensors else ("", 0)
            if times > 1:
                raise ValueError(f"rename: member {source.name} has {times} {what} named {name!r}: each needs its own")
        found.append(replace(source, inputs=inputs, outputs=outputs))
    return found


def _arranged(first: str, member: str, what: str, theirs: Tensors, own: Tensors, *, single: bool) -> Tensors:
    """Return a member's tensors in the order of the first member's."""
    by_name = {tensor.spec.name: tensor for tensor in own}
    names = [", ".join(tensor.spec.name for tensor in tensors) or "none" for tensors in (theirs, own)]
    if len(theirs) != len(own):
        raise ValueError(
            f"members {first} and {member} have {len(theirs)} and {len(own)} {what}, {names[0]} and {names[1]}: an "
            "ensemble needs as many of each member"
        )
    if single:
        found = own
    elif all(tensor.spec.name in by_name for tensor in theirs):
        found = tuple(by_name[tensor.spec.name] for tensor in theirs)
    else:
        missing = next(tensor.spec.name for tensor in theirs if tensor.spec.name not in by_name)
        known = {tensor.spec.name for tensor in theirs}
        strange = next(tensor.own for tensor in own if tensor.spec.name not in known)
        raise ValueError(
            f"members {first} and {member} have different {what}, {names[0]} and {names[1]}: an ensemble matches them "
            f"by name; say which is which by rename, for example Serving(rename={{{member!r}: {{{strange!r}: "
            f"{missing!r}}}}})"
        )
    for one, other in zip(theirs, found, strict=True):
        if (one.spec.datatype, one.spec.shape) != (other.spec.datatype, other.spec.shape):
            raise ValueError(
                f"members {first} and {member} have different {what}: {_described(one)} and {_described(other)}; an "
                "ensemble needs the same type and shape of each"
            )
    return found


def _described(tensor: ServedTensor) -> str:
    shape = [-1 if n is None else n for n in tensor.spec.shape]
    return f"{tensor.spec.name} {tensor.spec.datatype} {shape}"
