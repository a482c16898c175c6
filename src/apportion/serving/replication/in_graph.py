"""``in_graph``: all members in one program, which a single process runs. ONNX files are merged into one, and modules of
torch are stacked.

::

    input --+-- m1/... -- m1/output
            +-- m2/... -- m2/output         one request, one pass, every member's outputs
            +-- m3/... -- m3/output

It wins where members are small: one message instead of one a member. It loses where one of them may be slow or die:
without it there is none of the others' answers, and all of them die together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apportion.errors import ApportionError
from apportion.serving.runtimes.source import ServedTensor, Source

MOST_BYTES = 2**31 - 2**20
"""The largest size in bytes of an ONNX file."""


def merged(sources: Sequence[Source], folder: Path) -> Source:
    """Return one source whose outputs are those of the first member, then of the second, and so on. Raises ValueError
    where the members cannot be merged, with the reason, and ApportionError where the disk has no room for the merged
    file."""
    whole = replace(
        sources[0],
        name="+".join(source.name for source in sources),
        batched=all(source.batched for source in sources),
        outputs=_outputs(sources),
    )
    if {source.runtime for source in sources} == {"torch"}:
        _check_inputs_of_torch(sources)
        return replace(whole, others=tuple(source.path for source in sources[1:]))
    if other := next((source for source in sources if source.runtime != "onnx"), None):
        raise ValueError(
            "in_graph makes one program of nets that ONNX Runtime runs, or that torch runs, all of them: "
            f"{other.name} is run by {other.runtime}"
        )
    return replace(whole, path=str(_merged(sources, folder)))


def _outputs(sources: Sequence[Source]) -> tuple[ServedTensor, ...] | None:
    """Return the outputs of all members, one after the other, with the member before the name."""
    found: list[ServedTensor] = []
    for source in sources:
        if source.outputs is None:
            return None
        for tensor in source.outputs:
            name = f"{source.name}/{tensor.own}"
            found.append(ServedTensor(name, len(found), replace(tensor.spec, name=f"{source.name}/{tensor.spec.name}")))
    return tuple(found)


def _check_inputs_of_torch(sources: Sequence[Source]) -> None:
    """Raise ValueError where modules of torch take the same input in other places: they are all called alike."""
    first = [(tensor.own, tensor.place) for tensor in sources[0].inputs or ()]
    for source in sources[1:]:
        if [(tensor.own, tensor.place) for tensor in source.inputs or ()] != first:
            raise ValueError(
                f"in_graph: {sources[0].name} and {source.name}, which torch runs, take inputs of other names"
            )


def _merged(sources: Sequence[Source], folder: Path) -> Path:
    import onnx
    from onnx import compose

    if sum(Path(source.path).stat().st_size for source in sources) > MOST_BYTES:
        raise ValueError(f"in_graph makes one file of ONNX, and the members have more than {MOST_BYTES} bytes together")
    models = [onnx.load(source.path) for source in sources]
    kinds = [_kinds(model, source) for model, source in zip(models, sources, strict=True)]
    if other := next((s for s, k in zip(sources, kinds, strict=True) if k != kinds[0]), None):
        raise ValueError(f"in_graph: {sources[0].name} and {other.name} have different inputs or outputs")
    if other := next((s for s, m in zip(sources, models, strict=True) if m.graph.sparse_initializer), None):
        raise ValueError(f"in_graph: {other.name} has sparse weights")
    nodes, initializers, outputs, functions = [], [], [], []
    for source, model in zip(sources, models, strict=True):
        shared = dict(zip(_names(model, source)[0], _names(models[0], sources[0])[0], strict=True))
        model = compose.add_prefix(model, f"{source.name}/", rename_inputs=False)
        _rename(model, shared)
        nodes += model.graph.node
        initializers += model.graph.initializer
        outputs += model.graph.output
        functions += model.functions
    versions = {(o.domain, o.version) for model in models for o in model.opset_import}
    if len({domain for domain, _ in versions}) < len(versions):
        raise ValueError("in_graph: the members are of different versions of ONNX's operators; export them alike")
    graph = onnx.helper.make_graph(nodes, "ensemble", _fed(models[0]), outputs, initializers)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in sorted(versions)]
    whole = onnx.helper.make_model(
        graph, opset_imports=opsets, functions=functions, ir_version=max(model.ir_version for model in models)
    )
    path = folder / "ensemble.onnx"
    try:
        onnx.save(whole, path)
    except OSError as error:
        raise ApportionError(f"in_graph: {path} could not be written: {error.strerror}") from error
    return path


def _fed(model: Any) -> list[Any]:
    """Return the inputs of a model without its weights, which old files list among them."""
    held = {value.name for value in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def _names(model: Any, source: Source) -> tuple[list[str], list[str]]:
    """Return the names in the file of the inputs and the outputs, in the order in which they are served."""
    inputs = [value.name for value in _fed(model)] if source.inputs is None else [t.own for t in source.inputs]
    outputs = (
        [value.name for value in model.graph.output] if source.outputs is None else [t.own for t in source.outputs]
    )
    return inputs, outputs


def _kinds(model: Any, source: Source) -> list[tuple[int, list[int | None]]]:
    """Return (type, dims) of a model's inputs and outputs, in the order in which they are served."""
    values = {value.name: value.type.tensor_type for value in (*_fed(model), *model.graph.output)}
    found = []
    for name in [name for names in _names(model, source) for name in names]:
        dims = values[name].shape.dim
        found.append((values[name].elem_type, [d.dim_value if d.HasField("dim_value") else None for d in dims]))
    return found


def _rename(model: object, names: dict[str, str]) -> None:
    """Rename inputs wherever they are read, also inside of branches and loops."""
    stack = [model.graph]  # type: ignore[attr-defined]
    while stack:
        graph = stack.pop()
        for node in graph.node:
            for at, name in enumerate(node.input):
                node.input[at] = names.get(name, name)
            stack += [a.g for a in node.attribute if a.HasField("g")]
