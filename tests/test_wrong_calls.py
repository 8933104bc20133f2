"""Wrong calls from Python: refused in one line that says what would do, or the right number; never another."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import landscape
from landscape import InputError, Problem
from tests.test_first_argument import NEEDED, first, linear

LEARNERS = torch.randn(3, 8)
# Arguments with which a function uses all others, or is quick.
MORE: dict[str, dict[str, Any]] = {
    "between": {"weights": torch.randn(2, 8)},
    "contour": {"grid": 3},
    "line": {"direction": torch.ones(8)},
    "connect": {"a": torch.ones(8), "b": torch.zeros(8), "points": 3, "steps": 1},
    "batch_sharpness": {"batch": 4},
    "batch_spectrum": {"batch": 4, "draws": 2},
    "noise_scale": {"batch": 4},
    "noise_alignment": {"batch": 4, "k": 2},
    "spectrum": {"quantities": ("extremes", "trace", "density")},
    "hessian_grid": {"grid": 2},
    "noise": {"weights": LEARNERS, "lr": 0.1, "local_batch": 4},
    "smoothing": {"weights": LEARNERS, "draws": 2},
    "disagreement": {"weights": LEARNERS, "k": 2},
    "average": {"weights": LEARNERS},
}
OTHER = torch.randn(3, 11)  # weights of another model


def about_a_problem() -> list[str]:
    return [name for name in NEEDED if first(name) == "problem"]


def refused(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=match) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def called(name: str, **options: Any) -> Any:
    return getattr(landscape, name)(Problem(*linear()), **{**NEEDED[name], **MORE.get(name, {}), **options})


@pytest.mark.parametrize("name", about_a_problem())
def test_an_unknown_keyword_is_refused_with_the_name_of_the_function(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"\b{name}(\.__init__)?\(\) got an unexpected keyword argument 'no_such_thing'"
    ):
        called(name, no_such_thing=1)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("contour", {"plane": landscape.Plane(OTHER[0], OTHER[:2], "random", "none", 0)}),
        ("hessian_grid", {"plane": landscape.Plane(OTHER[0], OTHER[:2], "random", "none", 0)}),
        ("contour", {"plane": torch.eye(2, 8)}),
        ("line", {"direction": [1.0] * 8}),
        ("line", {"direction": OTHER[0]}),
        ("noise", {"weights": OTHER}),
        ("smoothing", {"weights": OTHER}),
        ("average", {"weights": OTHER}),
        ("top_eigenvalues", {"weights": OTHER[0]}),
        ("loss_change", {"after": OTHER[0]}),
        ("connect", {"a": OTHER[0]}),
        ("HessianOperator", {"weights": OTHER[0]}),
    ],
)
def test_what_belongs_to_another_model_is_refused(name: str, option: dict[str, Any]) -> None:
    refused("plane|direction|weights|after|^a:", lambda: called(name, **option))


def test_a_plane_that_fits_in_part_is_refused() -> None:
    """A larger model's, of which the first P numbers could be taken."""
    problem = Problem(*linear())
    larger = Problem(nn.Linear(5, 2), nn.CrossEntropyLoss(), (torch.randn(9, 5), torch.zeros(9).long()))
    plane = landscape.random_plane(larger)
    refused("12 parameters, this model 8", lambda: landscape.contour(problem, plane))
    refused(r"must be \(8,\)", lambda: problem.loss(larger.weights))


@pytest.mark.parametrize("what", ["one", "none", "problem", "mixed"])
def test_only_a_list_of_results_of_one_kind_is_saved(tmp_path: Path, what: str) -> None:
    surface, path = called("contour", grid=2), tmp_path / "x.h5"
    given = {"one": surface, "none": [], "problem": 3, "mixed": [surface, called("line", points=2)]}[what]
    refused("results: .*list of results", lambda: landscape.save(given, path))
    assert not path.exists()


# Modes of PyTorch around a call.


#: What takes no derivative.
WITHOUT = ("contour", "line", "random_plane", "between", "pca_plane", "learners_plane", "loss")


