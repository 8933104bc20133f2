"""The commands that measure at w_a of checkpoints: curvature and its limits, noise, spread; and averages."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from landscape import limits
from landscape.analysis.compare import compare as compute_comparison
from landscape.analysis.connection import average as compute_average
from landscape.analysis.noise import noise_scale as compute_noise_scale
from landscape.analysis.quantities import BY_NAME
from landscape.analysis.sharpness import batch_sharpness as compute_batch_sharpness
from landscape.analysis.spectrum import curvature_table
from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.analysis.spread import smoothing as compute_smoothing
from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.cli import common
from landscape.cli.common import AnalysisCommand, analysis_options, say_cost
from landscape.cli.grids import check_networks, titles
from landscape.cli.options import OMIT, ListType, command
from landscape.core.devices import pick_device
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, Natural, NonNegative, Positive
from landscape.gradients.minibatches import required_batch
from landscape.problem.layout import GROUPINGS
from landscape.results.comparison import Comparison, WeightAverage, footnotes, summary, table_of
from landscape.results.flatness import BatchSharpness, Smoothing
from landscape.results.noise import NoiseScale
from landscape.results.spectrum import CurvatureTable, Spectrum
from landscape.training import experiments
from landscape.training.experiments import DELAYS, operating_point, preconditioner
from landscape.training.experiments import stability as compute_stability


@command(
    by={"metavar": "block|layer|parameter|NAME,…"},
    parts={"flag": "--part", "metavar": "NAME"},
    analysis=analysis_options(compute_spectrum, quantities={"metavar": "NAME,…"}, part=OMIT),
)
def spectrum(by: str | None, precondition: bool, parts: tuple[str, ...], analysis: AnalysisCommand) -> None:
    """Compute the Hessian's eigenvalues, trace and density.

    The Hessian is computed at w_a, the mean weights of each CKPT's learners, over the whole split.

    Prints each eigenvalue with its relative residual, the bounds of all other eigenvalues (with 99%
    probability), and the trace with its standard error. With --precondition, also prints the learning rate
    times λ_max, next to the largest value of this product that is stable for the optimizer.

    Args:
        by: Print only a table of λ_max, λ_min and trace, for all parameters and for each group of parameters:
            block (h.3, layer1.0), layer, parameter, or names, prefixes and patterns (*.bias).
        precondition: Use P^{-1/2} H P^{-1/2}, with P from the state of the optimizer, which must be Adam,
            AdamW, RMSprop, LARS or LAMB.
        parts: Use only the diagonal block of the parameters with this name (1.weight) or prefix (1); can be
            repeated.

    Example:
        landscape spectrum runs/dp/last.h5 --k 5 --quantities trace,density --plot f.png
    """
    if by is not None:
        _print_curvature_table(by, analysis, {"precondition": precondition, "part": parts})
        return

    def compute(run: Checkpoint, **settings: Any) -> Spectrum:
        problem = run.problem()
        options = {**settings, "part": list(parts) or None}
        if precondition:
            return compute_spectrum(problem, precondition=preconditioner(run, problem), **options)
        if settings["engine"] == "landscape":  # the only engine with a forecast of time and memory
            say_cost(compute_spectrum, problem, options)
        return compute_spectrum(problem, **options)

    matrix = analysis.settings["matrix"]
    variant = [matrix, "preconditioned"] if precondition else [matrix]  # a part of the file's name
    analysis.compute("spectrum", analysis.open(), compute, variant=variant)


def _print_curvature_table(by: str, analysis: AnalysisCommand, flags: Mapping[str, Any]) -> None:
    """Do the work of ``landscape spectrum --by``: print the curvature of the groups ``by`` of each CKPT.

    ``flags`` has the options of the command that are not allowed with ``--by``.
    """
    defaults = {name: p.default for name, p in inspect.signature(compute_spectrum).parameters.items()}
    settings = {key: value for key, value in analysis.settings.items() if value not in (None, defaults[key])}
    refused = settings.keys() - inspect.signature(curvature_table).parameters.keys()
    refused |= {name for name, value in flags.items() if value}
    for name in sorted(refused):  # the error names the first one
        raise InputError(f"--{name.replace('_', '-')}: not allowed with --by, whose table has no such number")
    names = [name.strip() for name in by.split(",")]

    def compute(run: Checkpoint, **settings: Any) -> CurvatureTable:
        problem, options = run.problem(), {**settings, "by": names if len(names) > 1 else names[0]}
        say_cost(curvature_table, problem, options)
        return curvature_table(problem, **options)

    analysis = replace(analysis, settings=settings)
    variant = [by] if by in GROUPINGS[1:] else []  # GROUPINGS[0] is "block", the default
    analysis.compute("curvature-table", analysis.open(), compute, variant=variant)


@command(
    analysis=analysis_options(compute_noise_scale, split=False, batch={"metavar": "B"}, local_batch=OMIT)
)
def noise_scale(no_learners: bool, precondition: bool, analysis: AnalysisCommand) -> None:
    """Estimate the gradient noise scale tr Σ/‖g‖².

    The noise scale is the batch, in samples of the training set, at which noise and gradient are equal in
    size.

    Two estimates are printed with standard errors. The first is from gradients at w_a, the mean weights of
    each CKPT's n learners. The second is from gradients as in a training step: each learner takes its own
    gradient over 1/n of the batch, at the weights that the run's update rule chooses (SSGD: w_a), and the
    estimate uses the mean over the learners. Also prints tr Σ and ‖g‖² as ``landscape train`` records them,
    from the differences between the learners' gradients in one step. The spread of the learners' weights adds
    to these differences.

    Args:
        no_learners: Measure only at w_a, without the learners' own gradients.
        precondition: Use P^{-1/2} g, with P from the state of the optimizer, as in landscape spectrum.

    Example:
        landscape noise-scale runs/dp/step-0000100.h5 runs/dp/last.h5 --plot noise-scale.png
    """
    runs = analysis.open()
    check_learners([(run, analysis.settings["batch"] or own_batch(run)) for run in runs], no_learners)

    def compute(run: Checkpoint, **settings: Any) -> NoiseScale:
        weights = gradient_points(run) if run.learners > 1 and not no_learners else None
        diagonal = preconditioner(run, run.problem()) if precondition else None
        return compute_noise_scale(run, weights=weights, precondition=diagonal, **settings)

    variant = ["preconditioned"] if precondition else []
    analysis.compute("noise-scale", runs, compute, variant=variant)


@command(
    batch={"metavar": "B,…"},
    analysis=analysis_options(
        compute_batch_sharpness, split=False, batch=OMIT, local_batch=OMIT, lr=OMIT,
        limit=OMIT, quantities=OMIT,
    ),
)  # fmt: skip
def batch_sharpness(
    batch: Sequence[Count] | None, no_learners: bool, no_lambda_max: bool, analysis: AnalysisCommand
) -> None:
    """Measure the curvature along minibatch gradients.

    The curvature is measured at w_a, the mean weights of each CKPT's learners, and at each learner's weights.

    Batch sharpness is the mean of gᵀHg/‖g‖² over minibatches of the training set, where g and H are the
    minibatch's gradient and Hessian. Each of n learners has minibatches of 1/n of the batch. Prints mean ±
    standard error, next to λ_max and, if the CKPT has them, the learning rate and the largest stable ηλ.

    Args:
        batch: Number of samples in a minibatch at w_a. [default: the run's total batch]
        no_learners: Measure only at w_a, and not at the learners' own weights.
        no_lambda_max: Do not compute λ_max over all data.

    Example:
        landscape batch-sharpness runs/dp/last.h5 --batch 50,500 --plot sharpness.png
    """
    unique_sizes = list(dict.fromkeys(batch or ()))
    jobs: list[tuple[Checkpoint, int]] = []
    for run in analysis.open():
        sizes = unique_sizes or [own_batch(run)]
        jobs += [(run, size) for size in sizes]
    check_learners(jobs, no_learners)

    def compute(run: Checkpoint, size: int, **settings: Any) -> BatchSharpness:
        lr, limit, _ = operating_point(run)
        settings["weights"] = run.weights if run.learners > 1 and not no_learners else None
        settings["quantities"] = () if no_lambda_max else ("lambda-max",)
        return compute_batch_sharpness(run, size, lr=lr, limit=limit, **settings)

    analysis.compute("batch-sharpness", jobs, compute)


def own_batch(run: Checkpoint) -> int:
    """Return the total batch of a run; raise InputError for imported weights, which have none."""
    return required_batch(run.batch or None)


def check_learners(runs_and_batches: Iterable[tuple[Checkpoint, int]], no_learners: bool) -> None:
    """Raise InputError if the learners of a run cannot share its batch evenly."""
    for run, size in runs_and_batches:
        if not no_learners and size % run.learners:
            raise InputError(f"--batch: {size} is no multiple of {run.learners} learners; give --no-learners")


def gradient_points(run: Checkpoint) -> Tensor:
    """Return the weights (n, P) at which learners take gradients: w_a or, by the update rule, their own."""
    if run.has_recipe:
        from landscape.training.recipes.recipe import recipe_of  # here, because only runs need it

        if recipe_of(run).rule().at_mean:
            return run.mean.expand_as(run.weights)
    return run.weights


@command(analysis=analysis_options(compute_smoothing, lr=OMIT, alpha_e=OMIT))
def smoothing(*, steps: Natural = experiments.PATH_STEPS, analysis: AnalysisCommand) -> None:
    """Smooth the loss over the spread of the learners.

    The smoothed loss and its sharpness are computed around w_a, the mean weights of each CKPT's learners.

    The smoothed loss is the mean loss at w_a + δ, where δ is random and has the covariance Σ of the learners'
    weights. A second smoothed loss, for comparison, has isotropic δ with the same tr Σ. Prints, for the loss
    and both smoothed losses, the value and λ_max with standard errors, and the Lipschitz constants of the
    gradients along further steps of w_a. Also prints tr(HΣ), where H is the Hessian of the loss; the share of
    the spread along the sharpest directions; and 2/λ_max next to the learning rate α and the effective
    learning rate α_e.

    Args:
        steps: Number of further training steps along which Lipschitz constants of gradients are estimated;
            with 0 none is estimated. The steps change no file.

    Example:
        landscape smoothing runs/ss/last.h5 runs/dp/last.h5 --plot smoothing.png
    """
    source, device = analysis.source, pick_device(analysis.device)

    def compute(run: Checkpoint, **settings: Any) -> Smoothing:
        # Further steps train by the run's recipe, which needs a built-in model and data. A run with the
        # user's own model, data or loss can be opened only if --model, --data or --loss is given.
        can_train = run.has_recipe and not (source.model or source.data or source.loss)
        trajectory = None
        if steps and can_train:
            trajectory = experiments.mean_path(run, steps, device, source.data_dir)
        elif steps:
            common.message(f"{run.label}: no further steps, --steps needs built-in model and data")
        alpha_e = experiments.effective_rate(run)
        return compute_smoothing(run, trajectory=trajectory, alpha_e=alpha_e, **settings)

    analysis.compute("smoothing", analysis.open(), compute)


@command(
    analysis=analysis_options(
        compute_stability, metavar="[CKPT…]", required=False, lr=OMIT, own_limit=OMIT,
        own_delay=OMIT,
    )
)  # fmt: skip
def stability(
    *, lr: Positive | None, from_delay: Natural = 0, from_momentum: BelowOne = 0.0,
    from_form: limits.Form = "ordinary", batch: Count = 1, from_batch: Count = 1, noise: NonNegative = 0.0,
    precondition: bool, analysis: AnalysisCommand,
) -> None:  # fmt: skip
    """Compute the largest stable learning rates.

    These rates depend on the delay τ and on the momentum.

    Without a CKPT, prints the largest stable ηλ_max for each delay; with --lr, also the learning rate that
    has the same stable minima as --lr in its own setting. With a CKPT, measures λ_max over the split at w_a,
    the mean weights of the learners, and prints the learning rates above which training leaves this minimum.

    Args:
        lr: Learning rate in use; also print, for each delay, the learning rate with the same stable minima.
        from_delay: Delay with which --lr is in use.
        from_momentum: Momentum with which --lr is in use.
        from_form: Form of --from-momentum.
        batch: Number of samples in a step.
        from_batch: Number of samples in a step with which --lr is in use.
        noise: s²/λ², the relative variance of one sample's curvature along the sharpest direction; with 0,
            the batch makes no difference.
        precondition: Use P^{-1/2} H P^{-1/2}, with P from the state of the optimizer, as in landscape
            spectrum.

    Example:
        landscape stability runs/dp/last.h5 --delay 0,1,2,4,8,16,32 --plot edge.png
    """
    delays = sorted(set(analysis.settings["delays"] or DELAYS))
    momentum = analysis.settings["momentum"]
    if not analysis.checkpoints:
        if analysis.target.picture or analysis.target.output or precondition:
            raise InputError("--plot, -o, --precondition: not allowed without a CKPT")
        title = f"largest stable lr·λ_max{' in mean square' if noise else ''}"
        max_stable_step = functools.partial(limits.max_stable_step, noise=noise, batch=batch)
        rows, text = limit_table(title, delays, momentum, max_stable_step, ".4f")
        common.print_values(text, limits=rows)
        if lr is not None:
            before = limits.Hyperparameters(from_delay, from_momentum, from_form, from_batch)

            def lr_with_same_minima(delay: int, momentum: float, form: str) -> float:
                after = limits.Hyperparameters(delay, momentum, form, batch)
                return limits.lr_that_keeps_minima(lr, before, after, noise)

            lr_in_use = f"lr {lr:g} with delay {from_delay}, momentum {from_momentum:g} ({from_form})"
            batch_in_use = f", batch {from_batch}" if noise else ""
            title = f"learning rates with the minima of {lr_in_use}{batch_in_use}"
            rows, text = limit_table(title, delays, momentum, lr_with_same_minima, ".4g")
            common.print_values(text, rates=rows)
        return
    if lr is not None or noise:
        raise InputError("--lr, --noise: not allowed with a CKPT, only without one")

    compute = functools.partial(compute_stability, precondition=precondition)
    analysis.compute("stability", analysis.open(), compute)


def limit_table(
    title: str, delays: Sequence[int], momentum: float, value: Callable[..., float], number_format: str
) -> tuple[list[dict[str, float]], str]:
    """Compute ``value(delay, momentum, form)`` for each delay without, with ordinary and shifted momentum.

    Returns:
        The rows of the table, and the table as text.
    """
    columns = [("no momentum", 0.0, "ordinary"), ("ordinary", momentum, "ordinary")]
    columns.append(("shifted", momentum, "shifted"))
    header, rows = ["τ"], [dict[str, float](delay=delay) for delay in delays]
    for name, m, form in columns:
        header.append(f"{name}, m = {m:g}" if m else name)
        for delay, row in zip(delays, rows, strict=True):
            row[name] = value(delay, m, form)
    cells = [[str(row["delay"]), *(f"{row[name]:{number_format}}" for name, _, _ in columns)] for row in rows]
    return rows, f"{title}\n{common.table_text([header, *cells])}"


WIDTH = 110  # characters in a line of the footnotes (our choice)


@command(
    groups={"metavar": "recipe|NAME=COUNT,…"},
    analysis=analysis_options(
        compute_comparison,
        split=False,
        metrics=True,
        quantities={"metavar": "NAME,…", "help": f"Only these: {', '.join(BY_NAME)}. [default: all]"},
        equal_loss={"flag": "--at-equal-loss"},
    ),
)
def compare(groups: str | None, analysis: AnalysisCommand) -> None:
    """Compare how flat minima are, with tests.

    One table has all quantities, and says which minimum is flatter.

    Prints each quantity with its standard error (an eigenvalue with its bound), and which differences are
    significant. Single CKPTs are compared by paired tests on common minibatches, vectors and planes; groups
    by Welch's t test. All tests have Holm's correction. Quantities that cannot be measured are named below
    the table.

    Args:
        groups: Compare groups of CKPTs; errors are from the spread in each group. With "recipe", runs whose
            recipes differ only in the seed form a group. With NAME=COUNT,…, the first COUNT CKPTs form the
            first group, and so on. A test needs at least 3 CKPTs in each group.

    Example:
        landscape compare runs/ss-*/ runs/dp-*/ --groups recipe --at-equal-loss --plot flat.png
    """
    runs = analysis.open()
    sides = runs if groups is None else grouped(runs, groups)

    def compute(*_: Checkpoint, **options: Any) -> Comparison:
        # ``options`` also has the origin of all runs. It is left out, as each side has an origin of its own.
        settings = {name: options[name] for name in (*analysis.settings, "seed", "progress")}
        result = compute_comparison(sides, **settings, preconditioner_of=preconditioner)
        data_names = dict.fromkeys(analysis.source.other_data(run) for run in runs)
        notes = [f"the data is {name}, not that of the checkpoints" for name in data_names if name]
        return replace(result, notes=(*result.notes, *notes))

    # The name and the sources of the result's file come from ``runs``. ``compute`` ignores this argument: it
    # has the runs in ``sides``.
    analysis.compute("compare", [tuple(runs)], compute, describe=print_comparison)


def grouped(runs: Sequence[Checkpoint], text: str) -> dict[str, list[Checkpoint]]:
    """Return the runs of each group by its name; ``text`` is the value of --groups."""
    if text == "recipe":
        from landscape.plots.training import groups_of  # only here: it imports matplotlib

        for run in runs:
            if not run.has_recipe:
                raise InputError(f"--groups: recipe is not allowed, {run.path} has none; give NAME=COUNT,…")
        return {name: members for name, _, members in groups_of(runs)}
    groups: dict[str, list[Checkpoint]] = {}
    start = 0
    for entry in text.split(","):
        match = re.fullmatch(r"\s*([^=]*[^=\s])\s*=\s*([1-9]\d{0,5})\s*", entry)
        if not match or match[1] in groups:
            raise InputError(f"--groups: '{text}' is not allowed, it must be recipe, or as SSGD=3,DPSGD=3")
        end = start + int(match[2])
        groups[match[1]] = list(runs[start:end])
        start = end
    if start != len(runs):
        raise InputError(f"--groups: '{text}' has {start} checkpoints, it must have all {len(runs)}")
    return groups


@command(
    base={"metavar": "CKPT"},
    exact={"metavar": "N"},
    analysis=analysis_options(
        compute_average,
        metrics=True,
        labels=OMIT,
        exact=OMIT,
        seed=False,
        coefficients={"metavar": "a,…", "type": ListType(float)},
    ),
)
def average(base: str | None, by_factor: bool, *, exact: Natural | None, analysis: AnalysisCommand) -> None:
    """Predict the loss of averaged weights.

    The mean weights w_a of several CKPTs are averaged, such as checkpoints of a run, or fine-tunings of one
    network. With one CKPT and no --base, its learners are averaged.

    The loss of an average is predicted, with a 90% interval, from the loss, the gradient and one
    Hessian-vector product at each of the averaged weights. The exact loss is printed beside the prediction.
    The last average is a greedy soup: weights join it if they lower its predicted loss.

    Args:
        base: The CKPT from which all others were fine-tuned: averages are base + Σ a (CKPT − base), with the
            --coefficients a.
        by_factor: Average the factors A and B of adapters (LoRA) by themselves, and not the products BA.
        exact: Evaluate only the N averages with the best predictions. [default: all]

    Example:
        landscape average runs/ss/step-???????.h5 --plan windows --last 12 --exact 3 --plot average.png
    """
    paths = analysis.checkpoints if base is None else (*analysis.checkpoints, base)
    runs_and_base = replace(analysis, checkpoints=paths).open()
    runs = runs_and_base[: len(analysis.checkpoints)]
    check_networks(runs)
    options: dict[str, Any] = {"exact": True if exact is None else exact}  # True: evaluate all averages
    if by_factor:
        # By default each pair of factors A and B, found by their names, is averaged as its product BA.
        # Without names, factors are averaged as they are.
        options["factors"] = ()
    # Opening a file of another program converts its weights. An average is made in the original dtypes, so
    # the path of such a file is passed on.
    members = [run.path if run.algorithm == IMPORTED and run.path else run for run in runs_and_base]
    if base is not None:
        options["base"] = members.pop()  # the last of ``paths``

    # ``AnalysisCommand.compute`` gives a ``seed`` to every function; an average draws nothing.
    def compute(first: Checkpoint, *others: Checkpoint, seed: int, **settings: Any) -> WeightAverage:
        problem = first.problem()
        if not others:
            return compute_average(problem, first.weights, **settings, **options)
        return compute_average(problem, members, labels=titles(runs), **settings, **options)

    analysis.compute("average", [tuple(runs_and_base)], compute)


def print_comparison(result: Comparison) -> None:
    """Print the table of a comparison, its summary and its footnotes."""
    rows = [["", *result.sides, "error over", "difference"], *table_of(result)]
    wrap = functools.partial(textwrap.fill, width=WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines = [common.table_text(rows, left=True), "", *summary(result), *map(wrap, footnotes(result))]
    common.print_values("\n".join(lines))
