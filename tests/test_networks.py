"""The papers' networks: their sizes, what goes in and comes out, and that they train."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import landscape
from landscape import InputError, Problem
from landscape.evaluation.folding import fold
from landscape.models.convolutional import NETWORKS, scaled
from landscape.problem.losses import Terms, correct
from tests.conftest import slow_but

#: MiB of float32 parameters (DPSGD-2020, Table 1; for GoogLeNet it has 23.53), and their number where it is known.
SIZES: dict[str, tuple[float, int]] = {
    "efficientnet-b0": (11.11, 2_912_089), "senet-18": (42.95, 0), "vgg-19": (76.45, 0), "resnet-18": (42.63, 0),
    "densenet-121": (26.54, 0), "mobilenet": (12.27, 0), "mobilenet-v2": (8.76, 0), "shufflenet-v2": (4.82, 0),
    "googlenet": (23.52, 6_166_250), "resnext-29": (34.82, 0), "lstm": (164.62, 43_154_944),
    "lenet-5": (0.0, 62_006), "resnet-20": (0.0, 269_722), "gpt": (0.0, 124_439_808),
}  # fmt: skip
CIFAR = sorted({*SIZES} - {"lstm", "gpt"})


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_sizes_are_table_1s_or_known_exactly() -> None:
    with torch.device("meta"):
        found = {name: parameters(landscape.models.build(name)) for name in SIZES}
    mib = {name: round(4 * count / 2**20, 2) for name, count in found.items()}
    assert [(mib[name] if size else 0.0, found[name] if n else 0) for name, (size, n) in SIZES.items()] == [
        *SIZES.values()
    ]


def reduced(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return landscape.models.build(name, width=0.125, **options)


@pytest.mark.parametrize("name", CIFAR)
def test_outputs_gradients_and_batchnorm(name: str) -> None:
    model = reduced(name, classes=7)
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 6, 3, 3])
    before = x.clone()
    outputs = model(x)
    assert outputs.shape == (4, 7)
    assert torch.equal(x, before)
    F.cross_entropy(outputs, y).backward()
    for label, p in model.named_parameters():
        assert p.grad is not None, label
        assert bool(torch.isfinite(p.grad).all()), label
    # Training: the other samples of a batch matter, and buffers move. Evaluation: neither.
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    normed = name != "lenet-5"
    assert bool(norms) == normed
    assert all(int(m.num_batches_tracked) == 1 for m in norms)
    other = torch.cat((x[:1], torch.randn(3, 3, 32, 32)))
    with torch.no_grad():
        assert torch.allclose(model(x)[0], model(other)[0], atol=1e-6) != normed
        model.eval()
        torch.testing.assert_close(model(x)[0], model(other)[0])
    assert all(int(m.num_batches_tracked) == 3 for m in norms)
    if name not in ("lenet-5", "vgg-19"):  # images may have another size
        assert model(torch.randn(2, 3, 48, 40)).shape == (2, 7)


@pytest.mark.parametrize("name", slow_but(["vgg-19", "resnet-18"], CIFAR))
def test_the_analysis_can_fold_and_differentiate_twice(name: str) -> None:
    model = reduced(name).double()
    model(torch.randn(4, 3, 32, 32, dtype=torch.float64))
    x, y = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 2])
    problem = Problem(model, F.cross_entropy, (x, y))
    folded = fold(problem.model, torch.float64)
    assert folded is not None
    with torch.no_grad():
        weights = folded.weights(problem.layout.views(problem.weights))
        torch.testing.assert_close(folded(weights, x), problem.model(x))
    curvature_is_the_gradients_slope(problem)


def curvature_is_the_gradients_slope(problem: Problem) -> None:
    """Hv against a central difference of gradients, in float64."""
    v = torch.randn(problem.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v /= v.norm()
    h, center = 1e-6, problem.weights
    slope = (problem.gradient(center + h * v) - problem.gradient(center - h * v)) / (2 * h)
    product = landscape.HessianOperator(problem)(v)
    assert float((product - slope).norm()) < 1e-3 * float(slope.norm()) + 1e-7


def test_the_acoustic_model_takes_any_sizes() -> None:
    torch.manual_seed(0)
    model = landscape.models.build("lstm", classes=30, inputs=11, layers=2, cells=8, bottleneck=6)
    x, y = torch.randn(5, 9, 11, dtype=torch.float64), torch.randint(30, (5, 9))
    problem = Problem(model, F.cross_entropy, (x, y), dtype=torch.float64)
    outputs = problem.model(x).detach()
    assert outputs.shape == (5, 30, 9)
    assert problem.layout.size == (2 * 4 * 8 * (11 + 8 + 2) + 2 * 4 * 8 * (16 + 8 + 2) + 17 * 6 + 7 * 30)
    # Frame-level cross-entropy and accuracy, written out.
    flat = outputs.transpose(1, 2).reshape(-1, 30), y.flatten()
    loss, accuracy = problem.evaluate()
    assert loss == pytest.approx(float(F.cross_entropy(*flat)))
    assert accuracy == pytest.approx(float((flat[0].argmax(1) == flat[1]).double().mean()))
    curvature_is_the_gradients_slope(problem)


def test_a_gpt_predicts_each_token_from_those_before() -> None:
    torch.manual_seed(0)
    model = landscape.models.build("gpt", classes=17, context=9, layers=2, features=8, heads=2).double()
    x = torch.randint(17, (5, 9))
    outputs = model(x)
    assert outputs.shape == (5, 17, 9)
    later = x.clone()
    later[:, 6:] = (x[:, 6:] + 1) % 17
    torch.testing.assert_close(model(later)[:, :, :6], outputs[:, :, :6])
    assert bool((model(later)[:, :, 6:] != outputs[:, :, 6:]).any(1).all())
    torch.testing.assert_close(model(x[:, :4]), outputs[:, :, :4])
    with pytest.raises(InputError, match=r"model\.context: 9 is not allowed, it must be at least 12, the"):
        model(torch.randint(17, (5, 12)))
    # Attention of one head, written out.
    block = model.blocks[0]
    h = torch.randn(1, 4, 8, dtype=torch.float64)
    q, k, v = (part.view(4, 2, 4)[:, 1] for part in block.attention(block.norm(h))[0].chunk(3, 1))
    scores = (q @ k.T / 2).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(1)
    other = block.projection.weight.clone()
    with torch.no_grad():
        block.projection.weight[:, :4] = 0  # the other head is left out
        block.mlp[3].weight.zero_()
        block.mlp[3].bias.zero_()
        block.projection.bias.zero_()
        torch.testing.assert_close(block(h)[0] - h[0], scores @ v @ other[:, 4:].T)
    problem = Problem(model, F.cross_entropy, (x[:, :-1], x[:, 1:]), dtype=torch.float64)
    curvature_is_the_gradients_slope(problem)


def test_lenet_takes_other_sizes() -> None:
    assert landscape.models.build("lenet-5", size=16, classes=4)(torch.randn(2, 3, 16, 16)).shape == (2, 4)


def test_accuracy_has_a_meaning_for_classes_only() -> None:
    outputs = torch.tensor([[[1.0, 0.0, 3.0], [0.0, 1.0, 0.0]]])  # (1, classes 2, frames 3)
    loss = nn.functional.cross_entropy
    assert correct(outputs, torch.tensor([[0, 1, 1]]), Terms(loss)).tolist() == [[2], [3]]
    assert correct(outputs, torch.tensor([[0, -100, 1]]), Terms(loss)).tolist() == [[1], [2]]
    for strange in (
        (outputs, torch.tensor([0]), loss),
        (outputs, torch.tensor([[0.0, 1.0, 1.0]]), loss),
        (outputs[0, 0], torch.tensor([0, 1, 1]), loss),
        (outputs, torch.tensor([[0, 1, 1]]), lambda o, y: o.sum()),  # the class of the next frame?
        (outputs, torch.tensor([[0, 1, 2]]), loss),
    ):
        assert torch.isnan(correct(*strange[:2], Terms(strange[2]))).all()


def test_widths_are_even_and_width_one_changes_nothing() -> None:
    assert [scaled(n, 1.0) for n in (6, 16, 58, 1280)] == [6, 16, 58, 1280]
    assert [scaled(n, 0.01) for n in (6, 512)] == [2, 6]
    assert parameters(landscape.models.build("resnet-18", width=0.5)) < 11_173_962 / 3.9


IMAGENET = {  # torchvision's documentation
    "imagenet-alexnet": 61_100_840, "imagenet-densenet-161": 28_681_000, "imagenet-resnet-50": 25_557_032,
    "imagenet-resnext-50": 25_028_904, "imagenet-vgg-11": 132_863_336, "imagenet-vgg-11-bn": 132_868_840,
}  # fmt: skip


def test_imagenets_networks_are_known_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # importing it says what Python says of none
    assert set(IMAGENET) == set(NETWORKS) <= set(landscape.models.names())
    assert [landscape.models.options(name, {}) for name in NETWORKS] == [{"classes": 1000}] * len(NETWORKS)


def test_imagenets_networks_are_torchvisions() -> None:
    pytest.importorskip("torchvision", reason="the extra 'imagenet' is not installed", exc_type=ImportError)
    with torch.device("meta"):
        assert {name: parameters(landscape.models.build(name)) for name in IMAGENET} == IMAGENET
