"""A module whose copies in several processes train as the learners of a decentralized algorithm."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from landscape._version import __version__
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import Positive, Seed, checked, fit
from landscape.problem.layout import independent_copy
from landscape.training.own_loop import DefaultGroup, check_module, kind, rank_and_size, unwrapped_name
from landscape.training.own_loop.step import FlatParameters, Stepper, average_buffers, load, save

_wrapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class DecentralizedDataParallel(nn.Module):
    """One learner of decentralized SGD in a user's training loop, with any ``torch.optim`` optimizer.

    It is used like ``torch.nn.parallel.DistributedDataParallel``: one process per learner, started by
    torchrun, in the default process group of torch.distributed; a single process without a group is one
    learner. The rules and their numbers are those of ``landscape train``. DPSGD in AWC order (DPSGD-2020,
    Eq. 2) is w_j ← Σ_k M_jk w_k + d_j, where d_j is the displacement that learner j's optimizer makes. When
    ``optimizer.step()`` returns, all exchanges are complete, and the parameters are w_j(t+1) (with ``ssgd``
    w_a(t+1), as under DistributedDataParallel). Exchanges that do not depend on the gradient run during the
    forward and the backward pass.

    All processes must make the same number of steps. If one is lost, the others end with
    :class:`.LostProcessError`, immediately or within the timeout of the process group. Changes of gradients
    before the step, such as clipping, apply to the learner's own gradient. In a step that a GradScaler skips,
    the learner has no gradient, and exchanges weights as in any other step. A parameter whose gradient is
    None is mixed without a displacement. In a synchronous step (all of ssgd, the first ``start`` steps of
    local-sgd) ``optimizer.step()`` averages gradients or, with the same result, ``torch.optim.SGD``'s
    weights after the step.

    The trainable parameters stay the same objects, now in one contiguous tensor. They must have one precision
    and one device, and must not be replaced, reshaped or moved later. The wrapper needs memory for P further
    numbers (3 P for dpsgd), and P for each learner received. Keys of ``state_dict`` are ``module.NAME`` and,
    for the algorithm, ``_extra_state``; each process saves and loads its own, between steps.

    Args:
        model: any module; rank 0's parameters and buffers are copied to the other ranks.
        optimizer: the optimizer of all trainable parameters, with its own state in each learner. One that
            needs a closure, such as LBFGS, is refused.
        algorithm: an update rule of ``landscape train`` or of a plugin, by name, such as ``dpsgd``. The delay
            of async-sgd is simulated.
        average_buffers: whether to average the module's floating-point buffers, such as BatchNorm's running
            statistics, over the learners after each step; otherwise each learner has its own.
        peak_lr: α_0 of dsgd-ac; default: the optimizer's learning rate, or a scheduler's initial rate.
        seed: the seed of the rule's random numbers, such as random matchings.
        options: options of the algorithm, as in recipes, such as ``period=8``; defaults are those of
            ``landscape train``: for dpsgd ``mixing="full"``, ``order="awc"``.

    Attributes:
        module: the user's model.
        steps: the number of steps made.

    Raises:
        InputError: an argument, model or optimizer that is not allowed or differs between processes; several
            processes (WORLD_SIZE) without a process group.

    Example:
        >>> import torch, landscape
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = landscape.DecentralizedDataParallel(model, optimizer, "local-sgd", period=4)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 3)).square().mean().backward()
        ...     optimizer.step()
        >>> model.steps, model.average_model().weight.equal(model.module.weight)
        (3, True)
    """

    @checked()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: str = "dpsgd",
        *,
        average_buffers: bool = False,
        peak_lr: Positive | None = None,
        seed: Seed = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_can_be_wrapped(model, optimizer)
        rank, size = rank_and_size("DecentralizedDataParallel")
        options = registry.algorithms.options(algorithm, options)  # checked, with defaults
        rule = registry.algorithms.make(algorithm, options, learners=size, seed=seed)
        if rule.measured:  # delays measured in worker processes, which this wrapper does not have
            raise InputError("algorithm.schedule: 'measured' is not allowed here, only in landscape train")
        options_in_use = {key: value for key, value in options.items() if value is not None}
        self._algorithm = {"name": algorithm} | options_in_use
        if rule.uses_peak_lr:
            if peak_lr is None:
                group = optimizer.param_groups[0]
                peak_lr = group.get("initial_lr", group["lr"])  # a scheduler sets initial_lr
            rule.peak_lr = fit("peak_lr", peak_lr, Positive)  # InputError unless > 0; as a float
            self._algorithm["peak_lr"] = rule.peak_lr
        elif peak_lr is not None:
            raise InputError(f"peak_lr: {peak_lr} is not allowed, algorithm '{algorithm}' does not use it")
        self._seed = seed
        parameters = FlatParameters(model, optimizer)
        processes = DefaultGroup(rank, size, parameters.device)
        self._copy_from_rank_0(model, parameters, processes, average_buffers)
        self._stepper = Stepper(parameters, rule, processes, average_buffers)
        _wrapped.add(optimizer)  # so that a second wrapper refuses this optimizer
        self.module = model

    def _copy_from_rank_0(
        self, model: nn.Module, parameters: FlatParameters, group: DefaultGroup, average_buffers: bool
    ) -> None:
        """Check that all processes have equal arguments and models, and copy rank 0's weights and buffers."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        facts = {
            "landscape": __version__,
            "seed": str(self._seed),
            "average_buffers": str(average_buffers),
            "optimizer": type(parameters.optimizer).__name__,
            **{f"algorithm.{key}": str(value) for key, value in self._algorithm.items()},
            **{f"model: '{unwrapped_name(name)}'": kind(t) for name, t in tensors.items()},
        }
        if difference := group.difference(facts):
            raise InputError(difference)
        with torch.no_grad():
            parameters.flat.copy_(group.broadcast(parameters.flat))
            for name, tensor in tensors.items():
                if unwrapped_name(name) not in parameters.trained:
                    tensor.copy_(group.broadcast(tensor))

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        return self._stepper.steps

    @property
    def wrapped_module(self) -> nn.Module:
        """The user's model, for functions that unwrap modules."""
        return self.module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Call the module, and begin the next step in training mode, unless it has begun.

        Raises:
            InputError: for parameters that were replaced, frozen, reshaped or moved.
            LostProcessError: where another process is lost.
        """
        if self.training and torch.is_grad_enabled():
            self._stepper.begin(in_forward=True)
        return self.module(*args, **keywords)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect, for loops written for DistributedDataParallel.

        A backward pass exchanges no gradients, so that passes before a step always accumulate them.

        Returns:
            A context that does nothing.

        Example:
            >>> import torch, landscape
            >>> net = torch.nn.Linear(3, 2)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> model = landscape.DecentralizedDataParallel(net, optimizer, "dpsgd")
            >>> with model.no_sync():
            ...     model(torch.ones(1, 3)).sum().backward()
        """
        return contextlib.nullcontext()

    def average_model(self) -> nn.Module:
        """Return a copy of the module, for evaluation, with w_a, the mean of the learners' weights.

        All processes must call this method, between steps. The copy's floating-point buffers are means over
        the learners. For BatchNorm these means are not the statistics at w_a, which
        ``torch.optim.swa_utils.update_bn`` estimates.

        Returns:
            The copy, which training does not change.

        Raises:
            InputError: within a step, and for a module that cannot be copied.
            LostProcessError: where another process is lost.

        Example:
            >>> import torch, landscape
            >>> net = torch.nn.Linear(3, 2)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> model = landscape.DecentralizedDataParallel(net, optimizer, "dpsgd")
            >>> mean = model.average_model()  # one process: one learner
            >>> mean.weight.equal(net.weight), mean is net
            (True, False)
        """
        stepper = self._stepper
        stepper.check_between_steps("average_model")
        model = independent_copy(self.module)
        with torch.no_grad():
            mean_weights = stepper.comm.fresh_mean(stepper.parameters.flat, "average model")
            parameters_of_copy = {unwrapped_name(name): p for name, p in model.named_parameters()}
            for name, mean in stepper.parameters.layout.views(mean_weights).items():
                parameters_of_copy[name].copy_(mean)
            average_buffers(model, stepper.comm)
        return model

    def save_checkpoint(self, path: str | Path) -> None:
        """Write all learners, with the states of optimizer and algorithm, to one HDF5 file, atomically.

        All processes must call this method, between steps; rank 0 writes. ``landscape info``, ``contour``,
        ``line`` and the other commands accept the file, with ``--model MODULE:NAME --data MODULE:NAME``.

        Args:
            path: ends in .h5; an existing file is replaced.

        Raises:
            InputError: within a step, and for another ending.
            OperationError: for a file that cannot be written, or a state that is not a tensor.
            LostProcessError: where another process is lost.

        Example:
            >>> import tempfile
            >>> import torch, landscape
            >>> net = torch.nn.Linear(3, 2)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> model = landscape.DecentralizedDataParallel(net, optimizer, "dpsgd")
            >>> model.save_checkpoint(f"{tempfile.mkdtemp()}/last.h5")
        """
        self._stepper.check_between_steps("save_checkpoint")
        save(self._stepper, Path(path), self._algorithm, self._seed)

    def load_checkpoint(self, path: str | Path) -> int:
        """Resume from a file of :meth:`save_checkpoint`: weights, buffers, optimizer and algorithm.

        All processes must call this method, between steps. Learning rates, the scheduler, the GradScaler and
        the states of random generators are not in the file: the user's loop must restore them. With all of
        them restored, and equal minibatches, the resumed run has the same numbers as an uninterrupted run.

        Args:
            path: the file, which each process reads.

        Returns:
            The number of steps in the file, the new value of ``steps``.

        Raises:
            InputError: within a step, and for a file of another algorithm or number of learners.
            OperationError: for a file that is missing or damaged, or that does not fit the model.

        Example:
            >>> import tempfile
            >>> import torch, landscape
            >>> net = torch.nn.Linear(3, 2)
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> model = landscape.DecentralizedDataParallel(net, optimizer, "dpsgd")
            >>> path = f"{tempfile.mkdtemp()}/last.h5"
            >>> model.save_checkpoint(path)
            >>> model.load_checkpoint(path)
            0
        """
        self._stepper.check_between_steps("load_checkpoint")
        with torch.no_grad(), self._stepper.group.raising_on_all_ranks():
            load(self._stepper, Path(path), self._algorithm)
        return self.steps

    def get_extra_state(self) -> dict[str, Any]:
        """Return the algorithm's state, which ``state_dict`` has as ``_extra_state``."""
        rule = self._stepper.rule
        parts = {"state": rule.state, "shared": rule.shared}
        facts: dict[str, Any] = {"algorithm": self._algorithm["name"], "steps": self.steps}
        return facts | {key: {name: t.clone() for name, t in part.items()} for key, part in parts.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`get_extra_state`; ``load_state_dict`` calls this method.

        Raises:
            InputError: within a step, and for the state of another algorithm.
        """
        self._stepper.check_between_steps("load_state_dict")
        name = self._algorithm["name"]
        if state["algorithm"] != name:
            raise InputError(f"load_state_dict: the state is of '{state['algorithm']}', here is '{name}'")
        self._stepper.rule.restore(state["state"], state["shared"])
        self._stepper.steps = state["steps"]

    def extra_repr(self) -> str:
        comm, name = self._stepper.comm, self._algorithm["name"]
        return f"{name}, learner {comm.rank} of {comm.size}, step {self.steps:,}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("model: it cannot be copied or pickled; use its .module or state_dict()")


def _check_can_be_wrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for a model or an optimizer that DecentralizedDataParallel cannot take."""
    check_module(model)
    for m in model.modules():
        if isinstance(m, (nn.DataParallel, nn.parallel.DistributedDataParallel, DecentralizedDataParallel)):
            raise InputError(f"model: a {type(m).__name__} is not allowed, give the module inside it")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise InputError(f"optimizer: {name} is not allowed, it needs a closure: several losses per step")
    if optimizer in _wrapped:
        raise InputError("optimizer: it belongs to another DecentralizedDataParallel; make a new one")
