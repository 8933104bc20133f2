"""Runs that are continued, and what their state says of the optimizer's preconditioner and of stability."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint, check_learner
from landscape.core import options
from landscape.core.analysis import analysis
from landscape.core.devices import Device, float64_device
from landscape.core.errors import InputError, OperationError
from landscape.core.options import BelowOne, Count, Natural, NonNegative, Positive, Seed, UpToOne, checked
from landscape.core.progress import ProgressOption, reporter
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.curvature.hessian import Preconditioner, as_preconditioner
from landscape.evaluation.grid import named_loss, setting
from landscape.gradients.minibatches import Minibatches, stream
from landscape.limits import limits, max_stable_step
from landscape.problem.layout import average
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.flatness import Stability
from landscape.results.noise import CriticalBatch
from landscape.training import optimizer as optimizers
from landscape.training.own_loop import learning_rate, read_settings
from landscape.training.recipes import Save, Schedule
from landscape.training.recipes.recipe import Recipe, continued, recipe_of
from landscape.training.run.loop import Hooks, Trainer

# Batches in units of the run's, seeds, and the allowed rise of the loss (our choice).
FACTORS, SEEDS, LOSS_TOL = (1.0, 2.0, 4.0, 8.0, 16.0), 3, 0.01
# Steps of the largest batch by default, and at least. The loss of a branch is its mean at this number of
# places, evenly spread over the last quarter, which takes off most of its fluctuation (our choice).
STEPS, LEAST_STEPS, PLACES = 40, 8, 5
# The exponent of the batch in the learning rate: 1 for SGD (Goyal et al. 2017), ½ for optimizers that divide
# by the size of the gradient (Malladi et al. 2022).
SQRT_OPTIMIZERS = (
    "torch:Adam", "torch:AdamW", "torch:RMSprop", "torch:NAdam", "torch:RAdam", "torch:Adamax", "lamb",
)  # fmt: skip
EXPONENTS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


@analysis(
    shorter="a smaller trained_samples= or seeds=",
    group="Measure noise and learners",
    of_the_run=None,
    options={
        "factors": {"metavar": "k,…"},
        "trained_samples": {"flag": "--samples", "metavar": "N"},
        "seeds": {"flag": "--branches"},
        "scaling": {"flag": "--lr-scaling"},
    },
)
def critical_batch(
    run: Checkpoint,
    factors: Sequence[Positive] = FACTORS,
    *,
    trained_samples: Count | None = None,
    seeds: Count = SEEDS,
    loss_tol: Positive = LOSS_TOL,
    scaling: Literal["linear", "sqrt", "none"] | None = None,
    seed: Seed = 0,
    device: Device | None = None,
    data_dir: str | Path | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> CriticalBatch:
    """Find the critical batch by branched training (Merrill et al. 2025, arXiv 2505.23971).

    Branches continue a run from a checkpoint, with the states of its optimizer and update rule. All branches
    train on equally many samples, with different batches. Above the critical batch, the final training loss
    is more than 1 + ``loss_tol`` times the loss with the smallest batch. Unlike
    :func:`landscape.noise_scale`, this method needs no assumption on the Hessian. Three choices are ours: the
    loss is that of the mean weights w_a on the whole training set, averaged over the last quarter of a
    branch; each batch has several branches; and the critical batch is interpolated.

    Args:
        run: a checkpoint of ``landscape train``. The learning rate stays constant within a branch.
        factors: the branches' batches divided by the run's batch; the smallest batch is the reference.
        trained_samples: the number of samples of each branch, up to rounding to whole steps; default: 40
            steps of the largest batch.
        seeds: the number of branches for each batch; their minibatches differ.
        loss_tol: the allowed rise of the loss, relative to the loss with the smallest batch.
        scaling: how the learning rate grows with the batch: "linear", "sqrt" or "none". Default: "sqrt" for
            optimizers that divide by the size of the gradient, else "linear".
        seed: the seed of the minibatches of the first branch; the next branches take the next numbers.
        device: the device on which branches train; default: the device that ``run.using`` has set, or the
            CPU.
        data_dir: the folder of data sets; default: the folder that ``run.using`` has set, or as for
            :func:`landscape.train`.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The loss of each branch, and the critical batch with its standard error.

    Raises:
        InputError: a run that is no checkpoint, fewer than two factors, too few samples, or a batch that the
            learners cannot share.
        OperationError: the run has no recipe, its recipe names code, or the run diverged.

    Example:
        >>> from landscape.training.recipes.recipe import read
        >>> run = Trainer(read("digits-ssgd", ["steps=5", "decompose.every=0"])).run()
        >>> result = critical_batch(run, [0.5, 1], trained_samples=5000, seeds=1)
        >>> result.batch.tolist(), result.steps.tolist()
        ([250, 500], [20, 10])
    """
    options.fit("run", run, Checkpoint)  # raises InputError for another type
    device = device or run.source.get("device") or "cpu"  # ``run.using`` stores its options in ``source``
    data_dir = data_dir or run.source.get("data_dir")
    # The run's recipe with a constant learning rate, and without measurements during the run.
    recipe = continued(run, schedule=Schedule())
    if run.diverged:
        raise OperationError(f"{run.path or 'checkpoint'}: the run diverged, there is nothing to continue")
    if scaling is None:
        optimizer_name, _ = recipe.part("optimizer")
        scaling = "sqrt" if optimizer_name in SQRT_OPTIMIZERS else "linear"
    batches = _batches(recipe, factors)  # in increasing order
    samples = trained_samples or STEPS * batches[-1]
    rates = [run.lr * (batch / recipe.batch) ** EXPONENTS[scaling] for batch in batches]
    steps = [round(samples / batch) for batch in batches]
    if steps[-1] < LEAST_STEPS:
        raise InputError("trained_samples", samples, allowed=f"at least {LEAST_STEPS * batches[-1]}")
    loss = np.empty((len(batches), seeds))
    show_progress = reporter(progress)
    for i, j in np.ndindex(loss.shape):  # branch j with batches[i]
        branch = replace(recipe, batch=batches[i], lr=rates[i], steps=run.step + steps[i], seed=seed + j)
        loss[i, j], trainer = _train_branch(branch, run, device, data_dir)
        show_progress((i * seeds + j + 1) / loss.size)
    return CriticalBatch(
        batch=np.array(batches),
        lr=np.array(rates),
        steps=np.array(steps),
        loss=loss,
        own_batch=recipe.batch,
        step=run.step,
        trained_samples=samples,
        loss_tol=loss_tol,
        scaling=scaling,
        seed=seed,
        # Number of samples, precision, BatchNorm and name of the loss: the same in all branches.
        **setting(trainer.train_problem),
        **about,
    )


def _batches(recipe: Recipe, factors: Sequence[float]) -> list[int]:
    """Return the batches of ``factors`` in increasing order, without repetition."""
    products = sorted({factor * recipe.batch for factor in factors})
    if len(products) < 2:
        raise InputError(f"factors: {list(factors)} is not allowed, at least two different ones are needed")
    for batch in products:
        if batch % (recipe.learners * recipe.accumulate):
            reason = f"{recipe.learners} learners cannot share {batch:g} samples"
            raise InputError(f"factors: {batch / recipe.batch:g} is not allowed, {reason}")
    return [round(batch) for batch in products]


def _train_branch(
    recipe: Recipe, run: Checkpoint, device: torch.device | str, data_dir: str | Path | None
) -> tuple[float, Trainer]:
    """Train a branch: (its mean training loss over the last quarter, inf where it diverged; its trainer)."""
    length = recipe.steps - run.step
    every = max(1, length // (4 * PLACES))
    last_quarter = recipe.steps - length / 4
    losses = []

    def evaluate(state: Checkpoint) -> None:
        if state.step > last_quarter:
            losses.append(trainer.buffers.training_loss(average(state.weights)))

    recipe = replace(recipe, checkpoint=Save(every=every))
    trainer = Trainer(recipe, checkpoint=run, device=device, data_dir=data_dir, hooks=Hooks(save=evaluate))
    end = trainer.run()
    if end.diverged or not np.isfinite(losses).all():
        return math.inf, trainer
    return float(np.mean(losses)), trainer


# Steps along which the gradient's Lipschitz constant is estimated, and decomposed steps whose median is
# called the run's α_e (our choice).
PATH_STEPS = 5
LAST = 10


@numerics(1)
def mean_path(
    run: Checkpoint, steps: int, device: torch.device | str = "cpu", data_dir: str | Path | None = None
) -> Tensor:
    """Return w_a (S + 1, P) along S = ``steps`` further steps of the run; fewer if the run diverges.

    Raises OperationError where the run's recipe names code, which a file cannot bring in.
    """
    recipe = continued(run, steps=run.step + steps, checkpoint=Save(every=1))
    path = [run.mean]
    hooks = Hooks(save=lambda state: path.append(average(state.weights).cpu()))
    # The spread of a diverged run can be smoothed by, but there is nowhere to go on to.
    if not run.diverged:
        Trainer(recipe, checkpoint=run, device=device, data_dir=data_dir, hooks=hooks).run()
    return torch.stack(path)


def effective_rate(run: Checkpoint) -> float:
    """Return the median of the last α_e of a run; NaN where it has none."""
    rates: Any = run.history.get("alpha_e", np.zeros(0))
    rates = rates[np.isfinite(rates)][-LAST:]
    return float(np.median(rates)) if len(rates) else math.nan


def operating_point(run: Checkpoint | None) -> tuple[float, float | None, int]:
    """Return the run's learning rate, the largest stable ηλ of its update rule, and its delay in steps.

    An unknown rate is NaN, an unknown limit None, an unknown delay 0; without a ``run`` all are unknown.
    """
    if run is None or run.algorithm == IMPORTED:
        return math.nan, None, 0
    if run.algorithm == RECORDED:
        return run.lr, read_settings(run).get("monitor", {}).get("stability_limit"), 0
    recipe = recipe_of(run)
    return run.lr, recipe.stability_limit(), int(recipe.algorithm.get("delay", 0))


@checked()
def preconditioner(
    run: Checkpoint, problem: Problem, learner: str | int = "mean", *, seed: Seed = 0
) -> Preconditioner:
    """Return the diagonal P by which Adam, AdamW, RMSprop, LARS or LAMB divides its momentum in a step.

    After t steps Adam has P = (√v̂ + ε)(1 − β₁ᵗ), where v̂ is the second moment corrected for its bias (Cohen
    et al. 2022, arXiv:2207.14484). LAMB and LARS scale the step of each parameter tensor w; their P is our
    choice. For LAMB, P is Adam's P times ‖s‖/‖w‖, where s is LAMB's step before this scaling. For LARS,
    P = (‖g‖ + λ‖w‖)/(trust ‖w‖), where g is the gradient, λ the weight decay and trust LARS's coefficient.

    The result also has the limit: the largest stable η λ_max(P^{-1/2} H P^{-1/2}), where η is the learning
    rate and H the Hessian. The limit holds for a constant P that all learners share, without weight decay.
    For SSGD with Adam's β₁ = 0.9 it is 2(1 + β₁)/(1 − β₁) = 38.

    Args:
        run: a checkpoint of ``landscape train``.
        problem: the run's problem. For LARS, gradients of this problem are computed on minibatches. These
            have the size of the run's total batch if the update rule is synchronous, otherwise the size of
            one learner's minibatch.
        learner: the number of the learner whose state and weights are used; "mean": the mean weights w_a and
            the state averaged over the learners (our choice; with SSGD all states are equal).
        seed: the seed of the minibatches for LARS.

    Returns:
        P with the optimizer's learning rate and limit.

    Raises:
        InputError: another optimizer, or a learner that does not exist.
        OperationError: a checkpoint of step 0, or one that ``landscape train`` did not make.

    Example:
        >>> from landscape.training.recipes.recipe import read
        >>> run = Trainer(read("digits-ssgd", ["steps=1", "optimizer.name=adam", "decompose.every=0"])).run()
        >>> round(preconditioner(run, run.problem()).limit, 6)
        38.0
    """
    path = run.path or "run"
    if not run.has_recipe:
        raise OperationError(f"{path}: no run of landscape train; give a landscape.Preconditioner in Python")
    state_preconditioner = StatePreconditioner(recipe_of(run), problem, where="precondition")
    if run.step < 1:
        raise OperationError(f"{path}: of step 0, the optimizer has no state yet")
    check_learner(learner, run.learners)
    if isinstance(learner, int):
        weights = run.weights[learner]
        state = {key: rows[learner : learner + 1] for key, rows in run.optimizer.items()}
    else:
        weights = run.mean
        state = state_preconditioner.mean_of(run.optimizer, lambda _name, rows: average(rows))
    weights = weights.to(problem.weights)
    # ``part=0``: this function needs only one of the independent streams of random numbers of a seed.
    return state_preconditioner.preconditioner_at(weights, state, run.step, run.lr, stream(seed, part=0))


# LARS's preconditioner depends on the gradient's norm: it is averaged over this number of minibatches (our
# choice).
DRAWS = 8


class StatePreconditioner:
    """P and its limit, as :func:`landscape.preconditioner` describes them, from states of the optimizer.

    Args:
        recipe: the run's recipe.
        problem: the run's problem. For LARS, gradients of this problem are computed on minibatches. These
            have the size of the run's total batch if the update rule is synchronous, otherwise the size of
            one learner's minibatch.
        where: the option or instrument that needs P; messages begin with this word.

    Raises:
        InputError: for an optimizer without a diagonal preconditioner.
    """

    def __init__(self, recipe: Recipe, problem: Problem, where: str) -> None:
        self._recipe, self._problem = recipe, problem
        self.name, settings = recipe.part("optimizer")
        self._optimizer = optimizers.make(self.name, settings)
        momentum = self._optimizer.preconditioned
        if momentum is None:
            names = "adam, adamw, rmsprop, lars, lamb"
            raise InputError(f"{where}: the optimizer '{self.name}' has no preconditioner, use {names}")
        # P's steps are steps of momentum m with learning rate rate_factor·η (Adam: m = β₁, factor 1 − β₁).
        m, form, rate_factor = momentum
        limit = recipe.rule().stability_limit(m, form)
        self.limit = math.nan if limit is None else limit / rate_factor

    def mean_of(self, rows: Mapping[str, Tensor], mean: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the learners' mean state, name -> (1, …).

        Args:
            rows: the state of these learners, name -> (n, …).
            mean: (name, (n, …)) -> the mean over all learners.
        """
        counters = self._optimizer.counters  # equal for all learners, and perhaps whole numbers
        return {name: t[:1] if name in counters else mean(name, t)[None] for name, t in rows.items()}

    def preconditioner_at(
        self, weights: Tensor, state: Mapping[str, Tensor], step: int, lr: float, draws: torch.Generator
    ) -> Preconditioner:
        """Return P after ``step`` steps.

        Args:
            weights: θ (P,).
            state: name -> (1, …).
            step: counted from 1.
            lr: η.
            draws: for LARS's minibatches.
        """
        self._optimizer.start(self._problem.layout, weights[None])
        self._optimizer.restore(state)
        gradients = torch.zeros_like(weights)[None]
        if self._optimizer.gradient_scaled:
            gradients = self._gradients(weights, draws)
        diagonals = [self._optimizer.preconditioner(weights[None], g[None], step) for g in gradients]
        diagonal = torch.cat([d for d in diagonals if d is not None]).mean(0)
        return Preconditioner(diagonal, name=self.name, lr=lr, limit=self.limit)

    def _gradients(self, weights: Tensor, draws: torch.Generator) -> Tensor:
        """Return gradients (DRAWS, P) of minibatches of the size that one state of the optimizer sees."""
        recipe = self._recipe
        size = recipe.local_batch * (recipe.learners if recipe.rule().synchronous else 1)
        minibatches = itertools.islice(Minibatches(self._problem, size, draws), DRAWS)
        return torch.stack([minibatch.gradient(weights) for (minibatch,) in minibatches])


