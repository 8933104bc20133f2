"""The small named problems that tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import landscape
from landscape import Problem
from landscape.data.base import mean_output


def quadratic(eigenvalues: list[float], *, rotate: bool = True, start: float = 1.0) -> Problem:
    """½wᵀHw in float64 with exactly these eigenvalues, all coordinates of w at ``start``."""
    model = landscape.models.build("quadratic", eigenvalues=eigenvalues, rotate=rotate, start=start)
    data = landscape.data.load("quadratic", dimension=len(eigenvalues), samples=10)
    return Problem(model, mean_output, data.train, dtype=torch.float64)


def mlp(
    *, widths: tuple[int, ...] = (6, 7, 5, 3), activation: str = "tanh", samples: int = 53, seed: int = 0
) -> Problem:
    """A small chain on random data, float64."""
    torch.manual_seed(seed)
    model = landscape.models.build("mlp", widths=list(widths), activation=activation)
    x = torch.randn(samples, widths[0], dtype=torch.float64)
    y = torch.randint(widths[-1], (samples,))
    return Problem(model, nn.functional.cross_entropy, (x, y), dtype=torch.float64)


class SmallConv(nn.Module):
    """Convolution, BatchNorm and a linear layer: not a chain, and it has buffers and norm parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).tanh().mean((2, 3)))
        return out


def conv(samples: int = 20) -> Problem:
    """:class:`SmallConv` on random images, float64, with statistics that are not the initial ones."""
    torch.manual_seed(0)
    model = SmallConv()
    model(torch.randn(8, 1, 6, 6))
    data = torch.randn(samples, 1, 6, 6, dtype=torch.float64), torch.randint(2, (samples,))
    return Problem(model, nn.functional.cross_entropy, data, dtype=torch.float64)


class Linearized(nn.Module):
    """Outputs linear in θ, with squared loss: its Hessian is constant; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w * self.frozen)


def linear_regression() -> Problem:
    """Least squares with an unused and a frozen parameter, float64: P = 5, Hessian 2XᵀX/N and zeros."""
    torch.manual_seed(3)
    x = torch.randn(40, 3, dtype=torch.float64)
    return Problem(Linearized(), nn.functional.mse_loss, (x, x.sum(1)), dtype=torch.float64)


def around(problem: Problem, n: int, scale: float = 0.1, seed: int = 0) -> Tensor:
    """(n, P), weights around the problem's own."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, problem.layout.size, dtype=torch.float64, generator=generator)
    return problem.weights + (scale * noise).to(problem.weights)


def at(problem: Problem, theta: Tensor) -> Problem:
    """The same model, loss and data at θ."""
    return Problem(problem.model, problem.criterion, problem.resident or (), weights=theta)


ALL: dict[str, Callable[[], Problem]] = {
    "positive definite": lambda: quadratic([0.1, 0.3, 1.0]),
    "saddle": lambda: quadratic([-0.98, 0.2, 1.0]),
    "mostly negative": lambda: quadratic([-3.0, -1.0, 0.5, 2.0]),
    "mlp tanh": mlp,
    "mlp relu": lambda: mlp(activation="relu"),
    "conv": conv,
    "linear regression": linear_regression,
}


@dataclass
class Output:
    """What a Hugging Face model returns: logits, and the loss if it was given labels."""

    logits: Tensor
    loss: Tensor | None = None


class LanguageModel(nn.Module):
    """A stand-in for Hugging Face's: one attention layer, keyword inputs, labels of −100 left out of the loss.

    ``causal`` predicts labels[:, 1:] from what is before, as GPT-2 does; otherwise each label in its place, as
    BERT does. The head is tied to the embedding; the positions are frozen; one layer is never used.
    """

    def __init__(self, causal: bool, *, as_dict: bool = False) -> None:
        super().__init__()
        self.causal, self.as_dict = causal, as_dict
        self.embedding = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.mix = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        h = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        q, k, v = self.mix(h).chunk(3, -1)
        keep = None if attention_mask is None else attention_mask[:, None, :].bool()
        if self.causal:
            keep = torch.ones(1, *2 * input_ids.shape[1:], dtype=torch.bool).tril()
        h = self.norm(h + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep))
        logits, loss = self.head(h), None
        if labels is not None:
            said, wanted = (logits[:, :-1], labels[:, 1:]) if self.causal else (logits, labels)
            loss = nn.functional.cross_entropy(said.flatten(0, 1), wanted.flatten())
        return {"loss": loss, "logits": logits} if self.as_dict else Output(logits, loss)


