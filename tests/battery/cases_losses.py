"""Losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import Case, Parts, chain, classes, module, net


def _loss(
    name: str,
    loss: Callable[[], Any],
    targets: Callable[[], Tensor],
    outputs: int = 3,
    samples: int = 23,
    **expected: Any,
) -> Case:
    """A chain of 4 features to ``outputs``, and ``loss`` with ``targets``."""
    return Case(
        name, lambda: (chain(4, 5, outputs), loss(), (torch.randn(samples, 4), targets())), **expected
    )


def ints(count: int = 3, *shape: int, low: int = 0) -> Callable[[], Tensor]:
    return lambda: torch.randint(low, count, shape or (23,))


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def bits(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(2, shape).float()


def ignored() -> Tensor:
    y = torch.randint(3, (23,))
    y[::3] = -100
    return y


def distribution() -> Tensor:
    return torch.rand(23, 3).softmax(1)


WEIGHTS = (1.0, 5.0, 0.2)


def l2_closure() -> Parts:
    """The commonest way to write weight decay: the loss closes over the model's parameters."""
    model = chain()

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())

    return model, loss, classes()


def closure_over_detached() -> Parts:
    """A constant of the model's weights: no gradient flows, but the value depends on θ."""
    model = chain()
    return model, lambda o, y: F.cross_entropy(o, y) * model[0].weight.detach().norm(), classes()


def closure_without_harm() -> Parts:
    """A loss that asks the model for its number of outputs only."""
    model = chain()
    return model, lambda o, y: F.mse_loss(o, F.one_hot(y, model[2].out_features).to(o)), classes()


def penalized() -> Parts:
    return chain(), F.cross_entropy, classes()


def _only_weights(named: dict[str, Tensor]) -> Tensor:
    total: Tensor = 0.03 * sum(
        p.abs().sum() + p.pow(4).sum() for n, p in named.items() if n.endswith("weight")
    )
    return total


def with_temperature() -> Parts:
    """A loss with a trainable parameter of its own, which is not in θ."""
    temperature = nn.Parameter(torch.tensor(0.5))
    return chain(), net(lambda m, o, y: F.cross_entropy(o / m.t, y), t=temperature), classes()


def with_buffer() -> Parts:
    scale = torch.rand(3) + 0.5
    model = chain()
    return model, net(lambda m, o, y: F.mse_loss(o * m.scale, F.one_hot(y, 3).to(o)), scale=scale), classes()


def ctc() -> Parts:
    """Outputs (T, N, C), as CTC wants them, made from inputs (N, T, F)."""

    @module(a=nn.Linear(3, 4))
    def model(m: Any, x: Tensor) -> Tensor:
        return m.a(x).log_softmax(-1).transpose(0, 1)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        n = o.shape[1]
        return F.ctc_loss(o, y, torch.full((n,), 6), torch.full((n,), 2), reduction="none").mean() / 2

    return model, loss, (torch.randn(7, 6, 3), torch.randint(1, 4, (7, 2)))


def sums_in_batches() -> Parts:
    x, y = classes()
    return chain(), functools.partial(F.cross_entropy, reduction="sum"), [(x[:12], y[:12]), (x[12:], y[12:])]


def _ignoring_batches(loss: Callable[[], Any]) -> Callable[[], Parts]:
    """Batches whose numbers of targets that count differ much."""

    def build() -> Parts:
        x, y = classes()
        y[:10] = -1
        return chain(), loss(), [(x[:12], y[:12]), (x[12:], y[12:])]

    return build


def weighted_batches() -> Parts:
    x, y = classes()
    y = y.sort().values
    return chain(), nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS)), [(x[:12], y[:12]), (x[12:], y[12:])]


def one_logit_accuracy(o: Tensor, y: Tensor) -> float:
    return float(((o > 0) == (y > 0.5)).double().mean())


def view_minus_one(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o.view(-1), y)


def _functional(function: Callable[..., Tensor], **options: Any) -> Callable[[], Any]:
    return lambda: functools.partial(function, **options)


