"""The digest of a workload: the same in every process, and another after every edit that could change the network."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import real_models
import torch
from torch import Tensor, nn

from apportion import Workload
from apportion.runtime.proof import installed_packages
from apportion.runtime.proof.value_digest import Digester, UnhashableError
from apportion.runtime.proof.workload_digest import digested

HELPER = '''
"""Layers of one's own."""
import math

SLOPE = 0.25
UNUSED = 1


class Scaled(nn.Module if (nn := __import__("torch").nn) else object):
    gain = 2.0

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.offset = 3.0

    def forward(self, x):
        return leak(self.linear(x)) * self.gain + self.offset


def leak(x):
    return x.clamp(min=0) + SLOPE * x.clamp(max=0)


def decay(step):
    return 0.9 ** math.floor(step)
'''

SOURCE = '''
"""A workload whose every field is written here."""
import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from apportion import Workload
import HELPER as helper

WIDTHS = {"first": 8, "second": 4}
WEIGHTS = torch.tensor([1.0, 2.0])
TABLE = np.arange(4.0)
NAMES = {"alpha", "beta", "gamma"}


@dataclass(frozen=True)
class Options:
    smoothing: float = 0.1
    tags: tuple = ("a", "b")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = helper.Scaled(WIDTHS["first"])
        self.head = nn.Linear(8, 2, bias=True)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.head(self.drop(self.scaled(x)))


def criterion(options, scale):
    def loss(outputs, targets):
        # how wrong the outputs are
        value = nn.functional.cross_entropy(outputs, targets, weight=WEIGHTS, label_smoothing=options.smoothing)
        return value * scale if "alpha" in NAMES else value
    return loss


class Flip:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, batch, draws):
        return self.change(batch, draws)

    def change(self, batch, draws):
        return batch


def rows(targets, *, least=1.0):
    return max(float(len(targets)), least)


def collate(samples, stack=torch.stack):
    return stack([x for x, _ in samples]) + TABLE[0], torch.tensor([y for _, y in samples])


def schedule(optimizer, total):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, helper.decay)


def make(lr, p):
    return torch.optim.SGD(p, lr=lr, momentum=0.9)


