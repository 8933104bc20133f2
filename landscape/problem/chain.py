"""Networks that are a plain chain of linear layers and element-wise functions, which have faster paths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.problem.losses import is_softmax_loss
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


@dataclass(frozen=True)
class LinearStep:
    """A linear layer of a chain, by the names of its parameters in the layout."""

    weight: str
    bias: str | None


Step = LinearStep | nn.Module


def chain(problem: Problem) -> list[Step] | None:
    """The steps of a model that is Flatten, then Linear layers and element-wise functions; None for others.

    Only an exact ``nn.Sequential`` counts (a subclass may do anything in its forward), without hooks or
    parametrisations. Its linear layers have all parameters of θ and are used once each. Each sample is one
    row of features; without Flatten the inputs have no other dimensions.
    """
    model, tensors = problem.model, problem.data.tensors
    if tensors is None or not problem.separable or type(model) is not nn.Sequential:
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
            biased = module.bias is not None
            steps.append(LinearStep(f"{name}.weight", f"{name}.bias" if biased else None))
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


def stacked_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """(K,) mean losses of K sets of outputs (K, C, B), each with its own targets (K, B, ...).

    The loss receives outputs in the form of the network's, (B, C) and contiguous.
    """
    if is_softmax_loss(loss) and targets.dim() == 2 and targets.dtype == torch.int64:
        return F.cross_entropy(outputs, targets, reduction="none").mean(1)
    return torch.stack([loss(o.T.contiguous(), t) for o, t in zip(outputs, targets, strict=True)])
