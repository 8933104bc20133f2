"""Any class of ``torch.optim`` as an optimizer: "torch:AdamW" or "adamw", with the class's own options."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from landscape.core.devices import float64_device
from landscape.core.errors import InputError
from landscape.core.options import check_keywords, choose
from landscape.problem.layout import Layout
from landscape.training.optimizer.base import Optimizer
from landscape.training.optimizer.steepest import check_matrices

PREFIX = "torch:"
#: The name in a checkpoint of the number of steps since the state was new, (n, 1): while it is 0 the other
#: tensors are not used, and torch makes its state itself.
UPDATES = "updates"
# These treat each weight by itself, so that all weights of a learner are one parameter tensor to them: a step
# of many small ones takes as long as the calls do.
ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip


def is_torch(name: str) -> bool:
    """Say whether ``name`` names a class of ``torch.optim``: "torch:CLASS"."""
    return name.startswith(PREFIX)


@functools.cache
def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    named = ((name, kind) for name, kind in vars(torch.optim).items() if inspect.isclass(kind))
    base = torch.optim.Optimizer
    return {f"{PREFIX}{name}": kind for name, kind in named if issubclass(kind, base) and kind is not base}


def short_names() -> dict[str, str]:
    """The name of each class in lower case -> "torch:CLASS"."""
    return {name.removeprefix(PREFIX).lower(): name for name in _classes()}


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the signature of the class, with the defaults that TOML can hold.

    Raises:
        InputError: for an unknown class or option; ``lr`` is not one, as the schedule gives it.
    """
    kind = _classes()[choose("optimizer.name", name, _classes())]
    if "lr" in given:
        raise InputError("optimizer.lr: not allowed, the recipe's keys lr and schedule give it")
    hints = typing.get_type_hints(kind.__init__)
    checked = check_keywords("optimizer", given, kind, given=("params", "lr"))
    values = {key: _as_float(value, hints.get(key)) for key, value in checked.items()}
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, tuple) and None in v)}


def _as_float(value: Any, annotation: Any) -> Any:
    """``value``, a float where the class takes one, so that 0 and 0.0 are one recipe; a tuple for a list."""
    if isinstance(value, (list, tuple)):
        inner = typing.get_args(annotation) or (None,) * len(value)
        return tuple(_as_float(v, a) for v, a in zip(value, inner, strict=False))
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return float(value) if type(value) is int and float in kinds else value


