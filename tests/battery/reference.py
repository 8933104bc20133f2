"""Dense float64 references, written without the package: the user's own module, plain autograd, one big batch.

Weights are copied into the module's own parameters in place, so that whatever reaches them (hooks, lists,
lambdas, a loss that closes over the model) sees them as it would in the user's own script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Step of the central differences that stand in for a second derivative that PyTorch lacks or has wrong: the
# error is about STEP² times a fifth derivative, and rounding, 1e-16 / STEP (ours).
STEP = 1e-5


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {k: mapped(function, v) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(function, v) for v in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(mapped(function, v) for v in tree)
    return tree


def joined(trees: list[Any]) -> Any:
    """Trees of the same structure as one, their tensors one after the other along the samples."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(trees)
    if isinstance(first, Mapping):
        return {k: joined([t[k] for t in trees]) for k in first}
    if isinstance(first, (tuple, list)):
        return type(first)(joined(list(parts)) for parts in zip(*trees, strict=True))
    return first


def one_batch(data: Any) -> tuple[Any, Any]:
    """(inputs, targets) of all of ``data``: a pair, or an iterable of pairs."""
    if isinstance(data, tuple):
        x, y = data
        return x, y
    x, y = joined([tuple(batch) for batch in data])
    return x, y


def _double(tree: Any) -> Any:
    return mapped(lambda t: t.double() if t.is_floating_point() else t, tree)


class Reference:
    """L(θ) = loss(model_θ(x), y) + penalty(θ) in float64 and eval mode, θ the trainable parameters in order.

    The model is the caller's own, and is changed. ``loss`` None: the model's output carries it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        x: Any,
        y: Any,
        penalty: Callable[[dict[str, Tensor]], Tensor] | None = None,
    ) -> None:
        self.model = model.double().eval()
        self.loss_of = loss.double() if isinstance(loss, nn.Module) else loss
        self.x, self.y = _double(x), _double(y)
        self.penalty = penalty
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.center = torch.cat([p.detach().flatten() for p in self.parameters])

    @property
    def size(self) -> int:
        return len(self.center)

    def load(self, theta: Tensor) -> None:
        """Put θ (P,) into the module."""
        offset = 0
        for p in self.parameters:
            p.data.copy_(theta[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def outputs(self, x: Any = None) -> Any:
        # A model may write to its input.
        x = mapped(torch.clone, self.x if x is None else x)
        if isinstance(x, Mapping):
            return self.model(**x)
        return self.model(*x) if isinstance(x, (tuple, list)) else self.model(x)

    def _value(self, x: Any = None, y: Any = None) -> Tensor:
        outputs = self.outputs(x)
        if self.loss_of is None:
            value: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
        else:
            value = self.loss_of(outputs, self.y if y is None else y)
        return value if self.penalty is None else value + self.penalty(self.named)

    @torch.no_grad()
    def loss(self, theta: Tensor) -> float:
        self.load(theta)
        return float(self._value())

    @torch.no_grad()
    def accuracy(self, theta: Tensor) -> float | None:
        """Share of samples (B,) whose largest output of (B, C > 1) is the target; None for any other task."""
        self.load(theta)
        z, y = self.outputs(), self.y
        whole = isinstance(z, Tensor) and isinstance(y, Tensor) and not y.is_floating_point()
        if not whole or z.dim() != 2 or z.shape[1] < 2 or y.shape != z.shape[:1]:
            return None
        if y.dtype == torch.bool or not 0 <= int(y.min()) <= int(y.max()) < z.shape[1]:
            return None
        return float((z.argmax(1) == y).double().mean())

    def gradient(self, theta: Tensor, x: Any = None, y: Any = None) -> Tensor:
        """∇L (P,), over all data or over the minibatch (x, y)."""
        self.load(theta)
        value = self._value(x, y)
        if not value.requires_grad:
            return torch.zeros_like(self.center)
        parts = torch.autograd.grad(value, self.parameters, materialize_grads=True)
        return torch.cat([p.to_dense().flatten() for p in parts])

    def hessian(self, theta: Tensor, *, differences: bool = False) -> Tensor:
        """∇²L (P, P): a row of autograd after the other, or central differences of gradients, symmetrized."""
        if differences:
            eye = STEP * torch.eye(self.size, dtype=torch.float64)
            h = torch.stack([self.gradient(theta + e) - self.gradient(theta - e) for e in eye]) / (2 * STEP)
            return (h + h.T) / 2
        self.load(theta)
        with sdpa_kernel(SDPBackend.MATH):
            value = self._value()
            parts = torch.autograd.grad(value, self.parameters, create_graph=True, materialize_grads=True)
            return self._rows(torch.cat([p.flatten() for p in parts]))

    def _rows(self, components: Tensor) -> Tensor:
        """The Jacobian (n, P) of ``components`` (n,): all rows at once where torch.vmap knows the way."""
        if not components.requires_grad:
            return torch.zeros(len(components), self.size, dtype=torch.float64)
        eye = torch.eye(len(components), dtype=torch.float64)
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        try:
            parts = torch.autograd.grad(components, self.parameters, eye, is_grads_batched=True, **options)
        except (RuntimeError, UserWarning):  # one after the other
            rows = [torch.autograd.grad(components, self.parameters, e, **options) for e in eye]
            parts = tuple(
                None if column[0] is None else torch.stack([p.to_dense() for p in column])
                for column in zip(*rows, strict=True)
            )
        columns = [
            components.new_zeros(len(eye), q.numel()) if p is None else p.reshape(len(eye), q.numel())
            for p, q in zip(parts, self.parameters, strict=True)
        ]
        return torch.cat(columns, 1)

    def gauss_newton(self, theta: Tensor) -> Tensor | None:
        """JᵀH_L J (P, P), J the Jacobian of the outputs, H_L the loss's Hessian in them; None for outputs that
        are no single tensor."""
        assert self.loss_of is not None
        self.load(theta)
        loss, y = self.loss_of, self.y
        with sdpa_kernel(SDPBackend.MATH):
            z = self.outputs()
            if not isinstance(z, Tensor):
                return None
            j = self._rows(z.flatten())
            h = torch.autograd.functional.hessian(lambda at: loss(at, y), z.detach())
        assert isinstance(h, Tensor)
        return j.T @ h.reshape(len(j), len(j)) @ j

    def surface(
        self, theta: Tensor, directions: Tensor, x: Iterable[float], y: Iterable[float]
    ) -> list[list[float]]:
        """Losses at θ + x[j]·directions[0] + y[i]·directions[1], by one forward pass a point."""
        u, v = directions.double()
        columns = list(x)
        return [[self.loss(theta + a * u + b * v) for a in columns] for b in y]


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of ``tree``."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors(value)
