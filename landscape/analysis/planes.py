"""Planes through weight space: random, or through checkpoints, trajectories, learners, eigenvectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from landscape.checkpoint.weights import Network, Weights, network_of, networks_of
from landscape.core.analysis import analysis
from landscape.core.devices import at_least_float32, double, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import Count, Seed, UpToOne, checked
from landscape.core.progress import ProgressOption
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import extreme_eigenvalues
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL
from landscape.evaluation import needs
from landscape.problem.alignment import aligned
from landscape.problem.batchnorm import layers_with_statistics
from landscape.problem.layout import Slot, average
from landscape.problem.problem import Problem, Run, problem_of
from landscape.problem.ranks import whole
from landscape.problem.sharded import on_ranks
from landscape.results.grids import Plane

NORMS: tuple[Literal["none", "filter", "layer"], ...] = ("none", "filter", "layer")


def _random_plane_need(problem: Any, **_: Any) -> Need:
    """Return the need of two directions, and of a draw of the largest parameter in float64."""
    largest = max(slot.size for slot in problem.layout.slots) / problem.layout.size
    return needs.need(problem, 2 + largest * needs.double(problem), 0)


@analysis(_random_plane_need, version=1)
def random_plane(
    problem: Problem | Run,
    norm: Literal["none", "filter", "layer"] = "none",
    seed: Seed = 0,
    *,
    ignore: Literal["none", "bias+norm"] | None = None,
    max_memory: Count | None = None,
) -> Plane:
    """Return the plane through the problem's center along two directions with i.i.d. standard normal entries.

    Args:
        problem: the problem whose center and parameters the plane has; or a run, whose center is w_a.
        norm: "none": directions are not scaled (DPSGD-2020, section 4.1). "filter": each filter of a weight
            (each slice along the first dimension) has the norm of the center's filter (Li et al. 2018,
            section 4); a bias or normalization tensor counts as one filter. "layer": each parameter tensor
            has the norm of the center's tensor.
        seed: the seed of the directions. They are the same for all problems of equal layout, on every device
            and in every precision, so that several centers can be compared.
        ignore: "bias+norm" leaves biases and normalization parameters unchanged, "none" also moves these.
            Default: "bias+norm" for norm "filter" (Li et al. 2018), else "none".
        max_memory: the most bytes that the process may use.

    Returns:
        A plane with center (P,) and directions (2, P).

    Raises:
        InputError: an unknown norm or ignore, or a seed below 0.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> landscape.random_plane(problem, norm="filter").directions.shape
        torch.Size([2, 8])
    """
    problem = problem_of(problem, sharded=True)
    if ignore is None:
        ignore = "bias+norm" if norm == "filter" else "none"
    generator = torch.Generator().manual_seed(seed)

    def draw_parameter(slot: Slot, center: Tensor) -> Tensor:
        """Return a parameter's direction. Ignored parameters are drawn, too, so that others stay the same."""
        direction = torch.randn(slot.shape, dtype=torch.float64, generator=generator).to(center)
        if ignore == "bias+norm" and slot.role != "weight":
            return direction.zero_()
        if norm != "none":
            _normalize(direction, center, norm)
        return direction

    directions = torch.empty(2, len(problem.weights), dtype=problem.dtype, device=problem.weights.device)
    for direction in directions:
        if on_ranks(problem):  # each process draws the whole parameters, and keeps its own pieces of them
            sharded: Any = problem  # only a sharded problem has the method ``draw``
            direction.copy_(sharded.draw(lambda piece: draw_parameter(piece.slot, whole(piece.parameter))))
            continue
        centers, views = problem.layout.views(problem.weights), problem.layout.views(direction)
        # Parameter by parameter: a float64 draw of all of θ would take twice the memory.
        for slot in problem.layout.slots:
            views[slot.name].copy_(draw_parameter(slot, centers[slot.name]))
    # In place, set directions to zero along weights that never move: padding rows of embeddings.
    problem.along_weights(directions)
    return Plane(problem.weights, directions, kind="random", norm=norm, seed=seed, ignore=ignore)


