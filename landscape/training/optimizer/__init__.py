"""Optimizers by name: from each learner's gradient to its direction u_j; the rule steps by −α u_j.

Each learner has a state of its own, a row of (n, P). States are not averaged or exchanged unless the rule
says so. Under SSGD, n states are equivalent to one optimizer on the mean gradient if u is linear in the
gradients, as SGD's u is. u of LARS, LAMB and most of torch's optimizers is not linear: there every learner is
given the mean gradient, so that all states and directions are equal.

The learning rate stays outside the state, as in ``torch.optim.SGD``: a change does not rescale momentum.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from landscape.core.devices import float64_device
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, NonNegative, check_keywords, choose, fit
from landscape.core.registry import optimizers
from landscape.problem.layout import Layout
from landscape.training.optimizer.base import (
    Grouped,
    Member,
    Optimizer,
    group_options,
    naming_group,
    slot_norms,
)

GROUPS = "groups"  # the key of the table of groups


def names() -> list[str]:
    """Return the names that :func:`make` accepts in addition to "torch:CLASS", those of plugins included."""
    return sorted({*optimizers.names(), *short_names()})


def full_name(name: str) -> str:
    """Return the name by which recipes and results know an optimizer: "torch:AdamW" for "adamw" or "AdamW".

    Entries of the registry come first: "sgd" is this package's own.

    Raises:
        InputError: for an unknown name; it suggests the most similar one.
    """
    if is_torch(name) or name in optimizers:
        return name
    short = short_names()
    return short.get(name.lower()) or choose("optimizer.name", name, names())


def options(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Check the options of ``table``, and return them with the default values of all other options.

    Args:
        name: one of :func:`names`, or "torch:CLASS" with a class of ``torch.optim``.
        table: the recipe's table "optimizer" without the key "name". Its key "groups" holds a table for each
            group of parameters, with the options that differ in this group. The key of a group is a role
            ("matrix", "bias", "norm", "embedding" or "head"), a pattern of the parameters' names such as
            "*.weight", or the name of a module such as "encoder.0".

    Returns:
        Option -> value. The table of a group has its "name", its "lr_factor" and all its options; that of a
        frozen group has only "frozen".

    Raises:
        InputError: for an unknown name, or an option that the optimizer does not have.
    """
    without_groups = {key: value for key, value in table.items() if key != GROUPS}
    name = full_name(name)
    check_options = torch_options if is_torch(name) else optimizers.options
    all_options = check_options(name, without_groups)
    groups: dict[str, Any] = {}
    # fit() raises an InputError if the value is no dict.
    for pattern, group in fit("optimizer.groups", table.get(GROUPS, {}), dict).items():
        is_frozen, lr_factor, changes = group_options(pattern, group)
        if is_frozen:
            groups[pattern] = {"frozen": True}
            continue
        with naming_group(pattern):  # InputErrors of this block name the group
            group_name = full_name(str(changes.pop("name", name)))
            # A group with another optimizer does not inherit the options of the recipe's optimizer.
            inherited = without_groups if group_name == name else {}
            group_values = options(group_name, inherited | changes)
        # The options are sorted, because recipes are compared as texts.
        groups[pattern] = {"name": group_name, "lr_factor": lr_factor, **dict(sorted(group_values.items()))}
    if groups:
        all_options = all_options | {GROUPS: groups}
    return all_options


def make(name: str, table: dict[str, Any]) -> Optimizer:
    """Return a new optimizer, whose learners are set by :meth:`.Optimizer.start`.

    Args:
        name: one of :func:`names`, or "torch:CLASS" with a class of ``torch.optim``.
        table: its options; default values replace missing options.

    Raises:
        InputError: for an unknown name, or an option or value that is not allowed; it names the key.
    """
    name, checked = full_name(name), options(name, table)
    groups = checked.pop(GROUPS, {})
    base: Optimizer = TorchOptimizer(name, checked) if is_torch(name) else optimizers[name](**checked)
    members = {}
    for pattern, group in groups.items():
        frozen, factor, settings = group_options(pattern, group)
        with naming_group(pattern):
            members[pattern] = Member(None if frozen else make(str(settings.pop("name")), settings), factor)
    return Grouped(base, members) if members else base


