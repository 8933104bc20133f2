"""Models that reach their parameters, inputs and outputs in unusual ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import Case, Parts, chain, classifier, images, module, net, parameter, warmed


def hooked() -> nn.Module:
    model = chain()
    model.register_forward_hook(lambda module, inputs, out: 10 * out)
    return model


def hooked_convolution() -> Parts:
    c = nn.Conv2d(2, 3, 3)
    c.register_forward_hook(lambda module, inputs, out: out.abs())
    model = nn.Sequential(c, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3))
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def backward_hook() -> nn.Module:
    """A hook that changes gradients, not the function: ∇L is the function's."""
    model = chain()
    model[0].weight.register_hook(lambda grad: 5 * grad)
    return model


def without_hooks(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p._backward_hooks = None
    return model


def own_parameters() -> nn.Module:
    """Weight decay inside forward."""
    return net(
        lambda m, x: m.a(x) + sum(p.square().sum() for p in m.parameters()) * x[:, :3], a=nn.Linear(4, 3)
    )


def asks_for_a_tensor() -> nn.Module:
    return net(lambda m, x: m.a(x) if isinstance(x, torch.Tensor) else 2 * m.a(x), a=nn.Linear(4, 3))


def asks_for_gradients() -> nn.Module:
    """Another branch where gradients are recorded."""
    return net(lambda m, x: m.a(x).tanh() if torch.is_grad_enabled() else 3 * m.a(x), a=nn.Linear(4, 3))


def writes_to_input() -> nn.Module:
    @module(a=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        x -= 0.5
        return m.a(x)

    return model


def in_place_first() -> nn.Module:
    return nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def list_of_parameters() -> nn.Module:
    """Registered, and reached through a list."""
    w, v = parameter(4, 5), parameter(5, 3)
    return net(lambda m, x: (x @ m.all[0]).tanh() @ m.all[1], w=w, v=v, all=[w, v])


def lambda_over_a_weight() -> nn.Module:
    """An output layer that is a lambda over the input layer's weight."""
    a = nn.Linear(4, 4)
    return net(lambda m, x: m.out(m.a(x).tanh())[:, :3], a=a, out=lambda h: F.linear(h, a.weight))


def modules_in_a_plain_list() -> nn.Module:
    layers = [nn.Linear(4, 4), nn.Linear(4, 3)]
    return net(
        lambda m, x: m.layers[1](m.layers[0](x).tanh()), layers=layers, first=layers[0], second=layers[1]
    )


def parameter_list() -> nn.Module:
    return net(
        lambda m, x: (x @ m.all[0]).tanh() @ m.all[1],
        all=nn.ParameterList([parameter(4, 5), parameter(5, 3)]),
    )


def own_parameter_in_sequential() -> nn.Module:
    """A parameter of the container that no layer has."""
    model = chain()
    model.register_parameter("extra", parameter(2, 2))
    return model


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def used_twice() -> nn.Module:
    a = nn.Linear(4, 4)
    return nn.Sequential(a, nn.Tanh(), a, nn.Tanh(), nn.Linear(4, 3))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = chain()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def counting() -> nn.Module:
    """Counts its calls in a buffer, which the outputs do not depend on."""

    @module(a=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.a(x)

    model.register_buffer("calls", torch.zeros(()))
    return model


def remembering() -> nn.Module:
    """A moving average of its inputs, in eval mode, too: two passes differ."""

    @module(a=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        m.mean.mul_(0.5).add_(0.5 * (x.mean(0) + 1).to(m.mean))
        return m.a(x - m.mean)

    model.register_buffer("mean", torch.zeros(4))
    return model


def scalar() -> nn.Module:
    """CLIP's logit_scale: a 0-dim parameter."""
    return net(
        lambda m, x: m.a(x) * m.logit_scale.exp(),
        a=nn.Linear(4, 3),
        logit_scale=nn.Parameter(torch.tensor(0.7)),
    )


def zero_size() -> nn.Module:
    return net(lambda m, x: m.a(x) + m.none.sum(), a=nn.Linear(4, 3), none=nn.Parameter(torch.zeros(0, 5)))


def unused_submodule() -> nn.Module:
    return net(lambda m, x: m.a(x), a=nn.Linear(4, 3), unused=nn.Linear(2, 2))


def compiled_wrapper() -> nn.Module:
    return torch.compile(chain(), backend="eager")  # type: ignore[return-value]


def random_in_eval() -> nn.Module:
    return net(lambda m, x: m.a(F.dropout(x, 0.4, training=True)), a=nn.Linear(4, 3))


def branches_on_values() -> nn.Module:
    return net(lambda m, x: m.a(x) if float(m.a(x).detach().sum()) > 0 else m.a(x).tanh(), a=nn.Linear(4, 3))


class Cube(torch.autograd.Function):
    """x³ with a backward pass that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def data_parallel() -> nn.Module:
    return nn.DataParallel(chain())


CASES = [
    classifier("forward hook", hooked),
    Case("forward hook on a convolution with BatchNorm", hooked_convolution),
    classifier("gradient hook on a parameter", backward_hook, plain=without_hooks),
    classifier("self.parameters() in forward", own_parameters),
    classifier("isinstance(x, Tensor) in forward", asks_for_a_tensor),
    classifier("torch.is_grad_enabled in forward", asks_for_gradients, refused="gradients are recorded"),
    classifier("writes to its input", writes_to_input),
    classifier("LeakyReLU in place first", in_place_first),
    classifier("list of parameters", list_of_parameters, refused="ParameterList"),
    classifier("lambda over a weight", lambda_over_a_weight, dtype=None, refused="from a list, a dict or a function"),
    classifier("modules in a plain list", modules_in_a_plain_list),
    classifier("ParameterList", parameter_list),
    classifier("Sequential with a parameter of its own", own_parameter_in_sequential),
    classifier("Sequential subclass", lambda: nn.Sequential(Residual(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))),
    classifier("module used twice", used_twice),
    classifier("weights tied", tied),
    classifier("frozen parameters", frozen),
    classifier("buffer that counts calls", counting),
    classifier("buffer that changes the outputs", remembering, refused="two passes.*buffer 'mean'"),
    classifier("0-dim parameter", scalar),
    classifier("zero-size parameter", zero_size),
    classifier("unused submodule", unused_submodule),
    classifier("torch.compile(model)", compiled_wrapper, plain=lambda m: m._orig_mod),
    classifier("DataParallel", data_parallel, plain=lambda m: m.module),
    classifier("random in eval mode", random_in_eval, refused="random"),
    classifier("branches on values", branches_on_values, said="all"),
    classifier("no second derivative", lambda: net(lambda m, x: Cube.apply(m.a(x)), a=nn.Linear(4, 3)), refused_hessian="second derivative"),
    classifier("no trainable parameter", lambda: chain().requires_grad_(False), refused="no trainable"),
    classifier("weights that are NaN", lambda: net(lambda m, x: m.a(x) / m.b, a=nn.Linear(4, 3), b=nn.Parameter(torch.tensor([float("nan")]))), refused="NaN"),
    classifier("Bilinear", lambda: net(lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(4, 4, 3))),
]  # fmt: skip