def _normalize(direction: Tensor, center: Tensor, norm: str) -> None:
    """Scale ``direction`` in place to the norms of ``center``; for a zero center the direction is zero."""
    if not direction.numel():
        return
    rows = (len(center), -1) if norm == "filter" and center.dim() > 1 else (1, -1)
    d, c = direction.view(rows), center.reshape(rows)
    norms, target_norms = vector_norm(d), vector_norm(c)
    d.mul_((target_norms / norms.where(norms > 0, 1.0)).to(d)[:, None])


@checked(unchecked=("problem",))
def between(
    problem: Problem | Run,
    weights: Sequence[Weights] | Tensor,
    labels: Sequence[str] = (),
    *,
    align: Literal["none", "weights", "activations"] = "none",
    seed: Seed = 0,
) -> Plane:
    """Return the plane through three weight vectors, or through two and along a random direction.

    The first direction is w1 − w0. The second is made from w2 − w0, or for two networks from a random normal
    vector: its component along the first direction is removed, and the rest is scaled to the length of the
    first direction (Garipov et al. 2018, section 3).

    The center is the middle of the smallest rectangle that contains the weight vectors and has sides along
    the directions. The weight vectors are ``plane.center + plane.markers @ plane.directions``.

    Args:
        problem: the problem to whose model the weights belong; or a run.
        weights: two or three networks, in any form that :func:`landscape.line` accepts.
        labels: names of the networks; default: the names of problems, otherwise w0, w1, w2.
        align: how hidden units of the other networks are matched to those of the first, as for
            :func:`landscape.connect`; "none": not at all.
        seed: the seed of the random vector.

    Returns:
        A plane with the networks as markers (2 or 3, 2).

    Raises:
        InputError: fewer than two or more than three networks, a vector whose length is not P, an entry of
            ``weights`` that lacks layers of ``problem``, or networks that cannot be aligned.
        OperationError: weights that are equal, on one line or not finite, or tensors whose names or shapes do
            not fit the model.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> plane = landscape.between(problem, [torch.zeros(8), torch.ones(8)])
        >>> plane.markers[:, 0].round(3).tolist()
        [-0.5, 0.5]
    """
    problem = problem_of(problem)
    networks = networks_of(problem, weights, labels)
    if len(networks) not in (2, 3):
        raise InputError(f"between: {len(networks)} weight vectors are not allowed, it takes two or three")
    names = labels
    if not names:
        problem_names = [w.name if isinstance(w, Problem) else "" for w in weights]
        names = [name or f"w{k}" for k, name in enumerate(problem_names)]
    rows = _rows(networks)
    if align != "none":
        others = [aligned(problem, rows[0], row, align, seed)[0] for row in rows[1:]]
        rows = torch.stack([rows[0], *others])
    u = rows[1] - rows[0]  # the first direction; v is the second
    rounding = _rounding(problem, rows)
    if not u.norm() > rounding:
        raise OperationError("between: the first two weight vectors are equal, they must differ")
    is_random = len(rows) == 2
    v = double(random_plane(problem, "none", seed).directions[0]) if is_random else rows[2] - rows[0]
    for _ in range(2):  # the second subtraction removes rounding errors of the first
        v = v - u * (v @ u) / (u @ u)
    if not v.norm() > rounding:
        raise OperationError("between: the weight vectors lie on one line; use `landscape line` for it")
    v = v * (u.norm() / v.norm())
    directions = torch.stack((u, v))
    points = _coordinates(rows[0], directions, rows)
    middle = torch.from_numpy((points.min(0) + points.max(0)) / 2).to(rows)
    second_axis = "random direction" if is_random else "toward the third"
    length = f"1 = {float(u.norm()):.3g}"
    axes = f"first to second, {length}", f"{second_axis}, {length}"
    center = rows[0] + middle @ directions
    plane_seed = seed if is_random else 0  # the seed of the random vector
    return _plane(problem, center, "between", rows, networks, names, directions, plane_seed, axes=axes)


