"""Exports to ONNX: networks of variable length, int8 of raw columns, and what the messages about a file are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DATA, Command
from torch import Tensor, nn

import apportion
from apportion.api.export import Data, Examples, verified

INT8 = "onnx(precision='int8')"


class Recurrent(nn.Module):
    """Any number of tokens -> five classes."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.recurrent = getattr(nn, kind)(16, 12, batch_first=True, **options)
        self.out = nn.Linear(24 if options.get("bidirectional") else 12, 5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.recurrent(self.embed(ids))[0].mean(1))
        return found


class Keyword(Recurrent):
    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.recurrent(input=self.embed(ids), hx=None)[0].mean(1))
        return found


class Alone(Recurrent):
    """The examples are the steps of one sequence."""

    def __init__(self) -> None:
        super().__init__("RNN", bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.recurrent(x.mean(1), torch.ones(2, 12))
        found: Tensor = self.out(outputs) + state.sum()
        return found


class Packed(Recurrent):
    def forward(self, ids: Tensor) -> Tensor:
        lengths = torch.full((len(ids),), ids.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
        found: Tensor = self.out(self.recurrent(packed)[1][-1])
        return found


class Attending(nn.Module):
    """Tokens and their mask, of the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 5)
        self.places = nn.Parameter(torch.randn(64, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.block(self.embed(ids) + self.places[: ids.shape[1]], src_key_padding_mask=~mask)
        found: Tensor = self.out((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return found


class Pooling(nn.Sequential):
    """Images of any height and width."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 4),
        )  # fmt: skip


class Deciding(nn.Module):
    """Another network for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mean(1)
        found: Tensor = self.out(2 * x if ids.shape[1] > 16 else x)
        return found


def tokens(length: int, rows: int = 3) -> Tensor:
    return torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(length))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def masked(length: int) -> dict[str, Tensor]:
    ids = tokens(length)
    return {"ids": ids, "mask": torch.arange(length)[None] < torch.tensor([length, length // 2, 1])[:, None]}


Case = tuple[Callable[[], nn.Module], Callable[[int], Any]]
VARIABLE: dict[str, Case] = {"attention": (Attending, masked)}
FURTHER: dict[str, Case] = {
    "rnn": (lambda: Keyword("RNN", num_layers=2, bidirectional=True), tokens),
    "one sequence alone": (Alone, lambda n: torch.randn(7, n, 16)),
    "lstm": (lambda: Recurrent("LSTM", bidirectional=True), tokens),
    "gru": (lambda: Recurrent("GRU", num_layers=2), tokens),
    "relu rnn": (lambda: Recurrent("RNN", nonlinearity="relu", bias=False), tokens),
    "images": (Pooling, lambda n: torch.randn(3, 3, n + 8, n + 9)),
}


@pytest.mark.parametrize("name", [*VARIABLE, *(pytest.param(name, marks=pytest.mark.thorough) for name in FURTHER)])
def test_a_network_of_variable_size_is_exported_for_every_size(name: str, tmp_path: Path) -> None:
    make, inputs = (VARIABLE | FURTHER)[name]
    torch.manual_seed(0)
    net = make().eval()
    path = apportion.export(net, inputs(25), tmp_path / "net.onnx", check=[inputs(12)]).path
    for length in (2, 7, 12, 33, 60):
        given = inputs(length)
        with torch.no_grad():
            expected = net(**given) if isinstance(given, dict) else net(given)
        np.testing.assert_allclose(run(path, given), expected, rtol=1e-4, atol=1e-5)


def run(path: Path, inputs: Any) -> Any:
    import onnxruntime

    file = onnxruntime.InferenceSession(path)
    leaves = list(inputs.values()) if isinstance(inputs, dict) else [*inputs] if isinstance(inputs, tuple) else [inputs]
    return file.run(None, {one.name: x.numpy() for one, x in zip(file.get_inputs(), leaves, strict=True)})[0]


def test_a_size_that_is_fixed_is_stated_with_how_to_free_it(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(32, 4), nn.AdaptiveAvgPool2d((1, 4)), nn.Flatten(), nn.Linear(4, 3))
    message = apportion.export(net, tokens(25), tmp_path / "net.onnx").conclusion
    assert "25 in dimension 1" in message
    assert "check=[inputs]" in message


def test_a_network_that_decides_by_a_size_is_refused_where_the_inputs_are_of_both_sides(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Deciding .* dimension 1 \(12 to 25 .* 17 or more alone, .* have 12"):
        apportion.export(Deciding(), tokens(25), tmp_path / "net.onnx", check=[tokens(12)])
    assert list(tmp_path.iterdir()) == []


def test_a_packed_sequence_is_refused_by_the_layer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer recurrent \(RNN\) .* PackedSequence, .* padded tensor"):
        apportion.export(Packed("RNN"), tokens(25), tmp_path / "net.onnx", check=[tokens(12)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_what_the_network_computes_beyond_the_range_of_a_file_is_stated(tmp_path: Path) -> None:
    message = apportion.export(Deciding(), tokens(25), tmp_path / "net.onnx", check=[tokens(20)]).conclusion
    assert "may be of 17 or more" in message


VARIED = """
import torch
from torch import nn
import apportion

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, n):
        ids = torch.randint(1, 20, (4 + n % 9,), generator=torch.Generator().manual_seed(n))
        return ids, int(ids.sum()) % 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, ids):
        return self.out(self.embed(ids).sum(1))

