"""Models and data of any structure, flat θ and Problem: against a plain call of the model on one big batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import landscape
from landscape import InputError, Problem
from landscape.problem.batches import take, tree_map
from landscape.problem.layout import Layout, gradients
from tests import problems
from tests.battery.case import net as network


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(1, 4))
def test_views_and_flatten_are_inverse(widths: list[int], rows: int) -> None:
    layout = Layout.of(landscape.models.build("mlp", widths=widths))
    theta = torch.randn(rows, layout.size)
    assert torch.equal(layout.flatten(layout.views(theta), lead=1), theta)
    assert [s.offset for s in layout.slots] == np.cumsum([0, *(s.size for s in layout.slots)])[:-1].tolist()


def test_layout_is_the_order_of_parameters_to_vector() -> None:
    model = problems.SmallConv()
    layout = Layout.of(model)
    flat = nn.utils.parameters_to_vector(model.parameters())
    for name, view in layout.views(flat).items():
        assert torch.equal(view, dict(model.named_parameters())[name])
    roles = {f"{layer}.{role}": role for layer in ("conv", "head") for role in ("weight", "bias")}
    expected = roles | {"norm.weight": "norm", "norm.bias": "norm"}
    assert {s.name: s.role for s in layout.slots} == expected


def test_gradients_have_no_graph_and_are_zero_where_nothing_depends() -> None:
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    for keep in (True, False):
        found = gradients((a**2).sum(), [a, b], keep=keep)
        assert not any(part.requires_grad for part in found)
        torch.testing.assert_close(found, [2 * a.detach(), torch.zeros(3)])


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


@settings(max_examples=25)
@given(trees)
def test_tree_map_keeps_the_structure_and_maps_every_tensor(tree: Any) -> None:
    assert same(tree_map(lambda t: t, tree), tree)
    there = tree_map(lambda t: t + 1, tree)
    assert same(tree_map(lambda t: t - 1, there), tree)


def again(problem: Problem, data: Any, **options: Any) -> Problem:
    """The same model and loss on other data."""
    own = problem.criterion is landscape.problem.losses.output_loss
    return Problem(problem.model, None if own else problem.criterion, data, dtype=torch.float64, **options)


@pytest.mark.parametrize("name", problems.STRUCTURED)
def test_a_structure_has_the_numbers_of_one_big_batch(name: str) -> None:
    problem = problems.STRUCTURED[name]()
    problem.data.chunk_size = 4  # ragged, and with unequal numbers of terms
    x, y = problem.resident or ()
    parts = [take((x, y), part) for part in (slice(0, 8), slice(8, None))]
    batches = again(problem, [part[0] if isinstance(x, dict) else part for part in parts])
    theta = problem.weights + 0.1 * torch.randn_like(problem.weights)
    gradient, dense = problems.textbook_gradient(problem, theta), problems.textbook_hessian(problem)
    v, plane = torch.randn_like(problem.weights), landscape.random_plane(problem, seed=1)
    surface = problems.textbook_surface(problem, plane.directions, [-0.4, 0.0, 0.4], [-0.4, 0.4])
    for p in (problem, batches):
        torch.testing.assert_close(p.gradient(theta), gradient)
        assert sum(count for _, _, count in p.chunks()) == pytest.approx(problem.samples)
        for graph_bytes in (0, 2**30):  # with none every product builds the graphs again
            torch.testing.assert_close(landscape.HessianOperator(p, graph_bytes=graph_bytes)(v), dense @ v)
        found = landscape.contour(p, plane, grid=(3, 2), span=0.4)
        np.testing.assert_allclose(found.loss, surface, rtol=1e-12)


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
    x, y = problem.resident or ()
    weight = problem.criterion.weight  # type: ignore[attr-defined]
    terms = lambda targets: (targets >= 0) * weight[targets.clamp(min=0)]  # noqa: E731
    loss = lambda outputs, targets: F.cross_entropy(outputs, targets, weight=weight)  # noqa: E731
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    told = Problem(problem.model, loss, batches, dtype=torch.float64, terms=terms)
    assert told.loss() == pytest.approx(problem.loss(), rel=1e-12)
    assert landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2)).method != "batched"
    with pytest.raises(InputError, match=r"terms: shape \(\), it must give one number per sample, \(20,\)"):
        Problem(problem.model, loss, batches, dtype=torch.float64, terms=lambda targets: targets.sum())


def noisy() -> nn.Module:
    """Random in eval mode."""
    torch.manual_seed(0)
    forward = lambda m, x: m.b(F.dropout(m.a(x).tanh(), 0.4, training=True))  # noqa: E731
    return network(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3))


def test_noise_of_a_random_model_gives_all_learners_the_same_numbers() -> None:
    model = noisy()
    data = torch.randn(30, 4), torch.randint(3, (30,))
    problem = Problem(model, F.cross_entropy, data, dtype=torch.float64, randomness="seed")
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
            Problem(noisy(), F.cross_entropy, data, randomness=unknown)


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


X, LABELS = torch.randn(64, 8), torch.randint(3, (64,))


def test_weight_decay_is_the_penalty_of_all_squares() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    squares = lambda parameters: 1e-2 * sum(p.pow(2).sum() for p in parameters.values())  # noqa: E731
    decayed, penalized = (
        Problem(model, F.cross_entropy, (X, LABELS), dtype=torch.float64, **options)
        for options in ({"weight_decay": 2e-2}, {"penalty": squares})
    )
    assert decayed.loss() == pytest.approx(penalized.loss(), rel=1e-12)
    torch.testing.assert_close(decayed.gradient(), penalized.gradient())
    plane = landscape.random_plane(decayed)
    for method in ("batched", "pointwise"):
        a, b = (landscape.contour(p, plane, grid=(2, 2), method=method) for p in (decayed, penalized))
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-12)


def test_the_error_of_a_lower_precision_is_measured_at_more_than_two_points() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    problem = Problem(model, F.cross_entropy, (X, LABELS))
    plane = landscape.random_plane(problem)
    low, own = (
        landscape.contour(problem, plane, grid=(4, 4), span=2.0, autocast=p) for p in ("bfloat16", None)
    )
    assert (low.autocast, own.autocast, own.autocast_error) == ("bfloat16", "", 0.0)
    assert 0 < low.autocast_error == pytest.approx(float(np.abs(low.loss - own.loss).max()), rel=1e-4)
    with pytest.raises(InputError, match="'tf32' is not allowed here, it needs a float32 model on a CUDA"):
        landscape.contour(problem, plane, (3, 3), autocast="tf32")


ONE, Y = nn.Linear(2, 2), torch.tensor([0, 1, 1, 0])
ONES = torch.ones(2, 3, dtype=torch.long)
FOUR = torch.ones(4, 2)
NAN = torch.tensor([1.0, 2, 3, float("nan"), 5, 6])


@pytest.mark.parametrize(
    ("model", "loss", "data", "options", "words"),
    [
        (ONE, F.cross_entropy, (FOUR, {"a": Y, "b": (Y, Y[:3])}), {}, r"targets\['b'\]\[1\]: 3 samples"),
        (ONE, F.cross_entropy, ({"x": FOUR, "k": torch.tensor(1.0)}, Y), {}, r"inputs\['k'\]: no samples"),
        (ONE, F.cross_entropy, [[FOUR, FOUR, Y]], {}, "a batch is a list of 3, it must be"),
        (ONE, F.cross_entropy, FOUR, {}, r"one tensor is not allowed, .*\(x, x\)"),
        (ONE, F.cross_entropy, [(torch.ones(2), Y[0])], {}, "a single number as targets"),
        (ONE, F.cross_entropy, ("a", "b"), {}, "holds no tensor"),
        (ONE, F.cross_entropy, 3, {}, "a int cannot be read"),
        (ONE, F.cross_entropy, [], {}, "no samples"),
        (ONE, None, {"input": FOUR}, {}, "missing, and this Tensor has no .loss of one number"),
        (problems.LanguageModel(True), None, {"input_ids": ONES}, {}, "has no .loss of one number"),
        (ONE, F.cross_entropy, (torch.randn(4, 3), Y), {}, r"do not fit: RuntimeError: .*inputs \(4, 3\)"),
        (ONE, F.cross_entropy, (FOUR, Y), {"weights": NAN}, "1 of 6 are NaN"),
        (ONE, F.cross_entropy, (FOUR, Y), {"weights": torch.zeros(3)}, r"\(3,\), it must be \(6,\)"),
        (ONE, F.cross_entropy, (FOUR, Y), {"check": "some"}, "check: 'some'"),
    ],
)
def test_wrong_arguments(model: nn.Module, loss: Any, data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Problem(model, loss, data, **options)
    assert "\n" not in str(caught.value)


def test_how_much_is_checked_can_be_chosen() -> None:
    assert Problem(ONE, F.cross_entropy, (FOUR, Y), check="full").check == "full"
    Problem(ONE, nn.CrossEntropyLoss(reduction="sum"), (FOUR, Y), check="off")


def test_a_module_that_is_used_twice_keeps_its_parameters() -> None:
    """torch.func.functional_call leaves its replacement in such a module (PyTorch 2.13), if it ties weights."""
    torch.manual_seed(0)
    layer, head = nn.Linear(4, 4), nn.Linear(4, 2)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), head).double()
    own = {place: place.weight for place in (layer, head)}
    problem = Problem(model, nn.CrossEntropyLoss(), (torch.randn(30, 4).double(), torch.arange(30) % 2))
    v = torch.randn_like(problem.weights)
    problem.loss(problem.weights + v)
    assert all(place.weight is weight for place, weight in own.items())
    exact = landscape.extreme_eigenvalues(problem, derivatives="exact")
    differences = landscape.extreme_eigenvalues(problem, derivatives="differences")
    assert differences.max == pytest.approx(exact.max, rel=1e-5)


def test_a_default_device_is_refused() -> None:
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    made = Problem(nn.Linear(3, 2), F.cross_entropy, (x, y))
    with torch.device("meta"):
        for call in (lambda: Problem(nn.Linear(3, 2, device="cpu"), F.cross_entropy, (x, y)), made.gradient):
            with pytest.raises(InputError, match=r"torch.set_default_device: 'meta' is not allowed"):
                call()


# What eval() keeps, merges or caches.


class Direct(nn.Module):
    """A linear layer whose matrix is 2v + BA, computed in each pass; subclasses have another way to it in eval mode."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.v, self.b = nn.Parameter(torch.randn(5, 4) / 2), nn.Parameter(torch.randn(5))
        self.left, self.right = nn.Parameter(torch.randn(5, 2) / 2), nn.Parameter(torch.randn(2, 4) / 2)
        self.drop = nn.Dropout(0.5)
        self.cache: dict[str, Tensor] = {}

    def matrix(self) -> Tensor:
        return 2 * self.v + self.left @ self.right

    def used(self) -> Tensor:
        """The matrix of eval mode."""
        return self.matrix()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) @ (self.matrix() if self.training else self.used()).T + self.b


