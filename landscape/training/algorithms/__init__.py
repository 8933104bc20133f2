"""The interface of update rules: the loop calls its methods in the order of a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from landscape.checkpoint.history import UNITS
from landscape.core.errors import InputError, OperationError
from landscape.problem.layout import Layout
from landscape.training.optimizer.base import OptimizerMemory, restored
from landscape.training.processes.comm import Comm
from landscape.training.run import RESERVED, generator


class Rule(ABC):
    """One step w(t) -> w(t+1) of n learners; weights are (n, P), one row per learner.

    A step calls :meth:`begin`, :meth:`gradient_points`, then, with the directions of the optimizer,
    :meth:`finish` and :meth:`update_optimizer_state`. A process with some of the learners sees
    only their rows; it exchanges with the other processes by ``comm``, which the loop sets.

    The memory of a rule from step to step is in ``state``, name -> (n, …), a row for each learner, and
    ``shared``, name -> (…), the same on all processes: both go into checkpoints. A step replaces the tensors
    and does not write to them, so that it can be undone; only :meth:`begin` may write to them, and must write
    the same again when a step is repeated.

    A rule is added to the registry under the name that recipes give, in this package or in a plugin; the
    arguments of its ``__init__`` after ``learners`` and ``seed`` are the options of the recipe::

        @registry.algorithms.add("my-rule")
        class MyRule(Rule): ...
    """

    #: The rule's name and color in all pictures; default: the name in recipes, and gray. Subclasses do not
    #: inherit them.
    label: ClassVar[str] = ""
    color: ClassVar[str] = ""
    #: The history's columns that this rule adds to those of the loop: name -> unit.
    columns: ClassVar[Mapping[str, str]] = {}
    #: Options without effect on their own -> what they need: "delay > 0", or a fact about the run
    #: (``landscape.training.recipes.settings``, which refuses them in a new run).
    needs: Mapping[str, str] = {}
    #: The purposes of this rule's random draws, with which it calls :meth:`generator`.
    purposes: ClassVar[tuple[str, ...]] = ()
    #: Whether all gradients are taken at one point and only their mean matters: an optimizer whose direction
    #: is not linear in the gradient is then given that mean (see landscape.training.optimizer).
    synchronous = False
    #: Whether that point is the mean of the weights.
    at_mean = False
    #: Whether gradients come from processes at their own pace (``landscape.training.run.loop``).
    measured = False
    #: Whether :meth:`finish` uses lr only as the factor of the directions, so that a displacement with lr = 1
    #: leads to the same weights. If not, :meth:`finish` is called with the learning rate of the step.
    lr_is_factor = False
    #: η_0, the rate after the warm-up; the recipe sets it.
    peak_lr = 0.0
    #: Whether it uses ``peak_lr``.
    uses_peak_lr = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.label, cls.color = (vars(cls).get(name, "") for name in ("label", "color"))
        for name in {*cls.columns} & {*UNITS} | {*cls.purposes} & RESERVED:
            raise InputError(f"{cls.__name__}: its column or purpose '{name}' is the training loop's own")

    def __init__(self, learners: int, seed: int) -> None:
        self.learners, self.seed = learners, seed
        self.comm = Comm(learners)
        #: The order of the parameters in θ, known before :meth:`start`; without a network it has no slots.
        self.layout = Layout(())
        self.state: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self._memory: list[Tensor] = []

    def start(self, weights: Tensor) -> None:  # noqa: B027 - most rules remember nothing
        """Set ``state`` and ``shared`` at the start of a run.

        Args:
            weights: of this process's learners (n, P).
        """

    def restore(self, state: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """Take ``state`` and ``shared`` from a checkpoint, after :meth:`start`.

        Args:
            state: name -> (n, …).
            shared: name -> (…).

        Raises:
            OperationError: where they are not this rule's, or of another number of learners.
        """
        self.state, self.shared = restored("rule", self.state, state), restored("shared", self.shared, shared)

    def begin(self, weights: Tensor, step: int) -> None:  # noqa: B027 - nothing to send is a fine default
        """Start the exchanges that do not depend on the gradients, so that they overlap the gradients.

        Args:
            weights: those at the step's start (n, P).
            step: counted from 1.
        """

    def gradient_points(self, weights: Tensor) -> Tensor:
        """Return the points at which gradients are computed: by default each learner's own weights.

        Args:
            weights: those at the step's start (n, P).

        Returns:
            (n, P), a point for each learner.
        """
        return weights

    @abstractmethod
    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        """End the step: wait for the exchanges, and compute the new weights.

        Args:
            weights: those at the step's start (n, P).
            directions: each learner's descent direction (n, P), from the optimizer.
            lr: α of this step.
            step: counted from 1.

        Returns:
            The new weights (n, P).
        """

    def finish_moved(self, weights: Tensor, points: Tensor, moved: Tensor, lr: float, step: int) -> Tensor:
        """Return the result of :meth:`finish` for a step that the user's own optimizer has made.

        Args:
            weights: those at the step's start (n, P).
            points: where the gradients were taken (n, P).
            moved: where the optimizer has moved these (n, P); other memory, which is overwritten.
            lr: the rate of the step; 1 if :attr:`lr_is_factor`.
            step: counted from 1.

        Returns:
            The new weights (n, P): :meth:`finish` with the directions (points − moved)/lr.
        """
        directions = torch.sub(points, moved, out=moved)
        if lr != 1:  # a rate of 0 makes no step
            directions = directions.div_(lr) if lr else directions.zero_()
        return self.finish(weights, directions, lr, step)

    def update_optimizer_state(self, optimizer: OptimizerMemory, step: int) -> None:  # noqa: B027 - few rules change it
        """Change ``optimizer.state`` for the next step; by default it does not change.

        Args:
            optimizer: that of the run, after its directions of this step.
            step: counted from 1.
        """

    def follows_mean_direction(self, step: int) -> bool:
        """Return whether a step moves w_a by −α times the mean direction, which Eq. 4's split assumes.

        Args:
            step: counted from 1.
        """
        return True

    def record(self, step: int) -> dict[str, float]:
        """Return the values of this rule's ``columns``, after :meth:`finish`.

        Args:
            step: counted from 1.

        Returns:
            Column -> value; a column that is left out is NaN in the history.
        """
        return {}

    @abstractmethod
    def communication_cost(self, step: int) -> tuple[float, int]:
        """Return the communication of a step as if each learner were on a machine of its own.

        Args:
            step: counted from 1.

        Returns:
            (vectors of P numbers that a learner sends, rounds of communication that it waits for). An
            all-reduce counts as 2(n−1)/n vectors, as a ring sends, and a neighbor as one.
        """

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The largest stable ηλ of this rule where all learners have the same quadratic loss.

        Args:
            momentum: the optimizer's.
            form: of its momentum, "ordinary" or "nesterov"; see landscape.limits.

        Returns:
            The limit; None, as by default: it is not known.
        """
        return None

    def _average_state(self, optimizer: OptimizerMemory, average: Callable[[Tensor], Tensor]) -> int:
        """Replace the optimizer's tensors (n_local, …), but counters, by their averages; their number."""
        tensors = {name: t for name, t in optimizer.state.items() if name not in optimizer.counters}
        means = {name: average(t).expand_as(t).clone() for name, t in tensors.items()}
        optimizer.state = optimizer.state | means
        return len(means)

    def generator(self, purpose: str, step: int = 0, *learner: int) -> torch.Generator:
        """Return a generator for random draws, from this rule's seed.

        Args:
            purpose: one of ``purposes``.
            step: counted from 1; 0 for a draw once in a run.
            learner: the learner's index, if each learner draws separately.

        Returns:
            That of ``landscape.training.run.generator``.

        Raises:
            OperationError: for a ``purpose`` that the class does not declare.
        """
        if purpose not in self.purposes:
            raise OperationError(f"{type(self).__name__}: its purposes do not declare the draw '{purpose}'")
        return generator(self.seed, purpose, step, *learner)

    @property
    def all_reduce(self) -> float:
        """Vectors that a learner sends for an average over all: 2(n−1)/n."""
        return 2 * (self.learners - 1) / self.learners

    def _new_weights(self, weights: Tensor) -> Tensor:
        """Return memory for the new weights, that of the unused weights before ``weights``.

        Fresh memory for a large network costs as much as the arithmetic that fills it.
        """
        if not self._memory or self._memory[0].shape != weights.shape:
            self._memory = [torch.empty_like(weights), torch.empty_like(weights)]
        return self._memory[self._memory[0].data_ptr() == weights.data_ptr()]

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        """Return a line for the user at the start of a run: the mixing, if any, and the stability limit.

        Args:
            momentum: the optimizer's; None: the limit with this optimizer is not known.
            form: of its momentum, as of :meth:`stability_limit`.

        Returns:
            The line; "" if there is nothing to say.
        """
        limit = None if momentum is None else self.stability_limit(momentum, form)
        steps = f"steps with momentum {momentum:g}" if momentum else "plain steps"
        stable = f"{steps} are stable while lr·λ_max < " if limit is not None else ""
        if mixing := getattr(self, "mixing", None):
            if limit is not None:
                law = "1 + ω_min = " * math.isclose(limit, 1 + mixing.omega_min)
                stable += f"{law}{limit:.4g} ({getattr(self, 'order', 'atc').upper()})"
            return f"{mixing.describe()}; {stable or 'the limit of stability is not known'}"
        return stable and f"{stable}{limit:.4g}"