workload = Workload(
    model=Net,
    data=lambda: [(torch.zeros(8), 0)] * 12,
    loss=criterion(Options(), 1.0),
    optimizer=functools.partial(make, 0.1),
    batch_size=4,
    count=rows,
    collate=collate,
    augment=Flip(0.5),
    schedule=schedule,
    clip_grad_norm=1.0,
    precision="float32",
    compile=False,
)
'''

EDITS = [
    ("WIDTHS = {", 'WIDTHS = {"third": 5, '),
    ("torch.tensor([1.0, 2.0])", "torch.tensor([1.0, 2.5])"),
    ("np.arange(4.0)", "np.arange(4.0) + 1"),
    ('"gamma"', '"delta"'),
    ("smoothing: float = 0.1", "smoothing: float = 0.2"),
    ('("a", "b")', '("a", "c")'),
    ("bias=True", "bias=False"),
    ("nn.Dropout(0.0)", "nn.Dropout(0.1)"),
    ("self.head(self.drop(self.scaled(x)))", "self.head(self.scaled(self.drop(x)))"),
    ("value * scale if", "value / scale if"),
    ("criterion(Options(), 1.0)", "criterion(Options(), 2.0)"),
    ("Flip(0.5)", "Flip(0.25)"),
    ("return self.change(batch, draws)", "return batch"),
    ("least=1.0", "least=0.0"),
    ("stack=torch.stack", "stack=torch.vstack"),
    ("[x for x, _ in samples]", "[x + 1 for x, _ in samples]"),
    ("LambdaLR(optimizer", "MultiplicativeLR(optimizer"),
    ("momentum=0.9", "momentum=0.8"),
    ("torch.optim.SGD(p, lr=lr, momentum=0.9)", "torch.optim.Adam(p, lr=lr)"),
    ("partial(make, 0.1)", "partial(make, 0.2)"),
    ("batch_size=4", "batch_size=5"),
    ("clip_grad_norm=1.0", "clip_grad_norm=2.0"),
    ('precision="float32"', 'precision="bfloat16"'),
    ("compile=False", "compile=True"),
    ("augment=Flip(0.5),", ""),
    ("count=rows,", ""),
    ("loss=criterion(Options(), 1.0)", "update=lambda step, batch: {}"),
]
HELPER_EDITS = [
    ("SLOPE = 0.25", "SLOPE = 0.5"),
    ("gain = 2.0", "gain = 2"),
    ("self.offset = 3.0", "self.offset = 4.0"),
    ("clamp(min=0)", "clamp(max=0)"),
    ("math.floor", "math.ceil"),
    ("0.9 **", "0.8 **"),
]
KEPT = [
    ("# how wrong the outputs are", "# otherwise said"),
    ("import functools\n", "\n\n\nimport functools\n"),
    ("[(torch.zeros(8), 0)] * 12", "[(torch.zeros(8), 0)] * 13"),
]

_numbers = itertools.count()


def written(folder: Path, source: str, helper: str) -> Path:
    name = f"layers_{next(_numbers)}"
    (folder / f"{name}.py").write_text(helper)
    path = folder / f"workload_{name}.py"
    path.write_text(source.replace("HELPER", name))
    return path


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Workload]:
    """Write the workload with one edit, and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def opened(source: str = SOURCE, helper: str = HELPER) -> Workload:
        path = written(tmp_path, source, helper)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        found: Workload = module.workload
        return found

    return opened


def digest(workload: Workload, **given: Any) -> str:
    found = digested(workload, given={"strategy": "data_parallel", "ranks": 2} | given)
    assert found.digest is not None, found.unhashable
    return found.digest


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_an_edit_of_one_line_gives_another_digest(opened: Callable[..., Workload], old: str, new: str) -> None:
    assert SOURCE.count(old) == 1 or old == "momentum=0.9"
    assert digest(opened(SOURCE.replace(old, new))) != digest(opened())


@pytest.mark.parametrize(("old", "new"), HELPER_EDITS)
def test_an_edit_of_a_module_that_is_imported_gives_another_digest(
    opened: Callable[..., Workload], old: str, new: str
) -> None:
    assert HELPER.count(old) == 1
    assert digest(opened(helper=HELPER.replace(old, new))) != digest(opened())


@pytest.mark.parametrize(("old", "new"), KEPT)
def test_what_decides_nothing_keeps_the_digest(opened: Callable[..., Workload], old: str, new: str) -> None:
    assert old in SOURCE
    assert digest(opened(SOURCE.replace(old, new))) == digest(opened())


def test_what_the_caller_gives_is_part_of_it(opened: Callable[..., Workload]) -> None:
    workload = opened()
    found = [digest(workload, **given) for given in ({}, {"ranks": 3}, {"strategy": "map_reduce"}, {"threads": 2})]
    assert len(set(found)) == 4
    shapes = [digested(workload, batch=(torch.zeros(rows, 8), torch.zeros(rows))).digest for rows in (4, 5)]
    assert shapes[0] != shapes[1]


def told_by_two_processes(program: str) -> list[str]:
    """What a program prints in each of two processes that order their sets, and hash their texts, otherwise."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, seed],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            text=True,
        )
        for seed in ("1", "2")
    ]
    return [process.communicate(timeout=100)[0] for process in processes]


@pytest.mark.processes
@pytest.mark.thorough
def test_two_processes_that_order_their_sets_otherwise_find_the_same_digest(tmp_path: Path) -> None:
    path = written(tmp_path, SOURCE, HELPER)
    first, second = told_by_two_processes(f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from {path.stem} import workload
from apportion.runtime.proof.workload_digest import digested
import torch; torch.manual_seed(int(sys.argv[1]))
network = workload.model()
print(digested(workload, network=network))
""")
    assert "unhashable=None" in first
    assert first == second


@pytest.mark.processes
@pytest.mark.thorough
def test_so_they_do_of_the_networks_of_model_libraries() -> None:
    first, second = told_by_two_processes("""
import real_models
from apportion.runtime.proof.workload_digest import digested
for name, workload in real_models.MODELS.items():
    print(name, digested(workload, network=workload.model(), batch=workload.open_data()[0]))
""")
    assert first.count("unhashable=None") == len(real_models.MODELS)
    assert first == second


# The network that was built


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, scale: Any = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale


def of_network(network: nn.Module) -> str:
    workload = Workload(model=nn.Identity, data=list, optimizer=list, batch_size=1, loss=nn.MSELoss())  # type: ignore[arg-type]
    found = digested(workload, network=network)
    assert found.digest is not None, found.unhashable
    return found.digest


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    return layer


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair[1].weight = pair[0].weight
    return pair


def test_every_attribute_of_a_network_is_part_of_its_digest() -> None:
    networks = [
        nn.Linear(2, 2),
        nn.Linear(2, 3),
        nn.Linear(2, 2, dtype=torch.float64),
        frozen(nn.Linear(2, 2)),
        hooked(),
        Outer(nn.Linear(2, 2)),
        Outer(nn.Linear(2, 2), 2.0),
        Outer(nn.Linear(2, 2), lambda x: x),
        Outer(nn.Linear(2, 2), torch.ones(2)),
        Outer(nn.Dropout(0.1)),
        Outer(nn.Dropout(0.2)),
        Outer(nn.Linear(2, 2).eval()),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        tied(),
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, momentum=0.2),
        nn.BatchNorm1d(2, track_running_stats=False),
    ]
    assert len({of_network(network) for network in networks}) == len(networks)


def test_the_settings_of_the_optimizers_are_part_of_it() -> None:
    network = nn.Linear(2, 2)
    workload = Workload(model=nn.Identity, data=list, optimizer=list, batch_size=1, loss=nn.MSELoss())  # type: ignore[arg-type]
    made = [
        torch.optim.SGD(network.parameters(), lr=0.1),
        torch.optim.SGD(network.parameters(), lr=0.2),
        torch.optim.SGD(network.parameters(), lr=0.1, foreach=True),
        torch.optim.SGD([network.weight], lr=0.1),
        torch.optim.ASGD(network.parameters(), lr=0.1),
    ]
    assert len({digested(workload, optimizers={"": optimizer}).digest for optimizer in made}) == len(made)


def test_the_values_of_the_weights_are_no_part_of_it() -> None:
    assert of_network(Outer(nn.BatchNorm1d(3))) == of_network(Outer(nn.BatchNorm1d(3)))
    assert of_network(tied()) == of_network(tied())
    hooks = [hooked(), hooked()]  # their hooks have other numbers
    assert of_network(hooks[0]) == of_network(hooks[1])


def test_a_resnet_takes_less_than_20_ms() -> None:
    block = [nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    network = nn.Sequential(*(Outer(nn.Sequential(*block)) for _ in range(20)))
    of_network(network)
    took = []
    for _ in range(5):
        began = time.thread_time()
        of_network(network)
        took.append(time.thread_time() - began)
    assert min(took) < 0.02


# Values


def named(value: Any) -> str:
    """What stands in the way of a digest."""
    with pytest.raises(UnhashableError) as raised:
        Digester()("loss", value)
    return str(raised.value)


def test_what_has_no_digest_is_named(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        described = named(lambda outputs, targets: log.write("") or outputs)
    assert described.startswith("loss: log: ")
    assert "TextIOWrapper" in described
    assert "generator" in named(x for x in ())
    assert "count" in named([itertools.count()])
    assert "lock" in named({"lock": threading.Lock()})
    workload = Workload(model=nn.Identity, data=list, optimizer=list, batch_size=1, loss=lambda o, t: lock)  # type: ignore[arg-type,return-value]
    lock = threading.Lock()
    assert digested(workload).digest is None
    assert "lock" in str(digested(workload).unhashable)


@dataclass(frozen=True)
class Point:
    x: float
    y: Any = None


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Counted(dict[str, int]):
    extra = 0


def cyclic(value: int) -> list[Any]:
    found: list[Any] = [value]
    found.append({"self": found})
    return found


def recursive(factor: int) -> Callable[[int], int]:
    def down(n: int) -> int:
        return n if n < 1 else factor * down(n - 1)

    return down


PAIRS: list[Callable[[], tuple[Any, Any]]] = [
    lambda: (1, 1.0),
    lambda: (1, True),
    lambda: (0.0, -0.0),
    lambda: ("a", b"a"),
    lambda: ((1, 2), [1, 2]),
    lambda: (("ab", "c"), ("a", "bc")),
    lambda: ({1: 2, 3: 4}, {3: 4, 1: 2}),
    lambda: ({1, 2}, {1, 3}),
    lambda: (Point(1.0), Point(2.0)),
    lambda: (Point(1.0, [1]), Point(1.0, [2])),
    lambda: (Slotted(1), Slotted(2)),
    lambda: (Counted(a=1), Counted(a=2)),
    lambda: (deque([1, 2]), deque([2, 1])),
    lambda: (np.random.default_rng(1), np.random.default_rng(2)),
    lambda: (np.zeros(2), np.zeros((2, 1))),
    lambda: (np.zeros(2), np.zeros(2, dtype=np.float32)),
    lambda: (torch.zeros(2), torch.zeros(2).bfloat16()),
    lambda: (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    lambda: (torch.eye(3), torch.eye(3)[:, [1, 0, 2]]),
    lambda: (torch.zeros(2), nn.Parameter(torch.zeros(2), requires_grad=False)),
    lambda: (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    lambda: (nn.CrossEntropyLoss(torch.ones(2)), nn.CrossEntropyLoss(torch.zeros(2))),
    lambda: (Point(1.0).__eq__, Point(2.0).__eq__),
    lambda: ([1].append, [2].append),
    lambda: (torch.relu, torch.tanh),
    lambda: (functools.partial(max, 1), functools.partial(max, 2)),
    lambda: (functools.lru_cache(recursive(1)), functools.lru_cache(recursive(2))),
    lambda: (torch.no_grad()(recursive(1)), torch.no_grad()(recursive(2))),
    lambda: (cyclic(1), cyclic(2)),
    lambda: (recursive(1), recursive(2)),
    lambda: (Path("a"), Path("b")),
    lambda: (np.float32(1), np.float32(2)),
    lambda: (type("Made", (), {"x": 1}), type("Made", (), {"x": 2})),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_two_values_have_two_digests_and_the_same_value_has_one(pair: Callable[[], tuple[Any, Any]]) -> None:
    first, second = (Digester()("a value", value) for value in pair())
    assert first != second
    assert (first, second) == tuple(Digester()("a value", value) for value in pair())


def test_a_method_put_into_a_class_of_torch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x + 1

    before = of_network(nn.Tanh())
    monkeypatch.setattr(nn.Tanh, "forward", forward)
    assert of_network(nn.Tanh()) != before


def test_modules_that_name_each_other_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ModuleType("one_of_two"), ModuleType("two_of_two")
    for module, code in ((one, "def f(): return two_of_two.g()"), (two, "def g(): return one_of_two.f() + 1")):
        module.__dict__.update(one_of_two=one, two_of_two=two)
        exec(code, module.__dict__)
    first = Digester()("f", one.__dict__["f"])
    exec("def g(): return one_of_two.f() + 2", two.__dict__)
    assert Digester()("f", one.__dict__["f"]) != first


# The same on two hosts


def path_of(folder: Path, name: str) -> Any:
    """A function that names a file of its host, as a text and as a path."""
    text, path = str(folder / name), folder / name
    return lambda: (text, path, "relative/name")


def test_a_portable_digest_is_the_same_in_another_folder_and_not_of_another_file() -> None:
    here, there, other = (
        path_of(Path(folder), name) for folder, name in (("/a", "data.csv"), ("/b/c", "data.csv"), ("/a", "d.csv"))
    )
    portable = [Digester(portable=True)("the function", function) for function in (here, there, other)]
    assert portable[0] == portable[1] != portable[2]
    assert Digester()("the function", here) != Digester()("the function", there)


def test_a_portable_digest_holds_the_version_of_a_package_and_not_the_time_of_its_files() -> None:
    assert installed_packages.release("torch.nn", portable=True) == torch.__version__
    assert installed_packages.release("torch.nn") != torch.__version__
    own = installed_packages.release("apportion.core", portable=True)
    assert own == installed_packages.own_contents()
    assert re.fullmatch(r"\S+ \([0-9a-f]{8}\)", own)