def numbers(result: Any) -> list[np.ndarray]:
    """The arrays and floats of a result."""
    fields = result.values() if isinstance(result, dict) else getattr(result, "__dict__", {}).values()
    return [
        np.asarray(v.detach() if isinstance(v, Tensor) else v)
        for v in fields
        if isinstance(v, (float, np.ndarray, Tensor))
    ]


@pytest.mark.filterwarnings("ignore:model. it computes in bfloat16")  # before the call is refused
@pytest.mark.parametrize("mode", ["inference_mode", "autocast"])
@pytest.mark.parametrize(
    "name", [*sorted({*about_a_problem()} - {"learning_coefficient"}), "loss", "gradient"]
)
def test_a_mode_around_a_call_changes_no_number(name: str, mode: str) -> None:
    problem = Problem(*linear())

    def call() -> Any:
        torch.manual_seed(0)
        if name in ("loss", "gradient"):
            return {"value": getattr(problem, name)()}
        return getattr(landscape, name)(problem, **(NEEDED[name] | MORE.get(name, {})))

    around = torch.inference_mode() if mode == "inference_mode" else torch.autocast("cpu", torch.bfloat16)
    with around:
        if name not in WITHOUT or (mode == "autocast" and name in ("contour", "line", "loss")):
            refused(f"torch.{mode}: ", call)
            return
        found = numbers(call())
    for a, b in zip(numbers(call()), found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("inside", ["data", "model", "weights", "all"])
def test_what_was_made_in_inference_mode_is_used_outside(inside: str, batches: bool) -> None:
    model, loss, (x, y) = linear()
    plain = Problem(model, loss, (x, y))
    with torch.inference_mode():
        model = linear()[0] if inside == "model" else model
        x = x.clone() if inside == "data" else x
        theta = plain.weights.clone() if inside == "weights" else None
        made = Problem(model, loss, (x, y)) if inside == "all" else None
    data = [(x[:9], y[:9]), (x[9:], y[9:])] if batches else (x, y)
    problem = made or Problem(model, loss, data, weights=theta)
    torch.testing.assert_close(problem.gradient(), plain.gradient())
    assert landscape.extreme_eigenvalues(problem).max == pytest.approx(
        landscape.extreme_eigenvalues(plain).max, rel=1e-4
    )


@pytest.mark.parametrize("what", ["model", "part", "buffer", "device", "data"])
def test_the_meta_device_has_no_numbers(what: str) -> None:
    model, loss, (x, y) = linear()
    if what in ("model", "buffer"):
        model = nn.BatchNorm1d(3, device="meta" if what == "model" else None)
        model.running_mean = torch.zeros(3, device="meta")
    if what == "part":
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta").requires_grad_(False))
    x = x.to("meta") if what == "data" else x
    refused(
        "device 'meta'", lambda: Problem(model, loss, (x, y), device="meta" if what == "device" else None)
    )


# NaN in the data.


def squares(o: Tensor, t: Tensor) -> Tensor:
    """A loss that masks NaN, in its gradient, too."""
    known = ~t.isnan()
    return ((o - t.nan_to_num()).square() * known).sum() / known.sum()


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("where", ["inputs", "targets", "masked"])
def test_nan_that_reaches_the_loss_is_refused(where: str, batches: bool) -> None:
    model, _, (x, _) = linear()
    y = torch.randn(20, 2)
    (x if where == "inputs" else y)[13, 1] = float("nan")
    data = [(x[:9], y[:9]), (x[9:], y[9:])] if batches else (x, y)
    if where == "masked":
        problem = Problem(model, squares, data, terms=lambda t: (~t.isnan()).sum(1))
        assert problem.loss() == pytest.approx(squares(model(x), y).item(), rel=1e-6)
        assert problem.gradient().isfinite().all()
        return
    refused(
        f"data: NaN in {where} of {'batch 1' if batches else 'samples 0 to 19'}",
        lambda: Problem(model, F.mse_loss, data),
    )
    assert np.isnan(Problem(model, F.mse_loss, data, check="off").loss())


# What is no model, no loss, no pair.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda x: x, "a function"),
        (linear()[0].forward, "a method"),
        (nn.Linear, "the class Linear"),
        (linear()[0].state_dict(), "a OrderedDict"),
        (None, "None"),
        ("model.pt", "'model.pt'"),
        (torch.zeros(8), "a Tensor"),
    ],
)
def test_what_is_no_module_is_refused_as_the_model(given: Any, words: str) -> None:
    _, loss, data = linear()
    words += " is not allowed, it must be an nn.Module, which has the parameters"
    refused(f"^model: {words}", lambda: Problem(given, loss, data))