class Kept(Direct):
    """It computes its matrix in eval()."""

    detach = True

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # and returns nothing, as loralib's
        self.kept = None if mode else self.matrix().detach() if self.detach else self.matrix()

    def used(self) -> Tensor:
        return self.kept


class WithGraph(Kept):
    detach = False


class Expanded(Direct):
    """It has a buffer in eval mode only."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self._buffers.pop("buffer", None)
        if not mode:
            self.register_buffer("buffer", self.matrix().detach())

    def used(self) -> Tensor:
        return self.get_buffer("buffer")


class Merged(Direct):
    """LoRA: eval() adds BA to a part, here a trainable one, and train() subtracts it."""

    merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.v.data += (-0.5 if mode else 0.5) * (self.left @ self.right).data
            self.merged = not mode

    def used(self) -> Tensor:
        return 2 * self.v if self.merged else self.matrix()


class Lazy(Direct):
    """Its first pass in eval mode computes the matrix."""

    def used(self) -> Tensor:
        self.kept = self.matrix().detach() if self.kept is None else self.kept
        return self.kept


class LazyDict(Direct):
    def used(self) -> Tensor:
        return self.cache.setdefault("matrix", self.matrix())


class Property(Direct):
    @functools.cached_property
    def fixed(self) -> Tensor:
        return self.matrix().detach()

    def used(self) -> Tensor:
        return self.fixed


class Global(Direct):
    @functools.lru_cache  # noqa: B019
    def used(self) -> Tensor:
        return self.matrix().detach()


class NoGradient(Direct):
    def used(self) -> Tensor:
        return self.matrix().detach()


class InPart(Direct):
    """A number that depends on the matrix is computed once, as by flows with their determinant."""

    def train(self, mode: bool = True) -> Any:
        self.kept = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.kept is None:
            self.kept = self.matrix().square().sum()
        return super().forward(x) + (self.kept if self.training else self.kept.detach())


class Truth(Direct):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.matrix().square().sum()


class Fixed(Lazy):
    """In any mode, so that training mode is no help."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.used().T + self.b


