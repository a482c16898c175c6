"""The tracer: what a network is made of, in the order in which it computes; what cannot be followed is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from apportion.core import tree
from apportion.parallel.tracing.network import Network, recurrent_flops, trace
from apportion.parallel.tracing.tracer import Tracer, Unfollowed, arguments, follow, written

EXAMPLES = Path(__file__).parents[2] / "examples"


def layers(network: Network) -> dict[str, Any]:
    assert len({layer.name for layer in network.layers}) == len(network.layers)
    return {layer.name: layer for layer in network.layers}


def test_a_perceptrons_layers_are_counted() -> None:
    network = trace(networks.perceptron(), torch.randn(5, 10))
    assert network.followed
    assert [(a.name, a.kind, a.inputs) for a in network.layers] == [
        ("0", "Linear", ("input/input",)), ("1", "ReLU", ("0",)), ("2", "Linear", ("1",)),
    ]  # fmt: skip
    first, relu, last = network.layers
    assert (first.input_shapes, first.output_shapes) == (((5, 10),), ((5, 16),))
    assert (first.parameter_bytes, first.activation_bytes, first.flops) == (4 * 176, 4 * 80, 2 * 5 * 10 * 16)
    assert (relu.parameter_bytes, relu.flops) == (0, 0)
    assert network.parameter_bytes == 4 * (176 + 51)
    assert network.flops == 2 * 5 * (160 + 48)
    assert last.module == "2"


def test_a_convolutional_network_has_the_functions_between_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import cifar10_network

    found = layers(trace(cifar10_network.network(), torch.randn(2, 3, 24, 24)))
    assert found["conv2"].output_shapes == ((2, 64, 12, 12),)
    assert found["conv2"].flops == 2 * 2 * 64 * 64 * 25 * 12 * 12
    assert found["conv2"].inputs == ("mul_2",)
    assert found["mul_2"].inputs == ("pool1", "pow_1")
    sys.modules.pop("cifar10_network")


def test_skip_connections_of_a_residual_network_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import resnet20_cifar10

    model = resnet20_cifar10.resnet20()
    network = trace(model, torch.randn(2, 3, 32, 32))
    found = layers(network)
    assert found["add"].inputs == ("layer1.0.bn2", "relu")
    assert found["linear"].inputs == ("mean",)
    assert network.parameter_bytes == sum(p.nbytes for p in model.parameters())
    convolutions = [layer for layer in network.layers if layer.kind == "Conv2d"]
    assert len(convolutions) == 19
    products = sum(c.flops for c in convolutions) + found["linear"].flops
    assert network.flops == products == pytest.approx(2 * 2 * 40.55e6, rel=1e-3)
    sys.modules.pop("resnet20_cifar10")


def products(function: Any, *arguments: Any) -> int:
    """FLOPs as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def test_a_look_at_a_network_leaves_nothing_that_counts_its_operations() -> None:
    for model, followed in ((nn.Linear(3, 3), True), (Deciding(), False)):
        assert trace(model, torch.ones(2, 3)).followed == followed
        assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}])
def test_recurrent_layers_cost_what_their_cells_cost(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    layer = kind(3, 5, **options)
    cell = {nn.RNN: nn.RNNCell, nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell}[kind]
    one_step = products(cell(3, 5), torch.randn(4, 3))
    if options.get("num_layers", 1) == 1:
        expected = 7 * one_step
    else:
        expected = 7 * 2 * (one_step + products(cell(10, 5), torch.randn(4, 10)))
    x = torch.randn(4, 7, 3) if options.get("batch_first") else torch.randn(7, 4, 3)
    assert recurrent_flops(layer, x) == expected
    (found,) = trace(layer, x).layers
    assert found.flops == expected


def test_a_projected_lstm_and_a_packed_sequence_are_counted() -> None:
    layer = nn.LSTM(3, 6, proj_size=2)
    assert recurrent_flops(layer, torch.randn(7, 4, 3)) == 28 * (2 * 4 * 6 * (3 + 2) + 2 * 2 * 6)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(7, 2, 3), torch.tensor([7, 3]))
    assert recurrent_flops(nn.GRU(3, 5), packed) == 10 * 2 * 3 * 5 * 8