def test_torchscript_is_weights_but_no_model() -> None:
    model, loss, data = linear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.10 deprecates it
        scripted = torch.jit.script(model)
    refused("^model: a TorchScript module .*; give the nn.Module", lambda: Problem(scripted, loss, data))
    line = landscape.line(Problem(model, loss, data), nn.Linear(3, 2), scripted, points=2)
    assert line.loss[-1] == Problem(model, loss, data).loss()


class Late(nn.Module):
    """A layer that the first forward pass makes, beside another one or alone."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Identity() if alone else nn.Linear(3, 3), None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None:
            self.last = nn.Linear(3, 2)
        result: Tensor = self.last(self.first(x))
        return result


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Late(True), "no trainable parameters"),
        (lambda: Late(False), "its first forward pass made parameter 'last"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), "lazy layers"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 2)), "lazy layers"),
    ],
)
def test_layers_that_no_pass_has_made_are_refused_until_one_has(make: Any, words: str) -> None:
    _, loss, (x, y) = linear()
    model = make()
    refused(f"^model: .*{words}.*; .*run one batch through it before", lambda: Problem(model, loss, (x, y)))
    model(x)
    assert np.isfinite(Problem(model, loss, (x, y)).loss())


@pytest.mark.parametrize("given", ["mse", nn.CrossEntropyLoss, (torch.zeros(3), torch.zeros(3)), 3])
def test_what_is_no_function_is_refused_as_the_loss(given: Any) -> None:
    model, _, data = linear()
    refused("^loss: .* is not allowed, it must be a function, or None", lambda: Problem(model, given, data))


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "array", "one", "loader"])
def test_inputs_alone_are_refused_with_what_an_autoencoder_takes(kind: str, batches: bool) -> None:
    x, model = torch.randn(20, 3), nn.Linear(3, 3)
    forms: dict[str, Any] = {
        "tensor": x, "array": x.numpy(), "one": (x,), "loader": DataLoader(TensorDataset(x), 5)
    }  # fmt: skip
    data = [forms[kind]] if batches and kind != "loader" else forms[kind]
    refused(r"^data: .*\(x, x\) where the targets are the inputs$", lambda: Problem(model, F.mse_loss, data))
    assert Problem(model, F.mse_loss, (x, x)).samples == 20


class Named(nn.Module):
    """It takes inputs in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(3, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.way in ("dict", "list"):
            (one,) = args
            a, b = (one["a"], one["b"]) if self.way == "dict" else one
        else:
            a, b = args if self.way == "two" else (kwargs.pop("a"), kwargs.pop("b"))
        assert not kwargs
        return self.layer(a) + self.layer(b)


A, B, C = torch.randn(20, 3), torch.randn(20, 3), torch.arange(20) % 2


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("way", "data", "words"),
    [
        ("dict", ({"a": A, "b": B}, C), "one dict: give data as ((inputs,), targets)"),
        ("dict", {"a": A, "b": B, "labels": C}, "one dict: give data as ((inputs,), targets)"),
        ("dict", {"a": A, "b": B, "target": C}, "give ((d,), d['target'])"),
        ("list", ([A, B], C), "one list: give data as ((inputs,), targets)"),
        ("named", {"y": C, "a": A, "b": B}, "give ({'a': d['a'], 'b': d['b']}, d['y'])"),
        ("two", {"a": A, "b": B, "species": C}, "give ((d['a'], d['b']), d['species'])"),
    ],
)
def test_data_of_another_form_name_the_right_one(way: str, data: Any, words: str, batches: bool) -> None:
    model = Named(way)
    refused(re.escape(words), lambda: Problem(model, F.cross_entropy, [data] if batches else data))
    d = data if isinstance(data, dict) else {}
    inputs, targets = data if isinstance(data, tuple) else (d, C)
    form = words[words.index("(") :]
    right = eval(form, {"d": d, "inputs": inputs, "targets": targets})  # the remedy itself
    assert Problem(model, F.cross_entropy, [right] if batches else right).loss() == pytest.approx(
        float(F.cross_entropy(model.layer(A) + model.layer(B), C).detach())
    )


