"""Topologies that average exactly after some steps with few neighbors a step, and EquiTopo's."""

from __future__ import annotations

import math

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import Count, Natural
from landscape.core.registry import topologies
from landscape.training.topology import equal_weights


@topologies.add("k-peer-exponential")
def k_peer_exponential(n: int, k: Count) -> list[Array]:
    """k-peer-exponential(k): 1/(k + 1) from each of those j(k + 1)^i after it, j = 1…k, i = 0, 1, … in turn.

    It averages exactly after a step for each i if n is a(k + 1)^i with a ≤ k + 1, and never otherwise; k = 1
    is the one-peer exponential graph (Ying et al. 2021). Those further than n − 1 are left out.
    """
    strides = [(k + 1) ** i for i in range(_digits(n - 1, k + 1))] or [1]
    return [equal_weights(n, [0, *(j * s for j in range(1, k + 1) if j * s < n)]) for s in strides]


@topologies.add("hyper-hypercube")
def hyper_hypercube(n: int, k: Count) -> list[Array]:
    """hyper-hypercube(k): n = n₁n₂…, factors ≤ k + 1; those that differ in the i-th digit average, i in turn.

    Digits are those of the learner's number in the mixed base n₁, n₂, …. It averages exactly after a step for
    each factor (Takezawa et al. 2023, Algorithm 1).
    """
    if _smooth_part(n, k) != n:
        raise InputError(f"their prime factors must be at most k + 1 = {k + 1}; base(k) takes any number")
    return _cubes(n, k)


