"""Data as people have it: graphs, outputs of another shape, augmentation, batches of which no target counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import landscape
from landscape import InputError, Problem
from tests.dense import remedied
from tests.nets import Augmented


def refused(match: str, model: nn.Module, loss: Any, data: Any) -> InputError:
    """The refusal, which is one line."""
    with pytest.raises(InputError, match=match) as refusal:
        Problem(model, loss, data)
    assert "\n" not in str(refusal.value)
    return refusal.value


# A graph.


def test_pairs_of_unequal_length_are_no_graph() -> None:
    data = torch.randn(9, 5), torch.zeros(8)
    assert not refused("inputs: 9 samples, but targets: 8", nn.Linear(5, 3), F.cross_entropy, data).remedy
    data = torch.randn(8, 5).to_sparse(), torch.zeros(8)
    words = r"inputs: a sparse_coo tensor \(.to_dense\(\) makes a plain one"
    refused(words, nn.Linear(5, 3), F.cross_entropy, data)


class Dense(nn.Module):
    """A layer that mixes nodes by a matrix of adjacency, an input or a buffer; each node has a class."""

    def __init__(self, adjacency: Tensor | None = None) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        adjacency = self.adjacency if adjacency is None else adjacency
        out: Tensor = self.head((adjacency @ self.inner(x)).tanh())
        return out


FORMS = ["buffer", "sparse buffer", "input", "list of buffer", "list", "sparse list", "csr list"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("form", "nodes"), [*((form, 30) for form in FORMS), ("buffer", 2100)])
def test_a_graph_by_its_adjacency(form: str, nodes: int) -> None:
    """As many rows of the adjacency as nodes: it could be samples, but no part of them has a loss."""
    torch.manual_seed(0)
    a, x = (torch.rand(nodes, nodes) < 6 / nodes).double(), torch.randn(nodes, 5).double()
    y = torch.arange(nodes) % 3
    given = a.to_sparse() if "sparse" in form else a.to_sparse_csr() if "csr" in form else a
    model = Dense(given if "buffer" in form else None).double()
    data: Any = (x, y) if "buffer" in form else ((x, given), y)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", landscape.ProblemWarning)
        problem = Problem(model, F.cross_entropy, [data] if "list" in form else data)
    whole = [f"all {nodes:,} are evaluated at once" in str(w.message) for w in said]
    assert whole == [True] * ("list" not in form)
    plain = Problem(Dense(a).double(), F.cross_entropy, [(x, y)], weights=problem.weights)
    expected = F.cross_entropy(model(x) if "buffer" in form else model(x, given), y).item()
    assert problem.loss() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(problem.gradient(), plain.gradient(), rtol=1e-9, atol=1e-12)
    surface = landscape.contour(problem, landscape.random_plane(problem), grid=(1, 1))
    assert surface.loss[0, 0] == pytest.approx(expected, rel=1e-12)
    v = torch.ones_like(problem.weights)
    found, expected = (landscape.HessianOperator(p)(v) for p in (problem, plain))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_sparse_adjacency_is_no_samples() -> None:
    a, x, y = (torch.rand(30, 30) < 0.2).float().to_sparse(), torch.randn(30, 5), torch.arange(30) % 3
    model, data = Dense(), ((x, a), y)
    error = refused("a list of one batch", model, F.cross_entropy, data)
    problem = remedied(error, model, F.cross_entropy, data)
    assert problem.loss() == pytest.approx(F.cross_entropy(model(x, a), y).item(), rel=1e-6)


# (N, 1) outputs for (N,) targets.


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(40, 5), torch.randn(40)


def in_batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:15], y[:15]), (x[15:], y[15:])]


def in_loader(x: Tensor, y: Tensor) -> Any:
    return DataLoader(TensorDataset(x, y), batch_size=16)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def in_tensors(x: Tensor, y: Tensor) -> Any:
    return x, y


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        *((make, squares) for make in (in_tensors, in_batches, in_loader, TensorDataset)),
        *((in_tensors, loss()) for loss in (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss)),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_broadcasting_is_named_with_its_remedy(make: Callable[..., Any], loss: Any, wide: bool) -> None:
    """PyTorch's own warning is not needed, nor in the way."""
    model, x, y = regression()
    if isinstance(loss, nn.BCEWithLogitsLoss):
        y = (y > 0).long() if wide else (y > 0).float()
    truth = loss(model(x).squeeze(1), y.float()).item()
    if wide:
        model, y = nn.Sequential(model, nn.Flatten(0)), y.unsqueeze(1)
    data = make(x, y)
    shapes = r"shape \(\d+,\).*targets \(\d+, 1\)" if wide else r"shape \(\d+, 1\).*targets \(\d+,\)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = refused(shapes, model, loss, data)
        assert remedied(error, model, loss, data).loss() == pytest.approx(truth, rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert refused(shapes, model, loss, data).remedy == error.remedy


def relative(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).square().mean() / targets.var()).sqrt()


