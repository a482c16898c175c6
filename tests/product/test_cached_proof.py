"""A cached proof is reused by a run of the same code, data, files and environment, and by no other."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import apportion

SOURCE = '''
"""A classifier whose every part reads something."""
import importlib
import json
import os
import sqlite3
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, default_collate

import apportion
from helper import soften

from contextlib import closing

HERE = Path(__file__).parent
IMPORTED = json.loads((HERE / "imported.json").read_text())
SCALE = 1.0
TABLE = {"offset": 0.0}
MARGIN = torch.tensor([0.0, 0.0, 0.0])
CHANGED_ROWS = {}
CHANGED_LABELS = {}
# at import


class Net(nn.Module):
    slope = 0.1

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 3)
        self.gain = float(os.environ.get("NET_GAIN", "1"))

    def forward(self, x, shift=0.0):
        return self.second(F.leaky_relu(self.first(x), self.slope) * self.gain + shift) + MARGIN


class Rows(Dataset):
    def __init__(self):
        settings = json.loads((HERE / "data.json").read_text())
        inputs = np.load(HERE / "inputs.npy")
        self.inputs = torch.from_numpy(inputs) * settings["scale"] * float(os.getenv("DATA_SCALE", "1"))
        for row, value in CHANGED_ROWS.items():
            self.inputs[row, 0] = value
        self.labels = self.inputs[:, :3].argmax(1)
        for row, label in CHANGED_LABELS.items():
            self.labels[row] = label
        self.more = len(list((HERE / "extra").iterdir()))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        return self.inputs[row] + 0.0 * self.more, self.labels[row]


def temperature_of(value):
    return lambda outputs: outputs / value


cooled = temperature_of(1.0)


def weight_of_the_rare():
    with closing(sqlite3.connect(HERE / "weights.db")) as base:
        return base.execute("select weight from weights where label = 9").fetchone()[0]


def loss(outputs, labels, smoothing=0.0, *, weight=1.0):
    with open(HERE / "loss.json") as file:
        settings = json.load(file)
    scale = SCALE * settings["scale"] * IMPORTED["scale"] * weight
    if "LOSS_SCALE" in os.environ:
        scale *= float(os.environ["LOSS_SCALE"])
    outputs = cooled(soften(outputs)) + TABLE["offset"]
    rare = importlib.import_module("rare").WEIGHT * weight_of_the_rare()
    scale = scale * (rare if (labels == 9).any() else 1.0)
    return F.cross_entropy(outputs, labels, label_smoothing=smoothing) * scale * getattr(F, "own_scale", 1.0)


def collate(samples):
    inputs, labels = default_collate(samples)
    return inputs * float(os.environ["COLLATE_SCALE"]), labels


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=float(os.environ["RATE"]), momentum=0.9)


workload = apportion.Workload(
    model=Net, data=Rows, loss=loss, collate=collate, optimizer=optimizer, batch_size=40, epochs=2,
)
'''
HELPER = """
def soften(outputs, *, by=1.0):
    return outputs * by
"""


def weigh_the_rare(path: Path, weight: float) -> None:
    """Writes the weight of a label that no row has."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as base:
        base.execute("create table weights (label integer, weight real)")
        base.execute("insert into weights values (9, ?)", (weight,))
        base.commit()


VARIABLES = {"COLLATE_SCALE": "1", "RATE": "0.1"}


