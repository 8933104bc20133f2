"""Models and data of any structure: every analysis against a plain call of the model on one big batch."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import landscape
from landscape import InputError, Problem
from landscape.problem.batches import take, tree_map
from tests import problems
from tests.conftest import slow_but


class Pair(NamedTuple):
    a: Any
    b: Any


leaves = st.integers(0, 5).map(lambda n: torch.arange(float(n)))
trees = st.recursive(
    leaves | st.none() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(trees)
def test_tree_map_keeps_the_structure_and_maps_every_tensor(tree: Any) -> None:
    assert same(tree_map(lambda t: t, tree), tree)
    there = tree_map(lambda t: t + 1, tree)
    assert same(tree_map(lambda t: t - 1, there), tree)


def batches_of(problem: Problem, sizes: tuple[int, ...]) -> list[Any]:
    """The problem's data in batches of ``sizes``, in the form that its user would give."""
    assert problem.resident is not None
    x, y = problem.resident
    found, i = [], 0
    for size in sizes:
        part = take((x, y), slice(i, i + size))
        found.append(part[0] if isinstance(x, dict) else part)
        i += size
    return found


def again(problem: Problem, data: Any, **options: Any) -> Problem:
    """The same model and loss on other data."""
    own = problem.criterion is landscape.problem.losses.output_loss
    return Problem(problem.model, None if own else problem.criterion, data, dtype=torch.float64, **options)


@pytest.mark.parametrize("name", [*problems.ALL, *problems.STRUCTURED])
def test_loss_and_gradient_match_one_big_batch(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    problem.data.chunk_size = 4  # ragged, and with unequal numbers of terms
    assert problem.resident is not None
    x, y = problem.resident
    theta = problem.weights + 0.1 * torch.randn_like(problem.weights)
    whole = float(problem.criterion(problem.outputs(theta, x), y))
    expected = problems.textbook_gradient(problem, theta)
    first = problem.samples // 2 + 3
    ragged = again(problem, batches_of(problem, (first, problem.samples - first)))
    for p in (problem, ragged):
        assert p.loss(theta) == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(p.gradient(theta), expected)
        assert sum(count for _, _, count in p.chunks()) == pytest.approx(problem.samples)


@pytest.mark.parametrize(
    "name", slow_but(problems.STRUCTURED.keys() - {"masked language model"}, problems.STRUCTURED)
)
def test_hessian_spectrum_and_grid_match_the_dense_matrix(name: str) -> None:
    problem = problems.STRUCTURED[name]()
    problem.data.chunk_size = 4
    dense = problems.textbook_hessian(problem)
    v = torch.randn_like(problem.weights)
    ragged = again(problem, batches_of(problem, (problem.samples - 2, 2)))
    for p in (problem, ragged):
        torch.testing.assert_close(landscape.HessianOperator(p)(v), dense @ v)
        # With no memory for graphs every product builds them again.
        torch.testing.assert_close(landscape.HessianOperator(p, graph_bytes=0)(v), dense @ v)
    values = torch.linalg.eigvalsh(dense)
    grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(1, 1), residual_tol=1e-6)
    assert grid.lambda_max[0, 0] == pytest.approx(float(values[-1]), rel=1e-6)
    assert grid.lambda_min[0, 0] == pytest.approx(float(values[0]), rel=1e-6)
    top = landscape.spectrum(problem, 2, residual_tol=1e-6, quantities=["trace"], products=3 * len(values))
    np.testing.assert_allclose(top.values, values.flip(0)[:2], rtol=1e-6)
    assert top.trace == pytest.approx(float(values.sum()), rel=1e-8)


@pytest.mark.parametrize("name", problems.STRUCTURED)
def test_contour_and_line_match_the_textbook_loop(name: str) -> None:
    problem = problems.STRUCTURED[name]()
    problem.data.chunk_size = 4
    plane = landscape.random_plane(problem, seed=1)
    s = landscape.contour(problem, plane, grid=(3, 2), span=0.4)
    expected = problems.textbook_surface(problem, plane.directions, s.x.tolist(), s.y.tolist())
    np.testing.assert_allclose(s.loss, expected, rtol=1e-12)
    line = landscape.line(problem, plane.directions[0], 3, span=0.4)
    expected = problems.textbook_surface(problem, plane.directions, line.t.tolist(), [0.0])
    np.testing.assert_allclose(line.loss, expected[0], rtol=1e-12)
    ragged = again(problem, batches_of(problem, (problem.samples - 2, 2)))
    np.testing.assert_allclose(landscape.contour(ragged, plane, grid=(3, 2), span=0.4).loss, s.loss)


