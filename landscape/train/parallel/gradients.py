"""What is done to the gradients between the user's backward pass and the optimizer's step."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.train.distributed.comm import Comm
from landscape.train.parallel.flat import FlatParameters


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
