"""The sharpness of the average along a run, compared with the stability limit of the rule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from landscape.curvature.eigenvalues import exact_products
from landscape.curvature.hessian import operator
from landscape.curvature.lanczos import Eigenpairs, lanczos
from landscape.curvature.start import start_vector, warm_start
from landscape.problem.problem import Problem
from landscape.train.distributed.comm import Comm
from landscape.train.randomness import generator
from landscape.train.recipe_tables import Monitor

STATE = "monitor_start"  # the name in a checkpoint of the vector near which the next search begins


class Sharpness:
    """λ_max of ∇²L at w_a every ``every`` steps, on a fixed sample of the training set.

    A Lanczos search begins at the sum of the eigenvectors of the previous search, plus a random vector of the
    same norm, the same every time, so that an eigenvector orthogonal to them is not missed. It uses exact
    products only: cheaper products are chosen by timing, on which the history's bits must not depend.
    ``state`` is the sum, so that a resumed run gives the bits of one that never stopped.

    Rank 0 searches; every process multiplies with its share of the sample. ``stability_limit`` is the largest
    stable ηλ of the rule with its optimizer, None where it is not known.
    """

    def __init__(
        self, monitor: Monitor, problem: Problem, comm: Comm, seed: int, stability_limit: float | None
    ) -> None:
        self.every, self.stability_limit, self._comm = monitor.sharpness, stability_limit, comm
        self.top = min(monitor.top, problem.layout.size)
        self.state: dict[str, Tensor] = {}
        if not self.every:
            return
        operator(problem)  # refuses a model that is random in eval mode, before the first step
        batch, samples = problem.batchnorm.samples, min(monitor.samples or problem.samples, problem.samples)
        if batch:  # whole batches, as a sample's loss depends on its batch
            samples = max(1, samples // batch) * batch
        if samples < problem.samples:
            order = torch.randperm(problem.samples, generator=generator(seed, "monitor"))
            problem = problem.subset(order[:samples].sort().values)
        self._random = start_vector(problem, seed)
        share = comm.share(problem.samples)
        if batch:  # a share would be cut into other batches than the whole set: rank 0 computes alone
            share = slice(0, problem.samples if comm.rank == 0 else 0)
        self._share = (share.stop - share.start) / problem.samples
        self._local = problem.subset(share) if 0 < self._share < 1 else problem

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """The state of a checkpoint, if it has one."""
        if self.every and STATE in shared:
            self.state = {STATE: shared[STATE].to(self._random)}

    def columns(self, weights: Tensor, lr: float) -> dict[str, float]:
        """The history's columns for learners at ``weights`` (n_local, P); NaN where H is not finite."""
        mean = self._comm.mean(weights)
        pairs = self._search(mean)
        if pairs is None:
            self.state = {}
            return {}
        self.state = {STATE: pairs.vectors.sum(0)}
        spread = weights - mean
        totals = self._comm.start_learners_mean(
            float((spread @ pairs.vectors.T).double().square().sum()) / len(spread),
            float(spread.double().square().sum()) / len(spread),
        )
        along, total = totals()
        top = float(pairs.values[0])
        return {
            "lambda_max": top,
            "lambda_max_residual": float(pairs.residuals[0]),
            "lr_lambda_max": lr * top,
            "lr_lambda_limit": math.nan if self.stability_limit is None else self.stability_limit,
            "spread_share": along / total if total else math.nan,
        }

    def warning(self, row: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> str:
        """A line where ``row`` is the first above the limit, of those ``before`` as well; else ""."""
        over = [r["lr_lambda_max"] > r["lr_lambda_limit"] for r in (row, *before)]
        if not over[0] or any(over[1:]):
            return ""
        return (
            f"step {row['step']:.0f}: lr·λ_max = {row['lr_lambda_max']:.3g} is above "
            f"{self.stability_limit:.4g}, up to which the steps are stable on a quadratic; told once, the "
            "history has the rest"
        )

    def _search(self, theta: Tensor) -> Eigenpairs | None:
        """The pairs at ``theta`` (P,), the same on all ranks, with eigenvectors (top, P)."""
        local = exact_products(self._local, theta)[0] if self._share else None
        near = self.state.get(STATE)
        start = self._random if near is None else warm_start(near, self._random)
        if self._comm.size == 1:
            assert local is not None
            with contextlib.suppress(_NotFiniteError):
                return lanczos(lambda v: _finite(local(v[None])[0]), start, high=self.top)
            return None

        def shared(v: Tensor, going: float = 1.0) -> Tensor:
            """H ``v`` for the ``v`` of rank 0, which all ranks receive; they stop if ``going`` is 0."""
            sent = torch.cat((v.double(), v.new_tensor([going], dtype=torch.float64)))
            sent = self._comm.totals(sent if self._comm.rank == 0 else torch.zeros_like(sent))
            if not sent[-1]:
                raise _StoppedError
            product = local(sent[None, :-1].to(theta))[0] * self._share if local else sent[:-1] * 0
            return self._comm.totals(product.double()).to(theta)

        pairs: Eigenpairs | None = None
        if self._comm.rank == 0:
            with contextlib.suppress(_NotFiniteError):
                pairs = lanczos(lambda v: _finite(shared(v)), start, high=self.top)
            with contextlib.suppress(_StoppedError):
                shared(start, going=0.0)
        else:
            with contextlib.suppress(_StoppedError):
                while True:
                    shared(start)
        return self._broadcast(pairs, theta)

    def _broadcast(self, pairs: Eigenpairs | None, theta: Tensor) -> Eigenpairs | None:
        """The ``pairs`` of rank 0, on all ranks."""
        table = torch.zeros(self.top, len(theta) + 3, dtype=torch.float64, device=theta.device)
        if pairs is not None:
            numbers = torch.stack((pairs.values, pairs.residuals), 1).to(table)
            table = torch.cat((torch.ones_like(numbers[:, :1]), numbers, pairs.vectors.double()), 1)
        table = self._comm.totals(table)
        if not table[0, 0]:
            return None
        return Eigenpairs(table[:, 1].cpu(), table[:, 3:].to(theta), table[:, 2].cpu(), 0, True)


class _NotFiniteError(Exception):
    """A Hessian with NaN or infinities has no eigenvalues."""


class _StoppedError(Exception):
    """Rank 0 needs no further products."""


def _finite(product: Tensor) -> Tensor:
    if not bool(torch.isfinite(product).all()):
        raise _NotFiniteError
    return product