def padded(items):
    rows, targets = zip(*items)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(targets)

workload = apportion.Workload(
    model=Net, data=Words, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    batch_size=16, steps=3, collate=padded,
)
"""


@pytest.mark.thorough
def test_a_run_on_sequences_is_exported_for_lengths_beyond_those_of_its_data(
    apportion_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "work.py").write_text(VARIED)
    (tmp_path / "pyproject.toml").touch()
    done = apportion_command("train", "work.py:workload", "--strategy", "single_device", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    done = apportion_command("export", "run")
    assert done.returncode == 0, done.stderr
    for length in (1, 4, 30):
        assert run(tmp_path / "run" / "model.onnx", tokens(length) % 20).shape == (3, 2)


def trained(net: nn.Module, x: Any, y: Tensor, loss: Callable[..., Tensor], steps: int = 300) -> nn.Module:
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(y), (128,))
        optimizer.zero_grad()
        loss(net(*(part[rows] for part in x)) if isinstance(x, tuple) else net(x[rows]), y[rows]).backward()
        optimizer.step()
    return net.eval()


def regression(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def columns(rows: int) -> tuple[Tensor, Tensor]:
    """Raw columns of very different sizes, and what is to be found from them."""
    torch.manual_seed(0)
    x = torch.exp(torch.randn(rows, 8) + torch.tensor([0.0, 1, 2, 3, 6, 7, 7, 8]))
    return x, x[:, :1].log() + 0.5 * x[:, 4:5].log() - 0.3 * x[:, 7:].log() + 0.3 * torch.randn(rows, 1)


def test_a_regression_on_raw_columns_in_int8_loses_next_to_nothing(tmp_path: Path) -> None:
    x, y = columns(3000)
    mse = nn.functional.mse_loss
    net = trained(regression(nn.BatchNorm1d(8)), x[:1000], y[:1000], mse)
    data = Data(
        calibration=Examples(x[:300], y[:300]), held_out=Examples(x[1000:2000], y[1000:2000]), metrics={"mse": mse}
    )
    made = apportion.export(net, x[:4], tmp_path / "net.onnx", target=INT8, data=data)
    assert made.about["int8_layers"]
    with torch.no_grad():
        before, after = mse(net(x[2000:]), y[2000:]), mse(torch.from_numpy(run(made.path, x[2000:])), y[2000:])
    assert after < 1.01 * before
    (line, *_) = verified(made)
    apart = made.verification.network_difference
    assert apart > 0
    assert f"by {apart:.2g} from the network's own" in line


class Housing(nn.Module):
    """Numbers, and an embedding of a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.numbers = nn.Embedding(5, 4), nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        found: Tensor = self.layers(torch.cat([self.numbers(x), self.kind(kind)], 1))
        return found


