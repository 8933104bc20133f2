"""Models that reach their parameters, inputs and outputs in unusual ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import Case, Net, Parts, chain, classes, images, parameter, warmed


def _classes(name: str, model: Callable[[], nn.Module], **expected: Any) -> Case:
    """``model`` of 4 features to 3 classes, with cross-entropy."""
    return Case(name, lambda: (model(), F.cross_entropy, classes()), **expected)


def hooked() -> nn.Module:
    model = chain()
    model.register_forward_hook(lambda module, inputs, out: 10 * out)
    return model


def hooked_inside() -> nn.Module:
    model = Net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    model.a.register_forward_hook(lambda module, inputs, out: out.square())
    return model


def pre_hooked() -> nn.Module:
    model = Net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3 + 1,))
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
    return Net(
        lambda m, x: m.a(x) + sum(p.square().sum() for p in m.parameters()) * x[:, :3], a=nn.Linear(4, 3)
    )


def by_name() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        p = dict(m.named_parameters())
        return F.linear(F.linear(x, p["a.weight"], p["a.bias"]).tanh(), p["b.weight"])

    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3))


def asks_for_a_tensor() -> nn.Module:
    return Net(lambda m, x: m.a(x) if isinstance(x, torch.Tensor) else 2 * m.a(x), a=nn.Linear(4, 3))


def asks_is_tensor() -> nn.Module:
    return Net(lambda m, x: m.a(x).sin() if torch.is_tensor(x) else m.a(x), a=nn.Linear(4, 3))


def asks_for_gradients() -> nn.Module:
    """Another branch where gradients are recorded."""
    return Net(lambda m, x: m.a(x).tanh() if torch.is_grad_enabled() else 3 * m.a(x), a=nn.Linear(4, 3))


def writes_to_input() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x -= 0.5
        return m.a(x)

    return Net(forward, a=nn.Linear(4, 3))


def in_place_first() -> nn.Module:
    return nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def list_of_parameters() -> nn.Module:
    """Registered, and reached through a list."""
    w, v = parameter(4, 5), parameter(5, 3)
    return Net(lambda m, x: (x @ m.all[0]).tanh() @ m.all[1], w=w, v=v, all=[w, v])


def dict_of_parameters() -> nn.Module:
    w, v = parameter(4, 5), parameter(5, 3)
    return Net(lambda m, x: (x @ m.all["w"]).tanh() @ m.all["v"], w=w, v=v, all={"w": w, "v": v})


def lambda_over_a_weight() -> nn.Module:
    """An output layer that is a lambda over the input layer's weight."""
    a = nn.Linear(4, 4)
    return Net(lambda m, x: m.out(m.a(x).tanh())[:, :3], a=a, out=lambda h: F.linear(h, a.weight))


def partial_over_a_weight() -> nn.Module:
    a = nn.Linear(4, 4)
    return Net(
        lambda m, x: m.out(m.a(x).tanh())[:, :3], a=a, out=functools.partial(F.linear, weight=a.weight)
    )


def modules_in_a_plain_list() -> nn.Module:
    layers = [nn.Linear(4, 4), nn.Linear(4, 3)]
    return Net(
        lambda m, x: m.layers[1](m.layers[0](x).tanh()), layers=layers, first=layers[0], second=layers[1]
    )


def parameter_list() -> nn.Module:
    return Net(
        lambda m, x: (x @ m.all[0]).tanh() @ m.all[1],
        all=nn.ParameterList([parameter(4, 5), parameter(5, 3)]),
    )


def parameter_dict() -> nn.Module:
    parts = nn.ParameterDict({"w": parameter(4, 5), "v": parameter(5, 3)})
    return Net(lambda m, x: (x @ m.all["w"]).tanh() @ m.all["v"], all=parts)


def own_parameter_in_sequential() -> nn.Module:
    """A parameter of the container that no layer has."""
    model = chain()
    model.register_parameter("extra", parameter(2, 2))
    return model


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 3)))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def module_list() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x).tanh()
        return m.head(x)

    return Net(forward, layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), head=nn.Linear(4, 3))


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


def frozen_first_layer() -> nn.Module:
    model = chain()
    model[0].requires_grad_(False)
    return model


def buffered() -> nn.Module:
    model = Net(lambda m, x: m.a((x - m.mean) / m.std), a=nn.Linear(4, 3))
    model.register_buffer("mean", torch.randn(4))
    model.register_buffer("std", torch.rand(4) + 0.5)
    return model


