"""The references themselves: against differences, and against what a sheet of paper gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.battery.case import Case
from tests.battery.reference import Reference
from tests.battery.test_battery import CASES

SMOOTH = (
    "activation Tanh", "BatchNorm2d", "LSTM", "TransformerEncoderLayer", "weights tied", "0-dim parameter",
)  # fmt: skip


def reference(case: Case) -> Reference:
    model, loss, data = case.parts()
    return Reference(model, loss, *case.whole(data))


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_and_hessian_are_those_of_the_loss(name: str) -> None:
    r = reference(next(case for case in CASES if case.name == name))
    slope, h = r.gradient(r.center), r.hessian(r.center)
    torch.testing.assert_close(h, r.hessian(r.center, differences=True), rtol=1e-6, atol=1e-8)
    v = torch.linspace(-1, 1, r.size, dtype=torch.float64)
    step = 1e-4
    ahead, here, behind = (r.loss(r.center + t * v) for t in (step, 0.0, -step))
    assert (ahead - behind) / (2 * step) == pytest.approx(float(slope @ v), rel=1e-5, abs=1e-8)
    assert (ahead - 2 * here + behind) / step**2 == pytest.approx(float(v @ h @ v), rel=1e-3, abs=1e-6)


def test_linear_regression_has_the_textbooks_hessian() -> None:
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    r = Reference(nn.Linear(3, 1, bias=False), F.mse_loss, x, y)
    expected = 2 * x.T @ x / 9
    torch.testing.assert_close(r.hessian(r.center), expected)
    torch.testing.assert_close(r.gauss_newton(r.center), expected)
    torch.testing.assert_close(r.gradient(r.center), expected @ r.center - 2 * (x.T @ y).squeeze(1) / 9)
