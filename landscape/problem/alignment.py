"""Weights whose hidden units are permuted so that they come as near to others as they can.

The function stays the same: the groups of units are found by :mod:`.symmetry` and tried on the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from landscape.core.devices import widest_dtype
from landscape.core.errors import InputError, first_words
from landscape.core.options import choose
from landscape.problem.batchnorm import SAMPLES
from landscape.problem.checks import moved
from landscape.problem.layout import FOLLOW, Layout
from landscape.problem.mean_loss import MeanLoss
from landscape.problem.symmetry import NATURAL, Place, Space, activations, seen, spaces, traced

# The largest relative change of outputs that counts as rounding (the issue's; in float64 it is far below).
UNCHANGED = 1e-5
# Samples on which groups are tried (our choice: statistics of BatchNorm need several).
TRIED = 32
# What a network's activations take at most, in bytes, and the share of a unit's activations by which they
# differ at least where it is not dead (our choice).
READ_BYTES, ALIVE = 2**28, 1e-6
Blocks = dict[str, Tensor]
BY = ("weights", "activations")


@dataclass(frozen=True, eq=False)
class Group:
    """Hidden units that may be permuted together.

    Attributes:
        name: the first parameter that has them.
        size: how many.
        axes: parameter or activation -> the axes, of its blocks, that run over them.
        space: what :mod:`.symmetry` found.
        outer: the same -> the axis of the blocks in each of which they may be permuted in another way, as
            the numbers of a head may in each head; empty where there is none.
    """

    name: str
    size: int
    axes: Mapping[str, tuple[int, ...]]
    space: Space
    outer: Mapping[str, int] = field(default_factory=dict)

    def permute(self, blocks: Blocks, index: Tensor) -> Blocks:
        """Those of the blocks that have these units, with unit ``index[i]`` in place i.

        ``index`` is (size,), or (blocks, size) with ``outer``.
        """
        new_blocks = {}
        for name in [name for name in self.axes if name in blocks]:
            tensor = blocks[name]
            for dim in self.axes[name]:
                if not self.outer:
                    tensor = tensor.index_select(dim, index)
                    continue
                shape, outer_dim = [1] * tensor.dim(), self.outer[name]
                shape[dim], shape[outer_dim] = index.shape[1], index.shape[0]
                tensor = tensor.take_along_dim((index if outer_dim < dim else index.T).reshape(shape), dim)
            new_blocks[name] = tensor
        return new_blocks


@dataclass(frozen=True)
class Symmetry:
    """The permutations of hidden units of a model that leave its function unchanged.

    Attributes:
        layout: the parameters' places in θ.
        shapes: parameter or activation -> its shape in blocks.
        groups: the units that may be permuted.
        fixed: a parameter whose units keep their places -> why, where neither the data nor the outputs nor
            their places in an image or a block give them their numbers.
        read: where activations are read; the text of a place is the name of its activation.
    """

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[Group, ...]
    fixed: Mapping[str, str]
    read: tuple[Place, ...] = ()

    @classmethod
    def of(cls, problem: MeanLoss) -> Symmetry:
        """The symmetry of a problem's model, tried on the model: see :func:`_tried`."""
        few = problem.on(problem.data.few(TRIED))
        trace = traced(_wide(few))
        flat = {name: spaces(axes) for name, axes in trace.parameters.items()}
        read = {str(activation): spaces(axes) for activation, axes in trace.activations.items()}
        every = (flat | read).items()
        shapes = {name: tuple(space.size for space in its_spaces) for name, its_spaces in every}
        groups, fixed = [], dict[str, str]()
        for space in dict.fromkeys(space for its_spaces in flat.values() for space in its_spaces):
            group = _group(space, flat, read)
            if not space.reason:
                groups.append(group)
            elif space.reason not in NATURAL:
                fixed.setdefault(group.name, space.reason)
        return _tried(few, cls(problem.layout, shapes, tuple(groups), fixed, tuple(trace.activations)))

    def blocks(self, weights: Tensor) -> Blocks:
        """Parameter -> its part of ``weights`` (P,) in blocks."""
        return {name: view.reshape(self.shapes[name]) for name, view in self.layout.views(weights).items()}

    def flat(self, blocks: Blocks) -> Tensor:
        """Weights (P,) from :meth:`blocks`."""
        return torch.cat([blocks[slot.name].flatten() for slot in self.layout.slots])

    def of_activations(self) -> Symmetry:
        """The same without units that no activation has, such as those between two factors of a matrix."""
        names = {*map(str, self.read)}
        lacking = {g.name: "no activation has them" for g in self.groups if names.isdisjoint(g.axes)}
        groups = tuple(g for g in self.groups if g.name not in lacking)
        return replace(self, groups=groups, fixed={**self.fixed, **lacking})

    @cached_property
    def inner(self) -> dict[Group, list[Group]]:
        """A group -> those that may be permuted in another way in each of its units."""
        return {g: [c for c in self.groups if c.outer and g.space is _outer_of(c.space)] for g in self.groups}