def steepest(norm: str, layout: Layout, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the d with the largest ⟨v, d⟩ in the unit ball of a norm, and this product: v's dual norm.

    Args:
        norm: "max": the largest absolute entry. Then d = sign(v), and the dual norm is Σ|v_i|.
            "spectral": the largest singular value of all parameter tensors. Each tensor counts as a matrix:
            the first dimension gives the rows, and all others, flattened, give the columns. A vector has one
            row. Then d has UVᵀ in place of each matrix USVᵀ of v, and the dual norm is the sum of all
            singular values of v.
            "block": the sum of the parameter tensors' Euclidean norms. Then the dual norm is the largest norm
            of a tensor of v. For this tensor d is v divided by that norm; for all other tensors d is 0.
        layout: the layout of the parameter tensors in a row of ``v``.
        v: (n, P), a vector for each of n learners.

    Returns:
        d (n, P), and the dual norms (n,).

    Example:
        >>> steepest("max", Layout(()), torch.tensor([[3.0, -1.0]]))
        (tensor([[ 1., -1.]]), tensor([4.]))
    """
    if norm == "max":
        return v.sign(), v.abs().sum(1)
    d = torch.zeros_like(v)
    if norm == "block":
        largest, slot_indices = slot_norms(layout, v).max(1)
        for row, slot_index in enumerate(slot_indices.tolist()):
            columns = layout.slots[slot_index].place
            # The clamp makes d 0, and not NaN, if v is 0.
            d[row, columns] = v[row, columns] / largest[row].clamp(min=torch.finfo(v.dtype).tiny)
        return d, largest
    dual = torch.zeros_like(v[:, 0])
    for slot in layout.slots:
        rows = slot.shape[0] if len(slot.shape) > 1 else 1
        matrices = v[:, slot.place].reshape(len(v), rows, -1)
        u, singular, vt = torch.linalg.svd(matrices, full_matrices=False)
        # Singular values at the level of rounding count as 0: their directions are arbitrary.
        rounding = singular[:, :1] * max(matrices.shape[1:]) * torch.finfo(v.dtype).eps
        is_kept = (singular > rounding)[:, None]
        d[:, slot.place] = ((u * is_kept) @ vt).flatten(1)
        dual += singular.sum(1)
    return d, dual


@optimizers.add("steepest")
class Steepest(Optimizer):
    """u = ‖g‖_* d, d of the largest ⟨g, d⟩ in the unit ball of a norm: non-Euclidean gradient descent.

    The step is w − αu = argmin ⟨g, w'⟩ + ‖w' − w‖²/(2α). It is stable approximately if α times the sharpness
    in that norm, the largest dᵀHd of its unit ball, is below 2 (Islamov et al. 2026, arXiv 2603.05002); the
    instrument "generalized-sharpness" measures this sharpness. Without the factor ‖g‖_* all steps have the
    same length.

    Args:
        norm: "max": sign descent, u = ‖g‖₁ sign(g). "spectral": u = UVᵀ of each gradient matrix USVᵀ, times
            the sum of all S; normalized that is Muon without momentum, by singular values in place of its
            iteration. "block": the parameter tensor of the largest gradient takes a plain step, and the
            others rest.
        normalized: Leave out ‖g‖_*. Source: Islamov et al. 2026, whose steps have it.
    """

    linear = False

    def __init__(self, norm: Literal["max", "spectral", "block"], normalized: bool = False) -> None:
        super().__init__()
        self.geometry = self.norm, self.normalized = norm, normalized

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        d, dual = steepest(self.norm, self.layout, gradients)
        return d if self.normalized else d.mul_(dual[:, None])


# Jordan et al. 2024: the steepest quintic at zero that keeps singular values within about 0.7 and 1.2.
QUINTIC = 3.4445, -4.7750, 2.0315


EPSILON = 1e-7  # the smallest divisor of a norm, of the same paper


def check_matrices(name: str, layout: Layout, *, only_two: bool = False) -> None:
    """Raise InputError, with settings that help, if a parameter tensor is not a matrix.

    Args:
        name: the optimizer's name, for the message.
        layout: the layout of its parameters.
        only_two: whether tensors of more than two dimensions, as of convolutions, are refused, too.
    """
    for slot in layout.slots:
        if len(slot.shape) < 2 or (only_two and len(slot.shape) > 2):
            words = f"'{name}' is not allowed, Muon takes matrices, and {slot.name} has shape {slot.shape}"
            groups = "groups: optimizer.name=adamw, optimizer.groups.matrix.name=muon"
            raise InputError(f"optimizer.name: {words}", otherwise=groups)


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Return U f(S) Vᵀ (..., A, B) of matrices U S Vᵀ, f(S) near 1, by Muon's Newton–Schulz iteration."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


@optimizers.add("muon")
class Muon(Optimizer):
    """Muon (Jordan et al. 2024): v ← μ v + (1 − μ) g; w = (1 − μ) g + μ v, or v; u = s NS(w) + λ p.

    w = v is without Nesterov's form. NS is the Newton–Schulz iteration, by which the singular values of each
    matrix become about 1. A tensor of more than two dimensions counts as the matrix of its first dimension
    and all others. The arithmetic is in the weights' precision; Jordan and torch.optim.Muon use bfloat16,
    from which the steps differ by about 1%. Muon accepts only matrices: biases, norms, embeddings and the
    last layer belong in another group.

    Args:
        momentum: μ. Source: Jordan et al. 2024.
        nesterov: Whether to use Nesterov's form. Source: Jordan et al. 2024.
        weight_decay: λ, decoupled. Source: Jordan et al. 2024, who have no weight decay.
        iterations: Newton–Schulz iterations. Source: Jordan et al. 2024.
        scale: s of an A × B matrix: "original", √max(1, A/B); or "match_rms_adamw", 0.2 √max(A, B), with
            which rates and decays of AdamW fit (Liu et al. 2025, arXiv 2502.16982). Source: Jordan et al.
            2024.
    """

    names = ("momentum",)
    linear = False
    needs: Mapping[str, str] = {"nesterov": "momentum > 0"}

    def __init__(
        self,
        momentum: BelowOne = 0.95,
        nesterov: bool = True,
        weight_decay: NonNegative = 0.0,
        iterations: Count = 5,
        scale: Literal["original", "match_rms_adamw"] = "original",
    ) -> None:
        super().__init__()
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.iterations, self.scale = iterations, scale

    def start(self, layout: Layout, weights: Tensor) -> None:
        check_matrices("muon", layout)
        super().start(layout, weights)

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        v = self.state["momentum"].lerp(gradients, 1 - self.momentum)
        self.state = {"momentum": v}
        update = gradients.lerp(v, self.momentum) if self.nesterov else v
        u = torch.mul(points, self.weight_decay)
        for slot in self.layout.slots:
            rows, columns = slot.shape[0], slot.size // slot.shape[0]
            matched = 0.2 * math.sqrt(max(rows, columns))
            s = math.sqrt(max(1, rows / columns)) if self.scale == "original" else matched
            matrices = update[:, slot.place].reshape(-1, rows, columns)
            u[:, slot.place].add_(orthogonalized(matrices, self.iterations).flatten(1), alpha=s)
        return u


PREFIX = "torch:"
SET = "params", "lr"  # the arguments of a class of torch.optim that are no options


#: The name in a checkpoint of the number of steps since the state was new, (n, 1): if it is 0 the other
#: tensors are not used, and torch makes its state itself.
UPDATES = "updates"


# These treat each weight by itself, so that a learner's weights can be one parameter tensor: a step of many
# small tensors takes the time of the calls.
ELEMENTWISE = {
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip


def is_torch(name: str) -> bool:
    """Return whether ``name`` names a class of ``torch.optim``: "torch:CLASS"."""
    return name.startswith(PREFIX)


@functools.cache
def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    named = ((name, kind) for name, kind in vars(torch.optim).items() if inspect.isclass(kind))
    base = torch.optim.Optimizer
    return {f"{PREFIX}{name}": kind for name, kind in named if issubclass(kind, base) and kind is not base}


def short_names() -> dict[str, str]:
    """Return the name of each class in lower case -> "torch:CLASS"."""
    return {name.removeprefix(PREFIX).lower(): name for name in _classes()}


def torch_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` checked against the signature of the class, with the defaults that TOML can hold.

    Raises:
        InputError: for an unknown class or option, or for ``lr``, which the schedule determines.
    """
    kind = _classes()[choose("optimizer.name", name, _classes())]
    if "lr" in options:
        raise InputError("optimizer.lr: not allowed, the recipe's keys lr and schedule give it")
    parameters = inspect.signature(kind).parameters
    defaults = {key: p.default for key, p in parameters.items() if key not in SET and p.default is not None}
    # Defaults are checked as well: a 0 where the class takes a float becomes 0.0, as in a user's options.
    values = check_keywords("optimizer", defaults | options, kind, given=SET)
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, tuple) and None in v)}


