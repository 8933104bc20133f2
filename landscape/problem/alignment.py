"""Weights whose hidden units are permuted so that they come as near to others as they can.

The function stays the same: the groups of units are found by :mod:`.symmetry` and tried on the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from landscape.core.devices import widest_dtype
from landscape.core.errors import InputError
from landscape.problem.batchnorm import SAMPLES
from landscape.problem.checks import moved
from landscape.problem.layout import Layout
from landscape.problem.mean_loss import MeanLoss
from landscape.problem.symmetry import NATURAL, Space, leaves, seen, traced

# The largest relative change of outputs that counts as rounding (the issue's; in float64 it is far below).
UNCHANGED = 1e-5
# Samples on which groups are tried (ours: statistics of BatchNorm need several).
TRIED = 32
Blocks = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Group:
    """Hidden units that may be permuted together.

    Attributes:
        name: the first parameter that has them.
        size: how many.
        places: parameter -> the axes, of its blocks, that run over them.
        space: what :mod:`.symmetry` found.
        outer: parameter -> the axis of the blocks in each of which they may be permuted in another way, as
            the numbers of a head may in each head; empty where there is none.
    """

    name: str
    size: int
    places: Mapping[str, tuple[int, ...]]
    space: Space
    outer: Mapping[str, int] = field(default_factory=dict)

    def permute(self, blocks: Blocks, index: Tensor) -> Blocks:
        """Those of the blocks that have these units, with unit ``index[i]`` in place i.

        ``index`` is (size,), or (blocks, size) with ``outer``.
        """
        found = {}
        for name, dims in self.places.items():
            tensor = blocks[name]
            for dim in dims:
                if not self.outer:
                    tensor = tensor.index_select(dim, index)
                    continue
                shape, place = [1] * tensor.dim(), self.outer[name]
                shape[dim], shape[place] = index.shape[1], index.shape[0]
                tensor = tensor.take_along_dim((index if place < dim else index.T).reshape(shape), dim)
            found[name] = tensor
        return found


@dataclass(frozen=True)
class Symmetry:
    """The permutations of hidden units of a model that leave its function unchanged.

    Attributes:
        layout: the parameters' places in θ.
        shapes: parameter -> its shape in blocks.
        groups: the units that may be permuted.
        fixed: a parameter whose units keep their places -> why, where neither the data nor the outputs nor
            their places in an image or a block give them their numbers.
    """

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[Group, ...]
    fixed: Mapping[str, str]

    @classmethod
    def of(cls, problem: MeanLoss) -> Symmetry:
        """The symmetry of a problem's model, tried on the model: see :func:`_tried`."""
        axes = {name: [leaves(axis) for axis in each] for name, each in traced(_wide(problem)).items()}
        flat = {name: [space for axis in each for space in axis] for name, each in axes.items()}
        shapes = {name: tuple(space.size for space in spaces) for name, spaces in flat.items()}
        spaces = dict.fromkeys(space for each in flat.values() for space in each)
        groups, fixed = [], dict[str, str]()
        for space in spaces:
            places = {
                name: tuple(k for k, other in enumerate(each) if other is space)
                for name, each in flat.items()
                if space in each
            }
            first = next(iter(places))
            if space.reason:
                if space.reason not in NATURAL:
                    fixed.setdefault(first, space.reason)
                continue
            groups.append(Group(first, space.size, places, space, _outer(space, flat, places)))
        return _tried(problem, cls(problem.layout, shapes, tuple(groups), fixed))

    def blocks(self, weights: Tensor) -> Blocks:
        """Parameter -> its part of ``weights`` (P,) in blocks."""
        views = self.layout.views(weights)
        return {name: views[name].reshape(shape) for name, shape in self.shapes.items()}

    def flat(self, blocks: Blocks) -> Tensor:
        """Weights (P,) from :meth:`blocks`."""
        return torch.cat([blocks[slot.name].flatten() for slot in self.layout.slots])

    @cached_property
    def inner(self) -> dict[Group, list[Group]]:
        """A group -> those that may be permuted in another way in each of its units."""
        return {g: [c for c in self.groups if c.outer and g.space is _outer_of(c.space)] for g in self.groups}


def _outer_of(space: Space) -> Space | None:
    found = space.outer.leaves() if space.outer is not None else ()
    return found[0] if len(found) == 1 and found[0] is not space else None


