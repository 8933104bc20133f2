"""A step of one learner around the user's optimizer, and checkpoints of all learners, as the trainer's."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import RECORDED, Checkpoint, check_fit, storable
from landscape.checkpoint.history import UNITS
from landscape.core import files
from landscape.core.devices import double, inner
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import ends_in, toml_text
from landscape.problem.layout import Layout, unwrapped
from landscape.training import own_loop as loop
from landscape.training.algorithms import Rule
from landscape.training.own_loop import DefaultGroup, Tracked, kind_and_place, precision, refusal
from landscape.training.processes.comm import Comm


class Stepper:
    """Runs an update rule around ``optimizer.step``, by hooks.

    Step t of learner j begins at the first forward pass in training mode. w_j is copied, the exchanges that
    do not need the gradient start, and the parameters are set to the points where the rule takes gradients.
    After ``optimizer.step`` the displacement is the difference of the parameters from these points. The rule
    computes w_j(t+1) from the displacement, and the parameters are set to w_j(t+1).

    Attributes:
        steps: the number of completed steps.
        begun: whether a step has begun and is not complete.
        weights: w_j (1, P) at the start of the step that has begun.
    """

    def __init__(
        self, parameters: FlatParameters, rule: Rule, group: DefaultGroup, average_buffers: bool
    ) -> None:
        self.parameters, self.rule, self.group = parameters, rule, group
        self.comm = Comm(group.size, group)
        self.state = OptimizerState(parameters, group)
        self.steps, self.begun = 0, False
        self._average_buffers = average_buffers
        flat = parameters.flat
        self.weights = torch.empty_like(flat)
        self._points = self.weights
        self._rate = self._rate_of_step()
        self._gradients = LearnerGradients(parameters, self.comm)
        rule.comm, rule.layout = self.comm, parameters.layout
        rule.start(flat)
        parameters.optimizer.register_step_pre_hook(self._before_optimizer)
        parameters.optimizer.register_step_post_hook(self._after_optimizer)

    @contextlib.contextmanager
    def _without_grad_and_autocast(self) -> Iterator[None]:
        """Compute in the parameters' precision, and without gradients, inside the block."""
        with torch.no_grad(), torch.autocast(self.parameters.device.type, enabled=False):
            yield

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, in_forward: bool) -> None:
        """Begin the next step, unless it has already begun.

        Args:
            in_forward: whether a forward pass begins the step. If not, the gradients are already computed.

        Raises:
            InputError: the model's parameters are not those that were wrapped; the model was wrapped before
                the process group was made; or no forward pass begins the step, although the rule takes
                gradients at other points than the present weights, such as older weights.
        """
        if self.begun:
            return
        # The group has size 1 if torch.distributed had no process group when the wrapper was made.
        if self.group.size == 1 and loop.has_group() and dist.get_world_size() > 1:
            raise InputError("model: it was made before the process group; call init_process_group first")
        with self._without_grad_and_autocast():
            self.parameters.check()
            step = self.steps + 1
            self.group.step = step
            self.weights.copy_(self.parameters.flat)
            if self.rule.at_mean:
                # Since the end of the last step all learners have the same weights. They are stored as the
                # mean, without an exchange.
                self.comm.set_mean(self.weights)
            self.rule.begin(self.weights, step)
            self._points = self.rule.gradient_points(self.weights)
            # gradient_points() returns ``weights`` itself or other points, such as older weights.
            if self._points.data_ptr() != self.weights.data_ptr():
                if not in_forward:
                    remedy = "call the wrapper itself, in training mode, before each step"
                    raise InputError(f"model: this algorithm takes gradients at older weights; {remedy}")
                self.parameters.flat.copy_(self._points)
            self.begun = True

    def _before_optimizer(self, optimizer: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Begin the step, unless it has begun, and prepare the gradients for the optimizer."""
        self.begin(in_forward=False)
        with self._without_grad_and_autocast():
            closure = any(callable(argument) for argument in (*args, *keywords.values()))
            if closure and self.rule.synchronous and self.comm.size > 1:
                raise InputError("optimizer: step(closure) is not allowed in a synchronous step; use step()")
            self._rate = self._rate_of_step()
            self._gradients.prepare(self.rule.synchronous)

    def _rate_of_step(self) -> float:
        """Return the learning rate for the rule; 1 if the rule needs only its product with the directions."""
        if self.rule.lr_is_factor:
            return 1.0
        rate = loop.learning_rate(self.parameters.optimizer)
        if math.isnan(rate):
            raise InputError("optimizer: this algorithm needs one learning rate for all parameter groups")
        return rate

    def _after_optimizer(self, optimizer: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Complete the step after the optimizer's step."""
        step, flat = self.steps + 1, self.parameters.flat
        with self._without_grad_and_autocast():
            self._gradients.restore()
            self.parameters.check_memory()
            new = self.rule.finish_moved(self.weights, self._points, flat, self._rate, step)
            if new.data_ptr() != flat.data_ptr():  # the rule may write w_j(t+1) in place
                flat.copy_(new)
            self.rule.update_optimizer_state(self.state, step)
            if self.rule.at_mean and self.comm.size > 1:
                self.comm.fresh_mean(flat, out=flat[0])
            if self._average_buffers:
                average_buffers(self.parameters.module, self.comm)
        self.steps, self.begun = step, False

    def check_between_steps(self, method: str) -> None:
        """Raise InputError if ``method`` is called within a step, when the parameters are not w_j."""
        if self.begun:
            raise InputError(f"{method}: not allowed between a forward pass and optimizer.step()")


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


class LearnerGradients:
    """The gradients of one learner, unscaled, and averaged in synchronous steps.

    After an overflow a GradScaler skips ``optimizer.step``, unless the optimizer declares that it supports
    scaling; then the scaler calls the step and sets the scale as an attribute. This class makes the optimizer
    declare the support, so that a step with an overflow is not skipped: it has no gradients, and the learner
    exchanges weights as in any other step.
    """

    def __init__(self, parameters: FlatParameters, comm: Comm) -> None:
        self._parameters, self._comm = parameters, comm
        self._optimizer = parameters.optimizer
        #: Whether the displacement is linear in the gradients: the weights may then be averaged afterwards.
        self._linear = type(self._optimizer) is torch.optim.SGD
        self._hidden: list[Tensor | None] | None = None
        self._optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def prepare(self, synchronous: bool) -> None:
        """Unscale the gradients, average them if ``synchronous``, and hide them after an overflow."""
        overflow = self._unscale()
        if synchronous and self._comm.size > 1:
            overflow = self._agree(overflow)
        if overflow:
            self._hidden = [p.grad for p in self._parameters.trained.values()]
            for p in self._parameters.trained.values():
                p.grad = None
        elif synchronous and self._comm.size > 1 and not self._linear:
            self._average()

    def restore(self) -> None:
        """Restore the gradients that were hidden for a step with overflow."""
        if self._hidden is not None:
            for p, grad in zip(self._parameters.trained.values(), self._hidden, strict=True):
                p.grad = grad
            self._hidden = None

    def _unscale(self) -> bool:
        """Divide by the scale of a GradScaler that called the step; return whether there was an overflow."""
        overflow = getattr(self._optimizer, "found_inf", None)
        scale = getattr(self._optimizer, "grad_scale", None)
        if overflow is None:
            return False
        # Only fused optimizers use these attributes; the scaler deletes them after the step.
        self._optimizer.found_inf = self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        if float(overflow):
            return True
        if scale is not None:
            factor = float(double(scale).reciprocal().float())
            for p in self._parameters.trained.values():
                if p.grad is not None:
                    p.grad.mul_(factor)
        return False

    def _agree(self, overflow: bool) -> bool:
        """Return whether any process had an overflow; gradients that only others have become zeros."""
        parameters = [*self._parameters.trained.values()]
        overflows, *counts = self._comm.total(overflow, *(p.grad is not None for p in parameters))
        if not overflows:
            for p, count in zip(parameters, counts, strict=True):
                if p.grad is None and count:
                    p.grad = torch.zeros_like(p)
        return bool(overflows)

    def _average(self) -> None:
        """Replace the gradients by their mean over the learners."""
        flat = self._comm.buffer("own gradients", self._parameters.flat)
        views = self._parameters.layout.views(flat[0])
        for name, p in self._parameters.trained.items():
            if p.grad is None:
                views[name].zero_()
            elif p.grad.layout != torch.strided:
                remedy = "use sparse=False, torch.optim.SGD or algorithm dpsgd"
                raise refusal(name, "has a sparse gradient, which a synchronous step cannot average", remedy)
            else:
                views[name].copy_(p.grad)
        mean = self._parameters.layout.views(self._comm.fresh_mean(flat, "gradients"))
        for name, p in self._parameters.trained.items():
            if p.grad is not None:
                p.grad.copy_(mean[name])


def save(stepper: Stepper, path: Path, algorithm: Mapping[str, Any], seed: int) -> None:
    """Write a checkpoint of all learners to ``path``; rank 0 collects the learners' tensors for the file.

    Args:
        algorithm: the name of the rule and its options.
        seed: the seed of the rule's random draws.

    Raises:
        OperationError: on every rank, if rank 0 cannot write to ``path``.
    """
    parameters, comm, rule = stepper.parameters, stepper.comm, stepper.rule
    with stepper.group.raising_on_all_ranks():
        if comm.rank == 0:  # these checks come before the other ranks begin to send
            ends_in("path", path, [".h5"])
            files.make_folder(path.parent)
            if path.is_dir():
                raise OperationError(f"{path}: is a folder, a file is needed")
    momentum_and_form = loop.heavy_ball(parameters.optimizer)
    limit = rule.stability_limit(*momentum_and_form) if momentum_and_form else None
    settings = {
        "name": path.resolve().parent.name,
        "seed": seed,
        "algorithm": algorithm,
        "optimizer": loop.optimizer_table(parameters.optimizer),
        "monitor": {} if limit is None else {"stability_limit": limit},
    }
    checkpoint = Checkpoint(
        weights=storable(parameters.flat),
        layout=parameters.layout,
        step=stepper.steps,
        algorithm=RECORDED,  # a user's own loop made the run; the rule is in ``settings``
        recipe=toml_text(settings),
        model={"name": loop.class_path(unwrapped(parameters.module)), "options": {}},
        lr=loop.learning_rate(parameters.optimizer),
        seed=seed,
        history=_history(stepper),
        # Buffers may be on other devices than the parameters. Rank 0 receives all tensors on one device.
        buffers={name: t.to(parameters.device) for name, t in parameters.untrained_rows().items()},
        optimizer=stepper.state.rows(),
        rule={name: storable(t) for name, t in rule.state.items()},
        shared={name: storable(t) for name, t in rule.shared.items()},
    )
    with stepper.group.raising_on_all_ranks():  # no rank continues before the file is there
        if comm.rank > 0:
            for tensor in checkpoint.stacked().values():
                comm.send_rows(tensor)
        else:  # Checkpoint.save() receives all tensors even if the disk is full, so that no other rank waits
            checkpoint.save(path, comm.learners, comm.rows)


def _history(stepper: Stepper) -> dict[str, Array]:
    """Return a history of learning rate and spread in two rows: the start, with equal learners, and now."""
    flat, comm = stepper.parameters.flat, stepper.comm
    spread = (flat - comm.fresh_mean(flat, "weights")).flatten()
    values = {
        "step": float(stepper.steps),
        "consensus": comm.total(float(inner(spread, spread)))[0] / comm.learners,
        "lr": loop.learning_rate(stepper.parameters.optimizer),
    }
    start = [{"step": 0.0, "consensus": 0.0}] if stepper.steps else []
    rows = [*start, values]
    return {column: np.array([row.get(column, math.nan) for row in rows]) for column in UNITS}


def load(stepper: Stepper, path: Path, algorithm: Mapping[str, Any]) -> None:
    """Restore weights, buffers, and the states of optimizer and rule from a file of :func:`save`.

    Args:
        algorithm: the name of the rule and its options, which must be those of the file.

    Raises:
        OperationError: the file cannot be read, was not written by :func:`save`, or does not fit the model.
        InputError: the file has another algorithm, optimizer or number of learners.
    """
    comm, parameters, rule = stepper.comm, stepper.parameters, stepper.rule
    file_learners = 0

    def own_learner(learners: int) -> slice:
        """Note the number of learners in the file, and return the learner of this process."""
        nonlocal file_learners
        file_learners = learners
        return comm.local

    checkpoint = Checkpoint.load(path, own_learner)
    settings = loop.read_settings(checkpoint)
    # save() writes the name RECORDED in place of the rule's name, which is in ``settings``.
    if checkpoint.algorithm != RECORDED or "algorithm" not in settings:
        raise OperationError(f"{path}: was not written by save_checkpoint; give a file that it wrote")
    if file_learners != comm.learners:
        words = f"has {file_learners} learners, not {comm.learners}; start {file_learners} processes"
        raise InputError(f"{path}: {words}")
    file_rule = settings["algorithm"]  # name and options of the rule, as in ``algorithm``
    for key in {**file_rule, **algorithm}:  # the keys of the file and the keys of ``algorithm``
        file_value, value = file_rule.get(key), algorithm.get(key)
        if value != file_value:
            raise InputError(f"algorithm.{key}: {value!r} is not allowed, {path} has {file_value!r}")
    file_optimizer = settings.get("optimizer", {}).get("name")
    optimizer = type(parameters.optimizer).__name__
    if optimizer != file_optimizer:
        raise InputError(f"optimizer: {optimizer} is not allowed, {path} has the state of {file_optimizer}")
    check_fit(path, checkpoint.layout, parameters.layout)
    untrained = parameters.untrained(saved=True)  # frozen parameters and buffers
    if checkpoint.buffers.keys() != untrained.keys():
        name = min(checkpoint.buffers.keys() ^ untrained.keys())  # a name that only file or model has
        raise OperationError(f"{path}: buffer '{name}' is not in both the file and the model")
    rule.restore(checkpoint.rule, checkpoint.shared)
    stepper.state.restore(checkpoint.optimizer)
    parameters.flat.copy_(checkpoint.weights)
    for name, tensor in untrained.items():
        tensor.copy_(checkpoint.buffers[name][0])  # row 0: only the learner of this process was read
    stepper.steps = checkpoint.step


class FlatParameters(Tracked):
    """The trainable parameters of ``module`` as views of ``flat`` (1, P), in the order of ``layout``.

    The Parameter objects stay the module's and the optimizer's; only the memory of each is replaced. A tied
    parameter appears once.

    Args:
        module: the user's module.
        optimizer: the module's optimizer, which must have all trainable parameters and no others.

    Attributes:
        trained: name -> trainable parameter.
        views: the parameters as parts of ``flat``, in the order of ``trained``.

    Raises:
        InputError: for parameters that cannot lie in one piece of memory, or are not the optimizer's.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        slots = [replace(slot, name=loop.unwrapped_name(slot.name)) for slot in Layout.of(module).slots]
        super().__init__(module, Layout(tuple(slots)), loop.unwrapped_name)
        self.optimizer = optimizer
        self._parameters = self.named()  # at the last check, frozen ones included
        self.trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._optimizer_ids = self._ids()
        self._check_parameters()
        self._check_optimizer()
        parameter = next(iter(self.trained.values()))
        self.device = parameter.device
        self.flat = torch.empty(1, self.layout.size, dtype=parameter.dtype, device=parameter.device)
        self.views = [*self.layout.views(self.flat[0]).values()]
        for p, view in zip(self.trained.values(), self.views, strict=True):
            view.copy_(p.detach())
            p.data = view

    def _ids(self) -> list[int]:
        """Return the identities of the optimizer's parameters."""
        return [id(p) for group in self.optimizer.param_groups for p in group["params"]]

    def _check_parameters(self) -> None:
        if not self.trained:
            raise InputError("model: it has no trainable parameter, at least one is needed")
        first_name, first_parameter = next(iter(self.trained.items()))
        first_kind = kind_and_place(first_parameter)
        owners: dict[int, str] = {}  # address of the memory -> name
        for name, p in self.trained.items():
            kind = kind_and_place(p)
            if p.device.type == "meta" or not p.is_floating_point():
                raise refusal(name, f"is {kind}", "parameters are real numbers with values")
            if kind != first_kind:
                reason = f"is {kind}, '{first_name}' is {first_kind}"
                raise refusal(name, reason, "all trainable parameters must be alike; use autocast")
            owner = owners.setdefault(p.data_ptr(), name) if p.numel() else name
            if owner != name:
                reason = f"shares the memory of '{owner}'"
                raise refusal(name, reason, "tied weights must be one Parameter under both names")

    def _check_optimizer(self) -> None:
        model_ids = {id(p) for p in self._parameters.values()}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in model_ids:
                    shape = tuple(p.shape)
                    raise InputError(f"optimizer: its parameter of shape {shape} must be one of the model")
        for name, p in self.trained.items():
            if id(p) not in self._optimizer_ids:
                raise InputError(f"optimizer: parameter '{name}' is not in it; add it, or freeze it")

    def check(self) -> None:
        """Raise InputError where trained parameters were added, replaced or removed; frozen ones may be."""
        parameters = self.named()
        for name, p in {**self._parameters, **parameters}.items():
            replaced = parameters.get(name) is not self._parameters.get(name)
            if replaced and (name in self.trained or p.requires_grad):
                raise refusal(name, "was added, replaced or removed")
            if p.requires_grad and name not in self.trained:
                raise refusal(name, "was frozen, now it is trained")
        self._parameters = parameters
        if self._ids() != self._optimizer_ids:
            raise InputError("optimizer: its parameters have changed; make a new DecentralizedDataParallel")
        self.check_memory()

    def check_memory(self) -> None:
        """Raise InputError where parameters have another shape, precision or device than at the start.

        Where a parameter has new memory, as after ``p.data = …``, its values are copied into ``flat``.
        """
        for (name, p), view in zip(self.trained.items(), self.views, strict=True):
            if p.data_ptr() == view.data_ptr() and p.shape == view.shape:  # almost always
                continue
            if p.shape != view.shape:
                raise refusal(name, f"had shape {tuple(view.shape)}, now {tuple(p.shape)}")
            if p.dtype != view.dtype or p.device != view.device:
                raise refusal(name, f"was {kind_and_place(view)}, now {kind_and_place(p)}")
            view.copy_(p.detach().clone())
            p.data = view


#: The name in a checkpoint of an array (n, number of parameter tensors) of flags: which parameters have a
#: state. A parameter that never had a gradient has no state.
PRESENT = "present"


class OptimizerState:
    """The state of one learner's torch optimizer as update rules take it, an :class:`.OptimizerMemory`.

    Rules that average the state read and write ``state``: name -> (1, …), for each name of torch's the
    parameter tensors one after the other. All processes must read ``state`` at the same step, as a read
    compares the names and shapes of all processes.
    """

    def __init__(self, parameters: FlatParameters, group: DefaultGroup) -> None:
        self._parameters, self._group = parameters, group
        # A state from before the first step, such as Adagrad's.
        self._initial = {p: copy.deepcopy(dict(s)) for p, s in self._states() if s}

    def _states(self) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
        state = self._parameters.optimizer.state
        return [(p, state.get(p, {})) for p in self._parameters.trained.values()]

    def _parts(self) -> dict[str, list[Tensor]]:
        """Name -> the tensors with this name in the states of the parameters."""
        parts: dict[str, list[Tensor]] = {}
        for _, state in self._states():
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    parts.setdefault(key, []).append(value)
        return parts

    @property
    def counters(self) -> frozenset[str]:
        """Names of tensors that count steps: single numbers, and tensors of whole numbers."""
        return frozenset(
            key
            for key, tensors in self._parts().items()
            if any(t.dim() == 0 or not t.is_floating_point() for t in tensors)
        )

    @property
    def state(self) -> dict[str, Tensor]:
        parts = self._parts()
        if self._group.size > 1:
            shapes = [(name, key, tuple(v.shape)) for name, key, v in self._named()]
            digest = hashlib.sha256(repr(shapes).encode()).hexdigest()
            if len(set(self._group.gathered(digest))) > 1:
                remedy = "use all parameters in the first step, or algorithm buffers='keep'"
                raise InputError(f"optimizer: its state cannot be averaged, some rank lacks a part; {remedy}")
        return {k: torch.cat([t.detach().flatten() for t in ts])[None] for k, ts in parts.items()}

    @state.setter
    def state(self, rows: dict[str, Tensor]) -> None:
        for key, tensors in self._parts().items():
            sizes = [t.numel() for t in tensors]
            for tensor, part in zip(tensors, torch.split(rows[key][0], sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def reset(self) -> None:
        """Restore the state that the optimizer had when it was wrapped: for most optimizers no state."""
        for p, _ in self._states():
            self._parameters.optimizer.state.pop(p, None)
            if p in self._initial:
                self._parameters.optimizer.state[p] = copy.deepcopy(self._initial[p])

    # Checkpoints.

    def _named(self) -> list[tuple[str, str, Tensor]]:
        """Return (parameter, name, tensor) of all tensors; OperationError for a state that is no tensor."""
        tensors = []
        for name, (_, state) in zip(self._parameters.trained, self._states(), strict=True):
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    tensors.append((name, key, value.detach()))
                elif value is not None:
                    kind = type(value).__name__
                    raise OperationError(f"optimizer: its state '{key}' is a {kind}, it must be a tensor")
        return tensors

    def rows(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: "PARAMETER.NAME" -> (1, …), with equal names on all ranks."""
        tensors = {f"{name}.{key}": storable(value) for name, key, value in self._named()}
        local_kinds = {name: [precision(t), list(t.shape)] for name, t in tensors.items()}
        kinds: dict[str, list[Any]] = {}  # of all ranks
        for rank_kinds in self._group.gathered(local_kinds):
            kinds |= rank_kinds
        device = self._parameters.device
        rows = {}
        for name, (dtype, shape) in sorted(kinds.items()):
            value = tensors[name] if name in tensors else torch.zeros(shape, dtype=getattr(torch, dtype))
            rows[name] = value.to(device, copy=True)[None]
        flags = [bool(state) for _, state in self._states()]
        return rows | {PRESENT: torch.tensor([flags], dtype=torch.uint8, device=device)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore this learner's state from the result of :meth:`rows`; learning rates stay as they are.

        Raises:
            OperationError: where ``state`` does not fit the optimizer.
        """
        optimizer, trained = self._parameters.optimizer, self._parameters.trained
        if PRESENT not in state or state[PRESENT].shape[1:] != (len(trained),):
            raise OperationError("checkpoint: its /optimizer does not fit the model's parameters")
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
        for path, rows in state.items():
            name, _, key = path.rpartition(".")
            if name in tensors:
                tensors[name][key] = rows[0].clone()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        flags = state[PRESENT][0].tolist()
        for (name, p), flag in zip(trained.items(), flags, strict=True):
            optimizer.state.pop(p, None)
            if flag:
                group = groups[id(p)]
                optimizer.state[p] = {key: _placed(t, p, group) for key, t in tensors[name].items()}


def _placed(value: Tensor, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return ``value`` on the device and in the precision that torch's optimizers use for a state of ``p``.

    Single numbers, such as the step, lie on the CPU unless a kernel on the device reads them.
    """
    if value.dim() == 0:
        return value.to(p.device) if group.get("capturable") or group.get("fused") else value.cpu()
    half = p.itemsize < 4 and value.is_floating_point()
    return value.to(p.device, p.dtype if half else value.dtype)