class Unrecorded(Lazy):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.matrix() if torch.is_grad_enabled() else self.used()).T + self.b


class Noisy(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class FrozenStatistics(nn.Sequential):
    """A train() of its own that keeps nothing."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()


def layered(kind: type[nn.Module], seed: int, zero: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    layer = kind()
    if zero:  # as LoRA begins
        nn.init.zeros_(layer.left)  # type: ignore[arg-type]
    parts = [layer, nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*parts) if seed % 2 else nn.Sequential(nn.Sequential(*parts), nn.Identity())


def used(model: nn.Module, how: str) -> nn.Module:
    """``model``, after a pass in eval mode, in eval mode, or in training mode."""
    model.train(how == "training")
    if how == "used":
        with torch.no_grad():
            model(X[:, :4].to(next(model.parameters())))
    return model


KEPT: list[type[nn.Module]] = [
    Kept, WithGraph, Expanded, Merged, Lazy, LazyDict, Property, Global, InPart, NoGradient,
]  # fmt: skip


@pytest.mark.parametrize("how", ["training", "eval", "used"])
@pytest.mark.parametrize("kind", KEPT)
def test_what_eval_mode_keeps_follows_the_weights(kind: type[nn.Module], how: str) -> None:
    seed = KEPT.index(kind) + len(how)
    dtype, zero = (torch.float32, torch.float64)[seed % 2], seed % 3 == 0
    direct = layered(Truth if kind is InPart else Direct, seed, zero)
    model = used(layered(kind, seed, zero), how)
    before = [t.clone() for t in model.state_dict().values()], [m.training for m in model.modules()]
    data = X[:, :4], LABELS
    truth = Problem(direct, F.cross_entropy, data, dtype=dtype)
    problem = Problem(model, F.cross_entropy, data, dtype=dtype)
    torch.testing.assert_close(problem.weights, truth.weights)
    theta = truth.weights + 0.3 * torch.randn_like(truth.weights)
    assert problem.loss(theta) == pytest.approx(truth.loss(theta), rel=1e-5)
    torch.testing.assert_close(problem.gradient(theta), truth.gradient(theta), rtol=1e-4, atol=1e-5)
    v = torch.randn_like(theta)
    products = [landscape.HessianOperator(p, theta)(v) for p in (problem, truth)]
    torch.testing.assert_close(*products, rtol=1e-3, atol=1e-4)
    lines = [landscape.line(p, v, points=3, span=0.5).loss for p in (problem, truth)]
    np.testing.assert_allclose(*lines, rtol=1e-5)
    after = [*model.state_dict().values()], [m.training for m in model.modules()]
    assert after[1] == before[1]
    assert all(torch.equal(a, b) for a, b in zip(after[0], before[0], strict=True))


@pytest.mark.parametrize("how", ["training", "eval", "used"])
@pytest.mark.parametrize("kind", [Fixed, Unrecorded, Noisy])
def test_what_no_mode_makes_right_is_refused(kind: type[nn.Module], how: str) -> None:
    with pytest.raises(InputError, match=r"^model: .*compute.* in each forward pass$"):
        Problem(used(layered(kind, 1), how), F.cross_entropy, (X[:, :4], LABELS))


class ByKey(nn.Module):
    """It keeps what it computes from its parameter, until the ``key`` of that is another one.

    With ``recorded`` it does so only where no gradients are recorded; ``detached``: without its graph.
    """

    def __init__(self, key: Callable[[Tensor], Any], recorded: bool, detached: bool) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
        self.key, self.recorded, self.detached = key, recorded, detached
        self.last: Any = None
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.recorded and torch.is_grad_enabled():
            return x @ self.v.T
        if self.kept is None or self.last != self.key(self.v):
            self.last, self.kept = self.key(self.v), self.v.detach().clone() if self.detached else self.v * 1
        return x @ self.kept.T


KEYS: dict[str, Callable[[Tensor], Any]] = {"identity": id, "place": Tensor.data_ptr, "hash": hash}
KEYS |= {"version": lambda v: v._version, "identity and version": lambda v: (id(v), v._version)}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("recorded", "detached"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("passes", [0, 1])
def test_what_is_kept_by_a_key_is_refused(key: str, recorded: bool, detached: bool, passes: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ByKey(KEYS[key], recorded, detached), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    for _ in range(passes):
        model.eval()(x)
    with pytest.raises(InputError, match="does not follow all of its parameters"):
        Problem(model, nn.CrossEntropyLoss(), (x, y))


@pytest.mark.parametrize("cached", [False, True])
def test_what_a_function_of_a_module_keeps_is_refused(cached: bool) -> None:
    """Its copies share that, so that none of them tells the truth."""

    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, first = nn.Parameter(torch.randn(6, 4)), dict[str, Tensor]()

            def matrix(_: int) -> Tensor:
                return first.setdefault("matrix", self.v.detach().clone())

            self.matrix = functools.cache(lambda _: self.v.detach().clone()) if cached else matrix

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.v if self.training else self.matrix(0)).T

    torch.manual_seed(0)
    model = nn.Sequential(Closure(), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(InputError, match="does not follow all of its parameters"):
        Problem(model, nn.CrossEntropyLoss(), (torch.randn(24, 4), torch.randint(3, (24,))))


def test_a_train_of_its_own_that_keeps_nothing_stays_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = FrozenStatistics(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    plain = nn.Sequential(*model)
    numbers = [Problem(m, F.cross_entropy, (X, LABELS)).gradient() for m in (model, plain)]
    torch.testing.assert_close(*numbers)


def test_cached_parametrizations_are_refused() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    problem = Problem(model, F.cross_entropy, (X, LABELS))
    with nn.utils.parametrize.cached(), pytest.raises(InputError, match="parametrize.cached"):
        problem.loss()


class Penalized(nn.Linear):
    """Its own loss, with the square of its gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        loss = F.cross_entropy(super().forward(x).tanh(), labels)
        (slope,) = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return {"loss": loss + slope.square().sum()}


class TrainingScale(nn.Linear):
    """A layer with a parameter that only training uses."""

    def __init__(self) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale if self.training else x)


