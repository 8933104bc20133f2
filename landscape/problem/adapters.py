"""Low-rank adapters: the products BA of their factors as parameters, in which an average is one of functions.

(A, B) and (−A, −B) are one function: the mean of the factors is zero, that of the products is this function.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.problem.layout import Layout, Slot
from landscape.problem.problem import Problem

#: peft's names of the factors A and B, of linear and convolutional layers, and of embeddings.
PEFT = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
# Singular values below this share of the largest are rounding of factors in float32 (our choice).
ROUNDING = 1e-6
# Losses that differ by less, relative to themselves or to 0.1, differ by rounding in float32 (our choice).
ROUNDED_LOSS = 1e-4


def pairs_of(layout: Layout, factors: Sequence[tuple[str, str]]) -> list[tuple[Slot, Slot]]:
    """The pairs of factors A (r, …) and B (m, r), whose names differ in a part: those in ``factors``.

    InputError for own names that no pair has, or of shapes that have no product.
    """
    named, slots = {slot.name: slot for slot in layout.slots}, list[tuple[Slot, Slot]]()
    for first, second in factors:
        before = len(slots)
        for slot in layout.slots:
            parts = slot.name.split(".")
            other = named.get(".".join(second if part == first else part for part in parts))
            if first not in parts or other is None:
                continue
            if min(len(slot.shape), len(other.shape)) < 2 or other.size != other.shape[0] * slot.shape[0]:
                names = f"'{slot.name}' {slot.shape} and '{other.name}' {other.shape}"
                raise InputError(f"factors: {names} have no product, they must be (r, …) and (m, r)")
            slots.append((slot, other))
        if len(slots) == before and (first, second) not in PEFT:
            words = f"no two trainable parameters' names differ in '{first}' and '{second}'"
            raise InputError(f"factors: {words}; give parts of them between dots")
    return slots


class Products:
    """A problem whose parameters are the products of factors: A has its place, and B is the identity.

    Args:
        problem: with the factors.
        pairs: of them, at least one.

    Attributes:
        problem: with the products.

    Raises:
        InputError: a factor of several products.
    """

    def __init__(self, problem: Problem, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        self._own, self._pairs, model = problem, pairs, copy.deepcopy(problem.model)
        uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
        for slot in itertools.chain(*pairs):
            if uses[id(model.get_parameter(slot.name))] > 1:
                raise InputError(f"factors: '{slot.name}' is shared by several layers; give factors=()")
        for a, b in pairs:
            one = torch.eye(b.shape[0]).view(b.shape[0], b.shape[0], *b.shape[2:])
            zero = torch.zeros(b.shape[0], *a.shape[1:])
            for slot, tensor in ((a, zero), (b, one)):
                parent, _, last = slot.name.rpartition(".")
                setattr(model.get_submodule(parent), last, nn.Parameter(tensor, requires_grad=slot is a))
        self.problem = copy.copy(problem)
        self.problem.checked = {}
        self.problem._set_model(model, problem.device, problem.dtype)
        self._places = {slot.name: slot for slot in self.problem.layout.slots}

    def __call__(self, theta: Tensor) -> Tensor:
        """(P',), the products of the factors in ``theta`` (P,), and its other numbers."""
        views = self._own.layout.views(theta)
        return self._with(views, {a.name: (views[a.name], views[b.name]) for a, b in self._pairs})

    def _with(self, views: Mapping[str, Tensor], factors: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        products = {name: double(b.flatten(1)) @ double(a.flatten(1)) for name, (a, b) in factors.items()}
        numbers = {name: products.get(name, views[name]) for name in self._places}
        shaped = {
            name: t.to(self.problem.weights).view(self._places[name].shape) for name, t in numbers.items()
        }
        return self.problem.layout.flatten(shaped)

    def check(self, theta: Tensor) -> None:
        """InputError unless the loss at ``theta`` (P,) is that of its products."""
        losses = self._own.loss(theta), self.problem.loss(self(theta))
        equal = abs(losses[0] - losses[1]) <= ROUNDED_LOSS * max(abs(losses[0]), 0.1)
        if self._own.weight_decay or not equal:
            words = f"{losses[0]:.6g} with the factors, {losses[1]:.6g} with the products"
            raise InputError(f"factors: the loss is no function of their products ({words}); give factors=()")

    def stored(
        self, theta: Tensor, rank: int | None, kinds: Mapping[str, torch.dtype]
    ) -> tuple[Tensor, int, float]:
        """The products ``theta`` (P',) as factors of a ``rank``, by default all, in the types ``kinds``.

        With them, the largest rank that they need, and the norm of what is cut, relative to that of all.
        """
        views, factors, ranks, squares = self.problem.layout.views(theta), {}, [], torch.zeros(2).double()
        for a, b in self._pairs:
            u, sizes, v = torch.linalg.svd(double(views[a.name].flatten(1)), full_matrices=False)
            ranks.append(int((sizes > ROUNDING * sizes[0]).sum()))
            kept = min(rank or ranks[-1], ranks[-1])
            squares = squares + torch.stack((sizes[kept:].square().sum(), sizes.square().sum())).cpu()
            root = sizes[:kept].sqrt()
            pair = {a.name: root[:, None] * v[:kept], b.name: u[:, :kept] * root}
            first, second = (t.to(kinds.get(name, t.dtype)) for name, t in pair.items())
            factors[a.name] = first, second
        others = rounded(self.problem, theta, {k: kind for k, kind in kinds.items() if k not in factors})
        error = float((squares[0] / squares[1].clamp_min(1e-300)).sqrt())
        return self._with(self.problem.layout.views(others), factors), max(ranks), error


def rounded(problem: Problem, theta: Tensor, kinds: Mapping[str, torch.dtype]) -> Tensor:
    """A copy of ``theta`` (P,) with the parameters named in ``kinds`` rounded to these types."""
    theta = theta.clone()
    for name, view in problem.layout.views(theta).items():
        view.copy_(view.to(kinds.get(name, view.dtype)))
    return theta