@pytest.mark.parametrize("make", [in_tensors, in_batches, in_loader])
def test_broadcasting_is_seen_in_a_loss_that_is_no_mean(make: Callable[..., Any]) -> None:
    model, x, y = regression()
    data = make(x, y)
    error = refused("broadcasts", model, relative, data)
    with pytest.warns(landscape.ProblemWarning):
        problem = remedied(error, model, relative, data)
    parts = [(x, y)] if isinstance(data, tuple) else list(data)
    expected = torch.stack([relative(model(a).squeeze(1), b) for a, b in parts]).mean().item()
    assert problem.loss() == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_mixes_samples_otherwise_is_not_called_broadcasting() -> None:
    model, x, y = regression()

    def ranked(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.sort(0).values - targets.sort(0).values).square().mean()

    def flat(outputs: Tensor, targets: Tensor) -> Tensor:
        return ranked(outputs.flatten(), targets.flatten())

    for data in ((x, y.unsqueeze(1)), (x, y)):
        with pytest.warns(landscape.ProblemWarning, match="it mixes samples"):
            problem = landscape.Problem(model, flat, data)
        assert problem.loss() == pytest.approx(float(flat(model(x), data[1]).detach()), rel=1e-6)


def test_an_error_of_another_kind_is_told_as_it_is() -> None:
    model, x, y = regression()

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("weights of the classes")

    assert "broadcasts" not in str(refused("KeyError: 'weights of the classes'", model, failing, (x, y)))


# Two passes that differ.


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_passes_that_differ_are_refused_by_their_cause(shuffle: bool, drop_last: bool, noise: float) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(45, 5), torch.randint(3, (45,))
    data = DataLoader(Augmented(x, y, noise), batch_size=10, shuffle=shuffle, drop_last=drop_last)
    if not noise and not (shuffle and drop_last):
        assert Problem(model, F.cross_entropy, data).samples == (40 if drop_last else 45)
        return
    cause, other = "drop_last=False", "augmentation"
    if not (shuffle and drop_last):
        cause, other = "without augmentation", "drop_last"
    error = refused(f"two passes.*{cause}.*one draw", model, F.cross_entropy, data)
    assert other not in str(error)
    torch.manual_seed(3)
    problem = remedied(error, model, F.cross_entropy, data)
    torch.manual_seed(3)
    drawn = [torch.cat(parts) for parts in zip(*data, strict=True)]
    assert problem.loss() == pytest.approx(F.cross_entropy(model(drawn[0]), drawn[1]).item(), rel=1e-6)


# Batches of which no target counts.


def ignoring() -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and 40 samples in float64 of which the first 20 have no target."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(40, 5).double(), torch.randint(3, (40,))
    y[:20] = -100
    return model, x, y