def preconditioned(
    kind: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> tuple[float, str, float] | None:
    """(m, form, c) of a class with these options, as of :attr:`.Optimizer.preconditioned`."""
    if values.get("maximize"):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return values["betas"][0], "ordinary", 1 - values["betas"][0]
    return (values["momentum"], "ordinary", 1.0) if kind is torch.optim.RMSprop else None


def preconditioner(
    kind: type[torch.optim.Optimizer], values: Mapping[str, Any], state: Mapping[str, Tensor], updates: Tensor
) -> Tensor:
    """The diagonal of P (n, P) of a class that has one, as of :meth:`.Optimizer.preconditioner`.

    Args:
        kind, values: the class and its options.
        state: name -> (n, P), as torch names it.
        updates: the steps since the state was new, which the corrections of bias count; (n, 1) or (n, P).
    """
    if kind is torch.optim.RMSprop:
        square = state["square_avg"] - (state["grad_avg"].square() if values["centered"] else 0)
        return torch.sqrt(square.clamp_(min=0)).add_(values["eps"])
    beta1, beta2 = values["betas"]
    second = state["max_exp_avg_sq" if values["amsgrad"] else "exp_avg_sq"]
    root = (second.to(updates.device) / (1 - beta2**updates)).sqrt_().add_(values["eps"])
    return torch.mul(root, 1 - beta1**updates)


class TorchOptimizer(Optimizer):
    """A class of ``torch.optim``, each learner with a state of its own.

    The class steps copies of the points at which gradients were taken, p → p', with the step's learning rate
    α; the direction is u = (p − p')/α. Its state is in checkpoints as torch names it: a row per learner, with
    the parameter tensors one after the other. A state of one number, such as ``step``, is one for all of
    them with a class of ELEMENTWISE, and a row of such numbers with another.

    Args:
        name: "torch:CLASS".
        values: keyword arguments of the class.

    Raises:
        InputError: for values that the class refuses; for a class that needs a closure or sparse gradients,
            or whose state is no tensor.
    """

    needs: Mapping[str, str] = {"dampening": "momentum > 0", "decoupled_weight_decay": "weight_decay > 0"}

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.values = name, values
        self.kind = _classes()[name]
        self.linear = self.kind is torch.optim.SGD
        if self.linear and not values["dampening"] and not values["maximize"]:
            self.heavy_ball = values["momentum"], "nesterov" if values["nesterov"] else "ordinary"
        self.preconditioned = preconditioned(self.kind, values)
        if inspect.signature(self.kind.step).parameters["closure"].default is inspect.Parameter.empty:
            raise InputError(f"optimizer.name: '{name}' is not allowed, it needs a closure")
        trial = self._build([nn.Parameter(torch.zeros(2, 2))])
        state = next(iter(self._step_of(trial).values()), {})
        self.counters = frozenset({UPDATES, *(key for key, value in state.items() if value.dim() == 0)})
        self.names = tuple(key for key in state if key not in self.counters)

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor:
        return preconditioner(self.kind, self.values, self.state, self.state[UPDATES]).to(points)

    def _build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        with self._refusing():
            # The rate is set before each step; the first one is torch's own for AdamW.
            return self.kind(parameters, lr=1e-3, **self.values)  # type: ignore[call-arg]

    def _step_of(self, optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Tensor]]:
        """The state by parameter, after a step with gradients of zero; only its names and shapes are used."""
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        with self._refusing():
            optimizer.step()
        for state in optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    reason = f"its state '{key}' is a {type(value).__name__}, and no checkpoint can hold it"
                    raise InputError(f"optimizer.name: '{self.name}' is not allowed, {reason}")
        return dict(optimizer.state)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what the class refuses inside into an InputError with its reason."""
        try:
            yield
        except (ValueError, TypeError, RuntimeError, AssertionError) as error:
            words = f"with this model and options ({' '.join(str(error).split())[:160]})"
            raise InputError(f"optimizer: '{self.name}' is not allowed {words}") from error

    def start(self, layout: Layout, weights: Tensor) -> None:
        if self.name == f"{PREFIX}Muon":
            check_matrices(self.name, layout, only_two=True)
        self.layout = layout
        self._copies = torch.zeros_like(weights)
        self._parameters = [nn.Parameter(t, requires_grad=False) for t in self._tensors(self._copies)]
        self._optimizer = self._build(self._parameters)
        trial = [nn.Parameter(torch.zeros_like(t)) for t in self._tensors(self._copies[:1])]
        #: Of each name the parameter tensors that have one, by number, and its shape there.
        self._shapes: dict[str, dict[int, torch.Size]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for slot, state in enumerate(self._step_of(self._build(trial)).values()):
            for key, value in state.items():
                self._shapes.setdefault(key, {})[slot] = value.shape
                dtypes[key] = value.dtype
        place = float64_device(weights.device)
        self.state = {UPDATES: torch.zeros(len(weights), 1, dtype=torch.float64, device=place)}
        for key, shapes in self._shapes.items():
            width = sum(shape.numel() for shape in shapes.values())
            self.state[key] = weights.new_zeros(len(weights), width, dtype=dtypes[key])

    def _tensors(self, rows: Tensor) -> list[Tensor]:
        """Split ``rows`` (n, P) into the tensors that the class steps, one learner after the other."""
        whole = self.kind in ELEMENTWISE
        return [t for row in rows for t in ([row] if whole else self.layout.views(row).values())]

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        state = {key: tensor.clone() for key, tensor in self.state.items()}
        started, slots = bool(state[UPDATES].any()), len(self._parameters) // len(points)
        if not started:  # its state is the one that the class begins with
            self._optimizer = self._build(self._parameters)
        optimizer = self._optimizer
        self._copies.copy_(points)
        optimizer.param_groups[0]["lr"] = lr
        views: list[dict[str, Tensor]] = [{} for _ in self._parameters]
        for key, shapes in self._shapes.items():
            for j, row in enumerate(state[key]):
                parts = row.split([shape.numel() for shape in shapes.values()])
                for (slot, shape), part in zip(shapes.items(), parts, strict=True):
                    views[j * slots + slot][key] = part.view(shape)
        for parameter, gradient, view in zip(self._parameters, self._tensors(gradients), views, strict=True):
            parameter.grad = gradient
            if started:
                optimizer.state[parameter] = dict(view)
        optimizer.step()
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = None
            for key, tensor in view.items():
                tensor.copy_(optimizer.state[parameter][key])  # nothing where it is the same tensor
        state[UPDATES] += 1
        self.state = state
        if not lr:  # the step is none, whatever its direction
            return torch.zeros_like(points)
        return torch.sub(points, self._copies).div_(lr)
