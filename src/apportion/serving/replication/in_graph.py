"""All members in one program, which a single process runs: ONNX files merged into one, modules of torch stacked.

::

    input --+-- m1/... -- m1/output
            +-- m2/... -- m2/output         one request, one pass, every member's outputs
            +-- m3/... -- m3/output

It wins where members are small: one message instead of one a member. It loses where one of them may be slow or die:
there is no answer without it, and all of them die together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apportion.errors import ApportionError
from apportion.serving.runtimes.source import Source

MOST_BYTES = 2**31 - 2**20
"""The largest size in bytes of an ONNX file."""


def merged(sources: Sequence[Source], folder: Path) -> Source:
    """Return one source whose outputs are those of the first member, then of the second, and so on. Raises ValueError
    where the members cannot be merged, with the reason, and ApportionError where there is no room for the merged
    file."""
    if {source.runtime for source in sources} == {"torch"}:
        others = tuple(source.path for source in sources[1:])
        return replace(sources[0], name="+".join(source.name for source in sources), others=others)
    if other := next((source for source in sources if source.runtime != "onnx"), None):
        raise ValueError(
            "in_graph makes one program of nets that ONNX Runtime runs, or that torch runs, all of them: "
            f"{other.name} is run by {other.runtime}"
        )
    return _merged(sources, folder)


def _merged(sources: Sequence[Source], folder: Path) -> Source:
    import onnx
    from onnx import compose

    if sum(Path(source.path).stat().st_size for source in sources) > MOST_BYTES:
        raise ValueError(f"in_graph makes one file of ONNX, and the members have more than {MOST_BYTES} bytes together")
    models = [onnx.load(source.path) for source in sources]
    inputs = [value.name for value in _fed(models[0])]
    kinds = [_kinds(model) for model in models]
    if other := next((s for s, k in zip(sources, kinds, strict=True) if k != kinds[0]), None):
        raise ValueError(f"in_graph: {sources[0].name} and {other.name} have different inputs or outputs")
    if other := next((s for s, m in zip(sources, models, strict=True) if m.graph.sparse_initializer), None):
        raise ValueError(f"in_graph: {other.name} has sparse weights")
    nodes, initializers, outputs, functions = [], [], [], []
    for source, model in zip(sources, models, strict=True):
        own = [value.name for value in _fed(model)]
        model = compose.add_prefix(model, f"{source.name}/", rename_inputs=False)
        _rename(model, dict(zip(own, inputs, strict=True)))
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
    return replace(sources[0], name="+".join(source.name for source in sources), path=str(path))


def _fed(model: Any) -> list[Any]:
    """Return the inputs of a model without its weights, which old files list among them."""
    held = {value.name for value in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in held]


def _kinds(model: Any) -> list[tuple[int, list[int | None]]]:
    """Return (type, dims) of a model's inputs and outputs."""
    found = []
    for value in (*_fed(model), *model.graph.output):
        tensor = value.type.tensor_type
        found.append((tensor.elem_type, [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]))
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
