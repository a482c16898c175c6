"""Networks that no tracer follows, in stages that run their own forward; and what is said where that cannot be."""

from __future__ import annotations

import sys
from typing import Any

import networks
import own_forwards
import pytest
import torch
from own_forwards import KINDS, WIDTH, language
from proofs import assert_equal
from ranks import by_value
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import apportion
from apportion import Workload
from apportion.parallel.pipeline.eager_stages import opened, prove
from apportion.parallel.tracing.tracer import Unfollowed, follow
from apportion.runtime.proof.proof import Proof


def check(workload: Workload, strategy: Any, workers: int = 2) -> Proof:
    with by_value(networks), by_value(own_forwards), by_value(sys.modules[__name__]):
        return apportion.check(workload, strategy, workers=workers, steps=3)


def sample(workload: Workload) -> Any:
    data: Any = workload.data()
    return default_collate([data[i] for i in range(4)])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_stretches_of_a_forward_are_the_forward_wherever_it_is_cut(kind: str) -> None:
    torch.manual_seed(0)
    workload = language(kind)
    model, inputs = workload.model(), sample(workload)
    drawn, before = torch.get_rng_state(), {k: t.clone() for k, t in model.state_dict().items()}
    own, found = opened(model, inputs, 2, ())
    count = len(found.calls)
    whole = (
        "body.layers.0" if kind != "cache" else "body.layers.0.mix"
    )  # a list that layers write to is seen from within
    assert {"body.words", whole, "body.norm"} <= set(found.calls)
    for at in range(1, count):
        prove(own, found, [0, at, count], inputs)
    prove(own, found, [0, 2, 4, count], inputs)
    own.close()
    assert type(model.body.layers[0]) is own_forwards.Block
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "strategy", "workers"),
    [("plain", "layer_placement", 2), ("states", "pipeline_parallel(microbatches=3)", 3),
     ("mask", "pipeline_parallel(microbatches=2, recompute=True)", 2), ("by hand", "layer_placement", 2)],
)  # fmt: skip
def test_a_network_that_no_tracer_follows_is_cut_and_equals_one_device(kind: str, strategy: str, workers: int) -> None:
    assert_equal(check(language(kind), strategy, workers))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])


class Decorated(Layers):
    @own_forwards.decorated
    def forward(self, x: Any = None, a: Any = None, b: Any = None, c: Any = None, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Many(Layers):
    def forward(self, *args: Tensor, scale: float = 2.0, **kwargs: Any) -> Tensor:
        (x,) = args
        for layer in self.layers:
            x = layer(x).tanh() * scale
        return x


class Asking(Layers):
    def forward(self, x: Tensor, a: Any = None, **kwargs: Any) -> Tensor:
        for i, layer in enumerate(self.layers):
            if len(x) > 100 or x.shape[0] % 2 > 7:
                break
            x = layer(x).tanh() * (i + 1)
        return x


class PartWithoutGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x).tanh()
        return self.layers[3](self.layers[2](self.layers[1](x).tanh()))


class Attending(Layers):
    """The strides of what a kernel gives are not those of the meta device, and whether ``contiguous`` gives the very
    tensor that it is given depends on them, and on the rows."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        q, k, v = (layer(x).view(len(x), 2, 2, -1).transpose(1, 2) for layer in self.layers[:3])
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        if x.shape[0] > 100:
            return mixed.flatten(1)
        kept = mixed.contiguous().flatten(1)
        turned = kept.reshape(len(x), 2, -1).transpose(0, 1).contiguous().transpose(0, 1).flatten(1)
        return self.layers[3](kept + turned)


class Viewing(Layers):
    """A view that only the strides of the kernel allow."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        q, k, v = (layer(x).view(len(x), 2, 2, -1).transpose(1, 2) for layer in self.layers[:3])
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.layers[3](mixed.view(len(x), -1))


class Passing(Layers):
    """A module gives what it is given, or not, by the number of its rows."""

    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(len(x), 2, -1).transpose(0, 1).contiguous()

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.itself = Passing.Turned(), nn.Identity()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.itself(self.layers[0](x))
        if x.shape[0] > 100:
            return x
        y = self.turned(self.layers[1](x))
        y = self.itself(y).contiguous().transpose(0, 1).contiguous()
        return self.layers[3](self.layers[2](x) + self.itself(y).flatten(1))


def numbers(model: type[nn.Module]) -> Workload:
    x = networks.numbers(13, WIDTH)
    return networks.workload(model, lambda: TensorDataset(x, x), 6, loss=F.mse_loss)


