"""BatchNorm's policies against references whose statistics are set by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape import Problem
from tests.battery.case import Case, Parts
from tests.battery.checks import Findings
from tests.battery.reference import Reference
from tests.battery.test_battery import CASES

NAMES = ("BatchNorm1d", "convolution and BatchNorm used twice")


class BatchStatistics(Reference):
    """Each pass with the statistics of its own batch, which derivatives go through."""

    def load(self, theta: Tensor) -> None:
        super().load(theta)
        for layer in self.model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()
                layer.momentum = 0.0  # running statistics, which nobody asks for, stay


class Recalibrated(Reference):
    """The statistics that the data has at the weights, which derivatives take as constants."""

    @torch.no_grad()
    def load(self, theta: Tensor) -> None:
        super().load(theta)
        layers = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
        self.outputs()
        for layer in layers:
            layer.eval()


def _of(name: str) -> tuple[Case, Parts, Parts]:
    case = next(case for case in CASES if case.name == name)
    return case, case.parts(), case.parts()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("bn", "kind"), [("recalibrate", Recalibrated), ("train", BatchStatistics)])
def test_a_policy_is_right(name: str, bn: str, kind: type[Reference]) -> None:
    case, (model, loss, data), (own, own_loss, own_data) = _of(name)
    r = kind(own, own_loss, *case.whole(own_data))
    theta, found = r.center, Findings()
    whole = Problem(model, loss, data, dtype=torch.float64)
    problem = whole.with_batchnorm(bn, 250)
    away = theta + 0.1 * torch.linspace(-1, 1, len(theta), dtype=torch.float64)
    for at in (away, theta):  # what was estimated elsewhere must not stay
        found.compare("loss", problem.loss(at), r.loss(at), 1e-9)
        found.compare("gradient", problem.gradient(at), r.gradient(at), 1e-8, 1.0)
    h = r.hessian(theta)
    values = torch.linalg.eigvalsh(h)
    for _ in range(2):
        v = torch.linspace(-1, 1, r.size, dtype=torch.float64).cos()
        found.compare("product", landscape.HessianOperator(problem)(v), h @ v, 1e-8, 1.0)
        found.compare(
            "product elsewhere", landscape.HessianOperator(problem, away)(v), r.hessian(away) @ v, 1e-8, 1.0
        )
    e = landscape.extreme_eigenvalues(problem, residual_tol=1e-6)
    found.compare("ends", [e.min, e.max], [values[0], values[-1]], 1e-5)
    plane = landscape.random_plane(whole, norm="filter")
    s = landscape.contour(whole, plane, grid=(3, 2), span=0.3, bn=bn, bn_samples=250)
    found.compare("contour", s.loss, r.surface(theta, plane.directions, s.x.tolist(), s.y.tolist()), 1e-9)
    assert not found.wrong, "\n".join(found.wrong)
