"""Products of the loss Hessian, or its Gauss-Newton part, with vectors, over the whole data of a problem."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape.batches import fixed_randomness
from landscape.memory import SavedBytes
from landscape.options import InputError, choose
from landscape.problem import RANDOMNESS, Problem
from landscape.stack import chain
from landscape.vector import gradients

# Memory that kept gradient graphs may take (ours: small beside the 24 GB of a usual machine, and enough to
# keep all of MNIST's test set for a small network).
GRAPH_BYTES = 2**30
KINDS = ("hessian", "gauss-newton")

Part = str | Sequence[str] | None


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Inside, no fused attention, nor cuDNN's recurrent layers: these kernels have no double backward."""
    recurrent = any(isinstance(layer, nn.RNNBase) for layer in model.modules())
    own = torch.backends.cudnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), own:
        yield


class HessianChunk:
    """The products of one chunk of data with ∇²L, from the graph of its gradient (Pearlmutter 1994)."""

    def __init__(self, problem: Problem, leaves: dict[str, Tensor], active: list[Tensor], x: Any, y: Any):
        loss = problem.criterion(problem.call(leaves, x), y)
        self.active = active
        self.live: list[int] = []
        if not loss.requires_grad:  # no parameter in question reaches it
            return
        parts = torch.autograd.grad(loss, active, create_graph=True, materialize_grads=True)
        self.live = [i for i, part in enumerate(parts) if part.grad_fn]
        self.gradients = [parts[i] for i in self.live]

    def product(self, vectors: list[Tensor], keep: bool) -> Sequence[Tensor] | None:
        """∇²L·v by parameter; None where the gradient does not depend on θ."""
        if not self.live:
            return None
        return gradients(self.gradients, self.active, [vectors[i] for i in self.live], keep=keep)


class GaussNewtonChunk:
    """The products of one chunk with JᵀH_L J: J the Jacobian of the outputs z in θ, H_L = ∂²loss/∂z².

    Schraudolph 2002, section 3. Jv comes from differentiating Jᵀu, linear in the dummy u, by u: that graph
    can be kept like the Hessian's.
    """

    def __init__(self, problem: Problem, leaves: dict[str, Tensor], active: list[Tensor], x: Any, y: Any):
        self.active = active
        self.outputs = problem.call(leaves, x)
        if not isinstance(self.outputs, Tensor):
            raise InputError(
                f"kind: 'gauss-newton' needs a model whose output is one tensor, this one gives a "
                f"{type(self.outputs).__name__}; use 'hessian'"
            )
        self.live = self.outputs.requires_grad
        if not self.live:  # no parameter in question reaches the outputs
            return
        self.z = self.outputs.detach().requires_grad_()
        loss = problem.criterion(self.z, y)
        self.slope = torch.autograd.grad(loss, self.z, create_graph=True, materialize_grads=True)[0]
        self.u = torch.zeros_like(self.z, requires_grad=True)
        self.pulled = torch.autograd.grad(
            self.outputs, active, self.u, create_graph=True, materialize_grads=True
        )
        self.reached = [i for i, part in enumerate(self.pulled) if part.grad_fn]
        self.live = self.slope.grad_fn is not None  # a loss linear in the outputs has no curvature there

    def product(self, vectors: list[Tensor], keep: bool) -> Sequence[Tensor] | None:
        """JᵀH_L J·v by parameter; None where it is zero whatever v is."""
        if not self.live:
            return None
        pulled = [self.pulled[i] for i in self.reached]
        pushed = torch.autograd.grad(pulled, self.u, [vectors[i] for i in self.reached], retain_graph=True)[0]
        bent = torch.autograd.grad(self.slope, self.z, pushed, retain_graph=keep)[0]
        return gradients(self.outputs, self.active, bent, keep=keep)