def test_a_parameter_of_training_alone_has_no_slope() -> None:
    torch.manual_seed(0)
    model, x, y = TrainingScale().eval(), torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    problem = Problem(model, F.cross_entropy, (x, y))
    parameters = [model.scale, model.weight, model.bias]
    loss = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(loss, parameters, materialize_grads=True)
    views = problem.layout.views(problem.gradient())
    for name, slope in zip(("scale", "weight", "bias"), slopes, strict=True):
        torch.testing.assert_close(views[name], slope)


@pytest.mark.filterwarnings("ignore:loss. it mixes samples")
def test_a_model_differentiates_in_its_own_parameters() -> None:
    """Steps inside the forward pass, as MAML's, are in tests/ordinary."""
    torch.manual_seed(0)
    model, x = Penalized(8, 3, bias=False).double(), X.double()
    problem = Problem(model, None, {"x": x, "labels": LABELS})

    def loss(theta: Tensor) -> Tensor:
        inner = F.cross_entropy((x @ theta.view(3, 8).T).tanh(), LABELS)
        (slope,) = torch.autograd.grad(inner, theta, create_graph=True)
        return inner + slope.square().sum()

    theta = (problem.weights + 0.1 * torch.randn(24, dtype=torch.float64)).requires_grad_()
    value = loss(theta)
    assert problem.loss(theta.detach()) == pytest.approx(value.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(value, theta)
    torch.testing.assert_close(problem.gradient(theta.detach()), gradient)
    dense, v = torch.autograd.functional.hessian(loss, theta.detach()), torch.randn_like(gradient)
    torch.testing.assert_close(landscape.HessianOperator(problem, theta.detach())(v), dense @ v)


@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_of_any_precision_are_converted(model_dtype: torch.dtype, given_dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).to(model_dtype)
    problem = Problem(model, F.cross_entropy, (X, LABELS), weight_decay=0.1)
    theta = torch.randn(problem.layout.size).to(given_dtype)
    again = problem.with_batchnorm("recalibrate")
    functions = problem.accuracy, problem.evaluate, problem.gradient, problem.penalty_value, problem.totals
    for function in (problem.loss, again.loss, *functions):
        torch.testing.assert_close(function(theta), function(theta.to(model_dtype)), rtol=0, atol=0)


def test_a_pass_that_writes_to_its_parameters_is_refused_in_either_mode() -> None:
    parts = {"words": nn.Embedding(9, 4, max_norm=0.5), "w": nn.Parameter(X[:4, :3])}
    model = network(lambda m, x: m.words(x).mean(1) @ m.w, **parts)
    with pytest.raises(InputError, match="max_norm"):
        Problem(model, F.cross_entropy, (torch.randint(9, (20, 3)), torch.randint(3, (20,))))


class PartlyDetached(nn.Module):
    """In eval mode a share of its parameter is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.v if self.training else 0.9 * self.v + 0.1 * self.v.detach()).T


def test_a_gradient_of_which_eval_mode_detaches_a_part_is_that_of_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(PartlyDetached(), nn.Tanh(), nn.Linear(6, 3)).double()
    problem = Problem(model, F.cross_entropy, (X[:, :4].double(), LABELS))
    step = 1e-6 * torch.randn_like(problem.weights)
    ends = [problem.loss(problem.weights + sign * step) for sign in (1, -1)]
    assert ends[0] - ends[1] == pytest.approx(2 * float(problem.gradient() @ step), rel=1e-5)


def test_a_language_model_in_batches_of_one_weighs_by_the_tokens_that_count() -> None:
    problem = problems.language_model(True)
    batches: list[dict[str, Tensor]] = []
    for size in (5, 6, 4, 3):
        labels = torch.randint(4, (1, size), generator=torch.Generator().manual_seed(size))
        labels[:, 2 : 2 + size // 3] = -100
        ids = labels.clamp(min=0)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    losses = [again(problem, [b]).loss() for b in batches]
    truth = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    with warnings.catch_warnings(action="error"):
        assert again(problem, batches).loss() == pytest.approx(truth, rel=1e-5)