def counting() -> nn.Module:
    """Counts its calls in a buffer, which the outputs do not depend on."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.a(x)

    model = Net(forward, a=nn.Linear(4, 3))
    model.register_buffer("calls", torch.zeros(()))
    return model


def remembering() -> nn.Module:
    """A moving average of its inputs, in eval mode, too: two passes differ."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.mean.mul_(0.5).add_(0.5 * (x.mean(0) + 1).to(m.mean))
        return m.a(x - m.mean)

    model = Net(forward, a=nn.Linear(4, 3))
    model.register_buffer("mean", torch.zeros(4))
    return model


def constant_tensor() -> nn.Module:
    """A plain tensor as an attribute, which no ``.to`` moves."""
    return Net(lambda m, x: m.a(x) * m.scale, a=nn.Linear(4, 3), scale=torch.rand(3))


def scalar() -> nn.Module:
    """CLIP's logit_scale: a 0-dim parameter."""
    return Net(
        lambda m, x: m.a(x) * m.logit_scale.exp(),
        a=nn.Linear(4, 3),
        logit_scale=nn.Parameter(torch.tensor(0.7)),
    )


def zero_size() -> nn.Module:
    return Net(lambda m, x: m.a(x) + m.none.sum(), a=nn.Linear(4, 3), none=nn.Parameter(torch.zeros(0, 5)))


def unused_submodule() -> nn.Module:
    return Net(lambda m, x: m.a(x), a=nn.Linear(4, 3), unused=nn.Linear(2, 2))


def unused_convolution() -> Parts:
    model = Net(
        lambda m, x: m.head(m.n(m.c(x)).relu().mean((2, 3))),
        c=nn.Conv2d(2, 3, 3), n=nn.BatchNorm2d(3), head=nn.Linear(3, 3), unused=nn.Conv2d(1, 1, 1),
    )  # fmt: skip
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def compiled() -> nn.Module:
    model = chain()
    model.compile(backend="eager")
    return model


def compiled_wrapper() -> nn.Module:
    return torch.compile(chain(), backend="eager")  # type: ignore[return-value]


def random_in_eval() -> nn.Module:
    return Net(lambda m, x: m.a(F.dropout(x, 0.4, training=True)), a=nn.Linear(4, 3))


def branches_on_values() -> nn.Module:
    return Net(lambda m, x: m.a(x) if float(m.a(x).detach().sum()) > 0 else m.a(x).tanh(), a=nn.Linear(4, 3))


def detached() -> nn.Module:
    """A part through which its author lets no gradient flow: derivatives are those that autograd gives."""
    return Net(lambda m, x: m.b(m.a(x).detach().tanh()), a=nn.Linear(4, 4), b=nn.Linear(4, 3))


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


class Two(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


def _outputs(kind: Callable[[Tensor, Tensor], Any], logits: Callable[[Any], Tensor]) -> Callable[[], Parts]:
    """A model with two outputs in one structure, and a loss of both."""

    def forward(m: Any, x: Tensor) -> Any:
        h = m.a(x).tanh()
        return kind(m.b(h), h)

    def loss(o: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(logits(o), y)

    return lambda: (Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), loss, classes())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.a(left).tanh() * scale + self.b(right)


def tuple_inputs() -> Parts:
    x, y = classes()
    return TwoInputs(), F.cross_entropy, ((x[:, :2].clone(), x), y)


def dict_inputs() -> Parts:
    x, y = classes()
    return TwoInputs(), F.cross_entropy, ({"left": x[:, :2].clone(), "right": x, "scale": 0.5}, y)


def nested_inputs() -> Parts:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, left: Tensor, rest: dict[str, list[Tensor]]) -> Tensor:
            return self.a(torch.cat((left, *rest["parts"]), 1))

    x, y = classes()
    return Nested(), F.cross_entropy, ((x, {"parts": [x[:, :1].clone(), x[:, 1:2].clone()]}), y)


def complex_parameter() -> nn.Module:
    w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    return Net(lambda m, x: (x.to(m.w.dtype) @ m.w).abs(), w=w)


def mixed_precision() -> nn.Module:
    """A float64 layer behind a float32 one."""
    return Net(lambda m, x: m.b(m.a(x).to(m.b.weight.dtype)), a=nn.Linear(4, 4), b=nn.Linear(4, 3).double())


def data_parallel() -> nn.Module:
    return nn.DataParallel(chain())


def hypernetwork() -> nn.Module:
    """A layer whose weights another layer makes."""
    return Net(lambda m, x: torch.einsum("nij,nj->ni", m.h(x).view(-1, 3, 4), x), h=nn.Linear(4, 12))


