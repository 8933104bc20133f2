"""Every instrument on a Hugging Face GPT-2 with dict batches, against plain torch: make test-integrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import landscape
from landscape import Problem
from landscape.analysis.learning_coefficient import Langevin
from landscape.gradients.minibatches import stream

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-integrations", exc_type=ImportError
)
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS, LENGTH, SAMPLES, BATCH = 5, 4, 12, 4
# GPT-2 takes its own loss of float32 logits, whatever its precision; a loss of the logits is of float64.
CLOSE = {True: 2e-4, False: 1e-7}
Batch = dict[str, Tensor]


def gpt2(seed: int = 0) -> Any:
    """Two layers, away from the small initial weights."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=3, n_layer=2, n_head=1, n_inner=2, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(labels: bool) -> Batch:
    """Padded sequences; with ``labels`` −100 stands for padding, otherwise the mask says what it is."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=g)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=g) if labels else LENGTH
    mask = (torch.arange(LENGTH) < lengths).long().expand(SAMPLES, LENGTH)
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    return batch | {"labels": ids.masked_fill(mask == 0, -100)} if labels else batch


def next_words(outputs: Any, batch: Batch) -> Tensor:
    """The user's own loss, of the logits: batches without labels."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


class Reference:
    """Loss, gradient and Hessian of samples at any weights, by one plain call of the model."""

    def __init__(self, labels: bool, model: Any) -> None:
        self.labels, self.model, self.batch = labels, model, tokens(labels)
        self.theta = nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss(self, theta: Tensor, rows: Tensor | None = None) -> Tensor:
        named, views = dict(self.model.named_parameters()), {}
        for (name, parameter), part in zip(
            named.items(), theta.split([p.numel() for p in named.values()]), strict=True
        ):
            views[name] = part.view_as(parameter)
        batch = {k: t if rows is None else t[rows] for k, t in self.batch.items()}
        outputs = torch.func.functional_call(self.model, views, (), batch)
        value: Tensor = outputs.loss if self.labels else next_words(outputs, batch)
        return value

    def gradient(self, theta: Tensor, rows: Tensor | None = None) -> Tensor:
        leaf = theta.clone().requires_grad_()
        return torch.autograd.grad(self.loss(leaf, rows), leaf)[0]

    def hessian(self, theta: Tensor, rows: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            found = torch.autograd.functional.hessian(lambda t: self.loss(t, rows), theta, vectorize=True)
        assert isinstance(found, Tensor)
        return found

    def product(self, theta: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.functional.hvp(lambda t: self.loss(t, rows), theta, v)[1]


@pytest.fixture(scope="module", params=[True, False], ids=["labels", "no labels"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param, gpt2())


@pytest.fixture(scope="module")
def hessian(reference: Reference) -> Tensor:
    return reference.hessian(reference.theta)


@pytest.fixture
def problem(reference: Reference) -> Problem:
    return Problem(reference.model, None if reference.labels else next_words, reference.batch)


def near(reference: Reference) -> dict[str, float]:
    return {"rel": CLOSE[reference.labels], "abs": 1e-9}


def learners(reference: Reference, n: int = 3) -> Tensor:
    """(n, P), around the weights of the model, which are their mean."""
    noise = torch.randn(n, len(reference.theta), dtype=torch.float64, generator=stream(7, 0))
    return reference.theta + 0.03 * (noise - noise.mean(0))


def test_gradients_of_drawn_batches(problem: Problem, reference: Reference) -> None:
    """Batch sharpness, noise scale and LLC have the same minibatches, drawn in the order of the seed."""
    weights, n, draws = learners(reference), 3, 2
    options = {"weights": weights, "local_batch": BATCH, "draws": draws, "max_draws": draws, "seed": 5}
    sharp = landscape.batch_sharpness(problem, BATCH, with_lambda_max=False, **options)
    scale = landscape.noise_scale(problem, BATCH, **options)
    whole, mean, own = reference.gradient(reference.theta), stream(5, 0), stream(5, 1)
    traces = []
    for k in range(draws):
        rows = torch.randint(SAMPLES, (BATCH,), generator=mean)
        g = reference.gradient(reference.theta, rows)
        bent = reference.product(reference.theta, g, rows)
        assert sharp.curvature[k] == pytest.approx(float(g @ bent / (g @ g)), **near(reference))
        traces.append(BATCH * float((g - whole).square().sum()))
        for j, rows in enumerate(torch.randint(SAMPLES, (n, BATCH), generator=own)):
            g = reference.gradient(weights[j], rows)
            bent = reference.product(weights[j], g, rows)
            assert sharp.learner_curvature[k, j] == pytest.approx(
                float(g @ bent / (g @ g)), **near(reference)
            )
    assert scale.trace == pytest.approx(np.mean(traces), **near(reference))
    assert scale.value == pytest.approx(np.mean(traces) / float(whole @ whole), **near(reference))
    chains = Langevin(problem, BATCH, 2, step_size=1e-3, nbeta=3.0, localization=2.0, seed=5).run(3)
    minibatches, noise = stream(5, 0), torch.Generator()
    noise.manual_seed(int(torch.randint(2**62, (), generator=stream(5, 1))))
    w = reference.theta.repeat(2, 1)
    for t in range(3):
        drawn = torch.randint(SAMPLES, (2, BATCH), generator=minibatches)
        pairs = list(zip(w, drawn, strict=True))
        rise = [3 * float(reference.loss(v, r) - reference.loss(reference.theta, r)) for v, r in pairs]
        np.testing.assert_allclose(chains[0, :, t], rise, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(chains[2, :, t], (w - reference.theta).square().sum(1), rtol=1e-4)
        g = torch.stack([reference.gradient(v, r) for v, r in pairs])
        w = w - 5e-4 * (3 * g + 2 * (w - reference.theta))
        w += 1e-3**0.5 * torch.empty_like(w).normal_(generator=noise)


def test_the_whole_hessian(problem: Problem, reference: Reference, hessian: Tensor) -> None:
    """Noise alignment, the learners' spread and the preconditioned eigenvalue from the dense matrix."""
    theta, weights, exact = reference.theta, learners(reference), {"search": "exact"}
    found = landscape.noise_alignment(problem, BATCH, 1, max_draws=2, seed=5, **exact)
    generator = stream(5, 0)
    rows = [torch.randint(SAMPLES, (BATCH,), generator=generator) for _ in range(2)]
    g = torch.stack([reference.gradient(theta, r) for r in rows])
    ratio = float(torch.einsum("ni,ij,nj->", g, hessian, g) / g.square().sum())
    assert found.value == pytest.approx(ratio, **near(reference))
    p = torch.linspace(0.5, 2.0, len(theta), dtype=torch.float64)
    given = landscape.Preconditioner(p, "test", 2.0)
    top = landscape.top_eigenvalues(problem, 1, precondition=given, tol=1e-5)
    scaled = hessian / (p[:, None] * p).sqrt()
    assert float(top.values[0]) == pytest.approx(float(torch.linalg.eigvalsh(scaled)[-1]), rel=1e-3)
    spread = weights - theta
    values, vectors = torch.linalg.eigh(hessian)
    result = landscape.disagreement(weights, 2, problem=problem, tol=1e-5, **exact)
    np.testing.assert_allclose(result.values, values.flip(0)[:2], rtol=1e-3)
    share = (spread @ vectors[:, -2:]).square().sum() / spread.square().sum()
    assert result.value == pytest.approx(float(share), rel=5e-3)
    cost = float(torch.einsum("ni,ij,nj->", spread, hessian, spread)) / 6
    assert result.cost == pytest.approx(cost, rel=1e-3, abs=1e-7)
    assert result.learners_loss == pytest.approx(np.mean([float(reference.loss(w)) for w in weights]))


def test_rises_of_the_loss(problem: Problem, reference: Reference) -> None:
    """The largest rise that plain ascent finds from the same start, and the mean one of drawn displacements."""
    theta, rho, steps = reference.theta, 0.02, 20
    size, base = theta.abs(), float(reference.loss(theta))
    worst = landscape.sharpness(problem, rho, starts=0)
    away, rises = torch.zeros_like(theta), [0.0]
    for k in range(steps):
        uphill = size * reference.gradient(theta + size * away)
        away = away + 0.5**k * rho * uphill / uphill.norm()
        away *= rho / away.norm()
        rises.append(float(reference.loss(theta + size * away)) - base)
    assert worst.value == pytest.approx(max(rises), rel=0.02)
    average = landscape.sharpness(problem, rho, "average", m=BATCH, max_draws=2, seed=5)
    minibatches, noise, rises = stream(5, 0), stream(5, 1), []
    for _ in range(2):
        rows = torch.randint(SAMPLES, (BATCH,), generator=minibatches)
        shift = rho * size * torch.randn(len(theta), dtype=torch.float64, generator=noise)
        pair = [float(reference.loss(theta + sign * shift, rows)) for sign in (1, -1)]
        rises.append(np.mean(pair) - float(reference.loss(theta, rows)))
    np.testing.assert_allclose(average.values, rises, rtol=1e-6, atol=1e-6)
