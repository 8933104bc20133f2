"""Products and quotients of means that are known by k independent estimates, without bias, with errors.

The product of two means is estimated from pairs of *different* estimates, which are independent: the square
of an estimate is too large by its variance. Such a mean over pairs is a U-statistic of order 2 (Hoeffding
1948), given here by its kernel, h (..., k, k), symmetric in the last two, whose diagonal is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean(h: Tensor) -> Tensor:
    """(...,): the mean of ``h`` over all pairs of different estimates.

    Example:
        >>> mean(torch.tensor([[9.0, 1.0], [2.0, 9.0]])).item()
        1.5
    """
    k = h.shape[-1]
    return _off(h).sum((-1, -2)) / (k * (k - 1))


def covariance(a: Tensor, b: Tensor) -> Tensor:
    """(...,): that of the means of ``a`` and ``b`` over pairs, without bias.

    E of their product, less the product of their expectations, for which pairs with no estimate in common
    stand. Needs four estimates or more.
    """
    return mean(a) * mean(b) - _apart(_off(a), _off(b))


def standard_error(h: Tensor) -> Tensor:
    """(...,): of the mean of ``h`` over pairs, √((4(k − 2) ζ₁ + 2 ζ₂)/(k(k − 1))), ζ's unbiased or 0.

    ζ₁ is the covariance of pairs with one estimate in common, ζ₂ the variance of one pair. Where ζ₁ is 0 the
    jackknife would state an error √2 times too large.
    """
    k, h = h.shape[-1], _off(h)
    apart, squares = _apart(h, h), h.square().sum((-1, -2))
    shared = (h.sum(-1).square().sum(-1) - squares) / (k * (k - 1) * (k - 2))
    one, two = (shared - apart).clamp(min=0), (squares / (k * (k - 1)) - apart).clamp(min=0)
    return ((4 * (k - 2) * one + 2 * two) / (k * (k - 1))).sqrt()


def quotient(above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """mean(above)/mean(below), its bias of order 1/k taken off, and its standard error, (...,) each.

    Both from the same estimates, so that what they have in common cancels. The error is that of the
    linearised quotient. NaN where mean(below) is not positive, as the divisor is then unknown.
    """
    down = mean(below)
    down = down.where(down > 0, torch.nan)
    value = mean(above) / down
    linear = (above - value[..., None, None] * below) / down[..., None, None]
    return value + covariance(linear, below) / down, standard_error(linear)


def _off(h: Tensor) -> Tensor:
    return h.masked_fill(torch.eye(h.shape[-1], dtype=torch.bool, device=h.device), 0.0)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """The mean of a_ij b_kl over i, j, k, l that all differ, by inclusion and exclusion."""
    k, both = a.shape[-1], (-1, -2)
    shared = (a.sum(-1) * b.sum(-1)).sum(-1)
    total = a.sum(both) * b.sum(both) - 4 * shared + 2 * (a * b).sum(both)
    return total / (k * (k - 1) * (k - 2) * (k - 3))