def implicit() -> nn.Module:
    """A fixed point, iterated."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(5):
            h = (0.5 * m.w(h) + x).tanh()
        return m.head(h)

    return Net(forward, w=nn.Linear(4, 4), head=nn.Linear(4, 3))


CASES = [
    _classes("forward hook", hooked),
    _classes("forward hook inside", hooked_inside),
    _classes("forward pre-hook", pre_hooked),
    Case("forward hook on a convolution with BatchNorm", hooked_convolution),
    _classes("gradient hook on a parameter", backward_hook, plain=without_hooks),
    _classes("self.parameters() in forward", own_parameters),
    _classes("self.named_parameters() in forward", by_name),
    _classes("isinstance(x, Tensor) in forward", asks_for_a_tensor),
    _classes("torch.is_tensor in forward", asks_is_tensor),
    _classes("torch.is_grad_enabled in forward", asks_for_gradients, refused="grad"),
    _classes("writes to its input", writes_to_input),
    _classes("LeakyReLU in place first", in_place_first),
    _classes("list of parameters", list_of_parameters),
    _classes("dict of parameters", dict_of_parameters),
    _classes("lambda over a weight", lambda_over_a_weight, refused="reach|parameters"),
    _classes("partial over a weight", partial_over_a_weight, refused="reach|parameters"),
    _classes("modules in a plain list", modules_in_a_plain_list),
    _classes("ParameterList", parameter_list),
    _classes("ParameterDict", parameter_dict),
    _classes("Sequential with a parameter of its own", own_parameter_in_sequential),
    _classes("Sequential in Sequential", nested),
    _classes("Sequential subclass", lambda: nn.Sequential(Residual(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))),
    _classes("ModuleList", module_list),
    _classes("module used twice", used_twice),
    _classes("weights tied", tied),
    _classes("frozen parameters", frozen),
    _classes("first layer frozen", frozen_first_layer),
    _classes("buffers", buffered),
    _classes("buffer that counts calls", counting),
    _classes("buffer that changes the outputs", remembering, refused="random|differ|two passes"),
    _classes("constant tensor", constant_tensor),
    _classes("0-dim parameter", scalar),
    _classes("zero-size parameter", zero_size),
    _classes("unused submodule", unused_submodule),
    Case("unused convolution", unused_convolution),
    _classes("model.compile()", compiled),
    _classes("torch.compile(model)", compiled_wrapper, plain=lambda m: m._orig_mod),
    _classes("DataParallel", data_parallel, plain=lambda m: m.module),
    _classes("random in eval mode", random_in_eval, refused="random"),
    _classes("branches on values", branches_on_values),
    _classes("detached part", detached),
    _classes("no second derivative", lambda: Net(lambda m, x: Cube.apply(m.a(x)), a=nn.Linear(4, 3)), refused_hessian="second derivative|twice"),
    _classes("complex parameter", complex_parameter, refused="complex"),
    _classes("float64 behind float32", mixed_precision),
    _classes("no trainable parameter", lambda: chain().requires_grad_(False), refused="no trainable"),
    _classes("weights that are NaN", lambda: Net(lambda m, x: m.a(x) / m.b, a=nn.Linear(4, 3), b=nn.Parameter(torch.tensor([float("nan")]))), refused="NaN"),
    _classes("hypernetwork", hypernetwork),
    _classes("fixed point iteration", implicit),
    _classes("Bilinear", lambda: Net(lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(4, 4, 3))),
    _classes("float32 chain", chain, dtype=None),
    _classes("float64 model, float32 data", lambda: chain().double(), dtype=None),
    _classes("bfloat16 chain", lambda: chain().bfloat16(), dtype=None),
    _classes("bfloat16 model, no chain", lambda: Net(lambda m, x: m.a(x).square(), a=nn.Linear(4, 3)).bfloat16(), dtype=None),
    Case("float32 convolution", lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), F.cross_entropy, images()), dtype=None),
    Case("tuple of outputs", _outputs(lambda z, h: (z, h), lambda o: o[0] + o[1].sum(1, keepdim=True) ** 2)),
    Case("dict of outputs", _outputs(lambda z, h: {"z": z, "h": h}, lambda o: o["z"] * o["h"].mean())),
    Case("NamedTuple of outputs", _outputs(Two, lambda o: o.logits * o.hidden.mean())),
    Case("dataclass of outputs", _outputs(Result, lambda o: o.logits * o.hidden.mean())),
    Case("outputs with None", _outputs(lambda z, h: (z, None), lambda o: o[0])),
    Case("tuple of inputs", tuple_inputs),
    Case("dict of inputs", dict_inputs),
    Case("nested inputs", nested_inputs),
]  # fmt: skip