CASES = [
    _loss("CrossEntropyLoss", nn.CrossEntropyLoss, ints()),
    _loss("cross-entropy with ignore_index", lambda: F.cross_entropy, ignored),
    _loss("CrossEntropyLoss with ignore_index −1", lambda: nn.CrossEntropyLoss(ignore_index=-1), ints(3, 23, low=-1)),
    _loss("class weights", lambda: nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS)), ints()),
    _loss("class weights in a partial", _functional(F.cross_entropy, weight=torch.tensor(WEIGHTS).double()), ints()),
    _loss("class weights in a lambda", lambda: lambda o, y: F.cross_entropy(o, y, weight=torch.tensor(WEIGHTS).to(o)), ints(), said="weights of the classes"),
    _loss("class weights in a lambda, with terms", lambda: lambda o, y: F.cross_entropy(o, y, weight=torch.tensor(WEIGHTS).to(o)), ints(), options={"terms": lambda y: torch.tensor(WEIGHTS)[y]}),
    _loss("one logit (N, 1), integer labels (N,)", lambda: lambda o, y: F.binary_cross_entropy_with_logits(o.squeeze(1), y.to(o)), ints(2), 1, accuracy=lambda o, y: one_logit_accuracy(o.squeeze(1), y)),
    _loss("label smoothing", lambda: nn.CrossEntropyLoss(label_smoothing=0.1), ints()),
    _loss("probabilities as targets", lambda: F.cross_entropy, distribution),
    _loss("MSE", lambda: F.mse_loss, reals(23, 3)),
    _loss("MSE by half", lambda: lambda o, y: 0.5 * (o - y).square().sum(1).mean(), reals(23, 3)),
    _loss("Huber", lambda: nn.HuberLoss(delta=0.5), reals(23, 3)),
    _loss("BCE with logits (N, 1)", lambda: F.binary_cross_entropy_with_logits, bits(23, 1), 1, accuracy=one_logit_accuracy),
    _loss("BCE with logits, o.view(-1)", lambda: lambda o, y: F.binary_cross_entropy_with_logits(o.view(-1), y), bits(23), 1),
    _loss("BCE with pos_weight", lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 3.0, 0.5])), bits(23, 3)),
    _loss("multi-margin", nn.MultiMarginLoss, ints(), refused_hessian="second derivative"),
    _loss("Poisson of counts", nn.PoissonNLLLoss, ints(6, 23, 3)),
    _loss("MSE of integer counts", lambda: lambda o, y: F.mse_loss(o, y.to(o)), ints(40, 23, 3)),
    _loss("counts beyond the classes", lambda: lambda o, y: F.mse_loss(o.view(-1), y.to(o)), ints(40), 1),
    _loss("bool targets", lambda: lambda o, y: F.binary_cross_entropy_with_logits(o.squeeze(1), y.to(o)), lambda: torch.rand(23) > 0.5, 1),
    _loss("uint8 targets", lambda: lambda o, y: F.cross_entropy(o, y.long()), lambda: torch.randint(3, (23,)).to(torch.uint8)),
    _loss("NLL", lambda: lambda o, y: F.nll_loss(o.log_softmax(1), y), ints()),
    Case("NLLLoss", lambda: (nn.Sequential(*chain(), nn.LogSoftmax(dim=1)), nn.NLLLoss(), classes())),
    _loss("loss in float32", lambda: lambda o, y: F.cross_entropy(o.float(), y), ints(), inside=torch.float32),
    _loss("functools.partial with ignore_index", _functional(F.cross_entropy, ignore_index=-1), ints(3, 23, low=-1)),
    _loss("o.view(-1)", lambda: view_minus_one, reals(23), 1),
    _loss("o.view(-1) of (N, 3)", lambda: view_minus_one, reals(69), refused="samples|length"),
    _loss("reduction sum, one batch", _functional(F.cross_entropy, reduction="sum"), ints(), refused="mean|sum"),
    Case("reduction sum, batches", sums_in_batches, refused="mean|sum"),
    _loss("reduction none", lambda: nn.CrossEntropyLoss(reduction="none"), ints(), refused="one number"),
    _loss("labels beyond the classes", lambda: F.cross_entropy, ints(5), refused="labels|classes"),
    Case("ignore_index in batches", _ignoring_batches(lambda: nn.CrossEntropyLoss(ignore_index=-1))),
    Case("ignore_index in a lambda, batches", _ignoring_batches(lambda: lambda o, y: F.cross_entropy(o, y, ignore_index=-1)), said="terms=lambda y: y != -1"),
    Case("class weights, batches", weighted_batches),
    Case("loss closes over the parameters", l2_closure, refused="penalty|weight_decay"),
    Case("loss closes over a detached weight", closure_over_detached, refused="penalty"),
    Case("loss closes over the model, not its weights", closure_without_harm),
    Case("penalty of some weights", penalized, options={"penalty": _only_weights}),
    Case("loss with a trainable parameter", with_temperature, refused="loss|parameter"),
    Case("loss with a buffer", with_buffer),
    Case("CTC", ctc, refused_hessian="second derivative"),
]  # fmt: skip
