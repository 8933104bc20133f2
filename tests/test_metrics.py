"""Metrics besides the loss: equal to brute force on every path, and resumed, interpolated, saved and drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import InputError, OperationError, Problem, plots
from landscape.analysis.quantities import Settings, _test_error
from landscape.core.progress import no_progress
from landscape.problem.metrics import BY_NAME

X = torch.randn(300, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3].argmax(1) + (X[:, 3] > 1)) % 3


class Accumulator:
    """The share of right answers, as an object with update and compute that has seen other samples."""

    def __init__(self) -> None:
        self.right = self.count = 7

    def reset(self) -> None:
        self.right = self.count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.count += len(targets)

    def compute(self) -> float:
        return self.right / self.count


def spread_of_outputs(outputs: Tensor, targets: Tensor) -> float:
    """A number of all samples that no mean over batches is."""
    return float(outputs[:, 0].std())


def brier(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.softmax(1) - F.one_hot(targets, outputs.shape[1])).square().sum(1)


SUMS: dict[str, Any] = {
    "brier": brier, "f1": "f1", "ece": "calibration", "ppl": "perplexity", "acc": "accuracy",
    **{name: name for name in ("margin", "top5", "nll", "error", "mse", "mae")},
}  # fmt: skip
ALL: dict[str, Any] = {**SUMS, "std": spread_of_outputs, "seen": Accumulator()}


def network(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "chain":
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    layers = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3)).double()


def brute_force(problem: Problem, weights: Tensor) -> dict[str, float]:
    """Loss and metrics at some weights, of one forward pass over all samples."""
    with torch.no_grad():
        outputs = problem.outputs(weights, X)
        probabilities, guess = outputs.softmax(1), outputs.argmax(1)
        own = outputs.gather(1, Y[:, None])[:, 0]
        rest = outputs.scatter(1, Y[:, None], -torch.inf).amax(1)
        nll = float(F.cross_entropy(outputs, Y))
        table = torch.stack(
            [torch.stack([((guess == a) & (b == Y)).sum() for b in range(3)]) for a in range(3)]
        )
        right = table.diagonal().double()
        f1 = 2 * right / (table.sum(0) + table.sum(1)).clamp(min=1)
        bins = torch.bucketize(probabilities.amax(1), torch.linspace(0, 1, 16, dtype=torch.float64)[1:-1])
        gaps = [
            (float((guess == Y)[bins == k].double().sum() - probabilities.amax(1)[bins == k].sum()))
            for k in range(15)
        ]
    return {
        "loss": nll, "accuracy": float((guess == Y).double().mean()), "nll": nll, "ppl": float(np.exp(nll)),
        "brier": float(brier(outputs, Y).mean()), "margin": float((own - rest).mean()), "top5": 1.0,
        "std": float(outputs[:, 0].std()), "seen": float((guess == Y).double().mean()), "f1": float(f1.mean()),
        "ece": sum(map(abs, gaps)) / len(Y), "acc": float((guess == Y).double().mean()),
        "error": float((guess != Y).double().mean()),
        "mse": float((outputs - F.one_hot(Y, 3)).square().mean()), "mae": float((outputs - F.one_hot(Y, 3)).abs().mean()),
    }  # fmt: skip


@pytest.mark.parametrize("form", ["tensors", "batches"])
@pytest.mark.parametrize(("kind", "metrics", "method"), [
    ("chain", SUMS, "batched"), ("chain", ALL, "pointwise"), ("convolution", SUMS, "folded"), ("convolution", ALL, "folded"),
])  # fmt: skip
def test_every_path_has_the_same_numbers(kind: str, metrics: dict[str, Any], method: str, form: str) -> None:
    data: Any = (X, Y) if form == "tensors" else [(X[k : k + 64], Y[k : k + 64]) for k in range(0, 300, 64)]
    problem = Problem(network(kind), F.cross_entropy, data, metrics=metrics)
    plane = landscape.random_plane(problem)
    surface = landscape.contour(problem, plane, grid=(3, 2), span=0.7)
    assert form == "batches" or surface.method == method
    line = landscape.line(problem, plane.directions[0], points=3, span=0.7)
    for i, j in np.ndindex(2, 3):
        weights = plane.center + surface.x[j] * plane.directions[0] + surface.y[i] * plane.directions[1]
        truth = brute_force(problem, weights)
        for name in ("loss", "accuracy", *metrics):
            assert surface.column(name)[i, j] == pytest.approx(truth[name], rel=1e-9, abs=1e-12), name
    truth = brute_force(problem, plane.center + 0.7 * plane.directions[0])
    assert {name: line.column(name)[-1] for name in metrics} == pytest.approx(
        {name: truth[name] for name in metrics}, rel=1e-9
    )
    assert {*metrics} <= {*surface.to_dataframe().columns} & {*line.to_xarray().data_vars}


def test_metrics_of_scikit_learn_and_of_several_outputs() -> None:
    metrics = pytest.importorskip("sklearn.metrics")

    def auroc(outputs: Tensor, targets: Tensor) -> float:
        return float(metrics.roc_auc_score(targets, outputs.softmax(1), multi_class="ovr"))

    own = {"auroc": auroc, "f1": lambda o, t: metrics.f1_score(t, o.argmax(1), average="macro")}
    for kind in ("chain", "convolution"):
        problem = Problem(network(kind), F.cross_entropy, (X, Y), metrics=own)  # AUROC needs all classes
        plane = landscape.random_plane(problem)
        surface = landscape.contour(problem, plane, grid=(3, 1), span=0.5)
        line = landscape.line(problem, plane.directions[0], points=3, span=0.5)
        with torch.no_grad():
            outputs = problem.outputs(problem.weights, X)
        for name, function in own.items():
            assert surface.column(name)[0, 1] == pytest.approx(function(outputs, Y)), name
            assert line.column(name)[1] == pytest.approx(function(outputs, Y)), name

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value = (
                nn.Linear(5, 3, dtype=torch.float64),
                nn.Linear(5, 1, dtype=torch.float64),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.policy(x), self.value(x)[:, 0]

    def loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(outputs[0], targets[0]) + F.mse_loss(outputs[1], targets[1])

    parts: dict[str, Callable[[Any, Any], Tensor]] = {
        "policy": lambda o, t: F.cross_entropy(o[0], t[0], reduction="none"),
        "critic": lambda o, t: (o[1] - t[1]).square(),
    }
    problem = Problem(ActorCritic(), loss, (X, (Y, X.sum(1))), metrics=parts)
    line = landscape.line(problem, torch.ones_like(problem.weights), points=5)
    np.testing.assert_allclose(line.column("policy") + line.column("critic"), line.loss, rtol=1e-12)


def test_a_metric_that_needs_all_samples_is_called_with_all_where_points_are_interpolated() -> None:
    x = X.repeat(4, 1) + 0.1 * torch.randn(1200, 5, generator=torch.Generator().manual_seed(1)).double()

    def needy(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) < 1200:
            raise ValueError("too few")
        return float(outputs.std())

    problem = Problem(network("chain"), F.cross_entropy, (x, Y.repeat(4)), metrics={"needy": needy})
    plane = landscape.random_plane(problem)
    surface = landscape.contour(problem, plane, grid=31, span=0.5, interpolation_tol="5%")
    assert surface.part_samples
    with torch.no_grad():
        expected = float(problem.outputs(problem.weights, x).std())
    assert surface.column("needy")[15, 15] == pytest.approx(expected, abs=0.05)
    exact = np.isfinite(surface.column("needy")) & surface.done
    assert exact.sum() == surface.evaluations


def test_metrics_of_numbers_and_of_masked_targets() -> None:
    layer = nn.Linear(5, 2, dtype=torch.float64)
    problem = Problem(layer, F.mse_loss, (X, X[:, :2]), metrics=["mse", "mae"])
    line = landscape.line(problem, problem.weights, points=3)
    gap = (layer(X) - X[:, :2]).detach()
    assert line.column("mae")[1] == pytest.approx(float(gap.abs().mean()))
    np.testing.assert_allclose(line.column("mse"), line.loss, rtol=1e-12)
    # Of one output (B, 1) and targets (B,) no pair is broadcast.
    problem = Problem(
        nn.Linear(5, 1).double(), lambda o, t: F.mse_loss(o[:, 0], t), (X, X[:, 0]), metrics=["mse"]
    )
    line = landscape.line(problem, problem.weights, points=3)
    np.testing.assert_allclose(line.column("mse"), line.loss, rtol=1e-12)
    # Counts (B, 1), and outputs in another order than the targets.
    counts = (3 * X[:, :1]).round().long()
    problem = Problem(
        nn.Linear(5, 1).double(), lambda o, t: F.mse_loss(o, t.double()), (X, counts), metrics=["mse"]
    )
    line = landscape.line(problem, problem.weights, points=3)
    np.testing.assert_allclose(line.column("mse"), line.loss, rtol=1e-12)
    np.testing.assert_allclose(float(problem.totals()[2] / 300), line.loss[1], rtol=1e-12)
    pairs = nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (2, 3))).double()
    with pytest.raises(InputError, match="^metrics: 'mse' takes outputs .* or numbers of one shape"):
        Problem(pairs, lambda o, t: F.mse_loss(o.mT, t), (X, torch.ones(300, 3, 2).double()), metrics=["mse"])
    strange = Y.clone()
    strange[7] = -3

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.abs() % 3)

    problem = Problem(network("chain"), loss, (X, strange), metrics=["nll", "f1", "accuracy"])
    line = landscape.line(problem, problem.weights, points=3)
    assert np.isnan([line.accuracy, line.column("nll"), line.column("f1")]).all()
    assert line.metric_names == ("nll", "f1")
    assert [row.value for row in line.describe() if row.name == "f1"] == ["nan to nan"]  # without a warning
    assert "nan to nan   no numbers: of a metric that has a name, some targets are no cl" in line.summary()


@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")  # the terms are counted
@pytest.mark.parametrize("form", ["tensors", "batches"])
@pytest.mark.parametrize(("loss", "mask"), [
    (F.cross_entropy, -100), (nn.CrossEntropyLoss(ignore_index=1, weight=torch.tensor([1.0, 2, 3])), 1),
    (lambda o, t: F.cross_entropy(o, t, ignore_index=-1), -1),
])  # fmt: skip
def test_named_metrics_leave_out_the_targets_that_the_loss_leaves_out(
    loss: Any, mask: int, form: str
) -> None:
    y = Y.where(X[:, 4] < 0.3, mask)
    data: Any = (X, y) if form == "tensors" else [(X[k : k + 64], y[k : k + 64]) for k in range(0, 300, 64)]
    names = [name for name in SUMS.values() if name in BY_NAME and name != "accuracy"]
    for kind in ("chain", "convolution"):
        problem = Problem(network(kind), loss, data, metrics=names)
        rest = Problem(network(kind), F.cross_entropy, (X[y != mask], y[y != mask]), metrics=names)
        plane = landscape.random_plane(problem)
        surfaces = [landscape.contour(p, plane, grid=(3, 2), span=0.7) for p in (problem, rest)]
        for name in ("accuracy", *names):
            a, b = (surface.column(name) for surface in surfaces)
            np.testing.assert_allclose(a, b, rtol=1e-9, err_msg=name)


class Tagger(nn.Module):
    """Outputs (B, T, V) of tokens (B, T); with ``causal``, of the next token, and their loss."""

    def __init__(self, causal: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.causal = nn.Sequential(nn.Embedding(4, 6), nn.Tanh(), nn.Linear(6, 4)).double(), causal

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(tokens)
        if labels is None:
            return logits
        z, t = (logits[:, :-1], labels[:, 1:]) if self.causal else (logits, labels)
        return {"loss": F.cross_entropy(z.flatten(0, 1), t.flatten()), "logits": logits}


@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
@pytest.mark.parametrize("length", [4, 7])  # of as many tokens as there are classes, too
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [None, False, True])
def test_named_metrics_of_outputs_with_classes_last(causal: bool | None, masked: bool, length: int) -> None:
    tokens = torch.randint(4, (20, length), generator=torch.Generator().manual_seed(0))
    labels = tokens.where(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -100)
    labels = labels if masked else tokens
    metrics = ["nll", "f1", "top5", "error"]

    def last(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    data: Any = (tokens, labels) if causal is None else {"tokens": tokens, "labels": labels}
    loss = last if causal is None else None
    if length == 4:  # either dimension may have the classes
        with pytest.raises(InputError, match="^metrics: 'nll' takes outputs .B, classes, …., these may be"):
            Problem(Tagger(causal), loss, data, metrics=metrics)
        assert np.isnan(Problem(Tagger(causal), loss, data).accuracy())
        return
    problem = Problem(Tagger(causal), loss, data, metrics=metrics)
    line = landscape.line(problem, problem.weights, points=3)
    with torch.no_grad():
        z, t = problem.model.net(tokens), labels  # type: ignore[operator, union-attr]
    z, t = (z[:, :-1], t[:, 1:]) if causal else (z, t)
    guess, t = z[t >= 0].argmax(1), t[t >= 0]
    np.testing.assert_allclose(line.column("nll"), line.loss, rtol=1e-9)
    np.testing.assert_allclose(line.accuracy[1], float((guess == t).double().mean()))
    right, sizes = (
        [float((a == c).sum()) for c in range(4)]
        for a in (guess.where(guess == t, -1), torch.cat((guess, t)))
    )
    np.testing.assert_allclose(line.column("f1")[1], np.mean(2 * np.array(right) / sizes))


def test_a_loss_of_the_next_targets_says_so_or_its_metrics_are_refused() -> None:
    tokens = torch.randint(4, (20, 7), generator=torch.Generator().manual_seed(0))

    def following(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    assert np.isnan(Problem(Tagger(), following, (tokens, tokens)).accuracy())
    with pytest.raises(InputError, match="^metrics: 'nll' takes outputs .* or of next targets"):
        Problem(Tagger(), following, (tokens, tokens), metrics=["nll"])


def test_the_test_error_of_masked_targets_is_that_of_the_others() -> None:
    y = Y.where(X[:, 4] < 0.3, -100)
    values = []
    for data in ((X, y), (X[y >= 0], y[y >= 0])):
        problem = Problem(network("chain"), F.cross_entropy, data)
        subject: Any = SimpleNamespace(test=lambda problem=problem: problem)
        values.append(_test_error(subject, Settings(), no_progress))
    assert values[0].value == pytest.approx(values[1].value)
    assert values[0].error == pytest.approx(values[1].error, rel=0.01)


def test_what_metrics_of_all_samples_give_and_how_they_fail() -> None:
    def needy(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets) < 300:
            raise ValueError("too few")
        return brier(outputs, targets)

    class Failing(Accumulator):
        def compute(self) -> float:
            raise RuntimeError("no\nnumber")

    def problem(metric: Any) -> Problem:
        return Problem(
            network("chain"), F.cross_entropy, (X, Y), metrics={"std": spread_of_outputs, "a": metric}
        )

    truth = float(brier(network("chain")(X), Y).mean().detach())
    assert float(problem(needy).totals()[3] / 300) == pytest.approx(truth)
    given = problem(lambda o, t: brier(o, t).numpy())
    assert given.metrics[1].of_sums
    assert float(given.totals()[3] / 300) == pytest.approx(truth)
    for metric, words in {
        Failing(): "'a' failed: RuntimeError: no number",
        lambda o, t: needy(o, t)[:-1]: r"'a' gives \(299,\), it must give one number, or \(300,\)",
        lambda o, t: needy(o.zero_(), t): "'a' changes outputs or targets in place",
    }.items():
        with pytest.raises(InputError, match=f"^metrics: {words}"):
            problem(metric).totals()


def test_a_surface_with_metrics_is_resumed_interpolated_and_drawn(tmp_path: Path) -> None:
    def problem(**metrics: Any) -> Problem:
        return Problem(network("chain"), F.cross_entropy, (X, Y), metrics=metrics or None)

    measured = problem(brier=brier)
    plane = landscape.random_plane(measured)
    with landscape.open(tmp_path / "s.h5", "a") as file:
        coarse = landscape.contour(measured, plane, grid=5, into=file)
    with landscape.open(tmp_path / "s.h5", "a") as file:
        fine = landscape.contour(measured, plane, grid=9, into=file)
    assert (fine.column("brier")[::2, ::2] == coarse.column("brier")).all()
    saved = landscape.load(tmp_path / "s.h5")
    assert isinstance(saved, landscape.Surface)
    assert (saved.column("brier") == fine.column("brier")).all()
    for other in (problem(), problem(brier=lambda o, t: 2 * brier(o, t))):
        with (
            landscape.open(tmp_path / "s.h5", "a") as file,
            pytest.raises(OperationError, match=r"holds|its"),
        ):
            landscape.contour(other, plane, grid=9, into=file)

    smooth = landscape.contour(measured, plane, grid=41, span=0.5, interpolation_tol="1%")
    exact = landscape.contour(measured, plane, grid=41, span=0.5)
    assert not smooth.done.all()
    error = np.abs(smooth.column("brier") - exact.column("brier")).max() / np.ptp(exact.column("brier"))
    assert error <= smooth.stated_error[smooth.columns.index("brier")]
    figure = landscape.draw(fine, quantity="brier")
    assert figure.get_suptitle().startswith("brier from ")
    line = landscape.line(measured, plane.directions[0], points=3)
    assert [*landscape.draw(line).axes_by_name] == ["loss", "accuracy", "brier"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("metrics", "words"), [
    ("f1", "metrics: 'f1' is not allowed, it must be a Mapping or a list"),
    (["f2"], "metrics: 'f2': 'f2' is not known; did you mean 'f1'"),
    ({"loss": brier}, "metrics: the name 'loss' is not allowed"),
    ({"accuracy": brier}, "metrics: the name 'accuracy' is not allowed"),
    ({"a b": brier}, "metrics: the name 'a b' is not allowed"),
    ({"a": 3}, "metrics: 'a' is a int, it must be a function"),
    ({"a": lambda o, t: o}, r"metrics: 'a' gives \(12, 3\), it must give one number, or \(12,\)"),
    ({"a": lambda o, t: brier(o, t) / brier(o, t).sum()}, "metrics: 'a' gives a sample another value where other samples"),
    ({"a": lambda o, t: brier(o, t).flip(0).cumsum(0).flip(0)}, "metrics: 'a' gives a sample another value where other"),
    ({"a": lambda o, t: 1e-9 * o.amax(1) / o.max()}, "metrics: 'a' gives a sample another value where other"),
    ({"a": lambda o, t: o.exp_().sum(1)}, "metrics: 'a' changes outputs or targets in place"),
    ({"a": lambda o, t: None}, "metrics: 'a' gives NoneType"),
    ({"a": lambda o, t: o.nothing}, "metrics: 'a' failed: AttributeError"),
])  # fmt: skip
def test_what_is_no_metric_is_refused_in_one_line(metrics: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}") as refusal:
        Problem(network("chain"), F.cross_entropy, (X, Y), metrics=metrics)
    assert "\n" not in str(refusal.value)


class ManyOutputs(nn.Module):
    """Outputs with time first, dropout in eval mode, a number, and the model's weights, with ``edges`` of all."""

    def __init__(self, dropout: float = 0.0, edges: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.dropout, self.edges = nn.Linear(5, 3, dtype=torch.float64), dropout, edges

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = F.dropout(self.layer(x if self.edges is None else self.edges @ x), self.dropout)
        times = torch.stack((logits, 2 * logits)) if self.edges is None and not self.dropout else logits
        return {"logits": logits, "times": times, "norm": logits.new_tensor(2.0), "layer": self.layer.weight}


@pytest.mark.parametrize("metric", [
    lambda o, t: brier(o["logits"], t) * o["norm"], lambda o, t: brier(o["logits"] @ o["layer"], t), lambda o, t: brier(o["times"][-1], t),
])  # fmt: skip
@pytest.mark.parametrize("samples", [1, 2, 3, 300])
def test_a_metric_of_samples_takes_any_outputs(metric: Any, samples: int) -> None:
    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], targets)

    problem = Problem(ManyOutputs(), loss, (X[:samples], Y[:samples]), metrics={"a": metric})
    with torch.no_grad():
        outputs = problem.outputs(problem.weights, X[:samples])
    assert float(problem.totals()[2]) == pytest.approx(float(metric(outputs, Y[:samples]).sum()))
    assert problem.metrics[0].of_sums


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"edges": torch.rand(300, 300, dtype=torch.float64)}])
def test_a_metric_of_sums_of_a_model_that_is_random_or_takes_no_part(options: Any) -> None:
    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], targets)

    def error(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], targets, reduction="none")

    problem = Problem(ManyOutputs(**options), loss, [(X, Y)], randomness="seed", metrics={"a": error})
    totals = problem.totals()
    assert problem.metrics[0].of_sums
    assert float(totals[2]) == pytest.approx(float(totals[0]))