def _outer(
    space: Space, flat: Mapping[str, list[Space]], places: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """The place of the space in whose units this one repeats, if each parameter that has one has both."""
    outer = _outer_of(space)
    if outer is None or any(len(places[name]) > 1 or flat[name].count(outer) != 1 for name in places):
        return {}
    return {name: flat[name].index(outer) for name in places}


def _drawn(group: Group, blocks: Blocks, generator: torch.Generator) -> Tensor:
    """A random permutation for each block."""
    if not group.outer:
        return torch.randperm(group.size, generator=generator)
    name, place = next(iter(group.outer.items()))
    return torch.stack(
        [torch.randperm(group.size, generator=generator) for _ in range(blocks[name].shape[place])]
    )


def permuted(symmetry: Symmetry, weights: Tensor, seed: int) -> Tensor:
    """``weights`` (P,) with the units of every group permuted at random: other weights, the same function."""
    generator, blocks = torch.Generator().manual_seed(seed), symmetry.blocks(weights)
    for group in symmetry.groups:
        blocks |= group.permute(blocks, _drawn(group, blocks, generator).to(weights.device))
    return symmetry.flat(blocks)


def _tried(problem: MeanLoss, symmetry: Symmetry) -> Symmetry:
    """The symmetry without what changes the outputs when it is permuted at random.

    All groups at once, at weights at random; where that fails, each by itself: units of blocks are permuted
    alike in all blocks where they cannot be permuted in each.
    """
    few = problem.on(problem.data.few(TRIED))
    weights = moved(few)
    if change(few, weights, permuted(symmetry, weights, 0)) <= UNCHANGED:
        return symmetry
    kept, fixed = [], dict(symmetry.fixed)
    for group in symmetry.groups:
        for tried in dict.fromkeys((group, replace(group, outer={}) if group.outer else group)):
            alone = replace(symmetry, groups=(tried,))
            if change(few, weights, permuted(alone, weights, 0)) <= UNCHANGED:
                kept.append(tried)
                break
        else:
            fixed[group.name] = "its permutation changes the outputs"
    found = replace(symmetry, groups=tuple(kept), fixed=fixed)
    if change(few, weights, permuted(found, weights, 0)) > UNCHANGED:
        raise InputError(
            f"model: permutations of the units of {', '.join(g.name for g in kept)} each leave the outputs "
            "as they are, but not all together; use landscape.line, which takes the weights as they are"
        )
    return found


def _wide(problem: MeanLoss) -> MeanLoss:
    """The problem in the widest precision of its device. InputError for a model that does not run in it."""
    wide = problem.to(widest_dtype(problem.device))
    x, y = wide.data.leaves(*wide.data.first())
    try:
        with torch.no_grad(), wide.evaluating(0):
            wide.criterion(wide.outputs(wide.weights, x), y)
    except RuntimeError as error:  # PyTorch's error where dtypes do not fit
        words = " ".join(str(error).split())[:100]
        raise InputError(
            f"model: it does not run in {wide.dtype}, in which permutations of units are tried ({words}); "
            "let its forward pass follow the dtype of its weights, x.to(self.weight.dtype)"
        ) from error
    return wide


@torch.no_grad()
def change(problem: MeanLoss, first: Tensor, second: Tensor, samples: int = SAMPLES) -> float:
    """The largest difference of the loss, and of the outputs, at two weights, each relative to the largest.

    On up to ``samples`` samples, in the widest precision, with the statistics of BatchNorm of each.
    """
    count = min(samples, problem.samples)
    if problem.indexed and count < problem.samples:
        problem = problem.subset(slice(count))
    wide = _wide(problem).with_batchnorm("recalibrate", max(2, count))
    both = [(wide.at(w), w) for w in (first.to(wide.weights), second.to(wide.weights))]
    differences, sizes, done = [0.0, 0.0], [0.0, 0.0], 0.0  # of the loss, and of the outputs
    for x, y, weight, seed in wide.parts():
        values = []
        for at, w in both:
            with wide.evaluating(seed):
                outputs = at.outputs(w, x)
                values.append([wide.criterion(outputs, y), *seen(outputs)])
        for k, (p, q) in enumerate(zip(*values, strict=True)):
            differences[k] = max(differences[k], float((p - q).abs().nan_to_num(torch.inf).max()))
            sizes[k] = max(sizes[k], float(p.abs().max()))
        done += weight
        if done >= count:
            break
    return max(d / size if size else d for d, size in zip(differences, sizes, strict=True))


def matched(symmetry: Symmetry, a: Tensor, b: Tensor, seed: int) -> Tensor:
    """``b`` (P,) permuted as :func:`aligned` says."""
    wide = widest_dtype(a.device)
    fixed, blocks = symmetry.blocks(a.to(wide)), symmetry.blocks(b.to(wide))
    generator = torch.Generator().manual_seed(seed)
    better = True
    while better:
        better = False
        for k in torch.randperm(len(symmetry.groups), generator=generator).tolist():
            group = symmetry.groups[k]
            new = _improved(group, symmetry.inner[group], fixed, blocks)
            gain = sum(float(((t - blocks[name]) * fixed[name]).sum()) for name, t in new.items())
            scale = sum(float((t * fixed[name]).abs().sum()) for name, t in new.items())
            if gain > 1e-9 * scale:
                blocks |= new
                better = True
    return symmetry.flat(blocks).to(b)


def aligned(problem: MeanLoss, a: Tensor, b: Tensor, seed: int = 0) -> tuple[Tensor, Symmetry]:
    """``b`` (P,) with its hidden units permuted to be near ``a`` (P,), and what was permuted.

    Matching of weights by coordinate descent (Ainsworth et al. 2023, Algorithm 1): the permutation of one
    group at a time that maximizes ⟨a, b⟩ with the others held fixed, until none raises it. Units that repeat
    in blocks, such as the numbers of attention heads, are matched within each pair of blocks before these
    are. A step is taken only where ⟨a, b⟩ is larger after it.

    Raises:
        InputError: the aligned weights compute another function than ``b``.
    """
    symmetry = Symmetry.of(problem)
    found = matched(symmetry, a, b, seed)
    if (by := change(problem, b, found)) > UNCHANGED:
        names = ", ".join(group.name for group in symmetry.groups)
        raise InputError(
            f"b: permuting its units ({names}) changes the outputs by {by:.1g}, it must be at most "
            f"{UNCHANGED:g}; use landscape.line, which takes the weights as they are"
        )
    return found, symmetry


def _improved(group: Group, inner: list[Group], a: Blocks, b: Blocks) -> Blocks:
    """The blocks of ``b`` that have units of the group, with these matched to those of ``a``."""
    if group.outer:
        return group.permute(b, _assigned(_similar_within(group, a, b)))
    score = next(iter(a.values())).new_zeros(group.size, group.size)
    indices, own = dict[Group, Tensor](), {*group.places}
    for child in inner:
        names = own & {*child.places}
        own -= names
        if not names:
            continue
        pairs = _similar_across(child, names, a, b)
        indices[child] = _assigned(pairs.flatten(0, 1)).view(pairs.shape[:3])
        score = score + pairs.take_along_dim(indices[child][..., None], -1).sum((-1, -2))
    for name in own:
        for dim in group.places[name]:
            score = score + _rows(a[name], dim) @ _rows(b[name], dim).T
    index = _assigned(score[None])[0]
    new = b | group.permute(b, index)
    for child, each in indices.items():
        new |= child.permute(new, each[torch.arange(len(index), device=index.device), index])
    return {name: t for name, t in new.items() if t is not b[name]}


def _rows(tensor: Tensor, *dims: int) -> Tensor:
    """The tensor with these axes first, and the others as one."""
    return tensor.movedim(dims, tuple(range(len(dims))))[..., None].flatten(len(dims))


def _similar_within(group: Group, a: Blocks, b: Blocks) -> Tensor:
    """(blocks, size, size), the inner products of units of a with those of b in the same block."""
    return sum(
        _rows(a[name], place, dims[0]) @ _rows(b[name], place, dims[0]).mT
        for (name, dims), place in zip(group.places.items(), group.outer.values(), strict=True)
    )  # type: ignore[return-value]


def _similar_across(group: Group, names: set[str], a: Blocks, b: Blocks) -> Tensor:
    """(blocks, blocks, size, size), the same for all pairs of blocks, in some parameters."""
    dims = {name: (group.outer[name], group.places[name][0]) for name in names}
    return sum(
        torch.einsum("inr,jkr->ijnk", _rows(a[name], *d), _rows(b[name], *d)) for name, d in dims.items()
    )  # type: ignore[return-value]


def _assigned(scores: Tensor) -> Tensor:
    """(K, n), for each row of each of K tables (n, n) the column that makes the sum of all rows largest."""
    found = [linear_sum_assignment(table, maximize=True)[1] for table in scores.cpu().numpy()]
    return torch.stack([torch.from_numpy(columns) for columns in found]).to(scores.device)
