"""Flat θ and Problem: what every analysis stands on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import landscape
from landscape import InputError, Problem
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


def test_tied_parameters_appear_once_and_frozen_ones_not() -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    tied[2].weight = tied[0].weight
    problem = Problem(tied, nn.functional.mse_loss, (torch.randn(4, 3), torch.randn(4, 3)))
    assert problem.layout.size == 9
    moved = problem.weights + 1
    shifted = copy.deepcopy(tied)
    with torch.no_grad():
        shifted[0].weight += 1
    assert problem.tensors is not None
    x, y = problem.tensors
    expected = nn.functional.mse_loss(shifted(x), y).item()
    assert problem.loss(moved) == pytest.approx(expected, rel=1e-6)
    assert problems.linear_regression().layout.size == 5


def test_gradients_have_no_graph_and_are_zero_where_nothing_depends() -> None:
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    for keep in (True, False):
        found = gradients((a**2).sum(), [a, b], keep=keep)
        assert not any(part.requires_grad for part in found)
        torch.testing.assert_close(found, [2 * a.detach(), torch.zeros(3)])


@pytest.mark.parametrize("name", problems.ALL)
def test_gradient_matches_one_big_batch(name: str) -> None:
    problem = problems.ALL[name]()
    problem.data.chunk_size = 7  # several chunks, the last one ragged
    theta = problem.weights + 0.1 * torch.randn_like(problem.weights)
    torch.testing.assert_close(problem.gradient(theta), problems.textbook_gradient(problem, theta))


def test_a_ragged_last_batch_is_weighted_by_its_samples() -> None:
    whole = problems.mlp(samples=10)
    assert whole.tensors is not None
    x, y = whole.tensors
    parts = Problem(whole.model, whole.criterion, [(x[:9], y[:9]), (x[9:], y[9:])])
    assert parts.loss() == pytest.approx(whole.loss(), rel=1e-12)
    assert parts.accuracy() == pytest.approx(whole.accuracy(), rel=1e-12)
    torch.testing.assert_close(parts.gradient(), whole.gradient())


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