def _outer_of(space: Space) -> Space | None:
    outer_leaves = space.outer.leaves() if space.outer is not None else ()
    return outer_leaves[0] if len(outer_leaves) == 1 and outer_leaves[0] is not space else None


def _group(space: Space, parameters: Mapping[str, list[Space]], read: Mapping[str, list[Space]]) -> Group:
    """The units of a space, in parameters and activations.

    They may be permuted in another way in each unit of the space in which theirs repeats, if each parameter
    that has one has both; activations that have not are left out.
    """
    outer = _outer_of(space)

    def nested(block_axes: list[Space]) -> bool:
        return outer is not None and block_axes.count(space) == block_axes.count(outer) == 1

    owners = {name: its_axes for name, its_axes in parameters.items() if space in its_axes}
    apart = all(map(nested, owners.values()))
    owners |= {
        name: its_axes
        for name, its_axes in read.items()
        if space in its_axes and (nested(its_axes) or not apart)
    }
    dims = {name: tuple(k for k, s in enumerate(its_axes) if s is space) for name, its_axes in owners.items()}
    within = {name: its_axes.index(outer) for name, its_axes in owners.items()} if apart and outer else {}
    return Group(next(iter(owners)), space.size, dims, space, within)


def permuted(symmetry: Symmetry, weights: Tensor, seed: int) -> Tensor:
    """``weights`` (P,) with the units of every group permuted at random: other weights, the same function.

    Each unit moves, in one cycle: a permutation that is the identity by chance would try nothing. Of units in
    blocks those of the first stay, so that permutations which must be alike in all blocks show.
    """
    generator, blocks = torch.Generator().manual_seed(seed), symmetry.blocks(weights)
    for group in symmetry.groups:
        lead = [blocks[name].shape[dim] for name, dim in group.outer.items() if name == group.name]
        order = torch.rand(*lead, group.size, generator=generator).argsort(-1)
        index = order.scatter(-1, order, order.roll(1, -1))
        if lead:
            index[0] = torch.arange(group.size)
        blocks |= group.permute(blocks, index.to(weights.device))
    return symmetry.flat(blocks)


def _tried(few: MeanLoss, symmetry: Symmetry) -> Symmetry:
    """The symmetry without what changes the outputs when it is permuted at random.

    All groups at once, at weights at random; where that fails, each by itself: units of blocks are permuted
    alike in all blocks where they cannot be permuted in each.
    """
    weights = moved(few)

    def keeps(*groups: Group) -> bool:
        return change(few, weights, permuted(replace(symmetry, groups=groups), weights, 0)) <= UNCHANGED

    if keeps(*symmetry.groups):
        return symmetry
    accepted, fixed = list[Group](), dict(symmetry.fixed)
    for group in symmetry.groups:
        variants = (group, replace(group, outer={})) if group.outer else (group,)
        if variant := next(filter(keeps, variants), None):
            accepted.append(variant)
        else:
            fixed[group.name] = "its permutation changes the outputs"
    if not keeps(*accepted):
        raise InputError("model: each group of its units permutes, but not all together; use landscape.line")
    return replace(symmetry, groups=tuple(accepted), fixed=fixed)