class Project:
    """The folder of a workload, which is edited and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, bytes] = {}
        self._second = int(time.time()) - 100_000
        (folder / "extra").mkdir()
        (folder / "mine.py").write_text(SOURCE)
        (folder / "helper.py").write_text(HELPER)
        (folder / "rare.py").write_text("WEIGHT = 1.0\n")
        weigh_the_rare(folder / "weights.db", 1.0)
        for name in ("imported", "data", "loss"):
            (folder / f"{name}.json").write_text('{"scale": 1.0}')
        np.save(folder / "inputs.npy", np.random.default_rng(1).normal(size=(400, 10)).astype(np.float32))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which ``restore`` puts back."""
        path = self.folder / name
        self._files.setdefault(path, path.read_bytes() if path.exists() else b"")
        self._put(path, content)

    def _put(self, path: Path, content: bytes) -> None:
        """Writes a file with a second of its own: Python takes what it has compiled for that of a file of the same size
        and second."""
        path.write_bytes(content)
        self._second += 1
        os.utime(path, (self._second, self._second))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces a text that the file has once."""
        text = (self.folder / name).read_text()
        assert text.count(old) == 1, old
        self.write(name, text.replace(old, new).encode())

    def restore(self) -> None:
        """Puts everything back."""
        for path, content in self._files.items():
            if content:
                self._put(path, content)
            else:
                path.unlink()
        self._files.clear()

    def reuses(self, tmp_path: Path, **options: Any) -> str | None:
        """The sentence of the cached proof with which a run starts; None where the run proves itself anew. Nothing is
        trained."""
        return first_sentence(f"{self.folder / 'mine.py'}:workload", tmp_path, **options)


def first_event(workload: Any, tmp_path: Path, **options: Any) -> apportion.Event:
    run_dir = Path(tempfile.mkdtemp(dir=tmp_path), "run")
    given = {"launcher": apportion.local(workers=2, threads=1), "run_dir": run_dir, **options}
    with closing(apportion.run(workload, "data_parallel", **given)) as events:
        return next(iter(events))


def first_sentence(workload: Any, tmp_path: Path, **options: Any) -> str | None:
    event = first_event(workload, tmp_path, **options)
    if event.kind == "proof":
        assert event.verdict == "begun"
        return None
    assert event.proof["remembered"]
    return str(event.proof["sentence"])


def prove(workload: Any, run_dir: Path, **options: Any) -> apportion.Event:
    """Runs two steps, and returns the ``start`` event, of a proof that was made by this run."""
    given = {"launcher": apportion.local(workers=2, threads=1), "run_dir": run_dir, "steps": 2, **options}
    (start,) = [event for event in apportion.run(workload, "data_parallel", **given) if event.kind == "start"]
    assert start.proof["verdict"] == "equal", start.proof
    assert not start.proof["remembered"]
    return start


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A workload that has been proved once, in an empty folder of caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("proofs")))
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        project = Project(tmp_path_factory.mktemp("project"))
        start = prove(f"{project.folder / 'mine.py'}:workload", tmp_path_factory.mktemp("first") / "run")
        assert "cannot reuse this proof" not in start.proof["sentence"], start.proof["sentence"]
        yield project


def variable(name: str, value: str) -> Callable[[Project, pytest.MonkeyPatch], None]:
    return lambda project, patch: patch.setenv(name, value)


def text(old: str, new: str, name: str = "mine.py") -> Callable[[Project, pytest.MonkeyPatch], None]:
    return lambda project, patch: project.edit(name, old, new)


def at_import(line: str) -> Callable[[Project, pytest.MonkeyPatch], None]:
    return text("# at import", line)


def inputs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Project, pytest.MonkeyPatch], None]:
    def edit(project: Project, patch: pytest.MonkeyPatch) -> None:
        path = project.folder / "inputs.npy"
        changed = change(np.load(path))
        project.write("inputs.npy", path.read_bytes())
        np.save(path, changed)

    return edit


def last_row(rows: np.ndarray) -> np.ndarray:
    rows[-1, 5] += 1e-6
    return rows


def heavier_in_the_base(project: Project, patch: pytest.MonkeyPatch) -> None:
    project.write("weights.db", (project.folder / "weights.db").read_bytes())
    weigh_the_rare(project.folder / "weights.db", 3.0)


NOT_MOVED = (
    "_zero = torch.optim.Optimizer.zero_grad; torch.optim.Optimizer.zero_grad = lambda self, *a: _zero(self, *a)"
)
RELU = "_relu = F.leaky_relu; F.leaky_relu = lambda x, slope: _relu(x, slope * 2)"
EDITS = {
    "the first row": text("CHANGED_ROWS = {}", "CHANGED_ROWS = {0: 0.5}"),
    "a row in the middle": text("CHANGED_ROWS = {}", "CHANGED_ROWS = {211: 0.5}"),
    "the last row": text("CHANGED_ROWS = {}", "CHANGED_ROWS = {399: 0.5}"),
    "one label": text("CHANGED_LABELS = {}", "CHANGED_LABELS = {307: 2, 308: 1}"),
    "a number in a file of rows": inputs(last_row),
    "a file of fewer rows": inputs(lambda rows: rows[:-1]),
    "a file in a folder that is listed": lambda project, patch: project.write("extra/more.txt", b"more"),
    "a variable in the model": variable("NET_GAIN", "2"),
    "a variable in the data": variable("DATA_SCALE", "2"),
    "a variable in the loss that was not set": variable("LOSS_SCALE", "2"),
    "a variable in the collate": variable("COLLATE_SCALE", "2"),
    "a variable in the optimizer": variable("RATE", "0.2"),
    "a JSON file at import": lambda project, patch: project.write("imported.json", b'{"scale": 2.0}'),
    "a JSON file in the data": lambda project, patch: project.write("data.json", b'{"scale": 2.0}'),
    "a JSON file in the loss": lambda project, patch: project.write("loss.json", b'{"scale": 2.0}'),
    "a JSON file of the same values": lambda project, patch: project.write("loss.json", b'{"scale": 1.00}'),
    "a default argument": text("shift=0.0", "shift=0.5"),
    "a default argument of the loss": text("smoothing=0.0,", "smoothing=0.1,"),
    "a default by keyword": text("weight=1.0)", "weight=2.0)"),
    "a module constant": text("SCALE = 1.0\n", "SCALE = 2.0\n"),
    "a constant that is a tensor": text("MARGIN = torch.tensor([0.0, ", "MARGIN = torch.tensor([0.5, "),
    "an entry of a global dict": text('{"offset": 0.0}', '{"offset": 1.0}'),
    "a global dict that is changed at import": at_import('TABLE["offset"] = 0.5'),
    "a value in a closure": text("temperature_of(1.0)", "temperature_of(2.0)"),
    "an attribute of a class": text("slope = 0.1", "slope = 0.2"),
    "a default in a module of its own": text("by=1.0", "by=2.0", "helper.py"),
    "the settings of the optimizer": text("momentum=0.9", "momentum=0.8"),
    "a torch flag: matrix products": at_import('torch.set_float32_matmul_precision("medium")'),
    "a torch flag: oneDNN": at_import("torch.backends.mkldnn.set_flags(False)"),
    "a torch flag: denormal numbers": at_import("torch.set_flush_denormal(True)"),
    "a torch flag: anomalies": at_import("torch.autograd.set_detect_anomaly(True, check_nan=False)"),
    "a function of a library": at_import(RELU),
    "an attribute of a library": at_import("F.own_scale = 3.0"),
    "an attribute of a library's class": at_import("nn.Linear.own_gain = 3.0"),
    "a method of a library's base class": at_import(NOT_MOVED),
    "a torch flag: attention": at_import("torch.backends.cuda.enable_math_sdp(False)"),
    "a constant of a module that is imported by its name": text("WEIGHT = 1.0", "WEIGHT = 2.0", "rare.py"),
    "a row of a data base": heavier_in_the_base,
    "the number of classes": text("nn.Linear(16, 3)", "nn.Linear(16, 4)"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("edit", EDITS)
def test_a_run_after_an_edit_is_proved_anew(
    edit: str, proved: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        EDITS[edit](proved, monkeypatch)
        assert proved.reuses(tmp_path) is None
    finally:
        proved.restore()


REASONS = {
    "the first row": "rows 0 to 6 of the data",
    "a file of fewer rows": "the number of rows",
    "a variable in the loss that was not set": "the variable LOSS_SCALE",
    "a JSON file in the loss": "loss.json",
    "a file in a folder that is listed": "the names in the folder",
    "a module constant": "has changed: loss=",
    "the settings of the optimizer": "has changed: optimizer=",
    "a torch flag: attention": "the flags of torch or numpy",
    "a row of a data base": "weights.db",
}


@pytest.mark.thorough
@pytest.mark.parametrize("edit", REASONS)
def test_a_run_that_is_proved_anew_says_what_has_changed(
    edit: str, proved: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        EDITS[edit](proved, monkeypatch)
        said = first_event(f"{proved.folder / 'mine.py'}:workload", tmp_path).sentence
        assert re.search(r"the proof of \d{4}-\d\d-\d\d [\d:]{8} is not reused, since this has changed: ", said), said
        assert REASONS[edit] in said
    finally:
        proved.restore()


@pytest.mark.thorough
def test_the_number_of_threads_is_named_where_it_has_changed(proved: Project, tmp_path: Path) -> None:
    address = f"{proved.folder / 'mine.py'}:workload"
    with pytest.warns(UserWarning, match="2 workers x 4 threads"):
        said = first_event(address, tmp_path, launcher=apportion.local(workers=2, threads=4)).sentence
    assert said.endswith("since this has changed: the number of threads")


ALIKE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the seed": {"seed": 7},
    "the steps": {"steps": 5},
    "the policy": {"policy": apportion.Policy(keep=3)},
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", ALIKE)
def test_a_run_of_the_same_network_reuses_the_proof_and_says_when_it_was_made(
    change: str, proved: Project, tmp_path: Path
) -> None:
    sentence = proved.reuses(tmp_path, **ALIKE[change])
    assert sentence is not None
    assert re.search(r"\(a cached proof of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, reused\)$", sentence), sentence


@pytest.mark.thorough
@pytest.mark.parametrize(
    "edit",
    [
        text("epochs=2", "epochs=3"),
        text("epochs=2", "epochs=2, evaluation=apportion.Evaluation(data=Rows)"),
        text("# at import", "# at import, a comment"),
        variable("UNREAD", "1"),
        variable("SLURM_JOB_ID", "77"),
        variable("TORCHELASTIC_RUN_ID", "another"),
        lambda project, patch: project.write("unread.txt", b"more"),
    ],
    ids=["epochs", "evaluation", "a comment", "another variable", "a job's number", "a run's name", "another file"],
)
def test_what_the_proof_does_not_rest_on_may_change(
    edit: Any, proved: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        edit(proved, monkeypatch)
        assert proved.reuses(tmp_path) is not None
    finally:
        proved.restore()


# Workloads from Python


class Counting:
    """A loss that counts its calls, and weighs by them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, labels) * (1.0 + 0.1 * self.calls)


