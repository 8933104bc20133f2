"""A step of one learner around the user's optimizer: gradients, exchange, displacement, mixing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.train.algorithms.base import Rule
from landscape.train.own_loop import recording
from landscape.train.own_loop.flat import DefaultGroup, FlatParameters, OptimizerState
from landscape.train.processes.comm import Comm


class Stepper:
    """Runs an update rule around ``optimizer.step``, by hooks.

    Step t of learner j: at the first forward pass in training mode w_j is copied, the exchanges that do not
    need the gradient start, and the parameters are those at which the rule takes gradients. After
    ``optimizer.step`` the displacement is what the parameters have moved since, whoever moved them; the rule
    makes w_j(t+1) from it, which the parameters then hold.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        rule: Rule,
        group: DefaultGroup,
        average_buffers: bool,
    ) -> None:
        self.parameters, self.rule, self.group = parameters, rule, group
        self.comm, self.state = Comm(group.size, group), OptimizerState(parameters, group)
        self.steps, self.begun = 0, False
        self._average_buffers = average_buffers
        flat = parameters.flat
        #: w_j (1, P) at the start of the step that has begun.
        self.weights = torch.empty_like(flat)
        self._points, self._rate = self.weights, self._rate_of_step()
        self._gradients = Gradients(parameters, self.comm)
        rule.comm = self.comm
        rule.start(flat)
        parameters.optimizer.register_step_pre_hook(self._before)
        parameters.optimizer.register_step_post_hook(self._after)

    @contextlib.contextmanager
    def _plainly(self) -> Iterator[None]:
        """Inside, arithmetic is that of the parameters' precision, and nothing is recorded."""
        with torch.no_grad(), torch.autocast(self.parameters.device.type, enabled=False):
            yield

    def begin(self, in_forward: bool) -> None:
        """Begin the next step, unless it has begun.

        Raises:
            InputError: for parameters that are no longer those that were wrapped; outside a forward pass, for
                a rule that takes gradients elsewhere than at the weights.
        """
        if self.begun:
            return
        if self.group.size == 1 and recording.has_group() and dist.get_world_size() > 1:
            raise InputError(
                "DecentralizedDataParallel: it was made before the process group, and has one learner; call "
                "init_process_group first"
            )
        with self._plainly():
            self.parameters.check()
            step = self.steps + 1
            self.group.step = step
            self.weights.copy_(self.parameters.flat)
            if self.rule.at_mean:  # since the end of the step before
                self.comm.hold_mean(self.weights)
            self.rule.begin(self.weights, step)
            self._points = self.rule.gradient_points(self.weights)
            if self._points.data_ptr() != self.weights.data_ptr():
                if not in_forward:
                    raise InputError(
                        "model: this algorithm takes gradients at older weights, which the parameters hold "
                        "only after a forward pass of the DecentralizedDataParallel itself in training mode"
                    )
                self.parameters.flat.copy_(self._points)
            self.begun = True

    def _before(self, optimizer: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Before the optimizer's step."""
        self.begin(in_forward=False)
        with self._plainly():
            closure = any(callable(given) for given in (*args, *keywords.values()))
            if closure and self.rule.synchronous and self.comm.size > 1:
                raise InputError(
                    "optimizer: step(closure) is not allowed in a synchronous step, whose gradients are "
                    "averaged before it; call backward first, and step() without a closure"
                )
            self._rate = self._rate_of_step()
            self._gradients.prepare(self.rule.synchronous)

    def _rate_of_step(self) -> float:
        """The learning rate for the rule; 1 where only its product with the directions matters."""
        if self.rule.lr_is_factor:
            return 1.0
        rates = {float(group["lr"]) for group in self.parameters.optimizer.param_groups if "lr" in group}
        if len(rates) != 1:
            given = ", ".join(f"{rate:g}" for rate in sorted(rates)) or "none"
            raise InputError(
                f"optimizer: this algorithm needs one learning rate for all parameter groups, they have "
                f"{given}; give all of them the same"
            )
        return rates.pop()

    def _after(self, optimizer: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """After the optimizer's step."""
        step, flat = self.steps + 1, self.parameters.flat
        with self._plainly():
            self._gradients.restore()
            self.parameters.check_memory()
            new = self.rule.finish_moved(self.weights, self._points, flat, self._rate, step)
            if new.data_ptr() != flat.data_ptr():
                flat.copy_(new)
            self.rule.update_optimizer_state(self.state, step)
            if self.rule.at_mean and self.comm.size > 1:
                flat.copy_(self.comm.fresh_mean(flat, "weights"))
            if self._average_buffers:
                average_buffers(self.parameters.module, self.comm)
        self.steps, self.begun = step, False

    def idle(self, what: str) -> None:
        """Raise InputError where ``what`` is called within a step, when the parameters are not w_j."""
        if self.begun:
            raise InputError(
                f"{what}: not allowed between a forward pass in training mode and optimizer.step(); call it "
                "after the step"
            )


def average_buffers(module: nn.Module, comm: Comm) -> None:
    """Replace the floating-point buffers of ``module`` by their mean over the learners, in one exchange."""
    tensors = [b for b in module.buffers() if b.is_floating_point()]
    if not tensors or comm.size == 1:
        return
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    assert comm.group is not None
    flat = torch.cat([t.detach().flatten().to(comm.group.device, dtype) for t in tensors])
    mean = comm.fresh_mean(flat[None], "module buffers")
    for tensor, part in zip(tensors, torch.split(mean, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class Gradients:
    """The gradients of one learner: unscaled, and averaged where the update rule is synchronous.

    A GradScaler calls ``optimizer.step`` of an optimizer that says that it supports scaling even if gradients
    overflowed, and tells it the scale. The optimizer is made to say so: an overflow is then a step without
    gradients, in which this learner exchanges as in any other, instead of a step that it misses.
    """

    def __init__(self, parameters: FlatParameters, comm: Comm) -> None:
        self._parameters, self._comm = parameters, comm
        self._optimizer = parameters.optimizer
        #: Whether its displacement is linear in all gradients: averages may then be taken afterwards.
        self._linear = type(self._optimizer) is torch.optim.SGD
        self._hidden: list[Tensor | None] | None = None
        self._optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def prepare(self, synchronous: bool) -> None:
        """Make the gradients those of the step, before the optimizer uses them."""
        overflow = self._unscale()
        if synchronous and self._comm.size > 1:
            overflow = self._agree(overflow)
        if overflow:
            self._hidden = [p.grad for p in self._parameters.parameters]
            for p in self._parameters.parameters:
                p.grad = None
        elif synchronous and self._comm.size > 1 and not self._linear:
            self._average()

    def restore(self) -> None:
        """Give back the gradients that an overflow took away for the step."""
        if self._hidden is not None:
            for p, grad in zip(self._parameters.parameters, self._hidden, strict=True):
                p.grad = grad
            self._hidden = None

    def _unscale(self) -> bool:
        """Divide by the scale of a GradScaler that called the step; whether it found an overflow."""
        found, scale = (getattr(self._optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found is None:
            return False
        # Only fused optimizers take these; the scaler deletes them after the step.
        self._optimizer.found_inf = self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        if float(found):
            return True
        if scale is not None:
            factor = float(scale.double().reciprocal().float())
            for p in self._parameters.parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)
        return False

    def _agree(self, overflow: bool) -> bool:
        """Whether any process found an overflow; a gradient that only others have becomes zeros here."""
        parameters = self._parameters.parameters
        here = [float(overflow), *(float(p.grad is not None) for p in parameters)]
        found, *counts = self._comm.total(*here)
        if not found:
            for p, count in zip(parameters, counts, strict=True):
                if p.grad is None and count:
                    p.grad = torch.zeros_like(p)
        return bool(found)

    def _average(self) -> None:
        """Replace the gradients by their mean over the learners."""
        flat = self._comm.buffer("own gradients", self._parameters.flat)
        views = self._parameters.layout.views(flat[0])
        for name, p in zip(self._parameters.names, self._parameters.parameters, strict=True):
            if p.grad is None:
                views[name].zero_()
            elif p.grad.layout != torch.strided:
                raise InputError(
                    f"model: the gradient of '{name}' is sparse, which a synchronous step cannot average; "
                    "use sparse=False, torch.optim.SGD, or an algorithm such as dpsgd"
                )
            else:
                views[name].copy_(p.grad)
        mean = self._parameters.layout.views(self._comm.fresh_mean(flat, "gradients"))
        for name, p in zip(self._parameters.names, self._parameters.parameters, strict=True):
            if p.grad is not None:
                p.grad.copy_(mean[name])
