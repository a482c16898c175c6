"""The examples: the pairs are one training, the data are read safely, and each one learns what it says."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import data_folder
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from apportion import DataShard, Step, Workload, World, batches, single_device
from apportion.core.address import load_workload
from apportion.core.data.source import BatchSource

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = (
    "alexnet_cifar10",
    "char_lstm",
    "char_rnn",
    "cifar10",
    "contrastive",
    "digits",
    "embedding_bag",
    "gan",
    "lbfgs",
    "resnet20_cifar10",
    "transformer",
)


def example(name: str) -> ModuleType:
    """An example's module, its neighbours importable as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        return importlib.import_module(name)


def trained(workload: Workload) -> Step:
    step = single_device().build(workload, World())
    for batch in batches(step):
        step(batch)
    return step


def measured(model: nn.Module, workload: Workload, metric: str) -> float:
    """A metric of an evaluation set that is one batch."""
    assert workload.evaluation is not None
    counter: Any = workload.evaluation.metrics[metric]()
    inputs, targets = workload.evaluation.data().tensors  # type: ignore[attr-defined]
    model.eval()
    with torch.no_grad():
        counter.update(model(inputs), targets)
    return float(counter.compute())


def made_images(n: int) -> Tensor:
    return torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


# The pairs


@pytest.mark.parametrize("name", NAMES)
def test_each_example_exposes_a_workload_at_its_address(name: str) -> None:
    assert isinstance(load_workload(f"{EXAMPLES / name}.py:workload"), Workload)


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_a_pair_begins_with_the_same_parameters(name: str) -> None:
    ours, plain = example(name).workload, example(f"{name}_plain")
    model, _, _ = plain.training(1000)
    torch.manual_seed(plain.SEED)
    state = ours.model().state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_a_pair_has_the_same_batches_optimizer_and_schedule(name: str) -> None:
    ours, plain = example(name).workload, example(f"{name}_plain")
    assert (ours.batch_size, ours.epochs, ours.seed) == (plain.BATCH_SIZE, plain.EPOCHS, plain.SEED)
    model, optimizer, schedule = plain.training(1000)
    own = ours.optimizer(model.named_parameters())
    own_schedule = ours.schedule(own, 1000)
    assert type(own) is type(optimizer)
    assert settings(own, model) == settings(optimizer, model)
    for _ in range(1000):
        assert own_schedule.get_last_lr() == schedule.get_last_lr()
        for each in (own, optimizer, own_schedule, schedule):
            each.step()


def settings(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the optimizer does with each parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_digits_reach_their_accuracy() -> None:
    workload = example("digits").workload
    x, y = workload.evaluation.data().tensors
    model = trained(workload).model.eval()
    assert (model(x).argmax(1) == y).double().mean() >= 0.970


def test_digits_in_plain_torch_reach_their_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    example("digits_plain").main()
    assert float(capsys.readouterr().out.rpartition("test accuracy ")[2]) >= 0.970


def test_the_split_of_the_digits_is_fixed_and_the_same_in_the_pair() -> None:
    (x_train, y_train), (x_test, y_test) = (dataset.tensors for dataset in example("digits").digits())
    plain = example("digits_plain").digits()
    assert all(torch.equal(a, b) for a, b in zip((x_train, x_test, y_train, y_test), plain, strict=True))
    assert (len(x_train), len(x_test)) == (1437, 360)
    assert y_test.bincount().tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]


# Augmentation