class HessianOperator:
    """v ↦ ∇²L(θ) v for a fixed θ, averaged over all samples of ``problem``.

    Args:
        theta: θ (P,); default: the problem's centre.
        kind: "hessian", or "gauss-newton" for JᵀH_L J (see :class:`GaussNewtonChunk`), which is positive
            semi-definite for the usual losses.
        part: names or name prefixes of parameters, such as "1" or "1.weight": the diagonal block of these
            (``size`` numbers in the order of θ); default: all P.
        randomness: "refuse", or "seed" to draw the same random numbers at each forward pass. This class
            does not look whether the model is random: :func:`operator` does.
        graph_bytes: memory for kept graphs.

    A chunk's graph is built once and kept for as many chunks as fit in ``graph_bytes``; the others build
    theirs again for every product. ``products`` counts the calls. Raises InputError for a kind or part that
    is not there, and at the first product for "gauss-newton" with outputs that are not one tensor.
    """

    def __init__(
        self,
        problem: Problem,
        theta: Tensor | None = None,
        *,
        kind: str = "hessian",
        part: Part = None,
        randomness: str = "refuse",
        graph_bytes: int = GRAPH_BYTES,
    ) -> None:
        self.kind = choose("kind", kind, KINDS)
        self.randomness = choose("randomness", randomness, RANDOMNESS)
        self.problem = problem.at(theta)
        self.slots = problem.layout.select(part)
        self.size = sum(slot.size for slot in self.slots)
        views = problem.layout.views(problem.theta if theta is None else theta)
        self._leaves = {k: v.detach().clone() for k, v in views.items()}
        self._active = [self._leaves[slot.name].requires_grad_() for slot in self.slots]
        self._kept: list[tuple[HessianChunk | GaussNewtonChunk, float]] = []
        self._budget = graph_bytes
        self._full = self._complete = False
        self.products = 0

    def __call__(self, v: Tensor) -> Tensor:
        """The product with ``v``, (size,) -> (size,)."""
        if v.shape != (self.size,):
            raise InputError(f"v: shape {tuple(v.shape)}, it must be {(self.size,)}")
        self.products += 1
        pieces = torch.split(v, [slot.size for slot in self.slots])
        vectors = [piece.view(slot.shape) for piece, slot in zip(pieces, self.slots, strict=True)]
        total = torch.zeros_like(v)
        for chunk, share, keep in self._chunks():
            with twice_differentiable(self.problem.model):
                parts = chunk.product(vectors, keep)
            if parts is not None:
                total.add_(torch.cat([part.flatten() for part in parts]), alpha=share)
        return total

    def _chunks(self) -> Iterator[tuple[HessianChunk | GaussNewtonChunk, float, bool]]:
        """Each chunk's graph, its share of the samples, and whether it serves again."""
        if self._complete:
            yield from ((chunk, share, True) for chunk, share in self._kept)
            return
        build = HessianChunk if self.kind == "hessian" else GaussNewtonChunk
        seeded = self.randomness == "seed"
        for i, (x, y, count) in enumerate(self.problem.chunks()):
            if i < len(self._kept):
                yield (*self._kept[i], True)
                continue
            saved = SavedBytes(besides=self._leaves.values())
            fixed = fixed_randomness(self.problem, i if seeded else None)
            with saved, twice_differentiable(self.problem.model), fixed:
                chunk, share = (
                    build(self.problem, self._leaves, self._active, x, y),
                    count / self.problem.samples,
                )
            self._full |= saved.bytes_ > self._budget
            if not self._full:
                self._budget -= saved.bytes_
                self._kept.append((chunk, share))
            yield chunk, share, not self._full
        self._complete = not self._full
        if self._full and self.problem.resident is None:
            # An iterable may give its batches in another order each time: which of them a kept graph stands
            # for could not be told, so it is all or none.
            self._kept = []


@torch.no_grad()
def check_deterministic(problem: Problem, theta: Tensor | None = None) -> None:
    """Raise InputError if two evaluations at one θ on one chunk of data differ: L is then no function of θ.

    (Eval mode stops dropout modules, but not ``F.dropout`` left on, or noise that a model adds itself.)
    Differences of rounding size, as from atomic additions on a GPU, are let through.
    """
    theta = problem.theta if theta is None else theta
    x, y, _ = next(iter(problem.chunks()))
    seen = []
    for _ in range(2):
        outputs = problem.outputs(theta, x)
        seen.append((outputs if isinstance(outputs, Tensor) else None, problem.criterion(outputs, y)))
    for first, second in zip(*seen, strict=True):
        if first is None:
            continue
        largest = float(first.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        rounding = 100 * torch.finfo(problem.dtype).eps * largest
        if not torch.allclose(first, second, rtol=0, atol=rounding, equal_nan=True):
            raise InputError(
                "model: its outputs are random even in eval mode, so that its loss has no Hessian; make it "
                "deterministic, or use randomness='seed' for the same random numbers at each pass"
            )


def operator(
    problem: Problem,
    theta: Tensor | None = None,
    *,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
) -> HessianOperator:
    """A :class:`HessianOperator`, made only if its products will be those of one fixed matrix.

    Raises InputError for a model whose forward pass is random in eval mode, unless ``randomness`` is "seed".
    """
    made = HessianOperator(problem, theta, kind=kind, part=part, randomness=randomness)
    if randomness == "refuse" and chain(problem) is None:  # what such chains are made of is not random
        check_deterministic(problem, theta)
    return made


def dense_hessian(
    problem: Problem, theta: Tensor | None = None, *, kind: str = "hessian", part: Part = None
) -> Tensor:
    """∇²L(θ), or as ``kind`` and ``part`` say, as a matrix, one product a column: for very small models."""
    made = HessianOperator(problem, theta, kind=kind, part=part)
    eye = torch.eye(made.size, dtype=problem.dtype, device=problem.device)
    return torch.stack([made(e) for e in eye], dim=1)
