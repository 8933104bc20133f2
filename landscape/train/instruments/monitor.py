"""The instruments of a run: when each measures, what they remember, and what they write to the history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.curvature.hessian import Preconditioner
from landscape.problem.problem import Problem
from landscape.train.instruments.base import Gradients, Instrument, Moment, Setting
from landscape.train.optimizer.base import Optimizer
from landscape.train.optimizer.preconditioning import StatePreconditioner
from landscape.train.processes.comm import Comm
from landscape.train.recipes.recipe import Recipe
from landscape.train.run.randomness import generator
from landscape.train.run.setup import SecondGradient

#: The instrument that ``monitor.sharpness`` has measure at steps of its own.
LAMBDA_MAX = "lambda-max"


class Monitoring:
    """Measures a run every ``monitor.every`` steps, and λ_max every ``monitor.sharpness``.

    Args:
        run: what is measured.
        taken: names of columns that instruments may not have.

    Attributes:
        columns: of all instruments: name -> unit.

    Raises:
        InputError: for an instrument that cannot measure this run, or a column of a name that is taken.
    """

    def __init__(self, run: Setting, taken: Iterable[str] = ()) -> None:
        self.run, settings = run, run.monitor
        names = dict.fromkeys(([LAMBDA_MAX] if settings.sharpness else []) + list(settings.instruments))
        #: Each instrument with the intervals at which it measures; 0: never.
        self._instruments: list[tuple[Instrument, tuple[int, int]]] = []
        self.columns: dict[str, str] = {}
        for name in names:
            instrument: Instrument = registry.instruments[name](run)
            listed = settings.every if name in settings.instruments else 0
            self._instruments.append((instrument, (listed, settings.sharpness * (name == LAMBDA_MAX))))
            for column in instrument.columns:
                if column in taken:
                    raise InputError(
                        f"monitor.instruments: '{name}' has the column '{column}', which the algorithm has"
                    )
            self.columns |= instrument.columns

    @property
    def turns(self) -> tuple[int, ...]:
        """The intervals at which something is measured."""
        return tuple(every for _, intervals in self._instruments for every in intervals if every)

    def due(self, step: int) -> bool:
        """Whether something is measured after ``step``."""
        return any(step % every == 0 for every in self.turns)

    def see(self, step: int, points: Tensor, rows: Tensor) -> None:
        """Show the instruments the gradients of a step; arguments as of :class:`.Gradients`."""
        for instrument, _ in self._instruments:
            instrument.see(Gradients(step, points, rows))

    def measure(self, step: int, lr: float, weights: Tensor) -> dict[str, float]:
        """The columns of the instruments that are due after a step; arguments as of :class:`.Moment`.

        Raises:
            FailedError: for a column that an instrument does not declare.
        """
        mean, columns = self.run.comm.mean(weights), dict[str, float]()
        now = Moment(step, lr, weights, mean.expand_as(weights) if self.run.at_mean else weights, mean)
        for instrument, intervals in self._instruments:
            if any(every and now.step % every == 0 for every in intervals):
                found = instrument.measure(now)
                for name in found:
                    if name not in instrument.columns:
                        raise FailedError(
                            f"monitor.instruments: '{instrument.name}' records the column '{name}', which "
                            "its class must declare with a unit in 'columns'"
                        )
                columns |= found
        return columns

    def state(self, step: int) -> dict[str, Tensor]:
        """What the instruments remember after ``step``, for a checkpoint."""
        state = dict(self.run.sample.state) if "sample" in vars(self.run) else {}
        for instrument, _ in self._instruments:
            state |= instrument.state(step)
        return state

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Take that from a checkpoint."""
        if "sample" in vars(self.run):
            self.run.sample.restore(shared)
        for instrument, _ in self._instruments:
            if instrument.key in shared:
                instrument.restore(shared[instrument.key])

    def warning(self, row: Mapping[str, float], column: Callable[[str], Array]) -> str:
        """A line where ``row`` is the first whose lr·λ_max exceeds the limit; "" if one before did.

        Args:
            row: the last of the history.
            column: gives the history's column of a name.
        """
        if not row["lr_lambda_max"] > row["lr_lambda_limit"]:  # NaN where one is not known
            return ""
        if np.any(column("lr_lambda_max")[:-1] > column("lr_lambda_limit")[:-1]):
            return ""
        return (
            f"step {row['step']:.0f}: lr·λ_max = {row['lr_lambda_max']:.3g} is above "
            f"{row['lr_lambda_limit']:.4g}, up to which the steps are stable on a quadratic; told once, the "
            "history has the rest"
        )


def of_run(
    recipe: Recipe, problem: Problem, comm: Comm, optimizer: Optimizer, second: SecondGradient
) -> Monitoring:
    """The instruments of a recipe's run.

    Args:
        recipe: of the run.
        problem: the loss that its steps descend, on the training set.
        comm: its processes.
        optimizer: that makes its steps, whose state is read when it is measured.
        second: gives further minibatch gradients.

    Raises:
        InputError: for an instrument that cannot measure this run.
    """
    rule = recipe.rule()
    return Monitoring(
        Setting(
            monitor=recipe.monitor,
            problem=problem,
            comm=comm,
            seed=recipe.seed,
            learners=recipe.learners,
            batch=recipe.batch,
            stability_limit=recipe.stability_limit(),
            at_mean=rule.at_mean,
            synchronous=rule.synchronous,
            second=second,
            preconditioner=_MeanPreconditioner(recipe, problem, comm, optimizer),
        ),
        taken=rule.columns,
    )


class _MeanPreconditioner:
    """P of the learners' mean state of the optimizer, at w_a."""

    def __init__(self, recipe: Recipe, problem: Problem, comm: Comm, optimizer: Optimizer) -> None:
        self._recipe, self._problem, self._comm, self._optimizer = recipe, problem, comm, optimizer
        self._made: StatePreconditioner | None = None

    def __call__(self, now: Moment | None) -> Preconditioner | None:
        if self._made is None:
            self._made = StatePreconditioner(self._recipe, self._problem, "monitor.instruments")
        if now is None:
            return None
        counters = self._made.counters
        state = {
            name: rows[:1] if name in counters else self._comm.fresh_mean(rows, f"optimizer's {name}")[None]
            for name, rows in self._optimizer.state.items()
        }
        draws = generator(self._recipe.seed, "monitor_preconditioner", now.step)
        return self._made.at(now.mean, state, now.step, now.lr, draws)
