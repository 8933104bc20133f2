"""Gradients of many learners at once, each at its own weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from landscape.core.devices import GRAPHS, Captured, branches, generator, normal, synchronize, vector_norm
from landscape.core.errors import PathWarning, warn_caller
from landscape.core.memory import available_memory, with_saved_bytes
from landscape.problem.batches import call, named_tensors, random_state, take, tree_map
from landscape.problem.layout import copies_of_computed_tensors, differentiable, gradients
from landscape.problem.problem import LinearLayer, Problem, chain, stacked_losses


class StackedLinear(torch.autograd.Function):
    """W_j h_j + b_j (n, out, B) of each learner; the backward pass writes the gradients of W and b in place.

    Autograd would return these gradients in fresh memory, to be copied. With 10 million parameters the copies
    take 4% of the time for one learner with 256 samples, 13% for two learners with 64 samples each.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, b: Tensor | None, w_grad: Tensor, b_grad: Tensor | None,
        written: Callable[[], object],
    ) -> Tensor:  # fmt: skip
        w = w.to(h.dtype)
        ctx.save_for_backward(h, w)
        ctx.into, ctx.written = (w_grad, b_grad), written
        return torch.bmm(w, h) if b is None else torch.baddbmm(b.to(h.dtype).unsqueeze(2), w, h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        h, w = ctx.saved_tensors
        w_grad, b_grad = ctx.into
        if h.dtype == w_grad.dtype:
            torch.bmm(grad, h.mT, out=w_grad)
        else:
            w_grad.copy_(torch.bmm(grad, h.mT))
        if b_grad is not None:
            torch.sum(grad, 2, dtype=b_grad.dtype, out=b_grad)
        ctx.written()
        return torch.bmm(w.mT, grad) if ctx.needs_input_grad[0] else None, None, None, None, None, None


# Learners are batched if their activations take at most this many bytes, and if batching takes at most this
# share of the loop's time (our choice).
MAX_BATCHED_BYTES, MAX_TIME_SHARE = 2**30, 0.9
# A device other than the CPU batches MANY learners whose activations take at most SMALL_BYTES each: one alone
# does not fill it (our choice, not measured: 32 images of CIFAR's ResNet-18 take 180 MiB).
MANY, SMALL_BYTES = 4, 2**28
# The largest rounding error of a gradient, as a share of its norm; the gradient of another function differs
# by the order of 1 (our choice).
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1}

Autocast = Literal["", "bfloat16"]
#: Is called with the names of parameters whose gradients were written.
Ready = Callable[..., object]
# "loop" and "channels last": one network after the other, in two memory layouts. "batched": all networks at
# once under torch.vmap. "chain": a batched product for each layer.
GradientPath = Literal["loop", "channels last", "batched", "chain"]


@dataclass(frozen=True)
class Training:
    """Options of training mode: BatchNorm takes its minibatch's statistics, dropout is on.

    Attributes:
        buffers: name -> (n, ...), the running statistics of each learner's BatchNorm layers, updated in place
            by its minibatch. Empty: there are none, or they are not to be kept (a pass then updates
            those of a copy of the model).
        seed: ``seed(j, i)``, the seed of the random numbers of learner j's microbatch i; None if a pass draws
            none.
        microbatch: i.
    """

    buffers: Mapping[str, Tensor]
    seed: Callable[[int, int], int | None]
    microbatch: int = 0