@pytest.mark.thorough
@pytest.mark.data("california_housing")
@pytest.mark.parametrize("name", ["normalised", "embedded"])
def test_house_prices_in_int8_on_rows_that_nothing_has_seen(name: str, tmp_path: Path) -> None:
    table = np.genfromtxt(
        DATA / "california_housing" / "housing.csv", delimiter=",", names=True, dtype=None, encoding="utf-8"
    )
    kinds = sorted(set(table["ocean_proximity"]))
    given = [one for one in table.dtype.names if one not in ("median_house_value", "ocean_proximity")]
    numbers = torch.tensor(np.stack([np.nan_to_num(table[one].astype(np.float32), nan=435.0) for one in given], 1))
    kind = torch.tensor([kinds.index(one) for one in table["ocean_proximity"]])
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
    y = torch.tensor(table["median_house_value"].astype(np.float32) / 1e5)[order, None]
    x: Any = (numbers[order], kind[order]) if name == "embedded" else numbers[order]

    def rows(start: int, end: int) -> Any:
        return tuple(part[start:end] for part in x) if isinstance(x, tuple) else x[start:end]

    mse = nn.functional.mse_loss
    net = trained(Housing() if name == "embedded" else regression(nn.BatchNorm1d(8)), rows(0, 5000), y[:5000], mse)
    data = Data(
        calibration=Examples(rows(0, 1000), y[:1000]), held_out=Examples(rows(5000, 9000), y[5000:9000]),
        metrics={"mse": mse},
    )  # fmt: skip
    made = apportion.export(net, rows(0, 4), tmp_path / "net.onnx", target=INT8, data=data)
    unseen = rows(9000, 20000)
    with torch.no_grad():
        own = net(*unseen) if isinstance(unseen, tuple) else net(unseen)
    assert mse(torch.from_numpy(run(made.path, unseen)), y[9000:20000]) < 1.01 * mse(own, y[9000:20000])


@pytest.mark.parametrize(
    ("groups", "bias"), [(4, False), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(2, True)])]
)
def test_a_transposed_convolution_in_groups_stays_in_float_and_is_named(
    groups: int, bias: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1, groups=groups, bias=bias), nn.ReLU(),
        nn.Conv2d(4, 1, 3, 1, 1),
    ).eval()  # fmt: skip
    x = 3 * torch.randn(200, 1, 8, 8)
    with torch.no_grad():
        y = net(x)
    data = Data(calibration=Examples(x[:100], y[:100]), held_out=Examples(x[100:], y[100:]), metrics={})
    made = apportion.export(net, x[:2], tmp_path / "net.onnx", target=INT8, data=data)
    assert made.about["float32_layers"] == ["2"]
    assert made.about["int8_layers"] == ["0", "4"]
    assert np.square(run(made.path, x) - y.numpy()).mean() < 0.01 * y.var()


