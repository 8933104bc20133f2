"""Flat θ and Problem: what every analysis stands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import landscape
from landscape import InputError, Problem
from landscape.core.devices import inner, vector_norm
from landscape.curvature.operators import ALONE
from landscape.problem.layout import Layout, gradients
from tests import problems


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(1, 4))
def test_views_and_flatten_are_inverse(widths: list[int], rows: int) -> None:
    layout = Layout.of(landscape.models.build("mlp", widths=widths))
    theta = torch.randn(rows, layout.size)
    assert torch.equal(layout.flatten(layout.views(theta), lead=1), theta)
    assert [s.offset for s in layout.slots] == [
        sum(t.size for t in layout.slots[:i]) for i in range(len(layout.slots))
    ]


def test_layout_is_the_order_of_parameters_to_vector() -> None:
    model = problems.SmallConv()
    layout = Layout.of(model)
    flat = nn.utils.parameters_to_vector(model.parameters())
    for name, view in layout.views(flat).items():
        assert torch.equal(view, dict(model.named_parameters())[name])
    assert {s.name: s.role for s in layout.slots} == {
        "conv.weight": "weight",
        "conv.bias": "bias",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "head.weight": "weight",
        "head.bias": "bias",
    }


def test_gradients_have_no_graph_and_are_zero_where_nothing_depends() -> None:
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    for keep in (True, False):
        found = gradients((a**2).sum(), [a, b], keep=keep)
        assert not any(part.requires_grad for part in found)
        torch.testing.assert_close(found, [2 * a.detach(), torch.zeros(3)])


def test_bad_problems_are_refused() -> None:
    model, loss = nn.Linear(2, 2), nn.functional.cross_entropy
    x, y = torch.randn(4, 2), torch.randint(2, (4,))
    odd = torch.tensor([1.0, 2, 3, float("nan"), 5, 6])
    given: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
        (model, iter([(x, y)]), {}, "iterator"),
        (model, (x[:0], y[:0]), {}, "no samples"),
        (model, (x, y[:3]), {}, "inputs: 4 samples, but targets: 3"),
        (nn.ReLU(), (x, y), {}, "no trainable parameters"),
        (nn.Linear(2, 2, dtype=torch.complex64), (x, y), {}, "complex"),
        (model, (x, y), {"weights": odd}, "1 of 6 are NaN"),
        (model, (x, y), {"weights": torch.zeros(3)}, r"\(3,\), the model needs \(6,\)"),
    ]
    for module, data, options, words in given:
        with pytest.raises(InputError, match=words):
            Problem(module, loss, data, **options)


def test_sums_of_ten_million_float32_numbers_keep_their_digits() -> None:
    """PyTorch's own are off by 3e-4 and 7e-4 here, and by percents in larger models."""
    v = torch.randn(10**7, generator=torch.Generator().manual_seed(0))
    exact = float(v.double() @ v.double())
    assert abs(float(vector_norm(v)) / exact**0.5 - 1) < 1e-5
    assert abs(float(inner(v[None], v)[0]) / exact - 1) < 1e-5
    q = ALONE.orthonormal(torch.stack((v, v.roll(1)))).double()
    torch.testing.assert_close(q @ q.T, torch.eye(2, dtype=torch.float64), rtol=0, atol=2e-5)
