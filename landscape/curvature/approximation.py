"""Cheaper products for the search of eigenvectors: fewer samples, and the data in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.curvature.chain_hessian import ChainHessian
from landscape.curvature.krylov import start_vector
from landscape.evaluation.needs import MAX_BASIS
from landscape.problem.losses import is_softmax_loss
from landscape.problem.problem import Problem

# Cheaper searches are for matrices whose basis does not become complete, and tolerances that a few
# corrections reach (ours).
MIN_PARAMETERS = 10 * MAX_BASIS
MIN_TOL = 1e-3
# The share of Σ(1 − p) of the samples of a cheaper search. On MNIST's MLPs these are 20 to 70% of all, and
# the lowest eigenvalue is then 2 to 4% off. Above a share of MAX_SAMPLES the corrections would cost more.
CURVATURE_SHARE = 0.99
MAX_SAMPLES = 0.8
# The largest relative error of a product in bfloat16 for which few corrections suffice; it is 0.2% on MNIST's
# MLPs, and more where the numbers of the data are close to one another (ours).
BFLOAT16_ERROR = 0.02


@dataclass(frozen=True)
class Approximation:
    """The problem of a search, perhaps with fewer samples, and the precision of its data."""

    problem: Problem
    dtype: torch.dtype

    def name(self, whole: Problem) -> str:
        """Such as "float32" or "bfloat16, 2,372 of 10,000 samples"."""
        part = f", {self.problem.samples:,} of {whole.samples:,} samples"
        return str(self.dtype).removeprefix("torch.") + part * (self.problem is not whole)


@torch.no_grad()
def cheapest(problem: Problem, thetas: Tensor, is_chain: bool, one: ChainHessian | None) -> Approximation:
    """The samples with most of the curvature at ``thetas``, and the faster precision.

    All samples where the problem is regularised: the penalty is no mean over samples. ``one``: the products
    at the only point, whose outputs are used again.
    """
    dtype = torch.bfloat16 if is_chain and _bfloat16_serves(problem) else problem.dtype
    tensors, loss = problem.data.tensors, problem.criterion
    usable = is_softmax_loss(loss) and not problem.regularised and not problem.batchnorm.samples
    usable = usable and problem.separable
    if not usable or tensors is None or tensors[1].dim() != 1:
        return Approximation(problem, dtype)
    missing = torch.zeros(problem.samples, device=problem.device)
    for theta in thetas:
        outputs = (
            [(c.z[0].T, c.y) for c in one.chunks]
            if one
            else ((problem.outputs(theta, x), y) for x, y, _ in problem.chunks())
        )
        parts = [1 - z.softmax(1).gather(1, y[:, None]).squeeze(1) for z, y in outputs]
        missing += (
            torch.cat(parts).float().nan_to_num(nan=1.0)
        )  # a NaN of one point does not spread to others
    most, order = missing.sort(descending=True)
    count = int((most.cumsum(0) < CURVATURE_SHARE * most.sum()).sum()) + 1
    if count > MAX_SAMPLES * problem.samples:
        return Approximation(problem, dtype)
    return Approximation(problem.subset(order[:count].sort().values), dtype)


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether the hardware multiplies in bfloat16: CUDA from Ampere on, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def _bfloat16_serves(problem: Problem) -> bool:
    """Whether products with the data in bfloat16 are fast, and near enough on a few samples at the centre."""
    if problem.dtype != torch.float32 or not bfloat16_is_fast(problem.device):
        return False
    few = ChainHessian(problem.on(problem.data.few()), problem.theta[None])
    v = start_vector(problem, 0)[None]
    exact = few(v)
    return bool((few(v, torch.bfloat16) - exact).norm() <= BFLOAT16_ERROR * exact.norm())