def test_one_input_in_a_dict_of_other_names() -> None:
    model, loss, _ = linear()
    data = {"image": A, "label": C}
    refused(re.escape("give (d['image'], d['label'])"), lambda: Problem(model, loss, data))


# Metrics of NumPy and Python.


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("metric", "same"),
    [
        (lambda o, t: np.mean((o.numpy() - t.numpy()) ** 2), F.mse_loss),
        (lambda o, t: float(np.abs(o.numpy() - t.numpy()).mean()), F.l1_loss),
        (lambda o, t: np.float32(F.mse_loss(o, t).numpy()), F.mse_loss),
        (lambda o, t: np.asarray(F.mse_loss(o, t)), F.mse_loss),
        (lambda o, t: F.mse_loss(o, t).item(), F.mse_loss),
    ],
)
def test_a_metric_is_a_loss_without_a_gradient(metric: Any, same: Any, batches: bool) -> None:
    model, data = nn.Linear(3, 3), [(A[:9], B[:9]), (A[9:], B[9:])] if batches else (A, B)
    problem, plain = (Problem(model, loss, data) for loss in (metric, same))
    assert problem.loss() == pytest.approx(plain.loss(), rel=1e-6)
    v = torch.ones(12)
    lines = [landscape.line(p, v, points=3).loss for p in (problem, plain)]
    np.testing.assert_allclose(*lines, rtol=1e-6)
    refused("loss: it has no gradient", problem.gradient)
    refused("loss: it has no gradient", lambda: landscape.extreme_eigenvalues(problem))


def test_metrics_of_scikit_learn_are_taken() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    model, data = nn.Linear(3, 2), (A, C)
    found = Problem(model, lambda o, t: metrics.log_loss(t, o.double().softmax(1), labels=[0, 1]), data)
    assert found.loss() == pytest.approx(Problem(model, F.cross_entropy, data).loss(), rel=1e-6)
    with pytest.warns(landscape.ProblemWarning, match="it mixes samples"):
        f1 = Problem(model, lambda o, t: metrics.f1_score(t, o.argmax(1), average="macro"), data)
    predicted = model(A).argmax(1)
    assert f1.loss() == pytest.approx(metrics.f1_score(C, predicted, average="macro"))


# A model's own loss, which is a sum.


class Summed(nn.Module):
    """Its own loss is the sum, or that over a number that is given; ``mean``: by default the mean."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean, self.layer = mean, nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        reduction = "mean" if self.mean and num_items_in_batch is None else "sum"
        loss = F.cross_entropy(self.layer(x), labels, reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch}


@pytest.mark.parametrize("number", [None, 20, torch.tensor(20), torch.tensor(20.0)])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("batches", [False, True])
def test_a_sum_is_refused_and_a_number_of_items_left_out(mean: bool, batches: bool, number: Any) -> None:
    model, more = Summed(mean), {} if number is None else {"num_items_in_batch": number}
    parts = [slice(7), slice(7, 20)] if batches else [slice(20)]
    data: Any = [{"x": A[part], "labels": C[part], **more} for part in parts]
    data = data if batches else data[0]
    right = pytest.approx(float(F.cross_entropy(model.layer(A), C).detach()), rel=1e-6)
    if mean:
        assert Problem(model, None, data).loss() == right
        return
    refused("loss: it is the sum", lambda: Problem(model, None, data))
    if number is None:
        pairs = [(batch, batch["labels"]) for batch in data] if batches else (data, data["labels"])
        assert Problem(model, lambda o, t: o["loss"] / len(t), pairs).loss() == right