def test_a_recurrent_language_model_has_its_carried_state_as_an_argument() -> None:
    found = layers(trace(networks.Letters(), (torch.zeros(4, 5, dtype=torch.long), networks.silence(4))))
    assert found["lstm"].inputs == ("embed", "input/state")
    assert found["lstm"].output_shapes == ((4, 5, 6), (2, 4, 6), (2, 4, 6))
    assert found["lstm"].flops == 20 * 2 * 24 * ((5 + 6) + (6 + 6))


class Attending(nn.Module):
    """A transformer, with a mask that it is given as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False)
        self.place = nn.Parameter(torch.randn(5, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.place
        return self.out(self.encoder(h, self.mask).mean(1))


def test_a_transformer_is_followed_into_its_encoder_and_attention_is_counted() -> None:
    model = Attending()
    found = layers(trace(model, torch.zeros(4, 5, dtype=torch.long)))
    assert list(found) == [
        "embed", "add", "encoder.layers.0", "encoder.layers.1", "encoder.norm", "mean", "out",
    ]  # fmt: skip
    assert found["add"].parameter_bytes == 4 * 40
    rows = 4 * 5
    products = 2 * rows * (8 * 24 + 8 * 8 + 2 * 8 * 16) + 2 * (2 * 4 * 5 * 5 * 8)
    assert found["encoder.layers.1"].flops == products


def test_the_graph_computes_what_the_network_computes() -> None:
    for model, inputs in (
        (Attending(), torch.randint(0, 11, (4, 5))),
        (networks.Two(), {"right": torch.randn(3, 6), "left": torch.randn(3, 4)}),
        (networks.Two(), (torch.randn(3, 4), torch.randn(3, 6))),
        (networks.Twice(), torch.randn(3, 6)),
        (networks.Tied(), torch.randint(0, 12, (3, 5))),
    ):
        graph = follow(model)
        found = torch.fx.Interpreter(model, graph=graph).run(*arguments(graph, inputs))
        expected = tree.call(model, inputs)
        assert all(torch.equal(a, b) for a, b in zip(tree.tensors(found), tree.tensors(expected), strict=True))


def test_a_layer_called_twice_and_arguments_that_are_called_like_layers_have_names_of_their_own() -> None:
    found = layers(trace(networks.Two(), (torch.randn(3, 4), torch.randn(3, 6))))
    assert found["add"].inputs == ("left", "right")
    assert found["left#2"].inputs == found["left"].inputs == ("input/left",)
    assert (found["left"].parameter_bytes, found["left#2"].parameter_bytes) == (60, 0)


# What cannot be followed


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x > 0).any()) else x


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.steps


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(3)


class Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.5
        return x * self.scale


class Kept(nn.Module):
    """Layers where torch does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = {"only": nn.Linear(3, 3)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["only"](x)


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"shapes": []}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["shapes"].append(1)
        return x * len(self.seen["shapes"])


class Caching(nn.Module):
    """A tensor stays in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.append(x * 2)
        return self.outputs[-1]


class Counted(nn.Module):
    """A tensor that is no buffer, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return x * self.steps


class Frozen(nn.Module):
    """No gradient goes through it, which its functions do not tell."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.relu(x)


ODD = [Deciding, Remembering, Noisy, Drifting, Kept, Collecting, Caching, Counted, Frozen]


@pytest.mark.parametrize("odd", ODD)
def test_a_module_whose_forward_cannot_be_followed_is_one_layer(odd: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), odd(), nn.Linear(3, 3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    network = trace(model, torch.ones(2, 3))
    assert network.followed
    assert [layer.name for layer in network.layers] == ["0", "1", "2"]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(isinstance(value, torch.fx.Proxy) for value in (*vars(model[1]).values(), *model[1].buffers()))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (Deciding, "control flow"), (Remembering, "changes its own steps"), (Noisy, "random"), (Drifting, "own scale"),
        (Kept, "layers is a dict with a Linear in it.*nn.ModuleList or nn.ModuleDict"),
        (Collecting, "changes its own seen"), (Caching, "own outputs"), (Counted, "own steps"), (Frozen, "gradients"),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_followed_says_why(odd: type[nn.Module], why: str) -> None:
    with pytest.raises(Unfollowed, match=f"the forward of {odd.__name__} cannot be followed.*{why}"):
        follow(odd())


def test_what_is_seen_to_change_is_put_back() -> None:
    for odd in (Remembering, Collecting, Caching, Counted):
        model = nn.Sequential(odd(), nn.Linear(3, 3))
        follow(model)
        x = torch.ones(2, 3)
        assert torch.equal(model[0](x), odd()(x)), odd


class Listed(nn.Module):
    """Layers in a list of its own, which torch sees where they are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.order = [self.b, self.a]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