@checked(unchecked=("problem",))
def pca_plane(
    problem: Problem | Run, weights: Sequence[Weights] | Tensor, labels: Sequence[str] = ()
) -> Plane:
    """Return the plane through a run's last checkpoint along two principal components of the checkpoints.

    The components are those of largest variance. Directions have unit length, so that coordinates are
    distances between weights. Large shares of variance say little: a random walk in many dimensions has them,
    too (Antognini and Sohl-Dickstein 2018).

    Args:
        problem: the problem to whose model the weights belong; or a run.
        weights: (M, P), M ≥ 3, in order of time; or a list of networks as in :func:`landscape.between`.
        labels: the checkpoints' names; default 0, 1, …

    Returns:
        A plane with the checkpoints as markers (M, 2). ``explained`` (2,) is each direction's share of the
        checkpoints' variance (Li et al. 2018, section 7).

    Raises:
        InputError: fewer than three checkpoints, a vector whose length is not P, or an entry of ``weights``
            that lacks layers of ``problem``.
        OperationError: weights that are equal, on one line or not finite, or tensors whose names or shapes do
            not fit the model.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> landscape.pca_plane(problem, torch.randn(5, 8)).markers.shape
        (5, 2)
    """
    problem = problem_of(problem)
    networks = networks_of(problem, weights, labels)
    if len(networks) < 3:
        raise InputError(f"pca: {len(networks)} checkpoints are too few, at least 3 are needed")
    rows = _rows(networks)
    fields = _components(problem, rows, rows.mean(0), "checkpoints", "component {}, {:.1f}% of variance")
    return _plane(problem, rows[-1], "pca", rows, networks, labels, **fields)


@numerics(1)
@checked(unchecked=("problem",))
def learners_plane(problem: Problem | Run, weights: Sequence[Weights] | Tensor) -> Plane:
    """Return the plane through the mean w_a that fits the learners w_j best, in the least-squares sense.

    The unit directions are the first two right singular vectors of the matrix with rows w_j − w_a. To show
    learners in this plane is our idea, not a paper's.

    Args:
        problem: the problem to whose model the weights belong; or a run.
        weights: (n, P), n ≥ 3; or a list of networks as in :func:`landscape.between`.

    Returns:
        A plane with markers (n + 1, 2), the learners and then w_a; ``explained`` (2,) is the share of each
        direction in the spread Σ_j ‖w_j − w_a‖².

    Raises:
        InputError: fewer than three learners, a vector whose length is not P, or an entry of ``weights``
            that lacks layers of ``problem``.
        OperationError: learners that are equal, on one line or not finite, or tensors whose names or shapes
            do not fit the model.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> landscape.learners_plane(problem, torch.randn(4, 8)).labels[-1]
        'w_a'
    """
    problem = problem_of(problem)
    networks = networks_of(problem, weights)
    if len(networks) < 3:
        raise InputError(f"learners: {len(networks)} learners span no plane, at least 3 are needed")
    labels = [*(f"learner {j}" for j in range(len(networks))), "w_a"]
    rows = _rows(networks)
    mean = average(rows)
    fields = _components(problem, rows, mean, "learners", "direction {}, {:.1f}% of spread")
    networks.append(network_of(problem, mean, "w_a"))
    return _plane(problem, mean, "learners", torch.cat((rows, mean[None])), networks, labels, **fields)