@topologies.add("base")
def base(n: int, k: Count = 1) -> list[Array]:
    """base, base(k): the Base-(k+1) graph, at most k neighbors a step, k = 1 if not given.

    It averages exactly after at most 2 log n / log(k + 1) + 2 steps, whatever n is (Takezawa et al. 2023,
    Algorithms 2 and 3).
    """
    k = min(k, max(n - 1, 1))
    simple, smooth = _simple_base(n, k), _smooth_part(n, k)
    product = [np.kron(np.eye(smooth), m) for m in _simple_base(n // smooth, k)]
    product += [np.kron(m, np.eye(n // smooth)) for m in _cubes(smooth, k)]
    return min(product, simple, key=len)


@topologies.add("d-equistatic")
def d_equistatic(n: int, m: Count, seed: Natural = 0) -> list[Array]:
    """d-equistatic(m), d-equistatic(m, seed): the mean of m matrices I/n + (1 − 1/n)P, P a random shift.

    Learner j takes from the one u after it, u drawn from 1…n − 1 with replacement for each of the m, once for
    the run. The gap does not shrink as n grows (D-EquiStatic, Song et al. 2022).
    """
    if n < 2:
        raise InputError("there must be two or more")
    mean = np.eye(n) / n
    for shift in np.random.default_rng(seed).integers(1, n, m):
        mean += (1 - 1 / n) / m * np.roll(np.eye(n), shift, 1)
    return [mean]


@topologies.add("u-equistatic")
def u_equistatic(n: int, m: Count, seed: Natural = 0) -> list[Array]:
    """u-equistatic(m), u-equistatic(m, seed): (W + Wᵀ)/2, W that of d-equistatic (Song et al. 2022)."""
    (directed,) = d_equistatic(n, m, seed)
    return [(directed + directed.T) / 2]


def _digits(number: int, base: int) -> int:
    """Return the number of digits of ``number`` in ``base``; 0 has none."""
    return 0 if number < 1 else 1 + _digits(number // base, base)


def _smooth_part(n: int, k: int) -> int:
    """Return the largest divisor of n without a prime factor above k + 1."""
    quotient = n
    for factor in range(2, k + 2):
        while quotient % factor == 0:
            quotient //= factor
    return n // quotient


def _cubes(n: int, k: int) -> list[Array]:
    """Return the steps of the k-peer hyper-hypercube; one without exchange for a single learner."""
    factors: list[int] = []
    while (quotient := n // math.prod(factors)) > 1:
        factors.insert(0, max(f for f in range(2, k + 2) if quotient % f == 0))
    steps, stride = [], 1
    for factor in factors:
        among = np.kron(np.full((factor, factor), 1 / factor), np.eye(stride))
        stride *= factor
        steps.append(np.kron(np.eye(n // stride), among))
    return steps or [np.eye(1)]


def _simple_base(n: int, k: int) -> list[Array]:
    """Return the mixing matrices (n, n) of the simple Base-(k+1) graph, one for each step.

    In base k + 1, n = a₁(k + 1)^p₁ + a₂(k + 1)^p₂ + … with p₁ > p₂ > …. Group j has a_j pieces of (k + 1)^p_j
    learners. First, the learners of each group average. Then, one group after the other exchanges with all
    later groups: each learner of the later groups exchanges with one learner of each piece of the group.
    After the exchange of a group, the mean over each piece of the group is equal to the mean over the later
    groups. Last, the learners of each piece average.
    """
    if _smooth_part(n, k) == n:  # no prime factor of n is above k + 1
        return _cubes(n, k)
    groups: list[tuple[int, int]] = []  # number of pieces a, learners in a piece (k + 1)^p
    for p in reversed(range(_digits(n, k + 1))):
        piece = (k + 1) ** p
        a = n // piece % (k + 1)
        if a:
            groups.append((a, piece))
    starts = np.cumsum([0, *(a * piece for a, piece in groups)])  # the first learner of each group, then n
    # For each group, the matrices of a hyper-hypercube's steps. After these steps the group has averaged.
    cubes = [_cubes(a * piece, k) for a, piece in groups]
    steps = []
    for t in range(len(cubes[0])):  # the first group is the largest, and needs the most steps
        m = np.zeros((n, n))
        for start, cube in zip(starts, cubes, strict=False):
            end = start + len(cube[0])
            m[start:end, start:end] = cube[t % len(cube)]
        steps.append(m)
    last = len(groups) - 1
    # Group j, counted from 0, exchanges in the steps t = 0, …, j. In the next p steps each piece of (k + 1)^p
    # learners averages. From group to group p falls by at least 1: after p₁ + 1 steps all groups are done.
    for t in range(round(math.log(groups[0][1], k + 1)) + 1):
        m = np.eye(n)
        if t < last:  # group t exchanges with all later groups
            # The learners of the later groups; the order decides only who exchanges with whom.
            later = [i for j in range(last, t, -1) for i in range(starts[j], starts[j + 1])]
            a, piece = groups[t]
            _exchange(m, starts[t], a, piece, later, k)
        for j, (a, piece) in enumerate(groups):
            first_step = min(j + 1, last)  # the last group exchanges only up to the step last − 1
            if t >= first_step:
                # The learners of each piece average. A group of single learners has the average already; it
                # averages once more, which changes no weights.
                cube = cubes[j] if piece == 1 else [np.kron(np.eye(a), c) for c in _cubes(piece, k)]
                m[starts[j] : starts[j + 1], starts[j] : starts[j + 1]] = cube[(t - first_step) % len(cube)]
        steps.append(m)
    return steps


def _exchange(m: Array, start: int, a: int, piece: int, later: list[int], k: int) -> None:
    """Set the entries of ``m`` for the exchange of the group at ``start``, of ``a`` pieces, with ``later``.

    The rest of the group averages in sets of k + 1, which keeps the learners together (Algorithm 2).
    """
    share = a * piece / (a * piece + len(later))
    for count, learner in enumerate(later, 1):
        m[learner, learner] = 1 - share
        for partner in range(start + piece - count, start + a * piece, piece):
            m[learner, partner] = m[partner, learner] = share / a
            m[partner, partner] = 1 - share / a
    unmatched = [start + q * piece + i for q in range(a) for i in range(piece - len(later))]
    for i in range(0, len(unmatched), k + 1):
        learners = unmatched[i : i + k + 1]
        m[np.ix_(learners, learners)] = 1 / len(learners)
