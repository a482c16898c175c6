"""Programs of torch.export that are served: whatever in such a file could run code is refused before torch reads it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apportion.serving.runtimes.torch_runtime import opened

ROWS = {0: torch.export.Dim.DYNAMIC}


class Net(nn.Module):
    """With buffers, constants, texts, sizes that are computed, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.rest, self.words = nn.Linear(4, 5), nn.Embedding(7, 5)
        self.scale = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0])

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.norm(self.conv(inputs["images"]))[:, :, ::2]
        hidden = nn.functional.interpolate(hidden, scale_factor=2.0, mode="bilinear")
        found = self.rest(hidden.mean((2, 3))) + self.words(inputs["words"]).mean(1) * self.scale
        return {"found": found, "pairs": torch.einsum("ni,nj->nij", found, found)}


def saved(path: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Net().eval()
    sample = {"images": torch.randn(2, 3, 8, 8), "words": torch.arange(6).reshape(2, 3)}
    shapes = {"images": {**ROWS, 2: torch.export.Dim.DYNAMIC}, "words": ROWS}
    torch.export.save(torch.export.export(net, (sample,), dynamic_shapes=(shapes,)), path)
    return net, sample


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a net with one sum of sizes, one guard, one constant."""

    class Small(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, y]).div(torch.tensor(2.0), rounding_mode="floor")

    path = tmp_path_factory.mktemp("archive") / "good.pt2"
    sample = (torch.ones(3, 2), torch.ones(3, 2))
    torch.export.save(torch.export.export(Small(), sample, dynamic_shapes=(ROWS, ROWS)), path)
    return path


@pytest.mark.thorough
def test_a_program_with_computed_sizes_constants_and_texts_is_opened(tmp_path: Path) -> None:
    net, sample = saved(tmp_path / "net.pt2")
    module, kept = opened(tmp_path / "net.pt2")
    assert {*kept} == {*sample}
    sample = {"images": torch.randn(5, 3, 8, 8), "words": torch.arange(15).reshape(5, 3) % 7}
    with torch.no_grad():
        wanted, found = net(sample), module(sample)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


class Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


Entries = dict[str, bytes]


def pickled(mark: Path, *, archive: bool = True) -> bytes:
    """As torch.save writes it, or plain."""
    if not archive:
        return pickle.dumps(Runs(mark))
    made = BytesIO()
    torch.save(Runs(mark), made)
    return made.getvalue()


def the_sample(entries: Entries, mark: Path) -> None:
    entries["data/sample_inputs/model.pt"] = pickled(mark)


def the_sample_plain(entries: Entries, mark: Path) -> None:
    entries["data/sample_inputs/model.pt"] = pickled(mark, archive=False)


def weights_of_old(entries: Entries, mark: Path) -> None:
    entries["data/weights/model.pt"] = pickled(mark)


def a_weight(entries: Entries, mark: Path) -> None:
    _payload(entries, "weights", "weight_9", pickled(mark), use_pickle=True)


def an_opaque_constant(entries: Entries, mark: Path) -> None:
    _payload(entries, "constants", "opaque_obj_0", pickled(mark, archive=False), use_pickle=True)


def an_opaque_constant_that_denies_it(entries: Entries, mark: Path) -> None:
    _payload(entries, "constants", "opaque_obj_0", pickled(mark, archive=False), use_pickle=False)


def a_script_object(entries: Entries, mark: Path) -> None:
    _payload(entries, "constants", "custom_obj_0", pickled(mark), use_pickle=True)


def _payload(entries: Entries, kind: str, file: str, data: bytes, *, use_pickle: bool) -> None:
    about = {"path_name": file, "is_param": False, "use_pickle": use_pickle, "tensor_meta": None}
    config = json.loads(entries[f"data/{kind}/model_{kind}_config.json"])
    config["config"]["more"] = about
    entries[f"data/{kind}/model_{kind}_config.json"] = json.dumps(config).encode()
    entries[f"data/{kind}/{file}"] = data


def a_library(entries: Entries, mark: Path) -> None:
    entries["data/aotinductor/model/model.so"] = b"\x7fELF"


def a_programs_second_model(entries: Entries, mark: Path) -> None:
    entries["models/other.json"] = entries["models/model.json"]
    entries["data/sample_inputs/other.pt"] = pickled(mark)


def _changed(entries: Entries, change: Callable[[Any], None]) -> None:
    graph = json.loads(entries["models/model.json"])
    change(graph)
    entries["models/model.json"] = json.dumps(graph).encode()


def _code(mark: Path) -> str:
    return f"__import__('os').mkdir('{mark}')"


def a_size(entries: Entries, mark: Path) -> None:
    def change(graph: Any) -> None:
        for tensor in graph["graph_module"]["graph"]["tensor_values"].values():
            for size in tensor["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = _code(mark)

    _changed(entries, change)


def a_guard(entries: Entries, mark: Path) -> None:
    _changed(entries, lambda graph: graph.update(guards_code=[f"{_code(mark)} is None"]))


def an_argument(entries: Entries, mark: Path) -> None:
    text = entries["models/model.json"].decode()
    name = f"x, z={_code(mark)}".replace('"', "'")
    entries["models/model.json"] = text.replace('"name": "x"', json.dumps({"name": name})[1:-1]).encode()


def a_comment(entries: Entries, mark: Path) -> None:
    def change(graph: Any) -> None:
        for node in graph["graph_module"]["graph"]["nodes"]:
            node["metadata"]["stack_trace"] = f'File "a", line 1, in forward\n    x\r    {_code(mark)}'

    _changed(entries, change)


def a_text(entries: Entries, mark: Path) -> None:
    text = entries["models/model.json"].decode()
    assert '"floor"' in text
    entries["models/model.json"] = text.replace('"floor"', json.dumps(f"' + {_code(mark)} + '")).encode()


def a_tree(entries: Entries, mark: Path) -> None:
    module = mark.parent / "imported_by_a_tree.py"
    module.write_text(f"import os\nos.mkdir({str(mark)!r})\n")

    def change(graph: Any) -> None:
        context = json.dumps([{"__enum__": True, "fqn": "imported_by_a_tree:A", "name": "B"}])
        tree = [1, {"type": "builtins.dict", "context": context, "children_spec": []}]
        graph["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(tree)

    _changed(entries, change)


def an_operator(entries: Entries, mark: Path) -> None:
    def change(graph: Any) -> None:
        graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.mkdir"

    _changed(entries, change)


def an_operator_on_files(entries: Entries, mark: Path) -> None:
    def change(graph: Any) -> None:
        graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"

    _changed(entries, change)


PLANTED = (
    the_sample, the_sample_plain, weights_of_old, a_weight, an_opaque_constant, an_opaque_constant_that_denies_it,
    a_script_object, a_library, a_programs_second_model, a_size, a_guard, an_argument, a_text, a_tree, an_operator,
    an_operator_on_files,
)  # fmt: skip


def planted(good: Path, path: Path, plant: Callable[[Entries, Path], None], mark: Path) -> Path:
    with zipfile.ZipFile(good) as archive:
        root = archive.namelist()[0].partition("/")[0]
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    plant(entries, mark)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"{root}/{name}", data)
    return path


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_could_run_code_is_refused(
    plant: Callable[[Entries, Path], None], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    mark = tmp_path / "ran"
    path = planted(good, tmp_path / "bad.pt2", plant, mark)
    with pytest.raises(ValueError, match=r"could run code|not an operator|inputs and outputs|names an input"):
        opened(path)
    assert not mark.exists()


def test_comments_for_debuggers_are_left_out(good: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    module, _ = opened(planted(good, tmp_path / "bad.pt2", a_comment, mark))
    torch.testing.assert_close(
        module(torch.full((1, 2), 5.0), torch.ones(1, 2)), torch.tensor([[2.0, 2.0], [0.0, 0.0]])
    )
    assert not mark.exists()


def test_two_entries_of_one_name_are_refused(good: Path, tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "bad.pt2"
    path.write_bytes(good.read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        name = next(name for name in archive.namelist() if "sample_inputs" in name)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(name, pickled(mark))
    with pytest.raises(ValueError, match="two entries of one name"):
        opened(path)
    assert not mark.exists()


def test_files_that_are_no_archive_get_a_sentence(good: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    whole = good.read_bytes()
    for data in (b"", b"junk" * 100, pickled(mark), pickled(mark, archive=False), whole[: len(whole) // 2]):
        (tmp_path / "bad.pt2").write_bytes(data)
        with pytest.raises(ValueError, match=r"bad\.pt2 is not a program of torch\.export"):
            opened(tmp_path / "bad.pt2")
    assert not mark.exists()


@pytest.mark.processes
def test_serve_refuses_it_before_anything_of_it_runs(good: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    planted(good, tmp_path / "bad.pt2", the_sample, mark)
    command = [sys.executable, "-m", "apportion", "serve", "bad.pt2", "--port", "0"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2, ran.stderr
    assert "could run code" in ran.stderr
    assert not mark.exists()