def _wide(problem: MeanLoss) -> MeanLoss:
    """The problem in the widest precision of its device. InputError for a model that does not run in it."""
    wide = problem.to(widest_dtype(problem.device))
    x, y = wide.data.leaves(*wide.data.first())
    try:
        with torch.no_grad(), wide.evaluating(0):
            wide.criterion(wide.outputs(wide.weights, x), y)
    except RuntimeError as error:  # PyTorch's error where dtypes do not fit
        reason = first_words(error)
        raise InputError(f"model: it does not run in {wide.dtype} ({reason}); {FOLLOW}") from error
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
    pairs = [(wide.at(w), w) for w in (first.to(wide.weights), second.to(wide.weights))]
    differences, sizes, done = [0.0, 0.0], [0.0, 0.0], 0.0  # of the loss, and of the outputs
    for x, y, weight, seed in wide.parts():
        values = []
        for at, w in pairs:
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


def matched(symmetry: Symmetry, a: Tensor, b: Tensor, seed: int, read: Sequence[Blocks] = ()) -> Tensor:
    """``b`` (P,) permuted as :func:`aligned` says; ``read`` are activations of a and b."""
    wide = widest_dtype(a.device)
    goal, blocks = symmetry.blocks(a.to(wide)), symmetry.blocks(b.to(wide))
    if read:
        goal, blocks = read[0], blocks | read[1]
    generator, better = torch.Generator().manual_seed(seed), True
    while better:
        better = False
        for k in torch.randperm(len(symmetry.groups), generator=generator).tolist():
            group = symmetry.groups[k]
            new = _improved(group, symmetry.inner[group], goal, blocks)
            compared = [(t, blocks[name], goal[name]) for name, t in new.items() if name in goal]
            gain = sum(float(((t - before) * target).sum()) for t, before, target in compared)
            scale = sum(float((t * target).abs().sum()) for t, _, target in compared)
            if gain > 1e-9 * scale:
                blocks |= new
                better = True
    return symmetry.flat(blocks).to(b)


def aligned(
    problem: MeanLoss, a: Tensor, b: Tensor, by: str = "weights", seed: int = 0
) -> tuple[Tensor, Symmetry]:
    """``b`` (P,) with its hidden units permuted to be near ``a`` (P,), and what was permuted.

    Coordinate descent (Ainsworth et al. 2023, Algorithm 1): the permutation of one group at a time that
    maximizes ⟨a, b⟩ with the others held fixed, until none raises it. Units inside
    blocks, such as the components of an attention head, are matched for each pair of blocks first, then the
    blocks. A step is taken only where ⟨a, b⟩ is larger after it. With ``by="activations"``, a and b in ⟨a, b⟩
    are the standardized activations of both networks on the same samples in place of their weights, so that
    ⟨a, b⟩ is the sum of the correlations of units (Li et al. 2015, section 3).

    Raises:
        InputError: the aligned weights compute another function than ``b``.
    """
    choose("align", by, BY)
    symmetry = Symmetry.of(problem)
    activations: list[Blocks] = []
    if by == "activations":
        symmetry = symmetry.of_activations()
        activations = _activations(problem, symmetry, (a, b)) if symmetry.groups else []
    permuted = matched(symmetry, a, b, seed, activations)
    moved_by = change(problem, b, permuted)
    if not moved_by <= UNCHANGED:  # also NaN
        # NaN and infinite outputs differ from themselves.
        if not moved_by < float("inf") and change(problem, b, b) != 0:
            raise InputError("b: its outputs are NaN or infinite, they must be finite")
        names = ", ".join(group.name for group in symmetry.groups)
        raise InputError(f"b: permuting {names} changes the outputs by {moved_by:.1g}; use landscape.line")
    return permuted, symmetry