@pytest.mark.parametrize("causal", [True, False])
def test_a_language_models_ragged_batches_weigh_by_the_tokens_that_count(causal: bool) -> None:
    problem = problems.language_model(causal)
    data = problems.tokens()
    counted = data["labels"][:, 1:] if causal else data["labels"]
    kept = (counted != -100).sum(1).double()
    whole = problem.loss()
    # The mean of the batches' means, weighted by samples, is another number.
    parts = [again(problem, take(data, part)).loss() for part in (slice(0, 8), slice(8, 11))]
    assert (8 * parts[0] + 3 * parts[1]) / 11 != pytest.approx(whole, rel=1e-4)
    right = (parts[0] * kept[:8].sum() + parts[1] * kept[8:].sum()) / kept.sum()
    assert whole == pytest.approx(float(right), rel=1e-12)
    # Batches padded to their own length, from a DataLoader.
    short = data["labels"][:, 4:].eq(-100).all(1)
    groups = [take(data, short), take(data, ~short)]
    cut = [{k: v[:, :4] for k, v in groups[0].items()}, groups[1]]
    loader = DataLoader(cut, batch_size=None)
    assert again(problem, loader).loss() == pytest.approx(whole, rel=1e-12)
    assert again(problem, [UserDict(batch) for batch in cut]).loss() == pytest.approx(whole, rel=1e-12)
    assert np.isnan(problem.accuracy())


def test_a_batch_in_which_nothing_counts_is_left_out() -> None:
    problem = problems.language_model()
    data = problems.tokens()
    nothing = {**take(data, slice(3)), "labels": torch.full((3, 6), -100)}
    with_it = again(problem, [nothing, data])
    assert with_it.loss() == pytest.approx(problem.loss(), rel=1e-12)
    with pytest.raises(InputError, match="left out of the loss"):
        again(problem, nothing)


class Classifier(problems.LanguageModel):
    """One label a sequence."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        logits = super().forward(input_ids, attention_mask).logits.mean(1)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return problems.Output(logits, loss)


def test_a_classifier_with_its_own_loss_has_accuracy_from_its_logits() -> None:
    torch.manual_seed(0)
    model = Classifier(causal=False)
    data = {**problems.tokens(), "labels": torch.randint(7, (11,))}
    own = Problem(model, None, data, dtype=torch.float64)
    given = Problem(  # the labels are not passed to a model whose loss is another's
        model, lambda out, labels: F.cross_entropy(out.logits, labels), data, dtype=torch.float64
    )
    assert own.loss() == pytest.approx(given.loss(), rel=1e-12)
    logits = own.outputs(own.weights, {k: v for k, v in data.items() if k != "labels"}).logits
    expected = float((logits.argmax(1) == data["labels"]).double().mean())
    assert own.accuracy() == given.accuracy() == pytest.approx(expected)


def test_terms_can_be_given_and_class_weights_are_counted() -> None:
    problem = problems.masked_classes()
    assert problem.tensors is None  # the batched path averages over samples
    assert problem.resident is not None
    x, y = problem.resident
    weight = problem.criterion.weight  # type: ignore[attr-defined]

    def terms(targets: Tensor) -> Tensor:
        return (targets >= 0) * weight[targets.clamp(min=0)]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=weight)

    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    told = Problem(problem.model, loss, batches, dtype=torch.float64, terms=terms)
    assert told.loss() == pytest.approx(problem.loss(), rel=1e-12)
    with pytest.warns(landscape.ProblemWarning, match="weights of the classes"):
        inferred = Problem(problem.model, loss, batches, dtype=torch.float64)
    assert inferred.loss() == pytest.approx(problem.loss(), rel=1e-9)
    assert np.isnan(problem.accuracy())
    with pytest.raises(InputError, match=r"terms: shape \(\), it must give one number a sample, \(20,\)"):
        Problem(problem.model, loss, batches, dtype=torch.float64, terms=lambda targets: targets.sum())


def test_a_uniform_mask_keeps_the_fast_path() -> None:
    plain = problems.mlp()
    assert plain.tensors is not None
    assert landscape.contour(plain, landscape.random_plane(plain), grid=(2, 2)).method == "batched"
    masked = problems.masked_classes()
    assert landscape.contour(masked, landscape.random_plane(masked), grid=(2, 2)).method != "batched"


def test_batchnorm_policies_take_structures() -> None:
    class Named(problems.SmallConv):
        def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(image)

    plain = problems.conv()
    assert plain.tensors is not None
    x, y = plain.tensors
    model = Named()
    model.load_state_dict(plain.model.state_dict())
    named = Problem(model, F.cross_entropy, ({"image": x}, y), dtype=torch.float64)
    listed = Problem(model, F.cross_entropy, [({"image": x}, y)], dtype=torch.float64)
    for bn in ("center", "recalibrate", "train"):
        expected = plain.with_batchnorm(bn, 20)
        for problem in (named, listed):
            got = problem.with_batchnorm(bn, 20)
            assert got.loss() == pytest.approx(expected.loss(), rel=1e-12)
            plane = landscape.random_plane(problem, seed=2)
            a = landscape.contour(problem, plane, grid=(2, 2), bn=bn, bn_samples=20)
            b = landscape.contour(plain, plane, grid=(2, 2), bn=bn, bn_samples=20)
            np.testing.assert_allclose(a.loss, b.loss, rtol=1e-10)
    s = landscape.contour(named, landscape.random_plane(named), grid=(2, 2), method="folded")
    t = landscape.contour(plain, landscape.random_plane(plain), grid=(2, 2), method="folded")
    np.testing.assert_allclose(s.loss, t.loss, rtol=1e-12)


def test_an_optional_input_is_not_traced_as_given() -> None:
    class Optional(problems.SmallConv):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if scale is None else x * scale)

    plain = problems.conv()
    assert plain.tensors is not None
    model = Optional()
    model.load_state_dict(plain.model.state_dict())
    problem = Problem(model, F.cross_entropy, plain.tensors, dtype=torch.float64)
    s = landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2))
    assert s.method == "pointwise"
    t = landscape.contour(plain, landscape.random_plane(plain), grid=(2, 2))
    np.testing.assert_allclose(s.loss, t.loss, rtol=1e-12)


class Noisy(nn.Module):
    """Random in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.dropout(self.a(x).tanh(), 0.4, training=True))
        return out