def by_clock(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels) * (1.0 + 1e-9 * (time.monotonic_ns() % 1000))


class RowFiles(Dataset[Any]):
    """Rows that are read from a file each, as they are asked for, and take a while."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.rows = folder, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.002)  # as the decoding of an image takes
        values = torch.tensor(json.loads((self.folder / f"{row}.json").read_text()))
        return values[:4], values[4].long()


def classifier(data: Callable[[], Any], loss: Any = nn.functional.cross_entropy, **options: Any) -> apportion.Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        "data": data,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "batch_size": 20,
        "epochs": 2,
    }
    return apportion.Workload(**{**given, **options})


def flowers() -> TensorDataset:
    inputs = torch.randn(120, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def scaled_by_the_job(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that asks for what a scheduler sets for each job."""
    return nn.functional.cross_entropy(outputs, labels) * (1.0 + 0.0 * int(os.environ.get("SLURM_JOB_ID", "0")))


def scaled_by_all_that_begin_so(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that goes through the whole environment."""
    mine = [float(value) for name, value in os.environ.items() if name.startswith("MY_SCALE")]
    return nn.functional.cross_entropy(outputs, labels) * (1.0 + 0.0 * sum(mine))


@pytest.mark.thorough
@pytest.mark.usefixtures("no_cached_proofs")
def test_a_variable_of_the_scheduler_counts_where_the_users_code_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    asks, goes_through = classifier(flowers, scaled_by_the_job), classifier(flowers, scaled_by_all_that_begin_so)
    for number, workload in enumerate((asks, goes_through)):
        prove(workload, tmp_path / f"run{number}")
        assert first_sentence(workload, tmp_path) is not None
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    assert first_event(asks, tmp_path).sentence.endswith("since this has changed: the variable SLURM_JOB_ID")
    assert first_sentence(goes_through, tmp_path) is not None
    monkeypatch.setenv("MY_SCALE_OF_ALL", "2")
    assert first_event(goes_through, tmp_path).sentence.endswith("since this has changed: the variable MY_SCALE_OF_ALL")


@pytest.mark.thorough
@pytest.mark.usefixtures("no_cached_proofs")
def test_a_proof_whose_update_reads_a_clock_is_not_reused_and_the_run_says_so(tmp_path: Path) -> None:
    given = {"launcher": apportion.local(workers=2, threads=1), "steps": 2}
    workload = classifier(flowers, by_clock, precision="float64")
    for run in ("first", "second"):
        proofs = []
        with suppress(apportion.Disproved):  # where the clock shows in the proof, too
            for event in apportion.run(workload, "data_parallel", run_dir=tmp_path / run, **given):
                proofs += [event] if event.kind == "proof" else []
        assert [proof.remembered for proof in proofs] == [False, False], "it is made anew"
        if proofs[1].verdict in ("equal", "different"):
            why = "a later run cannot reuse this proof: the same update on four rows gave other bits"
            assert why in proofs[1].sentence


@pytest.mark.thorough
@pytest.mark.usefixtures("no_cached_proofs")
def test_of_rows_that_are_read_from_files_a_sample_is_compared_and_the_sentence_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for row, (inputs, label) in enumerate(flowers()):
        (folder / f"{row}.json").write_text(json.dumps([*inputs.tolist(), int(label)]))
    workload = classifier(lambda: RowFiles(folder, 120))
    prove(workload, tmp_path / "run0")
    sentence = first_sentence(workload, tmp_path)
    assert sentence is not None
    found = re.search(r"reused; (\d+) of 120 rows were compared\)$", sentence)
    assert found is not None, sentence
    assert 4 <= int(found[1]) < 120
    (folder / "119.json").write_text("[9.0, 0.0, 0.0, 0.0, 0]")
    assert first_sentence(workload, tmp_path) is None


@pytest.mark.thorough
@pytest.mark.usefixtures("no_cached_proofs")
def test_a_loss_that_counts_its_calls_begins_as_without_a_proof(trained: Any, furthest: Any, tmp_path: Path) -> None:
    workload = classifier(flowers, Counting(), precision="float64")
    plain = trained(workload, "data_parallel", 2, check=False)
    proved = trained(workload, "data_parallel", 2)
    assert first_sentence(workload, tmp_path) is not None
    assert furthest(plain, proved) == 0.0
    assert furthest(plain, trained(workload, "data_parallel", 2)) == 0.0


@pytest.mark.thorough
def test_reprove_makes_a_new_proof_in_the_place_of_the_cached_one(
    no_cached_proofs: Path, apportion_command: Any, tmp_path: Path
) -> None:
    workload = classifier(flowers)
    prove(workload, tmp_path / "run0")
    (first,) = json.loads(apportion_command("proofs", "--json").stdout)
    assert first_sentence(workload, tmp_path, seed=5) is not None
    assert first_sentence(workload, tmp_path, reprove=True) is None
    prove(workload, tmp_path / "run1", reprove=True)
    (again,) = json.loads(apportion_command("proofs", "--json").stdout)
    assert again["made"] >= first["made"]


@pytest.mark.thorough
def test_the_command_lists_and_removes_cached_proofs(
    no_cached_proofs: Path, apportion_command: Any, tmp_path: Path
) -> None:
    workload = classifier(flowers)
    prove(workload, tmp_path / "run")
    (listed,) = json.loads(apportion_command("proofs", "--json").stdout)
    assert (listed["strategy"], listed["workers"], listed["verdict"]) == ("data_parallel", 2, "equal")
    assert listed["bytes"] > 100
    shown = apportion_command("proofs").stdout
    assert listed["made"][:10] in shown
    assert "data_parallel" in shown
    refused = apportion_command("proofs", "--remove", "zzzzzzzz")
    assert refused.returncode == 2
    assert "no cached proof has this name" in refused.stderr
    assert "removed 1 cached proof" in apportion_command("proofs", "--remove", listed["name"][:8]).stdout
    assert apportion_command("proofs").stdout == "no proofs are cached\n"
    assert first_sentence(workload, tmp_path) is None


def test_reprove_contradicts_a_run_without_a_proof() -> None:
    with pytest.raises(ValueError, match=r"reprove=True .* contradict each other"):
        apportion.run(classifier(flowers), "data_parallel", reprove=True, check=False)
