"""Hessian-vector products of chains of linear layers, at many sets of weights at once.

They are computed by formulas of the R-operator (Pearlmutter 1994): a product is one forward and one backward
pass, and most of its work is two matrix products of the first layer with the data, which all sets share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from landscape.core.devices import Captured, generator, normal
from landscape.core.errors import PathWarning, warn_caller
from landscape.curvature.double_backward import holds_but_for_rounding
from landscape.curvature.hessian import VECTORS, HessianOptions, penalty_hessians
from landscape.curvature.operators import rounding_of
from landscape.problem.layout import differentiable, gradients
from landscape.problem.losses import is_softmax_loss
from landscape.problem.problem import LinearLayer, Problem, chain, stacked_losses

# Bytes of the widest layer's outputs for a chunk of samples and all sets of weights: on 2 cores with
# 784-50-50-10 one set is fastest with 5,000 to 10,000 samples a chunk, 16 sets with 2,000.
CHUNK_BYTES = 6 * 2**20
MAX_CHUNK = 10_000


@dataclass
class _Layer:
    """A linear layer, by its parameters' names in the layout, and the element-wise functions after it.

    A layer without bias has the name None.
    """

    weight_name: str
    bias_name: str | None
    act: nn.Sequential


@dataclass
class _Chunk:
    """A chunk of samples, and intermediate values of the chain at K sets of weights.

    The lists have a tensor (K, width, samples) for each layer but the first.

    Attributes:
        x, y: the inputs of the first layer (samples, features), and the targets.
        h: the inputs of each layer.
        slopes: the first derivatives of the element-wise functions before each layer.
        curvatures: the second derivatives of these functions, times the loss's derivatives by the functions'
            outputs; None if the second derivatives are zero, and for the Gauss-Newton matrix.
        delta: the loss's derivatives by the outputs of each layer.
        z: the outputs of the last layer.
    """

    x: Tensor
    y: Tensor
    h: list[Tensor]
    slopes: list[Tensor]
    curvatures: list[Tensor | None]
    delta: list[Tensor]
    z: Tensor


class ChainHessian:
    """(v_1 … v_K) ↦ (∇²L(θ_1) v_1 … ∇²L(θ_K) v_K), averaged over all samples, for a chain of linear layers.

    The Hessian of a problem's penalty and weight decay is added, for either ``matrix``.

    Args:
        problem: one for which :meth:`saved_bytes` is not None.
        weights: (K, P); or (1, P), for any number of vectors at one θ.
        matrix: "hessian" or "gauss-newton" (see :class:`landscape.curvature.hessian.GaussNewtonChunk`).
    """

    def __init__(self, problem: Problem, weights: Tensor, *, matrix: str = "hessian") -> None:
        layers = _layers(problem)
        assert layers is not None
        assert problem.data.tensors is not None
        self.problem, self.layers = problem, layers
        self.full = matrix == "hessian"
        views = problem.layout.views(weights)
        self.weights = [views[layer.weight_name] for layer in layers]
        x, y = problem.data.tensors
        widest = max(w.shape[1] for w in self.weights)
        size = max(1, min(MAX_CHUNK, CHUNK_BYTES // (len(weights) * widest * weights.itemsize)))
        batches = zip(torch.split(x.flatten(1), size), torch.split(y, size), strict=True)
        self.chunks = [self._chunk(views, *batch) for batch in batches]
        are_classes = y.dim() == 1 and not y.is_floating_point()
        self.softmax = are_classes and is_softmax_loss(problem.criterion)
        self.penalties = penalty_hessians(problem, weights.unbind())
        self._captured = Captured()

    @staticmethod
    def saved_bytes(problem: Problem) -> int | None:
        """Return the most bytes that one set of weights needs; None for a model that is no such chain."""
        layers = _layers(problem)
        if layers is None or problem.dtype.itemsize < 4:
            return None
        shapes = {slot.name: slot.shape for slot in problem.layout.slots}
        widths = sum(shapes[layer.weight_name][0] for layer in layers)
        return 4 * widths * problem.data.samples * problem.weights.itemsize

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the sets of weights ``rows``, in this order."""
        index = torch.tensor(rows, device=self.problem.device)
        self.weights = [w[index] for w in self.weights]
        self.penalties = [self.penalties[row] for row in rows] if self.penalties else []
        for c in self.chunks:
            c.h, c.slopes = [h[index] for h in c.h], [slope[index] for slope in c.slopes]
            c.curvatures = [None if values is None else values[index] for values in c.curvatures]
            c.delta, c.z = [delta[index] for delta in c.delta], c.z[index]
        self._captured = Captured()

    @torch.no_grad()
    def _chunk(self, views: dict[str, Tensor], x: Tensor, y: Tensor) -> _Chunk:
        """Return the intermediate values of a chunk of samples, by one forward and one backward pass."""
        h: list[Tensor] = []
        firsts: list[Tensor] = []
        seconds: list[Tensor | None] = []
        first = views[self.layers[0].weight_name]
        z = (first.flatten(0, 1) @ x.T).view(len(first), -1, len(x))
        for k, layer in enumerate(self.layers):
            if k:
                z = views[layer.weight_name] @ h[-1]
            if layer.bias_name:
                z = z + views[layer.bias_name].unsqueeze(2)
            if k < len(self.layers) - 1:
                a, first, second = _derivatives(layer.act, z)
                h.append(a)
                firsts.append(first)
                seconds.append(second if self.full else None)
        delta = [self._output_gradient(z, y).detach()]
        for k in range(len(self.layers) - 1, 0, -1):
            down = views[self.layers[k].weight_name].mT @ delta[0]
            second = seconds[k - 1]
            seconds[k - 1] = None if second is None else second * down
            delta.insert(0, firsts[k - 1] * down)
        return _Chunk(x, y, h, firsts, seconds, delta[1:], z.detach())

    def _output_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        """Return ∂L/∂z, (K, classes, samples), differentiable by ``z``."""
        with torch.enable_grad():
            z = z if z.requires_grad else z.requires_grad_()
            losses = stacked_losses(self.problem.criterion, z, y.expand(len(z), *y.shape))
            share = y.shape[0] / self.problem.data.samples
            return torch.autograd.grad(differentiable(losses).sum() * share, z, create_graph=True)[0]

    def _output_hvp(self, c: _Chunk, rz: Tensor) -> Tensor:
        """Return ∂²L/∂z² · rz, (K, classes, samples)."""
        if self.softmax:
            p = c.z.softmax(1)
            moved = p * rz
            return (moved - p * moved.sum(1, keepdim=True)) / self.problem.data.samples
        z = c.z.expand_as(rz).clone().requires_grad_()
        gradient = self._output_gradient(z, c.y)
        if not gradient.requires_grad:  # the loss is linear in the outputs
            return torch.zeros_like(rz)
        return gradients(gradient, [z], rz)[0]

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return the products with ``vectors``, (K, P) -> (K, P)."""
        return self._captured(self._products, vectors)

    @torch.no_grad()
    def _products(self, vectors: Tensor) -> Tensor:
        """Return the products with ``vectors``, (K, P) -> (K, P), by Pearlmutter's method (1994).

        Each vector is multiplied at its own θ; if there is only one θ, all vectors are multiplied there.
        """
        layout, count = self.problem.layout, len(vectors)
        v = layout.views(vectors)  # name -> (K, *shape)
        out = torch.zeros_like(vectors)
        sums = layout.views(out)  # views of ``out``, to which the loops below add
        weights = [w.expand(count, -1, -1) for w in self.weights]
        first_v = v[self.layers[0].weight_name].flatten(0, 1)
        last = len(self.layers) - 1
        # Layer i computes its output z. If i < last, act(z) = h is the input of layer i + 1. A chunk c has
        # the input of layer 0, c.x (samples, features), and for layer i these tensors (K, width, samples):
        #   i > 0:    c.h[i - 1], the input;    c.delta[i - 1] = ∂L/∂z
        #   i < last: c.slopes[i] = act′(z);    c.curvatures[i] = act″(z)·∂L/∂h
        # c.curvatures[i] is None if act″ is zero, and for the Gauss-Newton matrix, which has no such term.
        for c in self.chunks:
            # Forward: rz and rh are the derivatives along v of a layer's output z and of the activation h.
            rzs: list[Tensor] = []
            rhs: list[Tensor] = []
            for i, layer in enumerate(self.layers):
                if i:
                    rz = _product(v[layer.weight_name], c.h[i - 1], plus=_product(weights[i], rhs[-1]))
                else:
                    rz = (first_v @ c.x.T).view(count, -1, len(c.x))
                if layer.bias_name:
                    rz += v[layer.bias_name].unsqueeze(2)
                if i < last:
                    rzs.append(rz)
                    rhs.append(rz * c.slopes[i])
            # Backward: r is the derivative along v of ∂L/∂z, from the last layer to the first.
            r = self._output_hvp(c, rz)  # rz: that of the last layer
            for i in range(last, -1, -1):
                weight_name, bias_name = self.layers[i].weight_name, self.layers[i].bias_name
                if bias_name:
                    sums[bias_name].add_(r.sum(2))
                if i == 0:
                    sums[weight_name].add_((r.flatten(0, 1) @ c.x).view_as(sums[weight_name]))
                    break
                sums[weight_name].add_(_product(r, c.h[i - 1].mT))
                r = _product(weights[i].mT, r)
                if self.full:  # the Hessian, not its Gauss-Newton part
                    delta = c.delta[i - 1]
                    # Add delta·rhᵀ. If all vectors share one θ, ``delta`` is (1, width, samples). Only the
                    # second factor of _product may have this form. So (rh·deltaᵀ)ᵀ is computed.
                    sums[weight_name].add_(_product(rhs[i - 1], delta.mT).mT)
                    r = _product(v[weight_name].mT, delta, plus=r)
                r = r * c.slopes[i - 1]
                second = c.curvatures[i - 1]
                if second is not None:
                    r = torch.addcmul(r, second, rzs[i - 1])
        if self.penalties:
            # There is one penalty for each θ. The penalty of a single θ is repeated for all vectors.
            penalties = self.penalties * (count // len(self.penalties))
            out += torch.stack([penalty(row) for penalty, row in zip(penalties, vectors, strict=True)])
        return out


def agrees(problem: Problem, weights: Tensor, matrix: Literal["hessian", "gauss-newton"] = "hessian") -> bool:
    """Return whether the products of a chain equal HessianOperator's, for a few samples at ``weights`` (P,).

    They are compared once for each problem and matrix, unless ``check`` is "off"; a PathWarning reports a
    difference.
    """
    key = ("chain", matrix)
    if key in problem.checked or problem.check == "off":
        return problem.checked.get(key, True)

    def are_equal(small_problem: Problem) -> bool:
        at = weights.to(small_problem.dtype)
        vectors = normal((VECTORS, len(at)), generator(0, at.device, len(at))).to(at)
        exact = HessianOptions(matrix, derivatives="exact").at(small_problem, at)
        expected = exact._images(vectors)
        difference = ChainHessian(small_problem, at[None], matrix=matrix)(vectors) - expected
        if not bool(expected.isfinite().all()):
            return True
        rounding = rounding_of(expected, exact(vectors.sum(0)), small_problem.dtype)
        return bool((difference.norm(dim=1) <= rounding).all())

    problem.checked[key] = holds_but_for_rounding(problem.on(problem.data.few()), are_equal)
    if not problem.checked[key]:
        warn_caller("fast Hessian products of this model differ from PyTorch's, which are used", PathWarning)
    return problem.checked[key]


def _product(a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return a @ b (+ plus), for a (K, n, m) and b (K, m, p) or (1, m, p).

    If all K have the same b, it is one product of matrices, as bmm would copy transposed or expanded tensors.
    """
    if len(b) == 1:
        rows = a.flatten(0, 1)
        out = rows @ b[0] if plus is None else torch.addmm(plus.flatten(0, 1), rows, b[0])
        return out.view(len(a), -1, b.shape[2])
    return torch.bmm(a, b) if plus is None else torch.baddbmm(plus, a, b)


def _layers(problem: Problem) -> list[_Layer] | None:
    """Return the layers of a chain that begins and ends with a linear layer; None for other models."""
    steps = chain(problem)
    if steps is None or not isinstance(steps[0], LinearLayer):
        return None
    layers: list[_Layer] = []
    for step in steps:
        if isinstance(step, LinearLayer):
            layers.append(_Layer(step.weight, step.bias, nn.Sequential()))
        else:
            layers[-1].act.append(step)
    return None if len(layers[-1].act) else layers


def _derivatives(act: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return act(z), act′(z) and act″(z) of an element-wise function; None if act″ is zero."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        a = act(z)
        first = torch.autograd.grad(a.sum(), z, create_graph=True)[0]
        if not first.requires_grad:
            return a.detach(), first, None
        second = gradients(first.sum(), [z])[0]
    return a.detach(), first.detach(), second if bool(second.any()) else None