def test_noise_of_a_random_model_gives_all_learners_the_same_numbers() -> None:
    torch.manual_seed(0)
    data = torch.randn(30, 4), torch.randint(3, (30,))
    problem = Problem(Noisy(), F.cross_entropy, data, dtype=torch.float64, randomness="seed")
    problem.data.chunk_size = 12
    weights = problem.weights + 1e-5 * torch.randn(4, problem.layout.size, dtype=torch.float64)
    state = torch.get_rng_state()
    seeded = landscape.noise(problem, weights, 1.0, 8, draws=3)
    assert torch.equal(torch.get_rng_state(), state)
    # Learners this near differ by first order alone, if nothing but their weights differs.
    np.testing.assert_allclose(seeded.direct, seeded.first_order, rtol=1e-3)
    spread = weights - weights.mean(0)
    h = landscape.HessianOperator(problem, weights.mean(0))
    # n⁻¹ Σ ∇L(w_j) − ∇L(w_a) is of second order in the spread, as full as without dropout.
    assert seeded.full_batch < 1e-6 * seeded.direct.min()
    expected = sum(float(h(d).square().sum()) for d in spread) / 16
    assert seeded.eq4 == pytest.approx(expected, rel=1e-9)
    again = landscape.noise(problem, weights, 1.0, 8, draws=3)
    np.testing.assert_array_equal(again.direct, seeded.direct)
    for unknown in ("ignore", "0", 0, -1, True, 1.5):
        with pytest.raises(InputError, match="randomness"):
            Problem(Noisy(), F.cross_entropy, data, randomness=unknown)


def test_a_list_of_inputs_comes_apart_and_numbers_pass_through() -> None:
    problem = problems.structured()
    assert problem.resident is not None
    x, y = problem.resident
    as_list = again(problem, [(list(x), y)])  # what a DataLoader makes of a tuple
    assert as_list.loss() == problem.loss()
    assert y["unit"] == 2.0
    assert problem.subset(torch.tensor([1, 1, 3])).samples == 3
    assert problem.resident[0][1][0].dtype == torch.float64  # placed however deep
    assert np.isnan(problem.accuracy())


def test_the_users_model_and_data_are_left_as_they_are() -> None:
    model, data = problems.LanguageModel(causal=True).train(), problems.tokens()
    before, seen = copy.deepcopy(model.state_dict()), copy.deepcopy(data)
    problem = Problem(model, None, data)
    landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2))
    landscape.extreme_eigenvalues(problem, residual_tol=0.3)
    assert model.training
    assert model.head.weight is model.embedding.weight
    assert not model.position.requires_grad
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert same(data, seen)


ONE, Y = nn.Linear(2, 2), torch.tensor([0, 1, 1, 0])
ONES = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "loss", "data", "words"),
    [
        (
            ONE,
            F.cross_entropy,
            (torch.ones(4, 2), {"a": Y, "b": (Y, Y[:3])}),
            r"targets\['b'\]\[1\]: 3 samples",
        ),
        (
            ONE,
            F.cross_entropy,
            ({"x": torch.ones(4, 2), "k": torch.tensor(1.0)}, Y),
            r"inputs\['k'\]: no samples",
        ),
        (
            ONE,
            F.cross_entropy,
            [[torch.ones(4, 2), torch.ones(4, 2), Y]],
            "a batch is a list of 3, it must be",
        ),
        (ONE, F.cross_entropy, torch.ones(4, 2), "a batch is a Tensor, it must be"),
        (ONE, F.cross_entropy, [(torch.ones(2), Y[0])], "a single number as targets"),
        (ONE, F.cross_entropy, ("a", "b"), "holds no tensor"),
        (ONE, F.cross_entropy, 3, "a int is no iterable"),
        (ONE, F.cross_entropy, [], "no samples"),
        (ONE, None, {"input": torch.ones(4, 2)}, "this Tensor has no .loss that is one number"),
        (problems.LanguageModel(True), None, {"input_ids": ONES}, "has no .loss"),
        (ONE, F.cross_entropy, (torch.randn(4, 3), Y), r"do not fit: RuntimeError: .*inputs \(4, 3\)"),
        (ONE, lambda o, y: (o - y[:, None]).sum(1), (torch.ones(4, 2), Y), r"loss: it gives shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_one_line(model: nn.Module, loss: Any, data: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Problem(model, loss, data)
    assert "\n" not in str(caught.value)