def test_a_name_for_outputs_that_have_no_such_metric_is_refused_in_one_line() -> None:
    for metric, words in (("nll", "several classes, and integers"), ("f1", "several classes, and integers")):
        with pytest.raises(InputError, match=f"^metrics: '{metric}' takes outputs of {words}"):
            Problem(nn.Linear(5, 2).double(), F.mse_loss, (X, X[:, :2]), metrics=[metric])
    with pytest.raises(InputError, match="^metrics: 'mse' takes outputs .B, classes, …. with targets"):
        Problem(
            nn.Linear(5, 2).double(), lambda o, t: o.square().mean() + 0 * t.sum(), (X, X), metrics=["mse"]
        )


def test_outputs_whose_classes_may_be_either_dimension_are_refused_unless_the_loss_says_which() -> None:
    tokens = torch.randint(4, (20, 4), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))

    def last(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    with pytest.raises(InputError, match="^metrics: 'nll' takes outputs .B, classes, …., these may be"):
        Problem(model, last, (tokens, tokens), metrics=["nll"])
    problem = Problem(model, F.cross_entropy, (tokens, tokens), metrics=["nll"])
    assert float(problem.totals()[2] / 20) == pytest.approx(problem.loss(), rel=1e-6)


def test_f1_leaves_out_classes_of_no_target_and_no_guess_as_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    model = network("chain")
    with torch.no_grad():
        dict(model.named_parameters())["2.bias"][1] = -100.0
    seen = Y != 1
    problem = Problem(model, F.cross_entropy, (X[seen], Y[seen]), metrics=["f1"])
    truth = metrics.f1_score(Y[seen], model(X[seen]).argmax(1), average="macro")
    assert float(problem.totals()[2] / problem.samples) == pytest.approx(truth)


def test_paths_averages_the_center_of_a_grid_and_comparisons_have_the_metrics(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {"f1": "f1", "std": spread_of_outputs}
    problem, other = (Problem(network("chain"), F.cross_entropy, (X, Y), metrics=metrics) for _ in range(2))
    b = problem.weights + torch.randn(75, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def truth(weights: Tensor) -> list[float]:
        return [brute_force(problem, weights)[name] for name in metrics]

    path = landscape.connect(problem, problem.weights, b, steps=0, points=3)
    w = torch.from_numpy(path.weights)
    at = (w[0] + w[1]) / 2, (w[0] + w[2]) / 2, w[0] / 4 + w[2] / 4 + w[3] / 2
    expected = np.transpose([truth(weights) for weights in at])
    np.testing.assert_allclose(path.metrics[:, :, 1], expected, rtol=1e-9)
    path.save(tmp_path / "path.h5")
    assert (landscape.load(tmp_path / "path.h5").column("f1") == path.metrics[0]).all()
    assert [*landscape.draw(path).axes_by_name] == ["loss", "accuracy", "f1", "std"]  # type: ignore[attr-defined]

    average = landscape.average(problem, [problem.weights, b], [1, 3])
    np.testing.assert_allclose(average.metrics[:, 0], truth(problem.weights / 4 + 0.75 * b), rtol=1e-9)
    assert "metrics have no prediction" in [row.note for row in average.describe()]

    grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=1)
    np.testing.assert_allclose(grid.metrics, truth(problem.weights), rtol=1e-9)

    other.weights = b
    table = landscape.compare({"a": problem, "b": other}, quantities=["loss"])
    assert table.quantities == ("loss", "f1", "std")
    np.testing.assert_allclose(table.value[1:].T, [truth(problem.weights), truth(b)], rtol=1e-9)
    bare = Problem(network("chain"), F.cross_entropy, (X, Y))
    table = landscape.compare([problem, bare], quantities=["loss"])
    assert np.isnan(table.value[1:, 1]).all()
    assert "f1 was not measured at problem 2: metrics: it has no 'f1'; give both the same" in table.notes


def test_a_recorder_has_columns_of_metrics_of_the_test_data(tmp_path: Path) -> None:
    model = network("chain")
    with (
        landscape.Recorder(
            tmp_path, model, F.cross_entropy, (X, Y), every=1, test=(X, Y), metrics=["f1"]
        ) as recorder,
        recorder.step(),
        torch.no_grad(),
    ):
        model[0].weight.mul_(0.5)  # type: ignore[operator, union-attr]
    run = landscape.load(tmp_path / "last.h5")
    assert isinstance(run, landscape.Checkpoint)
    problem = Problem(model, F.cross_entropy, (X, Y))
    assert run.history["test_f1"][-1] == pytest.approx(brute_force(problem, problem.weights)["f1"])
    (panel,) = (ax for ax in plots.draw(run).axes if ax.get_ylabel() == "test f1")
    assert panel.lines[0].get_ydata()[-1] == run.history["test_f1"][-1]
    with pytest.raises(InputError, match="metrics: they are of the test data"):
        landscape.Recorder(tmp_path / "other", model, F.cross_entropy, (X, Y), metrics=["f1"])


def parabola(points: int = 81) -> landscape.Surface:
    """x² + 4y² in distances of weight space, on a plane of skew directions."""
    grid = np.linspace(-1, 1, points)
    directions = np.array([[2.0, 0.0], [1.0, 1.0]])
    at = grid[:, None] * directions[0] + grid[:, None, None] * directions[1]
    loss = at[..., 0] ** 2 + 4 * at[..., 1] ** 2
    return landscape.Surface(
        x=grid, y=grid, loss=loss, accuracy=1 - loss / 50, done=loss < 99, directions=directions, center=np.zeros(2),
        kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64", bn="center", method="batched",
    )  # fmt: skip


@pytest.mark.parametrize("points", [50, 51, 4])
def test_the_radius_needs_no_point_at_the_center_and_states_its_error(points: int) -> None:
    surface, angle = parabola(points), np.arange(72) / 72 * 2 * np.pi
    exact = 1 / np.sqrt(np.cos(angle) ** 2 + 4 * np.sin(angle) ** 2)
    step = 2 / (points - 1)
    for rise in (0.25, 1e-2, 1e-4):
        radius = surface.radius("loss", rise=rise)
        assert radius.center == pytest.approx(0, abs=1e-12)
        np.testing.assert_allclose(np.sort(radius.distance), np.sort(exact * rise**0.5), rtol=0.01)
        assert radius.median == pytest.approx(
            np.quantile(exact * rise**0.5, 0.5, method="inverted_cdf"), rel=0.01
        )
        (row,) = (row for row in radius.describe() if row.name == "median of the distances")
        assert row.error == pytest.approx(float(radius.error[radius.distance == radius.median].max()))
        assert radius.near.all() or step**2 < rise  # rough, and it says so


@pytest.mark.parametrize("points", [50, 51])
@pytest.mark.parametrize(("k", "rise"), [(3, 0.02), (3, 0.5), (6, 0.02), (6, 0.1), (12, 0.02)])
def test_the_radius_on_a_wave_is_right_within_its_stated_error(points: int, k: int, rise: float) -> None:
    surface, angle = parabola(points), np.arange(72) / 72 * 2 * np.pi
    surface.loss[:] = (1 - np.cos(k * np.sqrt(surface.loss) / 2)) * 4 / k**2
    ellipse = 1 / np.sqrt(np.cos(angle) ** 2 + 4 * np.sin(angle) ** 2)
    radius, exact = surface.radius("loss", rise=rise), 2 / k * np.arccos(1 - rise * k**2 / 4) * ellipse
    assert not radius.censored.any()
    assert (np.abs(np.sort(radius.distance) - np.sort(exact)) < radius.error.min()).all()
    assert radius.error.max() < 2 / (points - 1)


def test_the_radius_of_a_metric_is_that_of_the_ellipse_and_what_lies_beyond_is_said() -> None:
    surface, angle = parabola(), np.arange(72) / 72 * 2 * np.pi
    inverse = np.sqrt(np.cos(angle) ** 2 + 4 * np.sin(angle) ** 2)
    for radius in (surface.radius("loss", rise=0.25), surface.radius("accuracy", drop=0.005)):
        assert not radius.censored.any()
        np.testing.assert_allclose(np.sort(radius.distance), np.sort(0.5 / inverse), rtol=5e-3)
        assert radius.median == pytest.approx(
            np.quantile(0.5 / inverse, 0.5, method="inverted_cdf"), rel=5e-3
        )
    assert surface.radius("accuracy", drop="0.5%").border == pytest.approx(0.995)

    far = surface.radius("loss", rise=3.61)  # some directions leave the surface before
    beyond = far.censored
    assert 0 < beyond.sum() < 36
    assert far.quantile(0.1)[1]
    assert not far.quantile(0.9)[1]
    assert (far.distance[beyond] < 1.9 / inverse.min()).all()
    assert np.abs(far.points[beyond]).max(1) == pytest.approx(1.0)  # the edge
    assert "≥" in repr(far)
    assert f"{72 - beyond.sum()} of 72 directions reach it" in repr(far)
    none = surface.radius("loss", drop=0.1)
    assert none.censored.all()
    assert np.isnan(none.median)

    rough = surface.radius("loss", rise=1e-4)  # its distances are 0.005 to 0.01, a step of the grid is 0.025
    assert rough.near.all()
    assert "72 so near that it is rough: take a smaller span" in repr(rough)
    assert not far.near.any()
    t = np.linspace(-0.5, 1.5, 22)  # without 0
    line = landscape.Line(
        t=t, loss=t**2, accuracy=t, start=np.zeros(2), direction=np.array([3.0, 4.0]), kind="direction",
        barrier=0.0, samples=1, dtype="float64", method="batched",
    )  # fmt: skip
    assert line.radius("loss", rise=1.0).distance == pytest.approx(
        [5.0, 2.5], rel=1e-3
    )  # it ends at t = -0.5
    assert line.radius("loss", rise=1.0).censored.tolist() == [False, True]
    assert line.radius("loss", rise=0.001).near.all()
    with pytest.raises(OperationError, match="^loss: at the center it is nan, from which"):
        dataclasses.replace(line, t=t + 1).radius("loss", rise=1.0)

    hole = parabola()
    hole.loss[:, 45:] = np.nan
    cut = hole.radius("loss", rise=0.25)
    assert cut.censored[0]
    assert cut.distance[0] < 1.0
    hole.loss[:, 45:] = np.inf
    assert not hole.radius("loss", rise=3.0).censored[0]
    figure = landscape.draw(surface, ring=surface.radius("loss", rise=0.25))
    assert "loss, +0.25 against the center" in [text.get_text() for text in figure.legends[0].get_texts()]
    for message, call in {
        "drop, rise: None and None": lambda: surface.radius("loss"),
        "drop, rise: 'x' and None": lambda: surface.radius("loss", "x"),
        "column: 'f2'": lambda: surface.radius("f2", "1%"),
        "ring: 1 for 2 surfaces": lambda: landscape.draw([surface, surface], ring=none),
    }.items():
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(OperationError, match="loss: at the center it is 0, from which no change"):
        surface.radius("loss", drop="1%")
