"""From checkpoints to planes, for the commands that work on one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from landscape.analysis.planes import (
    IGNORES,
    NORMS,
    between,
    eigen_plane,
    learners_plane,
    pca_plane,
    random_plane,
)
from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.completion import Choice
from landscape.cli.options import group
from landscape.core.errors import FailedError, InputError
from landscape.problem.problem import Problem
from landscape.results.grids import Plane

KINDS = ("random", "between", "pca", "learners", "eigen")


@dataclass(frozen=True)
class Chosen:
    """The kind of the planes; ``norm`` and ``ignore`` are of random ones.

    Args:
        kind: random; between (through two or three CKPTs); pca (of the step-*.h5 up to the CKPT); learners
            (nearest to all learners); eigen (Hessian eigenvectors of λ_max and λ_min).
        norm: Directions: none (i.i.d. normal, the paper's), filter or layer (Li et al. 2018).
        ignore: What random directions leave out: none, or bias+norm (bias and norm parameters). [default:
            bias+norm with --norm filter, else none]
    """

    kind: str = "random"
    norm: str = "none"
    ignore: str | None = None


OPTIONS = group(
    Chosen,
    kind={"flag": "--plane", "type": Choice(KINDS)},
    norm={"type": Choice(NORMS)},
    ignore={"type": Choice(IGNORES)},
)


def check(chosen: Chosen, runs: list[Checkpoint]) -> list[list[Checkpoint]]:
    """The checkpoints of each surface, its own first; all options are checked before any work."""
    kind, norm, ignore = chosen.kind, chosen.norm, chosen.ignore
    if kind != "random" and (norm != "none" or ignore is not None):
        raise InputError(f"--norm, --ignore: they are for random planes, '--plane {kind}' has none to scale")
    if kind == "random":
        same_layout(runs)
    if kind == "between":
        if len(runs) not in (2, 3):
            raise InputError(
                f"--plane between: {len(runs)} checkpoints are not allowed, it takes two or three"
            )
        same_network(runs)
        return [runs]
    return [[run, *trajectory(run)] if kind == "pca" else [run] for run in runs]


def make(chosen: Chosen, problem: Problem, group: list[Checkpoint], seed: int) -> Plane:
    """The plane around the problem of a group's checkpoint; errors name its file."""
    kind, run = chosen.kind, group[0]
    if kind == "random":
        return random_plane(problem, norm=chosen.norm, seed=seed, ignore=chosen.ignore)
    try:
        if kind == "between":
            return between(problem, [r.mean for r in group], names(group), seed=seed)
        if kind == "pca":
            path = [*group[1:], run]
            return pca_plane(problem, [r.mean for r in path], [f"step {r.step:,}" for r in path])
        if kind == "learners":
            return learners_plane(problem, run.weights)
        return eigen_plane(problem, seed=seed)
    except InputError as error:
        raise FailedError(f"{run.path}: {error}") from error


def same_layout(runs: list[Checkpoint]) -> None:
    """FailedError unless all weights have the same names and shapes, so that a direction fits them all."""
    first = runs[0]
    for run in runs[1:]:
        if run.layout != first.layout:
            raise FailedError(
                f"{run.path}: its layout of {run.layout.size:,} weights is not that of {first.path} "
                f"({first.layout.size:,}); they share no directions"
            )


def same_network(runs: list[Checkpoint]) -> None:
    """FailedError unless all checkpoints hold weights of one network, trained on the same data."""
    same_layout(runs)
    first = runs[0]
    for run in runs[1:]:
        if run.model != first.model:
            raise FailedError(
                f"{run.path}: its model {run.model['name']} {run.model['options']} is not that of "
                f"{first.path}, {first.model['name']} {first.model['options']}"
            )
        if run.data["fingerprint"] != first.data["fingerprint"]:
            raise FailedError(f"{run.path}: trained on other data than {first.path}; both must have the same")


def trajectory(run: Checkpoint) -> list[Checkpoint]:
    """The checkpoints step-*.h5 before ``run`` in its folder, in order of their steps."""
    assert run.path is not None
    by_step: dict[int, Checkpoint] = {}
    for path in run_folder.steps(run.path.parent):
        saved = Checkpoint.load(path, whole_history=False)
        by_step.setdefault(saved.step, saved)  # a copy under another name is not taken twice
    earlier = [by_step[step] for step in sorted(by_step) if step < run.step]
    if len(earlier) < 2:
        raise FailedError(
            f"{run.path}: {len(earlier)} earlier step-*.h5 in its folder, '--plane pca' needs at least 2 "
            "(see checkpoint.every)"
        )
    same_network([run, *earlier])
    return earlier


def names(runs: list[Checkpoint]) -> list[str]:
    """What to call checkpoints in one picture: their labels, or their paths where labels are equal."""
    labels = [run.label for run in runs]
    return labels if len(set(labels)) == len(labels) else [str(run.path) for run in runs]


def ends(problem: Problem, runs: list[Checkpoint]) -> torch.Tensor:
    """The means (2, P) of two checkpoints, where the problem is. FailedError for what is not finite."""
    for run in runs:
        if not bool(torch.isfinite(run.mean).all()):
            raise FailedError(f"{run.path}: its weights are NaN or infinite, all must be finite")
    return torch.stack([run.mean for run in runs]).to(problem.theta)