# The table of docs/explanation/stability.md.
DELAYS = (0, 1, 3, 7, 31)


# ``shorter``: words for a message during a long call. ``of_the_run=None``: the function gets the run itself.
@analysis(shorter="a larger residual_tol= or a part of the data", of_the_run=None)
def stability(
    problem: Problem | Run,
    delays: Sequence[Natural] | None = None,
    momentum: BelowOne = 0.9,
    *,
    lr: NonNegative | None = None,
    own_limit: NonNegative | None = None,
    own_delay: Natural | None = None,
    precondition: Preconditioner | Tensor | bool | None = None,
    residual_tol: UpToOne = 0.01,
    seed: Seed = 0,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Stability:
    """Compute λ_max of the Hessian at the problem's weights, and the largest stable ηλ for delayed gradients.

    Args:
        problem: the loss; or a run.
        delays: gradient delays τ (steps); default: 0; for a run with a delay also 1, 3, 7, 31 and this delay.
        momentum: m, for ordinary and for shifted momentum; 0.9 is usual. Shifted momentum is
            v_{t+1} = m v_{t−τ} − ηg (the paper Delay-2019).
        lr: the learning rate η, for the picture of ηλ_max; default: the run's.
        own_limit, own_delay: the largest stable ηλ of the run's update rule, and its delay in steps; default:
            computed from the run.
        precondition: the positive diagonal P, in a form that :func:`landscape.spectrum` takes; True: P of the
            run's optimizer. λ_max is then that of P^{-1/2} H P^{-1/2}, and the limits hold for steps
            v ← m v + g, w ← w − η P⁻¹ v. ``lr`` and ``own_limit`` are then not used. The result has the
            preconditioner's ``lr`` and ``limit`` instead, both NaN for a tensor.
        residual_tol: the allowed residual of λ_max, relative to λ_max.
        seed: the seed of the vector with which the eigenvalue iteration starts.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        λ_max, its residual, and the largest stable ηλ (3, delays): without momentum, with ordinary and with
        shifted momentum.

    Raises:
        InputError: a value out of its range, or ``precondition=True`` without a run.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.stability(problem, delays=[0, 1])
        >>> round(result.lambda_max, 4), result.limit[0].round(3).tolist()
        (9.0, [2.0, 1.0])
    """
    run = problem if isinstance(problem, Checkpoint) else None
    problem = problem_of(problem)
    run_lr, run_limit, run_delay = operating_point(run)
    lr = run_lr if lr is None else lr  # NaN: not known
    own_limit = run_limit if own_limit is None else own_limit  # None: not known
    own_delay = run_delay if own_delay is None else own_delay
    if delays is None:
        delays = [own_delay, *DELAYS] if own_delay else [0]
    delays = sorted({*delays})
    if precondition is True:
        if run is None:
            raise InputError("precondition: True is not allowed for a problem, whose optimizer is not known")
        precondition = preconditioner(run, problem)
    elif precondition is False:
        precondition = None
    diagonal = as_preconditioner(precondition)  # None without P
    if diagonal:
        lr, own_limit = diagonal.lr, diagonal.limit
    largest = top_eigenvalues(
        problem, k=1, residual_tol=residual_tol, seed=seed, precondition=diagonal, progress=progress
    )
    return Stability(
        delay=np.asarray(delays, dtype=np.int64),
        limit=limits(delays, momentum),
        momentum=momentum,
        lambda_max=float(largest.values[0]),
        residual=float(largest.residuals[0]),
        converged=bool(largest.converged),
        lr=lr,
        own_limit=math.nan if own_limit is None else own_limit,
        own_delay=own_delay,
        samples=problem.data.samples,
        precondition=diagonal.name if diagonal else "",
        **named_loss(problem),
        **about,
    )


def own_loop_preconditioner(optimizer: Any, parameters: Sequence[nn.Parameter]) -> Preconditioner | None:
    """Return the preconditioner of ``optimizer``, which trains ``parameters`` in a user's own training loop.

    None before the first step.

    Raises:
        InputError: for an optimizer other than torch's Adam, AdamW and RMSprop, for no optimizer (None), or
            for parameter groups with different options.
    """
    optimizer_class = type(optimizer)
    names = ("betas", "eps", "amsgrad", "centered", "momentum", "maximize")
    groups = [{}] if optimizer is None else optimizer.param_groups
    options = {name: groups[0][name] for name in names if name in groups[0]}
    # (m, form, rate_factor): the momentum, the form of momentum, and a factor of the learning rate η. Let SGD
    # step with m and rate_factor·η. SGD's steps divided by the preconditioner are then the steps of
    # ``optimizer``. For Adam m = β₁ and rate_factor = 1 − β₁.
    sgd_equivalent = optimizers.torch_preconditioned(optimizer_class, options)  # None: another optimizer
    options_differ = any(group.get(name) != value for group in groups for name, value in options.items())
    if sgd_equivalent is None or options_differ:
        reason = "parameter groups with different options"
        if sgd_equivalent is None:
            reason = f"the optimizer '{optimizer_class.__name__}'"
        allowed = "only with Adam, AdamW or RMSprop of torch, with the same options for all parameters"
        where = "monitor.instruments: 'preconditioned-lambda-max'"
        raise InputError(f"{where} is not allowed with {reason}, {allowed}")
    states = [optimizer.state.get(p, {}) for p in parameters]
    if not all("step" in state for state in states):
        return None
    # The tensors of the state by name, each (1, P) for the P weights: one row, as there is one learner.
    keys = [key for key, value in states[0].items() if value is not None and key != "step"]
    rows = {key: torch.cat([state[key].detach().flatten() for state in states])[None] for key in keys}
    # For each weight the number of its steps (1, P). A parameter without a gradient has made fewer steps.
    counts = [
        torch.full((p.numel(),), float(state["step"])) for p, state in zip(parameters, states, strict=True)
    ]
    step_counts = torch.cat(counts)[None].to(float64_device(parameters[0].device), torch.float64)
    diagonal = optimizers.torch_preconditioner(optimizer_class, options, rows, step_counts)[0]
    m, form, rate_factor = sgd_equivalent
    limit = max_stable_step(delay=0, momentum=m, form=form) / rate_factor
    return Preconditioner(diagonal, name=optimizer_class.__name__, lr=learning_rate(optimizer), limit=limit)