class Stack:
    """Minibatch gradients of n learners of one problem's model, written to one (n, P) buffer.

    Before a faster path is first used, two learners' gradients by this path are compared with the gradients
    by the loop over learners. If they differ by more than rounding, a :class:`landscape.PathWarning` says so,
    and the path is not used.

    Args:
        problem: has the model and the loss.
        accumulate: the number of microbatches in a minibatch, computed one after the other: less memory, and
            equal means up to rounding.
        autocast: "bfloat16" runs the network under PyTorch's autocast, but not the loss; the gradients are
            in the weights' precision. "": no autocast.

    Attributes:
        batched: whether a network that is no chain runs once for all learners instead of once for each. The
            faster way depends on network, minibatch and machine; :meth:`batching_pays` measures the times on
            the CPU, and has a rule elsewhere.
            On 2 cores 16 ResNet-18 of 1/16 the width with 8 samples each took half as long batched, 16
            LeNet-5 with 64 samples each took 1.7 times as long.
    """

    def __init__(self, problem: Problem, accumulate: int = 1, autocast: Autocast = "") -> None:
        self.problem, self.accumulate = problem, accumulate
        self.layers, self.autocast, self.batched = chain(problem), autocast, False
        # Convolutions are a tenth faster where a pixel's channels lie together (ResNet-18, 2 cores).
        convolutions = [m for m in problem.model.modules() if type(m) is nn.Conv2d]
        # A few channels, 1 × 1 and a stride: PyTorch 2.13's backward pass writes past its memory on AMD CPUs.
        crash = any(1 < c.in_channels < 8 and {*c.kernel_size} == {1} < {1, *c.stride} for c in convolutions)
        self._channels_last = bool(convolutions) and not crash
        self._verified: set[GradientPath] = {"loop"}
        self._captured, self._replayable = Captured(), dict[bool, bool]()

    def _path(self, x: Any) -> GradientPath:
        """The path of gradients on minibatches like ``x``."""
        if self.layers is not None:
            return "chain"
        if self.batched:
            return "batched"
        if not self.problem.separable:
            return "loop"
        images = self._channels_last and isinstance(x, Tensor) and x.dim() == 5
        return "channels last" if images else "loop"

    def _verify(self, weights: Tensor, x: Any, y: Any, training: Training | None) -> None:
        """Compare the path for these arguments with the loop; abandon the path if its gradients are wrong."""
        while (path := self._path(x)) not in self._verified:
            try:
                error = self._relative_error(path, weights, x, y, training)
            except Exception as failure:  # the user's model and loss raise any kind of error
                error, reason = float("inf"), " ".join(str(failure).split())[:120]
            else:
                reason = f"its gradients differ by {error:.1g} of their norm"
            if error != error:
                return  # NaN: the gradients of the loop are not finite, so that nothing can be compared
            if error <= ROUNDING[self._dtype(weights)]:
                self._verified.add(path)
                continue
            self.layers = None if path == "chain" else self.layers
            self.batched &= path != "batched"
            self._channels_last &= path != "channels last"
            # An error with "channels last" is no reason to warn: many networks take a view that this layout
            # does not allow.
            if path != "channels last" or error < float("inf"):
                text = f"model: learners are computed one by one, the faster path '{path}' is not right here"
                warn_caller(f"{text} ({reason})", PathWarning)

    def _dtype(self, weights: Tensor) -> torch.dtype:
        """The precision of the arithmetic inside the network."""
        return torch.bfloat16 if self.autocast else weights.dtype

    def _relative_error(
        self, path: GradientPath, weights: Tensor, x: Any, y: Any, training: Training | None
    ) -> float:
        """Return ‖g_path − g_loop‖/‖g_loop‖ for two learners' gradients g by ``path`` and by "loop".

        The result is NaN if g_loop is not finite. The gradients are those of the first microbatch. The
        weights are changed at random by about a tenth, because near a minimum a gradient is mostly rounding.
        """
        # The random numbers of dropout depend on the memory layout, so paths are compared in eval mode. For
        # "batched", which refuses dropout, the comparison takes the caller's mode.
        training = training if path == "batched" else None
        pair = weights[:2].clone()
        random_numbers = generator(seed=0, device=pair.device, size=pair.shape[1])
        for parameter in self.problem.layout.views(pair).values():
            size = 0.01 + 0.1 * parameter.square().mean().sqrt().nan_to_num()
            parameter.add_(normal(parameter.shape, random_numbers).to(parameter) * size)

        # The first microbatch of two learners.
        x, y = tree_map(lambda t: t[:2].chunk(self.accumulate, 1)[0], (x, y))

        def gradients_by(path_name: GradientPath) -> Tensor:
            # An entry of ``out`` that is not written stays NaN, and so counts as wrong.
            out = torch.full_like(pair, torch.nan)
            options = None
            if training is not None:  # with copies, because a pass updates the buffers in place
                options = Training({k: t[:2].clone() for k, t in training.buffers.items()}, training.seed)
            self._compute(path_name, pair, x, y, out, options)
            return out

        by_loop, by_path = gradients_by("loop"), gradients_by(path)
        if not bool(by_loop.isfinite().all()):
            return float("nan")
        norm = vector_norm(by_loop.flatten()).clamp(min=1e-30)
        return float((vector_norm((by_path - by_loop).flatten()) / norm).nan_to_num(torch.inf))

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        device = self.problem.device.type
        return torch.autocast(device, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    @functools.cached_property
    def training_model(self) -> nn.Module:
        """A copy of the model in training mode; parameters are shared, as each call replaces them anyway."""
        model = _copied(self.problem.model)
        model.train()  # on a line of its own, as a user's train() may return nothing
        return model

    def gradients(
        self, weights: Tensor, x: Any, y: Any, out: Tensor, training: Training | None = None,
        ready: Ready | None = None,
    ) -> Tensor:  # fmt: skip
        """Write each learner j's gradient at ``weights[j]`` on its minibatch (x[j], y[j]) to ``out[j]``.

        Args:
            weights: (n, P).
            x, y: (n, B, ...), or dicts, lists or tuples of such tensors. B is a multiple of ``accumulate``.
            out: (n, P).
            training: options of training mode; BatchNorm uses each microbatch's statistics. None: eval mode.
            ready: called with the name of a parameter as soon as all learners' gradients of this parameter
                are written. With microbatches: called once, with all names, after the last microbatch.

        Returns:
            The mean losses (n,).
        """
        self._verify(weights, x, y, training)
        path = self._path(x)  # the way of computing, such as "batched"
        if self.accumulate == 1:
            # Where the device has CUDA graphs, a pass is recorded once and then replayed.
            if ready is None and weights.device.type in GRAPHS and self._can_replay(weights, x, y, training):
                return self._replayed(path, weights, x, y, out, training)
            return self._compute(path, weights, x, y, out, training, ready)
        losses, microbatch_gradients = weights.new_zeros(len(weights)), torch.empty_like(out)
        out.zero_()

        def microbatch(i: int) -> Any:
            return tree_map(lambda t: t.chunk(self.accumulate, 1)[i], (x, y))

        for i in range(self.accumulate):
            inputs, targets = microbatch(i)
            if training is not None:
                training = replace(training, microbatch=i)
            microbatch_losses = self._compute(path, weights, inputs, targets, microbatch_gradients, training)
            losses += microbatch_losses / self.accumulate
            out.add_(microbatch_gradients, alpha=1 / self.accumulate)
        if ready:
            ready(*(slot.name for slot in self.problem.layout.slots))
        return losses

    def _compute(
        self, path: GradientPath, weights: Tensor, x: Any, y: Any, out: Tensor, training: Training | None,
        ready: Ready | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute one microbatch by ``path``: write its gradients to ``out``, return its mean losses (n,).

        ``ready`` is called as for :meth:`gradients`.
        """
        if path == "chain":
            # A chain has neither BatchNorm nor dropout, so ``training`` makes no difference. The backward
            # pass of the losses writes the gradients to ``out``. ``differentiable`` checks that losses have
            # gradients.
            losses = self._chain_losses(weights, x, y, out, ready)
            differentiable(losses).sum().backward()  # type: ignore[no-untyped-call]
            return losses.detach()
        if path == "batched":
            model = self.problem.model if training is None else self.training_model
            buffers = {} if training is None else dict(training.buffers)
            # In training mode, a pass updates buffers. Under torch.vmap, each learner needs its own buffers.
            # If ``training`` has none, these are copies that are not kept.
            if training is not None and not buffers:
                buffers = {k: b.expand(len(weights), *b.shape).clone() for k, b in model.named_buffers()}
            leaves = self.problem.layout.leaves(weights)
            losses = self._losses_of_all(model, {**leaves, **buffers}, x, y)
            self._write_gradients(leaves, losses, out, ready)
            return losses.detach()
        learner_losses = []
        # While a CUDA graph is recorded, each branch has its own stream: learners are computed side by side.
        # Otherwise a branch has no effect.
        with branches(weights.device) as branch:
            for j, w in enumerate(weights):
                model, buffers, seeds = self.problem.model, {}, self._seeds
                if training is not None:
                    model, seeds = self.training_model, [training.seed(j, training.microbatch)]
                    buffers = {name: rows[j] for name, rows in training.buffers.items()}
                with branch(j):
                    inputs, leaves = take(x, j), self.problem.layout.leaves(w)
                    if path == "channels last":
                        inputs = inputs.contiguous(memory_format=torch.channels_last)
                    loss = self._mean_loss(model, {**leaves, **buffers}, seeds, inputs, take(y, j))
                    is_last = j == len(weights) - 1  # only then are all learners' gradients written
                    self._write_gradients(leaves, loss, out[j], ready if is_last else None)
                    learner_losses.append(loss.detach())
        return torch.stack(learner_losses)

    def _replayed(
        self, path: GradientPath, weights: Tensor, x: Any, y: Any, out: Tensor, training: Training | None
    ) -> Tensor:
        """Return the same as :meth:`_compute`, by replays of a graph of the device."""
        if training is not None:
            training = replace(training, seed=lambda learner, microbatch: None)
        tensors = {id(t): t for _, t in named_tensors((x, y))}  # a tensor may be input and target

        def compute(weights: Tensor, *minibatch: Tensor) -> Tensor:
            recorded = dict(zip(tensors, minibatch, strict=True))
            inputs, targets = tree_map(lambda t: recorded[id(t)], (x, y))
            return self._compute(path, weights, inputs, targets, out, training)

        written = [out, *(training.buffers.values() if training else ())]
        state = (path, training is None)
        n = len(weights)
        return self._captured(compute, weights, *tensors.values(), state=state, written=written, networks=n)

    def _can_replay(self, weights: Tensor, x: Any, y: Any, training: Training | None) -> bool:
        """Return whether a pass can be recorded as a graph and replayed.

        A replay would repeat the same random numbers, and would not set attributes of modules, such as
        counters; so a pass that draws random numbers or sets attributes is not replayed. One learner's pass
        decides for all later calls in the same mode. Passes with hooks, or with losses that are not
        PyTorch's own, are never replayed: hooks and losses may have a state that one pass does not show, such
        as the step of a schedule.
        """
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        has_hooks = any(getattr(m, name) for m in self.problem.model.modules() for name in hooks)
        package_of_loss = str(getattr(self.problem.criterion, "__module__", "")).split(".")[0]
        if has_hooks or package_of_loss != "torch":
            return False
        # Without ``training.buffers``, which has statistics for each learner, learners side by side would all
        # update the statistics in the buffers of ``training_model``.
        if training is not None and not training.buffers and [*self.problem.model.buffers()]:
            return False
        is_eval_mode = training is None
        if is_eval_mode not in self._replayable:
            model = _copied(self.problem.model if training is None else self.training_model)
            buffers = {} if training is None else {k: rows[0].clone() for k, rows in training.buffers.items()}

            def attributes() -> list[Any]:
                """Return the values of the modules' attributes; of a dict, list or tuple, its items."""
                values: list[Any] = []
                for module in model.modules():
                    for value in vars(module).values():
                        if isinstance(value, dict):
                            values += value.values()
                        elif isinstance(value, (list, tuple)):
                            values += value
                        else:
                            values.append(value)
                return values

            # ``evaluating`` seeds the random numbers, and restores their state at the end. It does not change
            # ``model.training``.
            with torch.no_grad(), self.problem.evaluating(seed=0):
                before, random_before = attributes(), random_state(weights.device)
                self._loss(model, {**self.problem.layout.views(weights[0]), **buffers}, *take((x, y), 0))
                after, random_after = attributes(), random_state(weights.device)
            pairs = itertools.zip_longest(before, after)
            are_equal = all(a is b or (isinstance(a, (bool, int, float, str)) and a == b) for a, b in pairs)
            self._replayable[is_eval_mode] = are_equal and random_before == random_after
        return self._replayable[is_eval_mode]

    def losses(self, weights: Tensor, x: Any, y: Any) -> Tensor:
        """The learners' mean losses (n,) in eval mode: learner j's at ``weights[j]`` on (x[j], y[j]).

        The losses equal those of :meth:`gradients`; no gradients are computed.
        """
        self._verify(weights, x, y, None)
        path, model, views = self._path(x), self.problem.model, self.problem.layout.views
        with torch.no_grad():
            if path == "chain":
                return self._chain_losses(weights, x, y)
            if path == "batched":
                return self._losses_of_all(model, views(weights), x, y)
            seeds = self._seeds
            rows = [self._mean_loss(model, views(w), seeds, *take((x, y), j)) for j, w in enumerate(weights)]
            return torch.stack(rows)

    @property
    def _seeds(self) -> Sequence[int | None]:
        """The seeds of random numbers in eval mode for all learners; the loss is a mean over the seeds."""
        return range(self.problem.draws) if self.problem.draws else [None]

    def _mean_loss(
        self, model: nn.Module, values: dict[str, Tensor], seeds: Sequence[int | None], x: Any, y: Any
    ) -> Tensor:
        """The mean of the losses with the random numbers of ``seeds``."""
        losses = []
        for seed in seeds:
            with self.problem.evaluating(seed):
                losses.append(self._loss(model, values, x, y))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _chain_losses(
        self, weights: Tensor, x: Any, y: Any, out: Tensor | None = None, ready: Ready | None = None
    ) -> Tensor:
        """The losses (n,) of a chain; their backward pass writes the gradients to ``out``, if given."""
        assert self.layers is not None
        views = self.problem.layout.views(weights)
        grads = {} if out is None else self.problem.layout.views(out)
        dtype = self._dtype(weights)
        h = x.flatten(2).transpose(1, 2)  # (n, features, B): gradients then have the weights' memory layout
        with self._autocast():
            for layer in self.layers:
                if isinstance(layer, LinearLayer):
                    w, w_grad = views[layer.weight], grads.get(layer.weight)
                    b, b_grad = (views[layer.bias], grads.get(layer.bias)) if layer.bias else (None, None)
                    # Autograd calls the backward pass of the first layer only for an input with gradients.
                    if out is not None and not h.requires_grad:
                        w = w.detach().requires_grad_()
                    names = filter(None, (layer.weight, layer.bias))
                    written = functools.partial(ready or (lambda *_: None), *names)
                    h = StackedLinear.apply(  # type: ignore[no-untyped-call]
                        h.to(dtype), w, b, w_grad, b_grad, written
                    )
                else:
                    h = layer(h)
        return stacked_losses(self.problem.criterion, h.to(weights.dtype), y)

    def _losses_of_all(self, model: nn.Module, values: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        """The losses (n,) of all learners at once, each with its ``values`` and minibatch."""
        return torch.vmap(functools.partial(self._loss, model))(values, x, y)

    def _loss(self, model: nn.Module, values: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        with self._autocast():
            outputs = call(model, values, x)
        if isinstance(outputs, Tensor):
            outputs = outputs.to(next(iter(values.values())).dtype)  # the weights' precision
        return self.problem.criterion(outputs, y)

    def _write_gradients(
        self, leaves: dict[str, Tensor], losses: Tensor, out: Tensor, ready: Ready | None
    ) -> None:
        """Write the gradients of the sum of ``losses`` by ``leaves`` to ``out``."""
        views = self.problem.layout.views(out)
        written: set[str] = set()

        def write(name: str, gradient: Tensor) -> None:
            views[name].copy_(gradient)
            written.add(name)
            if ready:
                ready(name)

        if ready:
            for name, leaf in leaves.items():
                # Autograd calls the hook once, with the sum over all uses of the leaf.
                leaf.register_hook(functools.partial(write, name))  # type: ignore[no-untyped-call]
        parts = gradients(losses.sum(), list(leaves.values()))
        for name, part in zip(leaves, parts, strict=True):
            if name not in written:
                write(name, part)

    def batching_pays(self, weights: Tensor, x: Any, y: Any, training: Training | None) -> bool:
        """Return whether batched computation makes :meth:`gradients` faster for these arguments.

        On the CPU times are measured; on other devices, the number of learners and the size of their
        activations decide. The result is False if the gradients would differ, if each learner needs its own
        pass (dropout, operations that torch.vmap does not know), or if the activations of all learners take
        too many bytes. On the CPU, the limit is MAX_BATCHED_BYTES. On other devices, it is SMALL_BYTES times
        the number of learners, or half of the free memory if that is less.
        """
        count, device = len(weights), weights.device
        on_cpu = device.type == "cpu"
        min_count = 2 if on_cpu else MANY
        # A chain of linear layers has its own, faster path.
        if self.layers is not None or count < min_count or not self.problem.separable:
            return False
        max_bytes = MAX_BATCHED_BYTES if on_cpu else min(count * SMALL_BYTES, available_memory(device) // 2)
        if self._bytes(weights, x, y) > max_bytes:
            return False
        out = torch.empty_like(weights)

        def seconds(batched: bool) -> float:
            options = training
            if training is not None:  # with copies, because gradients() updates the statistics in place
                options = Training({k: t.clone() for k, t in training.buffers.items()}, training.seed)
            self.batched = batched
            began = time.perf_counter()
            self.gradients(weights, x, y, out, options)
            synchronize(weights.device)
            return time.perf_counter() - began

        try:
            # torch.vmap warns about an operation that it cannot batch. On the CPU the measured times tell
            # whether batching still pays; elsewhere the warning becomes an error, and the result False.
            with warnings.catch_warnings(action="ignore" if on_cpu else "error"):
                error = self._relative_error("batched", weights, x, y, training)
                if not error <= ROUNDING[self._dtype(weights)]:  # so that NaN counts as too large
                    return False
                self._verified.add("batched")
                if not on_cpu:
                    return True
                loop_seconds, batched_seconds = [], []
                for _ in range(3):
                    loop_seconds.append(seconds(batched=False))
                    batched_seconds.append(seconds(batched=True))
        except (RuntimeError, UserWarning):  # an operation that torch.vmap does not know or cannot batch
            return False
        finally:
            self.batched = False
        # The first calls warm up and do not count.
        return min(batched_seconds[1:]) < MAX_TIME_SHARE * min(loop_seconds[1:])

    def _bytes(self, weights: Tensor, x: Any, y: Any) -> int:
        """Bytes of the activations of all learners' microbatches, from a pass over two samples."""
        leaves = self.problem.layout.leaves(weights[0])
        _, tensor = next(named_tensors(x))
        batch = tensor.shape[1]
        inputs, targets = take((x, y), (0, slice(2)))

        def loss() -> Tensor:
            with torch.enable_grad():
                return self._loss(self.problem.model, leaves, inputs, targets)

        _, saved_bytes = with_saved_bytes(loss, excluding=leaves.values())
        return len(weights) * batch // self.accumulate * saved_bytes // min(2, batch)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model with the same parameters; tensors that a pass left are copied by value."""
    return copy.deepcopy(model, copies_of_computed_tensors(model) | {id(p): p for p in model.parameters()})
