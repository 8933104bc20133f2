"""How two networks are connected: by a line, by a line after alignment, and by a curve that is trained."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.weights import Weights, network_of
from landscape.core.analysis import analysis
from landscape.core.devices import double, single
from landscape.core.memory import Need
from landscape.core.options import choose, positive
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.evaluation import needs
from landscape.evaluation.evaluate import confirm, evaluator
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import Minibatches, stream
from landscape.problem.alignment import aligned, change
from landscape.problem.batchnorm import SAMPLES, tracked
from landscape.problem.layout import as_array
from landscape.problem.losses import existing
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.comparison import Connection
from landscape.results.geometry import barrier

CURVES = ("bezier", "chain")
# Points of a path, and samples in a minibatch: those of Garipov et al.'s code (eval_curve.py, train.py).
POINTS, BATCH = 61, 128
# Adam's step size (Kingma and Ba 2015, Algorithm 1). The number of steps is ours: minutes on a small network,
# where Garipov et al. train a curve as long as a network.
LR, STEPS = 1e-3, 1000


def shares(curve: str, t: Any) -> tuple[Any, Any]:
    """The shares of b and of the bend at ``t`` on a curve; that of a is the rest.

    Bézier: t² and 2t(1 − t). Chain: the bend is reached at t = ½, on straight lines (Garipov et al. 2018,
    section 3).

    Example:
        >>> [[float(share) for share in shares(curve, 0.5)] for curve in CURVES]
        [[0.25, 0.5], [0.0, 1.0]]
    """
    if curve == "bezier":
        return t**2, 2 * t * (1 - t)
    beyond = np.maximum(2 * t - 1, 0)
    return beyond, 1 - np.abs(2 * t - 1)


def _connect_need(problem: Any, align: Any, **_: Any) -> Need:
    """The ends, the bend, Adam's state and gradients; of the alignment, four vectors in float64.

    Activations of both networks, and a copy, are in float64, too, for half of the samples of a chunk.
    """
    read = 1.5 * needs.double(problem) * (align == "activations")
    return needs.need(problem, 12 + 8 * needs.double(problem), 3 + read)


@analysis(_connect_need, shorter="fewer steps=, fewer points= or a part of the data", version=1)
def connect(
    problem: Problem | Run,
    a: Weights,
    b: Weights | None = None,
    curve: Literal["bezier", "chain"] = "bezier",
    *,
    align: Literal["weights", "activations"] = "weights",
    points: int = POINTS,
    steps: int = STEPS,
    lr: float = LR,
    batch: int = BATCH,
    bn_samples: int = SAMPLES,
    seed: int = 0,
    max_memory: int | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Connection:
    """The loss between two networks: on the line, on the line after alignment, and along a trained curve.

    Hidden units have no order: permuting them gives other weights of the same function (Entezari et al.
    2022). The permutations of this model are found by tracing one pass of it and are tried on it; those of b
    that bring it near to a are then found by matching weights (Ainsworth et al. 2023, Algorithm 1) or the
    correlations of activations (Li et al. 2015). The curve
    leads from a to the aligned b by a bend, which is trained on the mean loss over t uniform in [0, 1]
    (Garipov et al. 2018, Eq. 2), by Adam with constant steps that fall linearly to zero in the second half.

    BatchNorm's statistics are estimated again at each point of each path, as Jordan et al. 2023 do for
    networks that have it, and those of each minibatch train the bend.

    Args:
        problem: the loss; or a run, on its training set.
        a, b: two networks, in any form that :func:`landscape.line` takes; without b the paths lead from the
            problem's center to a.
        curve: "bezier", quadratic, or "chain", two straight lines that meet in the bend.
        align: what units are matched by: "weights", or "activations", their correlations over up to 1,000
            samples, at the operations that sum over the units.
        points: of each path, at equal distances of t, at least 3. Barriers and highest losses are the largest
            at these points.
        steps: of the training of the bend, each on one minibatch at one t. With 0 it stays in the middle, so
            that the curve is the aligned line.
        lr: of Adam.
        batch: samples in a minibatch, at most all.
        bn_samples: as of :meth:`landscape.Problem.with_batchnorm`.
        seed: of the order in which layers are aligned, and of minibatches and t.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Loss and accuracy, (3, points) each, barriers (3,) and the weights (4, P): a, b, the aligned b, and
        the bend. ``landscape.between(problem, [w[0], w[2], w[3]])`` is the plane that contains the curve.

    Raises:
        InputError: weights of another model; an unknown curve; a number that is not allowed; a model that
            does not run in float64; aligned weights that compute another function than b.
        OperationError: weights that are not finite, or a file of others.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> problem = landscape.Problem(net, torch.nn.functional.cross_entropy, (x, y))
        >>> a = torch.randn(26)
        >>> order = torch.tensor([2, 0, 3, 1])  # b is a with its hidden units in another order
        >>> first, bias, last = a[:12].view(4, 3)[order], a[12:16][order], a[16:24].view(2, 4)[:, order]
        >>> b = torch.cat((first.flatten(), bias, last.flatten(), a[24:]))
        >>> bool((torch.from_numpy(landscape.connect(problem, a, b, steps=1).weights[2]) == a).all())
        True
    """
    problem = problem_of(problem)
    choose("curve", curve, CURVES)
    positive("points", points, least=3)
    positive("batch", batch, least=1)
    for name, value in (("steps", steps), ("seed", seed)):
        positive(name, value, least=0)
    positive("lr", lr)
    ends = {"problem": problem, "a": a} if b is None else {"a": a, "b": b}
    networks = [network_of(problem, end, name) for name, end in ends.items()]
    a, b = (single(network.theta) for network in networks)
    report, measured = taken(progress), problem.with_batchnorm("recalibrate", bn_samples)
    near, symmetry = aligned(problem, a, b, align, seed)
    report(0.1)
    batch = min(batch, problem.samples)
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    bend = _trained(minibatches, curve, (a, near), steps, lr, stream(seed, 1), portion(report, 0.1, 0.7))
    t = np.linspace(0, 1, points)
    zero = np.zeros_like(t)
    paths = ((b, (t, zero)), (near, (t, zero)), (near, shares(curve, t)))
    values = []
    for k, (end, at) in enumerate(paths):
        directions, places = torch.stack((end - a, bend - a)), torch.from_numpy(np.stack(at, 1))
        run = evaluator(measured, a, directions, points)
        found = run(places, portion(report, 0.7 + k / 10, 0.8 + k / 10))
        confirm(run, a, directions, places, found["loss"].numpy())
        values.append(found)
    loss = np.stack([found["loss"].numpy() for found in values])
    return Connection(
        t=t,
        loss=loss,
        accuracy=np.stack([found["accuracy"].numpy() for found in values]),
        barrier=np.array([barrier(t, each) for each in loss]),
        weights=np.stack([as_array(w) for w in (a, b, near, bend)]),
        distance=float((double(a) - double(b)).norm()),
        aligned_distance=float((double(a) - double(near)).norm()),
        groups=tuple(group.name for group in symmetry.groups),
        sizes=np.array([group.size for group in symmetry.groups], int),
        fixed=tuple(f"{name}: {reason}" for name, reason in symmetry.fixed.items()),
        largest_change=change(problem, b, near),
        own_loss=np.array([network.own_loss(problem) for network in networks if tracked(problem.model)]),
        curve=curve,
        align=align,
        steps=steps,
        lr=float(lr),
        batch=batch,
        seed=seed,
        **setting(measured),
        **about,
    )


def _trained(
    minibatches: Minibatches, curve: str, ends: tuple[Tensor, Tensor], steps: int, lr: float,
    generator: torch.Generator, report: Progress,
) -> Tensor:  # fmt: skip
    """The bend (P,) of a curve between two ends, from their middle on."""
    a, b = ends
    bend: Tensor = (a + b) / 2
    optimizer = torch.optim.Adam([bend], lr)
    for step, (few,) in zip(range(steps), minibatches, strict=False):
        t = float(torch.rand((), generator=generator))
        of_b, of_bend = shares(curve, t)
        theta = (1 - of_b - of_bend) * a + of_b * b + of_bend * bend
        bend.grad = of_bend * existing(*few.loss_and_gradient(theta.to(few.dtype))).to(bend)
        optimizer.param_groups[0]["lr"] = lr * min(1, 2 * (1 - step / steps))
        optimizer.step()
        report((step + 1) / steps)
    return bend