def test_layers_in_a_list_are_followed_where_torch_sees_them_too() -> None:
    assert [layer.name for layer in trace(Listed(), torch.ones(2, 3)).layers] == ["b", "a"]


class Placed(nn.Module):
    """Makes tensors in a size that it is given, and takes a part of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(9, 3)
        self.register_buffer("wave", torch.randn(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x + self.place(torch.arange(length, device=x.device)) + self.wave[:length]


def test_tensors_in_a_size_that_is_given_are_made_anew() -> None:
    model = Placed()
    graph = follow(model, torch.randn(2, 5, 3))
    for length in (5, 7):
        x = torch.randn(2, length, 3)
        assert torch.equal(torch.fx.Interpreter(model, graph=graph).run(x), model(x))


class Biased(nn.Module):
    """Asks whether it is given a bias, and whether it is to add it twice."""

    def forward(self, x: Tensor, bias: Tensor | None = None, twice: bool = False) -> Tensor:
        if bias is None:
            return x
        return x + 2 * bias if twice else x + bias


def test_an_argument_that_a_forward_is_not_given_has_its_default() -> None:
    model, x, bias = Biased(), torch.randn(2, 3), torch.randn(3)
    for inputs in (x, (x,), (x, None), (x, bias)):
        graph = follow(model, inputs)
        result = torch.fx.Interpreter(model, graph=graph).run(*arguments(graph, inputs))
        assert torch.equal(result, tree.call(model, inputs))


class Blurring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape[0], 3)


def test_numbers_drawn_in_a_size_that_is_given_are_drawn_anew() -> None:
    assert "randn" in [node.name for node in follow(Blurring()).nodes]


class Overwriting(nn.Module):
    """Writes into a buffer, by way of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        (self.last * x).mul_(2)  # into what it has made
        self.last[0].copy_(x[0])
        return x + self.last


def test_writing_into_buffers_is_told() -> None:
    model = Overwriting()
    assert [name for name, _ in written(follow(model))] == ["last"]
    with pytest.raises(Unfollowed, match="changes its own last"):
        follow(model, writes=False)
    calls = [n.target for n in follow(nn.Sequential(model), writes=False).nodes if n.op == "call_module"]
    assert calls == ["0"]


def test_who_looks_at_the_graph_alone_goes_on_and_is_told() -> None:
    for odd, does in (
        (Remembering, "changes its own 0.steps"), (Noisy, "random"), (Frozen, "gradients"), (Overwriting, "own 0.last"),
    ):  # fmt: skip
        tracer = Tracer(goes_on=True)
        tracer.trace(nn.Sequential(odd(), nn.Linear(3, 3)))
        assert does in " ".join(tracer.beside)
    with pytest.raises(Unfollowed, match=r"own 0\.outputs"):
        Tracer(goes_on=True).trace(nn.Sequential(Caching()))


def test_hooks_find_the_layers_of_a_network_that_cannot_be_followed() -> None:
    x = torch.ones(4, 10)
    network = trace(networks.Partly(), 2 * x)
    assert not network.followed
    assert network.untraceable is not None
    found = layers(network)
    assert list(found) == ["frozen", "sometimes", "out"]
    assert found["frozen"].inputs == ("input",)
    assert found["sometimes"].flops == 2 * 4 * 8 * 8
    assert [layer.name for layer in trace(networks.Partly(), x).layers] == ["frozen", "out"], "as it computes"


def test_tracing_changes_neither_buffers_nor_what_is_drawn_next() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    trace(model, torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.randn(2), expected)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