@pytest.mark.parametrize("shares", [2, 3, 5])
@pytest.mark.parametrize("name", ["cifar10", "resnet20_cifar10", "contrastive"])
def test_augmented_rows_do_not_depend_on_the_split(name: str, shares: int) -> None:
    inputs = torch.rand(150, 64) if name == "contrastive" else made_images(150)
    dataset = TensorDataset(inputs, torch.arange(150))
    workload = replace(example(name).workload, data=lambda: dataset, batch_size=61)
    for step in range(4):  # the third batch is short, the fourth of another epoch
        whole = BatchSource(workload).at(step)
        parts = [BatchSource(workload).at(step, DataShard(index, shares)) for index in range(shares)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_an_image_is_augmented_differently_in_each_epoch() -> None:
    dataset = TensorDataset(made_images(8), torch.arange(8))
    workload = replace(example("cifar10").workload, data=lambda: dataset, order="sequential", batch_size=8)
    source = BatchSource(workload)
    assert not torch.equal(source.at(0).inputs, source.at(1).inputs)
    assert torch.equal(source.at(0).inputs, BatchSource(workload).at(0).inputs)


def test_a_crop_is_the_square_at_its_corner_mirrored_where_asked() -> None:
    images, n = made_images(20), 20
    top, left, flip = torch.arange(n) % 9, torch.arange(n) * 7 % 9, torch.arange(n) % 3 == 0
    cropped = example("cifar10_data").crop(images, top=top, left=left, flip=flip, size=24)
    for i in range(n):
        square = images[i, :, top[i] : top[i] + 24, left[i] : left[i] + 24]
        assert torch.equal(cropped[i], square.flip(2) if flip[i] else square)


def test_standardised_images_have_mean_zero_and_deviation_one_and_an_even_image_is_zero() -> None:
    images = made_images(3)
    images[2] = 77
    pixels = example("cifar10_data").standardised(images)
    assert pixels.dtype is torch.float32
    assert pixels.shape == images.shape
    torch.testing.assert_close(pixels.mean((1, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(pixels.std((1, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]))


# CIFAR-10: the networks


def test_the_tutorials_normalisation_is_torchs_own_with_its_gradient() -> None:
    ours = example("cifar10_network").LocalResponseNorm(64).double()
    torchs = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
    x = (20 * torch.randn(2, 64, 5, 5, dtype=torch.float64)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(2, 64, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(x), torchs(y))
    (ours(x) * weight).sum().backward()
    (torchs(y) * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_the_tutorials_decay_is_on_the_two_fully_connected_weights_alone() -> None:
    workload = example("cifar10").workload
    model = workload.model()
    optimizer = workload.optimizer(model.named_parameters())
    decayed = {name for name, group in settings(optimizer, model).items() if group["weight_decay"]}
    assert decayed == {"local3.weight", "local4.weight"}
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_068_298


@pytest.mark.parametrize(("name", "size"), [("cifar10", 24), ("resnet20_cifar10", 32)])
def test_a_cifar_example_trains_on_made_images(name: str, size: int) -> None:
    labels = torch.arange(32) % 2
    dataset = TensorDataset(made_images(32) // 2 + (120 * labels[:, None, None, None]).byte(), labels)
    workload = replace(
        example(name).workload, data=lambda: dataset, evaluation=None, batch_size=16, steps=4, schedule=None
    )
    step = single_device().build(workload, World())
    losses = [float(step(batch)["loss"]) for batch in batches(step)]
    assert np.isfinite(losses).all()
    assert step.source.at(0).inputs.shape == (16, 3, size, size)


def test_resnet20_has_the_parameters_of_the_paper() -> None:
    model = example("resnet20_cifar10").resnet20()
    assert sum(p.numel() for p in model.parameters()) == 269_722
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == 20
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# CIFAR-10: the data


@pytest.fixture
def made_cifar(tmp_path: Path) -> tuple[Path, Tensor]:
    """The folder of a CIFAR-10 with 4 images a batch, and the training images."""
    folder, images = tmp_path / "cifar-10-batches-py", made_images(20)
    folder.mkdir()
    for i, name in enumerate([*example("cifar10_data").TRAINING, "test_batch"]):
        part = images[4 * i : 4 * i + 4] if i < 5 else images[:4]
        batch = {"data": part.flatten(1).numpy(), "labels": [i, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=3))
    return folder, images


def test_cifar10_is_read_from_its_batches(made_cifar: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, images = made_cifar
    monkeypatch.setenv("APPORTION_DATA", str(folder.parent))
    data = example("cifar10_data")
    read, labels = data.training_set()
    assert torch.equal(read, images)
    assert labels.tolist() == [n for i in range(5) for n in (i, 1, 2, 3)]
    assert data.test_set()[1].tolist() == [5, 1, 2, 3]


class Command:
    """What a hostile pickle holds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def test_a_batch_that_would_run_something_is_refused(
    made_cifar: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made_cifar
    monkeypatch.setenv("APPORTION_DATA", str(folder.parent))
    (folder / "test_batch").write_bytes(pickle.dumps({"data": Command()}))
    with pytest.raises(pickle.UnpicklingError, match="does not belong in a CIFAR-10 batch"):
        example("cifar10_data").test_set()


def test_an_incomplete_folder_says_what_it_lacks(
    made_cifar: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = made_cifar
    monkeypatch.setenv("APPORTION_DATA", str(folder.parent))
    (folder / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="lacks data_batch_3"):
        example("cifar10_data").training_set()


@pytest.fixture
def published(made_cifar: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An archive to download from, and an empty data folder."""
    folder, _ = made_cifar
    archive, empty = tmp_path / "cifar-10-python.tar.gz", tmp_path / "empty"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    monkeypatch.setenv("APPORTION_DATA", str(empty))
    monkeypatch.setattr(example("cifar10_data"), "URL", archive.as_uri())
    monkeypatch.setattr(example("cifar10_data"), "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


def test_what_is_missing_is_downloaded_once(published: Path, made_cifar: tuple[Path, Tensor]) -> None:
    data = example("cifar10_data")
    assert torch.equal(data.training_set()[0], made_cifar[1])
    published.unlink()
    assert torch.equal(data.training_set()[0], made_cifar[1])
    assert [path.name for path in data.folder().parent.iterdir()] == ["cifar-10-batches-py"]


@pytest.mark.parametrize("fault", ["no network", "another file"])
def test_a_failed_download_says_in_one_line_how_to_get_the_data(published: Path, fault: str) -> None:
    data = example("cifar10_data")
    if fault == "no network":
        published.unlink()
    else:
        published.write_bytes(b"an error page")
    with pytest.raises(FileNotFoundError) as caught:
        data.training_set()
    message = str(caught.value)
    assert "\n" not in message
    assert all(
        part in message for part in (data.URL, data.MD5, f"tar -xzf cifar-10-python.tar.gz -C {data.folder().parent}")
    )
    assert list(data.folder().parent.iterdir()) == []


@pytest.mark.data("cifar-10-batches-py")
def test_the_real_cifar10_is_whole() -> None:
    data = example("cifar10_data")
    for (images, labels), n in ((data.training_set(), 50_000), (data.test_set(), 10_000)):
        assert (images.shape, images.dtype, labels.dtype) == ((n, 3, 32, 32), torch.uint8, torch.int64)
        assert labels.bincount().tolist() == [n // 10] * 10


@pytest.mark.data("cifar-10-batches-py")
@pytest.mark.thorough
def test_the_tutorials_network_begins_to_learn_the_real_cifar10() -> None:
    workload = replace(example("cifar10").workload, evaluation=None, schedule=None, steps=25)
    step = single_device().build(workload, World())
    losses = [float(step(batch)["loss"]) for batch in batches(step)]
    assert losses[0] == pytest.approx(np.log(10), abs=0.01)
    assert np.mean(losses[-5:]) < 2.25


@pytest.mark.data("cifar-10-batches-py", "models/akamaster_resnet_cifar10")
@pytest.mark.thorough
def test_resnet20_with_the_published_weights_has_the_published_accuracy() -> None:
    module = example("resnet20_cifar10")
    (path,) = (data_folder() / "models" / "akamaster_resnet_cifar10").glob("resnet20-*.th")
    published = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    model = module.resnet20()
    model.load_state_dict({key.removeprefix("module."): tensor for key, tensor in published.items()})
    images, labels = example("cifar10_data").test_set()
    with torch.no_grad():
        right = model.eval()(module.normalised(images[:1000])).argmax(1) == labels[:1000]
    assert right.double().mean() == pytest.approx(0.917, abs=0.012)


# The others


@pytest.mark.thorough
def test_the_gan_learns_from_both_losses() -> None:
    workload = replace(example("gan").workload, epochs=12)
    torch.manual_seed(workload.seed)
    before = measured(workload.model(), workload, "distance")
    assert measured(trained(workload).model, workload, "distance") < 0.75 * before


def test_the_frechet_distance_of_shifted_images_is_the_square_of_the_shift() -> None:
    gan = example("gan")
    images = gan.images()
    for shift in (0.0, 0.5):
        distance = gan.FrechetDistance()
        distance.update(images + shift, images)
        assert float(distance.compute()) == pytest.approx(64 * shift**2, abs=1e-3)


@pytest.mark.thorough
def test_the_language_model_learns_and_its_targets_are_the_next_characters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APPORTION_DATA", str(tmp_path))  # the text that Python carries along
    char_rnn = example("char_rnn")
    inputs, targets = char_rnn.pieces()[0].tensors
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1:, 0], targets[:-1, -1])
    step = single_device().build(replace(char_rnn.workload, steps=25), World())
    losses = [float(step(batch)["loss"]) for batch in batches(step)]
    assert losses[0] == pytest.approx(np.log(128), abs=0.1)
    assert losses[-1] < 3.5


def test_the_contrastive_loss_is_that_of_the_paper() -> None:
    contrastive = example("contrastive")
    embeddings = torch.randn(5, 2, 32, dtype=torch.float64)
    views = [view / view.norm() for view in embeddings.transpose(0, 1).flatten(0, 1)]
    terms = []
    for i, view in enumerate(views):
        others = [torch.exp(view @ other / contrastive.TEMPERATURE) for k, other in enumerate(views) if k != i]
        twin = torch.exp(view @ views[(i + 5) % 10] / contrastive.TEMPERATURE)
        terms.append(-torch.log(twin / sum(others)))
    torch.testing.assert_close(contrastive.contrastive_loss(embeddings, None), torch.stack(terms).mean())


@pytest.mark.thorough
def test_contrastive_learning_brings_images_of_a_class_together() -> None:
    workload = replace(example("contrastive").workload, epochs=25)
    torch.manual_seed(workload.seed)
    before = measured(workload.model(), workload, "neighbour")
    after = measured(trained(workload).model, workload, "neighbour")
    assert before < 0.93 < 0.95 <= after
