"""Low-rank adapters: the products BA of their factors as parameters, which averages need.

(A, B) and (−A, −B) give one function. The mean of these factors is zero; the mean of their products is the
product itself, and gives that function.
"""

from __future__ import annotations

import copy
import itertools
import math
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
# A smaller difference of two losses, relative to them or to 0.1, is rounding in float32 (our choice).
ROUNDED_LOSS = 1e-4


def pairs_of(layout: Layout, factors: Sequence[tuple[str, str]]) -> list[tuple[Slot, Slot]]:
    """Return the pairs of factors A (r, …) and B (m, r) among the parameters.

    Args:
        layout: the parameters.
        factors: pairs of components of parameters' names, such as ("lora_A", "lora_B"): dots divide a name
            into components. The name of B has the second component where the name of A has the first.

    Raises:
        InputError: no parameters have the given components (only those of :data:`PEFT` may be missing), or
            two factors have no product.
    """
    slots, pairs = {slot.name: slot for slot in layout.slots}, list[tuple[Slot, Slot]]()
    for component_a, component_b in factors:
        previous_count = len(pairs)
        slots_of_a = [slot for slot in layout.slots if component_a in slot.name.split(".")]
        for a in slots_of_a:
            components_of_b = [component_b if c == component_a else c for c in a.name.split(".")]
            b = slots.get(".".join(components_of_b))
            if b is None:
                continue
            # B must have m · r numbers, as (m, r) or, in a convolution, as (m, r, 1, …).
            if min(len(a.shape), len(b.shape)) < 2 or b.size != b.shape[0] * a.shape[0]:
                names = f"'{a.name}' {a.shape} and '{b.name}' {b.shape}"
                raise InputError(f"factors: {names} have no product, they must be (r, …) and (m, r)")
            pairs.append((a, b))
        if len(pairs) == previous_count and (component_a, component_b) not in PEFT:
            words = f"no names of trainable parameters differ only by '{component_a}' and '{component_b}'"
            raise InputError(f"factors: {words}; give components of names (between dots)")
    return pairs


class Products:
    """A problem with the products BA of low-rank factors as parameters, in place of the factors.

    The product replaces the parameter A, and the parameter B is a fixed identity matrix.

    Args:
        problem: the problem with the factors.
        pairs: the pairs (A, B) of factors, at least one.

    Attributes:
        problem: the problem with the products.

    Raises:
        InputError: several layers share a factor.
    """

    def __init__(self, problem: Problem, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        self._factored, self._pairs, model = problem, pairs, copy.deepcopy(problem.model)
        uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
        for slot in itertools.chain(*pairs):
            if uses[id(model.get_parameter(slot.name))] > 1:
                raise InputError(f"factors: '{slot.name}' is shared by several layers; give factors=()")
        for a, b in pairs:
            identity = torch.eye(b.shape[0]).view(b.shape[0], b.shape[0], *b.shape[2:])
            product = torch.zeros(b.shape[0], *a.shape[1:])
            for slot, tensor in ((a, product), (b, identity)):
                parent, _, name = slot.name.rpartition(".")
                setattr(model.get_submodule(parent), name, nn.Parameter(tensor, requires_grad=slot is a))
        self.problem = copy.copy(problem)
        self.problem.checked = {}
        self.problem._set_model(model, problem.device, problem.dtype)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return (P',), the products of the factors in ``theta`` (P,) and the other numbers of ``theta``."""
        views = self._factored.layout.views(theta)
        return self._vector(views, {a.name: (views[a.name], views[b.name]) for a, b in self._pairs})

    def _vector(self, views: Mapping[str, Tensor], factors: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Return θ (P',) with the products of ``factors``, and with all other parameters from ``views``.

        ``factors`` are the pairs (A, B), by the name of A.
        """
        numbers = dict(views)
        for name, (a, b) in factors.items():
            numbers[name] = double(b.flatten(1)) @ double(a.flatten(1))
        layout = self.problem.layout
        return torch.cat([numbers[slot.name].to(self.problem.weights).flatten() for slot in layout.slots])

    def check(self, theta: Tensor) -> None:
        """Raise InputError unless the loss at ``theta`` (P,) equals the loss at its products."""
        loss, loss_of_products = self._factored.loss(theta), self.problem.loss(self(theta))
        is_equal = abs(loss - loss_of_products) <= ROUNDED_LOSS * max(abs(loss), 0.1)
        if self._factored.weight_decay or not is_equal:
            words = f"{loss:.6g} with the factors, {loss_of_products:.6g} with the products"
            raise InputError(f"factors: the loss is no function of their products ({words}); give factors=()")

    def truncate(
        self, theta: Tensor, rank: int | None, dtypes: Mapping[str, torch.dtype]
    ) -> tuple[Tensor, int, float]:
        """Factor each matrix BA by a truncated SVD, round A and B as a file does, and multiply them again.

        Args:
            theta: (P',), the matrices BA and the other parameters.
            rank: the largest rank of the factors; None: the rank of each matrix.
            dtypes: the dtypes in which a file stores factors and other parameters, by name.

        Returns:
            ``theta`` with the new matrices BA (P',); the largest rank of a matrix before the truncation; and
            the norm of what the truncation cuts off, relative to the norm of all matrices.
        """
        views = self.problem.layout.views(theta)
        factors, ranks = dict[str, tuple[Tensor, Tensor]](), list[int]()
        squared_error = squared_norm = 0.0  # of what the truncation cuts off, and of all matrices
        for a, b in self._pairs:
            # In ``theta``, the parameter with the name of A is the whole matrix BA (m, …).
            u, singular_values, vh = torch.linalg.svd(double(views[a.name].flatten(1)), full_matrices=False)
            own_rank = int((singular_values > ROUNDING * singular_values[0]).sum())
            ranks.append(own_rank)
            kept_rank = own_rank if rank is None else min(rank, own_rank)
            squared_error += float(singular_values[kept_rank:].square().sum())
            squared_norm += float(singular_values.square().sum())
            root = singular_values[:kept_rank].sqrt()
            factor_a, factor_b = root[:, None] * vh[:kept_rank], u[:, :kept_rank] * root
            factor_a = factor_a.to(dtypes.get(a.name, factor_a.dtype))
            factor_b = factor_b.to(dtypes.get(b.name, factor_b.dtype))
            factors[a.name] = factor_a, factor_b
        other_views = self.problem.layout.views(rounded(self.problem, theta, dtypes))
        error = math.sqrt(squared_error / max(squared_norm, 1e-300))
        return self._vector(other_views, factors), max(ranks), error


def rounded(problem: Problem, theta: Tensor, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Return a copy of ``theta`` (P,) with the parameters in ``dtypes`` rounded to these types."""
    theta = theta.clone()
    for name, view in problem.layout.views(theta).items():
        view.copy_(view.to(dtypes.get(name, view.dtype)))
    return theta