def masked(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over the samples whose mask is 1; NaN of none."""
    y, mask = targets
    return (F.cross_entropy(outputs, y, reduction="none") * mask).sum() / mask.sum()


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "batches": lambda x, y: [(x[:20], y[:20]), (x[20:], y[20:])],
    "between": lambda x, y: [(x[:9], y[:9]), (x[20:30], y[20:30]), (x[9:20], y[9:20]), (x[30:], y[30:])],
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10),
}


@pytest.mark.parametrize(
    ("name", "own"),
    [("between", False), ("loader", False), ("tensors", True), ("batches", None)],
)  # fmt: skip
def test_the_samples_that_count_decide(name: str, own: bool | None) -> None:
    """The numbers are those of the samples with a target alone; nothing is NaN."""
    model, x, y = ignoring()
    reference = Problem(model, nn.CrossEntropyLoss(), (x[20:], y[20:]))
    if own:
        data: Any = x, (y.clamp(min=0), (y >= 0).double())
        if name == "batches":
            rows = [slice(0, 20), slice(20, 40)]
            data = [(x[part], (data[1][0][part], data[1][1][part])) for part in rows]
        problem = Problem(model, masked, data, terms=lambda targets: targets[1])
    elif own is None:  # a function of which nothing is known
        with pytest.warns(landscape.ProblemWarning, match="y != -100"):
            problem = Problem(model, lambda o, t: F.cross_entropy(o, t), CASES[name](x, y))
    else:
        problem = Problem(model, nn.CrossEntropyLoss(), CASES[name](x, y))
    plane = landscape.random_plane(reference, seed=0)
    for bn in ("center", "train"):
        expected = landscape.contour(reference, plane, grid=(3, 2), span=1.0, bn=bn).loss
        found = landscape.contour(problem, plane, grid=(3, 2), span=1.0, bn=bn).loss
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=0)
    torch.testing.assert_close(problem.gradient(), reference.gradient(), rtol=1e-9, atol=1e-12)
    ends, truth = (landscape.extreme_eigenvalues(p, residual_tol=1e-6) for p in (problem, reference))
    assert (ends.min, ends.max) == pytest.approx((truth.min, truth.max), rel=1e-5)
    traces = [landscape.trace(p, 10 * problem.layout.size).value for p in (problem, reference)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-6)


@pytest.mark.parametrize("batches", [False, True])
def test_one_target_among_many_samples_is_found(batches: bool) -> None:
    """The few samples of checks and trials hold one that counts, wherever it is."""
    model, x, y = ignoring()
    x, mask = x.repeat(20, 1), torch.zeros(800).double()
    mask[417] = 1
    targets = y.clamp(min=0).repeat(20), mask
    data: Any = [(x, targets)] if batches else (x, targets)
    problem = Problem(model, masked, data, terms=lambda targets: targets[1])
    alone = Problem(model, nn.CrossEntropyLoss(), (x[417:418], targets[0][417:418]))
    found, truth = (landscape.top_eigenvalues(p).values[0].item() for p in (problem, alone))
    assert found == pytest.approx(truth, rel=0.02)


def test_checks_see_a_sample_that_counts() -> None:
    """A sum is refused, though it is 0 for all of the first batch."""
    model, x, y = ignoring()
    for data in (CASES["batches"](x, y), CASES["loader"](x, y)):
        refused("reduction='sum'", model, nn.CrossEntropyLoss(reduction="sum"), data)


def test_no_target_at_all_is_refused_and_a_minibatch_without_one() -> None:
    model, x, y = ignoring()
    for data in ((x[:20], y[:20]), [(x[:9], y[:9]), (x[9:20], y[9:20])]):
        refused("data: all its targets are left out of the loss", model, nn.CrossEntropyLoss(), data)
    refused(
        "data: all its targets are left out of the loss",
        model, lambda o, t: F.cross_entropy(o, t), (x[:20], y[:20]),
    )  # fmt: skip
    diverged = Problem(
        model, F.mse_loss, (x, torch.zeros(40, 3)), weights=torch.full((39,), 1e200, dtype=torch.float64)
    )
    assert diverged.loss() == float("inf")
    problem = Problem(model, nn.CrossEntropyLoss(), (x, y))
    weights = problem.weights + 0.1 * torch.randn(4, problem.layout.size).double()
    with pytest.raises(InputError, match="no target of 2 samples counts"):
        landscape.noise(problem, weights, lr=0.1, local_batch=2)


def test_a_sample_whose_terms_are_the_mean_number_hides_no_others() -> None:
    """The first batch has samples of 2, 3 and 4 tokens: of 3 tokens one alone looks like a third of all."""
    torch.manual_seed(0)
    x = torch.randn(8, 5, 3).double()
    y = torch.randint(4, (8, 5)).masked_fill(
        torch.arange(5) >= torch.tensor([[2], [3], [4], [1], [4], [4], [5], [3]]), -1
    )
    model = nn.Linear(3, 4).double()

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=-1)

    for first in range(3):
        rows = [(first + k) % 3 for k in range(3)]
        with pytest.warns(landscape.ProblemWarning, match="terms"):
            problem = landscape.Problem(model, loss, [(x[rows], y[rows]), (x[3:], y[3:])])
        assert problem.loss() == pytest.approx(float(loss(model(x), y).detach()))