def torch_preconditioned(
    kind: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> tuple[float, str, float] | None:
    """Return (m, form, c) of a class with these options, as of :attr:`.Optimizer.preconditioned`."""
    if values.get("maximize"):
        return None
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return values["betas"][0], "ordinary", 1 - values["betas"][0]
    return (values["momentum"], "ordinary", 1.0) if kind is torch.optim.RMSprop else None


def torch_preconditioner(
    kind: type[torch.optim.Optimizer], values: Mapping[str, Any], state: Mapping[str, Tensor], updates: Tensor
) -> Tensor:
    """Return the diagonal (n, P) of the preconditioner; see :meth:`.Optimizer.preconditioner`.

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
    """A class of ``torch.optim``, with a separate state for each learner.

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
        self.preconditioned = torch_preconditioned(self.kind, values)
        if inspect.signature(self.kind.step).parameters["closure"].default is inspect.Parameter.empty:
            raise InputError(f"optimizer.name: '{name}' is not allowed, it needs a closure")
        trial = self._build([nn.Parameter(torch.zeros(2, 2))])
        state = next(iter(self._step_of(trial).values()), {})
        self.counters = frozenset({UPDATES, *(key for key, value in state.items() if value.dim() == 0)})
        self.names = tuple(key for key in state if key not in self.counters)

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor:
        return torch_preconditioner(self.kind, self.values, self.state, self.state[UPDATES]).to(points)

    def _build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        with self._refusing():
            # The rate is set before each step; the first one is torch's own for AdamW.
            return self.kind(parameters, lr=1e-3, **self.values)  # type: ignore[call-arg]

    def _step_of(self, optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Tensor]]:
        """Return the state by parameter after a step with zero gradients, for its names and shapes."""
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        with self._refusing():
            optimizer.step()
        for state in optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    words = f"its state '{key}' is a {type(value).__name__}, and no checkpoint can have it"
                    raise InputError(f"optimizer.name: '{self.name}' is not allowed, {words}")
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
        updates = torch.zeros(len(weights), 1, dtype=torch.float64, device=float64_device(weights.device))
        self.state = {UPDATES: updates}
        for key, shapes in self._shapes.items():
            width = sum(shape.numel() for shape in shapes.values())
            self.state[key] = weights.new_zeros(len(weights), width, dtype=dtypes[key])

    def _tensors(self, rows: Tensor) -> list[Tensor]:
        """Split ``rows`` (n, P) into the tensors that the class steps, one learner after the other."""
        if self.kind in ELEMENTWISE:
            return [*rows]
        return [t for row in rows for t in self.layout.views(row).values()]

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        """Return u = (p − p')/``lr`` (n, P): PyTorch's optimizer steps from ``points`` p to p'.

        ``step`` is not used, because PyTorch's optimizer counts its own steps.
        """
        state = {key: tensor.clone() for key, tensor in self.state.items()}
        has_state = bool(state[UPDATES].any())  # UPDATES: the number of steps since the state was new
        if not has_state:  # a new optimizer of PyTorch's makes its own initial state in its first step
            self._optimizer = self._build(self._parameters)
        optimizer = self._optimizer
        self._copies.copy_(points)  # the parameters are views of these copies
        optimizer.param_groups[0]["lr"] = lr
        # For each parameter: the name of a tensor of its state -> the view of ``state`` with this tensor.
        views: list[dict[str, Tensor]] = [{} for _ in self._parameters]
        parameters_per_learner = len(self._parameters) // len(points)
        for key, shapes in self._shapes.items():  # shapes: index of a parameter -> shape of its tensor
            for j, row in enumerate(state[key]):  # learner j's tensors, one after the other
                parts = row.split([shape.numel() for shape in shapes.values()])
                for (index, shape), part in zip(shapes.items(), parts, strict=True):
                    views[j * parameters_per_learner + index][key] = part.view(shape)
        for parameter, gradient, view in zip(self._parameters, self._tensors(gradients), views, strict=True):
            parameter.grad = gradient
            if has_state:
                optimizer.state[parameter] = dict(view)  # a copy: step() may replace its tensors
        optimizer.step()
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = None
            for key, tensor in view.items():
                tensor.copy_(optimizer.state[parameter][key])  # no effect where step() wrote into the view
        state[UPDATES] += 1
        self.state = state
        if not lr:  # the weights do not move, and the quotient below is not defined
            return torch.zeros_like(points)
        return torch.sub(points, self._copies).div_(lr)