@pytest.mark.parametrize("model", [Decorated, Many])
def test_a_decorated_forward_and_any_number_of_arguments_are_followed(model: type[nn.Module]) -> None:
    graph = follow(model(), torch.ones(2, WIDTH))
    assert [n.target for n in graph.nodes if n.op == "call_module"] == [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize("model", [Decorated, Asking, PartWithoutGradient, Attending])
def test_forwards_of_all_kinds_are_cut(model: type[nn.Module]) -> None:
    workload = numbers(model)
    own, found = opened(workload.model(), torch.ones(4, WIDTH), 2, ())
    assert found.calls == [f"layers.{i}" for i in range(4)]
    prove(own, found, [0, 1, 3, 4], torch.randn(4, WIDTH))


@pytest.mark.parametrize("model", [Attending, Viewing, Passing])
def test_strides_do_not_decide_which_tensor_goes_to_the_next_stage(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    own, found = opened(model(), torch.randn(4, WIDTH), 2, ())
    for at in range(1, len(found.calls)):
        for rows in (1, 3, 4):
            prove(own, found, [0, at, len(found.calls)], torch.randn(rows, WIDTH))


@pytest.mark.processes
@pytest.mark.parametrize("model", [Attending, Passing])
def test_a_last_batch_of_one_row_takes_the_same_way(model: type[nn.Module]) -> None:
    workload = numbers(model)
    assert_equal(check(workload, "pipeline_parallel(microbatches=3)"))


@pytest.mark.processes
def test_a_batch_of_another_size_takes_the_same_way() -> None:
    assert_equal(check(numbers(Asking), "pipeline_parallel(microbatches=2)"))


# What cannot be


class Deciding(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.sum() > 0:
            x = x * 2
        return self.layers[1](x)


class Keeping(Layers):
    """The forward takes a tensor from a layer that does not give it."""

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            self.kept: Any = y * 2
            return y

    def __init__(self) -> None:
        super().__init__()
        self.inner = Keeping.Inner(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.layers[0](y) + (self.inner.kept if len(x) else y)


class Counting(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layers[1](self.layers[0](x)) * self.seen


REFUSED = {
    Deciding: "Deciding asks for the numbers in a tensor|Deciding calls other layers or functions for this batch",
    Keeping: "inner keeps a tensor that the forward takes from it afterwards.*let inner return it",
    Counting: "changes its own seen",
}


@pytest.mark.processes
@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_cut_is_refused_by_a_sentence_of_our_own(model: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=REFUSED[model]) as caught:
        check(numbers(model), "layer_placement")
    assert "use data_parallel" in str(caught.value)
    refuse_fx(str(caught.value))


@pytest.mark.processes
def test_another_way_at_a_later_batch_ends_the_run_by_a_sentence_and_not_by_a_traceback() -> None:
    later, strategy = networks.cases["frozen_and_unused_parameters"](13), "pipeline_parallel(microbatches=3)"
    with by_value(networks), pytest.raises(ValueError, match=r"Partly calls other layers.*use data_parallel"):
        apportion.check(later, f"data_parallel(of={strategy}, replicas=2)", workers=4, steps=networks.STEPS)


def refuse_fx(text: str) -> None:
    for word in (
        "Proxy",
        "symbolic",
        "co_varnames",
        "TraceError",
        "torch.fx",
        "concrete_args",
        "placeholder",
        "Error",
        "has no attribute",
    ):
        assert word not in text


class Looping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in x])


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(x)


class Range(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum((x[i] for i in range(x.shape[0])), torch.zeros(3))


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 2 else -x


class Index(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * [1.0, 2.0][x.argmax()]


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(float(x.sum()))


class Kinds(nn.Module):
    """Python itself complains where a stand-in is no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        total: Any = x.sum() if isinstance(x, Tensor) else 0
        return x + total.to(x.device)


class Built(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return own_forwards.Output(logits=x * 2)


@pytest.mark.parametrize("model", [Looping, Length, Range, Branch, Index, Numpy, Kinds, Built])
@pytest.mark.parametrize("wrapped", [False, True])
def test_no_text_of_torch_fx_reaches_a_user(model: type[nn.Module], wrapped: bool) -> None:
    made = model()
    if wrapped:
        kind = type(model.__name__, (model,), {"forward": own_forwards.decorated(model.forward)})
        made = kind()
    with pytest.raises(Unfollowed, match=f"the forward of {model.__name__} cannot be followed: ") as caught:
        follow(made, torch.ones(2, 3))
    refuse_fx(str(caught.value))
    if model is not Built:
        assert "test_eager_forward.py:" in str(caught.value)