@torch.no_grad()
def _activations(problem: MeanLoss, symmetry: Symmetry, ends: Sequence[Tensor]) -> list[Blocks]:
    """The activations of networks (P,) on the same samples, each unit's with mean 0 and norm 1.

    On up to SAMPLES samples, drawn at random where they have numbers, as many as READ_BYTES hold; BatchNorm
    has statistics that are estimated at each network.
    """
    wide = _wide(problem).with_batchnorm("recalibrate")
    few = wide.data.few(TRIED)
    inputs = [next(few.chunks())[0]]
    if problem.indexed and not problem.data.mixes:
        numbers = sum(math.prod(activation.shape) for activation in symmetry.read)
        most = max(few.samples, READ_BYTES * few.samples // (numbers * wide.weights.itemsize))
        order = torch.randperm(problem.samples, generator=torch.Generator().manual_seed(0))
        parts = torch.split(order[: min(SAMPLES, most)], few.samples)
        inputs = [wide.gather(part)[0] for part in parts if len(part) == few.samples]
    blocks = []
    for w in ends:
        at, w = wide.at(w.to(wide.weights)), w.to(wide.weights)
        passes = [activations(at, w, x, symmetry.read) for x in inputs]
        names = map(str, symmetry.read)
        blocks.append({name: _standardized(symmetry, name, [row[name] for row in passes]) for name in names})
    return blocks


def _standardized(symmetry: Symmetry, name: str, parts: Sequence[Tensor]) -> Tensor:
    """The blocks of an activation, with all parts along the last axis; each unit with mean 0 and norm 1."""
    blocks = torch.stack([part.reshape(symmetry.shapes[name]) for part in parts], -1)
    units = {dim for group in symmetry.groups for dim in group.axes.get(name, ())}
    over = [dim for dim in range(blocks.dim()) if dim not in units]
    centered = blocks - blocks.mean(over, keepdim=True)
    size, whole = (torch.linalg.vector_norm(t, dim=over, keepdim=True) for t in (centered, blocks))
    return torch.where(size > ALIVE * whole, centered / size, 0.0)


def _improved(group: Group, inner: list[Group], a: Blocks, b: Blocks) -> Blocks:
    """The blocks of ``b`` that have units of the group, with these matched to those of ``a``."""
    own_names = [name for name in group.axes if name in a]
    if group.outer:
        return group.permute(b, _assigned(_similar(group, own_names, a, b, "inr,ikr->ink")))
    score = next(iter(a.values())).new_zeros(group.size, group.size)
    indices = dict[Group, Tensor]()
    for child in inner:
        names = [name for name in own_names if name in child.axes]
        own_names = [name for name in own_names if name not in names]
        if not names:
            continue
        pairs = _similar(child, names, a, b, "inr,jkr->ijnk")
        indices[child] = _assigned(pairs.flatten(0, 1)).view(pairs.shape[:3])
        score = score + pairs.take_along_dim(indices[child][..., None], -1).sum((-1, -2))
    for name in own_names:
        for dim in group.axes[name]:
            score = score + _rows(a[name], dim) @ _rows(b[name], dim).T
    index = _assigned(score[None])[0]
    new = b | group.permute(b, index)
    for child, permutations in indices.items():
        new |= child.permute(new, permutations[torch.arange(len(index), device=index.device), index])
    return {name: t for name, t in new.items() if t is not b[name]}


def _rows(tensor: Tensor, *dims: int) -> Tensor:
    """The tensor with these axes first, and the others as one."""
    return tensor.movedim(dims, tuple(range(len(dims))))[..., None].flatten(len(dims))


def _similar(group: Group, names: Sequence[str], a: Blocks, b: Blocks, pairs: str) -> Tensor:
    """The inner products of the units of a and b in some blocks, as the equation says for which pairs."""
    dims = {name: (group.outer[name], group.axes[name][0]) for name in names}
    tables = [torch.einsum(pairs, _rows(a[name], *d), _rows(b[name], *d)) for name, d in dims.items()]
    return torch.stack(tables).sum(0)


def _assigned(scores: Tensor) -> Tensor:
    """(K, n), for each row of each of K tables (n, n) the column that makes the sum of all rows largest."""
    columns_of_tables = [linear_sum_assignment(table, maximize=True)[1] for table in scores.cpu().numpy()]
    return torch.stack([torch.from_numpy(columns) for columns in columns_of_tables]).to(scores.device)