def tokens(samples: int = 11) -> dict[str, Tensor]:
    """Padded sequences of unequal length, as a tokenizer and collator make them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(7, (samples, 6), generator=generator)
    lengths = torch.randint(2, 7, (samples, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def language_model(causal: bool = True) -> Problem:
    """A model with its own loss on padded sequences, float64."""
    torch.manual_seed(2)
    return Problem(LanguageModel(causal, as_dict=not causal), None, tokens(), dtype=torch.float64)


class TwoHeads(nn.Module):
    """Two inputs, one of them a list of tensors, and two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleDict({"kind": nn.Linear(4, 3), "size": nn.Linear(4, 1)})

    def forward(self, image: Tensor, extra: list[Tensor]) -> dict[str, Tensor]:
        h = self.body(torch.cat((image, *extra), 1)).tanh()
        return {name: head(h) for name, head in self.heads.items()}


def two_tasks(outputs: dict[str, Tensor], targets: dict[str, Any]) -> Tensor:
    """Cross-entropy of one head and squared error of the other, in the targets' own unit."""
    size = (outputs["size"].squeeze(1) - targets["size"]) / targets["unit"]
    return nn.functional.cross_entropy(outputs["kind"], targets["kind"]) + size.square().mean()


def structured(samples: int = 11) -> Problem:
    """A tuple of inputs, a dict of targets with a number among them, and a loss of both, float64."""
    torch.manual_seed(4)
    x = (torch.randn(samples, 2), [torch.randn(samples, 2), torch.randn(samples, 1)])
    y = {"kind": torch.randint(3, (samples,)), "size": torch.randn(samples), "unit": 2.0}
    return Problem(TwoHeads(), two_tasks, (x, y), dtype=torch.float64)


def masked_classes() -> Problem:
    """Class-weighted cross-entropy with some targets left out, on a chain, float64."""
    torch.manual_seed(6)
    y = torch.randint(3, (23,)).masked_fill(torch.rand(23) < 0.4, -100)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64))
    model = landscape.models.build("mlp", widths=[4, 5, 3], activation="tanh")
    return Problem(model, loss, (torch.randn(23, 4), y), dtype=torch.float64)


# Problems of which some part is more than one tensor, or whose samples weigh unequally.
STRUCTURED: dict[str, Callable[[], Problem]] = {
    "causal language model": language_model,
    "masked language model": lambda: language_model(causal=False),
    "structured": structured,
    "masked classes": masked_classes,
}


def assert_identity(history: Mapping[str, Any], rtol: float = 1e-9) -> None:
    """α_e²‖g‖² + Δ = ‖d‖² at every step that is decomposed, and there are some."""
    due = np.isfinite(history["displacement2"])
    assert due.any()
    row = {name: history[name][due] for name in ("alpha_e", "grad_norm2", "delta", "displacement2")}
    total = row["alpha_e"] ** 2 * row["grad_norm2"] + row["delta"]
    np.testing.assert_allclose(total, row["displacement2"], rtol=rtol)


def forward(model: nn.Module, x: Any) -> Any:
    """A plain call of ``model``."""
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def textbook_gradient(problem: Problem, theta: Tensor) -> Tensor:
    """∇L over all data as one batch, by plain autograd on one flat leaf."""
    assert problem.resident is not None
    leaf = theta.clone().requires_grad_()
    x, y = problem.resident
    loss = problem.criterion(problem.outputs(leaf, x), y)
    return torch.autograd.grad(loss, leaf)[0]


def textbook_hessian(problem: Problem) -> Tensor:
    """∇²L (P, P) over all data as one batch, by torch.autograd.functional."""
    assert problem.resident is not None
    x, y = problem.resident

    def loss(theta: Tensor) -> Tensor:
        return problem.criterion(problem.outputs(theta, x), y)

    with sdpa_kernel(SDPBackend.MATH):
        h = torch.autograd.functional.hessian(loss, problem.weights)
    assert isinstance(h, Tensor)
    return h


def textbook_surface(
    problem: Problem, directions: Tensor, x: list[float], y: list[float]
) -> list[list[float]]:
    """Loss by the usual loop: put each point's weights into a real copy of the model, one forward pass."""
    import copy

    assert problem.resident is not None
    inputs, targets = problem.resident
    model = copy.deepcopy(problem.model)
    rows = []
    for b in y:
        row = []
        for a in x:
            theta = problem.weights + a * directions[0] + b * directions[1]
            views = problem.layout.views(theta)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in views:
                        parameter.copy_(views[name])
                row.append(float(problem.criterion(forward(model, inputs), targets)))
        rows.append(row)
    return rows