@analysis(
    # Memory, in vectors: 1 for the center; 2 eigenvectors, in the search's result and again in the plane; and
    # those of the search itself.
    lambda problem, **_: needs.curved(problem, 1 + 2 * 2 + needs.basis(problem, 2)),
    shorter="a larger residual_tol= or a part of the data",
)
def eigen_plane(
    problem: Problem | Run,
    *,
    residual_tol: UpToOne = RESIDUAL_TOL,
    max_products: Count = MAX_PRODUCTS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
) -> Plane:
    """Return the plane through the center along the Hessian's unit eigenvectors of λ_max (x) and λ_min (y).

    To second order the loss on this plane is L(θ) + x g·u + y g·v + ½(λ_max x² + λ_min y²), where u and v are
    the eigenvectors and g is the gradient. To show losses in this plane is our idea, not a paper's.

    Args:
        problem: the loss; or a run, on its training set.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000).
        max_products: the largest number of Hessian-vector products.
        seed: the seed of the starting vector.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.

    Returns:
        A plane with directions of length 1.

    Raises:
        InputError: a model with one parameter, or a residual_tol that is not positive.
        OperationError: eigenvectors that did not converge.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> landscape.eigen_plane(problem).directions.norm(dim=1).round(decimals=3).tolist()
        [1.0, 1.0]
    """
    problem = problem_of(problem)
    if problem.layout.size < 2:
        raise InputError("eigen: the model has one parameter, a plane needs at least 2")
    ends = extreme_eigenvalues(problem, residual_tol, max_products=max_products, seed=seed, progress=progress)
    if not ends.converged:
        reason = f"after {ends.products} products a residual is above {residual_tol:g}"
        raise OperationError(f"eigen: {reason}; allow a larger residual_tol or more products")
    axes = f"eigenvector of λ_max = {ends.max:.3g}", f"eigenvector of λ_min = {ends.min:.3g}"
    vectors = torch.from_numpy(ends.vectors).to(problem.device)
    return Plane(problem.weights, vectors, kind="eigen", norm="none", seed=seed, axes=axes)


def _plane(
    problem: Problem, center: Tensor, kind: str, rows: Tensor, networks: list[Network],
    labels: Sequence[str], directions: Tensor, seed: int = 0, **more: Any,
) -> Plane:  # fmt: skip
    """Return a plane that shows ``networks``, whose weights on it are ``rows`` (M, P), as markers."""
    like = at_least_float32(problem.weights)  # a half precision would round each point several times
    return Plane(
        center.to(like),
        directions.to(like),
        kind=kind,
        norm="none",
        seed=seed,
        markers=_coordinates(center, directions, rows),
        labels=tuple(labels) or tuple(str(k) for k in range(len(rows))),
        weights=rows.to(problem.weights),
        networks=tuple(networks) if layers_with_statistics(problem.model) else (),
        **more,
    )


def _rows(networks: Sequence[Network]) -> Tensor:
    """Return the networks' weights (M, P) in float64, because their differences lose most float32 digits."""
    return torch.stack([double(network.theta) for network in networks])


def _rounding(problem: Problem, rows: Tensor) -> float:
    """Return the largest distance of equal weights after rounding to the problem's precision."""
    return float(torch.finfo(problem.dtype).eps * rows.norm())


def _components(problem: Problem, rows: Tensor, mean: Tensor, noun: str, label: str) -> dict[str, Any]:
    """Return the fields on the two unit directions of the largest variance of ``rows`` around ``mean``.

    Args:
        problem: the problem.
        rows: (M, P), weights.
        mean: (P,).
        noun: names the weights in messages, such as "learners".
        label: the label of an axis, with places for a direction's number and its share in percent.
    """
    _, lengths, directions = torch.linalg.svd(rows - mean, full_matrices=False)
    limit = _rounding(problem, rows)
    if lengths[1] <= limit:
        reason, needed = ("are equal", "differ") if lengths[0] <= limit else ("lie on one line", "do not")
        raise OperationError(f"{noun}: all {len(rows)} {reason}, a plane needs at least 3 that {needed}")
    explained = (lengths**2 / (lengths**2).sum())[:2].cpu().numpy()
    axes = tuple(label.format(k + 1, 100 * share) for k, share in enumerate(explained))
    return {"directions": directions[:2], "axes": axes, "explained": explained}


def _coordinates(center: Tensor, directions: Tensor, rows: Tensor) -> Array:
    """Return the coordinates (M, 2) of the plane's points nearest to ``rows``, for orthogonal directions."""
    coordinates: Tensor = (rows - center) @ directions.T / directions.square().sum(1)
    return coordinates.cpu().numpy()