def wrong(x: Tensor, row: int, value: float) -> Tensor:
    x = x.clone()
    x[row, 0] = value
    return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y: (wrong(x, 7, float("nan")), y), "calibration= has nan in the input of example 7"),
        (lambda x, y: (wrong(x, 0, float("inf")), y), "calibration= has inf in the input of example 0"),
        (lambda x, y: (x, y / 0), "calibration= has .* in the target of example 0"),
        (lambda x, y: (x[:0], y[:0]), "calibration= has no examples"),
        (lambda x, y: (x[:90], y[:40]), "calibration= has 90 inputs and 40 targets"),
        (lambda x, y: (x[:, :7], y), r"calibration= has an input of shape \(200, 7\), and sample= has \(4, 8\)"),
        (lambda x, y: (x[..., None], y), r"calibration= has an input of shape \(200, 8, 1\)"),
        (lambda x, y: (x.double(), y), "calibration= has inputs of torch.float64, and sample= has torch.float32"),
        (lambda x, y: ((x, x), y), "calibration= has inputs of another structure"),
    ],
)
def test_bad_examples_for_calibration_are_refused_by_the_argument(
    make: Callable[[Tensor, Tensor], tuple[Any, Any]], message: str, tmp_path: Path
) -> None:
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(200, 8)
    data = Data(calibration=Examples(*make(x, torch.ones(200, 3))))
    with pytest.raises(ValueError, match=message):
        apportion.export(net, x[:4], tmp_path / "net.onnx", target=INT8, data=data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y: {"data": Examples(x, y)}, r"data= is Examples, and must be Data\("),
        (lambda x, y: {"data": Data(calibration=(x, y))}, r"calibration= is tuple, and must be Examples\("),  # type: ignore[arg-type]
        (lambda x, y: {"data": Data(held_out=x)}, r"held_out= is Tensor, and must be Examples\("),
        (lambda x, y: {"data": Data(held_out=Examples(x, None))}, "held_out= has None among its targets.*check="),
        (lambda x, y: {"data": Data(held_out=Examples(x, y.tolist()))}, r"held_out= has 0 .*torch\.tensor\("),
        (lambda x, y: {"data": Data(metrics=[nn.functional.mse_loss])}, r"metrics=\[.* must be functions"),  # type: ignore[arg-type]
        (lambda x, y: {"data": Data(metrics={"mse": "mse"})}, "metrics=.* must be functions"),  # type: ignore[dict-item]
        (lambda x, y: {"check": x}, r"check= is Tensor, and must be a list .*\[inputs\]"),
        (lambda x, y: {"limit": float("nan")}, "limit=nan must be .* at least 0"),
        (lambda x, y: {"limit": "none"}, "limit='none' must be"),
        (lambda x, y: {"target": 3}, 'target=3 must be a target, or its name, such as "onnx"'),
    ],
)
def test_arguments_of_other_kinds_are_refused_by_name(
    make: Callable[[Tensor, Tensor], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    x, y = torch.randn(20, 8), torch.zeros(20, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        apportion.export(nn.Linear(8, 3), x[:4], tmp_path / "net.onnx", **make(x, y))
    assert list(tmp_path.iterdir()) == []


class Lengths(nn.Module):
    """An LSTM that a file has with the lengths of its sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(1, 24, 8), torch.randn(1, 24, 6), torch.randn(1, 48)])

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[1],), x.shape[0], dtype=torch.int32)
        (found,) = torch.onnx.ops.symbolic_multi_out(
            "LSTM", (x, *self.weights, lengths), attrs={"hidden_size": 6}, dtypes=(x.dtype,),
            shapes=[(x.shape[0], 1, x.shape[1], 6)],
        )  # fmt: skip
        return found[:, 0]


class Tagging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = Lengths(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(x.transpose(0, 1)).mean(0))
        return found


def test_what_the_evaluator_of_int8_does_not_compute_is_refused_by_the_layer(tmp_path: Path) -> None:
    x = torch.randn(40, 5, 8)
    data = Data(calibration=Examples(x, torch.zeros(40)))
    with pytest.raises(ValueError, match=r"layer words \(\w*LSTM\) .*with lengths.*precision='float16'"):
        apportion.export(Tagging(), x[:2], tmp_path / "net.onnx", target=INT8, data=data)
    assert list(tmp_path.iterdir()) == []


class Mean(nn.Sequential):
    """Numbers for each example, and one for all of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found: Tensor = super().forward(x)
        return found, found.mean()


@pytest.mark.parametrize(
    ("make", "inputs", "check"),
    [
        (lambda: Recurrent("RNN", bidirectional=True), tokens(5, 60), []),
        (lambda: Recurrent("RNN", bidirectional=True, nonlinearity="relu"), tokens(5, 60), [tokens(4)]),
        (lambda: Mean(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), normal(60, 8), []),
    ],
    ids=["reversed", "rectified", "one number"],
)
def test_what_is_in_float_beside_int8_is_compared_too(
    make: Callable[[], nn.Module], inputs: Tensor, check: list[Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = Data(calibration=Examples(inputs, torch.zeros(60)), metrics={})
    made = apportion.export(make().eval(), inputs, tmp_path / "net.onnx", target=INT8, data=data, check=check)
    assert made.about["int8_layers"]
    assert made.verification.examples >= 60


@pytest.mark.thorough
def test_one_value_that_is_far_off_among_the_examples_for_calibration_does_no_harm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(1300, 8)
    y = x[:, :3].argmax(1)
    trained(net, x[:300], y[:300], nn.functional.cross_entropy)
    far = wrong(x[:300], 7, 1e4)
    with torch.no_grad():
        data = Data(calibration=Examples(far, net(far).argmax(1)))
        made = apportion.export(net, x[:4], tmp_path / "net.onnx", target=INT8, data=data)
        own = net(x[300:]).argmax(1)
    assert (torch.from_numpy(run(made.path, x[300:])).argmax(1) == own).double().mean() > 0.99


def test_held_out_examples_of_a_regression_need_no_metrics(tmp_path: Path) -> None:
    x, y = torch.randn(60, 8), torch.randn(60, 3)
    made = apportion.export(nn.Linear(8, 3), x[:2], tmp_path / "net.onnx", data=Data(held_out=Examples(x, y)))
    assert made.verification.before == {}


def test_an_onnx_file_is_no_run_and_the_message_says_what_takes_it(apportion_command: Command, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"any")
    done = apportion_command("export", "net.onnx", "--target", INT8)
    assert done.returncode == 2
    assert "net.onnx is an ONNX file already" in done.stderr
    assert "apportion serve net.onnx" in done.stderr
    assert "export takes the folder of a run" in done.stderr
