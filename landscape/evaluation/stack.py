"""Many sets of weights through one network at once: the learners of a run, or the points of a plane.

Networks that are a plain chain of linear layers and element-wise functions run as one batched matrix product
a layer; any other network runs once for each set of weights, or once for all of them under torch.vmap.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core.errors import PathWarning
from landscape.core.memory import SavedBytes
from landscape.evaluation.stacked_linear import StackedLinear
from landscape.problem.batches import call, fixed_randomness, named_tensors, take, tree_map
from landscape.problem.layout import gradients
from landscape.problem.problem import Loss, Problem

# Modules that act on each number by itself, so that any leading or trailing dimensions may be added.
ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.ELU,
    nn.LeakyReLU,
    nn.Identity,
)

# Batching learners takes no more bytes of activations than MOST, and must save a tenth of the time (ours).
MOST, PAYS = 2**30, 0.9
# What may be rounding of a gradient, as a share of its norm: of a function that is another, it is of the
# order of 1 (ours).
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1}

Precision = Literal["full", "bfloat16"]
# One network after the other, all at once under torch.vmap, or a batched product a layer.
Way = Literal["plain", "channels last", "batched", "chain"]


@dataclass(frozen=True)
class LinearStep:
    """A linear layer of a chain, by the names of its parameters in the layout."""

    weight: str
    bias: str | None


Step = LinearStep | nn.Module


def chain(problem: Problem) -> list[Step] | None:
    """The steps of a model that is Flatten, then Linear layers and element-wise functions; None for others.

    Only an exact ``nn.Sequential`` counts (a subclass may do anything in its forward), without hooks or
    parametrisations, whose linear layers hold all of θ and are used once each, on data with one row of
    features a sample; without Flatten it must have no other dimensions.
    """
    model, tensors = problem.model, problem.tensors
    if tensors is None or type(model) is not nn.Sequential:
        return None
    steps: list[Step] = []
    leaves = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if not list(m.children())]
    for module in model.modules():
        hooked = module._forward_hooks or module._forward_pre_hooks
        if hooked or (list(module.children()) and type(module) is not nn.Sequential):
            return None
    for i, (name, module) in enumerate(leaves):
        if type(module) is nn.Flatten and i == 0 and (module.start_dim, module.end_dim) == (1, -1):
            continue
        if type(module) is nn.Linear:
            steps.append(LinearStep(f"{name}.weight", f"{name}.bias" if module.bias is not None else None))
        elif type(module) in ELEMENTWISE and not getattr(module, "inplace", False):
            steps.append(module)
        else:
            return None
    linear = [step for step in steps if isinstance(step, LinearStep)]
    names = [name for step in linear for name in (step.weight, step.bias) if name]
    # Tied, frozen and other parameters: each must be in θ once, and nothing else.
    if not linear or sorted(names) != sorted(slot.name for slot in problem.layout.slots):
        return None
    return steps if type(leaves[0][1]) is nn.Flatten or tensors[0].dim() == 2 else None


def plain_cross_entropy(loss: Loss) -> bool:
    """Whether ``loss`` is cross-entropy with no options, whose batched form is known."""
    if loss is F.cross_entropy:
        return True
    return (
        type(loss) is nn.CrossEntropyLoss
        and loss.weight is None
        and loss.ignore_index == -100
        and loss.reduction == "mean"
        and loss.label_smoothing == 0.0
    )


def stacked_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """(K,) mean losses of K sets of outputs (K, C, B), each with its own targets (K, B, ...).

    A loss is given outputs as the network makes them, (B, C) and contiguous.
    """
    if plain_cross_entropy(loss) and targets.dim() == 2 and targets.dtype == torch.int64:
        return F.cross_entropy(outputs, targets, reduction="none").mean(1)
    return torch.stack([loss(o.T.contiguous(), t) for o, t in zip(outputs, targets, strict=True)])


@dataclass(frozen=True)
class Training:
    """What the network is given in training mode: BatchNorm takes its minibatch's statistics, dropout is on.

    ``buffers`` name -> (n, ...): the running statistics of each learner's BatchNorm layers, updated in place
    by its minibatch; empty: none are kept. ``seed(j, i)``: of the random numbers of learner j's microbatch i.
    """

    buffers: Mapping[str, Tensor]
    seed: Callable[[int, int], int]


class Stack:
    """Minibatch gradients of n learners of one problem's model, written to one (n, P) buffer.

    ``accumulate`` microbatches make a minibatch, one after the other: less memory, the same mean but for
    rounding. ``precision`` "bfloat16" runs the network under PyTorch's autocast, the loss not; the gradients
    come out in the weights' precision. ``seed``: a random model draws the same numbers for each learner's
    gradient, from it; None: as they come.

    ``batched``: a network that is no chain runs once for all learners instead of once for each. Which is
    faster depends on network, minibatch and machine (:meth:`batching_pays` tries): on 2 cores 16 ResNet-18
    of 1/16 the width with 8 samples each took half as long batched, 16 LeNet-5 with 64 each 1.7 times.

    Before a way that is not the plain one is first used, two gradients by it are compared with plain ones.
    Where they differ by more than rounding, a :class:`landscape.PathWarning` says so, and it is not used.
    """

    def __init__(
        self,
        problem: Problem,
        accumulate: int = 1,
        precision: Precision = "full",
        seed: int | None = None,
    ) -> None:
        self.problem, self.accumulate, self.seed = problem, accumulate, seed
        self.steps = chain(problem)
        self.precision = precision
        self.batched = False
        # Convolutions are a tenth faster where a pixel's channels lie together (ResNet-18, 2 cores).
        convolutions = [m for m in problem.model.modules() if type(m) is nn.Conv2d]
        # A few channels, 1 × 1 and a stride: PyTorch 2.13's backward pass writes past its memory on AMD CPUs.
        crash = any(1 < c.in_channels < 8 and {*c.kernel_size} == {1} < {1, *c.stride} for c in convolutions)
        self._channels_last = bool(convolutions) and not crash
        self._checked: set[Way] = {"plain"}

    def _way(self, x: Any) -> Way:
        """How gradients on minibatches like ``x`` are computed."""
        if self.steps is not None:
            return "chain"
        if self.batched:
            return "batched"
        images = self._channels_last and isinstance(x, Tensor) and x.dim() == 5
        return "channels last" if images else "plain"

    def _leave(self, way: Way) -> None:
        """Use ``way`` no more."""
        if way == "chain":
            self.steps = None
        elif way == "batched":
            self.batched = False
        else:
            self._channels_last = False

    def _check(self, weights: Tensor, x: Any, y: Any, training: Training | None) -> None:
        """See that the way of :meth:`gradients` for these arguments is right, or leave it for one that is."""
        while (way := self._way(x)) not in self._checked:
            try:
                error = self._error(way, weights, x, y, training)
            except Exception as problem:  # the model and the loss are the user's
                error, why = float("inf"), " ".join(str(problem).split())[:120]
            else:
                why = f"its gradients differ by {error:.1g} of their norm"
            if error != error:
                return  # the plain gradients are not finite: there is nothing to compare with yet
            if error <= self._rounding(weights):
                self._checked.add(way)
                continue
            self._leave(way)
            # Many networks take a view that channels which lie last do not allow: nothing to tell anybody.
            if way != "channels last" or error < float("inf"):
                text = f"one after the other, not by the path '{way}', which is faster but not right here"
                warnings.warn(f"model: learners are computed {text} ({why})", PathWarning, stacklevel=4)

    def _rounding(self, weights: Tensor) -> float:
        return ROUNDING[weights.dtype if self.precision == "full" else torch.bfloat16]

    def _error(self, way: Way, weights: Tensor, x: Any, y: Any, training: Training | None) -> float:
        """‖by ``way`` − plain‖/‖plain‖ of two learners' gradients; NaN where the plain ones are not finite.

        On their first microbatch, at weights moved by a tenth: near a minimum a gradient is all rounding. In
        eval mode but for "batched": what dropout draws depends on how channels lie. What a path does not
        write is NaN, and counts as wrong.
        """
        two, draws = weights[:2].clone(), torch.Generator().manual_seed(0)
        for part in self.problem.layout.views(two).values():
            size = 0.01 + 0.1 * part.square().mean().sqrt().nan_to_num()
            part.add_(torch.randn(part.shape, generator=draws, dtype=torch.float64).to(part) * size)

        def few(tree: Any) -> Any:
            return tree_map(lambda t: t[:2].chunk(self.accumulate, 1)[0], tree)

        found = []
        for each in ("plain", way):
            own, out = None, torch.full_like(two, torch.nan)
            if way == "batched" and training is not None:
                own = Training({k: t[:2].clone() for k, t in training.buffers.items()}, training.seed)
            self._by(each, two, few(x), few(y), out, own)
            found.append(out)
        plain, other = found
        if not bool(plain.isfinite().all()):
            return float("nan")
        return float(((other - plain).norm() / plain.norm().clamp(min=1e-30)).nan_to_num(torch.inf))

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.precision == "full":
            return contextlib.nullcontext()
        return torch.autocast(self.problem.device.type, torch.bfloat16)

    @functools.cached_property
    def training_model(self) -> nn.Module:
        """The model in training mode; it shares the parameters, in whose place each call has others."""
        model = self.problem.model
        return copy.deepcopy(model, {id(p): p for p in model.parameters()}).train()

    def gradients(
        self, weights: Tensor, x: Any, y: Any, out: Tensor, training: Training | None = None
    ) -> Tensor:
        """Learner j's gradient at ``weights[j]`` on its minibatch (x[j], y[j]), written to ``out[j]``.

        Shapes: weights and out (n, P), x (n, B, ...), y (n, B, ...), or every tensor of what x and y are made
        of, B a multiple of ``accumulate``. Without ``training`` the model is in eval mode. With it each
        microbatch has BatchNorm statistics of its own. Returns the mean losses (n,).
        """
        self._check(weights, x, y, training)
        way = self._way(x)
        if self.accumulate == 1:
            return self._by(way, weights, x, y, out, training)
        losses, part = weights.new_zeros(len(weights)), torch.empty_like(out)
        out.zero_()
        for i in range(self.accumulate):

            def micro(tensor: Tensor, i: int = i) -> Tensor:
                return tensor.chunk(self.accumulate, 1)[i]

            found = self._by(way, weights, tree_map(micro, x), tree_map(micro, y), part, training, i)
            losses += found / self.accumulate
            out.add_(part, alpha=1 / self.accumulate)
        return losses

    def _by(
        self,
        way: Way,
        weights: Tensor,
        x: Any,
        y: Any,
        out: Tensor,
        training: Training | None,
        micro: int = 0,
    ) -> Tensor:
        """:meth:`gradients` of a microbatch."""
        if way == "chain":
            return self._chained(weights, x, y, out)
        if way == "batched":
            return self._at_once(weights, x, y, out, training)
        rows = []
        for j, w in enumerate(weights):
            model, state, seed = self.problem.model, dict[str, Tensor](), self.seed
            if training is not None:
                model, seed = self.training_model, training.seed(j, micro)
                state = {name: each[j] for name, each in training.buffers.items()}
            inputs = take(x, j)
            if way == "channels last":
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            rows.append(self._one(model, state, seed, w, inputs, take(y, j), out[j]))
        return torch.stack(rows)

    def _chained(self, weights: Tensor, x: Any, y: Any, out: Tensor) -> Tensor:
        assert self.steps is not None
        views, grads = self.problem.layout.views(weights), self.problem.layout.views(out)
        dtype = weights.dtype if self.precision == "full" else torch.bfloat16
        h = x.flatten(2).transpose(1, 2)  # features before samples: gradients come out as the weights lie
        with self._autocast():
            for step in self.steps:
                if isinstance(step, LinearStep):
                    w, w_grad = views[step.weight], grads[step.weight]
                    b, b_grad = (views[step.bias], grads[step.bias]) if step.bias else (None, None)
                    if not h.requires_grad:  # the first layer: the backward pass is to reach it
                        w = w.detach().requires_grad_()
                    h = StackedLinear.apply(h.to(dtype), w, b, w_grad, b_grad)  # type: ignore[no-untyped-call]
                else:
                    h = step(h)
        losses = stacked_losses(self.problem.criterion, h.to(weights.dtype), y)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return losses.detach()

    def _one(
        self,
        model: nn.Module,
        state: dict[str, Tensor],
        seed: int | None,
        theta: Tensor,
        x: Any,
        y: Any,
        out: Tensor,
    ) -> Tensor:
        leaves = {k: v.detach().requires_grad_() for k, v in self.problem.layout.views(theta).items()}
        with fixed_randomness(self.problem, seed):
            loss = self._loss(model, {**leaves, **state}, x, y, theta.dtype)
        return self._write(leaves, loss, out)

    def _at_once(self, weights: Tensor, x: Any, y: Any, out: Tensor, training: Training | None) -> Tensor:
        leaves = {k: v.detach().requires_grad_() for k, v in self.problem.layout.views(weights).items()}
        model = self.problem.model if training is None else self.training_model
        state = {} if training is None else dict(training.buffers)
        if training is not None and not state:  # statistics that nobody keeps, but each learner has
            state = {k: b.expand(len(weights), *b.shape).clone() for k, b in model.named_buffers()}

        def one(values: dict[str, Tensor], x: Any, y: Any) -> Tensor:
            return self._loss(model, values, x, y, weights.dtype)

        return self._write(leaves, torch.vmap(one)({**leaves, **state}, x, y), out)

    def _loss(
        self, model: nn.Module, values: dict[str, Tensor], x: Any, y: Any, dtype: torch.dtype
    ) -> Tensor:
        with self._autocast():
            outputs = call(model, values, x)
        if isinstance(outputs, Tensor):
            outputs = outputs.to(dtype)
        return self.problem.criterion(outputs, y)

    def _write(self, leaves: dict[str, Tensor], losses: Tensor, out: Tensor) -> Tensor:
        parts = gradients(losses.sum(), list(leaves.values()))
        for view, part in zip(self.problem.layout.views(out).values(), parts, strict=True):
            view.copy_(part)
        return losses.detach()

    def batching_pays(self, weights: Tensor, x: Any, y: Any, training: Training | None) -> bool:
        """Whether :meth:`gradients` of these arguments is faster batched, and the same: a short trial.

        Never where one pass for each learner is needed: with dropout, whose numbers are each learner's own,
        or what torch.vmap does not know; nor where the activations of all learners would exceed MOST.
        """
        if self.steps is not None or len(weights) == 1 or self._bytes(weights, x, y) > MOST:
            return False
        out, own = torch.empty_like(weights), training

        def run(batched: bool) -> float:
            nonlocal own
            if training is not None:  # the statistics of the trial are nobody's
                own = Training({k: t.clone() for k, t in training.buffers.items()}, training.seed)
            self.batched = batched
            clock = time.perf_counter()
            self.gradients(weights, x, y, out, own)
            if weights.is_cuda:
                torch.cuda.synchronize(weights.device)
            return time.perf_counter() - clock

        try:
            if not self._error("batched", weights, x, y, training) <= self._rounding(weights):
                return False
            self._checked.add("batched")
            for batched in (False, True):
                run(batched)
            seconds = [(run(False), run(True)) for _ in range(2)]
        except (RuntimeError, NotImplementedError):
            return False
        finally:
            self.batched = False
        return min(b for _, b in seconds) < PAYS * min(a for a, _ in seconds)

    def _bytes(self, weights: Tensor, x: Any, y: Any) -> int:
        """What the activations of all learners' microbatches would take."""
        leaves = {k: v.detach().requires_grad_() for k, v in self.problem.layout.views(weights[0]).items()}
        saved = SavedBytes(excluding=leaves.values())
        batch = next(named_tensors(x))[1].shape[1]
        with torch.enable_grad(), saved:
            a, b = take((x, y), (0, slice(2)))
            self._loss(self.problem.model, leaves, a, b, weights.dtype)
        return len(weights) * batch // self.accumulate * saved.bytes_ // min(2, batch)
